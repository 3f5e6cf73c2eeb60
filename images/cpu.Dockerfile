# Everything on CPUs: to try the chart without GPUs (helm/ci/cpu-demo-values.yaml).
#   docker build -f images/cpu.Dockerfile -t prelude-cpu:0.1.0 --build-arg TORCH_INDEX=URL-OF-AN-INDEX-OF-CPU-BUILDS .
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm
# hadolint ignore=DL3006
FROM ${PYTHON_IMAGE} AS build
ARG TORCH_INDEX=
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends binutils libnuma1 \
 && rm -rf /var/lib/apt/lists/* \
 && python -m venv --without-pip /opt/python
ENV PATH=/opt/python/bin:$PATH

WORKDIR /opt/prelude
COPY requirements/build.txt requirements/torch.txt requirements/cpu.txt requirements/
# As in router.Dockerfile; and without what is for GPUs only, of Triton and NIXL, and without torch's own tests.
RUN pip --python /opt/python/bin/python install --no-cache-dir --no-compile ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} -r requirements/torch.txt \
 && pip --python /opt/python/bin/python install --no-cache-dir --no-compile --no-deps -r requirements/build.txt -r requirements/cpu.txt \
 && rm -r /opt/python/lib/python3*/site-packages/triton/backends/*/lib /opt/python/lib/python3*/site-packages/triton/backends/nvidia/bin \
 && rm -r /opt/python/lib/python3*/site-packages/nixl_ep_cu13 /opt/python/lib/python3*/site-packages/torch/test \
 && find /opt/python/lib/python3*/site-packages/botocore/data/* -maxdepth 0 -type d -not -name s3 -not -name sts -not -name 'sso*' -exec rm -r {} + \
 && find /opt/python -name '*.so*' -type f -not -path '*.libs/*' -exec strip --strip-unneeded {} +
COPY . .
RUN pip --python /opt/python/bin/python install --no-cache-dir --no-compile --no-deps --no-build-isolation --editable . \
 && python images/check_environment.py cpu router s3 tracing train trainer \
 && python -m compileall -q . >/dev/null \
 && pip --python /opt/python/bin/python uninstall --yes setuptools

# hadolint ignore=DL3006
FROM ${PYTHON_IMAGE}
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Prelude on CPUs" \
      org.opencontainers.image.description="Serve one language model with thousands of adapters: all processes, for CPUs" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends tini libnuma1 \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --user-group --no-create-home --home-dir /tmp --shell /usr/sbin/nologin prelude \
 && install -d -o prelude -g prelude /etc/prelude/.prelude /var/cache/prelude
COPY --from=build /opt /opt

ENV PATH=/opt/python/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp PRELUDE_HEALTH_URL=http://127.0.0.1:8001/health
USER 10001:10001
WORKDIR /etc/prelude
EXPOSE 8000 8001
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s CMD ["python", "/opt/prelude/images/healthcheck.py"]
ENTRYPOINT ["tini", "--", "prelude"]
CMD ["router", "--config", "/etc/prelude/cluster.yaml"]
