"""Owns ``recorder doctor``: why something will not be recorded here, or was not in a run.

Must never import torch or the package's training side: it answers also where those are broken. What a run lacks is
worked out in `analyze.expected`; here it becomes lines, what matters most last, next to the prompt.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ..analyze.expected import Expectation, compare, source_accounts
from ..analyze.holes import REASONS, Hole
from ..analyze.problems import layout_problems
from ..config import FLAG, is_enabled, load_settings
from ..errors import ConfigError
from ..read.modules import listed_hooks
from ..read.run import Run
from ..read.unsealed import unsealed_note
from ..read.which import typed_for
from ..read.writers import Balance, load_balances
from ..units import size
from .module_names import grouped
from .output import counted, print_json, printable, say_state, span

_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_ENTRY_POINT_GROUP = "torch.backends"
_HOOK = "recorder_autoload"
_MAX_LISTED = 10
_MAX_HOLES = 40
"""Lines about holes of one state; ``--json`` has all."""
_STEP_SOURCES = {
    "counted": "counted from 0",
    "optimizer": "counted on from the number in the optimizer's state",
    "user": "those that the program gave",
}
_EXPLAINING = {reason.key: reason for reason in REASONS if not reason.is_loss}
"""Kinds of events that say why values are not there, by the reason of their holes; others say that something failed."""
_STATES = ("ok", "note", "missing")
"""What matters most stands last, next to the prompt."""


class Check(NamedTuple):
    """One answer."""

    state: str
    """``ok``, ``note``, or ``missing``: something is not, or will not be, recorded."""
    text: str
    is_strict: bool = False
    """A finding under ``--strict``."""
    facts: Mapping[str, Any] = MappingProxyType({})
    """The same for programs."""
    is_listed: bool = True
    """Printed for people; programs get all."""


def examine(run: Run | None, *, as_json: bool, is_strict: bool = False) -> int:
    """Print the answers and return the exit code: 1 if something is missing, or is not as strictness wants it."""
    if run is not None:
        load_balances(run.writers)
    checks = list(_environment() if run is None else _run(run))
    if as_json:
        print_json([{"state": check.state, "text": check.text, **check.facts} for check in checks])
    else:
        for state in _STATES:
            for check in checks:
                if check.state == state and check.is_listed:
                    say_state(state, check.text)
    return int(any(check.state == "missing" or (is_strict and check.is_strict) for check in checks))


def _environment() -> Iterator[Check]:
    try:
        is_on = is_enabled()
        off = f"off; {FLAG}=1 turns it on"
        yield Check("ok" if is_on else "note", f"{FLAG}: recording is {'on' if is_on else off}")
    except ConfigError as error:
        yield Check("missing", str(error))
    if os.environ.get(_AUTOLOAD, "1") == "0":
        yield Check("missing", f"{_AUTOLOAD}=0: torch starts no recorder; unset it, or use: recorder run ...")
    else:
        yield Check("ok", f"{_AUTOLOAD}: on")
    hooks = [point for point in metadata.entry_points(group=_ENTRY_POINT_GROUP) if point.module == _HOOK]
    if hooks:
        yield Check("ok", f"entry point: {hooks[0].name} = {hooks[0].value}")
    else:
        yield Check("missing", f"entry point: none in {_ENTRY_POINT_GROUP!r}, so torch cannot start it; pip install it")
    try:
        yield Check("ok", f"torch: {metadata.version('torch')}")
    except metadata.PackageNotFoundError:
        yield Check("missing", "torch: not installed in this environment")
    yield from _shadows()
    yield from _settings()


def _shadows() -> Iterator[Check]:
    """A user's own module of our name wins over the package in a script's folder."""
    own = Path(__file__).resolve().parents[1]
    for name in (f"{own.name}.py", f"{own.name}/__init__.py"):
        shadow = Path.cwd() / name
        if shadow.exists() and shadow.resolve().parent != own:
            hidden = f"hides the package from `import {own.name}` here; recording by {FLAG}=1 is not affected"
            yield Check("note", f"{shadow}: {hidden}")


def _settings() -> Iterator[Check]:
    try:
        loaded = load_settings()
    except ConfigError as error:
        yield Check("missing", f"settings: {error}")
        return
    changed = [f"{one.name} ({one.source})" for one in loaded.explain() if one.source != "default"]
    yield Check("ok", f"settings: {', '.join(changed) or 'all defaults'}; recorder config --show lists them")
    folder = Path(loaded.settings.dir).absolute()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        yield Check("missing", f"{folder}: cannot be written; set RECORDER_DIR")
        return
    free_bytes = shutil.disk_usage(existing).free
    floor_bytes = loaded.settings.min_free_bytes
    state = "missing" if free_bytes < floor_bytes else "ok"
    yield Check(state, f"{folder}: {size(free_bytes)} free, recording pauses below {size(floor_bytes)}")


def _run(run: Run) -> Iterator[Check]:
    found = compare(run)
    state = "ok" if run.num_rows else "missing"
    ranks, steps = span(run.ranks) or ("together" if run.is_merged else "none"), span(run.steps) or "none"
    yield Check(state, f"{run.name}: {counted(run.num_rows, 'row')}, ranks {ranks}, steps {steps}")
    yield from _recorded_settings(run)
    yield from _filters(found)
    yield from _recorded_modules(run, found)
    if listed := listed_hooks(run.modules.values()):
        yield Check("note", f"hooks of the program run after what is recorded of their modules: {listed}")
    yield from _totals(found)
    yield from _holes(found)
    yield from _merged(run, found)
    yield from _events(run)
    yield from _accounts(run)
    wrong = layout_problems(run)  # what it reads may show more damage
    for problem in run.problems:
        yield Check("missing", problem)
    for problem in wrong or ():
        yield Check("missing", f"layout: {problem}")
    yield from _absent_ranks(run)
    if note := unsealed_note(run):
        yield Check("note", note)
    yield from _endings(run, found)
    if wrong is None:
        yield Check("ok", "not checked here: whether the ranks' pieces fit together, which is a long look at many rows")
    command = shlex.join(["recorder", "verify", typed_for(run.path, run.name)])
    yield Check("ok", f"not checked here: whether every byte is as it was written; that is: {command}")


def _absent_ranks(run: Run) -> Iterator[Check]:
    if not run.world_size or run.world_size > 1 << 20 or not run.ranks:
        return
    absent = sorted(set(range(run.world_size)) - set(run.ranks))
    if not absent or any(writer.rank is None for writer in run.writers):
        return
    why = f"they called no root, were killed before the first row, or had it off ({_AUTOLOAD}=0, or no {FLAG}=1)"
    if not any(writer.manifest.get("autoload") is True for writer in run.writers):
        why = "the program attached the others and not these, or they were killed before the first row"
    if any(event.get("kind") == "unjoined" for writer in run.writers for event in _events_of(writer.manifest)):
        why = "ranks that cannot agree on a name write a run each: look for unjoined-* beside this one"
    listed = _listed(list(map(str, absent)))
    yield Check("missing", f"ranks: nothing of {listed} of {run.world_size}: {why}", facts={"absent_ranks": absent})


def _recorded_settings(run: Run) -> Iterator[Check]:
    if not run.writers:
        return
    manifest = next((writer.manifest for writer in run.writers if writer.manifest), {})
    settings = manifest.get("settings")
    changed = [
        f"{name}={one.get('value')}"
        for name, one in (settings.items() if isinstance(settings, dict) else ())
        if isinstance(one, dict) and one.get("source") != "default" and name != "rules"
    ]
    yield Check("ok", f"settings: {', '.join(changed) or 'all defaults'}")
    rules = manifest.get("rules")
    for rule in rules if isinstance(rules, list) else ():
        yield Check("ok", f"rule: {rule}")
    start = f"{FLAG}=1" if manifest.get("autoload") is True else "attach()"
    steps = _STEP_SOURCES.get(str(manifest.get("step_source")), "of a source that this version does not know")
    yield Check("ok", f"started by {start}; steps are {steps}")


def _filters(found: Expectation) -> Iterator[Check]:
    """What the rules leave out: no hole, since nobody asked for it."""
    for problem in found.problems:
        yield Check("note", problem, is_strict=True)
    for reach in found.reaches:
        if reach.others:
            where = f"on ranks {span(reach.ranks)}" if reach.ranks else "on no rank"
            yield Check("ok", f"filtered by rank=: recorded {where}, not on {span(reach.others)}: {reach.rule}")
    left_out = found.num_steps_lived - found.num_steps_expected
    if left_out and found.num_steps_lived:
        yield Check("ok", f"filtered by steps=: {found.num_steps_expected} of {found.num_steps_lived} steps are wanted")
    if unselected := found.num_modules - found.num_selected:
        modules = counted(found.num_modules, "module")
        yield Check(
            "ok", f"filtered by module=, class= or site=, or containers without a call: {unselected} of {modules}"
        )
    if found.num_filtered:
        yield Check("ok", f"filtered by steps=, name= or call=: {counted(found.num_filtered, 'selected module')}")
    if found.shared:
        names = [f"{alias!r} as {path!r}" for path, alias in found.shared]
        yield Check("ok", f"shared modules are recorded once, under their first path: {_listed(names)}")


def _recorded_modules(run: Run, found: Expectation) -> Iterator[Check]:
    if not run.modules:
        yield Check("missing", "roots: none, so no module was watched; no module that an optimizer trains was called")
        return
    roots: dict[str, list[Any]] = {}
    for info in run.modules.values():
        roots.setdefault(info.root, []).append(info)
    for root, infos in roots.items():
        num_selected = sum(info.has_values for info in infos)
        yield Check(
            "ok", f"root {root}: {infos[0].class_name}, {counted(len(infos), 'module')}, {num_selected} selected"
        )
        paths = [path for its_root, path in found.silent.get("never_called", ()) if its_root == root]
        if paths:
            why = "never called at a recorded step"
            text = f"root {root}: {counted(len(paths), 'module')} left no rows, {why}: {_named(paths)}"
            yield Check("missing", text, facts={"reason": "never_called", "root": root, "modules": paths})


def _totals(found: Expectation) -> Iterator[Check]:
    """The table: a value is counted once for each module (or parameter), rank and step, however often it was seen."""
    if not found.totals:
        return
    width = max(len(f"{total.expected:,}") for total in found.totals)
    for total in found.totals:
        missing = total.expected - total.found
        numbers = f"{total.expected:>{width},} expected  {total.found:>{width},} found  {missing:>{width},} missing"
        rest = missing - total.explained
        known = (
            (total.dropped, "dropped"),
            (total.retired, "retired"),
            (total.perhaps_dropped, "dropped or never there"),
        )
        accounts = ", ".join(f"{number:,} {what}" for number, what in known if number)
        if accounts and rest == sum(number for number, _ in known):
            others = f"{total.explained:>{width},} of these explained, the others " if total.explained else "explained "
            numbers += f"  {others}by the accounts: {accounts}"
        elif missing:
            numbers += f"  {total.explained:>{width},} of these explained"
            numbers += f", and by the accounts: {accounts}" if accounts else ""
        facts = {**total._asdict(), "missing": missing}
        yield Check("note" if rest else "ok", f"{total.site:12}{numbers}", facts=facts)
    for tail in found.tails:
        who = "" if tail.rank is None else f"rank {tail.rank}: "
        rows = "1 row was" if tail.num_rows == 1 else f"{tail.num_rows} rows were"
        where = f"seen after the last recorded one, of step {tail.step}, and dropped"
        yield Check("note", f"{who}{rows} {where}: steps after it, if there were any, are not in the table")


def _holes(found: Expectation) -> Iterator[Check]:
    checks = [_hole(hole) for hole in found.holes]
    for state in _STATES:
        some = [check for check in checks if check.state == state]
        hidden = len(some) - _MAX_HOLES
        if hidden > 0:
            yield Check(state, f"{counted(hidden, 'hole')} smaller than the following; --json has all")
        for number, check in enumerate(some):
            yield check._replace(is_listed=check.is_listed and number >= hidden)


def _hole(hole: Hole) -> Check:
    state = "missing" if hole.reason.is_loss else "note"
    ranks = [rank for rank in hole.ranks if rank is not None]
    where = f"{_many('rank', ranks)}, " if ranks else ""
    steps = _many("step", hole.steps)
    why = hole.reason.text + (f" ({hole.detail})" if hole.detail else "")
    values = counted(hole.num_missing, "value")
    text = f"{', '.join(hole.sites)}: {values} missing, {where}{steps}: {why}: {_named(hole.modules)}"
    facts = {
        "reason": hole.reason.key,
        "detail": hole.detail,
        "is_harmless": hole.reason.is_harmless,
        "root": hole.root,
        "sites": hole.sites,
        "modules": hole.modules,
        "steps": hole.steps,
        "ranks": hole.ranks,
        "missing": hole.num_missing,
    }
    said_as_a_whole = hole.reason.key in ("silent", "absent")
    return Check(state, text, is_strict=not hole.reason.is_harmless, facts=facts, is_listed=not said_as_a_whole)


def _merged(run: Run, found: Expectation) -> Iterator[Check]:
    for uneven in found.uneven:
        who = _many("rank", [rank for rank in uneven.ranks if rank is not None])
        what = "evaluation" if uneven.mode in ("eval", "no_grad") else "training"
        ran = f"{who} alone ran" if uneven.is_alone else f"{who} ran another number of"
        steps = _many("step", uneven.steps)
        yield Check("note", f"{ran} {what} forwards (mode {uneven.mode}) in {steps}; no row is lost by it")
    if found.num_incomplete:
        yield Check("missing", f"{counted(found.num_incomplete, 'tensor')} in several parts of which some are lost")
    for partial in found.partial:
        facts = {"reason": "partial", "ranks": partial.missing, "steps": partial.steps, "rows": partial.num_rows}
        rows, steps = counted(partial.num_rows, "global row"), _many("step", partial.steps)
        text = f"merged run partial: {rows} in {steps} without {_many('rank', partial.missing)}"
        if partial.mode == "train":
            yield Check("missing", text, facts=facts)
        else:
            yield Check("note", f"{text}, in an evaluation (mode {partial.mode})", facts=facts)
    source = run.manifest.get("merged_from")
    if isinstance(source, dict):
        yield Check("ok", f"merged from {source.get('path')}")
    for account in (account for writer in run.writers for account in source_accounts(writer)):
        where = f"merged from rank {account.get('rank')}, {account.get('writer')}"
        yield from _balance(where, Balance.read(account))
        if account.get("state") != "closed":
            yield Check("missing", f"merged from {account.get('ending') or 'a writer that had not closed'}")


def _events_of(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    events = manifest.get("events")
    return [event for event in events if isinstance(event, dict)] if isinstance(events, list) else []


def _events(run: Run) -> Iterator[Check]:
    """What the recorder itself had to say; the same event of many ranks once."""
    ranks_of: dict[tuple[str, str], list[str]] = {}
    for writer in run.writers:
        for event in _events_of(writer.manifest):
            key = (str(event.get("kind")), str(event.get("message")))
            ranks_of.setdefault(key, []).append("" if writer.rank is None else str(writer.rank))
    for (kind, message), ranks in ranks_of.items():
        listed = _listed(sorted(set(ranks) - {""}, key=int))
        text = f"event {kind}{f' (rank {listed})' if listed else ''}: {message}"
        explains = _EXPLAINING.get(kind)
        if explains is None:
            yield Check("missing", text)
        else:
            yield Check("note", text, is_strict=not explains.is_harmless)


def _accounts(run: Run) -> Iterator[Check]:
    for writer in run.writers:
        where = f"{'global' if writer.rank is None else f'rank {writer.rank}'}, {writer.name}"
        yield from _balance(where, writer.balance)
        if "restarted" in writer.manifest:
            yield Check(
                "note",
                f"{where}: the writer failed once and began anew: {writer.manifest['restarted']}",
                is_strict=True,
            )
        if writer.state == "recording":
            yield Check("note", f"{where}: is recording now", is_strict=True)
        for shard in writer.shards:
            if shard.num_trailing_bytes and not shard.tail_damage:
                cut = f"{shard.path.name} ends with {shard.num_trailing_bytes} bytes of a write that was cut"
                yield Check("note", f"{where}: {cut}", is_strict=True)


def _balance(where: str, balance: Balance) -> Iterator[Check]:
    if balance.dropped:
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(balance.dropped.items()))
        text = f"{where}: {balance.num_dropped} of {counted(balance.observed, 'row')} dropped: {reasons}"
        yield Check("missing", text)
    if balance.suspect:
        text = f"{where}: {counted(balance.suspect, 'row')} written, but a sync failed: the disk may have lost them"
        yield Check("missing", text)
    if not balance.is_possible:
        text = f"{where}: its accounts contradict themselves: more rows removed by retention than were ever written"
        yield Check("missing", text)
    elif balance.retired_rows:
        text = f"{where}: {counted(balance.retired_rows, 'old row')} removed by retention"
        yield Check("note", text, is_strict=True)


def _endings(run: Run, found: Expectation) -> Iterator[Check]:
    ends: dict[int, list[int]] = {}
    for rank, last in found.last_steps.items():
        if rank is not None and last is not None:
            ends.setdefault(last, []).append(rank)
    if len(ends) > 1:
        shown = [f"{_many('rank', ranks)} in step {last}" for last, ranks in sorted(ends.items())]
        yield Check("note", f"unequal steps: the record ends on {_listed(shown)}", is_strict=True)
    for writer in run.writers:
        if writer.state == "unclosed":
            yield Check("missing", writer.ending)


def _many(noun: str, numbers: list[int]) -> str:
    return f"{noun}{'s' * (len(numbers) > 1)} {span(numbers)}"


def _named(paths: list[str]) -> str:
    return _listed(grouped(paths))


def _listed(names: list[str]) -> str:
    shown = [printable(name) for name in names[:_MAX_LISTED]]
    return ", ".join(shown) + (f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else "")
