"""Owns the global view of a run: its rows as the tensors of the whole model, whatever ranks held them.

A merged run is passed through as it is. Must never show a tensor as whole of which a piece is missing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import LookupFailedError, RunError
from ..format.dtypes import ITEM_BYTES, item_bytes, numpy_dtype
from ..format.schema import COUNTS, LIGHT_COLUMNS, SCHEMA, STATISTICS
from ..layout.plans import Apart, Plan, Term
from ..layout.regions import Region
from ..layout.rules import AS_ASKED, LOSSES
from . import untrusted
from .assembler import Assembler, Part, as_items
from .combine import combine, combine_fingerprints
from .decode import as_array, parse_shape
from .facts import RunFacts
from .groups import COLUMNS, Finding, Grouping, Value, listed, parse_overrides
from .leaves import Leaves, Sample
from .light import NONE, LightRows, Positions, text_keys
from .lookup import Found, several_stages
from .payload import Payloads, is_same
from .rows import ShardRows
from .sampling import choose_steps
from .stages import Stage, whole_roots

if TYPE_CHECKING:
    from .run import Run

NO_VALUES = "no_values"
"""Member of a note: why a row has no values although ranks recorded some."""
_LAYOUT_COLUMNS = ("global_shape", "offsets", "placements", "mesh")


class GlobalView:
    """How the rows of a run are put together. Made by `Run.view`."""

    def __init__(self, run: Run, *, loss: str = "mean", layouts: Sequence[str] = ()) -> None:
        """Decide how.

        Args:
            run: recorded or merged.
            loss: what each rank's loss is of its samples: ``mean`` (activation gradients of W ranks are divided by W),
                ``weighted`` (by the ranks' batch sizes) or ``sum`` (not scaled).
            layouts: ``PATTERN=LAYOUT``, where PATTERN is a glob over ``module_path:site:name`` and LAYOUT one of
                ``shard(DIM)``, ``replicate``, ``partial(sum)`` and ``per_rank``; the last that fits wins.

        Raises:
            LookupFailedError: `loss` or a layout is none of these.
        """
        if loss not in LOSSES:
            raise LookupFailedError(f"loss {loss!r}: expected one of {', '.join(LOSSES)}")
        try:
            self._overrides = parse_overrides(layouts)
        except (ValueError, AttributeError, TypeError) as error:
            raise LookupFailedError(str(error)) from error
        self._run = run
        self._loss = loss
        self._facts = RunFacts(run.writers, run.run_id, run.world_size)
        self.leaves = Leaves(self._sample)
        """What all steps say of each leaf."""
        self._kept: tuple[tuple[int, int], tuple[Grouping, Assembler]] | None = None

    @property
    def has_pipeline(self) -> bool:
        """Whether the stages of a pipeline ran in it: then the micro-batches of a step are one batch."""
        return bool(self._facts.stages)

    @property
    def stages(self) -> Mapping[tuple[int, str], Stage]:
        """By writer and root, which stage of a pipeline it ran."""
        return self._facts.stages

    def part_of_batch(self, root: str, rank: int, attempt: int) -> tuple[int, int] | None:
        """Which part of the batch a rank works on, and of how many; None where that is not known."""
        return self._parts_of_batch.get((root, rank, attempt))

    @cached_property
    def _parts_of_batch(self) -> dict[tuple[str, int, int], tuple[int, int] | None]:
        found: dict[tuple[str, int, int], tuple[int, int] | None] = {}
        of_models = whole_roots(self._facts.stages)
        for number, writer in enumerate(self._run.writers):
            for root in untrusted.objects(writer.manifest.get("roots")):
                name = untrusted.text(root.get("name"))
                group = self._facts.group(name, "", number)
                is_unknown = bool(group.conflict) or (writer.rank is None and "model_parallel" in root)
                lines = group.instances or tuple((rank,) for rank in group.ranks)
                for at, ranks in enumerate(() if is_unknown else lines):
                    for rank in ranks if writer.rank is None else {writer.rank} & set(ranks):
                        found[of_models.get(name, name), rank, writer.attempt] = at, len(lines)
        return found

    def windows(self, max_rows: int = 200_000, max_bytes: int | None = None) -> list[tuple[int, int]]:
        """Half-open ranges of steps that cover every recorded one, in order; found from the indexes.

        Args:
            max_rows: a range of several steps has at most so many rows of all ranks.
            max_bytes: and at most so many bytes of payload, decoded; without, any number.
        """
        sizes_of: dict[int, tuple[int, int]] = {}
        for shard in self._shards():
            for step, num_rows, num_bytes in zip(*_sizes_of(shard, has_bytes=max_bytes is not None), strict=True):
                known = sizes_of.get(step, (0, 0))
                sizes_of[step] = known[0] + num_rows, known[1] + num_bytes
        return cut(sizes_of, max_rows, max_bytes)

    def rows(self, first: int | None = None, last: int | None = None) -> GlobalRows:
        """The global rows of the steps from `first` up to, but not including, `last`."""
        light = self._light(first, last)
        light.load((*LIGHT_COLUMNS, *COLUMNS))
        steps = light.numbers("step")
        is_wanted = (steps >= (first if first is not None else NONE)) & (
            steps < (last if last is not None else 1 << 62)
        )
        positions = np.flatnonzero(is_wanted)
        if self._run.is_merged:
            return GlobalRows(light, None, [], positions)
        grouping, payloads = self.grouping(light)
        values = list(grouping.values(positions))
        return GlobalRows(light, payloads, values, positions, grouping.findings, whole_roots(self._facts.stages))

    def grouping_of_all(self, light: LightRows) -> tuple[Grouping, Assembler]:
        """The same, kept for the next question as long as no damage has moved the rows."""
        light.load(COLUMNS)
        if self._kept is None or self._kept[0] != (id(light), light.num_rows):
            self._kept = (id(light), light.num_rows), self.grouping(light)
        return self._kept[1]

    def counts(self, light: LightRows) -> npt.NDArray[np.bool_]:
        """By position, whether a row is of the attempt that counts at its step, and of this run."""
        return self.grouping_of_all(light)[0].counts

    def grouping(self, light: LightRows) -> tuple[Grouping, Assembler]:
        """Plans for loaded rows, and the way to their payloads."""
        light.load(COLUMNS)
        payloads = Payloads(light, len(self._run.writers))
        assembler = Assembler(light, payloads)

        def same(positions: Sequence[int]) -> bool | None:
            tensors = [assembler.tensor(position) for position in positions]
            if any(tensor is None for tensor in tensors):
                return None
            try:
                return is_same(payloads, [tensor.positions for tensor in tensors if tensor is not None])
            except RunError:
                return None  # whoever asks for the values is told what is wrong with them

        def items_of(position: int) -> npt.NDArray[Any] | None:
            tensor = assembler.tensor(position)
            if tensor is None or len(tensor.positions) > 1:
                return None  # nobody expands what takes several parts
            try:
                return as_items(assembler.local(position), tensor.dtype).reshape(tensor.shape)
            except RunError:
                return None

        grouping = Grouping(
            light,
            self._facts,
            loss=self._loss,
            overrides=self._overrides,
            is_same=same,
            items_of=items_of,
            leaves=self.leaves,
        )
        return grouping, assembler

    def sampled(self) -> tuple[LightRows, Positions]:
        """The rows by which layouts are known: a few steps, the same whatever part of the run is looked at."""
        steps = choose_steps(self._run.writers)
        ranges = None if steps is None else tuple((step, step + 1) for step in steps)
        light = LightRows(self._run.writers, ranges)
        light.load(COLUMNS)
        numbers = light.numbers("step")
        return light, np.flatnonzero(np.isin(numbers, steps)) if steps is not None else np.arange(len(numbers))

    def _sample(self) -> Sample | None:
        light, positions = self.sampled()
        return self.grouping(light)[0].sample(positions)

    def _shards(self) -> Iterator[ShardRows]:
        for writer in self._run.writers:
            yield from writer.shards

    def _light(self, first: int | None, last: int | None) -> LightRows:
        """The rows of the batches that hold some of these steps: a shard may have thousands of each rank."""
        if first is None and last is None:
            return LightRows(self._run.writers)
        return LightRows(self._run.writers, (NONE if first is None else first, 1 << 62 if last is None else last))


def cut(sizes_of: Mapping[int, tuple[int, int]], max_rows: int, max_bytes: int | None = None) -> list[tuple[int, int]]:
    """Half-open ranges that cover steps, from the rows and bytes of each; see `GlobalView.windows`."""
    found: list[tuple[int, int]] = []
    first, num_rows, num_bytes = None, 0, 0
    for step in sorted(sizes_of):
        more_rows, more_bytes = sizes_of[step]
        is_full = num_rows + more_rows > max_rows or (max_bytes is not None and num_bytes + more_bytes > max_bytes)
        if first is not None and is_full:
            found.append((first, step))
            first, num_rows, num_bytes = None, 0, 0
        first = step if first is None else first
        num_rows, num_bytes = num_rows + more_rows, num_bytes + more_bytes
    return [*found, (first, max(sizes_of) + 1)] if first is not None else []


def _sizes_of(shard: ShardRows, *, has_bytes: bool) -> tuple[list[int], list[int], list[int]]:
    """The steps of which a shard has rows, ascending, how many, and the bytes of their payloads or zeros."""
    columns = shard.columns(["step", "payload_bytes"] if has_bytes else ["step"])
    every = np.concatenate([*(batch.column("step").to_numpy() for batch in columns), np.zeros(0, np.int64)])
    steps, places, counts = np.unique(every, return_inverse=True, return_counts=True)
    nbytes = np.zeros(len(steps), np.int64)
    if has_bytes and len(every):
        payloads = [batch.column("payload_bytes").fill_null(0).to_numpy() for batch in columns]
        np.add.at(nbytes, places.reshape(-1), np.concatenate(payloads))
    return steps.tolist(), counts.tolist(), nbytes.tolist()


class GlobalRows:
    """Rows of the global view; the i-th row of `table` is the i-th of everything else."""

    def __init__(
        self,
        light: LightRows,
        assembler: Assembler | None,
        values: Sequence[Value],
        positions: Positions,
        findings: Sequence[Finding] = (),
        roots: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Made by `GlobalView.rows`; of a pipeline's roots `roots` says of which model each is a stage."""
        self._roots = roots
        self.findings = list(findings)
        """What the reader should know; the same of many values once."""
        self._light = light
        self._is_merged = assembler is None
        apart = [(value, value.plan) for value in values if isinstance(value.plan, Apart)]
        self._whys = {at: plan.why for value, plan in apart if plan.why != AS_ASKED for at in value.positions}
        self._differing = {at: value.differing for value, _ in apart if value.differing for at in value.positions}
        self._assembler = assembler or Assembler(light, Payloads(light))
        if self._is_merged:
            part_0 = positions[light.numbers("part")[positions] == 0]
            # A step that was merged in pieces has a writer for each, in the order of execution.
            keys = (light.numbers("seq")[part_0], light.writer_numbers(part_0), light.numbers("rank")[part_0])
            order = np.lexsort([*keys, light.numbers("step")[part_0]])
            self._sources: list[Value | int] = part_0[order].tolist()
        else:
            self._sources = list(_spread(values))
        self._handed_on = {p: one.stage for one in values if one.is_between_stages for p in one.positions}
        self.table = self._make_table()
        """Light columns, one row per tensor in the order of execution; `rank` is null where it is global."""
        self.payload_bytes: npt.NDArray[np.int64] = self._count_bytes()
        """Bytes of each row's tensor once decoded; 0 where its values cannot be had."""

    def __len__(self) -> int:
        return len(self._sources)

    def array(self, i: int) -> npt.NDArray[Any]:
        """The tensor of a row; bfloat16 and the 8-bit floats come in ml_dtypes' types.

        Raises:
            LookupFailedError: it has no values.
            CorruptError: the bytes are not those that were written.
        """
        source = self._with_payload(i)
        shape = parse_shape(self.table.column("shape")[i].as_py())
        dtype = self.table.column("dtype")[i].as_py()
        if isinstance(source, int):
            return as_array(self._assembler.local(source), dtype, shape)
        assert isinstance(source.plan, Plan)
        data = self._assembler.array(source.plan, source.positions)
        self._assembler.forget()
        return as_array(data, dtype, shape)

    def places(self, i: int) -> list[tuple[int, int, Region]]:
        """Which rank, in which micro-step, has which elements of a row's tensor alone; empty where that is not so."""
        source = self._sources[i]
        if isinstance(source, int) or not isinstance(source.plan, Plan):
            return []
        parts = source.plan.parts
        if any(len(part.terms) != 1 for part in parts):
            return []
        ranks, micro_steps = (self._light.numbers(name) for name in ("rank", "micro_step"))
        at = [source.positions[part.terms[0].piece] for part in parts]
        return [(int(ranks[p]), int(micro_steps[p]), part.region) for p, part in zip(at, parts, strict=True)]

    def statistics_of_parts(self, i: int) -> list[dict[str, Any]]:
        """Rank, micro-step and statistics of each rank's part, or summand, of a row's tensor; none where it is one."""
        source = self._sources[i]
        if isinstance(source, int) or not isinstance(source.plan, Plan):
            return []
        at = [source.positions[term.piece] for part in source.plan.parts for term in part.terms]
        names = ("rank", "micro_step", *STATISTICS, *COUNTS)
        columns = {name: self._light.take(name, np.array(at, np.int64)).to_pylist() for name in names}
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]

    def parts(self, i: int) -> Iterator[Part]:
        """The encoded payload of a row, in parts of at most 32 MiB; frames are copied where nothing is computed.

        Raises:
            LookupFailedError: it has no values.
            CorruptError: the bytes are not those that were written.
        """
        source = self._with_payload(i)
        if isinstance(source, int):
            yield from self._assembler.local_parts(source)
            return
        assert isinstance(source.plan, Plan)
        yield from self._assembler.parts(source.plan, source.positions)
        self._assembler.forget()

    def _with_payload(self, i: int) -> Value | int:
        if self.table.column("encoding")[i].as_py() is None:
            row = {n: self.table.column(n)[i].as_py() for n in ("module_path", "site", "name", "step", "note")}
            note = f" ({row['note']})" if row["note"] else ""
            what = f"{row['module_path']!r} site={row['site']!r} name={row['name']!r} step={row['step']}"
            raise LookupFailedError(f"{what} has no values in the global view{note}")
        return self._sources[i]

    def _count_bytes(self) -> npt.NDArray[np.int64]:
        has_payload = self.table.column("encoding").is_valid().to_numpy()
        return np.where(has_payload, _whole_bytes(*(self.table.column(name) for name in ("dtype", "numel"))), 0)

    def _make_table(self) -> Any:
        light, sources = self._light, self._sources
        firsts = np.array([s if isinstance(s, int) else s.positions[0] for s in sources], np.int64)
        values = [source for source in sources if not isinstance(source, int)]
        is_global = pa.array([not isinstance(source, int) for source in sources], pa.bool_())
        changed = _Columns(light, self._assembler, values).by_name() if values else {}
        if values and self._roots:
            at = np.array([value.positions[0] for value in values], np.int64)
            changed["root"] = [self._roots.get(root, root) for root in light.take("root", at).to_pylist()]
        columns = {}
        for name in LIGHT_COLUMNS:
            kind = SCHEMA.field(name).type
            if name in changed and len(values) == len(sources):
                columns[name] = pa.array(changed[name], kind)
                continue
            column = light.take(name, firsts).combine_chunks()
            if name in changed:
                column = pc.replace_with_mask(column, is_global, pa.array(changed[name], kind))
            columns[name] = column
        if self._whys:
            columns["note"] = self._with_whys(columns["note"])
        if self._handed_on:
            notes = columns["note"].to_pylist()
            for i, source in enumerate(sources):
                if isinstance(source, int) and (stage := self._handed_on.get(source)) is not None:
                    notes[i] = stage.mark(notes[i])
            columns["note"] = pa.array(notes, pa.string())
        is_cut = self._find_cut(columns)
        for name in ("encoding", "payload_bytes") if is_cut.any() else ():
            columns[name] = pc.if_else(pa.array(is_cut), None, columns[name])
        if is_cut.any():
            notes = columns["note"].to_pylist()
            for i in np.flatnonzero(is_cut).tolist():
                notes[i] = with_member(notes[i], NO_VALUES, "a part of it is missing")
            columns["note"] = pa.array(notes, pa.string())
        return pa.table(columns, schema=pa.schema([_nullable(SCHEMA.field(name)) for name in LIGHT_COLUMNS]))

    def _with_whys(self, notes: Any) -> Any:
        """The notes, with why a row stays with its rank where it does."""
        whys = [self._whys.get(source, "") if isinstance(source, int) else "" for source in self._sources]
        is_apart = pa.array([why != "" for why in whys], pa.bool_())
        own = notes.filter(is_apart).to_pylist()
        apart = [source for source, why in zip(self._sources, whys, strict=True) if why and isinstance(source, int)]
        told = []
        for note, why, source in zip(own, filter(None, whys), apart, strict=True):
            differing = self._differing.get(source)
            more = {"replicas_differ": list(differing)} if differing else {}
            told.append(_json(untrusted.members(note) | {"per_rank": why} | more))
        return pc.replace_with_mask(notes, is_apart, pa.array(told, pa.string()))

    def _find_cut(self, columns: dict[str, Any]) -> npt.NDArray[np.bool_]:
        """Rows that stay per rank and lack a further part: they have no values to give."""
        found = columns["payload_bytes"].fill_null(NONE).to_numpy()
        is_cut = np.zeros(len(self._sources), bool)
        for i in np.flatnonzero((found != NONE) & (found < _whole_bytes(columns["dtype"], columns["numel"]))).tolist():
            source = self._sources[i]
            is_cut[i] = isinstance(source, int) and self._assembler.tensor(source) is None
        return is_cut


