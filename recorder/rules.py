"""The grammar of rules: patterns of names, schedules of steps, rules made of both, and the matching of names.

The rules of a recording and of a command have one grammar. `doctor` uses this code, too, to find values that should
have been recorded. Patterns are a tuple of texts. A pattern is a glob over the complete name, or ``re:`` and a regular
expression over it. A pattern that equals the name always matches. A leading ``!`` excludes; if all patterns exclude,
everything else is chosen. Nothing here may import torch or pyarrow.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import lru_cache, reduce
from operator import or_
from typing import Any, ClassVar, NamedTuple

from .errors import ConfigError
from .records import (
    KEEP_FINGERPRINT,
    KEEP_HISTOGRAM,
    KEEP_PROBE,
    KEEP_REPLAY,
    KEEP_RING,
    KEEP_STATS,
    KEEP_TENSOR,
    KEEP_TOKENS,
    KEEP_UNITS,
)
from .sites import OF_REPLAY, SITES

KEEPS = {
    "tensor": KEEP_TENSOR,
    "stats": KEEP_STATS,
    "fingerprint": KEEP_FINGERPRINT,
    "histogram": KEEP_STATS | KEEP_HISTOGRAM,
    "units": KEEP_STATS | KEEP_UNITS,
    "probe": KEEP_PROBE,
    "tokens": KEEP_TOKENS,
    "replay": KEEP_TENSOR | KEEP_REPLAY,
    "ring": KEEP_RING,
}
"""For each word of a rule's ``keep``, the bits that it sets in the mask."""
ON = ("1", "true", "yes", "on")
OFF = ("", "0", "false", "no", "off")
SCHEDULES = ("rank", "steps", "micro_step", "call")
"""The keys of a rule whose value is a schedule."""
ANY = ("*",)
"""The patterns that match every name."""
EXPRESSION = "re:"
"""The prefix of a pattern that is a regular expression."""
_WORD_PART = re.compile(r"\\.|\([^)]*\)|\[[^]]*\]|\{[^}]*\}|.", re.DOTALL)
_MAX_COMPARED = 20_000
_MAX_NUMBER_BITS = 53
"""Steps and ranks are below 2 to this power."""
_MAX_RING_STEPS = 100_000
_MAX_LISTED = 3


def parse_patterns(text: str) -> tuple[str, ...]:
    """Split patterns that are separated by commas. ``''`` is the empty name.

    A comma in brackets, as in ``re:h{1,2}``, separates nothing.

    Raises:
        ValueError: the text behind ``re:`` is no regular expression.
    """
    words = [""]
    for part in _WORD_PART.findall(text):
        if part == ",":
            words.append("")
        else:
            words[-1] += part
    return checked(["" if word.strip() == "''" else word.strip() for word in words])


def checked(patterns: Iterable[str]) -> tuple[str, ...]:
    """Return patterns as a tuple, and check the regular expressions among them.

    Raises:
        ValueError: the text behind ``re:`` is no regular expression.
    """
    valid = tuple(patterns)
    for pattern in valid:
        expression = pattern.removeprefix("!")
        if expression.startswith(EXPRESSION):
            try:
                re.compile(expression.removeprefix(EXPRESSION))
            except re.error as error:
                raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
    return valid


def matches_expression(expression: str, name: str) -> bool:
    """Whether a user's regular expression matches a complete name. With some expressions Python takes for ever."""
    return re.fullmatch(expression, name) is not None


Expressions = Callable[[str, str], bool]
"""Returns whether a regular expression matches a name. `matches_expression` is for trusted input."""


def matches(patterns: tuple[str, ...], name: str, expressions: Expressions = matches_expression) -> bool:
    """Whether the patterns choose a name."""
    if patterns == ANY:
        return True
    wanted, unwanted = sides(patterns)
    return any(_matches_one(p, name, expressions) for p in wanted) and not any(
        _matches_one(p, name, expressions) for p in unwanted
    )


def choose(patterns: tuple[str, ...], names: Collection[str]) -> list[str]:
    """Return the names that the patterns choose. A pattern that equals a name chooses only it, brackets included."""
    known_names, (wanted, unwanted) = set(names), sides(patterns)

    def is_hit(pattern: str, name: str) -> bool:
        return name == pattern if pattern in known_names else _matches_one(pattern, name, matches_expression)

    return [
        name
        for name in names
        if any(is_hit(pattern, name) for pattern in wanted) and not any(is_hit(pattern, name) for pattern in unwanted)
    ]


