"""Owns ``recorder first``: what went wrong first, as text or JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..analyze.first import First, first
from ..analyze.nonfinite import NonFinite
from ..analyze.replicas import BROADCAST, NEVER, OWN, Differing
from ..analyze.timeline import Place
from ..read.run import Run
from .output import Column, Table, counted, number, print_json, say

_LIBRARY = "site-packages/torch/"
_MAX_LISTED = 5
_MAX_RANKS = 8
_BUFFERS = {
    BROADCAST: "no finding: the forward updates each rank's own, and DDP broadcasts the first rank's before the next",
    OWN: "no finding: FSDP broadcasts no buffers and keeps each rank's own",
    None: "no finding: a forward may update each rank's own, and nothing says whether they are broadcast",
}
_STALE = "nothing ever makes them equal again: DDP has broadcast_buffers=False"
_HEALED = "no finding: DDP has broadcast_buffers=False, but in their last record they are equal again"


def show_first(run: Run, *, as_json: bool) -> int:
    """Print what went wrong first and return the exit code: 1 if anything did, or damage hides whether it did."""
    found = first(run)
    exit_code = int(found.is_found or bool(run.problems))
    if as_json:
        print_json({"run": str(run.path), "found": found.is_found, "problems": run.problems} | as_dict(found))
        return exit_code
    _print_nonfinite(run, found)
    _print_replica(run, found)
    for note in found.notes:
        say(f"note: {note}")
    if run.problems:
        say("note: the run is damaged, and what cannot be read was not looked at")
    return exit_code


def as_dict(value: Any) -> Any:
    """Named tuples, also nested ones, as what JSON has."""
    if hasattr(value, "_asdict"):
        return {name: as_dict(item) for name, item in value._asdict().items()}
    if isinstance(value, (list, tuple)):
        return [as_dict(item) for item in value]
    return value


def _print_nonfinite(run: Run, found: First) -> None:
    bad = found.nonfinite
    if bad is None:
        say(f"{run.name}: no NaN, and no infinity that was not there from the first record on")
        return
    title = f"{run.name}: first NaN or infinity: step {bad.place.step}, {_value(bad.place)}{_on_rank(bad.place)}"
    facts = [*_nonfinite_facts(bad), ("spread", _spread(found))]
    source = run.manifest.get("merged_from")
    if bad.place.rank is None and isinstance(source, dict):
        facts.append(("which rank", f"the run that this was merged from tells: recorder first {source.get('path')}"))
    _print_facts(title, facts)


def _nonfinite_facts(bad: NonFinite) -> Iterator[tuple[str, str]]:
    yield from _where(bad.place)
    yield "counts", f"{bad.nan_count} NaN, {bad.inf_count} infinite of {counted(bad.numel, 'element')}"
    if bad.is_skipped:
        yield "update", "skipped by GradScaler at this step, as it does where scaled gradients overflow"
    yield "values before it", f"{bad.num_before} of this step on its rank"
    before = bad.before
    yield (
        "last healthy value",
        "nothing" if before is None else f"{_value(before)}, step {before.step}{_when(before)}",
    )
    for one in bad.beside:
        name = f"{one.site} {one.name}" if one.site in ("input", "scalar") and one.name else one.name or one.site
        counts = [f"{count} {what}" for count, what in ((one.nan_count, "NaN"), (one.inf_count, "infinite")) if count]
        name = name if one.site == "scalar" else f"its {name}"
        yield "beside it", f"{name} holds {' and '.join(counts)} at step {bad.place.step}, too"
    if bad.last_healthy is None:
        yield "last healthy itself", "never recorded so before"
    else:
        steps = counted(bad.num_steps_healthy, "step")
        yield "last healthy itself", f"step {bad.last_healthy.step} ({steps} recorded so)"


def _spread(found: First) -> str:
    return f"{counted(found.num_nonfinite, 'value')} of {counted(found.num_nonfinite_modules, 'module')} not finite"


def _print_replica(run: Run, found: First) -> None:
    differing = found.replica
    if differing is None and not found.num_compared:
        why = found.why_none_compared or "there is no parameter, gradient or optimizer state to compare"
        say(f"{run.name}: replicas: not compared, because {why}")
    elif differing is None:
        rest = f"{counted(found.num_compared, 'value')} compared"
        say(f"{run.name}: no parameter, gradient or optimizer state differs between its replicas ({rest})")
    else:
        title = f"first replica that differs: step {differing.place.step}, {_value(differing.place)}"
        _print_facts(f"{run.name}: {title}, ranks {_groups(differing)}", _replica_facts(found, differing))
        _print_ranks(differing)
    _print_buffers(run, found.buffers)


def _print_buffers(run: Run, buffers: Sequence[Differing]) -> None:
    """Those that are a finding first."""
    by_meaning: dict[str, list[Differing]] = {_STALE: []}
    for one in buffers:
        meaning = _STALE if one.is_stale else _HEALED if one.sync == NEVER else _BUFFERS[one.sync]
        by_meaning.setdefault(meaning, []).append(one)
    for meaning, some in by_meaning.items():
        if not some:
            continue
        say(f"{run.name}: {counted(len(some), 'buffer')} of which ranks hold different values")
        say(f"  {meaning}")
        for one in some[:_MAX_LISTED]:
            say(f"  {_value(one.place)}: first at step {one.place.step}, ranks {_groups(one)} (by {one.by})")
        if len(some) > _MAX_LISTED:
            say(f"  and {len(some) - _MAX_LISTED} more; --json has all")


def _replica_facts(found: First, differing: Differing) -> Iterator[tuple[str, str]]:
    yield from _where(differing.place)
    yield "seen by", differing.by
    if differing.is_assumed:
        yield "replicas", "assumed: neither DDP nor FSDP was seen around this model"
    equal = differing.last_equal
    yield "last equal", "never recorded so before" if equal is None else f"step {equal.step}"
    names = [" ".join(filter(None, (repr(module), site, name))) for module, site, name in found.differing]
    more = f" and {len(names) - _MAX_LISTED} more; --json has all" if len(names) > _MAX_LISTED else ""
    yield "ever differ", f"{len(names)}: {', '.join(names[:_MAX_LISTED])}{more}"


def _print_ranks(differing: Differing) -> None:
    values = differing.ranks
    if not values:
        return
    columns = [Column(title="rank", is_number=True)]
    columns += [Column(title=title, is_number=True) for title in ("mean", "l2", "absmax")]
    columns += [Column(title=title, is_whole=True) for title in ("shape", "fingerprint")]
    rows = [
        [str(v.rank), number(v.mean), number(v.l2), number(v.absmax), v.shape, v.fingerprint or ""]
        for v in values[:_MAX_RANKS]
    ]
    more = f" (the first {_MAX_RANKS} of {len(values)} ranks; --json has all)" if len(values) > _MAX_RANKS else ""
    Table(columns, rows, title=f"what each rank holds{more}").print()


def _print_facts(title: str, facts: Iterator[tuple[str, str]] | Sequence[tuple[str, str]]) -> None:
    Table(
        [Column(title="what"), Column(title="found", is_prose=True)], [list(fact) for fact in facts], title=title
    ).print()


def _where(place: Place) -> Iterator[tuple[str, str]]:
    source = "" if _LIBRARY in place.source.replace("\\", "/") else place.source
    info = " ".join(filter(None, (place.module_class, source)))
    yield "module", f"{place.module_path or chr(39) * 2}{', ' if info else ''}{info}"
    named = f", {place.name}" if place.name else ""
    yield "value", f"{place.site}{named}: {place.dtype} {place.shape}, {place.phase}, {place.mode}"
    yield "when", f"step {place.step}{_when(place)}"


def _value(place: Place) -> str:
    return " ".join(filter(None, (repr(place.module_path), place.site, place.name)))


def _when(place: Place) -> str:
    micro_step = "" if place.micro_step is None else f", micro_step {place.micro_step}"
    repeat = f", repeat {place.repeat}" if place.repeat else ""
    attempt = f", attempt {place.attempt}" if place.attempt else ""
    return f"{micro_step}, call {place.call}{repeat}{attempt}"


def _on_rank(place: Place) -> str:
    return ", in the global tensor" if place.rank is None else f", rank {place.rank}"


def _groups(differing: Differing) -> str:
    shown = [_ranks(ranks) for ranks in differing.groups[:_MAX_LISTED]]
    return " | ".join(shown) + (" | ..." if len(differing.groups) > _MAX_LISTED else "")


def _ranks(ranks: Sequence[int]) -> str:
    return ",".join(map(str, ranks[:_MAX_RANKS])) + (f",... ({len(ranks)})" if len(ranks) > _MAX_RANKS else "")
