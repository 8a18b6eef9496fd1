"""Compiles the loops of `recorder/native` where a compiler is there; where none is, the wheel is pure Python.

RECORDER_PURE=1 in the environment makes the pure wheel where there is a compiler, too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno")
"""Nothing that lets a compiler change a result: each bit is that of the Python beside it."""
NAME = "_kernels.so"


def compile_kernels(root: Path, *, flags: tuple[str, ...] = (), name: str = NAME) -> Path | None:
    """Compile the library beside its source; None where that cannot be done, and then no old one is left."""
    source = root / "recorder" / "native" / "kernels.c"
    library, made = source.with_name(name), source.with_name(f"{name}.{os.getpid()}")
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None)
    if compiler is not None and sys.platform == "linux":
        command = [compiler, *FLAGS, *flags, "-o", str(made), str(source), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            made.replace(library)  # a process that has the old one loaded keeps it
            return library
        made.unlink(missing_ok=True)
    library.unlink(missing_ok=True)
    return None


def wheel_tag() -> str:
    """Any Python 3 on a system like this one."""
    return f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


class NativeBuildHook(BuildHookInterface[Any]):
    """Runs before hatchling builds a wheel, an editable one among them."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if os.environ.get("RECORDER_PURE"):
            (Path(self.root) / "recorder" / "native" / NAME).unlink(missing_ok=True)
        elif compile_kernels(Path(self.root)) is not None:
            build_data["pure_python"] = False
            build_data["tag"] = wheel_tag()
            build_data["artifacts"].append(f"/recorder/native/{NAME}")
        else:
            self.app.display_warning("recorder: no C compiler does it, so statistics and planes are made in Python")
