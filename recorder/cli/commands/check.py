"""``recorder check``: what is wrong with a training, one sentence a finding, or JSON."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from ...analyze.check.check import Checked, check, installed_rules
from ...checks.book import RULES, Thresholds, read_assignment, read_settings_file
from ...checks.engine import Unjudged
from ...checks.rule import Finding, Rule, Severity
from ...errors import LookupFailedError
from ...rules import hint
from ...run.reply import Table, TableColumn
from ...run.run import Run, open_run
from ...system.text import counted, grouped, listed, number, shortened, steps_in_words
from ..options import Json, RunPath
from ..output import print_json, print_table, say, say_state
from ..paths import local_path, other_runs

EPILOG = "Examples: recorder check recordings --set spike.sigmas=8    recorder check --list"

_NEVER = "never"
_FAIL_ON = (*(severity.word for severity in Severity), _NEVER)
_MAX_MODULES = 4
_MAX_PATH = 80
_MAX_DETAIL = 240
_MAX_FINDINGS = 40
_MAX_RANKS = 8
_INDENT = " " * 8
_KEEP = re.compile(r"(keep=\S+)")
_NEED = re.compile(r"(?:it )?needs ([^:;,(]+)")
_MAX_WANTS = 6
_OTHER = "something else"


class Folded(NamedTuple):
    """Findings that say one thing of several values."""

    worst: Finding
    paths: list[str]
    names: list[str]
    """Names of the values at the site."""
    first_step: int
    """From which it holds, of all values the first."""
    last_step: int
    ranks: list[int]


def command(
    path: RunPath = None,
    rule: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this rule; several with several --rule.")
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="RULE.SETTING=NUMBER", help="A threshold, such as spike.sigmas=8. Repeatable."),
    ] = None,
    settings: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A TOML file of thresholds and of rules of your own.", parser=local_path),
    ] = None,
    baselines: Annotated[
        list[str] | None,
        typer.Option("--baseline", metavar="SOUND_RUN", help="A run of this training that went well. Repeatable."),
    ] = None,
    widths: Annotated[
        list[str] | None,
        typer.Option("--width", metavar="RUN", help="This training at another width, for the rule width. Repeatable."),
    ] = None,
    fail_on: Annotated[
        str, typer.Option(metavar="SEVERITY", help=f"From where on the exit code is 1: {', '.join(_FAIL_ON)}.")
    ] = Severity.ERROR.word,
    list_rules: Annotated[bool, typer.Option("--list", help="List the rules and their thresholds.")] = False,
    is_verbose: Annotated[
        bool, typer.Option("--verbose", help="Name each rule that is not judged, and what it needs.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Say what is wrong with a training, rule by rule.

    NaN, spikes, dead layers, gradients that vanish, a rank that is odd: the rules read the statistics of all steps and
    ranks, and no tensor. The worst findings stand first; what a rule says of many modules is one line. A rule that
    the run lacks the numbers for is not judged; with --verbose, or --rule, the command says of each what to record.

    Exit code 1: a finding of the severity of --fail-on or worse, or the run is damaged, so that there may be one.
    """
    if fail_on not in _FAIL_ON:
        choices = hint(fail_on, _FAIL_ON)
        raise LookupFailedError(f"--fail-on {fail_on}: expected one of {', '.join(_FAIL_ON)}{choices}")
    thresholds, own = ({}, []) if settings is None else read_settings_file(settings)
    known = [*RULES, *installed_rules()[0], *own]
    for text in assignments or []:
        name, setting, value = read_assignment(text, known)
        thresholds.setdefault(name, {})[setting] = value
    if list_rules:
        return _list(known, thresholds, as_json=as_json)
    run = open_run(path)
    given = (("--baseline", baselines or []), ("--width", widths or []))
    checked = check(run, rule or [], thresholds, own, *(other_runs(*some, {"the run to check": run}) for some in given))
    worst = max((one.severity for one in checked.findings), default=-1)
    is_failure = fail_on != _NEVER and (worst >= _FAIL_ON.index(fail_on) or bool(run.problems))
    if as_json:
        print_json(_document(run, checked))
    else:
        _print(run, checked, path or run.name, are_reasons_wanted=is_verbose or bool(rule))
    return int(is_failure)


def _document(run: Run, checked: Checked) -> dict[str, object]:
    findings = [one._asdict() | {"severity": one.severity.word, "ranks": list(one.ranks)} for one in checked.findings]
    return {
        "run": str(run.path),
        "rules": checked.num_rules,
        "judged": checked.num_judged,
        "rows": checked.num_rows,
        "steps": checked.steps,
        "findings": findings,
        "not_judged": [one._asdict() for one in checked.unjudged],
        "problems": run.problems,
        "notes": checked.notes,
    }


def _print(run: Run, checked: Checked, typed: str, *, are_reasons_wanted: bool) -> None:
    folded = fold(checked.findings)
    for one in folded[:_MAX_FINDINGS]:
        say_state(one.worst.severity.word, sentence(one))
        say(f"{_INDENT}{one.worst.advice}{_command(typed, one)}")
    if len(folded) > _MAX_FINDINGS:
        say(f"{_INDENT}and {len(folded) - _MAX_FINDINGS} more findings; --json has all")
    reasons = _reasons(checked.unjudged)
    if are_reasons_wanted or len(reasons) == 1:
        for why, names in reasons:
            say(f"not judged: {', '.join(names)}: {why}")
    elif reasons:
        say(f"{_wants(checked)}; --verbose names each")
    for note in checked.notes:
        say(f"note: {note}")
    judged = f"{checked.num_judged} of {counted(checked.num_rules, 'rule')}"
    tally = ", ".join(
        counted(sum(one.worst.severity is severity for one in folded), severity.word) for severity in reversed(Severity)
    )
    rows = f"{counted(checked.num_rows, 'row')} of {steps_in_words(checked.steps)}"
    say(f"{run.name}: {judged} judged {rows}: {tally if folded else 'these rules found nothing in these rows'}")


