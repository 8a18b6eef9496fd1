"""Owns `Run`, the one door to a recorded run: everything after reading takes a `Run`, never a path or a file name.

Must never write, and imports torch or pandas only inside the method that gives one of their types.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Sequence
from functools import cached_property
from os import PathLike
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..errors import CorruptError, LookupFailedError, UnsupportedError
from ..format.dtypes import item_bytes
from ..format.rundir import run_name
from ..format.schema import LIGHT_COLUMNS, SCHEMA
from ..units import counted
from . import untrusted
from .decode import as_array, check_bytes, count, parse_shape
from .light import NONE, PLACE_COLUMNS, TIME_ORDER, LightRows, Positions
from .lookup import QUALIFIERS, find_tensor
from .modules import ModuleInfo, read_modules
from .notebook import ModuleView, find_known_paths, narrow, run_html, to_long
from .overrides import check_overrides
from .payload import Payloads
from .picture import Layout, explain
from .places import OpenPlace, Place, S3Path, store_of
from .view import GlobalView, global_tensor, is_partial
from .which import find_run
from .writers import RecordedWriter, find_writers

if TYPE_CHECKING:
    import pandas
    import torch


class MoreQualifiers(TypedDict, total=False):
    """What else tells tensors apart; rarely needed."""

    repeat: int | None
    mode: str | None
    phase: str | None
    root: str | None
    scope: str | None
    attempt: int | None
    stage: int | None
    """Of a pipeline, which stage's, from 0: where modules of several stages have the same path, as their roots do."""
    partial: bool
    """With ``rank=None``: answer also where some ranks have no such row, with what there is."""


_QUESTION_WORDS = frozenset((*QUALIFIERS, "stage", "partial"))


