"""Finds what a rule with ``keep=replay`` has kept of a call, and writes it as a folder that runs alone: `write_bundle`.

`audit` writes all calls of a run, and runs each of them. Must never import torch, nor a class that a run names: the
folder's own script does, when its reader starts it, and an audit does when it is asked for.
"""

from __future__ import annotations

import json
import shutil
import struct
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from ...errors import CorruptError, LookupFailedError, RunError
from ...format.rundir import parse_object
from ...rules import hint
from ...run.run import Run
from ...sites import CALL, OF_REPLAY
from ...system.text import listed, steps_in_words
from ..export.files import SAFETENSORS_TYPES, published_folder

VERSION = 1
"""The version of the folder's form; the script in the folder reads no other version."""
BUNDLE, TENSORS, SCRIPT = "bundle.json", "tensors.safetensors", "replay.py"
_KEY = ("attempt", "root", "micro_step", "call", "mode")
"""What the rows of one call share besides module, step and rank."""
_COLUMNS = (*_KEY, "site", "name", "phase", "scope", "repeat", "rank", "module_path", "dtype", "shape", "encoding")
_ALONE = Path(__file__).with_name("alone.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCall:
    """One call of a module that can be replayed, as its rows are found; no value is read."""

    module_path: str
    step: int
    rank: int
    key: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    gradients: Sequence[Mapping[str, Any]]
    """Rows of gradients that this call alone has given to parameters of the module and of those in it."""


def recorded_calls(run: Run, *, step: int, module: str | None = None, rank: int | None = None) -> list[RecordedCall]:
    """Return the calls of a step that a rule with ``keep=replay`` has recorded, by module and rank.

    Of several attempts at a step the newest counts.

    Raises:
        LookupFailedError: there is none; the message says what there is, or which rule to record with.
    """
    table = run.table(["module_path", "step", "rank"], pc.field("site") == CALL)
    if not table.num_rows:
        raise LookupFailedError(
            f"{run.name}: nothing to replay; record with a rule such as 'module=blocks.3.mlp steps=100 keep=replay'"
        )
    for column, asked in (("step", step), ("module_path", module), ("rank", rank)):
        there = sorted(table.column(column).unique().to_pylist())
        if asked is not None and asked not in there:
            name = column.removesuffix("_path")
            choices = (
                hint(asked, there, otherwise=f"; there is {listed(map(repr, there))}")
                if isinstance(asked, str)
                else f"; there is {steps_in_words(there, name)}"
            )
            raise LookupFailedError(f"{run.name}: no call with {name}={asked!r} was recorded for a replay{choices}")
        if asked is not None:
            table = table.filter(pc.field(column) == asked)
    modules_and_ranks = sorted({(row["module_path"], row["rank"]) for row in table.to_pylist()})
    return [call for path, its_rank in modules_and_ranks for call in _calls_of(run, path, step, its_rank)]


def _calls_of(run: Run, path: str, step: int, rank: int) -> list[RecordedCall]:
    wanted = (pc.field("module_path") == path) & (pc.field("rank") == rank)
    rows = run.table(_COLUMNS, wanted, steps=(step, step + 1)).to_pylist()
    heads = [row for row in rows if row["site"] == CALL and not row["name"]]
    below = pc.field("module_path") == path
    if path:
        below |= pc.starts_with(pc.field("module_path"), path + ".")
    else:
        below |= pc.field("module_path") != path
    of_rank = (pc.field("rank") == rank) & (pc.field("site") == "grad") & (pc.field("scope") == "local")
    local = run.table(_COLUMNS, below & of_rank, steps=(step, step + 1)).to_pylist()
    tied = {name for info in run.modules.values() for name in info.tied.values()}
    local = [row for row in local if not row["repeat"] and _full_name(row) not in tied]
    newest = max((row["attempt"] for row in heads), default=0)
    calls = []
    for head in heads:
        if head["attempt"] != newest:
            continue
        key = {column: head[column] for column in _KEY}
        of_call = [row for row in rows if all(row[column] == value for column, value in key.items())]
        slice_ = {column: head[column] for column in _KEY if column != "call"}
        is_alone = sum(all(other[column] == value for column, value in slice_.items()) for other in heads) == 1
        of_slice = [row for row in local if all(row[column] == value for column, value in slice_.items())]
        calls.append(
            RecordedCall(
                module_path=path, step=step, rank=rank, key=key, rows=of_call, gradients=of_slice if is_alone else ()
            )
        )
    return sorted(calls, key=lambda call: (call.key["micro_step"] or 0, call.key["call"]))


def _full_name(row: Mapping[str, Any]) -> str:
    return ".".join(filter(None, (row["module_path"], row["name"])))


def class_without_settings(run: Run, call: RecordedCall) -> str | None:
    """Return the class of a call's module where the folder's script can make it only with a factory; None elsewhere."""
    return _class_without_settings(_facts(run, call))


def _class_without_settings(facts: Mapping[str, Any]) -> str | None:
    """Return the class of a module that is not made from its settings alone, as `make_module` of the script decides."""
    where, _, qualified = str(facts.get("class")).partition(":")
    is_made = facts.get("constructor") is not None and where.startswith("torch.nn.modules.")
    return None if is_made else qualified


def _facts(run: Run, call: RecordedCall) -> dict[str, Any]:
    """Return what the row of a call says of the module and its arguments."""
    head = next(row for row in call.rows if row["site"] == CALL and not row["name"])
    return parse_object(_array(run, call, head).tobytes(), f"{run.name}: site call of {call.module_path!r}")


def write_bundle(run: Run, call: RecordedCall, path: Path) -> list[str]:
    """Write the folder of one call, and return what it lacks.

    Raises:
        WriteError: there is something at the path already, or it cannot be written.
        CorruptError: the bytes are not those that were written.
    """
    with published_folder(path) as folder:
        return fill_bundle(run, call, folder)


def fill_bundle(run: Run, call: RecordedCall, folder: Path) -> list[str]:
    """Write the files of a folder that exists."""
    facts = _facts(run, call)
    arrays: dict[str, npt.NDArray[Any]] = {}
    tensors: dict[str, dict[str, Any]] = {}
    lacks = []
    of_call = [row for row in call.rows if row["site"] in (CALL, *OF_REPLAY) and row["site"] != "grad"]
    for row in (*of_call, *call.gradients):
        if row["repeat"] or row["phase"] not in ("forward", "backward") or (row["site"] == CALL and not row["name"]):
            continue
        name = row["name"] if row["site"] == CALL else f"{row['site']}.{row['name']}"
        if row["site"] == "grad":
            inside = f"{call.module_path}." if call.module_path else ""
            name = f"grad.{_full_name(row).removeprefix(inside)}"
        if row["encoding"] is None or row["dtype"] not in SAFETENSORS_TYPES:
            why = "its values are not recorded" if row["encoding"] is None else row["dtype"]
            lacks.append(f"{name.removesuffix('.')}: {why}")
            continue
        arrays[name] = _array(run, call, row)
        tensors[name] = {"dtype": row["dtype"], "shape": list(arrays[name].shape)}
    about = facts.get("tensors")
    if not isinstance(about, dict):
        raise CorruptError(f"{run.name}: site call of {call.module_path!r} does not say which tensors it has")
    for name, one in about.items():
        if name not in arrays and not (isinstance(one, dict) and "same_as" in one):
            lacks.append(f"{name}: no row of it")
    if not any(name.startswith("output.") for name in arrays):
        lacks.append("output: no row of it")
    document = {
        "bundle": VERSION,
        "run": run.name,
        "module": call.module_path,
        "step": call.step,
        "rank": call.rank,
        **{column: call.key[column] for column in _KEY},
        "lacks": lacks,
        "tensors": tensors,
        "facts": facts,
    }
    (folder / TENSORS).write_bytes(_safetensors(arrays, tensors))
    (folder / BUNDLE).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    shutil.copyfile(_ALONE, folder / SCRIPT)
    (folder / "README").write_text(_readme(document), encoding="utf-8")
    return lacks


def _array(run: Run, call: RecordedCall, row: Mapping[str, Any]) -> npt.NDArray[Any]:
    """Read the values of one row."""
    key = {column: row[column] for column in ("site", "name", "micro_step", "call", "mode", "phase", "root", "attempt")}
    if row["scope"] is not None:
        key["scope"] = row["scope"]
    return run.array(row["module_path"], step=call.step, rank=call.rank, repeat=0, **key)


def _safetensors(arrays: Mapping[str, npt.NDArray[Any]], tensors: Mapping[str, Mapping[str, Any]]) -> bytes:
    """Return a safetensors file; `write_safetensors` streams rows of runs, and a call's tensors fit into memory."""
    header: dict[str, Any] = {"__metadata__": {"writer": "recorder"}}
    pieces, end = [], 0
    for name, array in sorted(arrays.items(), key=lambda item: -item[1].itemsize):  # each at a multiple of its size
        data = np.ascontiguousarray(array).tobytes()
        kind = SAFETENSORS_TYPES[tensors[name]["dtype"]]
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [end, end + len(data)]}
        pieces.append(data)
        end += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join((struct.pack("<Q", len(text)), text, *pieces))


