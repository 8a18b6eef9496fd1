"""`Run`, the only entry to a recorded run: code above this package takes a `Run`, never a path or a file name.

A `ModuleView` is a run narrowed to one module. This module must never write, and imports torch only inside the method
that returns a torch tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from os import PathLike
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from ..errors import LookupFailedError, RunError, UnsupportedError
from ..format.fingerprint import moved as moved
from ..format.manifest import RecordedModule as RecordedModule
from ..format.manifest import RecordedRoot as RecordedRoot
from ..format.manifest import RowCounts as RowCounts
from ..format.manifest import Stage
from ..format.manifest import WriterManifest as WriterManifest
from ..globalview.planner import check_overrides
from ..globalview.run_topology import Topology
from ..globalview.tensor import TensorLayout as TensorLayout
from ..globalview.tensor import explain, global_tensor, histogram_of, is_partial, units_of
from ..globalview.view import GlobalRows as GlobalRows
from ..globalview.view import GlobalView as GlobalView
from ..globalview.view import LoadedRows
from ..numerics.dtypes import as_array, check_bytes
from ..numerics.histogram import Histogram
from ..numerics.keys import by_key
from ..numerics.units import Units
from ..read.lookup import LOOKUP_COLUMNS, TensorRows, ended_before, find_tensor
from ..read.metadata import MetadataRows
from ..read.run import RecordedRun
from ..read.run import RunDump as RunDump
from ..read.writers import RecordedWriter as RecordedWriter
from ..rules import did_you_mean, hint
from ..storage.locations import Location, ObjectPath, store_of
from ..system.text import counted, listed, printable
from .finding import find_run
from .probe import read_probe
from .reply import MAX_LISTED, InlinePage, as_html, in_order_of_sites, run_html, span
from .status import PROOF, PROOF_BYTES, UNKNOWN, Proof

if TYPE_CHECKING:
    import pandas
    import torch


class Qualifiers(TypedDict, total=False):
    """Facts that identify a tensor, but are rarely needed."""

    micro_step: int | None
    call: int | None
    repeat: int | None
    mode: str | None
    phase: str | None
    root: str | None
    scope: str | None
    attempt: int | None
    stage: int | None
    """The pipeline stage, from 0. Needed if modules of several stages have one path, as the stages' roots do."""
    partial: bool
    """Without a rank: True to accept a global tensor although the rows of some ranks are missing."""


class Which(Qualifiers, total=False):
    """Facts that identify a tensor among those of one module, site and step."""

    name: str | None
    """The name of a parameter, buffer or scalar, or of one tensor among the inputs or outputs."""
    rank: int | None
    """The rank whose tensor is wanted. None for the global tensor."""


_QUESTION_WORDS = frozenset(("site", "step", *Which.__annotations__))


