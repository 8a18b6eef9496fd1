"""Groups the rows of several ranks by the value that they hold, and keeps the findings about these rows, each once.

Must never mix two launches within a step, and never read a payload.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..columns import COUNTS, KEY, MEASURED, STATISTICS, note_members, parse_shape
from ..format.roots import Stage
from ..layout.placement import RANK_BOUND, RankChunk
from ..numerics.keys import NULL, POSITIVE, Integers, bits_of, digest, pack
from ..read.manifests import MicroBatches, in_order
from ..read.metadata import NONE, Keys, MetadataRows, Positions
from ..sites import ACTIVATIONS, VALUE_OF

FORWARD_OF = {gradient: site for gradient, site in VALUE_OF.items() if gradient in ACTIVATIONS}
"""For each site of gradients of activations, the site of the values."""
LABELS = ("root", "module_path", "site", "name", "mode", "phase")
_CHUNK = ("dtype", "shape", "global_shape", "offsets", "placements", "mesh", "note")
COLUMNS = (
    *KEY, *_CHUNK, *STATISTICS, *COUNTS, "fingerprint", "rank", "seq", "part", "attempt", "encoding", "payload_bytes",
    "numel", "batch", "row",
)  # fmt: skip
"""What must be loaded of the rows."""

_MINUS_ZERO = np.iinfo(np.int64).min
"""The bits of -0.0."""


class GroupedRows(NamedTuple):
    """Rows grouped by value: what is known of each row and of each group."""

    chosen: Positions
    starts: Integers
    ends: Integers
    codes: Integers
    chunks: list[RankChunk]
    equal: Integers
    """1 where all rows of a value are equal, 0 where they are not, `NONE` where only their payloads can tell."""
    has_same_statistics: npt.NDArray[np.bool_]
    is_blank: npt.NDArray[np.bool_]
    """Whether all rows of a value are measured and hold one number each, or nothing finite: any layout has that."""
    is_zero: npt.NDArray[np.bool_]
    """Whether all rows of a value are measured and hold zeros alone, of either sign."""
    has_nan: npt.NDArray[np.bool_]
    """Whether some row of a value has a NaN, or is measured and has no finite number."""
    is_measured: npt.NDArray[np.bool_]
    """Whether all rows of a value have statistics."""
    fingerprints: Integers
    statistics: Integers
    """For each row, a number that is equal where all statistics are equal; `NONE` without statistics."""
    labels: dict[str, Keys]
    """For each value, the texts that name it."""
    writers: Integers
    """For each value, the number of the writer of its first row."""

    def equal_of(self, number: int) -> bool | None:
        return None if self.equal[number] == NONE else bool(self.equal[number])


class GroupedValues(NamedTuple):
    """Rows grouped by value; values are numbered from 0 in the order of their keys."""

    rows: GroupedRows
    keys: Integers
    """For each value, a number that stands for its key: root, module, site, name, mode, phase, step and so on."""
    forward_keys: Integers
    """For each value that is a gradient, the key of the value whose gradient it is; else -1."""
    order: Integers
    """The values' numbers in the order of execution."""