def _whole_bytes(dtype: Any, numel: Any) -> npt.NDArray[np.int64]:
    """Bytes of tensors, by the columns of their rows; 0 for a dtype that is unknown."""
    keys = text_keys(dtype if isinstance(dtype, pa.ChunkedArray) else pa.chunked_array([dtype]))
    widths = np.array([ITEM_BYTES.get(text, 0) for text in keys.texts or ()] + [0], np.int64)
    total: npt.NDArray[np.int64] = numel.to_numpy() * widths[keys.codes]
    return total


def _nullable(field: Any) -> Any:
    return field if field.name != "rank" else field.with_nullable(True)


def _spread(values: Sequence[Value]) -> Iterator[Value | int]:
    """The rows that a value becomes: one, or its ranks' own, or both where the global row does not say all."""
    for value in values:
        if value.is_refused:
            yield from value.positions
            continue
        yield value
        assert isinstance(value.plan, Plan)
        if value.plan.scale == "assumed_mean" or value.differing or not value.plan.is_complete:
            yield from value.positions


class _Columns:
    """The columns in which global rows differ from their first piece's."""

    def __init__(self, light: LightRows, assembler: Assembler, values: Sequence[Value]) -> None:
        self._light = light
        self._assembler = assembler
        self._values = values
        self._positions = [value.positions for value in values]
        self._plans: list[Plan] = [value.plan for value in values if isinstance(value.plan, Plan)]

    def by_name(self) -> dict[str, list[Any]]:
        values, plans = self._values, self._plans
        own: dict[str, list[Any]] = {name: self._of_firsts(name) for name in ("dtype", "encoding", "note")}
        dtypes = [plan.dtype or dtype for plan, dtype in zip(plans, own["dtype"], strict=True)]
        has_values = [self._assembler.has_payload(*one) for one in zip(plans, self._positions, strict=True)]
        encodings = [(own["encoding"][i] or "plain") if found else None for i, found in enumerate(has_values)]
        numels = [_numel(plan.global_shape) for plan in plans]
        columns: dict[str, list[Any]] = {
            "rank": [None] * len(values),
            "dtype": dtypes,
            "shape": [_sizes_text(plan.global_shape) for plan in plans],
            "numel": numels,
            **{name: [None] * len(values) for name in _LAYOUT_COLUMNS},
            "part": [0] * len(values),
            "flat_offset": [0] * len(values),
            "layout_source": [plan.source for plan in plans],
            "scale": [plan.scale for plan in plans],
            "ranks_present": [_sizes_text(value.present) for value in values],
            "ranks_expected": [_sizes_text(value.expected) for value in values],
            "encoding": encodings,
            "payload_bytes": [
                None if encoding is None else numel * ITEM_BYTES.get(kind, 0)
                for encoding, numel, kind in zip(encodings, numels, dtypes, strict=True)
            ],
            "fingerprint": self._fingerprints(own["dtype"]),
        }
        statistics, missing = self._statistics()
        columns |= statistics
        were_recorded = self._were_recorded(has_values)
        notes = zip(plans, values, missing, has_values, were_recorded, own["note"], strict=True)
        columns["note"] = [_note(*args) for args in notes]
        return columns

    def _of_firsts(self, name: str) -> list[Any]:
        """A column of the first pieces."""
        at = np.array([positions[0] for positions in self._positions], np.int64)
        found: list[Any] = self._light.take(name, at).to_pylist()
        return found

    def _were_recorded(self, has_values: Sequence[bool]) -> list[bool]:
        """Whether any rank recorded the values of a row; looked up for those that have none here."""
        rows = [positions for positions, found in zip(self._positions, has_values, strict=True) if not found]
        at = np.array([position for positions in rows for position in positions], np.int64)
        is_there = iter(self._light.take("encoding", at).is_valid().to_pylist() if rows else ())
        return [
            found or any(list(islice(is_there, len(positions))))
            for positions, found in zip(self._positions, has_values, strict=True)
        ]

    def _fingerprints(self, dtypes: Sequence[str]) -> list[str | None]:
        used = [
            [positions[part.terms[0].piece] for part in plan.parts] if _is_copied(plan) else []
            for plan, positions in zip(self._plans, self._positions, strict=True)
        ]
        texts = self._light.take("fingerprint", np.array([at for one in used for at in one], np.int64)).to_pylist()
        found: list[str | None] = []
        start = 0
        for plan, positions, dtype in zip(self._plans, used, dtypes, strict=True):
            own = texts[start : start + len(positions)]
            start += len(positions)
            if not _is_copied(plan) or any(len(part.region.boxes) > 1 for part in plan.parts):
                found.append(None)  # a strided shard's was taken of it as it lies in memory
            elif len(own) == 1 and plan.parts[0].moved is None:
                found.append(own[0])
            else:
                moves = [part.moved for part in plan.parts]
                found.append(combine_fingerprints(own, moves, ITEM_BYTES.get(dtype, 1)))
        return found

    def _statistics(self) -> tuple[dict[str, list[Any]], list[str | None]]:
        """Combined statistics by name, and why some values have none."""
        light, positions, factors, starts = self._light, list[int](), list[float](), list[int]()
        reasons: list[str | None] = []
        for plan, value in zip(self._plans, self._values, strict=True):
            starts.append(len(positions))
            reason = None if plan.is_complete else "partial"
            if reason is None and any(len(part.terms) > 1 for part in plan.parts):
                numel = _numel(plan.global_shape)
                reason = None if numel == 1 and plan.op == "sum" else "reduced over ranks"
            reasons.append(reason)
            terms = [part.terms[0] for part in plan.parts] or ([] if reason else [Term(0)])
            positions += [value.positions[term.piece] for term in terms] or [value.positions[0]]
            factors += [term.factor for term in terms] or [1.0]
        at = np.array(positions, np.int64)
        pieces = {name: _floats(light.take(name, at)) for name in (*STATISTICS, *COUNTS)}
        numels = light.numbers("numel")[at].astype(np.float64)
        found = combine(pieces, numels, np.array(factors), np.array(starts, np.int64))
        columns: dict[str, list[Any]] = {}
        for name, column in found.items():
            has_none = np.isnan(column) | np.array([reason is not None for reason in reasons])
            kind: Any = int if name in COUNTS else float
            columns[name] = [
                None if gone else kind(x) for x, gone in zip(column.tolist(), has_none.tolist(), strict=True)
            ]
        for i, plan in enumerate(self._plans):
            if reasons[i] is None and any(len(part.terms) > 1 for part in plan.parts):
                reasons[i] = self._set_single(columns, i, plan)
        return columns, reasons

    def _set_single(self, columns: dict[str, list[Any]], i: int, plan: Plan) -> str | None:
        """Statistics of a value of one element that is a sum over ranks, or why it has none."""
        value, terms = self._values[i], plan.parts[0].terms
        means = self._light.take("mean", np.array([value.positions[term.piece] for term in terms])).to_pylist()
        known = [mean for mean in means if mean is not None]
        dtype = plan.dtype or self._light.text("dtype", self._values[i].positions[0]) or ""
        for name in (*STATISTICS, *COUNTS):
            columns[name][i] = None
        if len(known) < len(means):
            at = np.array([value.positions[term.piece] for term in terms])
            counts = {name: sum(filter(None, self._light.take(name, at).to_pylist())) for name in COUNTS}
            if not counts["nan_count"] + counts["inf_count"]:
                return "not measured on some rank"
            is_nan = counts["nan_count"] > 0
            for name, count in (("nan_count", int(is_nan)), ("inf_count", int(not is_nan)), ("zero_count", 0)):
                columns[name][i] = count
            return None
        x = float(sum(mean * term.factor for mean, term in zip(known, terms, strict=True)))
        with np.errstate(over="ignore"):  # the value is that of the row's own dtype
            x = float(np.float64(x).astype(numpy_dtype(dtype)))
        if not np.isfinite(x):
            columns["nan_count"][i], columns["inf_count"][i], columns["zero_count"][i] = 0, 1, 0
            return None
        sets = {"mean": x, "std": 0.0, "min": x, "max": x, "absmax": abs(x), "l2": abs(x), "sum": x, "sum_sq": x * x}
        for name, number in (sets | {"nan_count": 0, "inf_count": 0, "zero_count": int(x == 0)}).items():
            columns[name][i] = number
        return None


