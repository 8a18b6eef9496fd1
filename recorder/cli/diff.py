"""Owns ``recorder diff``: where two runs differ, the first divergent module on top."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow.compute as pc

from ..analyze.compare import Tolerance
from ..analyze.diff import Diff, Difference, diff, payload_bytes
from ..analyze.hints import RenameHint
from ..analyze.naming import Culprit
from ..analyze.noise import Drifted
from ..analyze.renames import NO_RENAMES, Renames
from ..analyze.selection import GlobalOptions, Selection
from ..read.run import Run
from .cluster import spread_by
from .first import as_dict
from .output import Column, Table, counted, number, print_json, progress, say, span

_FEW = 5
"""Lines of each table and culprits, where nobody asks for more."""
_JSON_ROWS = 20
_MAX_ULP = 9999
"""Representable numbers between two floats that say anything to a person."""
_MODULE_DROPS = ("nonfinite", "cosine", "first value", "compared", "stats apart")
_VALUE_DROPS = ("max ulp", "max rel", "cosine", "elements", "type", "rank", "shape", "statistics")
_EMPTY = dict.fromkeys(("max abs", "of max", "cosine", "max rel", "max ulp", "elements", "rank"), "-")
"""What a column of no distance holds, where only statistics, shapes or one run's ranks differ."""
_HOW = {
    "values": "values",
    "statistics": "statistics, without values to compare",
    "fingerprint": "fingerprints only: there is nothing else to compare",
    "shape": "shapes",
    "dtype": "types; the values are equal",
    "after_tap": "one run took the gradient behind the module, of the uses outside it alone",
}
_OF_MAX = "of max: max abs relative to the largest magnitude in either tensor"
_STATS_APART = "stats apart: where only statistics are there, how far these are apart in the same measure"


def show_diff(
    a: Run,
    b: Run,
    selection: Selection,
    tolerance: Tolerance,
    options: GlobalOptions,
    *,
    noise: Sequence[Run] = (),
    renames: Renames = NO_RENAMES,
    common: bool,
    limit: int | None = None,
    scheduler: str | None = None,
    is_brief: bool = False,
    as_json: bool,
) -> int:
    """Print how two runs compare and return the exit code: 1 if they differ, or a run contradicts itself.

    The answer comes first. Without a limit there are few lines of modules and none of single values.
    """
    with (
        spread_by(scheduler, a, b, *noise) as spread,
        progress("diff", payload_bytes(a) + payload_bytes(b)) as report,
    ):
        found = diff(
            a,
            b,
            selection.module,
            site=selection.site,
            name=selection.name,
            step=selection.step,
            **_given(tolerance),
            noise=noise,
            renames=renames,
            common=common,
            loss=options.loss,
            layouts=options.layouts,
            report=report,
            spread=spread,
        )
    if as_json:
        _print_json(a, b, found, _JSON_ROWS if limit is None else limit)
        return _exit_code(found)
    most = _FEW if limit is None else limit
    if not is_brief:
        say(f"A: {_run(a)}")
        say(f"B: {_run(b)}")
        for run in noise:
            say(f"noise: {_run(run)}{f', jitter {run.jitter}' if run.jitter else ''}")
    say(_verdict(found, tolerance, common=common, has_noise=bool(noise)))
    for line in _reasons(found, common=common):
        say(line)
    for line in _faults(found, most):
        say(line)
    for line in _accusations(found.culprits, most):
        say(line)
    if found.first is not None:
        say(_describe(found.first))
    if is_brief:
        return _exit_code(found)
    for line in (*_renamed(found.hints, most), *_notes(found, common=common, has_noise=bool(noise))):
        say(line)
    if found.first is not None:
        _print_modules(found, most)
        if limit is None:
            num = counted(found.table.num_rows, "value")
            say(f"{num} in all: --limit 20 lists the first of them, --limit 0 all; --brief leaves the tables out")
        else:
            _print_values(found, limit)
    _print_only("A", found.only_a, found.steps_only_a, most)
    _print_only("B", found.only_b, found.steps_only_b, most)
    return _exit_code(found)


