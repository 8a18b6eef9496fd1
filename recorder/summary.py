"""The last words of a recording: two lines by rank 0, from what it knows itself; and how they are said.

No collective and no file of another rank. Nothing here may raise, or wait longer than it was given: standard error may
be a pipe that nobody reads.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .units import counted, size
from .voice import can_say, log

_logger = logging.getLogger("recorder")


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What rank 0 knows at the end."""

    run: str
    """What means the run in a command, quoted for a shell."""
    world_size: int
    last_step: int | None
    """The last of which a row was written."""
    ledger: Mapping[str, Any]
    """The final accounts."""
    nonfinite: tuple[int, str, str] | None
    """Step, module and site of the first value of rank 0 that was not finite, and what of it was not."""
    written_bytes: int
    waited_s: float
    longest_wait_s: float
    is_asked_for: bool
    """Whether a rule is for rank 0."""

    @property
    def lines(self) -> tuple[str, str]:
        """How it went; what to type next."""
        ledger = self.ledger
        of_rank = f" of rank 0 (of {self.world_size})" if self.world_size > 1 else ""
        rows = counted(ledger["written"], "row")
        until = "" if self.last_step is None else f", up to step {self.last_step}"
        written = f"{rows}{of_rank}, {size(self.written_bytes)}{until}"
        losses = [f"{count:,} {reason}" for reason, count in ledger["dropped"].items()]
        facts = []
        if self.nonfinite is not None:
            step, where, _ = self.nonfinite
            view = " (of rank 0; recorder first looks at all ranks)" if self.world_size > 1 else ""
            facts.append(f"not finite since step {step}, {where}{view}")
        facts.append(f"dropped {', '.join(losses)}" if losses else "nothing dropped")
        if not ledger["observed"]:
            facts = ["no value was seen that the rules select" if self.is_asked_for else "no rule is for rank 0"]
        if self.waited_s >= 0.05:
            facts.append(f"training waited {self.waited_s:.1f} s, at most {self.longest_wait_s:.1f} s at once")
        if retired := ledger["retired"]["rows"]:
            facts.append(f"{counted(retired, 'row')} retired")
        if suspect := ledger.get("suspect", 0):
            facts.append(f"{counted(suspect, 'row')} that the disk may have lost")
        is_odd = losses or suspect or not ledger["observed"]
        commands = ["first"] * (self.nonfinite is not None) + ["doctor"] * bool(is_odd and self.is_asked_for)
        return (
            f"{written}; {'; '.join(facts)}",
            f"next: {'; '.join(f'recorder {command} {self.run}' for command in commands or ['show'])}",
        )


def say(summary: Summary, deadline_s: float, is_first: Callable[[], bool] = lambda: True) -> None:
    """Say it as `say_lines` does."""
    say_lines(lambda: summary.lines, deadline_s, is_first)


def say_lines(
    lines: Callable[[], Sequence[str]], deadline_s: float, is_first: Callable[[], bool] = lambda: True
) -> None:
    """Say something that is no warning, at level INFO.

    Where nobody configured logging it goes to standard error all the same; else the user's levels and handlers decide,
    but for those that write to standard output: what they would write goes to standard error.

    Args:
        lines: what to say; asked once there is room for it.
        deadline_s: how long to wait for room.
        is_first: asked when nothing is left to wait for; False where somebody else has begun to say it.
    """
    with contextlib.suppress(Exception):
        is_configured = _is_configured()
        if (is_configured and not _logger.isEnabledFor(logging.INFO)) or not can_say(_logger, deadline_s):
            return
        said = lines()
        if not is_first():
            return
        if is_configured:
            for line in said:
                log(_logger, logging.INFO, "recorder: %s", line)
        else:
            sys.stderr.write("".join(f"recorder: {line}\n" for line in said))
            sys.stderr.flush()


def _is_configured() -> bool:
    """Whether somebody has said where messages go, or which."""
    root = logging.getLogger()
    return (
        _logger.hasHandlers()
        or _logger.level != logging.NOTSET
        or root.level != logging.WARNING
        or root.manager.disable >= logging.INFO
    )


def typed(run_dir: Path, name: str, folder: Path, *, is_default: bool) -> str:
    """What means a run in a command, typed where the program was started: its name, or its path where that is taken.

    Args:
        run_dir: where it is.
        name: what it is called.
        folder: the folder of runs, as the settings say it.
        is_default: commands look into this folder by themselves.
    """
    others = [run_dir.parent / name] + [run_dir.parent.parent / name] * is_default
    if any(path != run_dir and os.path.lexists(path) for path in others):
        return quoted(run_dir)
    return quoted(Path(name) if is_default else folder / name)


def quoted(path: Path) -> str:
    """For a shell, without anything that a terminal would obey."""
    text = str(path)
    if text.isprintable():
        return shlex.quote(text)
    plain = text.replace("\\", "\\\\").replace("'", "\\'")
    shown = (char if char.isprintable() else "".join(f"\\x{byte:02x}" for byte in os.fsencode(char)) for char in plain)
    return f"$'{''.join(shown)}'"