def _is_copied(plan: Plan) -> bool:
    return plan.is_complete and all(part.is_copy for part in plan.parts)


def _note(
    plan: Plan, value: Value, reason: str | None, has_values: bool, was_recorded: bool, text: str | None
) -> str | None:
    """The row's note: what its first piece says, and what became of it here."""
    note = untrusted.members(text)
    note |= {key: list(item) if isinstance(item, tuple) else item for key, item in plan.note}
    if reason is not None:
        note["no_statistics"] = reason
    missing = [rank for rank in value.expected if rank not in value.present]
    if missing and not plan.is_replica:
        note["partial"] = missing
    if value.differing:
        note["replicas_differ"] = list(value.differing)
    if plan.dim is not None:
        note["batch_dim"] = plan.dim
    if value.stage is not None:
        note["stage"] = value.stage.number
    if not has_values and not plan.is_complete:
        note[NO_VALUES] = "pieces of some ranks are missing"
    elif not has_values and was_recorded:
        note[NO_VALUES] = "the values of some ranks were not recorded"
    return _json(note) if note else None


def with_member(note: str | None, name: str, value: object) -> str:
    """A row's note with one more member."""
    return _json(untrusted.members(note) | {name: value})


def _floats(column: Any) -> npt.NDArray[np.float64]:
    values: npt.NDArray[np.float64] = column.cast(pa.float64()).to_numpy()
    return values


