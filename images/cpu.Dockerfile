# Everything on CPUs: to try the chart without GPUs (helm/ci/cpu-demo-values.yaml).
#   docker build -f images/cpu.Dockerfile -t prelude-cpu:0.1.0 --build-arg TORCH_INDEX=URL-OF-AN-INDEX-OF-CPU-BUILDS .
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm
# hadolint ignore=DL3006
FROM ${PYTHON_IMAGE}

ARG REVISION=unknown
ARG TORCH_INDEX=
LABEL org.opencontainers.image.title="Prelude on CPUs" \
      org.opencontainers.image.description="Serve one language model with thousands of adapters: all processes, for CPUs" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"

# Debian and Ubuntu mark their own Python as managed by apt. This one is the image's.
ARG PIP_BREAK_SYSTEM_PACKAGES=1
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends tini gcc g++ libnuma1 libsndfile1 \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --user-group --no-create-home --home-dir /tmp --shell /usr/sbin/nologin prelude \
 && install -d -o prelude -g prelude /etc/prelude/.prelude /var/cache/prelude

WORKDIR /opt/prelude
COPY requirements/build.txt requirements/torch.txt requirements/cpu.txt requirements/
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} -r requirements/torch.txt \
 && pip install --no-cache-dir --no-deps -r requirements/build.txt -r requirements/cpu.txt
COPY . .
RUN pip install --no-cache-dir --no-deps --no-build-isolation --editable . \
 && python images/check_environment.py cpu router s3 tracing \
 && python -m compileall -q . >/dev/null

ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp PRELUDE_HEALTH_URL=http://127.0.0.1:8001/health
USER 10001:10001
WORKDIR /etc/prelude
EXPOSE 8000 8001
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s CMD ["python", "/opt/prelude/images/healthcheck.py"]
ENTRYPOINT ["tini", "--", "prelude"]
CMD ["router", "--config", "/etc/prelude/cluster.yaml"]
