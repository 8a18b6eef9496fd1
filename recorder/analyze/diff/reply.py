"""Makes the output of `recorder diff`: verdict, reasons, tables of modules, values, histograms, units (channels)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import pyarrow.compute as pc

from ...numerics import distributions
from ...numerics.keys import by_key
from ...run.notes import raised
from ...run.reply import Reply, Table, plain
from ...run.run import Run
from ...system.text import (
    counted,
    listed,
    model_in_words,
    moment,
    named,
    number,
    site_in_words,
    span,
    value_in_words,
)  # fmt: skip
from .compare import Tolerance
from .culprit_findings import BY_PROBE, ROUNDING_ALONE, Culprit
from .culprit_search import START
from .renames import NO_RENAMES, RenameHint, Renames
from .step_range import Diff, Difference, DiffOptions

_FEW = 5
"""The number of rows of each table, and of culprits, that are printed without ``--limit``."""
_JSON_ROWS = 20
_MAX_JSON_BINS = 4096
"""The most bins of a histogram in JSON. No dtype has as many powers of two."""
_MODULE_DROPS = ("nonfinite", "cosine", "first value", "compared", "stats apart")
_HISTOGRAM_DROPS = ("infinite", "subnormal", "zero")
_UNITS_DROPS = ("dead", "rank", "units")
_VALUE_DROPS = ("max ulp", "max rel", "cosine", "elements", "type", "rank", "shape", "statistics")
_DULL = {"nonfinite": "0|0"} | dict.fromkeys(
    ("max abs", "of max", "cosine", "max rel", "max ulp", "elements", "rank"), "-"
)
"""For each column, the text of a cell without information. A column is left out if all its cells have this text."""
_OF_MAX = "of max: max abs relative to the largest magnitude in either tensor"
_APART = "apart: the share of values that would have to change sign or power of two for both to have one distribution"
_DEAD = "dead: units with no value but zero; farthest: the unit whose root of the mean square (rms) differs most"
_STATS_APART = "stats apart: if only statistics were recorded, their distance in the same measure"


def reply_of(a: Run, b: Run, result: Diff, options: DiffOptions, *, limit: int | None, is_brief: bool) -> Reply:
    """Return the output of `recorder diff`. If `limit` is None, it lists a few modules and no single values.

    The exit code is 1 if the runs differ, or the rows of a run contradict each other.
    """
    return Reply(
        members=lambda: _members(a, b, result, _JSON_ROWS if limit is None else limit),
        parts=lambda: _parts(a, b, result, options, limit=limit, is_brief=is_brief),
        exit_code=int(not result.is_equal or bool(result.problems_a or result.problems_b)),
    )


def _members(a: Run, b: Run, result: Diff, limit: int) -> dict[str, Any]:
    tables = {name: getattr(result, name) for name in ("modules", "table", "only_a", "only_b")}
    shown = {name: table.slice(0, limit or None).to_pylist() for name, table in tables.items()}
    counts = {f"num_{name}": table.num_rows for name, table in tables.items()}
    shown["differing"] = list(map(_with_details, shown.pop("table")))
    counts["num_differing"] = counts.pop("num_table")
    rest = {name: plain(value) for name, value in result._asdict().items() if name not in tables}
    runs: dict[str, object] = {}
    for side, run in (("a", a), ("b", b)):
        runs |= {side: str(run.path), f"name_{side}": run.name, f"started_ns_{side}": run.started_ns}
        runs[f"raised_{side}"] = raised(run)
    return {**runs, **rest, **counts, **shown}


def _with_details(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a value that differs, for JSON. Columns of units form one member; histograms are decoded."""
    a, b = distributions.histogram_of_row(row, "_a"), distributions.histogram_of_row(row, "_b")
    units = {name: row[name] for name in distributions.UnitsApart._fields}
    rest = {name: value for name, value in row.items() if name not in ("histogram_a", "histogram_b", *units)}
    rest["units"] = None if units["units_a"] is None else units
    if a is None or b is None:
        return rest | {"histogram": None}
    bins = distributions.bins_of([a, b], _MAX_JSON_BINS)
    histogram: dict[str, Any] = {"first_exponent": bins.first, "exponents_per_bin": bins.exponents_per_bin}
    histogram |= {"apart": distributions.share_apart(a, b)}
    for side, one, shares in (("a", a, bins.shares[0]), ("b", b, bins.shares[1])):
        histogram[f"share_{side}"] = shares
        histogram[f"subnormal_count_{side}"] = distributions.subnormal_count(one, row[f"dtype_{side}"])
    return rest | {"histogram": histogram}


