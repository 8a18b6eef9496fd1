"""``recorder run``, and the start in launchers such as torchrun. Imports no UI package and no torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import NoReturn

from .. import config
from ..errors import ConfigError, install_line

_LAUNCHERS = ("torchrun", "accelerate", "accelerate-launch", "deepspeed")
_LAUNCHER_MODULES = (
    "torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch", "deepspeed.launcher.runner",
    "deepspeed.launcher.launch",
)  # fmt: skip

USAGE = """usage: recorder run [NAME=VALUE ...] COMMAND [ARGUMENT ...]

Run a command with recording on. A .py file is run by this interpreter;
anything else is a program.

  recorder run train.py --epochs 3
  recorder run torchrun --nproc-per-node 2 train.py
  recorder run RECORDER_RULES='site=grad keep=tensor' python -m package.train
"""


def launch(arguments: list[str]) -> NoReturn:
    """Replace this process by the command. Exit with code 2 if there is no command, or if a setting is wrong."""
    environ, rest = split_assignments(arguments)
    if not rest or rest[0] in ("-h", "--help"):
        print(USAGE, end="", file=sys.stdout if rest else sys.stderr)
        sys.exit(0 if rest else 2)
    try:
        command = prepare(environ, rest)
    except ConfigError as error:
        _stop(str(error))
    sys.stdout.flush()
    try:
        os.execvpe(command[0], command, environ)
    except OSError as error:
        _stop(f"cannot run {command[0]!r}: {error.strerror or error}")


def split_assignments(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return this process's environment plus the leading ``NAME=VALUE`` arguments, and the remaining arguments."""
    environ = dict(os.environ)
    rest = list(arguments)
    while rest and "=" in rest[0] and rest[0].partition("=")[0].isidentifier():
        name, _, value = rest.pop(0).partition("=")
        environ[name] = value
    return environ, rest


def prepare(environ: dict[str, str], words: Sequence[str]) -> list[str]:
    """Change `environ` so that the command is recorded, and return the command line.

    Raises:
        ConfigError: a setting is wrong, or torch could not start the recorder.
    """
    environ[config.FLAG] = "1"
    _check(environ)
    if environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "0":
        print(
            "recorder: TORCH_DEVICE_BACKEND_AUTOLOAD=0 would keep the recorder from starting; "
            "this command sets the variable to 1",
            file=sys.stderr,
        )
        environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "1"
    if not any(point.value.startswith("recorder_autoload:") for point in entry_points(group="torch.backends")):
        raise ConfigError(
            f"the package is not installed (its entry point is missing), so torch cannot start it: {install_line()}"
        )
    return [sys.executable, *words] if words[0].endswith(".py") or words[0] == "-m" else list(words)


def is_launcher() -> bool:
    """Return True if this process only starts the processes that train, as the command ``torchrun`` does."""
    words = iter(sys.orig_argv[1:])
    first = next((word for word in words if word == "-m" or not word.startswith("-")), "")
    return next(words, "") in _LAUNCHER_MODULES if first == "-m" else Path(first).name in _LAUNCHERS


def start_in_launcher() -> None:
    """Check the settings before a launcher starts its processes. The rest of this package is not loaded.

    Raises:
        SystemExit: with code 2, if a setting is wrong and no parent process has found the settings valid.
    """
    if os.environ.get(config.CHECKED_MARK):
        return
    try:
        if not config.is_enabled():
            return
        _check(os.environ)
    except ConfigError as error:
        _stop(str(error))
    os.environ[config.CHECKED_MARK] = "1"


def _check(environ: Mapping[str, str]) -> None:
    loaded = config.load_settings(environ=environ)
    config.check_dir(loaded)
    if loaded.settings.check_settings:
        from ..checks.book import check_settings

        check_settings(loaded)


def _stop(message: str) -> NoReturn:
    print(f"recorder: {message}", file=sys.stderr)
    sys.exit(2)