class RowGrouper:
    """Groups rows of a run by value."""

    def __init__(self, rows: MetadataRows, stages: Mapping[tuple[int, str], Stage]) -> None:
        """Made of rows with `COLUMNS`, and of the pipeline stages by number of the writer and root."""
        self._rows = rows
        self._stages = stages
        self._chunks: list[RankChunk] = []
        self._numbers: dict[RankChunk, int] = {}

    def group(self, chosen: Positions) -> GroupedValues:
        """Rows by value, of each value in the order of ranks."""
        rows = self._rows
        micro_batches = MicroBatches(rows, chosen, self._stages)
        keys, forward_keys = self._number_keys(chosen, micro_batches)
        ranks = rows.numbers("rank")[chosen]
        order = np.lexsort([micro_batches.micro_step, ranks, keys])
        chosen, keys, forward_keys = chosen[order], keys[order], forward_keys[order]
        starts = np.flatnonzero(np.r_[True, keys[1:] != keys[:-1]])
        grouped = self._describe(chosen, starts, micro_batches.micro_step[order])
        sequence = in_order(rows, chosen[starts], micro_batches.stage[order][starts])
        return GroupedValues(grouped, keys[starts], forward_keys[starts], sequence)

    def _number_keys(self, chosen: Positions, micro_batches: MicroBatches) -> tuple[Integers, Integers]:
        """For each row, a number for its key, and one for the key of the value whose gradient it is (-1: none)."""
        keys = {name: self._rows.keys(name, chosen) for name in KEY}
        columns = {name: key.codes.copy() for name, key in keys.items()}
        columns |= {"micro_step": micro_batches.key, "stage": micro_batches.stage}
        sites = keys["site"]
        forward_site = np.full(len(sites.texts or ()) + 1, NONE)
        for code, site in enumerate(sites.texts or ()):
            if site in FORWARD_OF:
                forward_site[code] = sites.code(FORWARD_OF[site])
        backward, forward = keys["phase"].code("backward"), keys["phase"].code("forward")
        is_gradient = (forward_site[columns["site"]] >= 0) & (columns["phase"] == backward) & (forward >= 0)
        at = np.flatnonzero(is_gradient)
        changed = {
            "site": forward_site[columns["site"][at]],
            "phase": np.full(len(at), forward),
            "repeat": np.zeros(len(at)),
        }
        both = [np.concatenate([columns[name], changed.get(name, columns[name][at])]) for name in columns]
        numbers = pack(both)
        forward_keys = np.full(len(chosen), -1)
        forward_keys[at] = numbers[len(chosen) :]
        is_backward = columns["phase"] == backward
        is_backward &= np.isin(columns["site"], [sites.code(site) for site in FORWARD_OF])
        # A gradient whose value was not recorded.
        forward_keys[is_backward & (forward_keys < 0)] = np.iinfo(np.int64).max
        return numbers[: len(chosen)], forward_keys

    def _describe(self, chosen: Positions, starts: Integers, micro_steps: Integers) -> GroupedRows:
        """Per row a number that stands for its chunk, and per value whether all its rows are equal."""
        rows = self._rows
        ends = np.r_[starts[1:], len(chosen)]
        columns = [self._rows.keys(name, chosen).codes for name in _CHUNK]
        local = pack([*columns, rows.numbers("rank")[chosen], micro_steps])
        _, first_of_code = np.unique(local, return_index=True)
        numbers = []  # of chunks, which hold for every question
        for at in first_of_code:
            chunk = self.chunk(int(chosen[at]), int(micro_steps[at]))
            numbers.append(self._numbers.setdefault(chunk, len(self._chunks)))
            if numbers[-1] == len(self._chunks):
                self._chunks.append(chunk)
        codes = np.array(numbers, np.int64)[local]
        of_row = np.repeat(np.arange(len(starts)), ends - starts)
        fingerprints = self._rows.keys("fingerprint", chosen).codes
        firsts = starts[of_row]
        has_fingerprint = np.logical_and.reduceat(fingerprints != NONE, starts)
        same_fingerprint = np.logical_and.reduceat(fingerprints == fingerprints[firsts], starts)
        bits = {name: bits_of(rows.take(name, chosen)) for name in (*STATISTICS, *COUNTS)}
        is_measured = bits[MEASURED] != NULL
        has_statistics = np.logical_and.reduceat(is_measured, starts)
        digests = digest([*bits.values()])
        same_statistics = np.logical_and.reduceat(digests == digests[firsts], starts)
        low, high, nans, infs = (bits[name] for name in ("min", "max", "nan_count", "inf_count"))
        low, high = (np.where(column == _MINUS_ZERO, 0, column) for column in (low, high))
        has_nan = is_measured & ((nans > 0) | (low == NULL))
        is_constant = is_measured & (low == high) & (infs == 0)
        is_blank = has_nan | is_constant
        return GroupedRows(
            chosen=chosen,
            starts=starts,
            ends=ends,
            codes=codes,
            chunks=self._chunks,
            equal=np.where(has_fingerprint, same_fingerprint, np.where(has_statistics & ~same_statistics, False, NONE)),
            has_same_statistics=has_statistics & same_statistics,
            is_blank=np.logical_and.reduceat(is_blank, starts),
            is_zero=np.logical_and.reduceat(is_constant & ~has_nan & (low == 0), starts),
            has_nan=np.logical_or.reduceat(has_nan, starts),
            is_measured=has_statistics,
            fingerprints=fingerprints,
            statistics=np.where(is_measured, digests & POSITIVE, NONE),
            labels={name: self._rows.keys(name, chosen[starts]) for name in LABELS},
            writers=rows.writer_numbers(chosen[starts]),
        )

    def chunk(self, position: int, micro_step: int) -> RankChunk:
        """What a row says of its rank's chunk."""
        texts = {name: self._rows.text(name, position) for name in _CHUNK}
        note = note_members(texts["note"])
        global_shape, offsets = (texts[name] and parse_shape(texts[name]) for name in ("global_shape", "offsets"))
        return RankChunk(
            int(self._rows.numbers("rank")[position]),
            texts["dtype"] or "",
            parse_shape(texts["shape"]),
            global_shape or (() if texts["global_shape"] else None),
            offsets or (() if texts["offsets"] else None),
            texts["placements"],
            texts["mesh"],
            next((member for member in RANK_BOUND if member in note), None),
            micro_step,
        )


class RowFinding(NamedTuple):
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
        self.findings: list[RowFinding] = []
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
        self.findings.append(RowFinding(kind, step, module_path, site, name, ranks, text))