def _readme(document: Mapping[str, Any]) -> str:
    facts = document["facts"]
    where = f"module {document['module']!r}, step {document['step']}, rank {document['rank']}"
    needs = "" if _class_without_settings(facts) is None else " --factory MODULE:FUNCTION"
    return (
        f"One call of a module, recorded in the run {document['run']}: {where}.\n\n"
        f"    python {SCRIPT}{needs}\n\n"
        f"runs it again with torch {facts.get('torch')} or another, without any other package, and compares outputs\n"
        "and gradients with what was recorded. Exit code 0: all reproduced; 1: something differs; 2: it cannot run.\n"
        f"`python {SCRIPT} --help` lists the options. {BUNDLE} says how the call was made, {TENSORS} holds its\n"
        "tensors.\n"
    )


REPRODUCED, WITHIN_ROUNDING, NOT_REPRODUCED, CANNOT_TELL = (
    "reproduced",
    "reproduced within rounding",
    "not reproduced",
    "cannot tell",
)


class Audited(NamedTuple):
    """What came of one call."""

    module: str
    step: int
    rank: int
    micro_step: int
    call: int
    verdict: str
    why: str


def audit(
    run: Run, *, step: int, module: str | None = None, rank: int | None = None, factory: str = ""
) -> list[Audited]:
    """Run the recorded calls of a step again.

    Args:
        run: a run with a rule ``keep=replay``.
        step: the step.
        module: one module's path; None: all.
        rank: one rank; None: all.
        factory: ``MODULE:FUNCTION`` that makes the whole model, for classes that are not of torch.nn.

    Raises:
        LookupFailedError: nothing was recorded for a replay.
    """
    calls = recorded_calls(run, step=step, module=module, rank=rank)
    with tempfile.TemporaryDirectory(prefix="recorder-audit-") as temporary:
        return [_audited(run, call, Path(temporary) / str(number), factory) for number, call in enumerate(calls)]


