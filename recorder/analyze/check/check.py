"""Applies check rules to a recorded run, and makes the output of `recorder check`.

The output has a sentence for each finding, with a command that shows more. With ``--list`` it has the rules instead.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import NamedTuple

from ...checks.book import ENTRY_POINTS, RULES, OwnThreshold, Thresholds, find_rule, make_rules
from ...checks.causes import kind_of, with_causes, words_of
from ...checks.engine import Engine, Unjudged
from ...checks.normal import Normal, Sizes
from ...checks.rows import SeriesKey
from ...checks.rule import MAX_DETAIL, CheckRule, Finding, Setting, Severity
from ...checks.rules.comparing import NEVER_HERE, RUNNING_VARIANCE, OutlierRank, Replica, Restart, Width
from ...checks.rules.data import ONE_BATCH, Data
from ...checks.rules.losses import LossStuck
from ...checks.rules.no_gradient import NoGradient
from ...checks.rules.programs import BatchFirst, EvaluationMode, LossArgument, NotCleared, NotOptimized
from ...checks.rules.updates import Update
from ...checks.rules.values import NonFinite
from ...errors import ConfigError
from ...numerics.keys import by_key
from ...records import KEEP_STATS
from ...rules import ANY, Rule, hint, matches, parse_rules
from ...run.notes import damage, left_out, raised, superseded, unrecorded
from ...run.reply import Reply, StateLine, Table
from ...run.run import Run
from ...run.step_ranges import Mapper, map_serially
from ...sites import UPDATE, is_labels
from ...system.text import (
    counted,
    fewer_clauses,
    grouped,
    listed,
    model_in_words,
    number,
    shortened,
    site_in_words,
    steps_in_words,
)  # fmt: skip
from ..doctor.slots import read_rules
from ..first.replica_groups import named_ranks
from .reading import RunRows
from .replicas import NEVER_EQUAL, replicas_of
from .restarts import restarts_of

_LEAST_COMMON = 2
"""A baseline run with fewer than 1/`_LEAST_COMMON` of the judged run's values has another model or other sites."""


class Checked(NamedTuple):
    """The result of applying check rules to a run."""

    findings: list[Finding]
    """The findings, sorted by severity, the worst first, then by step."""
    unjudged: list[Unjudged]
    """The rules that could not judge the run, each with the data that it needs."""
    num_rules: int
    num_rows: int
    """The number of recorded rows that were judged."""
    num_probed: int
    """The number of values without a row that were judged by the probe, which has one number per value and step."""
    steps: list[int]
    notes: list[str]
    """Notes on rows and rules that were left out."""

    @property
    def num_judged(self) -> int:
        return self.num_rules - len(self.unjudged)

    @property
    def num_unjudged(self) -> str:
        """The number of rules that could not judge the run, as a text such as ``3 of 20 rules``."""
        return f"{len(self.unjudged)} of {counted(self.num_rules, 'rule')}"


