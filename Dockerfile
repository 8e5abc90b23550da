# SPDX-License-Identifier: Apache-2.0
# An official vLLM image with this project's series applied. `make image-cu130` and `make image-sm86` build it with all
# arguments (tools/images.py); RELEASE and VARIANT alone do, as compose gives them, and leave labels empty.
#
# Nothing is fetched but the base, and layers stand in the order in which their causes change: a new patch rebuilds the
# last ones alone. There is no `# syntax=` line, which would need a pull of its own.
ARG RELEASE=v0.26.0
ARG VARIANT=cu130
# Another base than the official one, or that one by its digest.
ARG BASE=""

# As patches/releases.toml has them; a test compares. The builder pulls the one that is asked for.
FROM vllm/vllm-openai:v0.17.1-cu130 AS official-v0.17.1-cu130
FROM vllm/vllm-openai:v0.17.1 AS official-v0.17.1-sm86
FROM vllm/vllm-openai:v0.18.0-cu130 AS official-v0.18.0-cu130
FROM vllm/vllm-openai:v0.18.0 AS official-v0.18.0-sm86
FROM vllm/vllm-openai:v0.26.0 AS official-v0.26.0-cu130
FROM vllm/vllm-openai:v0.26.0-cu129 AS official-v0.26.0-sm86
FROM vllm/vllm-openai:v0.32.0-cu129 AS official-v0.32.0-sm86

# hadolint ignore=DL3006
FROM ${BASE:-official-${RELEASE}-${VARIANT}} AS base
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

FROM base AS variant-sm86
# CUDA 12.9 asks for its own driver, though 12.0's runs code that was compiled for the card: no PTX, so nothing newer.
# On GeForce the compatibility libraries only break things (errors 803 and 804), and the toolkit may put them first.
ARG REQUIRE="cuda>=12.0 driver>=525.60.13"
ENV NVIDIA_REQUIRE_CUDA="${REQUIRE}" \
    TORCH_CUDA_ARCH_LIST=8.6
RUN rm -rf /usr/local/cuda/compat /usr/local/cuda-*/compat && ldconfig

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
