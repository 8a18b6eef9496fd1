"""Says what went wrong in a training, and why something was not recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...analyze.check.check import check, installed_rules, rules_reply
from ...analyze.check.check import reply_of as reply_of_check
from ...analyze.doctor.reply import checks_of, environment_checks
from ...analyze.doctor.reply import reply_of as reply_of_doctor
from ...analyze.first.first import first
from ...analyze.first.first import reply_of as reply_of_first
from ...checks.book import RULES, read_assignment, read_settings_file
from ...checks.rule import Severity
from ...errors import LookupFailedError
from ...rules import hint
from ...run.finding import find_folder, runs_in, shortest_text_of
from ...run.reply import Reply
from ...run.run import open_run
from .. import options
from ..paths import other_runs

EXAMPLES = {
    "first": ("recorder first recordings", "recorder first @-2 --json"),
    "check": ("recorder check recordings --set spike.sigmas=8", "recorder check --list"),
    "doctor": ("recorder doctor", "recorder doctor recordings --strict"),
}


def first_command(path: options.RunPath = None) -> Reply:
    """Name the first NaN or infinity, and the first unequal replica.

    Buffers that differ between ranks count where DDP does not broadcast them (broadcast_buffers=False) and they
    still differ at the end; elsewhere they are a note.

    Exit code 1: there is a NaN, an infinity or an unequal replica, or damage or an early kill may hide one.
    """
    run = open_run(path)
    return reply_of_first(run, first(run))


_NEVER = "never"
_FAIL_ON = (*(severity.word for severity in Severity), _NEVER)


def check_command(
    path: options.RunPath = None,
    rule: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Run only this rule. Repeatable.")] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="RULE.SETTING=NUMBER", help="A threshold, such as spike.sigmas=8. Repeatable."),
    ] = None,
    settings: Annotated[
        Path | None, options.path_option("FILE", "A TOML file with thresholds and your own rules.")
    ] = None,
    baselines: Annotated[
        list[str] | None,
        typer.Option("--baseline", metavar="SOUND_RUN", help="A sound run of this training. Repeatable."),
    ] = None,
    widths: Annotated[
        list[str] | None,
        typer.Option("--width", metavar="RUN", help="A run at another width, for the rule `width`. Repeatable."),
    ] = None,
    fail_on: Annotated[
        str, typer.Option(metavar="SEVERITY", help=f"Least severity for exit code 1: {', '.join(_FAIL_ON)}.")
    ] = Severity.ERROR.word,
    list_rules: Annotated[bool, typer.Option("--list", help="List the rules and their thresholds.")] = False,
    is_verbose: Annotated[
        bool, typer.Option("--verbose", help="Name each rule that could not judge the run, and what the rule needs.")
    ] = False,
    scheduler: options.SchedulerOption = None,
) -> Reply:
    """Say what is wrong with a training, rule by rule.

    NaN, spikes, dead layers, gradients that vanish, a rank that is odd: the rules read the statistics of all steps and
    ranks, and no tensor. The worst findings come first; what a rule says of many modules is one line. A rule whose
    numbers were not recorded is not judged; with --verbose, or --rule, the command says what each such rule needs.

    Exit code 1: a finding of the severity of --fail-on or worse, or the run is damaged or was killed before its first
    rows were on disk, so that there may be one.
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
        return rules_reply(known, thresholds)
    run = open_run(path)
    given = (("--baseline", baselines or []), ("--width", widths or []))
    sound, widened = (other_runs(*some, {"the run to check": run}) for some in given)
    with options.mapper_for(scheduler) as mapper:
        checked = check(run, rule or [], thresholds, own, sound, widened, mapper=mapper)
    fails_from = None if fail_on == _NEVER else _FAIL_ON.index(fail_on)
    folder = None if path is None else find_folder(path)
    is_run = path is not None and (folder is None or (isinstance(folder, Path) and len(runs_in(folder)) == 1))
    typed = path if path is not None and is_run else shortest_text_of(run.path, run.name)
    return reply_of_check(run, checked, typed, fails_from=fails_from, is_verbose=is_verbose or bool(rule))


def doctor_command(
    path: Annotated[str | None, options.run_argument("RUN", "A run. Without RUN, this environment is checked.")] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with code 1 also if values may be lost; see above.")
    ] = False,
) -> Reply:
    """Say why something was not, or will not be, recorded.

    For a run, it compares what rules and modules promise with what is there, for all ranks and steps, and gives the
    reason for each gap. Without a run, it checks this environment.

    Exit code 1: something is lost or was never recorded (lines that begin with "missing"). With --strict also: a gap
    that nothing recorded explains, values removed for the quota, a rank that ends in another step than the others, a
    writer that is still recording.
    """
    run = None if path is None else open_run(path)
    checks = environment_checks() if run is None else checks_of(run)
    return reply_of_doctor(run, checks, is_strict=strict)