def check(
    run: Run,
    rules: Sequence[str] = (),
    thresholds: Mapping[str, Mapping[str, float]] | None = None,
    own: Sequence[type[CheckRule]] = (),
    baselines: Sequence[Run] = (),
    widths: Sequence[Run] = (),
    mapper: Mapper = map_serially,
) -> Checked:
    """Judge a training by the statistics of its values.

    Args:
        run: the recorded run of the training.
        rules: the names of the rules to apply; empty for all rules.
        thresholds: numbers that replace the default thresholds, by rule and setting.
        own: more rules, besides the recorder's rules and the rules that packages install as entry points.
        baselines: runs of the same training that went well. The rules `unusual` and `invariant` compare the run with
            them. A finding that a rule also makes in these runs is only a note.
        widths: runs of the same training at other widths, for the rule `width`.
        mapper: reads ranges of steps of `run`, in this process or in worker processes. The rules run in this process.

    Raises:
        ConfigError: `rules` has an unknown name (the message suggests the nearest name), or a rule of `own` has the
            name of an installed rule.
    """
    installed, notes = installed_rules()
    if twice := {rule.name for rule in own} & {rule.name for rule in installed}:
        raise ConfigError(f"rule {min(twice)!r}: a package brings a rule of that name; give yours another name")
    known = [*RULES, *installed, *own]
    chosen = [find_rule(name, known) for name in dict.fromkeys(rules)] or known
    rows = RunRows(run, [name for rule in chosen for name in (*rule.columns, *rule.more_columns)], mapper=mapper)
    settings = {name: dict(of) for name, of in (thresholds or {}).items()}
    normal, known_to = _learnt(baselines, chosen, settings) if baselines else (None, [])
    others = [_sizes(one, int(settings.get(Width.name, {}).get("steps", Width.default("steps")))) for one in widths]
    compared = {Replica.name: replicas_of(run, mapper)} if Replica in chosen else {}
    compared |= {Restart.name: restarts_of(run)} if Restart in chosen else {}
    engine = Engine(make_rules(chosen, rows.catalog, settings, normal, others, compared), rows.catalog)
    for some in rows:
        engine.add(some)
    verdict = engine.finish()
    whole = _with_ranks(_without_parts(verdict.findings), run)
    findings = with_causes(whole, rows.catalog)
    if len(whole) < len(verdict.findings):
        notes.append("ranks with one batch never had the same parameters, so they count as parts of one model")
    if normal is not None:
        findings = _excused(findings, normal)
        notes += _notes_on(baselines, normal, engine.last_step)
        notes += [
            f"the sound run {one.name} {strange}"
            for one, known in zip(baselines, known_to, strict=True)
            if (strange := _strangeness(rows.catalog.series, known))
        ]
    more = verdict.num_more.items()
    notes += [f"{num} more findings of {name} were counted and are not listed" for name, num in more]
    notes += [note for one in compared.values() for note in one.notes]
    notes += [
        *rows.probe_notes,
        *filter(None, [left_out(run)]),
        *run.endings,
        *raised(run),
        *unrecorded(run),
        *superseded(run),
    ]
    if rows.num_superseded:
        what = "rows and numbers of the probe" if rows.num_probed else "rows"
        notes.append(f"{rows.num_superseded} {what} were left out, because a restart repeated their steps")
    if run.problems:
        lost = f" ({num_lost} rows)" if (num_lost := _num_lost(run)) else ""
        notes.append(f"the run is damaged, and what cannot be read{lost} was left out: {damage(run)}")
    steps = sorted(rows.steps)
    own_modules = {rule.name: rule.modules for rule in chosen if issubclass(rule, OwnThreshold)}
    told = [_unmatched(run, one, own_modules.get(one.rule, ANY)) for one in verdict.unjudged]
    unjudged = _advised(run, told, steps, {key.site for key in rows.catalog.series})
    return Checked(findings, unjudged, len(chosen), rows.num_rows, rows.num_probed, steps, notes)


def _why_no_update(run: Run, steps: Sequence[int]) -> str:
    """Return why a run has nothing of a backward and an update, though rules select it. Empty if it is not known."""
    if steps == [0]:
        return "the run ended before its first update"
    if len(steps) == 1:
        return "no optimizer stepped after the recorded calls"
    if any(writer.manifest.members.get("optimizers") for writer in run.writers):
        return ""
    return "no optimizer of torch stepped, and parameters and gradients are recorded where one does"


def _advised(run: Run, unjudged: Sequence[Unjudged], steps: Sequence[int], recorded: Collection[str]) -> list[Unjudged]:
    """Remove useless advice to add a recording rule: the run had the rule, or no value that the rule selects.

    `recorded` has the sites of the values that the run has.
    """
    modules = run.modules.values()
    is_known, buffers = any(one.params for one in modules), {name for one in modules for name in one.buffers}
    has_no_norm = is_known and not any(name.endswith(RUNNING_VARIANCE) for name in buffers)
    is_untrained = any(one.untrained for one in modules)
    rules = {rule for writer in run.writers for rule in read_rules(writer.manifest)[0]}
    why_no_update = "" if "param" in recorded or "grad" in recorded else _why_no_update(run, steps)
    lacking = {site for rule in rules for site in rule.site}.intersection(_OF_UPDATES).difference(recorded)
    told: list[Unjudged] = []
    for one in unjudged:
        (wanted,) = parse_rules(one.setting, takes_unknown_sites=True) or (None,)
        if wanted is not None and wanted.site == ("buffer",) and has_no_norm:
            why = "no buffer of the model is the running variance of a norm" if buffers else "the model has no buffers"
            one = one._replace(why=why, setting="")
        elif wanted is not None and why_no_update and wanted.keep == KEEP_STATS and lacking.intersection(wanted.site):
            one = one._replace(why=why_no_update, setting="")
        elif wanted is not None and wanted.site == ("grad",) and is_untrained and "no rows" in one.why:
            one = one._replace(why="no optimizer has a parameter with a gradient", setting="")
        elif wanted is not None and one.rule == Data.name and any(_selects_inputs(rule) for rule in rules):
            one = one._replace(why="the whole model has no input: only parts of it are called", setting="")
        elif wanted is not None and any(_selects_all(rule, wanted) for rule in rules):
            one = one._replace(setting="")
        told.append(one)
    return told


