# SPDX-License-Identifier: Apache-2.0
# An official vLLM image with this project's series applied. `make image-cu130` and `make image-sm86` build it with all
# arguments (tools/images.py); RELEASE and VARIANT alone do, as compose gives them, and leave labels empty.
#
# Nothing is fetched but the base, and layers stand in the order in which their causes change: a new patch rebuilds the
# last ones alone. There is no `# syntax=` line, which would need a pull of its own.
ARG RELEASE=v0.33.0
ARG VARIANT=cu130
# Another base than the official one, or that one by its digest.
ARG BASE=""
# What the variant `slim` is built up from.
ARG SLIM_BASE=python:3.12-slim-bookworm

# As patches/releases.toml has them; a test compares. The builder pulls the one that is asked for.
FROM vllm/vllm-openai:v0.17.1-cu130 AS base-v0.17.1-cu130
FROM vllm/vllm-openai:v0.17.1 AS base-v0.17.1-sm86
FROM vllm/vllm-openai:v0.18.0-cu130 AS base-v0.18.0-cu130
FROM vllm/vllm-openai:v0.18.0 AS base-v0.18.0-sm86
FROM vllm/vllm-openai:v0.26.0 AS base-v0.26.0-cu130
FROM vllm/vllm-openai:v0.26.0-cu129 AS base-v0.26.0-sm86
FROM vllm/vllm-openai:v0.32.0-cu129 AS base-v0.32.0-sm86
FROM vllm/vllm-openai:v0.33.0 AS base-v0.33.0-cu130
FROM vllm/vllm-openai:v0.33.0 AS base-v0.33.0-sm86