def _audited(run: Run, call: RecordedCall, folder: Path, factory: str) -> Audited:
    from .alone import DIFFERENT, EQUAL, TOTAL, CannotReplay, Options, replay

    def tell(verdict: str, why: str) -> Audited:
        call_key = (call.key["micro_step"] or 0, call.key["call"])
        return Audited(call.module_path, call.step, call.rank, *call_key, verdict, why)

    folder.mkdir()
    try:
        fill_bundle(run, call, folder)
        # A module of torch.nn is made from its settings: a factory may make a large model each time.
        options = Options()
        try:
            compared, notes = replay(folder, options)
        except CannotReplay:
            if not factory:
                raise
            options = Options(factory=factory)
            compared, notes = replay(folder, options)
        wrong = next((one for one in compared if one.verdict == DIFFERENT), None)
        is_repeatable = wrong is None or str(replay(folder, options)[0]) == str(compared)
    except (CannotReplay, RunError) as error:
        return tell(CANNOT_TELL, str(error))
    if wrong is not None:
        elements = f"{wrong.num_differing} of {wrong.numel} elements differ"
        said = f"{wrong.name}: {elements}, by {wrong.largest:.3g} of {wrong.scale:.3g}"
        if not is_repeatable:
            return tell(CANNOT_TELL, f"{said}, and another time by something else: it does not repeat itself here")
        if notes:
            return tell(CANNOT_TELL, "; ".join([said, *notes]))
        return tell(NOT_REPRODUCED, f"{said}, twice alike here: at the time, or here, a machine or a race was at fault")
    counts = Counter(one.verdict for one in compared)
    told = f"{counts[EQUAL]} of {len(compared) - counts[TOTAL]} tensors bit by bit"
    is_exact = counts[EQUAL] + counts[TOTAL] == len(compared)
    return tell(REPRODUCED if is_exact else WITHIN_ROUNDING, "; ".join([told, *notes]))