def _unmatched(run: Run, one: Unjudged, patterns: tuple[str, ...]) -> Unjudged:
    """Return a rule that could not judge the run with the reason, if its patterns match no module of the run."""
    paths = run.known_paths
    if not paths or any(matches(patterns, path) for path in paths):
        return one
    asked = ",".join(patterns)
    return one._replace(why=f"no module of the run matches {asked!r}{hint(asked, paths)}", setting="")


_OF_UPDATES = ("param", "grad", "grad_output", "scalar")
"""The sites of values that a program has once it has made a backward and an update."""


def _selects_inputs(rule: Rule) -> bool:
    """Return whether `rule` keeps statistics of what the whole model is called with."""
    return "input" in rule.site and bool(rule.keep & KEEP_STATS) and rule.matches_module("", "", is_leaf=False)


def _selects_all(rule: Rule, wanted: Rule) -> bool:
    """Return whether `rule` has at least the sites and the `keep` of `wanted`, and is otherwise equal to it."""
    is_asked_for = rule.keep & wanted.keep == wanted.keep and set(wanted.site) <= set(rule.site)
    return is_asked_for and replace(rule, site=wanted.site, keep=wanted.keep) == wanted


def _learnt(
    baselines: Sequence[Run], rules: Sequence[type[CheckRule]], settings: Mapping[str, dict[str, float]]
) -> tuple[Normal, list[set[SeriesKey]]]:
    """Return what is `Normal` in the baseline runs, with the findings in them, and the keys of each run's values."""
    normal, values = Normal(), []
    for run in baselines:
        rows = RunRows(run, [name for rule in rules for name in (*rule.columns, *rule.more_columns)])
        learner = normal.learner(rows.catalog)
        compared = {Replica.name: replicas_of(run)} if Replica in rules else {}
        made = make_rules(rules, rows.catalog, dict(settings), compared=compared)
        engine = Engine(made, rows.catalog)
        for some in rows:
            learner.add(some.without_probe())
            engine.add(some)
        said = [one for one in engine.finish().findings if one.severity > Severity.NOTE]
        normal.said |= {_subject(one) for one in said if one.site}
        values.append(set(rows.catalog.series))
    return normal, values


def _without_parts(findings: Sequence[Finding]) -> list[Finding]:
    """Remove findings that compare ranks if a root has ONE_BATCH and NEVER_EQUAL: such ranks hold parts."""
    said = (ONE_BATCH, NEVER_EQUAL)
    of_batch, of_parts = ({one.root for one in findings if one.what.startswith(what)} for what in said)
    parts = of_batch & of_parts
    of_ranks = OutlierRank.name
    return [one for one in findings if one.root not in parts or not (one.what.startswith(said) or one.rule == of_ranks)]


def _sizes(run: Run, steps: int) -> Sizes:
    rows = RunRows(run)
    sizes = Sizes(rows.catalog, steps)
    for some in rows:
        if not sizes.add(some.without_probe()):
            break
    return sizes


def _excused(findings: Sequence[Finding], normal: Normal) -> list[Finding]:
    """Make findings that a sound run has, too, notes. Their consequences that no sound run has stand for themselves."""
    is_excused = [one.severity > Severity.NOTE and _subject(one) in normal.said for one in findings]
    words: tuple[set[str], set[str]] = set(), set()
    for one, excused in zip(findings, is_excused, strict=True):
        words[excused].add(words_of(one))
    free = words[True] - words[False]
    noted = [
        one._replace(severity=Severity.NOTE, what=f"{one.what}; a sound run has this finding, too")
        if excused
        else one._replace(cause="" if one.cause in free and one.severity > Severity.NOTE else one.cause)
        for one, excused in zip(findings, is_excused, strict=True)
    ]
    return sorted(noted, key=lambda one: -one.severity)


def _subject(one: Finding) -> tuple[str, str, str, str, str]:
    return one.rule, one.root, one.module_path, one.site, one.name


