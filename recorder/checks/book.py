"""The rules of the recorder, their thresholds, and the rules and thresholds that a user writes in a TOML file."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, ClassVar

import numpy as np

from ..config import Loaded
from ..errors import ConfigError
from ..rules import did_you_mean, matches, parse_patterns
from ..sites import SITES
from .normal import Normal, Sizes
from .rows import RECORDED, Catalog, Flags, Floats, Rows, SeriesKey
from .rule import CheckRule, ComparisonResult, Finding, Setting, Severity, StreakRule
from .rules import (
    activations,
    comparing,
    data,
    evaluation,
    gradients,
    leaps,
    losses,
    no_gradient,
    parameters,
    programs,
    updates,
    validations,
    values,
)  # fmt: skip

RULES: tuple[type[CheckRule], ...] = (
    values.NonFinite, values.Skipped, leaps.Jump, leaps.Spike, losses.LossStuck, validations.Overfitting,
    gradients.Vanishing, gradients.Exploding, no_gradient.NoGradient, parameters.Unchanged, updates.Update,
    programs.NotOptimized, programs.NotCleared, programs.LossArgument, programs.EvaluationMode,
    programs.BatchFirst, evaluation.EvaluationOutput,
    parameters.Initialisation, activations.Dead, activations.Saturated, activations.Attention, gradients.Objectives,
    gradients.Flip, programs.Clipping,
    comparing.OutlierRank, comparing.Replica, comparing.Restart, data.Data, comparing.RunningStatistics,
    activations.DeadUnits, activations.OutlierUnits, activations.LowPrecision, comparing.Width, comparing.Unusual,
    comparing.Invariant,
)  # fmt: skip
"""All rules that come with the recorder. A user may add others."""
ENTRY_POINTS = "recorder.checks"
"""The group of entry points by which an installed package adds rules. Each entry point names one `CheckRule`."""
_MOST = 1_000_000
"""The most records, steps and the like that a threshold may ask for."""
_OWN = "rule"
"""The key of the TOML tables that define a user's own rules."""
_OWN_KEYS = ("name", "site", "module", "statistic", "above", "below", "records", "severity")
_MAX_BYTES = 1 << 20
"""The most bytes of a settings file. People write smaller files."""

Thresholds = dict[str, dict[str, float]]
"""Maps a rule's name and a setting's name to the number that replaces the setting's default."""


class OwnThreshold(StreakRule):
    """The base of rules that a user writes as a TOML table. Such a rule is an upper or a lower limit of a statistic."""

    advice = "it is your own rule"
    modules: ClassVar[tuple[str, ...]] = ("*",)
    statistic: ClassVar[str]
    limit = "limit"
    sign: ClassVar[float]
    """1 for an upper limit, -1 for a lower limit."""

    def wants(self, key: SeriesKey) -> bool:
        return key.site in self.sites and matches(self.modules, key.module_path)

    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        values = rows[self.statistic]
        return np.nan_to_num(values * self.sign, nan=-math.inf) > self.thresholds["limit"] * self.sign, values


class _Unmade(CheckRule):
    """Stands for a rule whose constructor raised an error, and raises this error at the end of the run."""

    sentence = "It could not be made."
    sites, columns = (), ()
    advice = "mend the rule"
    error: Exception

    def add(self, rows: Rows) -> Iterable[Finding]:
        return ()

    def finish(self) -> Iterable[Finding]:
        raise self.error


def read_assignment(text: str, rules: Iterable[type[CheckRule]]) -> tuple[str, str, float]:
    """Parse a threshold as a person types it: ``spike.sigmas=8``.

    Raises:
        ConfigError: the text is no assignment, or there is no such rule or setting; the message names the nearest one.
    """
    name, equals, value = text.partition("=")
    rule, dot, setting = name.strip().partition(".")
    if not equals or not dot:
        raise ConfigError(f"--set {text}: expected RULE.SETTING=NUMBER, such as spike.sigmas=8")
    return rule, setting, _number(f"--set {text}", find_rule(rule, rules), setting, value)


def read_table(table: Mapping[str, Any], where: str) -> tuple[Thresholds, list[type[CheckRule]]]:
    """Parse the thresholds and the user's own rules in a table of a TOML file.

    Raises:
        ConfigError: a rule, a setting, a key or a value is wrong; the message names the nearest valid name.
    """
    own: list[type[CheckRule]] = []
    for one in _tables(table.get(_OWN, []), where):
        own.append(_own_rule(one, where, {rule.name for rule in (*RULES, *own)}))
    rules = [*RULES, *own]
    thresholds: Thresholds = {}
    for name, settings in table.items():
        if name == _OWN:
            continue
        if not isinstance(settings, Mapping):
            raise ConfigError(f"{where}: {name} = {settings!r}: expected a table, such as [spike]")
        rule = find_rule(name, rules, f"{where}: ")
        thresholds[name] = {
            key: _number(f"{where}: [{name}] {key}", rule, key, value) for key, value in settings.items()
        }
    return thresholds, own


def find_rule(name: str, rules: Iterable[type[CheckRule]], where: str = "") -> type[CheckRule]:
    """Return the rule with this name.

    Raises:
        ConfigError: there is no rule with this name; the message names the nearest rule.
    """
    known = {rule.name: rule for rule in rules}
    if name not in known:
        raise ConfigError(f"{where}no rule {name!r}{did_you_mean(name, list(known))}; rules are {', '.join(known)}")
    return known[name]