def fold(findings: Sequence[Finding]) -> list[Folded]:
    """Findings that say one thing of one site as one, in the order of their first."""
    groups: dict[tuple[object, ...], list[Finding]] = {}
    for one in findings:
        groups.setdefault((one.rule, one.severity, one.what, one.site, one.measure), []).append(one)
    folded = []
    for some in (some for group in groups.values() for some in _with_equal_names(group)):
        folded.append(
            Folded(
                worst=some[0],
                paths=list(dict.fromkeys(one.module_path for one in some)),
                names=list(dict.fromkeys(one.name for one in some if one.name)),
                first_step=min(one.first_step for one in some),
                last_step=max(one.first_step for one in some),
                ranks=sorted({rank for one in some for rank in one.ranks}),
            )
        )
    return folded


def _with_equal_names(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Findings apart by the names that their module has, so that each name holds of each module of a sentence."""
    names: dict[str, set[str]] = {}
    for one in findings:
        names.setdefault(one.module_path, set()).add(one.name)
    groups: dict[frozenset[str], list[Finding]] = {}
    for one in findings:
        groups.setdefault(frozenset(names[one.module_path]), []).append(one)
    return list(groups.values())


def sentence(one: Folded) -> str:
    """A finding in one sentence: who, when, where, what, and the number against the threshold."""
    worst = one.worst
    if not worst.site:
        return f"{worst.rule}: {worst.what}"
    paths = [shortened(path, _MAX_PATH) for path in grouped(one.paths)]
    more = f" and {len(paths) - _MAX_MODULES} more" if len(paths) > _MAX_MODULES else ""
    names = f" {shortened(listed(one.names, _MAX_MODULES), _MAX_PATH)}" if one.names else ""
    steps = f"step {one.first_step}" + (f" to {one.last_step}" if one.last_step > one.first_step else "")
    steps = steps if worst.since is None else f"since {steps}"
    against = f"{worst.measure} {number(worst.value)}, threshold {number(worst.threshold)}"
    against += f"; {shortened(worst.detail, _MAX_DETAIL)}" if worst.detail else ""
    where = f"{', '.join(paths[:_MAX_MODULES])}{more} {worst.site}{names}"
    return f"{worst.rule}: {where}, {steps}{_ranks(one.ranks)}: {worst.what} ({against})"


def _ranks(ranks: Sequence[int]) -> str:
    if not ranks:
        return ""
    shown = ",".join(map(str, ranks[:_MAX_RANKS]))
    more = f",... ({len(ranks)})" if len(ranks) > _MAX_RANKS else ""
    return f", rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def _command(typed: str, one: Folded) -> str:
    """What shows the value that a finding names, around its step."""
    worst = one.worst
    if not worst.site:
        return ""
    words = ["recorder", "stats", typed, worst.module_path, "--site", worst.site]
    words += ["--step", f"{max(worst.first_step - 5, 0)}:{worst.step + 2}"] if worst.step >= 0 else []
    words += ["--rank", str(worst.ranks[0])] if len(one.ranks) == 1 else []
    return f": {shlex.join(words)}"


def _wants(checked: Checked) -> str:
    """Return what the rules that were not judged lack, the most frequent first, in one line."""
    counts: Counter[str] = Counter()
    for one in checked.unjudged:
        need = _KEEP.search(one.setting) or _NEED.match(one.why)
        counts[need[1] if need is not None else _OTHER] += 1
    ordered = sorted(counts.items(), key=lambda item: (item[0] == _OTHER, -item[1]))
    wants = ", ".join(f"{want} ({count})" for want, count in ordered[:_MAX_WANTS])
    wants += ", ..." if len(ordered) > _MAX_WANTS else ""
    return f"{len(checked.unjudged)} of {counted(checked.num_rules, 'rule')} not judged, for want of {wants}"


def _reasons(unjudged: Sequence[Unjudged]) -> list[tuple[str, list[str]]]:
    """Rules that lack the same, together."""
    rules_of: dict[str, list[str]] = {}
    for one in unjudged:
        setting = f"; the next time add the rule '{one.setting}'" if one.setting else ""
        rules_of.setdefault(one.why + setting, []).append(one.rule)
    return list(rules_of.items())


def _list(rules: Sequence[type[Rule]], thresholds: Thresholds, *, as_json: bool) -> int:
    rows = [
        [rule.name, one.name, number(thresholds.get(rule.name, {}).get(one.name, one.default)), one.unit, one.source]
        for rule in rules
        for one in rule.settings
    ]
    if as_json:
        names = ("rule", "setting", "threshold", "unit", "source")
        print_json(
            {
                "rules": [
                    {"rule": rule.name, "severity": rule.severity.word, "sentence": rule.sentence} for rule in rules
                ],
                "settings": [dict(zip(names, row, strict=True)) for row in rows],
            }
        )
        return 0
    columns = [TableColumn(title="rule"), TableColumn(title="severity"), TableColumn(title="finds", is_prose=True)]
    print_table(Table(columns, [[rule.name, rule.severity.word, rule.sentence] for rule in rules]))
    say("")
    titles = [TableColumn(title="rule"), TableColumn(title="setting"), TableColumn(title="threshold", is_number=True)]
    titles += [TableColumn(title="unit", is_prose=True), TableColumn(title="source", is_prose=True)]
    print_table(Table(titles, rows))
    return 0