def _notes_on(baselines: Sequence[Run], normal: Normal, last_step: int) -> list[str]:
    damaged = [run.name for run in baselines if run.problems]
    notes = [f"the baseline run {name} is damaged on disk; its unreadable rows were left out" for name in damaged]
    if last_step > normal.last_step >= 0:
        notes.append(f"the sound runs end at step {normal.last_step}: later steps are compared with little")
    return notes


def _strangeness(series: Sequence[SeriesKey], known: set[SeriesKey]) -> str:
    """Return a text if a baseline run has too few of the judged run's values below the root; else an empty text.

    `series` are the values of the judged run, and `known` the values of the baseline run.
    """
    inner = [key for key in series if key.module_path] or list(series)
    num = sum(key in known for key in inner)
    if num * _LEAST_COMMON >= len(inner):
        return ""
    what = f"has {num} of the {len(inner)} values of this run" if num else "has no value of this run"
    compared = "only these are" if num else "nothing is"
    return f"{what}: it has another model, other sites or other names; {compared} compared with it"


def _num_lost(run: Run) -> int:
    balances = [(writer.balance.written - writer.balance.retired_rows, writer.num_rows) for writer in run.writers]
    return sum(max(written - there, 0) for written, there in balances)


def installed_rules() -> tuple[list[type[CheckRule]], list[str]]:
    """Return the rules that installed packages add, and notes on the rules that could not be loaded."""
    rules: list[type[CheckRule]] = []
    notes = []
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name):
        try:
            rules.append(_load(point, [rule.name for rule in (*RULES, *rules)]))
        except Exception as error:  # another package's code may raise anything
            notes.append(f"the entry point {point.name} = {point.value} was left out: {type(error).__name__}: {error}")
    return rules, notes


def _load(point: EntryPoint, names: Sequence[str]) -> type[CheckRule]:
    rule = point.load()
    if not (isinstance(rule, type) and issubclass(rule, CheckRule)):
        raise TypeError("it is no subclass of recorder.checks.rule.CheckRule")
    lacking = [name for name in ("name", "sentence", "sites", "columns", "advice") if not hasattr(rule, name)]
    if lacking:
        raise TypeError(f"it has no {', '.join(lacking)}")
    texts = (rule.name, rule.sentence, rule.advice, rule.keep, rule.needs)
    lists = (rule.sites, rule.columns)
    is_right = all(isinstance(one, str) for one in texts) and isinstance(rule.severity, Severity)
    is_right &= all(isinstance(some, tuple) and all(isinstance(one, str) for one in some) for some in lists)
    if not (is_right and all(isinstance(one, Setting) for one in rule.settings)):
        raise TypeError("expected texts, tuples of texts as sites and columns, a Severity, and Settings")
    if rule.name in names:
        raise ValueError(f"there is a rule {rule.name!r} already")
    return rule


_MAX_MODULES = 4
_MAX_PATH = 80
_MAX_FOLLOWING = 400
MAX_FINDINGS = 40
"""The largest number of findings that `recorder check` prints. ``--json`` has all findings."""
_SHOWN_LOSSES = 20
"""About so many losses are shown of a run."""
_MAX_WANTS = 6
_INDENT = " " * 8
_KEEP = re.compile(r"(keep=\S+)")
_NEED = re.compile(r"(?:it )?needs ([^:;,(]+)")
_OTHER = "something else"


def reply_of(run: Run, checked: Checked, typed: str, *, fails_from: int | None, is_verbose: bool) -> Reply:
    """Return the output of `recorder check`. `typed` is the text by which the user named the run on the command line.

    The exit code is 1 if the run is damaged, if all its rows are lost, or if a finding has at least the severity
    `fails_from`. It is always 0 if `fails_from` is None. With `is_verbose` the output names each rule that did not
    judge the run, and its needs.
    """
    worst = max((one.severity for one in checked.findings), default=-1)
    is_failure = fails_from is not None and (worst >= fails_from or bool(run.problems or run.lost))
    return Reply(
        members=lambda: {
            "run": str(run.path),
            "rules": checked.num_rules,
            "judged": checked.num_judged,
            "rows": checked.num_rows,
            "probed": checked.num_probed,
            "steps": checked.steps,
            "findings": [
                one._asdict() | {"severity": one.severity.word, "ranks": list(one.ranks), "text": one.text}
                for one in checked.findings
            ],
            "not_judged": [one._asdict() for one in checked.unjudged],
            "problems": run.problems,
            "notes": checked.notes,
        },
        parts=partial(_parts, run, checked, typed, is_verbose=is_verbose),
        exit_code=int(is_failure),
    )


