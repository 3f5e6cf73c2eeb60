# The router and the command line, without torch and SGLang.
#   docker build -f images/router.Dockerfile -t prelude-router:0.1.0 .
# By digest where builds must repeat: --build-arg PYTHON_IMAGE=python@sha256:…
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm
# hadolint ignore=DL3006
FROM ${PYTHON_IMAGE} AS build
# Debian keeps no earlier releases of a package, so a pinned one would not install for long.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends binutils tini \
 && rm -rf /var/lib/apt/lists/* \
 && python -m venv --without-pip /opt/python
ENV PATH=/opt/python/bin:$PATH

WORKDIR /opt/prelude
COPY requirements/build.txt requirements/router.txt requirements/
# Then without debug symbols (strip breaks the libraries in `.libs`, which auditwheel has rewritten), and without the 400
# services of Amazon that no store asks.
RUN pip --python /opt/python/bin/python install --no-cache-dir --no-compile --no-deps -r requirements/build.txt -r requirements/router.txt \
 && find /opt/python/lib/python3*/site-packages/botocore/data/* -maxdepth 0 -type d -not -name s3 -not -name sts -not -name 'sso*' -exec rm -r {} + \
 && find /opt/python -name '*.so*' -type f -not -path '*.libs/*' -exec strip --strip-unneeded {} +
COPY . .
# The check imports what a router does, which leaves the byte code of that and of nothing else.
RUN pip --python /opt/python/bin/python install --no-cache-dir --no-compile --no-deps --no-build-isolation --editable . \
 && python images/check_environment.py router s3 tracing \
 && python -m compileall -q . >/dev/null \
 && pip --python /opt/python/bin/python uninstall --yes setuptools

# hadolint ignore=DL3006
FROM ${PYTHON_IMAGE}
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Prelude router" \
      org.opencontainers.image.description="Serve one large language model with thousands of adapters: router and commands" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /tmp --shell /usr/sbin/nologin prelude
COPY --from=build /usr/bin/tini /usr/bin/
COPY --from=build /opt /opt

ENV PATH=/opt/python/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp PRELUDE_HEALTH_URL=http://127.0.0.1:8001/health
USER 10001:10001
WORKDIR /etc/prelude
EXPOSE 8000 8001
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s CMD ["python", "/opt/prelude/images/healthcheck.py"]
ENTRYPOINT ["tini", "--", "prelude"]
CMD ["router", "--config", "/etc/prelude/cluster.yaml"]
