"""Finds the rows of the one tensor that a query selects. If several attempts recorded a step, the newest one counts.

A query that selects several tensors raises an error that lists the choices. Nothing here may choose one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from ..errors import LookupFailedError
from ..format.manifest import Stage
from ..numerics.keys import by_key
from ..rules import hint
from ..system.text import listed
from .metadata import NONE, POSITION_COLUMNS, TEXT_COLUMNS, Keys, MetadataRows, Positions, stages_of_rows
from .writers import RecordedWriter

QUALIFIERS = (
    "site", "step", "name", "rank", "micro_step", "call", "repeat", "mode", "phase", "root", "scope", "attempt",
)  # fmt: skip
"""The columns that identify a tensor of a run, together with the module path. Choices are listed in this order."""
LOOKUP_COLUMNS = (*QUALIFIERS, "module_path", "encoding", "part", *POSITION_COLUMNS)
_OF_RANKS = ("rank", "attempt")
"""The columns that may differ among the rows of one global tensor. Rows of superseded attempts were dropped before."""
_MAX_CHOICES = 8


class TensorRows(NamedTuple):
    """The rows of the one tensor that a query selects."""

    positions: Positions
    """The positions of the tensor's rows, in the order of its parts. For several ranks, only part 0 of each rank."""
    related: Positions
    """The positions of all rows of the tensor's module at the tensor's step."""
    is_merged: bool
    what: str
    is_micro_batch: bool = False
    """True if the query names one micro-batch of a pipeline. Then `related` has only rows of this micro-batch."""


def find_tensor(
    rows: MetadataRows,
    writers: Sequence[RecordedWriter],
    module_path: str,
    question: Mapping[str, Any],
    *,
    counts: npt.NDArray[np.bool_] | None,
    has_micro_batches: bool,
    stages: Mapping[tuple[int, str], Stage],
    needs_values: bool,
) -> TensorRows:
    """Return the rows of the one tensor that a query selects.

    Args:
        rows: the rows of the run.
        writers: the writers of `rows`.
        module_path: the path of the tensor's module.
        question: maps each qualifier to its value, or to None if any value is meant.
        counts: flags the rows that may be used, by position; None if the tensor of a single rank is wanted.
        has_micro_batches: True for a pipeline. Then the rows of all micro-batches form one tensor, and the roots of all
            stages form one model.
        stages: the pipeline stages by writer and root; empty for a merged run, whose rows name their stages.
        needs_values: True to leave out rows without a payload.

    Raises:
        LookupFailedError: the query selects no tensor, or several; the message lists the choices.
    """
    rows.load(LOOKUP_COLUMNS)
    paths = rows.module_paths()
    if (code := paths.code(module_path)) < 0:
        raise LookupFailedError(f"no module {module_path!r} in this run{hint(str(module_path), paths.texts or [])}")
    of_module = np.flatnonzero(paths.codes == code)
    positions, what = _answering(rows, writers, of_module, question, f"{module_path!r}", stages)
    if counts is None:  # a job that is launched again begins with attempt 0, so one attempt can be recorded twice
        positions = _of_newest_attempt(rows, writers, positions)
    elif question.get("attempt") is None:
        positions = positions[counts[positions]]
        if not len(positions):
            raise LookupFailedError(
                f"{what}: a later attempt recorded these steps again; rank= selects one rank's tensor"
            )
    if question.get("rank") is None and (rows.numbers("rank")[positions] == NONE).any():
        positions = positions[rows.numbers("rank")[positions] == NONE]  # a merged run also has single ranks' rows
    with_values = positions
    if needs_values:
        with_values = positions[rows.keys("encoding", positions).codes != NONE]
        if not len(with_values):
            steps = _choices("step", rows.keys("step", positions))
            raise LookupFailedError(
                f"{what} was recorded without values at {steps}; a rule with keep=tensor keeps them"
            )
    of_several_ranks: tuple[str, ...] = _OF_RANKS if counts is not None else ()
    if counts is not None and has_micro_batches:
        of_several_ranks = (*_OF_RANKS, "micro_step", "root")
    # A single row leaves no choice. Encoding its texts would take most of the time of a lookup.
    compared = QUALIFIERS if counts is not None or len(with_values) > 1 else ()
    single = {name: rows.keys(name, with_values) for name in compared if name not in of_several_ranks}
    choices = [_choices(name, keys) for name, keys in single.items() if (keys.codes != keys.codes[0]).any()]
    if choices:
        raise LookupFailedError(f"{what} means several tensors; choose {', '.join(choices)}")
    is_merged = bool((rows.numbers("rank")[with_values] == NONE).any())
    related = of_module[np.isin(rows.numbers("step")[of_module], rows.numbers("step")[with_values])]
    is_micro_batch = has_micro_batches and question.get("micro_step") is not None
    if is_micro_batch:
        related = related[rows.numbers("micro_step")[related] == question["micro_step"]]
    if counts is None or is_merged:
        return TensorRows(_single(rows, with_values, is_merged, what), related, is_merged, what, is_micro_batch)
    for name, keys in single.items():  # drop rows without values that differ in an open qualifier
        code, of_all = int(keys.codes[0]), rows.keys(name, positions)
        value = None if code == NONE else code if keys.texts is None else keys.texts[code]
        positions = positions[of_all.codes == of_all.code(value)]
    return TensorRows(positions[rows.numbers("part")[positions] == 0], related, is_merged, what, is_micro_batch)


