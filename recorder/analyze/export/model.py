"""Writes a model at one step of a run for torch: as safetensors, or as a folder of `torch.distributed.checkpoint`.

The names of the model's state dict come from the manifests, which are untrusted. This module must never write a tensor
that lacks a chunk or whose replicas differ, and never hold more than one tensor. torch is imported only for a folder of
`torch.distributed.checkpoint`, whose pickle contains torch's own classes; `torch.save` writes each of its chunks.
"""

from __future__ import annotations

import math
import os
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ...columns import note_members, parse_shape
from ...errors import LookupFailedError, UnsupportedError
from ...numerics.dtypes import item_bytes
from ...numerics.keys import by_key
from ...run.run import GlobalRows, RecordedRoot, Run
from ...sites import GRADIENT_OF, HELD_BY_MODULES, full_name
from ...system.text import counted, listed
from .files import published_file, published_folder, write_safetensors
from .tensors import Entry, Span, SpansOf, row_spans, whole

CHUNK_BYTES = 16 << 20
"""The most bytes of one chunk of a checkpoint. A rank that loads the checkpoint reads only the chunks that it needs."""
_DATA = "__0_0.distcp"
_METADATA = ".metadata"
_VERSION = "1.0.0"
"""The version that torch writes into a checkpoint's metadata. Readers that do not know this member ignore it."""