class Run(RecordedRun):
    """One recorded run: its writers, rows and tensors as they were when `open_run` opened it."""

    draw_page: Callable[..., InlinePage] | None = None
    """The function that draws a page for `report` and `ModuleView.plot`. It belongs to a package above this one, so the
    caller who opens a run sets it."""

    @cached_property
    def proof(self) -> Proof | None:
        """The verdict of `recorder prove` about the program of the run. None if `recorder prove` was not used."""
        store, path = store_of(self.path), self.path / PROOF
        try:
            return Proof.read(store.read_json(path, PROOF_BYTES)) if store.is_file(path) else None
        except RunError as error:
            return Proof(verdict=UNKNOWN, text=f"{UNKNOWN}: {error}")

    @cached_property
    def topology(self) -> Topology:
        """Which writers ran together, and which ranks share a model, a part of the batch or a stage."""
        return Topology(self.writers, self.run_id, self.world_size)

    def probe(self, rank: int | None = None) -> Any:
        """Return what ``keep=probe`` recorded as a `pa.Table`, with one row for each value, rank and step.

        ``run.probe().to_pandas()`` is a frame with the columns of `run.probe.PROBE_SCHEMA`. `l2` is the l2 norm of a
        value's finite elements. Other columns count the NaN, infinite and all elements. Within a step, values come in
        the order in which a rank first saw them.

        Args:
            rank: the rank whose rows are returned; by default all ranks.

        Raises:
            CorruptError: a part of the probe is damaged.
        """
        return read_probe(writer for writer in self.writers if rank in (None, writer.rank))

    def view(self, loss: str = "mean", layouts: Sequence[str] = ()) -> GlobalView:
        """Return a view that joins the rows of all ranks into the tensors of the complete model.

        Args:
            loss: how each rank's loss follows from its samples: ``mean``, ``weighted`` or ``sum``; see `GlobalView`.
            layouts: ``PATTERN=LAYOUT`` overrides; see `GlobalView`.

        Raises:
            LookupFailedError: `loss` or a layout is invalid.
        """
        return GlobalView(self, loss=loss, layouts=layouts)

    @cached_property
    def _view(self) -> GlobalView:
        return GlobalView(self)

    def array(
        self,
        module_path: str,
        site: str = "output",
        step: int | None = None,
        name: str | None = None,
        rank: int | None = None,
        **more: Unpack[Qualifiers],
    ) -> npt.NDArray[Any]:
        """Return one tensor as a numpy array; bfloat16 and the 8-bit floats have the types of ml_dtypes.

        With `rank` it is the tensor that this rank had. Without `rank` it is the global tensor, joined from the ranks
        that recorded it as in `view()`. Activation gradients are then divided by the number of ranks; see `GlobalView`.
        The arguments must identify one tensor. If several attempts recorded the step, the newest one counts.

        Raises:
            LookupFailedError: no tensor with values matches, or several match, or the ranks' tensors do not form one
                tensor; the message lists the choices.
            CorruptError: the bytes are not those that were written.
        """
        return as_array(*self._tensor_bytes(module_path, _question(site, step, name=name, rank=rank, **more)))

    def tensor(
        self, module_path: str, site: str = "output", step: int | None = None, **which: Unpack[Which]
    ) -> torch.Tensor:
        """Return a tensor as `array` does, but as a torch tensor on the CPU, with the dtype that it had in training."""
        import torch

        data, dtype, shape = self._tensor_bytes(module_path, _question(site, step, **which))
        check_bytes(data, dtype, shape)
        torch_dtype = getattr(torch, dtype, None)
        if not isinstance(torch_dtype, torch.dtype):
            raise UnsupportedError(f"this torch has no dtype {dtype!r}; array() gives it as numpy")
        if data.size == 0:
            return torch.empty(shape, dtype=torch_dtype)
        return torch.from_numpy(data).view(torch_dtype).reshape(shape)

    def histogram(
        self, module_path: str, site: str = "output", step: int | None = None, **which: Unpack[Which]
    ) -> Histogram:
        """Return the histogram of a tensor by sign and power of two. A rule must have kept histograms.

        The arguments are those of `array`; the tensor's values need not be recorded. Without `rank` the histogram is
        that of the global tensor: counts of several ranks are added. Print it, ask it for a `quantile`, or add
        histograms of several steps.

        Raises:
            LookupFailedError: no tensor with a histogram matches, or several match, or the tensor is a partial sum
                (its elements cannot be counted).
            CorruptError: the bytes are not those that were written.
        """
        return histogram_of(*self._find(module_path, _question(site, step, **which)))

    def units(self, module_path: str, site: str = "output", step: int | None = None, **which: Unpack[Which]) -> Units:
        """Return sums over each unit (neuron, channel, feature) of a tensor. A rule must have kept the sums.

        The arguments are those of `array`; the tensor's values need not be recorded. Without `rank` the sums are those
        of the global tensor: units of different ranks are concatenated, and sums of the same unit are added. Print the
        result, ask it for `mean`, `rms`, `absmax` and `zero_share`, or add the results of several steps.

        Raises:
            LookupFailedError: no tensor with such sums matches, or several match, or the tensor is a partial sum.
            CorruptError: the bytes are not those that were written.
        """
        return units_of(*self._find(module_path, _question(site, step, **which)))

    def layout(
        self,
        module_path: str,
        site: str = "output",
        step: int | None = None,
        name: str | None = None,
        *,
        layouts: Sequence[str] = (),
        **more: Unpack[Qualifiers],
    ) -> TensorLayout:
        """Return where each chunk of a global tensor lies: its ranks, its position, and how these are known.

        Print the result. The arguments are those of `array`, and `layouts` is as for `view`; the tensor's values need
        not be recorded. If the chunks form no tensor, the result says why.

        Raises:
            LookupFailedError: no tensor matches, or several match; the message lists the choices. Or the run is a
                merged one, or a layout is invalid.
        """
        if (source := self.manifest.merged_from) is not None:
            raise LookupFailedError(f"a merged run has whole tensors; ask the run that was merged, {source.path}")
        question = _question(site, step, name=name, **more)
        question.pop("partial", None)
        self.check_layouts(layouts)
        view = self.view(layouts=layouts) if layouts else self._view
        self._rows.load([*LOOKUP_COLUMNS, "layout_source"])
        values = view.kept(self._rows).values
        known: dict[str, Any] = {"counts": values.counts, "has_micro_batches": view.has_pipeline, "stages": view.stages}
        return explain(
            values, find_tensor(self._rows, self.writers, module_path, question, needs_values=False, **known)
        )

    def check_layouts(self, layouts: Sequence[str]) -> None:
        """Raise an error for a layout override that would change nothing.

        Raises:
            LookupFailedError: an override is not ``PATTERN=LAYOUT``, or no value matches its pattern.
        """
        check_overrides(layouts, self)

    def ended_before(self, step: int) -> str:
        """Return a text that lists the ranks killed before `step`, each with its last step. Empty if there are none."""
        return ended_before(self.writers, step)

    def __getitem__(self, module_path: str) -> ModuleView:
        """Return the run narrowed to a module and its submodules: ``run["layers.0.mlp"]``, or ``run[""]`` for the root.

        Raises:
            LookupFailedError: there is no such module; the message names the most similar one.
        """
        return narrow(self, module_path)

    def report(
        self, *, against: Run | None = None, statistics: Sequence[str] = (), height_pixels: int | None = None
    ) -> InlinePage:
        """Return the page of `recorder report`. A notebook displays it below the cell; no file is written.

        Args:
            against: another run, to be drawn beside this one.
            statistics: the statistics to draw; by default as many as there is room for.
            height_pixels: the height of the page.

        Raises:
            LookupFailedError: there is nothing to draw; the message says what to record next time.
        """
        return self.drawn(against=against, statistics=statistics, height_pixels=height_pixels)

    def drawn(self, **wanted: Any) -> InlinePage:
        """Return the page that the function `draw_page` draws. `wanted` are the arguments of the function.

        Raises:
            UnsupportedError: the run was opened without `draw_page`.
        """
        if self.draw_page is None:
            raise UnsupportedError(f"{self.path}: was opened without pages; open the run with recorder.open_run")
        return self.draw_page(self, **wanted)

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
        is_of_rank = isinstance(question["rank"], int) and question.get("stage") is None
        if is_of_rank and not self._rows.has(LOOKUP_COLUMNS) and question["rank"] in self._runs_of_ranks:
            with suppress(LookupFailedError):  # whose message would name the choices of one rank alone
                return self._runs_of_ranks[question["rank"]]._tensor_bytes(module_path, dict(question))
        loaded, rows, tensor_rows, partial = self._find(module_path, question, needs_values=True)
        if loaded is not None:
            return global_tensor(loaded, tensor_rows, partial=partial)
        if not partial and tensor_rows.is_merged and is_partial(rows, tensor_rows.positions):
            raise LookupFailedError(f"{tensor_rows.what} lacks the rows of some ranks; partial=True accepts this")
        return self.rank_tensor(tensor_rows.positions, f"{module_path!r}")

    @cached_property
    def _runs_of_ranks(self) -> Mapping[int | None, Run]:
        """The rows of each rank as a run, whose tensors are found without reading the rows of other ranks."""
        of_rank = by_key((writer.rank, writer) for writer in self.writers)
        is_cut = len(of_rank) > 1 and not self.is_merged and not self._manifest_problem
        return {rank: Run(self.path, self.manifest, some) for rank, some in of_rank.items() if is_cut}

    def _find(
        self, module_path: str, question: dict[str, Any], *, needs_values: bool = False
    ) -> tuple[LoadedRows | None, MetadataRows, TensorRows, bool]:
        """Find the rows of the one tensor that a query selects.

        Return the loaded rows of the run (None for a tensor of one rank or of a merged run), the rows without payloads,
        the rows of the tensor, and whether rows of some ranks may be missing.
        """
        partial = bool(question.pop("partial", False))
        is_global = question["rank"] is None and self._may_be_in_chunks
        self._rows.load(LOOKUP_COLUMNS)
        loaded: LoadedRows | None = None
        counts: npt.NDArray[np.bool_] | None = None
        has_micro_batches = False
        stages: Mapping[tuple[int, str], Stage] = {}
        if is_global and self.is_merged:
            counts = np.ones(self.num_rows, bool)
        elif is_global:
            loaded = self._view.kept(self._rows)
            counts, has_micro_batches = loaded.values.counts, self._view.has_pipeline
        if question.get("stage") is not None and not self.is_merged:
            stages = self._view.stages
        tensor_rows = find_tensor(
            self._rows, self.writers, module_path, question, counts=counts, has_micro_batches=has_micro_batches,
            stages=stages, needs_values=needs_values,
        )  # fmt: skip
        return (None if tensor_rows.is_merged else loaded), self._rows, tensor_rows, partial

    @cached_property
    def _may_be_in_chunks(self) -> bool:
        """True if one tensor may be in several rows: one for each rank, or for each micro-batch of a pipeline."""
        return max(len(self.ranks), self.world_size or 1) > 1 or (not self.is_merged and self._view.has_pipeline)


