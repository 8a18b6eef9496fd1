"""Sentences about a run that subcommands print: on missing ranks, jitter, dumps, and commands sent to the run."""

from __future__ import annotations

import contextlib
import json
import math
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ..columns import OF_FIRST_PART, note_members
from ..errors import NotARunError, RunError
from ..format.commands import DUMP, ENDED, MISSED, PAUSE, REFUSED, SET, WAITING, Answer, Command
from ..format.encodings import ENCODING_OF
from ..format.manifest import EXCEPTION, RecordedModule
from ..format.rundir import STATUS, STATUS_BYTES, Members, parse_shard_name
from ..globalview.row_groups import RowFinding as RowFinding
from ..globalview.values import GlobalValues, load_sample
from ..numerics.keys import array_of, by_key, column_of, encode
from ..numerics.moments import integers
from ..read.run import RecordedRun
from ..read.writers import RecordedWriter
from ..run.finding import shortest_text_of
from ..sites import FORMAT_VERSION, SITE_OF
from ..storage.locations import Location, store_of
from ..system.text import counted, listed, named, plural, printable, size, span, value_in_words
from .probe import probe_size
from .run import Run, RunDump
from .selection import Selection
from .status import CHANGED, UNCHANGED, LiveFinding, Proof, RankNow
from .step_ranges import attempt_step_ranges


def jitter_note(run: Run) -> str:
    """Return a note that the setting `jitter` changed a run's inputs on purpose, or that it changed nothing."""
    if run.jitter_moved == ():
        return f"note: jitter = {run.jitter} was set, but no value of the model was changed: this run is no twin"
    return f"note: the model's inputs were changed in the last place on purpose (jitter = {run.jitter})"


def facts_of(module: RecordedModule) -> Iterator[str]:
    """Yield what is noteworthy about how the program treats a module, such as ``frozen: weight, bias``."""
    if module.evaluated is not None:
        yield f"in evaluation mode while the model is trained, since step {module.evaluated}"
    if module.validated_in_training is not None:
        yield f"in training mode in what looks like a validation, at step {module.validated_in_training}"
    if module.optimizer_anew_since is not None:
        yield f"a new {module.optimizer_anew} makes each update, seen at step {module.optimizer_anew_since}"
    if module.untrained:
        names = dict.fromkeys(name.partition("[")[0] + "[...]" * ("[" in name) for name in module.untrained)
        yield f"in no optimizer that steps: {listed(names)}, since step {module.untrained_since or 0}"
    if module.frozen:
        yield f"frozen: {listed(module.frozen)}"
    if module.batch_as_time is not None:
        yield f"takes a dim as long as the labels for the time, since step {module.batch_as_time}"
    if module.graphless:
        yield "called without gradients"
    if module.uncleared is not None:
        yield f"gradients not cleared, since step {module.uncleared}"


def proof_state(proof: Proof) -> str:
    """Return the word that begins the line about a verdict of `recorder prove`, such as ``ok``."""
    return {UNCHANGED: "ok", CHANGED: "missing"}.get(proof.verdict, "note")


def sent_note(run: Run) -> str | None:
    """Return a note that commands were sent to a run while it was recorded. Return None if only dumps were sent."""
    if not (num_sent := run.commands.num_beside_dumps):
        return None
    numbers = counted(num_sent, "command")
    return f"note: the run was sent {numbers} while it was under way, which recorder doctor lists"


def dump_note(dump: RunDump) -> str:
    """Return a sentence about one dump of the ring (rows kept in memory until asked for)."""
    steps = f"steps {dump.first_step} to {dump.last_step}"
    ranks = f", {plural('rank', len(dump.ranks))} {span(dump.ranks)}" if dump.ranks else ""
    missed = f"; {plural('rank', len(dump.missed))} {span(dump.missed)} too late" if dump.missed else ""
    left = f"{counted(dump.num_rows, 'row')}, {size(dump.num_bytes)}"
    return f"dump of {steps}{ranks}: {left}{missed}: {printable(dump.reason)} ({printable(dump.by)})"


def dump_members(dump: RunDump) -> dict[str, object]:
    """Return a dump of the ring (rows kept in memory until asked for) as the members of a JSON object."""
    named = {name: getattr(dump, name) for name in ("first_step", "last_step", "reason", "by", "time_ns", "ranks")}
    return {**named, "missed_ranks": dump.missed, "rows": dump.num_rows, "bytes": dump.num_bytes}


def state_word(kind: str, state: str) -> str:
    """Return the word for a command's state at a rank. An ended command is "done", except for rules and pauses."""
    return "done" if state == ENDED and kind not in (SET, PAUSE) else state


