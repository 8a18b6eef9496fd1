#!/usr/bin/env bash
# Submit a recorded training, and a job that merges it when it is over: submit.sh [SBATCH OPTION ...] -- SCRIPT [ARGUMENT ...]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
options=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do options+=("$1"); shift; done
[ $# -ge 2 ] || { echo "usage: $0 [SBATCH OPTION ...] -- SCRIPT [ARGUMENT ...]" >&2; exit 2; }
shift

job=$(sbatch --parsable ${options[@]+"${options[@]}"} "$here/train.sbatch" "$@")
job=${job%%;*} # sbatch adds the name of the cluster where there are several
merge=$(sbatch --parsable --dependency="afterany:$job" "$here/merge.sbatch" "$job")
echo "training: job $job; merge: job ${merge%%;*}, when it is over"