class ModuleView:
    """One module of a run: its rows and tensors, and the rows of its submodules. Made by ``run["layers.0.mlp"]``.

    Rows include those of the submodules, unless ``recurse=False`` asks only for the module's own rows. `array` and
    `tensor` return tensors of the module itself.
    """

    def __init__(self, run: Run, path: str) -> None:
        self.run = run
        self.path = path

    def __getitem__(self, path: str) -> ModuleView:
        """Return a submodule, by its path relative to this module: ``run["layers.0"]["mlp.down"]``.

        Raises:
            LookupFailedError: there is no such module; the message names the most similar one.
        """
        return narrow(self.run, path, below=self.path)

    def table(self, columns: Sequence[str] | None = None, filter: Any = None, *, recurse: bool = True) -> Any:
        """Return the module's rows as a `pa.Table`. The arguments are those of `Run.table`."""
        return self.run.table(columns, self._and(filter, recurse))

    def to_pandas(
        self, columns: Sequence[str] | None = None, filter: Any = None, *, recurse: bool = True
    ) -> pandas.DataFrame:
        """Return the module's rows, without payloads, as a pandas frame. The arguments are those of `table`."""
        return self.run.to_pandas(columns, self._and(filter, recurse))

    def to_long(
        self, statistics: Sequence[str] | None = None, filter: Any = None, *, recurse: bool = True
    ) -> pandas.DataFrame:
        """Return the module's statistics as a pandas frame in long form, as `Run.to_long` does."""
        return self.run.to_long(statistics, self._and(filter, recurse))

    def array(self, site: str = "output", step: int | None = None, **which: Unpack[Which]) -> npt.NDArray[Any]:
        """Return one tensor of the module itself, as `Run.array` does."""
        return self.run.array(self.path, site, step, **which)

    def tensor(self, site: str = "output", step: int | None = None, **which: Unpack[Which]) -> torch.Tensor:
        """Return one tensor of the module itself as a torch tensor, as `Run.tensor` does."""
        return self.run.tensor(self.path, site, step, **which)

    def histogram(self, site: str = "output", step: int | None = None, **which: Unpack[Which]) -> Histogram:
        """Return the histogram of one tensor of the module itself, as `Run.histogram` does."""
        return self.run.histogram(self.path, site, step, **which)

    def units(self, site: str = "output", step: int | None = None, **which: Unpack[Which]) -> Units:
        """Return sums over the units of one tensor of the module itself, as `Run.units` does."""
        return self.run.units(self.path, site, step, **which)

    def plot(
        self, site: str | None = None, statistic: str | None = None, *, height_pixels: int | None = None
    ) -> InlinePage:
        """Return a page with the module's lines, histograms and units over steps. A notebook displays the page.

        The page also contains the submodules, and the reader can choose what is drawn.

        Args:
            site: the site that is drawn first: ``output``, ``grad_output``, ``grad``...
            statistic: the statistic that is drawn first: ``absmax``, ``l2``, ``mean``...
            height_pixels: the height of the page.

        Raises:
            LookupFailedError: there is nothing to draw, or no such site.
        """
        if not self.sites:
            raise LookupFailedError(f"{self.path!r} has no rows, and nothing below it has any")
        if site is not None and site not in self.sites:
            raise LookupFailedError(f"{self.path!r} has no {site!r}; it has {listed(self.sites, MAX_LISTED)}")
        view = {"view": "lines", "module": self.path, **({"site": site} if site else {})}
        statistics = [statistic] if statistic else []
        return self.run.drawn(statistics=statistics, below=self.path, view=view, height_pixels=height_pixels)

    @cached_property
    def steps(self) -> list[int]:
        """The steps at which the module or a submodule has a row."""
        return sorted(self.table(["step"]).column("step").unique().to_pylist())

    @cached_property
    def sites(self) -> list[str]:
        """The sites (such as ``output`` and ``grad``) at which the module or a submodule has a row."""
        return in_order_of_sites(self.table(["site"]).column("site").unique().to_pylist())

    @property
    def children(self) -> list[str]:
        """The names of the module's direct children."""
        return list(dict.fromkeys(path.partition(".")[0] for path in self._below))

    @cached_property
    def _below(self) -> list[str]:
        prefix = self.path + "." if self.path else ""
        return [path[len(prefix) :] for path in self.run.known_paths if path != self.path and path.startswith(prefix)]

    def _and(self, expression: Any, recurse: bool) -> Any:
        if not recurse:
            own = pc.field("module_path") == self.path
        elif self.path:
            own = (pc.field("module_path") == self.path) | pc.starts_with(pc.field("module_path"), self.path + ".")
        else:
            return expression
        return own if expression is None else own & expression

    def _ipython_key_completions_(self) -> list[str]:
        return self._below

    @property
    def _class_names(self) -> list[str]:
        return list(dict.fromkeys(info.class_name for (_, path), info in self.run.modules.items() if path == self.path))

    def __repr__(self) -> str:
        name = f" ({', '.join(map(printable, self._class_names))})" if self._class_names else ""
        parts = [counted(self.table(["step"]).num_rows, "row")]
        if self.steps:
            parts += [f"steps {self.steps[0]} to {self.steps[-1]}", *map(printable, self.sites)]
        if self._below:
            parts.append(f"{counted(len(self._below), 'module')} below")
        return f"<Module {self.path!r}{name}: {', '.join(parts)}>"

    def _repr_html_(self) -> str:
        sources = dict.fromkeys(info.source for (_, path), info in self.run.modules.items() if path == self.path)
        table_rows = {
            "module": repr(self.path), "class": ", ".join(self._class_names), "source": ", ".join(sources),
            "run": self.run.run_id, "steps": span(self.steps), "children": listed(self.children, MAX_LISTED),
        }  # fmt: skip
        return as_html(table_rows, self.table(["site", "step"]))


