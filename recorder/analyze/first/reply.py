"""What `recorder first` replies: the answer in words, with tables of what each rank holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ...run.reply import Reply, Table, plain, table_of
from ...run.run import Run
from ...sites import GIVEN, NUMBERS
from ...system.text import counted, number
from .first import First
from .nonfinite import NonFiniteTensor
from .replica_groups import BROADCAST, NEVER, OWN, Differing, RankValue
from .timeline import RecordedValue

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


def reply_of(run: Run, answer: First) -> Reply:
    """Return the reply; the exit code is 1 if anything went wrong, or damage hides whether it did."""

    def members() -> dict[str, Any]:
        return {"run": str(run.path), "found": answer.is_found, "problems": run.problems, **plain(answer)}

    return Reply(
        members=members, parts=lambda: _parts(run, answer), exit_code=int(answer.is_found or bool(run.problems))
    )


def _parts(run: Run, answer: First) -> Iterator[str | Table]:
    yield _nonfinite_part(run, answer)
    yield from _replica_parts(run, answer)
    yield from _buffer_lines(run, answer.buffers)
    for note in answer.notes:
        yield f"note: {note}"
    if run.problems:
        yield "note: the run is damaged, and what cannot be read was not looked at"


def _nonfinite_part(run: Run, answer: First) -> str | Table:
    bad = answer.nonfinite
    if bad is None:
        return f"{run.name}: {answer.all_finite}"
    title = f"{run.name}: first NaN or infinity: step {bad.value.step}, {_value(bad.value)}{_on_rank(bad.value)}"
    rows = [*_nonfinite_rows(bad), ("spread", _spread(answer))]
    source = run.manifest.merged_from
    if bad.value.rank is None and source is not None:
        rows.append(("which rank", f"the run that this was merged from tells: recorder first {source.path}"))
    return _pairs_table(title, rows)


def _nonfinite_rows(bad: NonFiniteTensor) -> Iterator[tuple[str, str]]:
    yield from _where(bad.value)
    yield "counts", f"{bad.nan_count} NaN, {bad.inf_count} infinite of {counted(bad.numel, 'element')}"
    if bad.is_skipped:
        yield "update", "skipped by GradScaler at this step, as it does where scaled gradients overflow"
    yield "values before it", f"{bad.num_before} of this step on its rank"
    before = bad.before
    yield (
        "last healthy value",
        "nothing" if before is None else f"{_value(before)}, step {before.step}{_when(before)}",
    )
    for other in bad.beside:
        name = f"{other.site} {other.name}" if other.site in GIVEN and other.name else other.name or other.site
        kinds = ((other.nan_count, "NaN"), (other.inf_count, "infinite"))
        counts = [f"{count} {kind}" for count, kind in kinds if count]
        name = name if other.site in NUMBERS else f"its {name}"
        yield "beside it", f"{name} holds {' and '.join(counts)} at step {bad.value.step}, too"
    if bad.last_healthy is None:
        yield "last healthy itself", "never recorded so before"
    else:
        steps = counted(bad.num_steps_healthy, "step")
        yield "last healthy itself", f"step {bad.last_healthy.step} ({steps} recorded so)"


def _spread(answer: First) -> str:
    return f"{counted(answer.num_nonfinite, 'value')} of {counted(answer.num_nonfinite_modules, 'module')} not finite"


def _replica_parts(run: Run, answer: First) -> Iterator[str | Table]:
    differing = answer.replica
    if differing is None:
        why = answer.why_none_compared or "there is no parameter, gradient or optimizer state to compare"
        yield f"{run.name}: {answer.replicas_agree or f'replicas: not compared, because {why}'}"
    else:
        title = f"first replica that differs: step {differing.value.step}, {_value(differing.value)}"
        yield _pairs_table(f"{run.name}: {title}, ranks {_groups(differing)}", _replica_rows(answer, differing))
        if differing.ranks:
            yield _ranks_table(differing.ranks)


def _buffer_lines(run: Run, buffers: Sequence[Differing]) -> Iterator[str]:
    """Yield lines about the buffers that differ; buffers that are a finding come first."""
    by_meaning: dict[str, list[Differing]] = {_STALE: []}
    for buffer in buffers:
        meaning = _STALE if buffer.is_stale else _HEALED if buffer.sync == NEVER else _BUFFERS[buffer.sync]
        by_meaning.setdefault(meaning, []).append(buffer)
    for meaning, some in by_meaning.items():
        if not some:
            continue
        yield f"{run.name}: {counted(len(some), 'buffer')} of which ranks hold different values"
        yield f"  {meaning}"
        for buffer in some[:_MAX_LISTED]:
            ranks = f"ranks {_groups(buffer)} (by {buffer.by})"
            yield f"  {_value(buffer.value)}: first at step {buffer.value.step}, {ranks}"
        if len(some) > _MAX_LISTED:
            yield f"  and {len(some) - _MAX_LISTED} more; --json has all"


def _replica_rows(answer: First, differing: Differing) -> Iterator[tuple[str, str]]:
    yield from _where(differing.value)
    yield "seen by", differing.by
    if differing.is_assumed:
        yield "replicas", "assumed: neither DDP nor FSDP was seen around this model"
    equal = differing.last_equal
    yield "last equal", "no record before shows them equal" if equal is None else f"step {equal.step}"
    names = [" ".join(filter(None, (repr(module), site, name))) for module, site, name in answer.differing]
    more = f" and {len(names) - _MAX_LISTED} more; --json has all" if len(names) > _MAX_LISTED else ""
    yield "ever differ", f"{len(names)}: {', '.join(names[:_MAX_LISTED])}{more}"


def _ranks_table(values: Sequence[RankValue]) -> Table:
    rows = [
        [str(v.rank), number(v.mean), number(v.l2), number(v.absmax), v.shape, v.fingerprint or ""]
        for v in values[:_MAX_RANKS]
    ]
    more = f" (the first {_MAX_RANKS} of {len(values)} ranks; --json has all)" if len(values) > _MAX_RANKS else ""
    return table_of(
        ("rank", "mean", "l2", "absmax", "shape", "fingerprint"),
        rows,
        numbers=("rank", "mean", "l2", "absmax"),
        whole=("shape", "fingerprint"),
        title=f"what each rank holds{more}",
    )


def _pairs_table(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    return table_of(("what", "found"), list(rows), prose=("found",), title=title)


def _where(value: RecordedValue) -> Iterator[tuple[str, str]]:
    source = "" if _LIBRARY in value.source.replace("\\", "/") else value.source
    info = " ".join(filter(None, (value.module_class, source)))
    yield "module", f"{value.module_path or chr(39) * 2}{', ' if info else ''}{info}"
    named = f", {value.name}" if value.name else ""
    yield "value", f"{value.site}{named}: {value.dtype} {value.shape}, {value.phase}, {value.mode}"
    yield "when", f"step {value.step}{_when(value)}"


def _value(value: RecordedValue) -> str:
    return " ".join(filter(None, (repr(value.module_path), value.site, value.name)))


def _when(value: RecordedValue) -> str:
    micro_step = "" if value.micro_step is None else f", micro_step {value.micro_step}"
    repeat = f", repeat {value.repeat}" if value.repeat else ""
    attempt = f", attempt {value.attempt}" if value.attempt else ""
    return f"{micro_step}, call {value.call}{repeat}{attempt}"


def _on_rank(value: RecordedValue) -> str:
    return ", in the global tensor" if value.rank is None else f", rank {value.rank}"


def _groups(differing: Differing) -> str:
    shown = [_ranks(ranks) for ranks in differing.groups[:_MAX_LISTED]]
    return " | ".join(shown) + (" | ..." if len(differing.groups) > _MAX_LISTED else "")


def _ranks(ranks: Sequence[int]) -> str:
    return ",".join(map(str, ranks[:_MAX_RANKS])) + (f",... ({len(ranks)})" if len(ranks) > _MAX_RANKS else "")