_FACT_OF: dict[str, tuple[str, ...]] = {
    NotOptimized.name: ("untrained", "optimizer_anew_since"), BatchFirst.name: ("batch_as_time",),
    EvaluationMode.name: ("evaluated", "validated_in_training"), LossArgument.name: ("loss_argument_since",),
    NotCleared.name: ("uncleared",),
}  # fmt: skip
"""By name of a rule on the program, the members of `RecordedModule` that it reads."""
_SHOWN = (BatchFirst.name, EvaluationMode.name, NotOptimized.name)
"""The rules whose findings `recorder show` shows among the facts of a module."""


def _with_ranks(findings: Sequence[Finding], run: Run) -> list[Finding]:
    """Return findings, those of rules on the program with the ranks for which they are so, if not so for all.

    Ranks that do not have the module, such as those of another stage of a pipeline, do not count.
    """
    wanted = {(one.root, one.rule) for one in findings if one.rule in _FACT_OF} if len(run.ranks) > 1 else set()
    last = max((writer.attempt for writer in run.writers), default=0)
    newest = [writer for writer in run.writers if writer.attempt == last]
    of_rank = ((one.rank, root) for one in newest if one.rank is not None for root in one.manifest.roots)
    alike = by_key((id(root), (rank, root)) for rank, root in of_rank)  # equal models share one object
    having: defaultdict[tuple[str, ...], set[int]] = defaultdict(set)
    for members in alike.values():
        root, ranks = members[0][1], [rank for rank, _ in members]
        for _, rule in (one for one in wanted if one[0] == root.name):
            for module in root.modules:
                # The finding of `not_cleared` is on the root, and the fact on any module.
                key = root.name, rule, "" if rule == NotCleared.name else module.path
                having[*key, "all"].update(ranks)
                if any(map(module.has_fact, _FACT_OF[rule])):
                    having[key].update(ranks)

    def with_ranks(one: Finding) -> Finding:
        key = one.root, one.rule, one.module_path
        if (one.root, one.rule) not in wanted or not having[key] or having[key] == having[*key, "all"]:
            return one
        # What may be meant on all ranks is not meant on some.
        severity = Severity.WARNING if one.rule == EvaluationMode.name and one.module_path else one.severity
        return one._replace(ranks=tuple(sorted(having[key])), severity=severity)

    return list(map(with_ranks, findings))


def rules_reply(rules: Sequence[type[CheckRule]], thresholds: Thresholds) -> Reply:
    """Return the output of `recorder check --list`, which has all rules and the thresholds that apply."""
    titles = ("rule", "setting", "threshold", "unit", "source")
    settings = [
        [rule.name, one.name, number(thresholds.get(rule.name, {}).get(one.name, one.default)), one.unit, one.source]
        for rule in rules
        for one in rule.settings
    ]
    known = [{"rule": rule.name, "severity": rule.severity.word, "sentence": rule.sentence} for rule in rules]

    def parts() -> Iterator[str | Table]:
        rows = [list(rule.values()) for rule in known]
        yield Table(("rule", "severity", "finds"), rows, prose=("finds",))
        yield ""
        yield Table(titles, settings, numbers=("threshold",), prose=("unit", "source"))

    return Reply(
        members=lambda: {"rules": known, "settings": [dict(zip(titles, row, strict=True)) for row in settings]},
        parts=parts,
    )


class JoinedFindings(NamedTuple):
    """Findings of one kind about several values. The output has one sentence for all of them."""

    worst: Finding
    paths: list[str]
    names: list[str]
    first_step: int
    """The first step at which any of the findings holds."""
    last_step: int
    ranks: list[int]
    words: set[str]
    """The texts by which `Finding.cause` refers to these findings."""
    model: str
    """The name of the model, to be put before a path. Empty for the only model of a run."""

    @classmethod
    def of(cls, findings: Sequence[Finding], *, has_models: bool) -> JoinedFindings:
        steps = [one.first_step for one in findings]
        paths = list(dict.fromkeys(one.module_path for one in findings))
        names = list(dict.fromkeys(one.name for one in findings if one.name))
        ranks = sorted({rank for one in findings for rank in one.ranks})
        words = {words_of(one) for one in findings}
        model = model_in_words(findings[0].root, has_models=has_models)
        return cls(findings[0], paths, names, min(steps), max(steps), ranks, words, model)