def _parts(
    a: Run, b: Run, result: Diff, options: DiffOptions, *, limit: int | None, is_brief: bool
) -> Iterator[str | Table]:
    most, has_models = _FEW if limit is None else limit, a.has_models or b.has_models
    for name, run in (("A", a), ("B", b), *(("noise", run) for run in options.noise if not is_brief)):
        jitter = f", jitter {run.jitter}" if name == "noise" and run.jitter else ""
        path = str(run.path) if run.name == run.path.name else f"{run.name} ({run.path})"
        yield f"{name}: {path}{f', started {moment(run.started_ns)}' if run.started_ns else ''}{jitter}"
    yield _verdict(result, options)
    for name, run in (("A", a), ("B", b)):
        yield from (f"note: in {name} {one}" for one in raised(run))
    if result.verdict == "different":
        yield from unlike_models(a, b, options.renames)
    yield from _reasons(result, most, common=options.common)
    yield from accusations(result.culprits, most, has_models=has_models)
    if result.first is not None:
        is_later = any(one.kind == BY_PROBE and one.step < result.first.step for one in result.culprits)
        yield f"first difference{_IN_ROWS * is_later}: {_describe(result.first, has_models=has_models)}"
    yield from _faults(result, most)
    if is_brief:
        yield from _left_aside(result, options)
        return
    yield from _rename_lines(result.hints, most)
    yield from _notes(result, options)
    if result.first is not None:
        yield _modules_table(result, most, has_models=has_models)
        if limit is None:
            num = counted(result.table.num_rows, "value")
            yield f"{num} in all: --limit 20 lists the first of them, --limit 0 all; --brief leaves the tables out"
        else:
            yield _values_table(result, limit, has_models=has_models)
        tables = (table(result, most, has_models=has_models) for table in (_histograms_table, _units_table))
        yield from filter(None, tables)
    yield from _only_parts("A", result.only_a, most, has_models=has_models)
    yield from _only_parts("B", result.only_b, most, has_models=has_models)
    yield from _left_aside(result, options)


_HOW = {
    "values": "values",
    "statistics": "statistics, without values to compare",
    "fingerprint": "fingerprints only: there is nothing else to compare",
    "shape": "shapes",
    "dtype": "types; the values are equal",
    "after_tap": "one run took the gradient behind the module, which covers only uses outside of the module",
}


def _verdict(result: Diff, options: DiffOptions) -> str:
    tolerance = options.tolerance
    num_compared = result.num_compared - result.num_left_out
    num_equal = num_compared - result.table.num_rows
    within = "exactly" if tolerance.is_exact else f"within {_tolerances(tolerance)}"
    if options.noise:
        within = "within the noise" + (f" or {_tolerances(tolerance)}" if not tolerance.is_exact else "")
    of_all = "" if num_compared == result.num_compared else f"{num_compared:,} of "
    unpaired = (
        (name, pc.sum(table.column("rows")).as_py()) for name, table in (("A", result.only_a), ("B", result.only_b))
    )
    alone = [f"{num:,} in {name} alone" for name, num in unpaired if num and not options.common]
    answer, why = result.verdict, ""
    if result.num_probes_differing and not result.table.num_rows:
        answer = "; ".join(["different by the numbers of the probe alone", *alone])
    elif alone and not result.table.num_rows:
        is_open = result.unread or result.damage or result.num_incomparable or result.left_out
        answer = f"equal {'as far as compared' if is_open else 'where both runs have it'}; {', '.join(alone)}"
    if result.table.num_rows and set(result.table.column("kind").to_pylist()) == {"dtype"}:
        why = " (in type alone)"
    shapes = (result.table.column(name).to_pylist() for name in ("shape_a", "shape_b"))
    num_shapes = sum(a != b for a, b in zip(*shapes, strict=True))
    ways = {
        "fingerprint": num_compared - result.num_by_values - result.num_by_statistics - num_shapes,
        "values": result.num_by_values,
        "statistics": result.num_by_statistics,
    } | ({"shape": num_shapes} if num_shapes else {})
    return (
        f"{answer}{why}: {of_all}{counted(result.num_compared, 'value')} compared: "
        f"{num_equal:,} equal {within}, "
        f"{result.table.num_rows:,} differ{''.join(f', {one}' for one in alone if result.table.num_rows)} "
        f"(compared by: {', '.join(f'{way} {num:,}' for way, num in ways.items())})"
    )