def _faults(found: Diff, limit: int) -> Iterator[str]:
    """What is wrong with the runs themselves, or missing in them."""
    for text, num in list(found.unread.items())[: limit or None]:
        yield f"cannot be read: {counted(num, 'value')}, compared by statistics if there are any: {text}"
    for text in found.damage[: limit or None]:
        yield f"cannot be read: rows that are left out: {text}"
    hidden = sum(max(0, num - limit) for num in (len(found.unread), len(found.damage))) if limit else 0
    if hidden:
        yield f"{hidden} more of these (--limit 0 shows all)"
    for partial in found.partial:
        num_values = counted(partial.num_values, "value")
        yield f"{partial.run.upper()} lacks {_named(partial.ranks)} in {num_values}"
    for name, problems in (("A", found.problems_a), ("B", found.problems_b)):
        for problem in problems:
            yield f"finding in {name}: {problem}"
    for name, paths in (("A", found.unpaired_a), ("B", found.unpaired_b)):
        if paths:
            shown = ", ".join(map(repr, paths[: limit or None])) + _cut(len(paths), limit)
            yield f"modules of {name} without a partner ({len(paths)}): {shown}"


def _exit_code(found: Diff) -> int:
    return int(not found.is_equal or bool(found.problems_a or found.problems_b))


def _describe(first: Difference) -> str:
    what = " ".join(filter(None, (repr(first.module_path), first.site, first.name)))
    when = "" if first.micro_step is None else f", micro_step {first.micro_step}"
    ranks = _ranks(first.rank_a, first.rank_b)
    rank = f", rank {ranks}" if ranks else ""
    how = _HOW.get(first.kind, "")
    if first.kind == "partial":
        both = (("A", first.lacks_a), ("B", first.lacks_b))
        how = " and ".join(f"{run} lacks {_named(json.loads(lost))}" for run, lost in both if lost)
    apart = ""
    if first.max_abs:
        of_max = "" if first.of_max is None else f", {number(first.of_max)} of the largest magnitude"
        apart = f" by up to {number(first.max_abs)}{of_max}"
    elif first.statistic is not None:
        apart = f": {_statistic(first._asdict())}"
    if first.nonfinite_a or first.nonfinite_b:
        apart += f"; NaN or infinite in {first.nonfinite_a} elements of A, {first.nonfinite_b} of B"
    return f"first difference: step {first.step}{when}, {what}{rank}: {how}{apart}"


def _renamed(hints: Sequence[RenameHint], limit: int) -> Iterator[str]:
    """What a file of renamed modules may say."""
    if not hints:
        return
    num_modules, num_same = (sum(getattr(hint, name) for hint in hints) for name in ("num_modules", "num_same"))
    same = f", {num_same} of them equal first parameters" if num_same else ""
    alike = f"{counted(num_modules, 'module')} that A has alone and as many of B have tensors of the same shapes{same}"
    yield f"hint: {alike}; if they are the same, --rename FILE pairs them, with these lines{_cut(len(hints), limit)}"
    for hint in hints[: limit or None]:
        yield f"  {hint.line}"


def _accusations(culprits: Sequence[Culprit], limit: int) -> Iterator[str]:
    """A line for each culprit."""
    for culprit in culprits[: limit or None]:
        rank = f", {_named(culprit.ranks)}" if culprit.ranks else ""
        if culprit.micro_batches:
            some = ", ".join(map(str, culprit.micro_batches))
            rank += f", micro-batch{'es' * (len(culprit.micro_batches) > 1)} {some}"
        yield f"culprit: step {culprit.step}, {culprit.phase} of {_accused(culprit)}{rank}: {_shown(culprit)}"
        if culprit.hint:
            yield f"hint: {culprit.hint}"
    if len(culprits) > 1:
        yield "note: of several culprits the first is sure; the others may follow from it"
    if limit and len(culprits) > limit:
        yield f"{len(culprits) - limit} more culprits (--limit 0 shows all)"


def _accused(culprit: Culprit) -> str:
    if culprit.module_path is None:
        few = "all parameters" if culprit.num_params else "some parameters"
        touched = f"{culprit.num_params} parameters" if culprit.num_params > 1 else few
        if culprit.stages:
            touched += f" of stage{'s' * (len(culprit.stages) > 1)} {', '.join(map(str, culprit.stages))}"
        return f"{touched} alike" + (f" ({culprit.why})" if culprit.why else "")
    return f"{culprit.module_path!r}" + (f" ({culprit.why})" if culprit.why else "")


