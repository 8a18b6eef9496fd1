"""What the probe saw of one launch of a program: `Observed`, read from the probe's folder. Must never import torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import LookupFailedError


class Look(NamedTuple):
    """The state of one rank after one step of one optimizer."""

    step: int
    digests: Mapping[str, str]
    """By kind and name with a space between: ``param blocks.0.weight``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSeen:
    """What one rank did in one launch."""

    pid: int
    looks: tuple[Look, ...]
    printed: tuple[str, ...]
    """Lines that it wrote to its standard output after `import torch`."""

    @property
    def num_steps(self) -> int:
        return self.looks[-1].step + 1 if self.looks else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What one launch of the program did."""

    exit_code: int
    """A negative one is the signal that ended the command."""
    ranks: Mapping[int, RankSeen]

    @property
    def num_steps(self) -> int:
        return min((rank.num_steps for rank in self.ranks.values()), default=0)


def read_observed(folder: Path, exit_code: int) -> Observed:
    """Read what the probes of one launch left.

    Raises:
        LookupFailedError: two processes have trained as the same rank, so that nobody can tell what to compare.
    """
    ranks: dict[int, RankSeen] = {}
    for path in sorted(folder.glob("*.jsonl")):
        head, *lines = _lines(path)
        rank = int(head["rank"])
        if rank in ranks:
            raise LookupFailedError(
                f"two processes trained as rank {rank} (process ids {ranks[rank].pid} and {head['pid']}): "
                "prove compares one process a rank; start them with torchrun, or set RANK for each"
            )
        text = path.with_suffix(".out").read_text(encoding="utf-8", errors="replace")
        ranks[rank] = RankSeen(
            pid=int(head["pid"]),
            looks=tuple(Look(line["step"], line["digests"]) for line in lines),
            printed=tuple(text.splitlines()),
        )
    return Observed(exit_code=exit_code, ranks=dict(sorted(ranks.items())))


def _lines(path: Path) -> list[dict[str, Any]]:
    """Read the objects of a file; the last line of a process that was killed may be cut."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line[-1] == "\n"]