def _reasons(result: Diff, limit: int, *, common: bool) -> Iterator[str]:
    if result.num_probes_differing:
        num, differing = counted(result.num_probed, "number"), f"{result.num_probes_differing:,}"
        yield f"keep=probe, which has one number of each value at every step: {num} compared, {differing} differ"
    elif result.first is None and result.verdict == "different":
        yield "one run lacks values that the other run has, so the exit code is 1; --common ignores such values"
    if not result.has_common_modules:
        yield (
            "no module has a record in both runs at the same step: only records of the root or the program, such as a "
            "learning rate, were compared"
        )
    for left_out in result.left_out:
        of = f" of {listed(map(repr, left_out.modules), limit or len(left_out.modules))}" if left_out.modules else ""
        yield f"not compared: {counted(left_out.num_values, 'value')}{of}: {left_out.why}"
    if result.num_incomparable:
        values = counted(result.num_incomparable, "value")
        way_out = "" if common else "; --common ignores that"
        yield f"not compared: {values}: the two runs did not keep the same kind of data of them{way_out}"


def _faults(result: Diff, limit: int) -> Iterator[str]:
    for text, num in list(result.unread.items())[: limit or None]:
        yield f"cannot be read: {counted(num, 'value')}, compared by statistics if there are any: {text}"
    for text in result.damage[: limit or None]:
        yield f"cannot be read, and are left out: rows: {text}"
    hidden = sum(max(0, num - limit) for num in (len(result.unread), len(result.damage))) if limit else 0
    if hidden:
        yield f"{hidden} more such lines (--limit 0 shows all)"
    for partial in result.partial:
        num_values = counted(partial.num_values, "value")
        yield f"{partial.run.upper()} lacks {named('rank', partial.ranks)} in {num_values}"
    for name, problems in (("A", result.problems_a), ("B", result.problems_b)):
        yield from (f"finding in {name}: {line}" for line in (_by_reason(problems) if limit else problems))
    for name, paths in (("A", result.unpaired_a), ("B", result.unpaired_b)):
        if paths:
            shown = ", ".join(map(repr, paths[: limit or None])) + _cut_text(len(paths), limit)
            yield f"modules of {name} without a partner ({len(paths)}): {shown}"


_MOST_NAMED = 2


def _by_reason(problems: Sequence[str]) -> Iterator[str]:
    """Yield a line for each reason why rows contradict each other. A line names at most two values."""
    parts = (problem.partition(": ") if problem.startswith("'") else ("", "", problem) for problem in problems)
    for reason, some in by_key((reason, value) for value, _, reason in parts).items():
        shown = (
            ", ".join(some)
            if len(some) <= _MOST_NAMED
            else f"{some[0]} and {len(some) - 1} more (--limit 0 lists them)"
        )
        yield f"{shown}: {reason}" if some[0] else reason


_IN_ROWS = " in the rows, which not every step has"
"""What is said of the first difference if the probe, which sees every step, saw a culprit before."""


