"""The question what is wrong with a training. Never prints; `recorder.cli.commands.check` does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import NamedTuple

from ...checks.book import ENTRY_POINTS, RULES, find_rule, make_rules
from ...checks.engine import Engine, Unjudged
from ...checks.rule import Finding, Rule
from ...globalview.run import Run
from .reading import RunRows


class Checked(NamedTuple):
    """What the rules say of a run."""

    findings: list[Finding]
    """The worst first, then by step."""
    unjudged: list[Unjudged]
    """Rules that could not judge the run, and what they lack."""
    num_rules: int
    """Rules that were asked."""
    num_rows: int
    """Rows that were judged."""
    notes: list[str]
    """What was left out."""

    @property
    def num_judged(self) -> int:
        """Rules that judged the run."""
        return self.num_rules - len(self.unjudged)


def check(
    run: Run,
    rules: Sequence[str] = (),
    thresholds: Mapping[str, Mapping[str, float]] | None = None,
    own: Sequence[type[Rule]] = (),
) -> Checked:
    """What is wrong with a training, by the statistics of its values.

    Args:
        run: what was recorded of it.
        rules: names of those that are asked; by default all.
        thresholds: by rule and setting, in place of the defaults.
        own: rules beside those of the recorder and of entry points.

    Raises:
        ConfigError: there is no rule of a name; the message names the nearest.
    """
    installed, notes = installed_rules()
    known = [*RULES, *installed, *own]
    chosen = [find_rule(name, known) for name in dict.fromkeys(rules)] or known
    rows = RunRows(run, [name for rule in chosen for name in rule.columns])
    settings = {name: dict(of) for name, of in (thresholds or {}).items()}
    engine = Engine(make_rules(chosen, rows.catalog, settings), rows.catalog)
    for some in rows:
        engine.add(some)
    verdict = engine.finish()
    notes += [
        f"{num} more findings of {name} were counted and are not listed" for name, num in verdict.num_more.items()
    ]
    if rows.num_superseded:
        notes.append(f"{rows.num_superseded} rows of steps that a restart did again were left out")
    if run.problems:
        lost = f" ({num_lost} rows)" if (num_lost := _num_lost(run)) else ""
        notes.append(f"the run is damaged, and what cannot be read{lost} was left out; recorder verify says where")
    return Checked(verdict.findings, verdict.unjudged, len(chosen), rows.num_rows, notes)


def _num_lost(run: Run) -> int:
    """Rows that were written, are not retired, and cannot be read."""
    balances = [(writer.balance.written - writer.balance.retired_rows, writer.num_rows) for writer in run.writers]
    return sum(max(written - there, 0) for written, there in balances)


def installed_rules() -> tuple[list[type[Rule]], list[str]]:
    """Rules that installed packages add, and why some of them are left out."""
    found: list[type[Rule]] = []
    notes = []
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name):
        try:
            found.append(_load(point, [rule.name for rule in (*RULES, *found)]))
        except Exception as error:  # a package of somebody else's may raise anything
            notes.append(f"the entry point {point.name} = {point.value} was left out: {type(error).__name__}: {error}")
    return found, notes


def _load(point: EntryPoint, names: Sequence[str]) -> type[Rule]:
    rule = point.load()
    if not (isinstance(rule, type) and issubclass(rule, Rule)):
        raise TypeError("it is no subclass of recorder.checks.rule.Rule")
    if rule.name in names:
        raise ValueError(f"there is a rule {rule.name!r} already")
    return rule