def _shown(culprit: Culprit) -> str:
    """Which value shows it, and how."""
    is_there = culprit.seen_at == culprit.module_path or culprit.site == "scalar"
    of = "" if is_there else f" of {culprit.seen_at!r}"
    value = " ".join(filter(None, (culprit.site, culprit.name))) + of
    if culprit.alone_in is not None:
        return f"{value} is in {culprit.alone_in.upper()} alone"
    if culprit.statistic is None and culprit.nonfinite_a != culprit.nonfinite_b:
        return f"{value} is NaN or infinite in {culprit.nonfinite_b} elements, {culprit.nonfinite_a} in A"
    if culprit.factor is not None:
        return f"{value} is {number(culprit.factor)} times what it was"
    if culprit.max_abs:
        of_max = "" if culprit.of_max is None else f", {number(culprit.of_max)} of the largest magnitude"
        noise = f", {culprit.max_abs / culprit.noise:.3g} times the noise" if culprit.noise else ""
        return f"{value} differs by up to {number(culprit.max_abs)}{of_max}{noise}"
    if culprit.statistic is not None:
        return f"{value} differs: {_statistic({**culprit._asdict(), 'statistic_rel': None})}"
    return f"{value} differs" + (f" ({culprit.kind})" if culprit.kind else "")


def _print_modules(found: Diff, limit: int) -> None:
    modules = found.modules.to_pylist()
    has_roots = len({module["root"] for module in modules}) > 1
    titles = [*(["root"] if has_roots else []), "module", "first step", "first value", "differ", "compared"]
    titles += ["max abs", "of max", "stats apart", "cosine", "nonfinite"]
    has_statistics = any(module["by_statistics"] for module in modules)
    lines = [
        [module["root"]] * has_roots
        + [module["module_path"] or "''", str(module["first_step"])]
        + [" ".join(filter(None, (module["first_site"], module["first_name"])))]
        + [str(module["differing"]), str(module["compared"]), number(module["max_abs"]), number(module["of_max"])]
        + [number(module["statistic_rel"]), _cosine(module["min_cosine"])]
        + [f"{module['nonfinite_a']}|{module['nonfinite_b']}"]
        for module in modules[: limit or None]
    ]
    title = f"modules that differ ({len(modules)}), in the order in which they do{_cut(len(modules), limit)}"
    texts = ("root", "module", "first value")
    absent = () if has_statistics else ("stats apart",)
    legend = f"{_OF_MAX}; {_STATS_APART}" if has_statistics else _OF_MAX
    _print(titles, lines, title, _MODULE_DROPS, texts=texts, absent=absent, legend=legend)


def _print_values(found: Diff, limit: int) -> None:
    rows = found.table.slice(0, limit or None).to_pylist()
    titles = ["step", "module", "value", "rank", "kind", "shape", "type", "elements", "max abs", "of max", "statistics"]
    titles += ["cosine", "max rel", "max ulp"]
    lines = [
        [
            str(row["step"]),
            row["module_path"] or "''",
            " ".join(filter(None, (row["site"], row["name"], _beside(row)))),
            _ranks(row["rank_a"], row["rank_b"]),
            row["kind"],
            _two(row["shape_a"], row["shape_b"]),
            _two(row["dtype_a"], row["dtype_b"]),
            "" if row["num_outside"] is None else f"{row['num_outside']}/{row['numel']}",
            number(row["max_abs"]),
            number(row["of_max"]),
            "" if row["statistic"] is None else _statistic(row),
            _cosine(row["cosine"]),
            number(row["max_rel"]),
            _whole(row["max_ulp"]),
        ]
        for row in rows
    ]
    num_rows = found.table.num_rows
    title = f"values that differ ({num_rows}), in the order of execution{_cut(num_rows, limit)}"
    texts = ("module", "value", "rank", "kind", "shape", "type", "statistics")
    absent = () if any(row["statistic"] is not None for row in rows) else ("statistics",)
    _print(titles, lines, title, _VALUE_DROPS, texts=texts, absent=absent)


