"""Makes the reply of `recorder align`: the answer in one sentence, and tables of modules, positions and weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from ...run.reply import Reply, StateLine, Table, plain, table_of
from ...run.run import Run
from ...system.text import counted, number
from .align import CLIP, Aligned
from .apart import ValueApart
from .sequences import TokenAt
from .weights import EQUAL, MERGED, UNKNOWN, WRONG, told_weight

_FEW = 8


def reply_of(trainer: Run, engine: Run | None, found: Aligned, *, limit: int | None, of_weights: bool) -> Reply:
    """Return the reply. The exit code is 1 if the two part, or if tokens or weights differ."""
    most = _FEW if limit is None else limit or None
    is_wrong = any(state.state in WRONG for state in found.weights) if of_weights else not found.is_fine
    return Reply(
        members=lambda: _members(trainer, engine, found),
        parts=lambda: _weight_parts(found, most) if of_weights else _parts(trainer, engine, found, most),
        exit_code=int(is_wrong),
    )


def _members(trainer: Run, engine: Run | None, found: Aligned) -> dict[str, Any]:
    members = {one.name: plain(getattr(found, one.name)) for one in fields(found) if one.name != "search"}
    return {"trainer": str(trainer.path), "engine": str((engine or trainer).path), "is_fine": found.is_fine, **members}


def _parts(trainer: Run, engine: Run | None, found: Aligned, most: int | None) -> Iterator[str | StateLine | Table]:
    yield f"trainer: {trainer.name} ({trainer.path}), step {found.step}"
    yield f"engine: {engine.name} ({engine.path})" if engine else "engine: the calls of the same run that decode"
    samples = f"{counted(found.num_samples, 'sample')}, joined by {found.joined_by}"
    is_told = bool(found.values) and found.search.unsure is None
    yield StateLine("fault" if not found.is_fine else "ok" if is_told else "note", found.told)
    if found.parting is not None:
        (bad, prompts), (bad_decoded, decoded) = found.parting.at_once, found.parting.one_by_one
        where = f"{bad} of {prompts} tokens that the engine ran at once, {bad_decoded} of {decoded} that it decoded"
        yield f"where: {where}; first {_at(found.parting.first)}; worst {_at(found.parting.worst)}"
    yield f"compared: {counted(found.num_tokens, 'token')} of {samples}; bounds are {found.bounds}"
    for one in found.tokens[:most]:
        yield StateLine("fault" if one.is_finding else "note", one.text)
    if (apart := found.logprobs) is not None:
        yield (
            f"log-probabilities of {counted(apart.num_tokens, 'token')}, trainer minus engine: mean "
            f"{number(apart.mean)}, mean magnitude {number(apart.mean_abs)}, largest {number(apart.largest.apart)} at "
            f"{_at(apart.largest)}; KL (k3) {number(apart.k3)}; {apart.clipped:.1%} of the ratios are beyond {CLIP:g}"
        )
    if engine is not None:
        yield _weights_line(found)
    if found.experts:
        block, its = max(found.experts.items(), key=lambda item: item[1].num_other / max(item[1].num_tokens, 1))
        fullest = max(range(len(its.load_trainer)), key=its.load_trainer.__getitem__)
        share, of_engine = (load[fullest] / max(sum(load), 1) for load in (its.load_trainer, its.load_engine))
        text = f"most other choices at {block!r}, for {its.num_other} of {its.num_tokens} tokens"
        text += f"; expert {fullest} has {share:.0%} of its choices (engine: {of_engine:.0%})"
        state = "note" if its.num_other else "ok"
        yield StateLine(state, f"experts of {counted(len(found.experts), 'router')}: {text}")
    if found.num_unknown:
        advice = "left out; say whose they are with recorder.tokens(sample_ids=...)"
        yield StateLine("note", f"the tokens of {counted(found.num_unknown, 'call')} are not known: {advice}")
    for note in found.notes:
        yield StateLine("note", note)
    if found.parting is not None:
        yield _values_table(found.values, found.parting.value, most)
        bins = found.parting.positions
        rows = [(f"{one.first} to {one.last}", str(one.num_tokens), f"{one.mean:.2g}") for one in bins]
        titles = ("positions", "tokens", "mean apart")
        yield table_of(titles, rows, numbers=titles, title=f"{found.parting.value.text} by position")


def _at(token: TokenAt) -> str:
    of = f" (token {token.token})" if token.token >= 0 else ""
    return f"{token.sample}, position {token.position}{of}"


def _weights_line(found: Aligned) -> StateLine:
    states = Counter(state.state for state in found.weights)
    num = len(found.weights) - states[UNKNOWN]
    if not num:
        why = "of steps or types that cannot be compared" if found.weights else "not at the same steps of both sides"
        return StateLine("note", f"weights were not compared: they are {why} (record site=param keep=fingerprint)")
    wrong = [state for state in found.weights if state.state in WRONG]
    if not wrong:
        rest = f", {states[UNKNOWN]} are not comparable (not updated, or not recorded)" if states[UNKNOWN] else ""
        rest += f", {states[MERGED]} of the trainer alone are merged, as values agree" if states[MERGED] else ""
        state = "note" if states[MERGED] else "ok"
        return StateLine(state, f"weights: {states[EQUAL]} of {len(found.weights)} parameters are the trainer's{rest}")
    version = Counter(state.step for state in found.weights if state.step is not None).most_common(1)
    most = f"; most of the engine's are of step {version[0][0]}" if version else ""
    text = f"{len(wrong)} of {num} comparable parameters are not those of step {found.weights_step}{most}"
    return StateLine("fault", f"weights: {text}; first: {told_weight(wrong[0])}")


def _weight_parts(found: Aligned, most: int | None) -> Iterator[str | StateLine | Table]:
    yield _weights_line(found)
    if not found.weights:
        return
    order = sorted(found.weights, key=lambda state: state.state not in WRONG)[:most]
    rows = [[one.name, one.state, *("" if n is None else str(n) for n in one[2:4]), one.fused] for one in order]
    titles = ("parameter", "state", "of step", "behind", "slice of")
    title = f"the engine's parameters, wrong ones first ({len(order)} of {len(found.weights)})"
    yield table_of(titles, rows, numbers=titles[2:4], whole=titles[:1], dull={"slice of": ""}, title=title)


def _values_table(values: Sequence[ValueApart], first: ValueApart, most: int | None) -> Table:
    at = values.index(first)
    shown = [*values[max(0, at - 2) : at], *values[at:][:most]]
    rows = [
        (repr(one.module_path), f"{one.site} {one.name}".strip(), f"{one.num_beyond}/{one.num_tokens}",
         f"{one.median:.2g}", f"{one.largest:.2g}", f"{one.bound:.2g}", one.dtype_trainer, one.dtype_engine)
        for one in shown
    ]  # fmt: skip
    titles = ("module", "value", "beyond", "median", "largest", "bound", "trainer", "engine")
    title = f"values in the order of execution, from just before the first that parts ({len(shown)} of {len(values)})"
    numbers, drops = ("beyond", "median", "largest", "bound"), ("median", "trainer", "engine")
    return table_of(titles, rows, numbers=numbers, whole=("module",), drops=drops, title=title)