def make_rules(
    rules: Iterable[type[CheckRule]], catalog: Catalog, thresholds: Thresholds, normal: Normal | None = None,
    other_widths: Sequence[Sizes] = (), compared: Mapping[str, ComparisonResult] | None = None,
) -> list[CheckRule]:  # fmt: skip
    """Construct rules. Give them the facts about sound runs, and about runs at other widths.

    `compared` has, by name of a rule, what the caller found by comparing values of a whole run.

    A rule that cannot be constructed is replaced by a rule that reports the error.
    """
    made: list[CheckRule] = []
    for rule in rules:
        try:
            one = rule(catalog, thresholds.get(rule.name))
            one.normal, one.other_widths = normal, other_widths
            one.compared = (compared or {}).get(rule.name)
            if not hasattr(one, "why_not_judged"):
                raise TypeError("its __init__ does not call that of CheckRule")
        except Exception as error:  # a user's rule may raise anything, and the other rules must still run
            unmade: type[_Unmade] = type(rule.name, (_Unmade,), {"name": rule.name})
            one = unmade(catalog)
            one.error = error
        made.append(one)
    return made


def _number(where: str, rule: type[CheckRule], setting: str, value: object) -> float:
    names = [one.name for one in rule.settings]
    if setting not in names:
        near = did_you_mean(setting, names)
        raise ConfigError(f"{where}: {rule.name} has no setting {setting!r}{near}; it has {', '.join(names)}")
    number = _finite(value)
    if number is None:
        raise ConfigError(f"{where}: {value!r} is no number")
    is_count = next(one for one in rule.settings if one.name == setting).is_count
    may_be_negative = issubclass(rule, OwnThreshold) and not is_count
    if (number < is_count and not may_be_negative) or (is_count and number > _MOST):
        raise ConfigError(f"{where}: {value!r}: expected a number of {f'1 to {_MOST:,}' if is_count else '0 or more'}")
    return number


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _one_of(choices: Sequence[str], where: str, key: str, value: object) -> str:
    if value not in choices:
        near = did_you_mean(str(value), choices)
        raise ConfigError(f"{where}: {key} = {value!r}{near}: expected one of {', '.join(choices)}")
    return str(value)


def _tables(value: object, where: str) -> Sequence[Mapping[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(one, Mapping) for one in value):
        raise ConfigError(f"{where}: {_OWN} = {value!r}: expected tables, each headed [[{_OWN}]]")
    return value


def _own_rule(table: Mapping[str, Any], where: str, taken: Collection[str]) -> type[CheckRule]:
    for key in table:
        if key not in _OWN_KEYS:
            near = did_you_mean(key, _OWN_KEYS)
            raise ConfigError(f"{where}: [[{_OWN}]] has no key {key!r}{near}; keys are {', '.join(_OWN_KEYS)}")
    name = table.get("name")
    if not isinstance(name, str) or not name.isidentifier() or name in taken:
        raise ConfigError(f"{where}: [[{_OWN}]] name = {name!r}: expected a word that is no rule's name yet")
    where_rule = f"{where}: rule {name}"
    statistic = _one_of((*RECORDED, "numel"), where_rule, "statistic", table.get("statistic"))
    site = _one_of(SITES, where_rule, "site", table.get("site"))
    limits = [key for key in ("above", "below") if key in table]
    limit = _finite(table[limits[0]]) if len(limits) == 1 and not isinstance(table[limits[0]], str) else None
    if limit is None:
        raise ConfigError(f"{where_rule}: expected one number, above or below")
    severities = {one.word: one for one in Severity}
    severity = _one_of(list(severities), where_rule, "severity", table.get("severity", Severity.WARNING.word))
    records = table.get("records", 1)
    if not isinstance(records, int) or _finite(records) is None or records < 1:
        raise ConfigError(f"{where_rule}: records = {records!r}: expected a whole number from 1 on")
    try:
        modules = parse_patterns(str(table.get("module", "*")))
    except ValueError as error:
        raise ConfigError(f"{where_rule}: module: {error}") from None
    sentence = f"{statistic} of {site} is {limits[0]} {limit:g}, {records} records in a row."
    members = {
        "name": name, "sentence": sentence, "severity": severities[severity], "sites": (site,), "columns": (statistic,),
        "settings": (Setting("limit", limit, statistic, where), Setting("records", records, "records", where)),
        "what": f"{statistic} is {limits[0]} the limit", "measure": statistic,
        "modules": modules, "statistic": statistic, "sign": 1.0 if limits[0] == "above" else -1.0,
    }  # fmt: skip
    return type(name, (OwnThreshold,), {"__doc__": sentence, **members})


def read_settings_file(path: str | PathLike[str]) -> tuple[Thresholds, list[type[CheckRule]]]:
    """Return the thresholds and the user's own rules in a file.

    Raises:
        ConfigError: the file cannot be read, is no TOML, or has an unknown name; the message names the nearest one.
    """
    try:
        with open(path, "rb") as file:
            text = file.read(_MAX_BYTES + 1)
        table = tomllib.loads(text.decode()) if len(text) <= _MAX_BYTES else None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deeply") from None
    except ValueError as error:  # an error of TOML, of UTF-8, or of an integer with thousands of digits
        raise ConfigError(f"{path}: is no TOML: {error}") from None
    if table is None:
        raise ConfigError(f"{path}: is larger than {_MAX_BYTES} bytes; expected thresholds and rules in TOML")
    return read_table(table, str(path))


def check_settings(loaded: Loaded) -> tuple[Thresholds, list[type[CheckRule]]]:
    """Return the thresholds and rules in the file that the setting `check_settings` names; empty without a name.

    Raises:
        ConfigError: the file cannot be read, or something in it is wrong.
    """
    if not loaded.settings.check_settings:
        return {}, []
    try:
        return read_settings_file(loaded.settings.check_settings)
    except ConfigError as error:
        raise ConfigError(f"check_settings ({loaded.sources['check_settings']}): {error}") from None