def _describe(first: Difference, *, has_models: bool) -> str:
    value = model_in_words(first.root, has_models=has_models)
    value += value_in_words(first.module_path, first.site, first.name)
    when = "" if first.micro_step is None else f", micro_step {first.micro_step}"
    ranks = _rank_cell(first.rank_a, first.rank_b)
    rank = f", rank {ranks}" if ranks else ""
    kind = _HOW.get(first.kind, "")
    if first.kind == "partial":
        both = (("A", first.lacks_a), ("B", first.lacks_b))
        kind = " and ".join(f"{run} lacks {named('rank', json.loads(lost))}" for run, lost in both if lost)
    apart = ""
    if first.max_abs:
        of_max = "" if first.of_max is None else f", {number(first.of_max)} of the largest magnitude"
        apart = f" by up to {number(first.max_abs)}{of_max}"
    elif first.statistic is not None:
        apart = f": {_statistic_cell(first._asdict())}"
    if first.nonfinite_a or first.nonfinite_b:
        apart += f"; NaN or infinite in {first.nonfinite_a} elements of A, {first.nonfinite_b} of B"
    return f"step {first.step}{when}, {value}{rank}: {kind}{apart}"


def _rename_lines(hints: Sequence[RenameHint], limit: int) -> Iterator[str]:
    if not hints:
        return
    num_modules, num_same = (sum(getattr(hint, name) for hint in hints) for name in ("num_modules", "num_same"))
    same = f", {num_same} of them equal first parameters" if num_same else ""
    alike = f"{counted(num_modules, 'module')} that only A has, and as many of B, have tensors of the same shapes{same}"
    cut = _cut_text(len(hints), limit)
    yield f"hint: {alike}; if the modules are the same, --rename FILE pairs them, with these lines{cut}"
    for hint in hints[: limit or None]:
        yield f"  {hint.line}"


_FACTS = {
    "evaluated": "modules are in evaluation mode while the model is trained",
    "frozen": "parameters require no gradient",
    "untrained": "parameters get a gradient, and no optimizer that steps has them",
    "batch_as_time": "modules take a dim as long as the labels for the time",
    "validated_in_training": "the model is in training mode in a validation",
    "optimizer_anew_since": "a new optimizer makes each update",
    "loss_argument": "the loss gets another argument or other labels than it expects, or is negated",
    "uncleared": "gradients are not cleared before the next backward",
}
"""For each fact about a module, what it means if only one of two runs has it."""


def unlike_models(a: Run, b: Run, renames: Renames = NO_RENAMES) -> Iterator[str]:
    """Yield lines about modules that only one model has, or of which a fact is true in one run alone."""
    one = dict.fromkeys(path for _, path in a.modules)
    two = dict.fromkeys(renames.old(path) for _, path in b.modules)
    sides = ("A", [path for path in one if path not in two]), ("B", [path for path in two if path not in one])
    alone = [
        f"{counted(len(some), 'module')} in {run} alone ({listed(map(repr, some), _FEW)})"
        for run, some in sides
        if some
    ]
    if one and two and alone:
        yield f"the models differ: {'; '.join(alone)}"
    has_models = a.has_models or b.has_models
    pairs = [
        (model_in_words(root, has_models=has_models) + repr(path), a.modules[root, path], module)
        for (root, own), module in b.modules.items()
        if (root, path := renames.old(own)) in a.modules
    ]
    for run, modules in (("A", pairs), ("B", [(path, two, one) for path, one, two in pairs])):
        for fact, what in _FACTS.items():
            those = [path for path, module, other in modules if module.has_fact(fact) and not other.has_fact(fact)]
            if those:
                yield f"the models differ: in {run} alone {what} ({listed(those, _FEW)})"


def accusations(culprits: Sequence[Culprit], limit: int, *, has_models: bool = False) -> Iterator[str]:
    """Yield the lines about culprits. Updates that may follow from an update of all parameters share one line."""
    alike = {one.step for one in culprits if one.phase == "update" and one.module_path is None}
    follow = [one for one in culprits if one.phase == "update" and one.step in alike and one.module_path is not None]
    led = [one for one in culprits if one not in follow]
    for culprit in led[: limit or None]:
        yield accusation(culprit, led[0], has_models=has_models)
        if culprit.hint:
            yield f"hint: {culprit.hint}"
        those = (one for one in follow if one.step == culprit.step)
        paths = dict.fromkeys(model_in_words(one.root, has_models=has_models) + repr(one.module_path) for one in those)
        if paths and culprit.phase == "update" and culprit.module_path is None:
            yield f"  the update of {listed(paths)} differs, too, which may be a consequence"
            follow = []
    yield from culprit_notes(led, limit)
    if limit and len(led) > limit:
        yield f"{len(led) - limit} more culprits (--limit 0 shows all)"


