# Workers on GPUs, on SGLang's own image of the pinned release.
#   docker build -f images/worker.Dockerfile -t prelude-worker:0.1.0 .
# By digest where builds must repeat: --build-arg SGLANG_IMAGE=lmsysorg/sglang@sha256:…
ARG SGLANG_IMAGE=lmsysorg/sglang:v0.5.23
# hadolint ignore=DL3006
FROM ${SGLANG_IMAGE}

ARG REVISION=unknown
LABEL org.opencontainers.image.title="Prelude worker" \
      org.opencontainers.image.description="Serve one large language model with thousands of adapters: agent and engine" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"

# Debian and Ubuntu mark their own Python as managed by apt. This one is the image's.
ARG PIP_BREAK_SYSTEM_PACKAGES=1
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# Ubuntu keeps no earlier releases of a package, so a pinned one would not install for long.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends tini \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --user-group --no-create-home --home-dir /tmp --shell /usr/sbin/nologin prelude \
 && install -d -o prelude -g prelude /etc/prelude/.prelude /var/cache/prelude

WORKDIR /opt/prelude
COPY requirements/build.txt requirements/worker.txt requirements/
RUN python3 -m pip install --no-cache-dir --no-deps -r requirements/build.txt -r requirements/worker.txt
COPY . .
RUN python3 -m pip install --no-cache-dir --no-deps --no-build-isolation --editable . \
 && python3 images/check_environment.py gpu router s3 tracing train trainer \
 && python3 -m compileall -q . >/dev/null

ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp PRELUDE_HEALTH_URL=http://127.0.0.1:9001/health
USER 10001:10001
WORKDIR /etc/prelude
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s CMD ["python3", "/opt/prelude/images/healthcheck.py"]
ENTRYPOINT ["tini", "--", "prelude"]
CMD ["unified-worker", "--help"]
