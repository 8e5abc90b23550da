#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# What a container of this image runs:
#
#   serve [MODEL] [flags], MODEL [flags], flags, nothing   vllm serve, after the fatal checks of the doctor
#   doctor [flags]                                         the doctor, all of it
#   a program that is there (bash, python3, vllm, ...)     as given
#
# Settings: EXPERT_OFFLOAD_MOE_BACKEND   --moe-backend, where the command has none ("" leaves it to vLLM)
#           EXPERT_OFFLOAD_DOCTOR=0      serve without the checks
#           EXPERT_OFFLOAD_FATAL_EXIT    exit status when a check says that serving can't work. The image sets 0: Docker's
#                                        `on-failure` restarts on every other one, and a wrong setting stays wrong.
#                                        Elsewhere set 78 (EX_CONFIG), say, and do not restart on it.
# `exec` everywhere: vLLM is process 1 and gets the signals itself.
set -euo pipefail

# The release reports these in its logs; what the base says there is true of another image.
if [ -n "${VLLM_IMAGE_TAG+set}" ]; then
  export VLLM_IMAGE_TAG="${EXPERT_OFFLOAD_IMAGE:-vllm-offload}" VLLM_BUILD_PIPELINE=vllm-offload \
    VLLM_BUILD_URL="${EXPERT_OFFLOAD_SOURCE:-}"
fi

doctor_is_there() {  # looks for the file: importing vLLM for the answer takes seconds
  python3 - <<'PY'
import importlib.util, pathlib, sys
spec = importlib.util.find_spec("vllm")
found = spec and spec.origin and (pathlib.Path(spec.origin).parent / "expert_offload/doctor/__main__.py").is_file()
sys.exit(not found)
PY
}

serve() {
  local argument given=
  for argument in "$@"; do
    case $argument in --moe-backend | --moe-backend=* | --moe_backend | --moe_backend=*) given=1 ;; esac
  done
  if [ -z "$given" ] && [ -n "${EXPERT_OFFLOAD_MOE_BACKEND:-}" ]; then
    set -- "$@" --moe-backend "$EXPERT_OFFLOAD_MOE_BACKEND"
  fi
  if [ "${EXPERT_OFFLOAD_DOCTOR:-1}" != 0 ] && doctor_is_there; then
    local status=0
    python3 -m vllm.expert_offload.doctor --fatal -- "$@" || status=$?
    if [ "$status" = 1 ]; then
      echo "entrypoint: not serving: mend what the lines above name, then start again" >&2
      exit "${EXPERT_OFFLOAD_FATAL_EXIT:-78}"
    elif [ "$status" != 0 ]; then
      echo "entrypoint: the doctor itself ended with status $status; serving all the same" >&2
    fi
  fi
  exec vllm serve "$@"
}

case ${1:-} in
  serve) shift; serve "$@" ;;
  doctor)
    shift
    doctor_is_there || { echo "entrypoint: this image's series has no doctor: build it from a newer checkout" >&2; exit 1; }
    exec python3 -m vllm.expert_offload.doctor "$@"
    ;;
  '' | -*) serve "$@" ;;
  *)
    # A model's name is no program's, though it may be a folder's.
    if [ -n "$(type -P -- "$1")" ] && [ ! -d "$1" ]; then exec "$@"; fi
    serve "$@"
    ;;
esac
