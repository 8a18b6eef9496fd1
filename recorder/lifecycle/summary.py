"""The summary at the end of a recording: two lines by rank 0, from what that rank knows itself.

Nothing here may call a collective, or read a file of another rank.
"""

from __future__ import annotations

import logging
import os
import shlex
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..system import log
from ..system.text import counted, size

_logger = logging.getLogger("recorder")


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The facts that rank 0 has at the end."""

    run: str
    """The word for the run in a command, quoted for a shell."""
    world_size: int
    last_step: int | None
    """The last step of which a row was written."""
    ledger: Mapping[str, Any]
    """The final accounts."""
    nonfinite: tuple[int, str, str] | None
    """Step, value and kind of the first value of rank 0 that was not finite."""
    written_bytes: int
    waited_s: float
    longest_wait_s: float
    is_asked_for: bool
    """True where a rule is for rank 0."""
    num_dumps: int = 0
    """How often a trigger had rank 0 write its ring."""

    @property
    def lines(self) -> tuple[str, str]:
        """Return a line with the result, and a line with the next commands to type."""
        ledger = self.ledger
        of_rank = f" of rank 0 (of {self.world_size})" if self.world_size > 1 else ""
        rows = counted(ledger["written"], "row")
        until = "" if self.last_step is None else f", up to step {self.last_step}"
        written = f"{rows}{of_rank}, {size(self.written_bytes)}{until}"
        dropped = [f"{count:,} {reason}" for reason, count in ledger["dropped"].items()]
        clauses = []
        if self.nonfinite is not None:
            step, where, _ = self.nonfinite
            view = " (of rank 0; recorder first looks at all ranks)" if self.world_size > 1 else ""
            clauses.append(f"not finite since step {step}, {where}{view}")
        clauses.append(f"dropped {', '.join(dropped)}" if dropped else "nothing dropped")
        if not ledger["observed"]:
            clauses = ["no value was seen that the rules select" if self.is_asked_for else "no rule is for rank 0"]
        if self.waited_s >= 0.05:
            clauses.append(f"training waited {self.waited_s:.1f} s, at most {self.longest_wait_s:.1f} s at once")
        if self.num_dumps:
            clauses.append(counted(self.num_dumps, "dump"))
        if passed := ledger.get("passed", 0):
            clauses.append(f"{counted(passed, 'row')} passed the ring")
        if retired := ledger["retired"]["rows"]:
            clauses.append(f"{counted(retired, 'row')} retired")
        if suspect := ledger.get("suspect", 0):
            clauses.append(f"{counted(suspect, 'row')} that the disk may have lost")
        is_odd = dropped or suspect or not ledger["observed"]
        commands = ["first"] * (self.nonfinite is not None) + ["doctor"] * bool(is_odd and self.is_asked_for)
        return (
            f"{written}; {'; '.join(clauses)}",
            f"next: {'; '.join(f'recorder {command} {self.run}' for command in commands or ['show'])}",
        )


class FinalSummary:
    """Logs the summary once, whichever thread comes first, and knows the word for the run in a command."""

    def __init__(self, *, dir_setting: str, is_default: bool) -> None:
        """Begin without a name of the run.

        Args:
            dir_setting: the folder of runs, as the setting `dir` has it.
            is_default: True for the folder that commands look into by themselves.
        """
        self._folder = Path(dir_setting)
        self._is_default = is_default
        self._name_in_commands = ""
        """The word for the run in a command; empty while the name is not known."""
        self._has_begun = threading.Lock()
        """Acquired by the thread that logs the summary, and never released."""

    def take_name(self, run_dir: Path, name: str) -> None:
        """Take the name of the run. Called on the writer thread, which may ask the disk whether the name is unique."""
        self._name_in_commands = name_in_commands(run_dir, name, self._folder, is_default=self._is_default)

    def name_in_commands(self, run_dir: Path) -> str:
        """Return the word for the run in a command, quoted for a shell."""
        return self._name_in_commands or quoted(run_dir)

    def say(self, summary: Summary, deadline_s: float) -> None:
        """Log the summary, unless another thread has begun to."""
        log.tell(_logger, lambda: summary.lines, deadline_s, partial(self._has_begun.acquire, blocking=False))


def name_in_commands(run_dir: Path, name: str, folder: Path, *, is_default: bool) -> str:
    """Return the word for a run in a command that is typed where the program was started.

    The word is the run's name, or its path where another run has that name.

    Args:
        run_dir: the directory of the run.
        name: the name of the run.
        folder: the folder of runs, as the setting `dir` has it.
        is_default: True for the folder that commands look into by themselves.
    """
    others = [run_dir.parent / name] + [run_dir.parent.parent / name] * is_default
    if any(path != run_dir and os.path.lexists(path) for path in others):
        return quoted(run_dir)
    return quoted(Path(name) if is_default else folder / name)


def quoted(path: Path) -> str:
    """Return a path quoted for a shell, without anything that a terminal would obey."""
    text = str(path)
    if text.isprintable():
        return shlex.quote(text)
    plain = text.replace("\\", "\\\\").replace("'", "\\'")
    shown = (char if char.isprintable() else "".join(f"\\x{byte:02x}" for byte in os.fsencode(char)) for char in plain)
    return f"$'{''.join(shown)}'"