def accusation(culprit: Culprit, first: Culprit, *, has_models: bool = False) -> str:
    """Return the line about a culprit. It says "may follow" if NaN of the `first` culprit may be the reason."""
    rank = f", {named('rank', culprit.ranks)}" if culprit.ranks else ""
    if culprit.micro_batches:
        rank += f", {named('micro-batch', culprit.micro_batches, most=len(culprit.micro_batches))}"
    worse = _worse_run(culprit)
    word = "may follow" if worse and worse == _worse_run(first) and culprit.step > first.step else "culprit"
    stage = "before the step: " if culprit.phase == START else f"{culprit.phase} of "
    shown = ", e.g. " if culprit.phase == START and culprit.module_path is None else ": "
    model = model_in_words(culprit.root, has_models=has_models)
    return f"{word}: step {culprit.step}, {model}{stage}{_accused(culprit)}{rank}{shown}{_symptom(culprit)}"


def _worse_run(culprit: Culprit) -> str:
    a, b = culprit.nonfinite_a or 0, culprit.nonfinite_b or 0
    return "" if a == b else "A" if a > b else "B"


def culprit_notes(culprits: Sequence[Culprit], limit: int = 0) -> Iterator[str]:
    """Yield notes on the certainty of the culprits. The first `limit` culprits are shown; 0 means all culprits."""
    if len(culprits) > 1 and culprits[0].why != ROUNDING_ALONE:
        yield "note: of several culprits only the first is certain; the others may follow from it"
    if any(one.kind == BY_PROBE for one in culprits[: limit or None]):
        yield "note: keep=probe has the norm alone: what comes before may differ, and have the same norm"
    if any(one.why == ROUNDING_ALONE for one in culprits[: limit or None]):
        yield "note: a gradient of mere rounding may change updates in sound trainings, since Adam divides by it"


def _accused(culprit: Culprit) -> str:
    accused = repr(culprit.module_path)
    if culprit.module_path is None:
        few = "all parameters" if culprit.num_params else "some parameters"
        accused = f"{culprit.num_params} parameters" if culprit.num_params > 1 else few
        if culprit.stages:
            accused += f" of {named('stage', culprit.stages, most=len(culprit.stages))}"
        accused += "" if culprit.phase == START else " alike"
    return accused + (f" ({culprit.why})" if culprit.why else "")


def _symptom(culprit: Culprit) -> str:
    is_there = culprit.seen_at == culprit.module_path or culprit.site == "scalar"
    of = "" if is_there else f" of {culprit.seen_at!r}"
    value = site_in_words(culprit.site, culprit.name) + of
    if culprit.alone_in is not None:
        num_bad = (culprit.nonfinite_a or 0) + (culprit.nonfinite_b or 0)
        is_bad = f"NaN or infinite in {counted(num_bad, 'element')}, " if num_bad else ""
        return f"{value} is {is_bad}in {culprit.alone_in.upper()} alone"
    if culprit.statistic is None and culprit.nonfinite_a != culprit.nonfinite_b:
        return f"{value} is NaN or infinite in {culprit.nonfinite_b} elements of B, {culprit.nonfinite_a} of A"
    if culprit.factor is not None:
        return f"{value} is {number(culprit.factor)} times its value in A"
    if culprit.max_abs:
        of_max = "" if culprit.of_max is None else f", {number(culprit.of_max)} of the largest magnitude"
        noise = f", {culprit.max_abs / culprit.noise:.3g} times the noise" if culprit.noise else ""
        return f"{value} differs by up to {number(culprit.max_abs)}{of_max}{noise}"
    if culprit.statistic is not None:
        text_a, text_b = _statistic_texts(culprit._asdict())
        by = " (by keep=probe; all norms before it are equal)" if culprit.kind == BY_PROBE else ""
        if culprit.statistic == "l2" and culprit.nonfinite_a != culprit.nonfinite_b:  # the norm leaves them out
            sides = (culprit.nonfinite_a, text_a, "A"), (culprit.nonfinite_b, text_b, "B")
            bad = (f"{counted(n, 'NaN or infinite element') if n else f'l2 {norm}'} in {run}" for n, norm, run in sides)
            return f"{value} differs: {'; '.join(bad)}{by}"
        return f"{value} differs: {culprit.statistic.removesuffix('_count')} {text_a} in A, {text_b} in B{by}"
    return f"{value} differs" + (f" ({culprit.kind})" if culprit.kind else "")