def steps_phrase(since: int, until: int | None) -> str:
    """Return a phrase with the first step at which a rank obeys a command, and the last step if there is one."""
    return f"from step {since} on" if until is None else f"from step {since} to {until}"


def describe(command: Command) -> str:
    """Describe a command in words: its kind, steps, rules and reason."""
    steps = f"from step {command.from_step} on"
    if command.to_step is not None:
        steps = f"at steps {command.from_step} to {command.to_step}"
    if command.from_step == command.to_step:
        steps = f"at step {command.from_step}"
    what = "; ".join(command.rules) or (f"command {command.undoes}" if command.undoes is not None else "")
    reason = f" ({command.reason})" if command.reason else ""
    return f"{command.kind} {steps}{': ' if what else ''}{what}{reason}"


def command_members(command: Command) -> dict[str, Any]:
    """Return a command as the members of a JSON object."""
    names = ("number", "kind", "from_step", "to_step", "rules", "undoes", "reason", "by", "created_ns", "id")
    return {name: getattr(command, name) for name in names}


class SentCommand(NamedTuple):
    """A command that was sent to a run, and how the ranks of the run answered it."""

    command: Command
    lines: Sequence[str]
    """The answers of the ranks in words. All ranks with the same answer share one text."""
    is_done: bool
    """True if every rank of the run carried out the command, beginning at the command's first step."""


def sent_commands(run: Run, *, with_dumps: bool = False, shown: Sequence[RankNow] = ()) -> Iterator[SentCommand]:
    """Yield the commands that were sent to a run, by number. Dumps are left out, except with `with_dumps`.

    `shown` are the present states of the ranks. Their answers are newer than the manifests while a run is recorded.
    """
    newest = {writer.rank: writer.manifest for writer in run.writers if writer.manifest.members}
    for command in run.commands.sound:
        if command.kind == DUMP and not with_dumps:
            continue
        answers = {
            rank: answer
            for rank, manifest in newest.items()
            for answer in manifest.commands
            if answer.id == command.id and rank is not None  # a daemon may have renumbered the command
        }
        for now in shown:
            for answer in now.status.commands:
                known = answers.get(now.rank)
                if answer.id == command.id and (known is None or known.is_before(answer)):
                    answers[now.rank] = answer
        unheard = sorted(rank for rank in newest if rank is not None and rank not in answers)
        lines = _outcomes(command, answers, is_over=all(writer.state != "recording" for writer in run.writers))
        if unheard:
            lines.append(f"{counted(len(unheard), 'rank')} ({span(unheard)}): never heard of it")
        is_done = not unheard and all(_is_done(command, answer) for answer in answers.values())
        yield SentCommand(command, lines, is_done)


def _is_done(command: Command, answer: Answer) -> bool:
    is_late = answer.since is not None and answer.since > command.from_step
    return answer.state not in (REFUSED, MISSED, WAITING) and not is_late


def answer_members(run: Run, command: Command, shown: Sequence[RankNow] = ()) -> list[dict[str, Any]]:
    """Return each rank's answer to a command as the members of a JSON object. `shown` is as for `sent_commands`."""
    ahead = {now.rank: answer for now in shown for answer in now.status.commands if answer.id == command.id}
    said = [
        (writer.rank, answer)
        for writer in run.writers
        for answer in writer.manifest.commands
        if answer.id == command.id and writer.rank is not None
    ]
    said += [(rank, answer) for rank, answer in ahead.items() if rank not in dict(said)]
    members = []
    for rank, answer in said:
        newest = ahead[rank] if rank in ahead and answer.is_before(ahead[rank]) else answer
        members.append({"rank": rank, **newest.short_members()})
    return members


def _outcomes(command: Command, answers: dict[int, Answer], *, is_over: bool) -> list[str]:
    said = (((one.state, one.since, one.until, one.why), rank) for rank, one in sorted(answers.items()))
    outcomes = []
    for (state, since, until, why), ranks in by_key(said).items():
        steps = "" if since is None else f", {steps_phrase(since, until)}"
        because = f" ({why})" if why else ""
        word = state_word(command.kind, state)
        if state == WAITING and is_over:
            word = f"waited for step {command.from_step}, which never began"
            steps = ""
        outcomes.append(f"{counted(len(ranks), 'rank')} ({span(ranks)}): {word}{steps}{because}")
    return outcomes


def missing_ranks(table: Any) -> npt.NDArray[np.object_]:
    """Return the ranks that each row's global tensor lacks, as JSON. Empty text: all are there."""
    ids, notes = encode(table.column("note"))
    missing = np.array([*map(_missing, notes), ""], object)[ids]
    missing[array_of(table.column("rank").is_valid())] = ""
    return missing