class Run:
    """One recorded run: its writers, its rows, its tensors. Made by `open_run`, and as it was at that moment."""

    def __init__(self, path: Place, manifest: dict[str, Any]) -> None:
        self.path: OpenPlace = path
        """A `pathlib.Path`; of a run in a store an `S3Path`."""
        self.manifest = manifest
        """What `_run.json` says."""
        self.writers: tuple[RecordedWriter, ...] = tuple(find_writers(path))
        """Process lifetimes by rank and start, each with its manifest, accounts and shards as they were found."""
        self._rows = LightRows(self.writers)
        self._payloads = Payloads(self._rows, len(self.writers))

    @property
    def run_id(self) -> str:
        found = str(self.manifest.get("run_id", self.path.name))
        return found.encode(errors="backslashreplace").decode()  # JSON may hold half a character, UTF-8 must not

    @property
    def name(self) -> str:
        """What people call it: the setting `name` of its recording, or what its directory is called."""
        return run_name(self.manifest) or self.path.name

    @property
    def version(self) -> tuple[int, int]:
        """Major and minor of the format."""
        major, minor = self.manifest["version"]
        return major, minor

    @property
    def world_size(self) -> int | None:
        """Ranks that the run was started with, where it says so."""
        found = self.manifest.get("world_size")
        return found if type(found) is int and found > 0 else None

    @property
    def is_merged(self) -> bool:
        """Whether this is the output of a merge: its rows are global tensors already."""
        return isinstance(self.manifest.get("merged_from"), dict)

    @property
    def problems(self) -> list[str]:
        """What is damaged on disk, and so missing from the rows; one message each, each logged when it is found.

        Damage shows where it is: in manifests and footers on opening, in a column when that is first read, in a
        payload when it is asked for (that raises). `recorder verify` reads everything.
        """
        return [problem for writer in self.writers for problem in writer.problems]

    @property
    def endings(self) -> list[str]:
        """From where on data is missing: a sentence for each writer that did not close and is not at work any more."""
        return [writer.ending for writer in self.writers if writer.state == "unclosed"]

    @property
    def num_rows(self) -> int:
        return self._rows.num_rows

    @cached_property
    def jitter(self) -> int:
        """The seed with which its inputs were moved on purpose, as the setting `jitter` asked; 0: they were not."""
        told = [writer.manifest.get("settings") for writer in self.writers]
        found = [settings.get("jitter") for settings in told if isinstance(settings, dict)]
        values = [setting.get("value") for setting in found if isinstance(setting, dict)]
        return next((value for value in values if type(value) is int and value), 0)

    @cached_property
    def jitter_moved(self) -> tuple[str, ...] | None:
        """What `jitter` moved, ``inputs`` or ``embeddings``; empty: nothing. None where no manifest says it."""
        found = dict.fromkeys(what for fact in self._jitter_facts for what in untrusted.texts(fact.get("moved")))
        return tuple(found) if self._jitter_facts else None

    @cached_property
    def jitter_eps(self) -> float:
        """By which share of its value `jitter` moved an element at most; 0 where no manifest says it."""
        told = [fact.get("eps") for fact in self._jitter_facts]
        return max((eps for eps in told if type(eps) is float and 0 <= eps < 1), default=0.0)

    @cached_property
    def _jitter_facts(self) -> list[dict[str, Any]]:
        roots = [root for writer in self.writers for root in untrusted.objects(writer.manifest.get("roots"))]
        return [fact for root in roots if isinstance(fact := root.get("jitter"), dict)]

    @cached_property
    def ranks(self) -> list[int]:
        """Ranks that left a writer, rows or not."""
        return sorted({writer.rank for writer in self.writers if writer.rank is not None})

    @cached_property
    def steps(self) -> list[int]:
        """Steps of which there is a row."""
        self._rows.load(["step"])
        return [int(step) for step in np.unique(self._rows.numbers("step"))]

    @cached_property
    def module_paths(self) -> list[str]:
        """Modules of which there is a row, in the order in which they were first recorded."""
        self._rows.load(["module_path", "rank", "seq"])
        codes, texts = self._rows.module_paths()
        in_time = codes[np.lexsort([self._rows.numbers("rank"), self._rows.numbers("seq")])]
        present, first = np.unique(in_time, return_index=True)
        return [texts[code] for code in present[np.argsort(first)] if texts and code != NONE]

    @cached_property
    def modules(self) -> dict[tuple[str, str], ModuleInfo]:
        """What the writers say of each module, by root and path, recorded or not."""
        return read_modules(self.writers)

    @cached_property
    def known_paths(self) -> dict[str, None]:
        """Modules with rows, those that the writers know, and what contains them; in the order of the tree."""
        return find_known_paths(self)

    def table(
        self, columns: Sequence[str] | None = None, filter: Any = None, *, steps: tuple[int, int] | None = None
    ) -> Any:
        """Rows as a `pa.Table`, ordered by attempt, step, rank and seq.

        Args:
            columns: names of columns; by default all but `data`, the payload.
            filter: a `pyarrow.compute` expression over light columns, such as ``pc.field("step") < 10``.
            steps: only the rows from the first step up to, but not including, the last; the others are not read.

        Raises:
            LookupFailedError: there is no such column, or the filter cannot be applied.
        """
        names = tuple(LIGHT_COLUMNS if columns is None else columns)
        for name in names:
            if name not in SCHEMA.names:
                near = difflib.get_close_matches(name, SCHEMA.names, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; columns are {', '.join(SCHEMA.names)}"
                raise LookupFailedError(f"no column {name!r}{hint}")
        # Only columns whose name occurs in the filter are read; one addressed by its place needs them all.
        text = "" if filter is None else _text_of(filter)
        filtered = [name for name in LIGHT_COLUMNS if name in text or "FieldPath" in text]
        light = [name for name in names if name != "data"]
        rows, payloads = self._rows, self._payloads
        if steps is not None:
            rows = LightRows(self.writers, steps)
            payloads = Payloads(rows, len(self.writers))
        rows.load([*light, *filtered, *TIME_ORDER, *(PLACE_COLUMNS if "data" in names else ())])
        positions = rows.in_order()
        if steps is not None:
            numbers = rows.numbers("step")[positions]
            positions = positions[(numbers >= steps[0]) & (numbers < steps[1])]
        if filter is not None:
            positions = _filter(rows, positions, filter, filtered)
        columns_of = {name: rows.take(name, positions) for name in light}
        if "data" in names:
            columns_of["data"] = _payload_column(payloads, positions)
        schema = pa.schema([SCHEMA.field(name) for name in names])
        return pa.Table.from_arrays([columns_of[name] for name in names], schema=schema)

    def to_pandas(self, columns: Sequence[str] | None = None, filter: Any = None) -> pandas.DataFrame:
        """The same as `table`, as a pandas frame.

        Raises:
            ImportError: pandas is not installed.
        """
        if importlib.util.find_spec("pandas") is None:
            raise ImportError("Run.to_pandas needs pandas, and it is not installed: pip install pandas")
        frame: pandas.DataFrame = self.table(columns, filter).to_pandas()
        return frame

    def to_long(self, statistics: Sequence[str] | None = None, filter: Any = None) -> pandas.DataFrame:
        """Statistics as a pandas frame in long form, one value a row, ready for plotting and `pivot_table`.

        Args:
            statistics: names of columns, such as ``["l2", "absmax"]``; by default all statistics and counts.
            filter: as in `table`.

        Returns:
            Columns step, rank, root, module_path, site, name, micro_step, call, repeat, mode, phase, statistic, value.
            Rows without the statistic are left out.

        Raises:
            ImportError: pandas is not installed.
            LookupFailedError: there is no such statistic.
        """
        return to_long(self, statistics, filter)

    def view(self, loss: str = "mean", layouts: Sequence[str] = ()) -> GlobalView:
        """The rows as tensors of the whole model, whatever ranks held them.

        Args:
            loss: what each rank's loss is of its samples: ``mean``, ``weighted`` or ``sum``; see `GlobalView`.
            layouts: ``PATTERN=LAYOUT`` overrides; see `GlobalView`.

        Raises:
            LookupFailedError: `loss` or a layout is none.
        """
        return GlobalView(self, loss=loss, layouts=layouts)

    @cached_property
    def _view(self) -> GlobalView:
        return self.view()

    def dataset(self) -> Any:
        """The sealed shards as `pyarrow.dataset`: for scans that stream. What it reads is not checked."""
        import pyarrow.dataset

        store = store_of(self.path)
        paths = [store.arrow_path(shard.path) for writer in self.writers for shard in writer.shards if shard.is_sealed]
        return pyarrow.dataset.dataset(paths, schema=SCHEMA, format="ipc", filesystem=store.filesystem)

    def array(
        self,
        module_path: str,
        site: str = "output",
        step: int | None = None,
        name: str | None = None,
        rank: int | None = None,
        micro_step: int | None = None,
        call: int | None = None,
        **more: Unpack[MoreQualifiers],
    ) -> npt.NDArray[Any]:
        """One tensor; bfloat16 and the 8-bit floats come in ml_dtypes' types.

        With `rank` it is the tensor as that rank held it. Without, it is the global one, put together from the ranks
        that recorded it as `view()` says (activation gradients are divided by the number of ranks; see `GlobalView`).
        What else is left open must be unambiguous; of several attempts at a step the newest is meant.

        Raises:
            LookupFailedError: no such tensor with its values, or several, or the ranks' tensors make no single one;
                the message lists the choices.
            CorruptError: the bytes are not those that were written.
        """
        question = {"site": site, "step": step, "name": name, "rank": rank, "micro_step": micro_step, "call": call}
        return as_array(*self._tensor_bytes(module_path, question | more))

    def tensor(
        self,
        module_path: str,
        site: str = "output",
        step: int | None = None,
        name: str | None = None,
        rank: int | None = None,
        micro_step: int | None = None,
        call: int | None = None,
        **more: Unpack[MoreQualifiers],
    ) -> torch.Tensor:
        """The same as `array`, as a torch tensor of the very dtype that training had, on the CPU."""
        import torch

        question = {"site": site, "step": step, "name": name, "rank": rank, "micro_step": micro_step, "call": call}
        data, dtype, shape = self._tensor_bytes(module_path, question | more)
        check_bytes(data, dtype, shape)
        torch_dtype = getattr(torch, dtype, None)
        if not isinstance(torch_dtype, torch.dtype):
            raise UnsupportedError(f"this torch has no dtype {dtype!r}; array() gives it as numpy")
        if data.size == 0:
            return torch.empty(shape, dtype=torch_dtype)
        return torch.from_numpy(data).view(torch_dtype).reshape(shape)

    def layout(
        self,
        module_path: str,
        site: str = "output",
        step: int | None = None,
        name: str | None = None,
        micro_step: int | None = None,
        call: int | None = None,
        layouts: Sequence[str] = (),
        **more: Unpack[MoreQualifiers],
    ) -> Layout:
        """Where each piece of a global tensor came from: its ranks, their places, how that is known. Print it.

        Arguments are those of `array`, and `layouts`, those of `view`; no values are needed, and of pieces that make
        no tensor it says why.

        Raises:
            LookupFailedError: no such tensor, or several; the message lists the choices. Or the run is a merged one,
                or a layout is none.
        """
        if self.is_merged:
            source = self.manifest["merged_from"]
            raise LookupFailedError(f"a merged run has whole tensors; ask the run {source.get('path')} that it is of")
        question = {"site": site, "step": step, "name": name, "micro_step": micro_step, "call": call, **more}
        _check_words(question)
        question.pop("partial", None)
        check_overrides(layouts, self)
        view = self.view(layouts=layouts) if layouts else self._view
        found = find_tensor(
            self._rows,
            self.writers,
            module_path,
            question,
            counts=view.counts(self._rows),
            has_slices=view.has_pipeline,
            stages=view.stages,
            needs_values=False,
        )
        return explain(view, self._rows, found)

    def __getitem__(self, module_path: str) -> ModuleView:
        """The run narrowed to one module and what is below it: ``run["layers.0.mlp"]``; ``run[""]`` is the root.

        Raises:
            LookupFailedError: there is no such module; the message names the nearest.
        """
        return narrow(self, module_path)

    def _ipython_key_completions_(self) -> list[str]:
        return list(self.known_paths)

    def _repr_html_(self) -> str:
        return run_html(self)

    def __repr__(self) -> str:
        steps = f"steps {self.steps[0]} to {self.steps[-1]}" if self.steps else "no steps"
        counts = {"unclosed writer": len(self.endings), "problem": len(self.problems)}
        rest = "".join(f", {counted(number, noun)}" for noun, number in counts.items() if number)
        ranks, rows = counted(len(self.ranks), "rank"), counted(self.num_rows, "row")
        return f"<Run {self.name!r}: {ranks}, {steps}, {rows}{rest}>"

    def _tensor_bytes(
        self, module_path: str, question: dict[str, Any]
    ) -> tuple[npt.NDArray[np.uint8], str, tuple[int, ...]]:
        _check_words(question)
        partial = bool(question.pop("partial", False))
        has_slices = question.get("rank") is None and not self.is_merged and self._view.has_pipeline
        is_global = has_slices or (question.get("rank") is None and max(len(self.ranks), self.world_size or 1) > 1)
        counts = None
        if is_global:
            counts = np.ones(self.num_rows, bool) if self.is_merged else self._view.counts(self._rows)
        stages = {} if self.is_merged or question.get("stage") is None else self._view.stages
        found = find_tensor(
            self._rows, self.writers, module_path, question, counts=counts, has_slices=has_slices, stages=stages
        )
        if is_global and not found.is_merged:
            if counts is not None and not counts[found.positions].any():
                again = "a later attempt recorded this step again; rank= gives what one rank had"
                raise LookupFailedError(f"{found.what}: {again}")
            return global_tensor(self._view, self._rows, found, partial=partial)
        if not partial and is_partial(self._rows, found.positions):
            raise LookupFailedError(f"{found.what} lacks the rows of some ranks; partial=True gives what there is")
        parts = [self._payloads.described(position) for position in found.positions.tolist()]
        _, dtype, shape = parts[0]
        if any(part[1:] != (dtype, shape) for part in parts):
            raise CorruptError(f"{module_path!r}: the parts of one tensor differ in dtype or shape")
        data = parts[0][0] if len(parts) == 1 else np.concatenate([part[0] for part in parts])
        sizes = parse_shape(shape)
        whole_bytes = count(sizes) * item_bytes(dtype)
        if data.nbytes < whole_bytes:
            raise LookupFailedError(
                f"{module_path!r}: only {data.nbytes} of the {whole_bytes} bytes of this tensor were recorded"
            )
        return data, dtype, sizes


def _text_of(filter: Any) -> str:
    """An expression as text; one that Arrow cannot show is as one that may name any column.

    Arrow abbreviates long lists of values, and may cut one in the middle of a character.
    """
    try:
        return str(filter)
    except UnicodeDecodeError:
        return "FieldPath"


def _filter(rows: LightRows, positions: Positions, expression: Any, names: Sequence[str]) -> Positions:
    columns = {name: rows.take(name, positions) for name in names}
    try:
        found = pa.table(columns | {"position": positions}).filter(expression).column("position")
    except (pa.ArrowException, TypeError) as error:
        raise LookupFailedError(f"filter {expression}: cannot be applied to the light columns: {error}") from error
    kept: Positions = found.to_numpy().astype(np.int64, copy=False)
    return kept


def _payload_column(payloads: Payloads, positions: Positions) -> Any:
    """The payloads of some rows: every batch is read once, however its rows are spread."""
    *pieces, order = payloads.column(positions)
    return pa.chunked_array([*pieces, pa.array([], pa.large_binary())]).take(pa.array(order))


def _check_words(question: dict[str, Any]) -> None:
    for word in question.keys() - _QUESTION_WORDS:
        near = difflib.get_close_matches(word, _QUESTION_WORDS, n=1)
        raise TypeError(f"unknown argument {word!r}{f'; did you mean {near[0]!r}?' if near else ''}")


def open_run(path: str | PathLike[str] | Place | None = None) -> Run:
    """Open a recorded run for reading, also one that is still being written or was left by a kill.

    Args:
        path: a run directory; or a folder of runs, of which the newest is meant; or in their folder the name of a run
            or its id, or how one of these begins, or ``latest``, or ``@-2``, the last run but one. Without a folder
            they are looked for here and where this environment records (``RECORDER_DIR``). All of this also in an S3
            store: ``s3://bucket/path``. Without a path it is the newest run of where this environment records.

    Raises:
        NotARunError: there is no run.
        LookupFailedError: several runs are called so.
        CorruptError: its manifest is damaged. Damage in shards does not raise: see `Run.problems`.
        UnsupportedError: it is of a newer major version.
        StoreError: the store cannot be reached, or refuses.
    """
    return open_place(path.anew() if isinstance(path, S3Path) else path)


def open_place(path: str | PathLike[str] | Place | None) -> Run:
    """The same, by what is known of a store already."""
    return Run(*find_run(path))