def _notes(result: Diff, options: DiffOptions) -> Iterator[str]:
    if result.num_bare:
        yield f"note: of {counted(result.num_bare, 'value')} neither run recorded data that can be compared"
    handed_on = "of {} that go between stages, or to experts and back, are not compared: {} is not cut so"
    recomputed = "that {} recomputed for its backward are not compared: {} recomputed nothing at these steps"
    for num, text, *runs in (
        (result.num_handed_on_a, handed_on, "A", "B"), (result.num_handed_on_b, handed_on, "B", "A"),
        (result.num_recomputed_a, recomputed, "A", "B"), (result.num_recomputed_b, recomputed, "B", "A"),
    ):  # fmt: skip
        if num:
            yield f"note: {counted(num, 'row')} {text.format(*runs)}"
    if result.still_roots:
        roots = ", ".join(map(repr, result.still_roots))
        yield f"warning: the noise runs changed nothing in {roots}, so every difference there counts"
    if result.loud_noise is not None:
        step, share = result.loud_noise
        yield (
            f"warning: at step {step} the noise runs differ from A by {share:.2g} of the norm, more than rounding "
            "explains in a step, and may hide errors; record a twin as A was: same ranks, seeds and program"
        )
    if (drifted := result.drifted) is not None:
        yield (
            f"note: from step {drifted.step} on rounding has driven {counted(drifted.num_params, 'parameter')} farther "
            "apart than the twins show: for values computed from them, the limit of noise is "
            f"{drifted.times_noise:.3g} times as large, and smaller errors are not found (--noise may be given again, "
            "with other twins)"
        )
    kinds = zip(result.table.column("site").to_pylist(), result.table.column("kind").to_pylist(), strict=True)
    is_open = any(culprit.phase == "update" for culprit in result.culprits) and ("param", "values") not in kinds
    if options.noise and is_open:  # no differing parameter has values that were compared
        yield (
            "note: statistics do not tell a wrong update from an update in which rounding decided an element, as "
            "it may with Adam; tensors of param, grad and optim do, and two or three more twins (--noise again) may"
        )


def _tolerances(tolerance: Tolerance) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in asdict(tolerance).items() if value)


_MAX_ULP = "9999"
"""The largest number of units in the last place that is printed. A larger number is printed as ``>9999``."""


def _beside(row: dict[str, Any]) -> str:
    micro_step = f"micro_step={row['micro_step']}" if row["micro_step"] else ""
    call = f"call={row['call']}" if row["call"] else ""
    mode = row["mode"] if row["mode"] != "train" else ""
    return " ".join(filter(None, (micro_step, call, mode, row["phase"] if row["phase"] == "recompute" else "")))


def _statistic_texts(row: dict[str, Any]) -> tuple[str, str]:
    """Return the two runs' values of a statistic as texts, with enough digits to tell them apart."""

    def text(side: str, form: str) -> str:
        value = row[f"statistic_{side}"]
        return "none" if value is None else format(value, form)

    digits = (".0f",) if row["statistic"].endswith("_count") else (".4g", ".8g", ".17g")
    texts = [(text("a", form), text("b", form)) for form in digits]
    return next((pair for pair in texts if pair[0] != pair[1]), texts[-1])


def _statistic_cell(row: dict[str, Any]) -> str:
    text_a, text_b = _statistic_texts(row)
    apart = "" if row["statistic_rel"] is None else f", {number(row['statistic_rel'])} apart"
    return f"{row['statistic'].removesuffix('_count')} {text_a} | {text_b}{apart}"


def _rank_cell(a: int | None, b: int | None) -> str:
    return "" if a is None and b is None else _pair_cell("all" if a is None else a, "all" if b is None else b)


def _pair_cell(a: object, b: object) -> str:
    return str(a) if a == b else f"{a} | {b}"


def _cosine_cell(value: float | None) -> str:
    return "" if value is None else f"{value:.6f}"