def without_numbers(table: Any) -> Any:
    """Return the table without the statistics of rows that lack ranks, because these are incomplete."""
    is_whole = column_of(missing_ranks(table) == "")
    for name in OF_FIRST_PART.intersection(table.column_names):
        column = table.column(name)
        kept = pc.if_else(is_whole, column, pa.scalar(None, column.type))
        table = table.set_column(table.schema.get_field_index(name), name, kept)
    return table


def _missing(note: str) -> str:
    ranks = note_members(note).get("partial")
    if not isinstance(ranks, list) or not all(type(rank) is int for rank in ranks):
        return ""
    return json.dumps(ranks) if ranks else ""


@lru_cache(maxsize=4096)
def differing_ranks(note: str | None) -> tuple[int, ...]:
    """Return the ranks whose replica differs from the first one, as a row's note says. Empty if all agree."""
    ranks = note_members(note).get("replicas_differ")
    return tuple(rank for rank in ranks if type(rank) is int) if isinstance(ranks, list) else ()


class MissingRanks:
    """Counts the values that lack the rows of some ranks, over several tables."""

    def __init__(self) -> None:
        self._num_values = 0
        self._found: dict[str, tuple[int, int, int]] = {}
        """By missing ranks, as JSON: how many values lack them, and the first and last step of these values."""

    def add(self, table: Any) -> None:
        """Count the values of a table, which must have the columns `rank`, `step` and `note`."""
        missing, steps = missing_ranks(table), integers(table.column("step"))
        self._num_values += table.num_rows
        for ranks in dict.fromkeys(missing[missing != ""].tolist()):
            of = steps[missing == ranks]
            self._add(ranks, len(of), int(of.min()), int(of.max()))

    def join(self, other: MissingRanks) -> None:
        self._num_values += other._num_values
        for ranks, found in other._found.items():
            self._add(ranks, *found)

    def _add(self, ranks: str, num_values: int, first: int, last: int) -> None:
        known = self._found.get(ranks, (0, first, last))
        self._found[ranks] = known[0] + num_values, min(known[1], first), max(known[2], last)

    def __bool__(self) -> bool:
        return bool(self._found)

    def notes(self, *, is_taken: bool) -> list[str]:
        """Return a note for each set of missing ranks. `is_taken` says whether the values that lack ranks are used."""
        end = "they are of the other ranks alone" if is_taken else "they are left out; --partial takes what there is"
        return [
            f"partial: {num_values} of {self._num_values} values lack {named('rank', json.loads(ranks))}, "
            f"{f'step {first}' if first == last else f'steps {first}..{last}'}: {end}"
            for ranks, (num_values, first, last) in self._found.items()
        ]


KNOWN_WORDS: Mapping[str, Collection[str]] = {"site": SITE_OF, "encoding": ENCODING_OF}
"""For two columns, the values that this version of the format knows. A later version may have more."""
_CONTRADICTIONS = ("inconsistent", "layout_changes")
_MAX_NAMED = 8
_MAX_LOADED_ROWS = 1_000_000
"""The most rows that `layout_problems` loads. A million rows take seconds."""


_MAX_WORLD_SIZE = 1 << 20
"""The largest world size for which absent ranks are listed. A damaged manifest may state any world size."""


def absent_ranks(run: Run) -> list[int]:
    """Return the ranks of a run that have no writer here. Empty for a merged run, which need not name its ranks."""
    if run.is_merged or not run.ranks or not 0 < (run.world_size or 0) <= _MAX_WORLD_SIZE:
        return []
    present = {*run.ranks}
    return [rank for rank in range(run.world_size or 0) if rank not in present]


def absence(run: Run) -> str:
    """Return a clause that lists the ranks of a run that have no writer here. Empty if there are none."""
    if not (absent := absent_ranks(run)):
        return ""
    return f"{named('rank', absent)} of {run.world_size}, whose files are not here"


def damage(run: Run) -> str:
    """Return one line on a run's damage: the first damage and the number of others. Empty if there is no damage."""
    first, *others = run.problems or [""]
    return f"{first}; and {len(others)} more, which recorder verify names" if others else first


_MAX_RAISED = 4
_NO_ROOT = "no_root"
"""The kind of the events that say that a model is not recorded."""