def _numel(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


@lru_cache(maxsize=4096)
def _sizes_text(numbers: tuple[int, ...]) -> str:
    return _json(numbers)


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def is_partial(light: LightRows, positions: Positions) -> bool:
    """Whether a row of a merged run says that ranks are missing in it."""
    light.load(["note"])
    note = light.text("note", int(positions[0]))
    return note is not None and '"partial":[' in note


def value_of(view: GlobalView, light: LightRows, found: Found) -> Value:
    """The one value that some ranks' rows are; arguments as of `global_tensor`.

    Raises:
        LookupFailedError: they are several.
    """
    grouping, _ = view.grouping_of_all(light)
    wanted = set(found.positions.tolist())
    values = grouping.values_again(found.related, is_slice=found.is_slice)
    chosen = [value for value in values if wanted & set(value.positions)]
    if len(chosen) > 1:  # what stages hand on has the same name as the input and the output of the model
        chosen = [value for value in chosen if not value.is_between_stages]
    numbers = [value.stage.number for value in chosen if value.stage is not None]
    if len(chosen) > 1 and len(set(numbers)) == len(chosen):
        raise LookupFailedError(several_stages(found.what, numbers))
    if len(chosen) != 1:
        raise LookupFailedError(f"{found.what}: {len(chosen)} values of the newest attempt are meant")
    return chosen[0]


def global_tensor(
    view: GlobalView, light: LightRows, found: Found, *, partial: bool
) -> tuple[npt.NDArray[np.uint8], str, tuple[int, ...]]:
    """Bytes, dtype and shape of the one global tensor that some ranks' rows are.

    Args:
        view: of the run.
        light: its rows.
        found: rows of that value, of all ranks.
        partial: answer also where ranks are missing.

    Raises:
        LookupFailedError: they make no single tensor, or ranks are missing; the message says why.
    """
    value, what = value_of(view, light, found), found.what
    assembler = view.grouping_of_all(light)[1]
    ranks = listed(value.present)
    if not isinstance(value.plan, Plan):
        raise LookupFailedError(f"{what} makes no single tensor: {value.plan.why}; ask for one of rank={ranks}")
    plan = value.plan
    missing = [rank for rank in value.expected if rank not in value.present]
    if not plan.is_complete:
        raise LookupFailedError(f"{what}: the pieces of rank {listed(missing)} are missing; rank= gives one rank's")
    if missing and not plan.is_replica and not partial:
        raise LookupFailedError(
            f"{what} was recorded on rank {ranks} alone, not on rank {listed(missing)}; "
            f"partial=True gives what there is, rank= one rank's"
        )
    if not assembler.has_payload(plan, value.positions):
        lacking = [rank for rank, p in zip(value.present, value.positions, strict=False) if assembler.tensor(p) is None]
        raise LookupFailedError(
            f"{what}: of rank {listed(lacking)} there are no values; a rule with keep=tensor keeps them"
        )
    dtype = assembler.dtype(plan, value.positions)
    item_bytes(dtype)
    try:
        return assembler.array(plan, value.positions), dtype, plan.global_shape
    except RunError as error:
        raise type(error)(f"{what}: {error}") from error
    finally:
        assembler.forget()
