#!/usr/bin/env bash
# A site's epilog: ships what a job has recorded on this node's disk before the node is given to others.
#
# slurm.conf: Epilog=/etc/slurm/recorder-epilog.sh. slurmd runs it as root on each node of a job that has ended. An epilog
# that fails drains the node, so this one says what did not arrive, and ends with 0; the runs stay where they are.
set -uo pipefail
scratch=${SCRATCH:-/scratch}         # set: the disk of each node on which jobs record
to=${SHIP_TO:-SET_ME}                # set: where the runs go, s3://bucket/runs
recorder=${RECORDER_BIN:-recorder}   # set: where it is installed, such as /opt/recorder/bin/recorder
deadline_s=${DEADLINE_S:-120}        # set: how long a store that fails is tried

say() { echo "recorder-epilog: $*" >&2; }
case $to in *SET_ME*) say "'to' is still SET_ME: give it a value at the top of the file"; exit 2 ;; esac
[ -n "${SLURM_JOB_ID:-}" ] || { say "this is no epilog of a Slurm job"; exit 2; }
mine=$scratch/recorder-$SLURM_JOB_ID
[ -d "$mine" ] && [ ! -L "$mine" ] || exit 0

# As the user of the job: root follows nobody's names, and writes beside nobody's runs.
as=()
[ "$(id -u)" -ne 0 ] || as=(setpriv --reuid "$(stat -c %u "$mine")" --regid "$(stat -c %g "$mine")" --clear-groups)
"${as[@]}" "$recorder" daemon --once --watch "$mine" --to "$to/$SLURM_JOB_ID" --deadline-s "$deadline_s" \
  --state "${TMPDIR:-/tmp}/recorder-epilog-$SLURM_JOB_ID" >&2 || say "not all arrived, or not whole: $mine on $(hostname)"
exit 0