def raised(run: Run) -> list[str]:
    """Return a sentence for each exception that ended the program: its ranks, its text, and where their record ends.

    The earliest exception comes first, because the others may follow from it. Of many, the last text says how many.
    """
    events = [(one, writer) for writer in run.writers for one in writer.manifest.events if one.kind == EXCEPTION]
    events.sort(key=lambda pair: Members(dict(pair[0].members)).count("time_ns"))
    ranks_of = by_key(((one.message, _newest_step(writer)), writer.rank) for one, writer in events)
    told = [
        f"{named('rank', ranks)} ended with an exception: {printable(text.rstrip('.'))}"
        + ("" if step is None else f"; the record ends in step {step}")
        for (text, step), ranks in list(ranks_of.items())[:_MAX_RAISED]
    ]
    num_more = len(ranks_of) - len(told)
    return told + ([f"{counted(num_more, 'more exception')}, which recorder doctor names"] if num_more else [])


def superseded(run: Run) -> list[str]:
    """Return a sentence for each finding that an earlier attempt had in training at steps that a restart repeated.

    The rows of these steps do not count, so no rule and no command judges them again.
    """
    if len({writer.attempt for writer in run.writers}) < 2:
        return []
    firsts: dict[int, int] = {}
    for attempt, first, _ in attempt_step_ranges(run):
        firsts[attempt] = min(firsts.get(attempt, first), first)
    found: dict[tuple[int, str], list[int | None]] = {}
    for writer in run.writers:
        repeated_from = min((first for attempt, first in firsts.items() if attempt > writer.attempt), default=math.inf)
        if repeated_from < math.inf:
            with contextlib.suppress(OSError, RunError):
                status = store_of(writer.directory).read_json(writer.directory / STATUS, STATUS_BYTES)
                for one in LiveFinding.read_all(status):
                    if one.step >= repeated_from:
                        found.setdefault((writer.attempt, one.text), []).append(writer.rank)
    told = [
        f"{named('rank', ranks)}, attempt {attempt}, found in training, before a restart repeated the step: {text}"
        for (attempt, text), ranks in list(found.items())[:_MAX_RAISED]
    ]
    num_more = len(found) - len(told)
    return told + ([f"{counted(num_more, 'more finding')} of repeated steps"] if num_more else [])


def unrecorded(run: Run) -> list[str]:
    """Return a sentence for each reason for which a trained model was not recorded."""
    events = (one for writer in run.writers for one in writer.manifest.events if one.kind == _NO_ROOT)
    why = dict.fromkeys(printable(one.message.partition(";")[0]) for one in events)
    return [f"{one}; recorder doctor says what helps" for one in why]


def _newest_step(writer: RecordedWriter) -> int | None:
    """Return the last step of a writer, with the steps of which it has only numbers of the probe."""
    probe = probe_size([writer])
    return max((one for one in (writer.last_step, probe and probe.last_step) if one is not None), default=None)


def left_out(run: Run) -> str:
    """Return a sentence on the rows and ranks that are missing from the run. Empty if nothing is missing."""
    run.load_balances()
    balances = [writer.balance for writer in run.writers]
    around = [step for writer in run.writers for step in writer.steps_around_retired]
    between = f", between steps {min(around)} and {max(around)}" if around else ""
    counts = (
        (sum(one.num_dropped for one in balances), "dropped while recording"),
        (sum(one.passed for one in balances), "kept in memory alone, because no trigger asked for their steps"),
        (sum(one.retired_rows for one in balances), f"removed for the quota{between}"),
    )
    told = [f"{counted(number, 'row')} {what}" for number, what in counts if number]
    told += filter(None, [absence(run)])
    return f"not looked at: {'; '.join(told)} (recorder doctor says of what)" if told else ""


class Problems:
    """Collects contradictions between ranks, in the selected values, over ranges of steps."""

    def __init__(self, selection: Selection) -> None:
        self._selection = Selection(module=selection.module, site=selection.site, name=selection.name)
        self._found: dict[str, None] = {}

    def add(self, findings: Sequence[RowFinding]) -> None:
        """Add those findings of the global view that are contradictions between ranks.

        Where parameters have come apart, activations that do not depend on the batch come apart with them. That is an
        error of the training, and no contradiction in what was recorded.
        """
        apart = [one.step for one in findings if (one.kind, one.site) == ("replicas_differ", "param")]
        since = min(apart, default=math.inf)
        wrong = [one for one in findings if one.kind in _CONTRADICTIONS]
        wrong = [one for one in wrong if one.kind != "layout_changes" or one.step < since]
        columns = {name: [getattr(one, name) for one in wrong] for name in ("module_path", "site", "name")}
        texts = [f"{value_in_words(one.module_path, one.site, one.name)}: {one.text}" for one in wrong]
        table = pa.table({name: pa.array(values, pa.string()) for name, values in (columns | {"text": texts}).items()})
        stages = [one.text for one in findings if one.kind == "partial" and not one.site]
        self._found |= dict.fromkeys([*stages, *self._selection.narrow(table).column("text").to_pylist()])

    def join(self, other: Problems) -> None:
        self._found |= other._found

    def __bool__(self) -> bool:
        return bool(self._found)

    def texts(self) -> list[str]:
        """Return the first contradictions as texts. If there are more, the last text says how many."""
        more = len(self._found) - _MAX_NAMED
        return [*list(self._found)[:_MAX_NAMED], *([f"and {more} more contradictions"] if more > 0 else [])]


