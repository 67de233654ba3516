# plpkg serve with the two published models inside: it starts without a network. docs/container.md says how to run it.
ARG PYTHON_IMAGE=python:3.11-slim

FROM ${PYTHON_IMAGE} AS builder
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PATH=/opt/plpkg/bin:$PATH \
    PLPKG_CACHE=/opt/plpkg-cache
WORKDIR /src
COPY constraints.txt ./
# From the index for CPUs torch alone: what it needs comes with the rest, in the versions of constraints.txt.
RUN python3 -m venv /opt/plpkg \
    && pip install --no-cache-dir --no-deps --index-url "$TORCH_INDEX" "$(grep '^torch==' constraints.txt)"
COPY LICENSE NOTICE README.md pyproject.toml ./
COPY data data
COPY plpkg plpkg
RUN pip install --no-cache-dir -c constraints.txt '.[serve]'
# plpkg fetch downloads with pip, which nothing needs afterwards, nor torch's tests and headers. plpkg ask keeps vectors
# of notes in the cache. Weights are written for their owner alone, and another user reads them here.
RUN plpkg fetch \
    && ln -s /tmp "$PLPKG_CACHE/vectors" \
    && ln -s "$(python -P -c 'from plpkg import catalog; print(catalog.data_path())')" /opt/plpkg/data \
    && pip uninstall --yes pip setuptools \
    && rm -rf /opt/plpkg/lib/python3.*/site-packages/torch/include /opt/plpkg/lib/python3.*/site-packages/torch/test \
    && chmod --recursive a+rX "$PLPKG_CACHE" /opt/plpkg

FROM ${PYTHON_IMAGE}
ARG VERSION=1.0.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="plpkg" \
      org.opencontainers.image.description="plpkg serve on CPUs, with SmolLM2-135M-Instruct and all-MiniLM-L6-v2" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN groupadd --gid 10001 plpkg \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin plpkg \
    && install --directory --owner=10001 --group=10001 --mode=0700 /store
COPY --from=builder /opt/plpkg-cache /opt/plpkg-cache
COPY --from=builder /opt/plpkg /opt/plpkg
# Libraries keep their caches below HOME. Without the file of keys the service refuses to listen beyond this machine.
ENV PATH=/opt/plpkg/bin:$PATH \
    PLPKG_CACHE=/opt/plpkg-cache \
    PLPKG_KEYS=/run/secrets/keys \
    HOME=/tmp \
    HF_HUB_OFFLINE=1 \
    PYTHONDONTWRITEBYTECODE=1
# Here data/ is the package's, so that paths of the tour are right.
WORKDIR /opt/plpkg
USER 10001:10001
VOLUME /store
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=10s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import http.client, sys; c = http.client.HTTPConnection('127.0.0.1', 8000, timeout=8); c.request('GET', '/health'); sys.exit(c.getresponse().status != 200)"]
ENTRYPOINT ["plpkg"]
# docker stop kills after 10 seconds: the service ends before, and Python needs a second after it.
CMD ["serve", "--model", "smollm2", "--store", "/store", "--listen", "0.0.0.0:8000", "--grace", "7"]