def write_checkpoint(folder: Path, spans_of: SpansOf, entries: Sequence[Entry], report: Callable[[int], None]) -> None:
    """Write tensors into an empty folder. The metadata file is written last, because it makes the folder a checkpoint.

    Raises UnsupportedError if this version of torch lacks the dtype of a tensor.
    """
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    dtypes: dict[str, Any] = {entry.name: getattr(torch, entry.dtype, None) for entry in entries}
    for entry in entries:
        if not isinstance(dtypes[entry.name], torch.dtype):
            raise UnsupportedError(
                f"{entry.name}: this torch has no dtype {entry.dtype!r}; --to safetensors needs none"
            )
    entries_by_name: dict[str, Any] = {}
    storage_infos: dict[MetadataIndex, _StorageInfo] = {}
    with (folder / _DATA).open("xb") as file:
        for entry in entries:
            chunks = list(boxes(entry.shape, CHUNK_BYTES // item_bytes(entry.dtype)))
            sizes = [math.prod(sizes) * item_bytes(entry.dtype) for _, sizes in chunks]
            data = regrouped(spans_of(entry), sizes)
            for number, ((offsets, shape), values) in enumerate(zip(chunks, data, strict=True)):
                dtype, begin = dtypes[entry.name], file.tell()
                tensor = torch.from_numpy(values).view(dtype) if values.size else torch.empty(0, dtype=dtype)
                torch.save(tensor.reshape(shape), file)
                info = _StorageInfo(_DATA, begin, file.tell() - begin)
                storage_infos[MetadataIndex(entry.name, offsets, number)] = info
                report(values.nbytes)
            entries_by_name[entry.name] = TensorStorageMetadata(
                TensorProperties(dtype=dtypes[entry.name]),
                torch.Size(entry.shape),
                [ChunkStorageMetadata(torch.Size(offsets), torch.Size(shape)) for offsets, shape in chunks],
            )
        _sync(file)
    metadata = Metadata(entries_by_name, {name: (name,) for name in entries_by_name}, storage_infos, StorageMeta())
    metadata.version = _VERSION
    with (folder / _METADATA).open("xb") as file:
        pickle.dump(metadata, file)
        _sync(file)


def boxes(shape: tuple[int, ...], max_numel: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (offsets, sizes) of boxes of at most `max_numel` elements that make up a tensor, in the order in memory."""
    dim, inner = 0 if 0 in shape else len(shape), 1
    while dim and inner * shape[dim - 1] <= max_numel:
        dim, inner = dim - 1, inner * shape[dim - 1]
    if dim == 0:
        yield (0,) * len(shape), shape
        return
    rest, step = len(shape) - dim, max_numel // inner
    for outer in np.ndindex(shape[: dim - 1]):
        for start in range(0, shape[dim - 1], step):
            size = min(step, shape[dim - 1] - start)
            yield (*outer, start, *(0,) * rest), (*(1,) * (dim - 1), size, *shape[dim:])


def regrouped(spans: Iterable[Span], sizes: Sequence[int]) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield the bytes of all spans, end to end, in arrays of the given sizes. An array is valid until the next one."""
    source = iter(spans)
    span, used = np.empty(0, np.uint8), 0
    buffer = np.empty(max(sizes, default=0), np.uint8)
    for size in sizes:
        out, done = buffer[:size], 0
        while done < size:
            if used == len(span):
                span, used = next(source).data, 0
            num = min(size - done, len(span) - used)
            out[done : done + num] = span[used : used + num]
            done, used = done + num, used + num
        yield out
    for _ in source:  # the loop reads to the end, where `spans` raises if there are too many bytes
        pass


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


SITES = {"param": HELD_BY_MODULES, "grad": (GRADIENT_OF["param"],)}
"""The sites (kinds of values) to write, for parameters or gradients. The first decides which steps are possible."""
_NOUNS = {"param": "parameter", "grad": "gradient"}
_COLUMNS = ("site", "module_path", "name", "rank", "repeat", "scope", "dtype", "shape", "encoding", "note",
            "ranks_present", "ranks_expected")  # fmt: skip
_NO_ROW = "it has no row at this step: no rule keeps it, it was dropped, or no optimizer has it"
_MAX_NAMES = 1_000_000
"""The most names of a model that are accepted. An untrusted manifest may give shared modules any number of names."""
FORMATS = ("dcp", "safetensors")
_ONLY_DCP = ("complex32", "complex128", "float4_e2m1fn_x2")
"""The dtypes that safetensors does not have. A substitute dtype would fit no model."""
_RESERVED = "__metadata__"


class Refused(NamedTuple):
    """A tensor of the model that cannot be written."""

    name: str
    why: str


class Model:
    """The parameters and buffers, or the gradients, of one model at one step, put together from all ranks."""

    def __init__(
        self, run: Run, what: str, *, root: str | None = None, step: int | None = None, layouts: Sequence[str] = ()
    ) -> None:
        """Find the tensors of `what`, which is ``param`` or ``grad``. No tensor is read yet.

        `root` names the model if the run has several. `step` is by default the last step with such tensors. `layouts`
        is as in `Run.view`. Raises LookupFailedError if there is no such model or step, or the model has no values.
        """
        if what not in SITES:
            raise LookupFailedError(f"what {what!r}: choose of {', '.join(SITES)}")
        run.check_layouts(layouts)
        self.what = what
        self.root = _choose_root(run, what, root)
        self._run, self._layouts = run, layouts
        is_asked = (pc.field("site") == SITES[what][0]) & (pc.field("root") == self.root)
        table = run.table(["step"], is_asked & pc.field("encoding").is_valid())
        self._steps: list[int] = sorted(table.column("step").unique().to_pylist())
        self.step, self._rows = self._find_rows(step)
        self.entries: list[Entry] = []
        """The tensors that can be written, in the order of the state dict."""
        self.refused: list[Refused] = []
        """The tensors of the model that cannot be written."""
        self.notes: list[str] = []
        self._judge()
        self.total_bytes = sum(entry.payload_bytes for entry in self.entries)

    def spans(self, entry: Entry) -> Iterator[Span]:
        """Yield the bytes of one tensor, at most 32 MiB at once.

        Raises CorruptError if the bytes are not those that were written.
        """
        return whole(entry, row_spans(self._rows, entry.row, entry.dtype))

    def _find_rows(self, step: int | None) -> tuple[int, GlobalRows]:
        view = self._run.view(layouts=self._layouts)
        steps = self._steps
        for one in [step] if step is not None else reversed(steps):
            if one in steps:
                rows = view.rows(one, one + 1)
                if self._mine(rows.table.filter(pc.field("encoding").is_valid())).num_rows:
                    return one, rows
        which = f"step {step} of {self._run.name}" if step is not None else self._run.name
        there = f"steps with some are {listed(steps)}"
        if not steps:
            rule = f"site={','.join(SITES[self.what])} keep=tensor steps=::100"
            there = f"they are kept only by a rule: record with RECORDER_RULES='{rule}'"
        raise LookupFailedError(f"{which} has no {_NOUNS[self.what]} of {self.root!r} with its values; {there}")

    @property
    def step_before(self) -> int | None:
        """The last step with recorded values before the model's step; None if there is none."""
        return max((step for step in self._steps if step < self.step), default=None)

    def _mine(self, table: Any) -> Any:
        return table.filter((pc.field("root") == self.root) & pc.field("site").isin(SITES[self.what]))

    def _judge(self) -> None:
        table = self._rows.table
        table = table.append_column("at", pa.array(np.arange(table.num_rows)))
        mine = self._mine(table).select([*_COLUMNS, "at"]).to_pylist()
        rows = by_key((full_name(row["module_path"], row["name"]), row) for row in mine)
        known, left_out = _state_dict_of(self._run, self.root)
        reasons = {
            full_name(one.module_path, one.name): one.text
            for one in self._rows.findings
            if one.site in SITES[self.what] and one.kind != "partial"
        }
        given: list[dict[str, Any]] = []
        stages_of, missing_stages = _stages_of(self._run)
        for stage in missing_stages:
            self.refused.append(Refused(f"stage {stage}", "no rank of this pipeline stage left any file"))
        for name, recorded in _names(known, left_out, rows, with_ties=self.what == "param").items():
            row = _last_of(rows.get(recorded, []))
            if row is None:
                parts = sorted(name for name in rows if name.startswith(f"{recorded}."))
                if parts:
                    self.refused.append(Refused(name, f"recorded as its parts {listed(parts)}"))
                elif self.what == "param":  # a parameter need not have a gradient
                    self.refused.append(Refused(name, _NO_ROW))
            elif len(owners := stages_of.get(recorded, set())) > 1:
                self.refused.append(Refused(name, f"stages {listed(sorted(owners))} of the pipeline each have one"))
            elif (why := _why_not(row, reasons.get(recorded))) is not None:
                self.refused.append(Refused(name, why))
            else:
                dtype, shape = row["dtype"], parse_shape(row["shape"])
                steps, num_bytes = (self.step, self.step + 1), math.prod(shape) * item_bytes(dtype)
                self.entries.append(Entry(steps, row["at"], name, dtype, shape, num_bytes, {}, {}))
                given.append(row)
        self._note(given, reasons)
        if self.what == "grad" and (gone := sorted(self._names_before() - rows.keys())):
            when = f"with a gradient at step {self.step_before} and none at step {self.step}"
            self.notes.append(f"{counted(len(gone), 'parameter')} {when}: {listed(gone)}")

    def _names_before(self) -> set[str]:
        """Return the names with a gradient at the previous recorded step. In a killed run, this step may lack some."""
        if self.step_before is None:
            return set()
        table = self._run.table(["root", "site", "module_path", "name"], pc.field("step") == self.step_before)
        return {full_name(row["module_path"], row["name"]) for row in self._mine(table).to_pylist()}

    def _note(self, given: list[dict[str, Any]], reasons: dict[str, str]) -> None:
        of_ranks = Counter((row["ranks_present"], row["ranks_expected"]) for row in given)
        for (present, expected), number in of_ranks.items():
            if present != expected:
                by = f"by ranks {present} alone, of {expected}"
                self.notes.append(f"{counted(number, 'tensor')} recorded {by}: whole, but not compared")
        for entry in self.entries:
            if entry.name in reasons:  # the values of buffers are those of the first rank
                self.notes.append(f"{entry.name}: {reasons[entry.name]}; the first rank's value is used")
        num_scaled = sum(note_members(row["note"]).get("grad") == "scaled" for row in given)
        if num_scaled:
            gradients = counted(num_scaled, "gradient")
            self.notes.append(f"{gradients} still multiplied by the loss scale, as the optimizer got them")


def _choose_root(run: Run, what: str, root: str | None) -> str:
    table = run.table(["root"], pc.field("site") == SITES[what][0])
    there = table.column("root").unique().to_pylist()
    there = there or list(dict.fromkeys(root.name for root in _roots(run))) or ["model"]
    if root is None and len(there) > 1:
        named = " or ".join(f"--root {one}" for one in there)
        raise LookupFailedError(f"{run.name} has {len(there)} models, and a file holds one: {named}")
    if root is not None and root not in there:
        raise LookupFailedError(f"{run.name} has no {_NOUNS[what]} of {root!r}; it has those of {listed(there)}")
    return there[0] if root is None else root


def _names(known: dict[str, str], left_out: set[str], rows: dict[str, Any], *, with_ties: bool) -> dict[str, str]:
    # If a tie was broken later, the tied name has rows of its own.
    names = {name: name if name in rows else tied for name, tied in known.items()}
    names = names if with_ties else {name: name for name in names.values()}
    taken = set(names.values())
    more = (name for name in rows if name not in taken and name not in left_out)
    return {**names, **{name: name for name in more if not _is_part(name, taken)}}


def _is_part(name: str, taken: set[str]) -> bool:
    """Return whether a name belongs to a part of a parameter, such as ``weight._scale``."""
    parts = name.split(".")
    return any(".".join(parts[:i]) in taken for i in range(1, len(parts)))


def _last_of(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the row that the optimizer's update used. A global row is preferred to the ranks' own rows."""

    def order(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["repeat"], row["scope"] in (None, "final"), row["rank"] is None

    return max(rows, key=order, default=None)


def _why_not(row: dict[str, Any], reason: str | None) -> str | None:
    note = note_members(row["note"])
    if isinstance(missing := note.get("partial"), list) and missing and row["encoding"] is None:
        return f"no row of rank {', '.join(map(str, missing))}, which had a chunk of it"
    if row["rank"] is not None:
        return reason or "the ranks' chunks do not form a complete tensor"
    if row["encoding"] is None:
        return str(note.get("no_values", "its values were not recorded, only statistics"))
    return None


def _state_dict_of(run: Run, root: str) -> tuple[dict[str, str], set[str]]:
    """Return the names in a model's state dict, in order, and the names of buffers that are not persistent.

    Each name in the state dict has the recorded name, which differs for tied or shared parameters. Raises
    UnsupportedError if the manifests have too many names.
    """
    names, left_out = dict[str, str](), set[str]()
    aliases: dict[str, str] = {}
    for module in (module for known in _roots(run) if known.name == root for module in known.modules):
        for name in module.params:
            own = full_name(module.path, name)
            names.setdefault(own, module.tied.get(name, own))
        for name in module.buffers:
            own = full_name(module.path, name)
            if name in module.non_persistent:
                left_out.add(own)
            else:
                names.setdefault(own, own)
        aliases |= dict.fromkeys(module.aliases, module.path)
    _add_shared(names, aliases)
    return names, left_out


def _add_shared(names: dict[str, str], aliases: dict[str, str]) -> None:
    """Add names under the other paths of shared modules. Inner modules come first, so that outer ones repeat them."""
    for alias, path in sorted(aliases.items(), key=lambda pair: -pair[1].count(".")):
        for name, recorded in list(names.items()):
            if not path or name.startswith(f"{path}."):
                names.setdefault(full_name(alias, name[len(path) :].removeprefix(".")), recorded)
        if len(names) > _MAX_NAMES:
            raise UnsupportedError(f"its manifests list for the model more than {_MAX_NAMES} names")


def _stages_of(run: Run) -> tuple[dict[str, set[int]], list[int]]:
    """Return which stages of a pipeline have each parameter and buffer, and the stages without a manifest."""
    owners: dict[str, set[int]] = {}
    seen: set[int] = set()
    num_stages = 0
    for root in _roots(run):
        if root.stage is None:
            continue
        seen.add(root.stage.number)
        num_stages = max(num_stages, root.stage.num_stages)
        for module in root.modules:
            for name in (*module.params, *module.buffers):
                owners.setdefault(full_name(module.path, name), set()).add(root.stage.number)
    return owners, sorted(set(range(num_stages)) - seen)


def _roots(run: Run) -> Iterator[RecordedRoot]:
    for writer in run.writers:
        yield from writer.manifest.roots


def check_format(to: str) -> None:
    """Refuse an unknown format.

    Raises LookupFailedError, or UnsupportedError if the format needs torch and torch cannot be imported.
    """
    if to not in FORMATS:
        raise LookupFailedError(
            f"format {to!r}: choose of {', '.join(FORMATS)}; other programs' are in recorder export"
        )
    if to == "dcp":
        try:
            import_module("torch.distributed.checkpoint")
        except ImportError as error:
            raise UnsupportedError(
                f"--to dcp needs torch, whose own classes are in such a checkpoint ({error}); "
                "pip install torch, or use --to safetensors"
            ) from error


def write_model(model: Model, path: Path, to: str, report: Callable[[int], None] = lambda done: None) -> int:
    """Write the tensors of a model, and return the bytes on disk. The final name appears once all is written.

    The caller decides what a refused tensor means. safetensors makes a new file, dcp fills a new or empty folder.
    `report` is called with the bytes done since the last call. Raises WriteError if the name is taken, or the path
    cannot be written; UnsupportedError if the format cannot hold some tensor; CorruptError if a payload is damaged.
    """
    check_format(to)
    if to == "dcp":
        with published_folder(path) as folder:
            write_checkpoint(folder, model.spans, model.entries, report)
        return sum(file.stat().st_size for file in path.iterdir())
    for entry in model.entries:
        if entry.dtype in _ONLY_DCP or entry.name == _RESERVED:
            what = f"is of {entry.dtype}" if entry.dtype in _ONLY_DCP else "has a name that the format reserves"
            raise UnsupportedError(f"{entry.name} {what}, which safetensors cannot store; use --to dcp")
    # Loaders of Hugging Face expect the metadata to say that the tensors are torch's.
    about = {"format": "pt", "what": model.what, "root": model.root, "step": str(model.step)}
    with published_file(path) as file:
        write_safetensors(file, model.spans, model.entries, report, about)
    return path.stat().st_size