def layout_problems(run: Run) -> list[str] | None:
    """Return the contradictions between ranks at the steps from which layouts are inferred.

    A contradiction at some steps usually exists at all steps. Return None if these steps have too many rows to load.
    The list is empty for a merged run, because the merge has reported its contradictions.
    """
    if run.is_merged:
        return []
    view = run.view()
    metadata, steps = view.sample_batches()
    if metadata.num_rows > _MAX_LOADED_ROWS:
        return None
    positions = load_sample(metadata, steps)
    values = GlobalValues(
        metadata, run.topology, loss="mean", overrides=[], leaves=view.leaves,
        is_same=lambda _: None, items_of=lambda _: None,  # no payload is read
    )  # fmt: skip
    for _ in values.values(positions):
        pass
    problems = Problems(Selection())
    problems.add(values.findings)
    return problems.texts()


def unsealed(run: RecordedRun) -> tuple[int, int]:
    """Count the rows in open shards of writers that have stopped, and the shards that have such rows.

    A merged run has none, because a merged run cannot be repaired.
    """
    over = [] if run.is_merged else [writer for writer in run.writers if writer.state != "recording"]
    rows = [shard.num_rows for writer in over for shard in writer.all_shards if not shard.is_sealed]
    return sum(rows), sum(number > 0 for number in rows)


def unsealed_note(run: RecordedRun) -> str:
    """Return a sentence on rows in open shards and how to seal them. Empty if there are no such rows."""
    num_rows, num_files = unsealed(run)
    if not num_rows:
        return ""
    rows = "1 row is" if num_rows == 1 else f"{num_rows} rows are"
    files = f"{num_files} open {plural('file', num_files)}"
    them = "it" if num_rows == 1 else "them"
    target = shortest_text_of(run.path, run.name) if isinstance(run.path, Path) else "COPY"
    seals = f"`{shlex.join(['recorder', 'repair', target])}` seals {'it' if num_files == 1 else 'them'}"
    if target == "COPY":
        seals += " in a copy on a disk"
    return f"{rows} in {files}: recorder reads {them}, other readers do not; {seals}"


_MAX_STRAYS = 20
"""The most links, pipes and devices that are reported for one directory."""


def strays(run: Run) -> Iterator[str]:
    """Yield a sentence for each file whose name ends with ``.arrow``, but which is none of the run's shards.

    A reader that finds files by ``*.arrow`` would take the file for rows of the run. A later version of the format may
    have further files, whose names begin with ``_``.
    """
    store = store_of(run.path)
    is_later = run.version > FORMAT_VERSION
    folders = {writer.directory for writer in run.writers}
    irregular: dict[str, None] = {}
    """The links, pipes and devices in a folder. A store calls `is_part` only for these."""
    known = {run.path, *(one.parent for one in folders), *folders}
    for folder in sorted(known, key=str):

        def is_stray(name: str, folder: Location = folder) -> bool:
            is_shard = folder in folders and parse_shard_name(name) is not None
            return name.endswith(".arrow") and not is_shard and not (is_later and name.startswith("_"))

        irregular.clear()
        files = store.list_directory(folder, directories=False, is_part=lambda name: bool(irregular.setdefault(name)))
        for name in list(filter(is_stray, irregular))[:_MAX_STRAYS]:
            try:
                store.list_directory(folder, directories=False, is_part=name.__eq__)
            except NotARunError as error:
                yield f"{error}; it is none of the run's shards, and who reads the run by *.arrow reads it"
        directories = store.list_directory(folder, directories=True)
        named = [name for name in files if is_stray(name)] + [name for name in directories if name.endswith(".arrow")]
        for inner in directories:  # the glob of polars also matches files in directories below
            if folder / inner in known:
                continue
            files = store.list_directory(folder / inner, directories=False)
            named += [f"{inner}/{name}" for name in files if name.endswith(".arrow")][:_MAX_STRAYS]
        for name in named:
            yield f"{folder / name}: none of the run's shards, and who reads the run by *.arrow reads it; move it away"