def _parts(run: Run, checked: Checked, typed: str, *, is_verbose: bool) -> Iterator[str | StateLine]:
    told = list(told_of(checked.findings, has_models=run.has_models))
    for one, under in told[:MAX_FINDINGS]:
        yield StateLine(one.worst.severity.word, sentence(one))
        yield f"{_INDENT}" + ": ".join(filter(None, [one.worst.advice, command_of(typed, one)]))
        for words in ("with it", "from it follow"):
            some = [other for other in under if bool(other.worst.cause) == (words != "with it")]
            if some:
                yield f"{_INDENT}{words}: {_listed([f'{other.worst.rule} at {_place(other)}' for other in some])}"
    if len(told) > MAX_FINDINGS:
        yield f"{_INDENT}and {len(told) - MAX_FINDINGS} more findings; --json has all"
    if told and run.has_models:
        classes = [f"{root} ({one.class_name})" for (root, path), one in run.modules.items() if not path]
        yield f"models: {listed(classes)}"
    yield from (f"note: {note}" for note in checked.notes)
    counts = Counter(one.worst.severity for one, _ in told)
    tally = ", ".join(counted(counts[severity], severity.word) for severity in reversed(Severity))
    rows = counted(checked.num_rows, "row")
    rows += f" and {counted(checked.num_probed, 'number')} of the probe" if checked.num_probed else ""
    is_judged = checked.num_judged and (checked.num_rows or checked.num_probed)
    nothing = "nothing found" if is_judged else "nothing is known"
    judged = (
        f"{checked.num_judged} of {counted(checked.num_rules, 'rule')} judged {rows} of {steps_in_words(checked.steps)}"
    )
    yield f"{run.name}: {tally if told else nothing}; {judged}"
    reasons = {} if run.lost and not is_verbose else _reasons(checked.unjudged)  # no other rules would have helped
    if is_verbose or len(reasons) == 1:
        yield from (f"not judged: {', '.join(names)}: {why}" for why, names in reasons.items())
    elif reasons:
        yield f"{_wants(checked)}; --verbose names each"
    settings = dict.fromkeys(one.setting for one in checked.unjudged if one.setting)
    if settings and not run.lost:
        num = sum(bool(one.setting) for one in checked.unjudged)
        rules = "; ".join(settings).replace(" keep=", " steps=::10 keep=")  # not at every step: most rows
        yield f"for {num} of them, record the next run with RECORDER_PRESET=default RECORDER_RULES={shlex.quote(rules)}"


def _listed(findings: Sequence[str]) -> str:
    """Return findings one after the other, as many as a few lines hold, and how many more there are."""
    lengths = itertools.accumulate(len(one) + 2 for one in findings)
    shown = max(sum(length <= _MAX_FOLLOWING for length in lengths), 1)
    more = [f"and {len(findings) - shown} more"] if shown < len(findings) else []
    return "; ".join([*findings[:shown], *more])


def told_of(
    findings: Sequence[Finding], *, has_models: bool = False
) -> Iterator[tuple[JoinedFindings, list[JoinedFindings]]]:
    """Yield each finding without a cause, the like findings on other values, and the findings that it causes."""
    causes = joined((one for one in findings if not one.cause), has_models=has_models)
    alike = by_key((kind_of(one.worst), one) for one in causes)
    for first, *others in alike.values():
        words = first.words.union(*(one.words for one in others))
        following = (follower for follower in findings if follower.cause in words)
        yield first, [*others, *joined(following, has_models=has_models)]


def joined(findings: Iterable[Finding], *, has_models: bool = False) -> Iterator[JoinedFindings]:
    """Join findings of one kind at one site of a model, and of two modules if their values have equal names."""
    groups = by_key(((one.rule, one.severity, one.what, one.site, one.measure, one.root), one) for one in findings)
    for group in groups.values():
        names = by_key((one.module_path, one.name) for one in group)
        by_names = by_key((frozenset(names[one.module_path]), one) for one in group)
        yield from (JoinedFindings.of(some, has_models=has_models) for some in by_names.values())


def sentence(one: JoinedFindings) -> str:
    """Return a sentence with the rule, module, steps, ranks and fault, and with how large the fault is."""
    worst = one.worst
    if not worst.site:
        return where_of(one)["what"]
    return f"{worst.rule}: {_place(one)}: {worst.explained}"