@lru_cache(maxsize=256)
def sides(patterns: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Split patterns into those that include and those that exclude, without their ``!``."""
    return [p for p in patterns if not p.startswith("!")] or list(ANY), [p[1:] for p in patterns if p.startswith("!")]


def _matches_one(pattern: str, name: str, expressions: Expressions) -> bool:
    if pattern.startswith(EXPRESSION):
        return expressions(pattern.removeprefix(EXPRESSION), name)
    return pattern == name or fnmatchcase(name, pattern)


def nearest(text: str, names: Collection[str], cutoff: float = 0.5) -> list[str]:
    """Return up to three names that a user may have meant: with the same end, or else similar ones."""
    ends = [name for name in names if text and name.endswith("." + text.lstrip("."))]
    return ends[:_MAX_LISTED] or difflib.get_close_matches(
        text, list(names)[:_MAX_COMPARED], n=_MAX_LISTED, cutoff=cutoff
    )


def hint(text: str, names: Collection[str], otherwise: str = "") -> str:
    """Return the end of a message that names the nearest names, such as ``; nearest is 'layers.0'``, or `otherwise`."""
    near = nearest(text, names)
    listed = ", ".join(map(repr, near))
    return f"; nearest {'is' if len(near) == 1 else 'are'} {listed}" if near else otherwise


@dataclass(frozen=True, slots=True)
class Schedule:
    """A set of steps or ranks: a union of slices, single numbers and powers of two.

    Whether a number is in the set depends on the number alone, so all ranks agree without communication.
    """

    text: str
    slices: tuple[tuple[int, int | None, int], ...]
    powers_of_two: bool = False

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Read ``0:1000:100``, ``::10``, ``5``, ``pow2`` or a comma list of them.

        Raises:
            ValueError: a word of the list is none of these.
        """
        slices: list[tuple[int, int | None, int]] = []
        powers = False
        for raw in text.split(","):
            word = raw.strip()
            if word == "pow2":
                powers = True
            elif re.fullmatch(r"\d+", word):
                slices.append((int(word), int(word) + 1, 1))
            elif match := re.fullmatch(r"(\d*):(\d*)(?::(\d*))?", word):
                start, stop, stride = match.groups()
                slices.append((int(start or 0), int(stop) if stop else None, int(stride or 1)))
                if slices[-1][2] == 0:
                    raise ValueError(f"{word!r} has a stride of 0")
            else:
                raise ValueError(f"{word!r} is no number, no start:stop:stride and not pow2")
        return cls(text, tuple(slices), powers)

    @classmethod
    def of(cls, slices: Iterable[tuple[int, int | None, int]]) -> Schedule:
        """Make a schedule, and its text, from slices. Without slices it contains no number."""
        made = tuple(slices)
        words = [
            f"{start}:{'' if stop is None else stop}{'' if stride == 1 else f':{stride}'}"
            for start, stop, stride in made
        ]
        return cls(",".join(words), made)

    def within(self, spans: Iterable[tuple[int, int | None]]) -> Schedule:
        """Return the part of the schedule within ranges of first and last number. None as last number means no end."""
        slices = list(self.slices)
        if self.powers_of_two:
            slices += [(n, n + 1, 1) for n in (0, *(1 << bits for bits in range(_MAX_NUMBER_BITS)))]
        unique: dict[tuple[int, int | None, int], None] = {}
        for first, last in spans:
            for start, stop, stride in slices:
                begin = start if start >= first else first + (start - first) % stride
                ends = [end for end in (stop, None if last is None else last + 1) if end is not None]
                end = min(ends, default=None)
                if end is None or begin < end:
                    unique[begin, end, stride] = None
        return Schedule.of(unique)

    def __contains__(self, number: int) -> bool:
        if self.powers_of_two and number >= 0 and number & (number - 1) == 0:
            return True
        for start, stop, stride in self.slices:
            if number >= start and (stop is None or number < stop) and (number - start) % stride == 0:
                return True
        return False


EVERY = Schedule.parse("::1")


class RingWindow(NamedTuple):
    """How many steps before and after a trigger a ring (a buffer in memory) writes, besides the trigger's own."""

    before: int
    after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule: which values, at which steps, and what to keep of them. All rules that match a value apply."""

    module: tuple[str, ...] = ANY
    """Patterns of module paths. ``''`` is the model itself."""
    cls: tuple[str, ...] = ANY
    """Patterns of class names. The key is ``class``."""
    leaf: bool = False
    """True if the rule selects only modules without children."""
    site: tuple[str, ...] = SITES
    name: tuple[str, ...] = ANY
    """Patterns of names of tensors: of arguments, paths in nested outputs, or parameters."""
    rank: Schedule = EVERY
    steps: Schedule = EVERY
    micro_step: Schedule = EVERY
    """The selected micro-steps of a step. Values that belong to a step as a whole are selected by all schedules."""
    call: Schedule = EVERY
    """The selected calls of a module within a micro-step. An evaluation loop has many calls in a step."""
    keep: int = KEEP_STATS
    unit_dim: int | None = None
    """For ``keep=units``, the dim along which units (neurons or channels) lie. None for the usual dim of the class."""
    before: int = 4
    """For ``keep=ring``, the number of steps before a trigger that are written."""
    after: int = 2
    """For ``keep=ring``, the number of steps after a trigger that are written."""
    written: str = field(default="", compare=False, repr=False)
    """The rule as the user wrote it, for messages. Empty for a rule that was no text."""

    KEYS: ClassVar = (
        "module", "class", "leaf", "site", "name", "rank", "steps", "micro_step", "call", "keep", "unit_dim", "before",
        "after"
    )  # fmt: skip

    def matches_module(
        self, module_path: str, class_name: str, is_leaf: bool, expressions: Expressions = matches_expression
    ) -> bool:
        """Whether the rule may select values of a module. `is_leaf`: the module has no children."""
        return (
            (is_leaf or not self.leaf)
            and matches(self.module, module_path, expressions)
            and matches(self.cls, class_name, expressions)
        )

    def matches_name(self, name: str, expressions: Expressions = matches_expression) -> bool:
        return matches(self.name, name, expressions)

    @property
    def text(self) -> str:
        """The rule as a text that `parse_rules` reads."""
        parts: list[str] = []
        for key, values in (("module", self.module), ("class", self.cls)):
            if values != ANY:
                parts.append(f"{key}={shlex.quote(','.join(values))}")
        if self.leaf:
            parts.append("leaf=yes")
        if self.site != SITES:
            parts.append("site=" + ",".join(self.site))
        if self.name != ANY:
            parts.append(f"name={shlex.quote(','.join(self.name))}")
        for key in SCHEDULES:
            if (schedule := getattr(self, key)) != EVERY:
                parts.append(f"{key}={schedule.text}")
        parts.append("keep=" + ",".join(word for word, bits in KEEPS.items() if self.keep & bits == bits))
        if self.unit_dim is not None:
            parts.append(f"unit_dim={self.unit_dim}")
        if self.keep & KEEP_RING:
            parts.append(f"before={self.before} after={self.after}")
        return " ".join(parts)


class _Grammar(NamedTuple):
    """The keys and sites that rules may have."""

    keys: Sequence[str]
    """The keys that a message lists if a key is unknown."""
    sites: Sequence[str]
    """The sites that a message lists if a site is unknown."""
    is_open: bool
    """True if unknown sites are accepted."""


def parse_rules(
    value: object, *, keys: Sequence[str] = Rule.KEYS, sites: Sequence[str] = SITES, takes_unknown_sites: bool = False
) -> tuple[Rule, ...]:
    """Read rules from text (``site=output keep=tensor; site=grad``), a table, or a list of either.

    Args:
        value: the rules.
        keys: the keys that a message lists if a key is unknown.
        sites: the sites that a message lists if a site is unknown.
        takes_unknown_sites: True for the rules of a recording. A later version, with more sites, may have made it.

    Raises:
        ConfigError: a key, a site, a schedule or a pattern is wrong. The message says what is allowed.
    """
    return _rules(value, _Grammar(keys, sites, takes_unknown_sites))


def _rules(value: object, grammar: _Grammar) -> tuple[Rule, ...]:
    if isinstance(value, str):
        return tuple(_rule_from_text(text, grammar) for text in value.split(";") if text.strip())
    if isinstance(value, Rule):
        return (value,)
    if isinstance(value, Mapping):
        return (_rule_from_table(value, grammar),)
    if isinstance(value, Sequence):
        return tuple(rule for item in value for rule in _rules(item, grammar))
    raise ConfigError(f"rules = {value!r}: expected text, a table or a list of them")


def _rule_from_text(text: str, grammar: _Grammar) -> Rule:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"rules: {text.strip()!r} cannot be split into words: {error}") from None
    table: dict[str, object] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            listed = ", ".join(grammar.keys)
            raise ConfigError(f"rules: {word!r} in {text.strip()!r} is not of the form key=value; keys are {listed}")
        if key in table:
            raise ConfigError(f"rules: {key!r} stands twice in {text.strip()!r}; join the values with commas")
        table[key] = value
    return replace(_rule_from_table(table, grammar), written=text.strip())


def _rule_from_table(table: Mapping[str, object], grammar: _Grammar) -> Rule:
    chosen: dict[str, Any] = {}
    for key, value in table.items():
        if key not in Rule.KEYS:
            listed = ", ".join(grammar.keys)
            raise ConfigError(f"rules: unknown key {key!r}{did_you_mean(key, grammar.keys)}; keys are {listed}")
        try:
            chosen["cls" if key == "class" else key] = _value_of(key, value, grammar)
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(f"rules: {key} = {value!r}: {error}") from None
    if chosen.get("keep", 0) & KEEP_REPLAY:
        chosen.setdefault("site", OF_REPLAY)
    for key, why in _contradictions(chosen):
        raise ConfigError(f"rules: {key} = {table[key]!r}: {why}")
    return Rule(**chosen)


def _value_of(key: str, value: object, grammar: _Grammar) -> object:
    """Return the value of a rule's key, in the type of the field of `Rule`.

    Raises:
        ValueError: the value is invalid. The text says why.
    """
    text = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    match key:
        case _ if key in SCHEDULES:
            try:
                return Schedule.parse(text)
            except ValueError as error:
                raise ValueError(f"{error}; examples: 0:1000:100  ::10  0,5,7  pow2") from None
        case "leaf":
            return read_boolean("rules: leaf", value)
        case "unit_dim":
            if not re.fullmatch(r"-?[0-9]{1,2}", text):
                raise ValueError("expected the number of a dim, such as 1, or -1 for the last")
            return int(text)
        case "before" | "after":
            if not re.fullmatch(r"[0-9]{1,6}", text) or int(text) > _MAX_RING_STEPS:
                raise ValueError(f"expected a number of steps, 0 to {_MAX_RING_STEPS}")
            return int(text)
        case "module" | "class" | "name":
            return checked(map(str, value)) if isinstance(value, (list, tuple)) else parse_patterns(text)
        case "site":
            named = _words(value)
            if named == ("*",):
                return SITES
            return named if grammar.is_open else _known(key, named, SITES, grammar.sites)
        case _:
            return reduce(or_, (KEEPS[word] for word in _known(key, _words(value), tuple(KEEPS), tuple(KEEPS))))


def _known(key: str, named: tuple[str, ...], allowed: Sequence[str], offered: Sequence[str]) -> tuple[str, ...]:
    for word in named:
        if word not in allowed:
            raise ValueError(f"unknown {key} {word!r}{did_you_mean(word, offered)}; allowed: {', '.join(offered)}")
    return named


def _contradictions(chosen: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each key that contradicts another key of the rule, and the reason."""
    keep = chosen.get("keep", 0)
    if keep & KEEP_REPLAY and chosen["site"] != OF_REPLAY:
        yield "site", f"keep=replay is for {', '.join(OF_REPLAY)}; leave site out, or write a rule for each"
    if keep & KEEP_TOKENS and not {"input", "output"}.issuperset(chosen["site"]):
        yield "keep", "tokens is for the sites input and output; write a rule for other sites"
    if "unit_dim" in chosen and not keep & KEEP_UNITS:
        yield "unit_dim", "this key needs keep=units, which the rule does not have"
    if keep & KEEP_RING and keep & KEEP_TENSOR:
        yield "keep", "tensor and replay are written at once, ring only on a trigger; choose one of them"
    if not keep & KEEP_RING:
        yield from (
            (key, "it needs keep=ring; add keep=ring, or leave it out") for key in ("before", "after") if key in chosen
        )


def ring_window(rules: Iterable[Rule]) -> RingWindow | None:
    """Return how many steps around a trigger rules with ``keep=ring`` ask for. Return None without such a rule.

    Raises:
        ConfigError: two rules have different windows, but a recording has one ring.
    """
    windows = dict.fromkeys(RingWindow(rule.before, rule.after) for rule in rules if rule.keep & KEEP_RING)
    if len(windows) > 1:
        listed = " and ".join(f"before={one.before} after={one.after}" for one in list(windows)[:_MAX_LISTED])
        raise ConfigError(f"rules: {listed}: all rules with keep=ring share one window; give them the same numbers")
    return next(iter(windows), None)


def _words(value: object) -> tuple[str, ...]:
    if isinstance(value, (list, tuple)):
        return tuple(str(item) for item in value)
    return tuple(word.strip() for word in str(value).split(","))


def read_boolean(name: str, raw: object) -> bool:
    """Read a boolean: yes or no, on or off, true or false, 1 or 0.

    Raises:
        ConfigError: the value is none of these. The message begins with `name`.
    """
    text = str(raw).strip().lower()
    if text in ON:
        return True
    if text in OFF:
        return False
    raise ConfigError(f"{name} = {raw!r}: allowed is yes or no")


def did_you_mean(word: str, choices: Collection[str], otherwise: str = "") -> str:
    """Return the end of a message that names the choice most similar to a word. `otherwise` if none is similar."""
    near = difflib.get_close_matches(word, choices, n=1)
    return f" (did you mean {near[0]!r}?)" if near else otherwise
