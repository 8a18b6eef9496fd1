"""Finds calls recorded by a rule with ``keep=replay``, and writes a call as a folder that runs alone.

`audit` writes all calls of a step, and runs each of them. This module must never import torch, nor a class that a run
names: the script in the folder does so when a user starts it, and an audit does so on request.
"""

from __future__ import annotations

import json
import shlex
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from ...errors import CorruptError, LookupFailedError, RunError
from ...format.rundir import parse_object
from ...rules import hint
from ...run.reply import Reply, StateLine
from ...run.run import Run
from ...sites import CALL, OF_REPLAY, full_name
from ...system.text import counted, listed, printable, steps_in_words
from ..export.files import SAFETENSORS_TYPES, published_folder, write_safetensors
from ..export.tensors import Entry, Span

VERSION = 1
"""The version of the folder's format. The script in the folder accepts no other version."""
BUNDLE, TENSORS, SCRIPT = "bundle.json", "tensors.safetensors", "replay.py"
_KEY = ("attempt", "root", "micro_step", "call", "mode")
"""The columns that have equal values in all rows of one call, besides module, step and rank."""
_COLUMNS = (*_KEY, "site", "name", "phase", "scope", "repeat", "rank", "module_path", "dtype", "shape", "encoding")
_ALONE = Path(__file__).with_name("alone.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCall:
    """One recorded call of a module that can be replayed: its rows, without the tensors' values."""

    module_path: str
    step: int
    rank: int
    key: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    gradients: Sequence[Mapping[str, Any]]
    """The rows of the gradients of the parameters in the module. Empty unless only this call made these gradients."""


def recorded_calls(
    run: Run, *, step: int | None, module: str | None = None, rank: int | None = None
) -> list[RecordedCall]:
    """Return the calls of a step that a rule with ``keep=replay`` has recorded, by module and rank.

    Only the newest attempt at a step counts. Raises LookupFailedError if there is no such call, or no step is given;
    the message lists the existing calls, or the rule to record with.
    """
    table = run.table(["module_path", "step", "rank"], pc.field("site") == CALL)
    if not table.num_rows:
        raise LookupFailedError(
            f"{run.name}: nothing to replay; record with a rule such as 'module=blocks.3.mlp steps=100 keep=replay'"
        )
    for column, asked in (("module_path", module), ("rank", rank), ("step", step)):
        there = sorted(table.column(column).unique().to_pylist())
        if asked is not None and asked not in there:
            name = column.removesuffix("_path")
            choices = f"; there is {steps_in_words(there, name)}" if column != "module_path" else ""
            if isinstance(asked, str):
                choices = hint(asked, there, otherwise=f"; there is {listed(map(repr, there))}")
            raise LookupFailedError(f"{run.name}: no call with {name}={asked!r} was recorded for a replay{choices}")
        if asked is not None:
            table = table.filter(pc.field(column) == asked)
    if step is None:
        steps = sorted(table.column("step").unique().to_pylist())
        raise LookupFailedError(f"replay needs the step: --step {steps[-1]}; there is {steps_in_words(steps)}")
    modules_and_ranks = sorted({(row["module_path"], row["rank"]) for row in table.to_pylist()})
    return [call for path, its_rank in modules_and_ranks for call in _calls_of(run, path, step, its_rank)]


def _calls_of(run: Run, path: str, step: int, rank: int) -> list[RecordedCall]:
    wanted = (pc.field("module_path") == path) & (pc.field("rank") == rank)
    rows = run.table(_COLUMNS, wanted, steps=(step, step + 1)).to_pylist()
    heads = [row for row in rows if row["site"] == CALL and not row["name"]]
    below = pc.field("module_path") == path
    below |= pc.starts_with(pc.field("module_path"), f"{path}.") if path else pc.field("module_path") != path
    of_rank = (pc.field("rank") == rank) & (pc.field("site") == "grad") & (pc.field("scope") == "local")
    local = run.table(_COLUMNS, below & of_rank, steps=(step, step + 1)).to_pylist()
    tied = {name for info in run.modules.values() for name in info.tied.values()}
    local = [row for row in local if not row["repeat"] and full_name(row["module_path"], row["name"]) not in tied]
    newest = max((row["attempt"] for row in heads), default=0)
    calls = []
    for head in (row for row in heads if row["attempt"] == newest):
        key = {column: head[column] for column in _KEY}
        of_call = [row for row in rows if all(row[column] == value for column, value in key.items())]
        slice_ = {column: head[column] for column in _KEY if column != "call"}
        is_alone = sum(all(other[column] == value for column, value in slice_.items()) for other in heads) == 1
        of_slice = [row for row in local if all(row[column] == value for column, value in slice_.items())]
        gradients = of_slice if is_alone else ()
        calls.append(
            RecordedCall(module_path=path, step=step, rank=rank, key=key, rows=of_call, gradients=gradients)
        )  # fmt: skip
    return sorted(calls, key=lambda call: (call.key["micro_step"] or 0, call.key["call"]))


def _class_without_settings(facts: Mapping[str, Any]) -> str | None:
    """Return the name of a module's class if the script needs a factory to make the module. Otherwise return None."""
    where, _, qualified = str(facts.get("class")).partition(":")
    is_made = facts.get("constructor") is not None and where.startswith("torch.nn.modules.")
    return None if is_made else qualified


def _facts(run: Run, call: RecordedCall) -> dict[str, Any]:
    head = next(row for row in call.rows if row["site"] == CALL and not row["name"])
    return parse_object(_array(run, call, head).tobytes(), f"{run.name}: site call of {call.module_path!r}")


def write_bundle(run: Run, call: RecordedCall, path: Path) -> list[str]:
    """Write the folder of one call, and return what is missing in it.

    Raises WriteError if the path exists or cannot be written, and CorruptError if bytes are damaged.
    """
    with published_folder(path) as folder:
        return fill_bundle(run, call, folder)


def fill_bundle(run: Run, call: RecordedCall, folder: Path) -> list[str]:
    """Write the files of one call into a folder, and return what is missing."""
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
            name = "grad." + full_name(row["module_path"], row["name"]).removeprefix(inside)
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
            lacks.append(f"{name}: it has no row")
    if not any(name.startswith("output.") for name in arrays):
        lacks.append("output: it has no row")
    document = {
        "bundle": VERSION, "run": run.name, "module": call.module_path, "step": call.step, "rank": call.rank,
        **{column: call.key[column] for column in _KEY}, "lacks": lacks, "tensors": tensors, "facts": facts,
    }  # fmt: skip
    entries = [
        Entry((call.step, call.step + 1), 0, name, tensors[name]["dtype"], array.shape, array.nbytes, {}, {})
        for name, array in arrays.items()
    ]

    def spans_of(entry: Entry) -> Iterator[Span]:
        yield Span(np.ascontiguousarray(arrays[entry.name]).reshape(-1).view(np.uint8), 0)

    with (folder / TENSORS).open("wb") as file:
        write_safetensors(file, spans_of, entries, lambda num_bytes: None)
    (folder / BUNDLE).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    shutil.copyfile(_ALONE, folder / SCRIPT)
    (folder / "README").write_text(_readme(document), encoding="utf-8")
    return lacks


def _array(run: Run, call: RecordedCall, row: Mapping[str, Any]) -> npt.NDArray[Any]:
    key = {column: row[column] for column in ("site", "name", "micro_step", "call", "mode", "phase", "root", "attempt")}
    if row["scope"] is not None:
        key["scope"] = row["scope"]
    return run.array(row["module_path"], step=call.step, rank=call.rank, repeat=0, **key)


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


REPRODUCED, WITHIN_ROUNDING = "reproduced", "reproduced within rounding"
NOT_REPRODUCED, CANNOT_TELL = "not reproduced", "cannot tell"


class Audited(NamedTuple):
    """The result of running one call again."""

    module: str
    step: int
    rank: int
    micro_step: int
    call: int
    verdict: str
    why: str


def audit(
    run: Run, *, step: int | None, module: str | None = None, rank: int | None = None, factory: str = ""
) -> list[Audited]:
    """Run the recorded calls of a step again: of all modules and ranks, or of one module or rank.

    `factory` is the ``MODULE:FUNCTION`` that makes the complete model, for classes outside torch.nn. Raises
    LookupFailedError if nothing was recorded for a replay.
    """
    calls = recorded_calls(run, step=step, module=module, rank=rank)
    with tempfile.TemporaryDirectory(prefix="recorder-audit-") as temporary:
        return [_audited(run, call, Path(temporary) / str(number), factory) for number, call in enumerate(calls)]


_STATES = {NOT_REPRODUCED: "differs", CANNOT_TELL: "note"}


def audit_reply(run: Run, results: Sequence[Audited]) -> Reply:
    """Return the reply of `recorder replay --audit`. The exit code is 1 if a call was not reproduced.

    Asking for the exit code raises LookupFailedError if none of the calls could be judged.
    """

    def parts() -> Iterator[str | StateLine]:
        num_of = Counter((one.module, one.rank) for one in results)
        calls_of: dict[tuple[str, str, str], list[str]] = {}
        for one in sorted(results, key=lambda one: (one.verdict in _STATES, one.verdict == NOT_REPRODUCED)):
            where = f"{printable(repr(one.module))}, rank {one.rank}"
            where += f", micro-step {one.micro_step}, call {one.call}" * (num_of[one.module, one.rank] > 1)
            own = "" if one.verdict == CANNOT_TELL else where  # unjudged calls with the same reason share a line
            calls_of.setdefault((one.verdict, one.why, own), []).append(where)
        for (verdict, why, _), calls in calls_of.items():
            of_calls = f" ({counted(len(calls), 'call')})" if len(calls) > 1 else ""
            text = f"{listed(calls)}{of_calls}: {verdict}: {printable(why)}"
            yield StateLine(_STATES.get(verdict, "ok"), text)
        num_open = sum(one.verdict == CANNOT_TELL for one in results)
        if 0 < num_open < len(results):
            yield f"{num_open} of {counted(len(results), 'call')} could not be judged: the exit code leaves them out"

    def exit_code() -> int:
        if all(one.verdict == CANNOT_TELL for one in results):
            why = printable(results[0].why) if results else "a part of each call is missing"
            raise LookupFailedError(f"none of the {counted(len(results), 'call')} could be judged; the first: {why}")
        return int(any(one.verdict == NOT_REPRODUCED for one in results))

    return Reply(
        members=lambda: {"run": str(run.path), "results": [one._asdict() for one in results]},
        parts=parts,
        exit_code=exit_code,
    )


def the_call(calls: Sequence[RecordedCall], micro_step: int, call: int) -> RecordedCall:
    """Return the call with this micro-step and call index, among `recorded_calls`.

    Raises LookupFailedError if several ranks recorded the call, or none did; the message lists the calls.
    """
    ranks = sorted({one.rank for one in calls})
    if len(ranks) > 1:
        several = f"{counted(len(ranks), 'rank')} recorded this call"
        raise LookupFailedError(f"{several}: name one with --rank, such as {ranks[0]}")
    for one in calls:
        if (one.key["micro_step"] or 0, one.key["call"]) == (micro_step, call):
            return one
    there = ", ".join(f"{one.key['micro_step']}/{one.key['call']}" for one in calls[:8])
    raise LookupFailedError(f"no call {call} of micro-step {micro_step}; recorded (micro-step/call): {there}")


def bundle_reply(run: Run, call: RecordedCall, out: Path, lacks: Sequence[str], factory: str) -> Reply:
    """Return the reply of `recorder replay` about the folder of a call. `lacks` names the parts that are missing."""
    own_class = _class_without_settings(_facts(run, call))

    def parts() -> Iterator[str | StateLine]:
        if own_class is not None and not factory:
            text = f"{SCRIPT} cannot make the class {printable(own_class)} from the recording: name a function without "
            text += "arguments that makes this module or the whole model, with --factory"
            yield StateLine("note", text)
        for lack in lacks:
            yield StateLine("note", f"the call cannot be run, something is missing: {printable(lack)}")
        maker = factory or ("MODULE:FUNCTION" if own_class is not None else "")
        yield f"{out}: {shlex.join(['python', str(out / SCRIPT), *(['--factory', maker] if maker else [])])}"

    needs_factory = own_class is not None
    return Reply(
        members=lambda: {"run": str(run.path), "path": str(out), "lacks": lacks, "needs_factory": needs_factory},
        parts=parts,
    )


def _audited(run: Run, call: RecordedCall, folder: Path, factory: str) -> Audited:
    from .alone import DIFFERENT, EQUAL, TOTAL, CannotReplay, Options, replay

    def tell(verdict: str, why: str) -> Audited:
        call_key = (call.key["micro_step"] or 0, call.key["call"])
        return Audited(call.module_path, call.step, call.rank, *call_key, verdict, why)

    folder.mkdir()
    try:
        fill_bundle(run, call, folder)
        # Modules of torch.nn are made from their settings, because a factory may make a large model at each call.
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
            return tell(CANNOT_TELL, f"{said}, and differently a second time: the call is not deterministic here")
        if notes:
            return tell(CANNOT_TELL, "; ".join([said, *notes]))
        return tell(NOT_REPRODUCED, f"{said}, twice alike here: at the time, or here, a machine or a race was at fault")
    counts = Counter(one.verdict for one in compared)
    told = f"{counts[EQUAL]} of {len(compared) - counts[TOTAL]} tensors bit by bit"
    is_exact = counts[EQUAL] + counts[TOTAL] == len(compared)
    return tell(REPRODUCED if is_exact else WITHIN_ROUNDING, "; ".join([told, *notes]))