def _cut_text(count: int, limit: int) -> str:
    return f"; the first {limit} (--limit 0 shows all)" if limit and count > limit else ""


def _modules_table(result: Diff, limit: int, *, has_models: bool) -> Table:
    modules = result.modules.to_pylist()
    has_roots = has_models or len({module["root"] for module in modules}) > 1
    titles = [*(["root"] if has_roots else []), "module", "first step", "first value", "differ", "compared"]
    titles += ["max abs", "of max", "stats apart", "cosine", "nonfinite"]
    has_statistics = any(module["by_statistics"] for module in modules)
    lines = [
        [module["root"]] * has_roots
        + [module["module_path"] or "''", str(module["first_step"])]
        + [site_in_words(module["first_site"], module["first_name"])]
        + [str(module["differing"]), str(module["compared"]), number(module["max_abs"]), number(module["of_max"])]
        + [number(module["statistic_rel"]), _cosine_cell(module["min_cosine"])]
        + [f"{module['nonfinite_a']}|{module['nonfinite_b']}"]
        for module in modules[: limit or None]
    ]
    title = f"modules that differ ({len(modules)}), in the order in which they do{_cut_text(len(modules), limit)}"
    texts = ("root", "module", "first value")
    optional, legend = ("", f"{_OF_MAX}; {_STATS_APART}") if has_statistics else ("stats apart", _OF_MAX)
    return _table(titles, lines, title, _MODULE_DROPS, texts=texts, optional=optional, legend=legend)


def _values_table(result: Diff, limit: int, *, has_models: bool) -> Table:
    rows = result.table.slice(0, limit or None).to_pylist()
    titles = ["step", "module", "value", "rank", "kind", "shape", "type", "elements", "max abs", "of max", "statistics"]
    titles += ["cosine", "max rel", "max ulp"]
    lines = []
    for row in rows:
        outside = "" if row["num_outside"] is None else f"{row['num_outside']}/{row['numel']}"
        shapes, types = (_pair_cell(row[f"{name}_a"], row[f"{name}_b"]) for name in ("shape", "dtype"))
        statistic = "" if row["statistic"] is None else _statistic_cell(row)
        ulp = "" if row["max_ulp"] is None else str(int(row["max_ulp"]))
        lines.append([*_head(row, has_models=has_models)])
        lines[-1] += [row["kind"], shapes, types, outside, number(row["max_abs"]), number(row["of_max"])]
        lines[-1] += [statistic, _cosine_cell(row["cosine"]), number(row["max_rel"])]
        lines[-1].append(ulp if len(ulp) <= len(_MAX_ULP) else f">{_MAX_ULP}")
    num_rows = result.table.num_rows
    title = f"values that differ ({num_rows}), in the order of execution{_cut_text(num_rows, limit)}"
    texts = ("module", "value", "rank", "kind", "shape", "type", "statistics")
    return _table(titles, lines, title, _VALUE_DROPS, texts=texts, optional="statistics")


def _head(row: dict[str, Any], *, has_models: bool) -> tuple[str, str, str, str]:
    module = model_in_words(row["root"], has_models=has_models) * has_models + (row["module_path"] or "''")
    value = f"{site_in_words(row['site'], row['name'])} {_beside(row)}".rstrip()
    return str(row["step"]), module, value, _rank_cell(row["rank_a"], row["rank_b"])


