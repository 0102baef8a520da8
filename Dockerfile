# syntax=docker/dockerfile:1
# docker build -t sparsefinder .                 the GPU image (the last stage is the default)
# docker build --target cpu -t sparsefinder:cpu --build-arg EXTRA_INDEX_URL=<index of CPU builds of torch> .
# The default index gives torch with CUDA everywhere; for a small CPU image name an index that has CPU builds.

FROM python:3.11-slim-bookworm AS base
# libgomp1: numba's OpenMP threads; without it numba falls to a slower layer that needs a lock.
RUN apt-get update \
    && apt-get install -y --no-install-recommends libgomp1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 sparsefinder
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    XDG_CACHE_HOME=/var/cache/sparsefinder \
    NUMBA_CACHE_DIR=/var/cache/sparsefinder/numba \
    HF_HOME=/var/cache/sparsefinder/hub \
    SPARSEFINDER_HOST=0.0.0.0 \
    SPARSEFINDER_PORT=8000
RUN install -d -o sparsefinder -g sparsefinder \
    /var/cache/sparsefinder /var/cache/sparsefinder/numba /var/cache/sparsefinder/hub

FROM base AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY sparsefinder sparsefinder
COPY training training
COPY app app
COPY artifacts artifacts
RUN pip wheel --no-cache-dir --no-deps -w /dist .

FROM base AS cpu-env
ARG EXTRA_INDEX_URL=""
WORKDIR /dist
COPY constraints.txt ./
COPY --from=wheel /dist ./
RUN python -m venv /opt/venv \
    && wheel="$(ls sparsefinder-*.whl)" \
    && pip install --no-cache-dir ${EXTRA_INDEX_URL:+--extra-index-url "$EXTRA_INDEX_URL"} \
        -c constraints.txt "./${wheel}[cpu,teacher]"

FROM base AS gpu-env
ARG EXTRA_INDEX_URL=""
WORKDIR /dist
COPY constraints.txt ./
COPY --from=wheel /dist ./
RUN python -m venv /opt/venv \
    && wheel="$(ls sparsefinder-*.whl)" \
    && pip install --no-cache-dir ${EXTRA_INDEX_URL:+--extra-index-url "$EXTRA_INDEX_URL"} \
        -c constraints.txt "./${wheel}[gpu,teacher]"

FROM base AS serve
WORKDIR /home/sparsefinder
USER 10001
EXPOSE 8000
HEALTHCHECK --interval=15s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as u; u.urlopen('http://127.0.0.1:' + os.environ['SPARSEFINDER_PORT'] + '/livez', timeout=4)"]
CMD ["sparsefinder-serve"]

FROM serve AS cpu
COPY --from=cpu-env /opt/venv /opt/venv

FROM serve AS gpu
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=gpu-env /opt/venv /opt/venv
# Triton compiles a small launcher when a kernel is first used.
USER 0
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
USER 10001