def _answering(
    rows: MetadataRows,
    writers: Sequence[RecordedWriter],
    of_module: Positions,
    question: Mapping[str, Any],
    what: str,
    stages: Mapping[tuple[int, str], Stage],
) -> tuple[Positions, str]:
    given = {name: value for name in QUALIFIERS if (value := question.get(name)) is not None}
    positions = of_module
    # Numbers are compared before texts. Comparing texts is slow, and a module may have rows of thousands of steps.
    for name in sorted(given, key=lambda name: name in TEXT_COLUMNS):
        keys = rows.keys(name, positions)
        try:
            positions = positions[keys.codes == keys.code(given[name])]
        except (TypeError, ValueError):
            positions = positions[:0]
            break
    if not len(positions):
        _raise_unmet(rows, writers, of_module, given, what)
    what += "".join(f" {name}={value!r}" for name, value in given.items())
    if (stage := question.get("stage")) is not None:
        positions = _of_stage(rows, positions, stages, stage, what)
        what += f" stage={stage!r}"
    return positions, what


def _single(rows: MetadataRows, positions: Positions, is_merged: bool, what: str) -> Positions:
    if is_merged and len(positions) > 1 and not rows.numbers("part")[positions].any():
        numbers = stages_of_rows(rows, positions, {})
        if len(np.unique(numbers)) == len(positions):
            raise LookupFailedError(several_stages(what, numbers.tolist()))
    return _parts(rows, positions, what)


def _of_stage(
    rows: MetadataRows, positions: Positions, stages: Mapping[tuple[int, str], Stage], stage: int, what: str
) -> Positions:
    numbers = stages_of_rows(rows, positions, stages)
    if not (numbers == stage).any():
        known = "|".join(str(number) for number in np.unique(numbers).tolist() if number != NONE)
        hint = f"choose stage={known}" if known else "these rows are of no pipeline"
        raise LookupFailedError(f"{what} has no row with stage={stage!r}; {hint}")
    of_stage: Positions = positions[numbers == stage]
    return of_stage


def several_stages(what: str, numbers: Iterable[int]) -> str:
    """Return the error message for a module that exists in several pipeline stages, such as the root."""
    choices = "|".join(map(str, sorted(numbers)))
    return f"{what} is another tensor in each stage of the pipeline; choose stage={choices}"