# A child cannot shrink its parent, so `slim` has another one: a Python and the release's wheel, every package by its
# hash (docker/slim/TAG.txt), less what its GPUs, those before Hopper, can't load. It has no CUDA toolkit, and so nothing
# of FlashInfer, which compiles on first use: cards that vLLM gives it to (MoE on an RTX 50, say) have no slim image.
# Hosts with a package index or a CA of their own: --secret id=pip,src=pip.conf --secret id=ca,src=bundle.pem
FROM ${SLIM_BASE} AS slim
ARG RELEASE
# hadolint ignore=DL3002
USER 0:0
# Triton compiles a little C around each kernel when it first runs.
RUN command -v gcc >/dev/null || { \
        apt-get update -q \
        && apt-get install -y -q --no-install-recommends gcc libc6-dev \
        && rm -rf /var/lib/apt/lists/*; }
# One layer, since a later one would hide files and not remove them. Bytecode is checked by its source's hash, as
# install.py's is, and so it is the same in every build; a few packages hold files that no Python 3.12 can compile.
RUN --mount=type=bind,source=docker/slim,target=/tmp/slim \
    --mount=type=bind,source=docker/arch.py,target=/tmp/arch.py \
    --mount=type=secret,id=pip \
    --mount=type=secret,id=ca \
    export PYTHONDONTWRITEBYTECODE=1 PYTHONHASHSEED=0 \
    && if [ -f /run/secrets/pip ]; then export PIP_CONFIG_FILE=/run/secrets/pip; fi \
    && if [ -f /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi \
    && python3 -m pip install --root-user-action=ignore --disable-pip-version-check --progress-bar=off --no-compile \
        --no-cache-dir --no-deps --require-hashes --only-binary=:all: -r "/tmp/slim/${RELEASE}.txt" \
    && python3 -m pip check \
    && python3 /tmp/slim/prune.py \
    && { python3 -m compileall -q -q -j 0 --invalidation-mode checked-hash "$(python3 -c \
        'import sysconfig; print(sysconfig.get_path("purelib"))')" || true; }
# The driver finds its way in by these, as NVIDIA's own images have them.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

# The wheels on PyPI are each built for one CUDA; this one's libraries are 13.0's (driver R580).
FROM slim AS base-v0.26.0-slim
ENV NVIDIA_REQUIRE_CUDA="cuda>=13.0"

# hadolint ignore=DL3006
FROM ${BASE:-base-${RELEASE}-${VARIANT}} AS base
# Some bases have another one; the image ends as 2000:0.
# hadolint ignore=DL3002,DL3066
USER 0:0
# The user of the newer official images (2000:0), for those that have none. Files made by any user of group 0 can be
# written by the next, which platforms that choose the user's number need.
RUN { getent passwd 2000 || useradd --uid 2000 --gid 0 --create-home --home-dir /home/vllm --shell /bin/bash vllm; } \
    && install -d -o 2000 -g 0 -m 2775 /cache
# Every cache that vLLM and its parts keep is on one volume: models, compiled graphs and kernels, the driver's PTX.
ENV HOME=/home/vllm \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface \
    VLLM_CACHE_ROOT=/cache/vllm \
    TRITON_CACHE_DIR=/cache/triton \
    FLASHINFER_WORKSPACE_BASE=/cache/flashinfer \
    CUDA_CACHE_PATH=/cache/nv \
    VLLM_ENABLE_CUDA_COMPATIBILITY=0 \
    EXPERT_OFFLOAD_FATAL_EXIT=0

FROM base AS variant-cu130
# The base's list may name architectures that its own compiler refuses (7.0 with CUDA 13).
ENV TORCH_CUDA_ARCH_LIST="8.0 8.6 8.9 9.0 10.0 12.0"

# CUDA 12.9 asks for its own driver, though 12.0's runs code that was compiled for the card: no PTX, so nothing newer.
FROM base AS cuda12
ENV NVIDIA_REQUIRE_CUDA="cuda>=12.0 driver>=525.60.13"
FROM cuda12 AS sm86-v0.17.1
FROM cuda12 AS sm86-v0.18.0
FROM cuda12 AS sm86-v0.26.0
FROM cuda12 AS sm86-v0.32.0
# From here on there are bases of CUDA 13 alone. They let data centre cards with an older driver pass, by way of the
# compatibility libraries that go below.
FROM base AS sm86-v0.33.0
ENV NVIDIA_REQUIRE_CUDA="cuda>=13.0"

# hadolint ignore=DL3006
FROM sm86-${RELEASE} AS variant-sm86
# On GeForce the compatibility libraries only break things (errors 803 and 804), and the toolkit may put them first.
ENV TORCH_CUDA_ARCH_LIST=8.6
RUN rm -rf /usr/local/cuda/compat /usr/local/cuda-*/compat && ldconfig

FROM base AS variant-slim
# The doctor refuses newer GPUs: their kernels were taken out. FlashInfer's sampler would be compiled.
ENV TORCH_CUDA_ARCH_LIST="8.0 8.6 8.9" \
    VLLM_OFFLOAD_ARCHS="8.0 8.6 8.9" \
    VLLM_USE_FLASHINFER_SAMPLER=0

# hadolint ignore=DL3006
FROM variant-${VARIANT} AS image
ARG VARIANT
# Does the code inside fit the variant's GPUs? What an image or wheel is called is no answer.
RUN --mount=type=bind,source=docker/arch.py,target=/tmp/arch.py python3 -B /tmp/arch.py "${VARIANT}"

COPY --link --chmod=755 docker/entrypoint.sh /usr/local/bin/vllm-offload-entrypoint
COPY --link LICENSE NOTICE /usr/share/doc/vllm-offload/
VOLUME /cache
EXPOSE 8000
WORKDIR /vllm-workspace
ENTRYPOINT ["/usr/local/bin/vllm-offload-entrypoint"]
CMD []

# From here on, what a change of the series rebuilds. The tool stays in the image: `status` and `revert` work there.
ARG RELEASE
ARG SERIES=""
COPY --link vllm_offload.py docker/install.py /opt/vllm-offload/
COPY --link patches/releases.toml /opt/vllm-offload/patches/
COPY --link patches/${RELEASE} /opt/vllm-offload/patches/${RELEASE}
COPY --link vllm/expert_offload /opt/vllm-offload/vllm/expert_offload
RUN python3 -B /opt/vllm-offload/install.py --release "${RELEASE}" --series "${SERIES}"

ARG BASE_NAME=""
ARG BASE_DIGEST=""
ARG IMAGE_VERSION=""
ARG REVISION=""
ARG SOURCE=""
# The entrypoint puts these over what the base says of its own build, where it says anything.
ENV EXPERT_OFFLOAD_IMAGE="vllm-offload:${RELEASE}-${VARIANT}" \
    EXPERT_OFFLOAD_SOURCE="${SOURCE}"
# All that vLLM's image says of itself is said anew: this is another image, and not theirs.
LABEL org.opencontainers.image.title="vllm-offload" \
      org.opencontainers.image.description="vLLM ${RELEASE} with the vllm-offload patch series; not an official vLLM image" \
      org.opencontainers.image.version="${IMAGE_VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.url="${SOURCE}" \
      org.opencontainers.image.documentation="${SOURCE}" \
      org.opencontainers.image.vendor="the vllm-offload authors" \
      org.opencontainers.image.authors="the vllm-offload authors" \
      org.opencontainers.image.created="" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="${BASE_NAME}" \
      org.opencontainers.image.base.digest="${BASE_DIGEST}" \
      vllm-offload.release="${RELEASE}" \
      vllm-offload.variant="${VARIANT}" \
      vllm-offload.series="${SERIES}"
USER 2000:0