def narrow(run: Run, path: str, below: str = "") -> ModuleView:
    """Return the view of the module at `path`, which is relative to the module `below`.

    Raises:
        TypeError: `path` is not a string.
        LookupFailedError: there is no such module; the message names the most similar one.
    """
    if not isinstance(path, str):
        raise TypeError(f"a module path is text, such as 'layers.0.mlp', not {path!r}")
    whole = f"{below}.{path}" if below and path else below or path
    in_a_manifest = any(path_of == whole for _, path_of in run.modules)
    if not in_a_manifest and whole not in run.known_paths:  # `module_paths` reads rows
        known = run.known_paths
        prefix = below + "." if below else ""
        there = [one.removeprefix(prefix) for one in known if one.startswith(prefix)]
        where = f"below {below!r}" if below else "in this run"
        near = hint(path, there, otherwise="; module_paths lists those with rows")
        raise LookupFailedError(f"no module {path!r} {where}{near}")
    return ModuleView(run, whole)


def _question(site: str, step: int | None, **which: Unpack[Which]) -> dict[str, Any]:
    """Return the arguments as a query for `find_tensor`. An argument `partial` stays in the query.

    Raises TypeError for an unknown argument; the message names the most similar argument.
    """
    for word in which.keys() - _QUESTION_WORDS:
        raise TypeError(f"unknown argument {word!r}{did_you_mean(word, _QUESTION_WORDS)}")
    return {"site": site, "step": step, "name": None, "rank": None, **which}


def open_run(path: str | PathLike[str] | Location | None = None) -> Run:
    """Open a run. The run cannot draw pages; `recorder.open_run` returns one that can."""
    return open_location(path.anew() if isinstance(path, ObjectPath) else path)


def open_location(path: str | PathLike[str] | Location | None) -> Run:
    """Open a run at a path, or at a location that already has a store."""
    return Run(*find_run(path))