def _histograms_table(result: Diff, limit: int, *, has_models: bool) -> Table | None:
    table = result.table.filter(pc.field("histogram_a").is_valid() & pc.field("histogram_b").is_valid())
    rows = table.slice(0, limit or None).to_pylist()
    rows_with_histograms = [
        (row, distributions.histogram_of_row(row, "_a"), distributions.histogram_of_row(row, "_b")) for row in rows
    ]
    pairs = [(row, a, b) for row, a, b in rows_with_histograms if a is not None and b is not None]
    if not pairs:
        return None
    drawn, magnitudes = distributions.histogram_lines([one for _, a, b in pairs for one in (a, b)])
    titles = ["step", "module", "value", "rank", "A", "B", "apart", "zero", "subnormal", "infinite"]
    lines = []
    for (row, a, b), *lines_of in zip(pairs, drawn[::2], drawn[1::2], strict=True):
        of_subnormals = [distributions.subnormal_count(one, row[f"dtype_{side}"]) for side, one in (("a", a), ("b", b))]
        subnormal = "|".join("-" if count is None else str(count) for count in of_subnormals)
        zeros, infinite = f"{a.zero_count}|{b.zero_count}", f"{int(a.infinite.sum())}|{int(b.infinite.sum())}"
        share = distributions.share_apart(a, b)
        apart = "" if share is None else f"{share:.3%}" if share < 0.01 else f"{share:.1%}"
        lines.append([*_head(row, has_models=has_models), *lines_of, apart, zeros, subnormal, infinite])
    title = f"histograms of values that differ ({table.num_rows}): {magnitudes}{_cut_text(table.num_rows, limit)}"
    texts, legend = ("module", "value", "rank", "A", "B"), f"{_APART}; {distributions.HISTOGRAM_LEGEND}"
    return _table(titles, lines, title, _HISTOGRAM_DROPS, texts=texts, optional="rank", legend=legend)


def _units_table(result: Diff, limit: int, *, has_models: bool) -> Table | None:
    table = result.table.filter(pc.field("units_a").is_valid())
    rows = table.slice(0, limit or None).to_pylist()
    if not rows:
        return None
    titles = ["step", "module", "value", "rank", "units", "differ", "dead", "farthest", "its rms"]
    lines = []
    for row in rows:
        apart, unit = ("-" if row[name] is None else str(row[name]) for name in ("units_apart", "unit"))
        rms = "-" if row["unit"] is None else f"{number(row['unit_rms_a'])}|{number(row['unit_rms_b'])}"
        dead = f"{row['units_dead_a']}|{row['units_dead_b']}"
        lines.append([*_head(row, has_models=has_models)])
        lines[-1] += [_pair_cell(row["units_a"], row["units_b"]), apart, dead, unit, rms]
    title = f"units of values that differ ({table.num_rows}){_cut_text(table.num_rows, limit)}"
    texts = ("module", "value", "rank")
    return _table(titles, lines, title, _UNITS_DROPS, texts=texts, optional="rank", legend=_DEAD)


def _only_parts(run: str, only: Any, limit: int, *, has_models: bool) -> Iterator[str | Table]:
    if only.num_rows:
        rows = []
        for row in only.slice(0, limit or None).to_pylist():
            value = site_in_words(row["site"], row["name"])
            its_steps = "..".join(map(str, sorted({row["first_step"], row["last_step"]})))
            model = [row["root"]] * has_models
            rows.append([*model, row["module_path"] or "''", value, str(row["rows"]), its_steps])
        title = f"only in {run}, at steps that both have{_cut_text(only.num_rows, limit)}"
        titles = ["root"] * has_models + ["module", "value", "rows", "steps"]
        yield Table(titles, rows, numbers=("rows",), title=title)


def _left_aside(result: Diff, options: DiffOptions) -> Iterator[str]:
    """Yield lines about the values and steps that do not count, because only one run has them."""
    num_only = sum(pc.sum(table.column("rows")).as_py() or 0 for table in (result.only_a, result.only_b))
    if num_only and options.common:
        yield f"note: {counted(num_only, 'value')} that only one run has do not count (--common)"
    for run, steps in (("A", result.steps_only_a), ("B", result.steps_only_b)):
        if steps:
            yield f"steps only in {run}: {span(steps)} (not compared; no difference by itself)"


def _table(
    titles: list[str], lines: list[list[str]], title: str, drops: tuple[str, ...], *, texts: tuple[str, ...],
    optional: str, legend: str = "",
) -> Table:  # fmt: skip
    """Return a table. The column `optional` is left out if all its cells are empty."""
    kept = [i for i, name in enumerate(titles) if name != optional or any(line[i] for line in lines)]
    titles, lines = [titles[i] for i in kept], [[line[i] for i in kept] for line in lines]
    return Table(
        titles, lines, numbers=[name for name in titles if name not in texts], whole=("kind", "shape"),
        prose=("statistics",), drops=drops, dull=_DULL, title=title, subtitle=legend,
    )  # fmt: skip