def _print_only(run: str, only: Any, steps: list[int], limit: int) -> None:
    if only.num_rows:
        lines = [
            [
                row["module_path"] or "''",
                " ".join(filter(None, (row["site"], row["name"]))),
                str(row["rows"]),
                str(row["first_step"])
                if row["first_step"] == row["last_step"]
                else f"{row['first_step']}..{row['last_step']}",
            ]
            for row in only.slice(0, limit or None).to_pylist()
        ]
        title = f"only in {run}, at steps that both have{_cut(only.num_rows, limit)}"
        columns = [Column(title="module"), Column(title="value"), Column(title="rows", is_number=True)]
        Table([*columns, Column(title="steps")], lines, title=title).print()
    if steps:
        say(f"steps only in {run}: {span(steps)} (not compared; no difference by itself)")


def _run(run: Run) -> str:
    """Its name and where it is; the path alone where that is the name."""
    return str(run.path) if run.name == run.path.name else f"{run.name} ({run.path})"


def _verdict(found: Diff, tolerance: Tolerance, *, common: bool, has_noise: bool) -> str:
    num_compared = found.num_compared - found.num_left_out
    num_equal = num_compared - found.table.num_rows
    within = "exactly" if tolerance.is_exact else f"within {_said(tolerance)}"
    if has_noise:
        within = "within the noise" + (f" or {_said(tolerance)}" if not tolerance.is_exact else "")
    of = "" if num_compared == found.num_compared else f"{num_compared} of "
    lonely = (
        (name, pc.sum(table.column("rows")).as_py()) for name, table in (("A", found.only_a), ("B", found.only_b))
    )
    alone = "".join(f", {num} in {name} alone" for name, num in lonely if num and not common)
    num_shapes = sum(row["shape_a"] != row["shape_b"] for row in found.table.select(["shape_a", "shape_b"]).to_pylist())
    ways = {
        "fingerprint": num_compared - found.num_by_values - found.num_by_statistics - num_shapes,
        "values": found.num_by_values,
        "statistics": found.num_by_statistics,
    } | ({"shape": num_shapes} if num_shapes else {})
    return (
        f"{found.verdict}: {of}{counted(found.num_compared, 'value')} compared: {num_equal} equal {within}, "
        f"{found.table.num_rows} differ{alone} "
        f"(compared by: {', '.join(f'{way} {num}' for way, num in ways.items())})"
    )


def _reasons(found: Diff, *, common: bool) -> Iterator[str]:
    """Why the verdict is what it is, where no value differs."""
    if found.first is None and found.verdict == "different":
        yield "what could be compared is equal, but one run lacks values that the other has; --common ignores that"
    for left_out in found.left_out:
        yield f"not compared: {counted(left_out.num_values, 'value')}: {left_out.why}"
    if found.num_incomparable:
        values = counted(found.num_incomparable, "value")
        way_out = "" if common else "; --common ignores that"
        yield f"not compared: {values}: one run has nothing of what the other kept of them{way_out}"


def _notes(found: Diff, *, common: bool, has_noise: bool) -> Iterator[str]:
    num_only = sum(table.num_rows for table in (found.only_a, found.only_b))
    if found.num_bare:
        yield f"note: of {counted(found.num_bare, 'value')} neither run kept anything that could be compared"
    for run, other, num in (("A", "B", found.num_handed_on_a), ("B", "A", found.num_handed_on_b)):
        if num:
            what = f"{counted(num, 'row')} of {run} that one pipeline stage hands to another"
            yield f"note: {what} are not compared: {other} is not cut into stages so"
    for run, other, num in (("A", "B", found.num_recomputed_a), ("B", "A", found.num_recomputed_b)):
        if num:
            what = f"{counted(num, 'row')} that {run} recomputed for its backward"
            yield f"note: {what} are not compared: {other} recomputed nothing at these steps"
    if found.still_roots:
        roots = ", ".join(map(repr, found.still_roots))
        yield f"warning: the noise runs moved nothing in {roots}, where every difference counts"
    if found.loud_noise is not None:
        step, share = found.loud_noise
        yield (
            f"warning: at step {step} the noise runs are {share:.2g} of the norm away from A, more than roundings "
            "do in a step, and may hide errors; a twin is recorded as A was: same ranks, seeds and program"
        )
    if found.drifted is not None:
        yield _drifted(found.drifted)
    if has_noise and _is_open(found):
        yield (
            "note: statistics alone do not tell an update that is wrong from one of which rounding decided an element, "
            "as it may with Adam; tensors of param, grad and optim do, and two or three more twins (--noise again) may"
        )
    if num_only and common:
        yield f"note: {counted(num_only, 'value')} that one run alone has do not count (--common)"


