# Sourced by the scripts beside it: the environment they run in. Sets `root` and, after `prepare`, `bin`.
#
# VENV=path names an environment to use; without it one is made at .venv. What is in a named environment stays as it is,
# a torch that is already there above all; only what is missing is added, in the versions of constraints.txt.
# PYTHON=command names the interpreter to make .venv with.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

say() { printf '\033[1m==> %s\033[0m\n' "$*" | if [ -t 1 ]; then cat; else sed 's/\x1b\[[0-9;]*m//g'; fi; }

die() {
  printf '%s: %s\n' "$(basename "$0")" "$*" >&2
  exit 2
}

find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3 python; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
    [ -z "${PYTHON:-}" ] || die "PYTHON=$PYTHON does not run, or is older than Python 3.11"
  done
  die "no Python 3.11 or later found; install one, or name it: PYTHON=/path/to/python3.11 $0"
}

# Is this checkout installed there, with what pyproject.toml and constraints.txt ask for now?
is_prepared() { # stamp file, stamp
  [ "$(cat "$1" 2>/dev/null)" = "$2" ] && (cd / && "$bin/python" - "$root" 2>/dev/null) <<'PY'
import importlib.util, os, sys

spec = importlib.util.find_spec("recorder_autoload")
here = os.path.join(sys.argv[1], "recorder", "startup", "recorder_autoload.py")
sys.exit(spec is None or spec.origin is None or not os.path.samefile(spec.origin, here))
PY
}

# constraints.txt without what has to stay as it is: torch in any environment, everything in a named one.
constraints() { # "named" | "own"
  "$bin/python" - "$root/scripts/constraints.txt" "$1" <<'PY'
import importlib.metadata, re, sys

def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()

installed = {normal(d.metadata["Name"]): d.version for d in importlib.metadata.distributions() if d.metadata["Name"]}
stays = set(installed) if sys.argv[2] == "named" else {"torch"} & set(installed)
for line in open(sys.argv[1], encoding="utf-8"):
    name = normal(line.partition("==")[0].strip())
    if "==" in line and name not in stays:
        print(line.strip())
if "torch" in stays:
    print(f"torch=={installed['torch']}")
PY
}

make_environment() { # path
  local python
  python=$(find_python) || exit 2
  say "Making a virtual environment at ${1#"$root/"}"
  "$python" -m venv "$1" || { rm -rf "$1"; die "'$python -m venv' failed (Debian and Ubuntu: apt install python3-venv)"; }
}

# `prepare`, in an environment beside .venv (or in VENV) that is given other versions first.
prepare_with() { # its name, an extra, what pip installs there first...
  local name=$1 extra=$2
  shift 2
  if [ -z "${VENV:-}" ]; then
    VENV=$root/.venv-$name
    [ -x "$VENV/bin/python" ] || make_environment "$VENV"
  fi
  [ -x "$VENV/bin/python" ] || die "VENV=$VENV holds no environment (no bin/python); leave VENV unset to have one made"
  say "Installing $* into $VENV where it is not there yet (about 7 GB)"
  "$VENV/bin/python" -m pip install -qq --disable-pip-version-check --no-input "$@" ||
    die "the installation failed; what pip said stands above"
  prepare "$extra"
}

# What tests ask of Debian, where it can be installed: as root there. Elsewhere these tests say what is missing.
# chromium: tests/browser. nodejs: the reader in JavaScript of docs/jobs. prometheus and systemd: the tools that judge
# what deploy/ has for them.
prepare_debian() {
  local log one missing=() install=(apt-get install -y --no-install-recommends)
  for one in chromium:chromium node:nodejs openssl:openssl promtool:prometheus prometheus:prometheus systemd-analyze:systemd; do
    command -v "${one%:*}" >/dev/null || missing+=("${one#*:}")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null || return 0
  say "Installing ${missing[*]}"
  log=$(mktemp)
  export DEBIAN_FRONTEND=noninteractive
  # The user of apt's sandbox cannot read the keys in some containers.
  { apt-get update && "${install[@]}" "${missing[@]}"; } >"$log" 2>&1 ||
    { apt-get -o APT::Sandbox::User=root update && "${install[@]}" -o APT::Sandbox::User=root "${missing[@]}"; } >"$log" 2>&1 ||
    { tail -n 3 "$log" >&2; say "${missing[*]} could not be installed: the tests that need it are skipped"; }
  rm -f "$log"
}

prepare() { # "" | an extra of pyproject.toml
  local extra=$1 kind=own venv=$root/.venv stamp list holder holders
  if [ -n "${VENV:-}" ]; then
    kind=named
    [ -x "$VENV/bin/python" ] || die "VENV=$VENV holds no environment (no bin/python); make one with 'python3 -m venv $VENV', or leave VENV unset"
    venv=$(cd "$VENV" && pwd)
  elif [ ! -x "$venv/bin/python" ]; then
    make_environment "$venv"
  fi
  bin=$venv/bin
  "$bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || die "$venv has a Python older than 3.11"

  stamp="$root $(cd "$root" && cat pyproject.toml scripts/constraints.txt hatch_build.py recorder/native/kernels.* | sha256sum | cut -d' ' -f1)"
  case $extra in
    "") holders=("" demo test cluster launchers) ;; # these have all of it
    demo | test) holders=("$extra" test cluster launchers) ;;
    *) holders=("$extra") ;;
  esac
  for holder in "${holders[@]}"; do
    ! is_prepared "$venv/recorder-installed-$holder" "$stamp" || return 0
  done
  say "Installing recorder${extra:+[$extra]} into $venv (the first time this fetches torch, which is large)"
  list=$(mktemp)
  constraints "$kind" >"$list"
  "$bin/python" -m pip install -qq --disable-pip-version-check --no-input -c "$list" -e "$root${extra:+[$extra]}" ||
    { rm -f "$list"; die "the installation failed; what pip said stands above"; }
  rm -f "$list"
  echo "$stamp" >"$venv/recorder-installed-$extra"
}
