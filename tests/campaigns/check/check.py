"""What `check` says of trainings with a fault, and of sound ones: `python -m tests.campaigns check` prints the table.

Of each fault the right rule has to name the right module, alone or beside two sound trainings of its kind. Of a sound
training nothing may be said above a note, neither alone nor beside two others of its kind, and the rules that read
units and histograms have to judge it. `--seed 70` asks the same of other trainings. `--flag-alone` records by the
default rules, and asks without sound trainings: which faults are named, which of these the training itself told as it
ended, and which sound trainings raise an alarm, at their end or in `check`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path

import recorder
from recorder.analyze.check.check import Checked, check
from recorder.checks.rule import Severity
from recorder.format.rundir import STATUS
from tests.rigs import jobs

from .programs.cases import ANY, BASE, EXPECTED, FAULTS, FLAG_ALONE, SOUND, Named

SCRIPT = Path(__file__).parent / "programs" / "train.py"
NUM_TWINS = 2
"""Sound trainings beside which another is judged."""
JUDGED = ("dead_units", "outlier_units", "low_precision")
"""Rules that judge each sound training, because it records what they need."""
_LEAST_SAMPLES = 32
"""Of fewer a unit has too few values for `dead_units`."""
_AT_ONCE = 20
"""Trainings that are forked from one process: its start costs more than most of them."""


def record(folder: Path, names: list[str]) -> None:
    new = [name for name in dict.fromkeys(names) if not (folder / name).exists()]
    for start in range(0, len(new), _AT_ONCE):
        jobs.record_trainings(SCRIPT, folder, new[start : start + _AT_ONCE])


def judged(folder: Path, name: str, baselines: list[str]) -> Checked:
    """The findings of `check` on a training, with sound trainings as baselines where there are any."""
    run, *others = (recorder.open_run(folder / one / "recordings") for one in (name, *baselines))
    return check(run, baselines=others)


def loud(checked: Checked) -> list[str]:
    """The rules with a finding that is worse than a note."""
    return sorted({one.rule for one in checked.findings if one.severity > Severity.NOTE})


def is_named(checked: Checked, wanted: Named) -> bool:
    """Whether a fault is named by its rule, above a note, at its module and rank."""
    return any(
        (one.rule, one.severity > Severity.NOTE) == (wanted.rule, True)
        and wanted.module in (ANY, one.module_path)
        and set(wanted.ranks) <= set(one.ranks)
        for one in checked.findings
    )


def told_at_end(folder: Path) -> set[str]:
    """The rules of which a training told a finding, on any rank, in the last status that it wrote."""
    statuses = [json.loads(path.read_bytes()) for path in folder.glob(f"recordings/*/rank=*/*/{STATUS}")]
    told = {one["rule"] for status in statuses for one in status["findings"]}
    # The last line compares what rank 0 and the other ranks wrote of models that must be equal.
    apart = len({json.dumps(status.get("replicas")) for status in statuses}) > 1
    return told | {"replica"} if apart else told


def twins(name: str, seed: int = 0) -> list[str]:
    """The sound trainings that are the baselines of one of this seed."""
    return [f"{BASE.get(name, name)}@{seed + number}" for number in range(1, NUM_TWINS + 1)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", help="trainings; by default all")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="record here, and use what is there already")
    parser.add_argument("--seed", type=int, default=0, help="other trainings of the same kinds (default 0)")
    parser.add_argument("--flag-alone", action="store_true", help="record by the default rules")


def main(arguments: argparse.Namespace) -> int:
    names: list[str] = arguments.names or [*SOUND, *FAULTS]
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.keep or Path(scratch)
        if arguments.flag_alone:
            return _with_flag_alone(folder, names, arguments.seed)
        record(folder, [one for name in names for one in (f"{name}@{arguments.seed}", *twins(name, arguments.seed))])
        num_bad = sum(not _line(folder, name, arguments.seed) for name in names)
    print(f"{len(names) - num_bad} of {len(names)} as they have to be")
    return int(num_bad > 0)


def _with_flag_alone(folder: Path, names: list[str], seed: int) -> int:
    """Print what is said of trainings that the default rules recorded; the exit code is 1 after a false alarm."""
    record(folder, [f"{FLAG_ALONE}{name}@{seed}" for name in names])
    counts: Counter[str] = Counter()
    for name in names:
        training = f"{FLAG_ALONE}{name}@{seed}"
        checked, at_end = judged(folder, training, []), told_at_end(folder / training)
        said = [
            f"{one.rule} {one.module_path or repr('')}"
            for one in checked.findings
            if one.severity > Severity.NOTE and not one.cause
        ]
        if name in SOUND:
            verdict = "FALSE ALARM" if said or at_end else "quiet"
        else:
            wanted = EXPECTED[name]
            if wanted.by_default:
                rule, module = (*wanted.by_default, wanted.module)[:2]
                wanted = wanted._replace(rule=rule, module=module)
            is_noted = any((one.rule, one.severity) == (wanted.noted_by, Severity.NOTE) for one in checked.findings)
            otherwise = "named otherwise" if said else "noted" if is_noted else "not named"
            verdict = "named" if is_named(checked, wanted) else otherwise
        counts[verdict] += 1
        causes = {one.split()[0] for one in said}
        counts["named as the training ended"] += verdict == "named" and bool(causes & at_end)
        more = "" if at_end == causes else f"; at its end: {', '.join(sorted(at_end)) or '-'}"
        print(f"{verdict:16} {name:24} {', '.join(dict.fromkeys(said)) or '-'}{more}"[:200], flush=True)
    print(", ".join(f"{num} {verdict}" for verdict, num in counts.items()))
    return int(counts["FALSE ALARM"] > 0)


def _line(folder: Path, name: str, seed: int) -> bool:
    """Print the findings on a training, and return whether they are the expected ones."""
    one, others = f"{name}@{seed}", twins(name, seed)
    alone, beside = judged(folder, one, []), judged(folder, one, others)
    if name in SOUND:
        due = JUDGED if SOUND[name].samples >= _LEAST_SAMPLES else JUDGED[1:]
        unjudged = {one.rule for one in alone.unjudged}.intersection(due)
        is_right = not loud(alone) and not loud(beside) and not unjudged
        what = "quiet" if is_right else f"NOT JUDGED: {', '.join(sorted(unjudged))}" if unjudged else "FALSE ALARM"
        what += f", {alone.num_judged} rules alone and {beside.num_judged} beside sound runs"
    else:
        wanted = EXPECTED[name]
        is_right = is_named(beside if wanted.needs_baseline else alone, wanted)
        module = "any module" if wanted.module == ANY else repr(wanted.module)
        beside_words = " beside sound runs" if wanted.needs_baseline else ""
        what = f"{'found' if is_right else 'MISSED'}: {wanted.rule} at {module}{beside_words}"
    kind = "sound" if name in SOUND else "fault"
    more = sorted(set(loud(beside)) - set(loud(alone)))
    print(f"{kind}  {name:20} {what:60} said: {', '.join(loud(alone)) or '-'}", end="")
    print(f"; beside sound runs also {', '.join(more)}" if more else "", flush=True)
    return is_right
