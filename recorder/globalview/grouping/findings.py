"""What the reader should know of the ranks' rows: each finding once, and of how many values it was found."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...read.metadata import NONE, MetadataRows


class Finding(NamedTuple):
    """Something about the ranks' rows that the reader should know."""

    kind: str
    """``replicas_differ``, ``buffers_differ``, ``inconsistent``, ``partial``, ``per_rank``, ``superseded``,
    ``stranger``, ``layout_changes``: ranks have it alike at some steps and not at others, or ``alone``: the other
    ranks never ran it."""
    step: int
    """The first step where it shows."""
    module_path: str
    site: str
    name: str
    ranks: tuple[int, ...]
    text: str
    num_rows: int = 1
    """Values of which the same was found."""


class FindingLog:
    """Findings in the order in which they were made."""

    def __init__(self, rows: MetadataRows) -> None:
        """Begin without findings, for the rows that they will be about."""
        self.findings: list[Finding] = []
        self._rows = rows
        self._index_of: dict[Any, int] = {}

    def add(
        self,
        kind: str,
        position: int | None,
        ranks: tuple[int, ...],
        text: str,
        module_path: str = "",
        site: str = "",
        name: str = "",
    ) -> None:
        """Remember a finding once; where it is of many values, or of one value at many steps, it is counted.

        Args:
            kind: see `Finding.kind`.
            position: of a row at whose step it shows; None where it is of no step.
            ranks: that it is of.
            text: for people.
            module_path: of the value; like `site` and `name` empty where it is of the whole run.
            site: of the value.
            name: of the value.
        """
        key = (kind, ranks, text) if kind == "partial" else (kind, ranks, text, module_path, site, name)
        index = self._index_of.get(key)
        if index is not None:
            known = self.findings[index]
            self.findings[index] = known._replace(num_rows=known.num_rows + 1)
            return
        self._index_of[key] = len(self.findings)
        step = int(self._rows.numbers("step")[position]) if position is not None else NONE
        self.findings.append(Finding(kind, step, module_path, site, name, ranks, text))