def _place(one: JoinedFindings) -> str:
    parts = where_of(one)
    where = " ".join(filter(None, (parts.get("module"), parts.get("value"))))
    return ", ".join(filter(None, (where, parts.get("step"), parts.get("rank"))))


def where_of(one: JoinedFindings) -> dict[str, str]:
    """Return the sentence about a finding as table cells: what, module, value, step, rank and size."""
    worst = one.worst
    if not worst.site:
        return {"what": f"{worst.rule}: {worst.what}"}
    paths = [shortened(path, _MAX_PATH) for path in grouped(one.paths)]
    names = shortened(listed(one.names, _MAX_MODULES), _MAX_PATH)
    until = f" to {one.last_step}" if one.last_step > one.first_step else ""
    return {
        "what": f"{worst.rule}: {worst.what}",
        "module": one.model + listed(paths, _MAX_MODULES),
        "value": site_in_words(worst.site, names),
        "step": f"{'since ' * (worst.since is not None)}step {one.first_step}{until}",
        "rank": named_ranks(one.ranks) if one.ranks else "",
        "size": "; ".join(filter(None, [worst.size.strip(" ,:()"), fewer_clauses(worst.detail, MAX_DETAIL)])),
    }


def command_of(typed: str, one: JoinedFindings) -> str:
    """Return the command that shows the numbers of a finding. Empty if the finding does not concern a value."""
    worst = one.worst
    if not worst.site or worst.rule == LossArgument.name:  # no value shows what a loss was given
        return ""
    if worst.rule == Replica.name:
        return shlex.join(["recorder", "first", typed])
    where, of_model = [worst.module_path], ["--root", worst.root] if one.model else []
    is_missing = (worst.rule == NoGradient.name and worst.site == "param") or worst.what == NEVER_HERE
    if is_missing or worst.rule in _SHOWN:  # no row has what the program did
        return shlex.join(["recorder", "show", typed, *where[: len(one.paths) == 1], *of_model])
    if worst.rule == NotCleared.name or (worst.rule == Update.name and not worst.module_path):
        where = []  # the rule concerns all parameters, and the root may have none of its own
    site = f"{worst.site},{UPDATE}" if worst.rule == Update.name and worst.site == "param" else worst.site
    words = ["recorder", "stats", typed, *where, "--site", site]
    is_by_name = worst.site == "scalar" or (worst.site == "input" and is_labels(worst.name))
    words += ["--name", worst.name] if is_by_name and len(one.names) == 1 else []
    first, stride = max(worst.first_step - 5, 0), ""
    if worst.rule == LossStuck.name:  # the loss of the whole run is judged
        every = max((worst.step + 2) // _SHOWN_LOSSES, 1)
        first, stride = worst.step % every, f":{every}"
    words += ["--step", f"{first}:{worst.step + 2}{stride}"] if worst.step >= 0 else []
    reads_probe = worst.rule == NonFinite.name or not worst.measure  # the probe has the healthy steps before a NaN
    reads_probe |= any(rule.reads_probe for rule in RULES if rule.name == worst.rule)
    words += ["--probe"] if reads_probe and worst.site != "scalar" else []
    is_of_others = worst.what.startswith(ONE_BATCH) or worst.rule == OutlierRank.name  # the other ranks show it
    words += ["--rank", str(worst.ranks[0])] if len(one.ranks) == 1 and not is_of_others else []
    return shlex.join([*words, *of_model])


def _wants(checked: Checked) -> str:
    needs = (_KEEP.search(one.setting) or _NEED.match(one.why) for one in checked.unjudged)
    counts = Counter(_OTHER if need is None else need[1] for need in needs)
    ordered = sorted(counts.items(), key=lambda item: (item[0] == _OTHER, -item[1]))
    wants = [f"{want} ({count})" for want, count in ordered[1:_MAX_WANTS]]
    wants[:0] = [f"{want} ({counted(count, 'rule')})" for want, count in ordered[:1]]
    wants += ["..."] * (len(ordered) > _MAX_WANTS)
    return f"{len(checked.unjudged)} more rules lack something that they judge by: {', '.join(wants)}"


def _reasons(unjudged: Sequence[Unjudged]) -> dict[str, list[str]]:
    settings = (f"; the next time add the rule '{one.setting}'" if one.setting else "" for one in unjudged)
    return by_key((one.why + setting, one.rule) for one, setting in zip(unjudged, settings, strict=True))
