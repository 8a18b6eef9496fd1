"""Makes the output of `recorder doctor`, which says which values a run lacks and why. Important lines come last.

Without a run the lines are about the environment: the flag, the hook in torch, the settings, the disk. Nothing here
imports torch or the training side of the package, because doctor must work when torch or the training side is broken.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ...config import FLAG, is_enabled, load_settings
from ...errors import ConfigError, install_line
from ...numerics.keys import by_key
from ...run import notes
from ...run.finding import shortest_text_of
from ...run.reply import Reply, StateLine
from ...run.run import RowCounts, Run
from ...system.text import counted, grouped, listed, printable, shortened, size, span
from .expected import Expectation, compare
from .gaps import REASONS, Gap

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_MAX_LISTED = 10
_FEW, _MAX_TEXT = 3, 100
_MAX_GAPS = 40
"""The most lines about gaps that are printed for each state (see `Check.state`). ``--json`` has all lines."""
_STEP_SOURCES = {
    "counted": "counted from 0",
    "optimizer": "numbered as the optimizer's state counts its updates",
    "user": "numbers that the program gave",
}
_EXPLAINING = {reason.key: reason for reason in REASONS if not reason.is_loss}
"""For each kind of event that explains missing values, the reason. Most other kinds of events are failures."""
_INFORMING = {"before_first_call", "nodes_apart", "trigger_passed", "exception", "trouble", "objective"}
"""Kinds of events that cause no missing values."""
_OF_COMMANDS = {"command_refused", "uncarried"}
"""Kinds of events about commands that were not carried out. Nothing is lost: anybody may send an invalid command."""
_UNKNOWN = {
    "site": "no value is expected there; a later version of recorder knows what is missing",
    "encoding": "their values cannot be read here; a later version of recorder reads them",
    "column": "it is ignored",
}
"""For each kind of name, the end of a line about a name that only a later version of the format has."""
_STATES = ("ok", "note", "missing")
"""The states of lines, the least important first. The most important lines come last, next to the prompt."""


class Check(NamedTuple):
    """One line of the output of `recorder doctor`."""

    state: str
    """``ok``, ``note``, or ``missing`` if a value is not, or will not be, recorded."""
    text: str
    is_strict: bool = False
    """True if ``--strict`` counts the line as a finding."""
    members: Mapping[str, Any] = MappingProxyType({})
    """Further members of the line in JSON."""
    is_listed: bool = True
    """Whether the line is printed. ``--json`` has all lines."""


def reply_of(run: Run | None, checks: Iterable[Check], *, is_strict: bool) -> Reply:
    """Return the output of `recorder doctor`. Missing values, or a line that ``--strict`` counts, give exit code 1."""
    known = list(checks)
    in_order = sorted(known, key=lambda check: _STATES.index(check.state))
    has_missing = any(check.state == "missing" for check in known)
    strict = [] if has_missing or not is_strict else [check.text for check in known if check.is_strict]
    because = f"exit code 1, because --strict counts: {'; '.join(shortened(text, _MAX_TEXT) for text in strict[:_FEW])}"
    because += f"; and {len(strict) - _FEW} more" if len(strict) > _FEW else ""
    return Reply(
        members=lambda: {
            "run": None if run is None else str(run.path),
            "checks": [{"state": check.state, "text": check.text, **check.members} for check in known],
        },
        parts=lambda: [
            *(StateLine(check.state, check.text) for check in in_order if check.is_listed),
            *([StateLine("note", because)] if strict else []),
        ],
        exit_code=int(has_missing or bool(strict)),
    )


def checks_of(run: Run) -> Iterator[Check]:
    """Yield the lines of `recorder doctor` about a run."""
    run.load_balances()
    expected = compare(run)
    has_values = run.num_rows or any(writer.all_shards or writer.balance.passed for writer in run.writers)
    state = "ok" if has_values else "missing"
    ranks, steps = span(run.ranks) or ("together" if run.is_merged else "none"), span(run.steps) or "none"
    yield Check(state, f"{run.name}: {counted(run.num_rows, 'row')}, ranks {ranks}, steps {steps}")
    yield from _recorded_settings(run)
    yield from _proof(run)
    yield from _told(run)
    for text in notes.strays(run):  # other readers read such files as shards
        yield Check("note", text, is_strict=True)
    yield from _dumps(run)
    yield from _filters(expected)
    yield from _recorded_modules(run, expected)
    if listed := run.foreign_hooks:
        text = "the program's own hooks may change these modules' values after they were recorded"
        yield Check("note", f"{text}: {listed}")
    yield from _totals(expected)
    yield from _unknown(expected)
    yield from _gaps(expected)
    yield from _merged(run, expected)
    yield from _events(run)
    yield from _accounts(run)
    layout_faults = notes.layout_problems(run)  # layouts are read first, because this may reveal further damage
    for problem in run.problems:
        yield Check("missing", problem)
    for problem in layout_faults or ():
        yield Check("missing", f"contradiction: {problem}")
    yield from _absent_ranks(run, expected.absent)
    if note := notes.unsealed_note(run):
        yield Check("note", note)
    yield from _endings(run, expected)
    if layout_faults is None:
        unchecked = "whether the ranks' chunks fit together, which takes a long look at many rows"
        yield Check("ok", f"not checked here: {unchecked}")
    command = shlex.join(["recorder", "verify", shortest_text_of(run.path, run.name)])
    yield Check("ok", f"not checked here: whether bytes have changed; to check all bytes: {command}")


def _absent_ranks(run: Run, absent: Sequence[int]) -> Iterator[Check]:
    if not absent:
        return
    why = f"they called no root, were killed before the first row, or had recording off ({AUTOLOAD}=0, or no {FLAG}=1)"
    kinds = {event.kind for writer in run.writers for event in writer.manifest.events}
    if not any(writer.manifest.autoload for writer in run.writers):
        why = "the program attached only other ranks, or these ranks were killed before the first row"
    if "nodes_apart" in kinds:
        why = "nodes share no file system: each has a directory of this run, to be copied into one"
    if "unjoined" in kinds:
        why = "ranks that cannot agree on a name write a run each: look for unjoined-* beside this run"
    listed = _listed(list(map(str, absent)))
    yield Check("missing", f"ranks: no files of {listed} of {run.world_size}: {why}", members={"absent_ranks": absent})


def _recorded_settings(run: Run) -> Iterator[Check]:
    if not run.writers:
        return
    manifest = next((writer.manifest for writer in run.writers if writer.manifest.members), run.writers[0].manifest)
    changed = [
        f"{name}={one.value}" for name, one in manifest.settings.items() if one.source != "default" and name != "rules"
    ]
    yield Check("ok", f"settings: {', '.join(changed) or 'all defaults'}")
    for rule in manifest.rules:
        yield Check("ok", f"rule: {rule}")
    start = f"{FLAG}=1" if manifest.autoload else "attach()"
    steps = _STEP_SOURCES.get(manifest.step_source or "", "of a source that this version does not know")
    yield Check("ok", f"started by {start}; steps are {steps}")


def _proof(run: Run) -> Iterator[Check]:
    if (proof := run.proof) is not None:
        for note in (*proof.notes, *filter(None, [proof.circumstances])):
            yield Check("ok", f"recorder prove: {note}")
        yield Check(notes.proof_state(proof), f"recorder prove: {proof.text}", members={"proof": proof.verdict})


def _told(run: Run) -> Iterator[Check]:
    for one in notes.sent_commands(run):
        who, number = one.command.by or "somebody", one.command.number
        text = f"told by {who}: command {number}, {notes.describe(one.command)}: {'; '.join(one.lines)}"
        yield Check("ok" if one.is_done else "note", text, is_strict=not one.is_done, members={"command": number})
    for problem in run.commands.problems:
        yield Check("note", f"not a valid command, refused by the run: {problem}", is_strict=True)


def _dumps(run: Run) -> Iterator[Check]:
    """Yield lines about the steps that triggers had written to disk, and the ranks that missed a trigger.

    A rank misses a trigger if it learns of it too late or never. A rank whose own trigger asked for the same steps has
    written them, and misses nothing.
    """
    dumps = run.dumps
    wrote: dict[tuple[int, int, int], set[int]] = defaultdict(set)
    for dump in dumps:
        wrote[dump.attempt, dump.first_step, dump.last_step].update(dump.ranks)
    for dump in dumps:
        unheard = sorted({*run.ranks} - wrote[dump.attempt, dump.first_step, dump.last_step]) if dump.ranks else []
        state = "note" if dump.missed or unheard else "ok"
        never = f"; {_many('rank', unheard)} never heard of the dump" if unheard else ""
        text, members = f"{notes.dump_note(dump)}{never}", {"dump": notes.dump_members(dump)}
        yield Check(state, text, is_strict=state == "note", members=members)


def _filters(expected: Expectation) -> Iterator[Check]:
    for problem in expected.problems:
        yield Check("note", problem, is_strict=True)
    for rule, ranks, others in expected.reaches:
        if others:
            where = f"on ranks {span(ranks)}" if ranks else "on no rank"
            yield Check("ok", f"filtered by rank=: recorded {where}, not on {span(others)}: {rule}")
    num_chosen = expected.num_steps_expected + expected.num_steps_passed
    if num_chosen < expected.num_steps_lived:
        yield Check("ok", f"filtered by steps=: {num_chosen} of {expected.num_steps_lived} steps are wanted")
    if passed := expected.num_steps_passed:
        steps = f"{passed} of {expected.num_steps_lived} steps"
        yield Check("ok", f"kept only by keep=ring: {steps} were not written, because no trigger asked for them")
    if unselected := expected.num_modules - expected.num_selected:
        where = f"{unselected} of {counted(expected.num_modules, 'module')}"
        yield Check("ok", f"filtered by module=, class= or site=, or containers without a call: {where}")
    if expected.num_filtered:
        why = "steps=, name=, call= or keep=ring" if expected.num_steps_passed else "steps=, name= or call="
        yield Check("ok", f"filtered by {why}: {counted(expected.num_filtered, 'selected module')}")
    if expected.shared:
        names = [f"{alias!r} as {path!r}" for path, alias in expected.shared]
        yield Check("ok", f"shared modules are recorded once, under their first path: {_listed(names)}")


def _recorded_modules(run: Run, expected: Expectation) -> Iterator[Check]:
    if not run.modules:
        text = "roots: none, so no module was watched; no module that an optimizer trains was called"
        yield Check("missing", "roots: none on disk; what was watched is not known" if run.lost else text)
        return
    for root, infos in by_key((root, info) for (root, _), info in run.modules.items()).items():
        num_selected, modules = sum(info.has_values for info in infos), counted(len(infos), "module")
        yield Check("ok", f"root {root}: {infos[0].class_name}, {modules}, {num_selected} selected")
        paths = [path for its_root, path in expected.silent.get("never_called", ()) if its_root == root]
        if paths:
            why = "never called at a recorded step"
            text = f"root {root}: {counted(len(paths), 'module')} left no rows, {why}: {_named(paths)}"
            yield Check("missing", text, members={"reason": "never_called", "root": root, "modules": paths})


def _totals(expected: Expectation) -> Iterator[Check]:
    """Yield a line for each site with its numbers of values. A value counts once per module, rank and step."""
    if not expected.totals:
        return
    for total in expected.totals:
        missing = total.expected - total.found
        rest = missing - total.explained
        never = "dropped or never there"
        known = ((total.dropped, "dropped"), (total.retired, "retired"), (total.perhaps_dropped, never))
        accounts = ", ".join(f"{number:,} {account}" for number, account in known if number)
        is_rest_known = accounts and rest == sum(number for number, _ in known)
        text = f"{total.found:,} of {total.expected:,} values were recorded"
        values = "value" if missing == 1 else "values"
        if not missing:
            text = f"all {total.expected:,} values were recorded"
        elif is_rest_known and not total.explained:
            text += f"; the ledger explains the {missing:,} missing {values}: {accounts}"
        else:
            is_split = rest and total.explained
            share = f"{total.explained:,} of the {missing:,}" if is_split else f"the {missing:,}"
            verb = "is" if (total.explained if is_split else missing) == 1 else "are"
            text += f"; {share} missing {values} {verb} {'explained' if total.explained else 'listed'} below"
            text += f", the others by the ledger: {accounts}" if is_rest_known else ""
            text += f"; the ledger has {accounts}" if accounts and not is_rest_known else ""
        members = {**total._asdict(), "missing": missing}
        yield Check("note" if rest else "ok", f"{total.site:12}{text}", members=members)
    for tail in expected.tails:
        who = "" if tail.rank is None else f"rank {tail.rank}: "
        rows = "1 row was" if tail.num_rows == 1 else f"{tail.num_rows} rows were"
        where = f"seen after the last recorded row, of step {tail.step}, and dropped"
        yield Check("note", f"{who}{rows} {where}: later steps, if there were any, are not in the table")


def _unknown(expected: Expectation) -> Iterator[Check]:
    for (kind, name), num_rows in expected.unknown.items():
        text = f"{kind} {printable(name)} of {counted(num_rows, 'row')} is unknown to this version: {_UNKNOWN[kind]}"
        members = {"unknown": kind, "name": name, "rows": num_rows}
        yield Check("note", text, is_strict=kind != "column", members=members)


def _gaps(expected: Expectation) -> Iterator[Check]:
    checks = [_gap(gap) for gap in expected.gaps]
    for state in _STATES:
        some = [check for check in checks if check.state == state]
        hidden = len(some) - _MAX_GAPS
        if hidden > 0:
            yield Check(state, f"{counted(hidden, 'gap')} smaller than the following; --json has all")
        for number, check in enumerate(some):
            yield check._replace(is_listed=check.is_listed and number >= hidden)


def _gap(gap: Gap) -> Check:
    state = "missing" if gap.reason.is_loss else "note"
    ranks = [rank for rank in gap.ranks if rank is not None]
    where = f"{_many('rank', ranks)}, " if ranks else ""
    steps = _many("step", gap.steps)
    why = gap.reason.text + (f" ({gap.detail})" if gap.detail else "")
    values = counted(gap.num_missing, "value")
    text = f"{', '.join(gap.sites)}: {values} missing, {where}{steps}: {why}: {_named(gap.modules)}"
    members = {"reason": gap.reason.key, "detail": gap.detail, "is_harmless": gap.reason.is_harmless}
    members |= {name: getattr(gap, name) for name in ("root", "sites", "modules", "steps", "ranks")}
    members["missing"] = gap.num_missing
    is_summed_up = gap.reason.key in ("silent", "absent")
    return Check(state, text, is_strict=not gap.reason.is_harmless, members=members, is_listed=not is_summed_up)


def _merged(run: Run, expected: Expectation) -> Iterator[Check]:
    for mode, those, steps, is_alone in expected.uneven:
        ranks = _many("rank", [rank for rank in those if rank is not None])
        forwards = "evaluation" if mode in ("eval", "no_grad") else "training"
        ran = f"{ranks} alone ran" if is_alone else f"{ranks} ran another number of"
        text = f"{ran} {forwards} forwards (mode {mode}) in {_many('step', steps)}; no row is lost"
        yield Check("note", text)
    if expected.num_incomplete:
        yield Check("missing", f"{counted(expected.num_incomplete, 'tensor')} in several parts of which some are lost")
    for missing, num_rows, steps, mode in expected.partial:
        members = {"reason": "partial", "ranks": missing, "steps": steps, "rows": num_rows}
        rows = f"{counted(num_rows, 'global row')} in {_many('step', steps)}"
        text = f"merged run partial: {rows} without {_many('rank', missing)}"
        if mode == "train":
            yield Check("missing", text, members=members)
        else:
            yield Check("note", f"{text}, in an evaluation (mode {mode})", members=members)
    if (source := run.manifest.merged_from) is not None:
        yield Check("ok", f"merged from {source.path}")
    for one in (one for writer in run.writers for one in writer.manifest.merged_writers):
        yield from _balance(f"merged from rank {one.rank}, {one.writer}", one.balance)
        if one.state != "closed":
            yield Check("missing", f"merged from {one.ending or 'a writer that had not closed'}")


def _events(run: Run) -> Iterator[Check]:
    ranks_of: dict[tuple[str, str], list[str]] = {}
    for writer in run.writers:
        for event in writer.manifest.events:
            ranks_of.setdefault((event.kind, event.message), []).append("" if writer.rank is None else str(writer.rank))
    for (kind, message), ranks in ranks_of.items():
        listed = _listed(sorted(set(ranks) - {""}, key=int))
        text = f"event {kind}{f' (rank {listed})' if listed else ''}: {message}"
        explains = _EXPLAINING.get(kind)
        is_loss = explains is None and kind not in _INFORMING | _OF_COMMANDS
        is_strict = kind in _OF_COMMANDS or (explains is not None and not explains.is_harmless)
        yield Check("missing" if is_loss else "note", text, is_strict=is_strict and kind not in _INFORMING)


def _accounts(run: Run) -> Iterator[Check]:
    for writer in run.writers:
        where = f"{'global' if writer.rank is None else f'rank {writer.rank}'}, {writer.name}"
        yield from _balance(where, writer.balance)
        if writer.rows_gone and not writer.problems:
            yield Check("missing", f"{where}: {writer.rows_gone}")
        if error := writer.manifest.restarted:
            yield Check("note", f"{where}: the writer failed once and restarted: {error}", is_strict=True)
        if writer.state == "recording":
            yield Check("note", f"{where}: is recording now", is_strict=True)
        for shard in writer.all_shards:
            if shard.num_trailing_bytes and not shard.tail_damage:
                cut = f"{shard.path.name} ends with {shard.num_trailing_bytes} bytes of a write that was cut"
                yield Check("note", f"{where}: {cut}", is_strict=True)


def _balance(where: str, balance: RowCounts) -> Iterator[Check]:
    if balance.dropped:
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(balance.dropped.items()))
        text = f"{where}: {balance.num_dropped} of {counted(balance.observed, 'row')} dropped: {reasons}"
        yield Check("missing", text)
    if balance.passed:
        yield Check("ok", f"{where}: {counted(balance.passed, 'row')} of the ring not written, as no trigger came")
    if balance.suspect:
        rows = counted(balance.suspect, "row")
        yield Check("missing", f"{where}: {rows} written, but a sync failed: the disk may have lost them")
    if not balance.is_possible:
        why = "more rows removed by retention than were ever written"
        yield Check("missing", f"{where}: its counts of rows contradict each other: {why}")
    elif balance.retired_rows:
        rows = counted(balance.retired_rows, "old row")
        yield Check("note", f"{where}: {rows} removed by retention", is_strict=True)


def _endings(run: Run, expected: Expectation) -> Iterator[Check]:
    lasts = expected.last_steps.items()
    ends = by_key((last, rank) for rank, last in lasts if rank is not None and last is not None)
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
    return listed(map(printable, names), _MAX_LISTED)


_ENTRY_POINT_GROUP = "torch.backends"
_HOOK = "recorder_autoload"


def environment_checks() -> Iterator[Check]:
    """Yield the lines about this environment: what would prevent torch from starting the recorder, and the settings."""
    try:
        is_on = is_enabled()
        off = f"off; {FLAG}=1 turns recording on"
        yield Check("ok" if is_on else "note", f"{FLAG}: recording is {'on' if is_on else off}")
    except ConfigError as error:
        yield Check("missing", str(error))
    if os.environ.get(AUTOLOAD, "1") == "0":
        yield Check("missing", f"{AUTOLOAD}=0: torch starts no recorder; unset it, or use: recorder run ...")
    else:
        yield Check("ok", f"{AUTOLOAD}: on")
    hooks = [point for point in metadata.entry_points(group=_ENTRY_POINT_GROUP) if point.module == _HOOK]
    if hooks:
        yield Check("ok", f"entry point: {hooks[0].name} = {hooks[0].value}")
    else:
        what = f"entry point: none in {_ENTRY_POINT_GROUP!r}, so torch cannot start the recorder: {install_line()}"
        yield Check("missing", what)
    try:
        yield Check("ok", f"torch: {metadata.version('torch')}")
    except metadata.PackageNotFoundError:
        yield Check("missing", "torch: not installed in this environment: pip install torch")
    yield from _shadows()
    yield from _settings()


def _shadows() -> Iterator[Check]:
    """Yield a line if a module in the current folder has this package's name, and so hides the package."""
    own = Path(__file__).resolve().parents[2]
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
    changed = [f"{item.name} ({item.source})" for item in loaded.explain() if item.source != "default"]
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