def _is_open(found: Diff) -> bool:
    """Whether an update is a culprit, and no parameter that differs was compared by its values."""
    kinds = zip(found.table.column("site").to_pylist(), found.table.column("kind").to_pylist(), strict=True)
    return any(one.phase == "update" for one in found.culprits) and ("param", "values") not in kinds


def _drifted(drifted: Drifted) -> str:
    params = counted(drifted.num_params, "parameter")
    return (
        f"note: from step {drifted.step} on rounding has driven {params} farther apart than the twins show: what is "
        f"made from them has to be {drifted.times_noise:.3g} times as far apart as else to count as different, and "
        "smaller errors are not found (--noise may be given again, with other twins)"
    )


def _said(tolerance: Tolerance) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in _given(tolerance).items() if value)


def _given(tolerance: Tolerance) -> dict[str, Any]:
    return {"rtol": tolerance.rtol, "atol": tolerance.atol, "ulp": tolerance.ulp}


def _print_json(a: Run, b: Run, found: Diff, limit: int) -> None:
    tables = {name: getattr(found, name) for name in ("modules", "table", "only_a", "only_b")}
    shown = {name: table.slice(0, limit or None).to_pylist() for name, table in tables.items()}
    counts = {f"num_{name}": table.num_rows for name, table in tables.items()}
    shown["differing"], counts["num_differing"] = shown.pop("table"), counts.pop("num_table")
    rest = {name: as_dict(value) for name, value in found._asdict().items() if name not in tables}
    print_json({"a": str(a.path), "b": str(b.path), **rest, **counts, **shown})


def _print(
    titles: list[str], lines: list[list[str]], title: str, drops: tuple[str, ...], *, texts: tuple[str, ...],
    absent: Sequence[str] = (), legend: str = "",
) -> None:  # fmt: skip
    """A table, without the columns that are `absent`."""
    kept = [place for place, name in enumerate(titles) if name not in absent]
    titles, lines = [titles[place] for place in kept], [[line[place] for place in kept] for line in lines]
    columns = [
        Column(
            title=name,
            is_number=name not in texts,
            is_whole=name in ("kind", "shape"),
            is_prose=name == "statistics",
            drop=len(drops) - drops.index(name) if name in drops else 0,
            dull="0|0" if name == "nonfinite" else _EMPTY.get(name),
        )
        for name in titles
    ]
    Table(columns, lines, title=title, subtitle=legend).print()


def _beside(row: dict[str, Any]) -> str:
    """What else tells a value from others of its module."""
    micro_step = f"micro_step={row['micro_step']}" if row["micro_step"] else ""
    call = f"call={row['call']}" if row["call"] else ""
    mode = row["mode"] if row["mode"] != "train" else ""
    return " ".join(filter(None, (micro_step, call, mode, row["phase"] if row["phase"] == "recompute" else "")))


def _statistic(row: dict[str, Any]) -> str:
    """The statistic that is farthest apart, in as many digits as tell the two apart."""
    a, b = row["statistic_a"], row["statistic_b"]
    digits = (".0f",) if row["statistic"].endswith("_count") else (".4g", ".8g", ".17g")
    texts = [tuple("none" if value is None else format(value, form) for value in (a, b)) for form in digits]
    one, two = next((pair for pair in texts if pair[0] != pair[1]), texts[-1])
    apart = "" if row["statistic_rel"] is None else f", {number(row['statistic_rel'])} apart"
    return f"{row['statistic'].removesuffix('_count')} {one} | {two}{apart}"


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _ranks(a: int | None, b: int | None) -> str:
    return "" if a is None and b is None else _two("all" if a is None else a, "all" if b is None else b)


def _two(a: object, b: object) -> str:
    return str(a) if a == b else f"{a} | {b}"


def _whole(value: float | int | None) -> str:
    if value is None:
        return ""
    return f"{int(value)}" if value <= _MAX_ULP else f">{_MAX_ULP}"


def _cosine(value: float | None) -> str:
    return "" if value is None else f"{value:.6f}"


def _cut(count: int, limit: int) -> str:
    return f"; the first {limit} (--limit 0 shows all)" if limit and count > limit else ""
