#!/usr/bin/env bash
# Record a training on one machine: deploy/torchrun.sh RANKS SCRIPT [ARGUMENT ...]
set -euo pipefail
[ $# -ge 2 ] || { echo "usage: $0 RANKS SCRIPT [ARGUMENT ...]" >&2; exit 2; }

export RECORDER=1
export RECORDER_DIR=${RECORDER_DIR:-recordings}

exec torchrun --standalone --nproc-per-node "$1" "${@:2}"