def _raise_unmet(
    rows: MetadataRows, writers: Sequence[RecordedWriter], positions: Positions, given: Mapping[str, Any], what: str
) -> NoReturn:
    """Raise an error that names the first qualifier, in the given order, which leaves no row."""
    for name, value in given.items():
        keys = rows.keys(name, positions)
        try:
            is_meant = keys.codes == keys.code(value)
        except (TypeError, ValueError):
            raise LookupFailedError(
                f"{name}={value!r}: expected {'a text' if keys.texts else 'a whole number'}"
            ) from None
        if not is_meant.any():
            ended = ended_before(writers, value, given.get("rank")) if name == "step" else ""
            raise LookupFailedError(
                f"{what} has no row with {name}={value!r}; choose {_choices(name, keys)}{'; ' if ended else ''}{ended}"
            )
        positions = positions[is_meant]
        what += f" {name}={value!r}"
    raise AssertionError("rows exist, but not for all values together")


def ended_before(writers: Sequence[RecordedWriter], step: int, rank: int | None = None) -> str:
    """Return a text that lists the ranks killed before `step`, each with its last step. Empty if there are none."""
    ends: list[str] = []
    for number, lives in by_key((writer.rank, writer) for writer in writers).items():
        if number is None or rank not in (None, number):
            continue
        last_step = max((life.last_step for life in lives if life.last_step is not None), default=None)
        if lives[-1].state == "unclosed" and last_step is not None and step > last_step:
            ends.append(f"rank {number}'s record ends in step {last_step}")
    return listed(ends, _MAX_CHOICES)


def _of_newest_attempt(rows: MetadataRows, writers: Sequence[RecordedWriter], positions: Positions) -> Positions:
    """Drop the rows of steps that a later writer of the same rank has recorded again.

    If the recorder itself counted the steps, equal step numbers of two attempts mean different steps. Then only the
    rows of the newest attempt are kept.
    """
    numbers = rows.writer_numbers(positions)
    used = sorted(set(numbers.tolist()))  # the first `np.unique` of a process takes 15 ms: it imports numpy.ma
    ranks = [writers[number].rank for number in used]
    if len(set(ranks)) == len(ranks):
        return positions
    if any(writers[number].is_counted for number in used):
        newest = {writers[number].rank: number for number in used}  # writers are in the order of their start
        return positions[np.isin(numbers, list(newest.values()))]
    keys = np.stack([rows.keys(name, positions).codes for name in QUALIFIERS if name != "attempt"])
    _, group = np.unique(keys, axis=1, return_inverse=True)
    group = group.reshape(-1)
    newest_of_group = np.zeros(group.max() + 1, np.int64)
    np.maximum.at(newest_of_group, group, numbers)
    kept: Positions = positions[numbers == newest_of_group[group]]
    return kept


def _parts(rows: MetadataRows, positions: Positions, what: str) -> Positions:
    parts = rows.numbers("part")[positions]
    order = np.argsort(parts)
    if len(set(parts.tolist())) < len(parts):
        seqs = ", ".join(map(str, sorted(rows.numbers("seq")[positions].tolist())[:_MAX_CHOICES]))
        why = f"several rows have one and the same key (in the column seq: {seqs}), so the question is ambiguous"
        raise LookupFailedError(f"{what}: {why}")
    if not np.array_equal(parts[order], np.arange(len(parts))):
        raise LookupFailedError(f"{what}: only its parts {sorted(map(int, parts))[:_MAX_CHOICES]} were recorded")
    return positions[order]


def _choices(name: str, keys: Keys) -> str:
    """Describe a column's distinct values, such as ``step=0|1|2|...|64 (11)`` for 11 steps."""
    codes = [int(code) for code in np.unique(keys.codes)]
    shown = [keys.label(code) for code in codes]
    if keys.texts is not None:
        shown.sort()
    if len(shown) > _MAX_CHOICES:
        shown = [*shown[: _MAX_CHOICES - 2], "...", f"{shown[-1]} ({len(shown)})"]
    return f"{name}={'|'.join(shown)}"
