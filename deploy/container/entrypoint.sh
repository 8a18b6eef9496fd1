#!/usr/bin/env bash
# What a pod runs: entrypoint.sh train SCRIPT [ARGUMENT ...], or entrypoint.sh merge [RUN ...]
#
# train starts torchrun, which takes the number of nodes, this node's rank and the rest from the PET_ variables that
# Kubeflow sets, or a manifest. merge checks and merges the runs of a finished job, by default all in RECORDER_DIR.
# Exit codes: those of torchrun; of merge 0: all is there, 1: the output says what is not; 2: a value is wrong.
set -euo pipefail

fail() { echo "recorder-entrypoint: $*" >&2; exit 2; }

for word in "$@"; do
  case $word in *SET_ME*) fail "the argument '$word' is still SET_ME: give it a value in the manifest" ;; esac
done
while IFS= read -r name; do
  case ${!name} in *SET_ME*) fail "$name is still '${!name}': give it a value in the manifest" ;; esac
done < <(compgen -e)
: "${RECORDER_DIR:=/recordings}"
[ -d "$RECORDER_DIR" ] || fail "RECORDER_DIR '$RECORDER_DIR' is no folder: is the volume mounted?"
[ -w "$RECORDER_DIR" ] || fail "user $(id -u) may not write to RECORDER_DIR '$RECORDER_DIR': see fsGroup, or the volume's owner"
export RECORDER_DIR RECORDER=${RECORDER-1}

case ${1-} in
  train)
    [ $# -ge 2 ] || fail "usage: train SCRIPT [ARGUMENT ...]"
    shift
    exec torchrun "$@" # as process 1, so that it gets the pod's SIGTERM; the ranks have the grace period to flush
    ;;
  merge)
    shift
    unset RECORDER
    shopt -s nullglob
    [ $# -gt 0 ] || set -- "$RECORDER_DIR"/*/_run.json
    [ $# -gt 0 ] || fail "no run in '$RECORDER_DIR': did the training begin? Its pods' logs say"
    worst=0
    note() { [ "$1" -le "$worst" ] || worst=$1; }
    for run in "${@%/_run.json}"; do
      echo "== $run"
      # The job is over, so whoever left a file open is dead, in whatever pod it ran. It has to be quiet for a minute.
      [ -z "$(find "$run" -name '_*.open' -print -quit)" ] || sleep 61
      recorder repair "$run" --assume-dead || note $?
      recorder doctor "$run" || note $?
      mkdir -p "$RECORDER_DIR/merged"
      recorder merge "$run" -o "$RECORDER_DIR/merged/$(basename "$run")" || note $?
    done
    exit "$worst"
    ;;
  *) fail "usage: train SCRIPT [ARGUMENT ...], or merge [RUN ...]" ;;
esac
