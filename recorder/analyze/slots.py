"""Owns what manifests promise: a slot for each module's value at a site, and the rules that select it.

Never looks at rows, and never raises over a stranger's JSON or rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ..config import Rule, parse_rules
from ..errors import ConfigError
from ..patterns import ANY, EXPRESSION, matches_glob, sides
from ..read import untrusted

Flags = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]

FORWARD = ("input", "output", "grad_input", "grad_output")
STATE = ("param", "grad", "optim", "buffer")
SLOT_SITES = (*FORWARD, *STATE)
"""Sites at which a module tree says what should exist; what is tapped, and scalars, are up to the program."""
NEVER = 1 << 62
"""A step after all others."""
_MAX_DEPTH = 200
"""Levels of a module tree; a path of more is nobody's, and looking for what is above it would take for ever."""
HIDDEN = ("fused", "inlined", "tapped", "dtensor", "scripted", "compiled", "late")
"""Why hooks see no call of a module, as its manifest says; keys of `holes.REASONS`. The last three hold below it."""
_HOLDS_BELOW = HIDDEN.index("scripted") + 1
_EACH_PARAM = 3
"""Slots of a parameter: itself, its gradient, its optimizer state, one after the other."""

_MAX_RULES = 1000
"""Of one writer. Each is judged for every module and step, whoever wrote them."""


class Module(NamedTuple):
    """A module of one root, as all writers together describe it."""

    root: str
    path: str
    class_name: str
    params: list[str]
    buffers: list[str]
    aliases: list[str]


class Told(NamedTuple):
    """What one writer's manifest says of the slots."""

    selected: Flags
    """Of each slot: a rule selects its site, on the writer's rank."""
    hidden: Integers
    """Of each module, why hooks see no call of it: 0, or 1 + the place in `HIDDEN`."""
    disarmed: Integers
    """Of each slot, the step from which on its hooks were disarmed, as they kept failing; `NEVER` elsewhere."""
    untapped: Flags
    """Of each slot: graphs alone show its module, and at other sites than this."""
    tied: dict[int, str]
    """Of slots of a parameter that has another name, under which it is recorded, that name."""


class Slots:
    """Every value that could exist once a step: modules in the order of the tree, and the slots of each together."""

    def __init__(self, manifests: Iterable[dict[str, Any]]) -> None:
        trees: list[Any] = []
        numbers = []
        for manifest in manifests:
            tree = manifest.get("roots")
            number = next((n for n, known in enumerate(trees) if known == tree), len(trees))
            if number == len(trees):
                trees.append(tree)
            numbers.append(number)
        described = [list(_described(tree)) for tree in trees]
        self.modules = _join(described)
        self.place = {(module.root, module.path): number for number, module in enumerate(self.modules)}
        """Number of a module by root and path."""
        self.roots = list(dict.fromkeys(module.root for module in self.modules))
        root_number = {root: number for number, root in enumerate(self.roots)}
        self.root_of = np.array([root_number[module.root] for module in self.modules], np.int64)
        self.parent_of = self._parents()
        """Of each module the one above it, -1 for a root."""
        self._lay_out()
        told = [self._told(modules) for modules in described]
        self.told = [told[number] for number in numbers]
        """Of each manifest, as they were given."""

    @property
    def num_slots(self) -> int:
        return len(self.module)

    def _parents(self) -> Integers:
        found = np.full(len(self.modules), -1, np.int64)
        for number, module in enumerate(self.modules):
            path = module.path
            while path and path.count(".") < _MAX_DEPTH:
                path = path.rpartition(".")[0]
                if (above := self.place.get((module.root, path))) is not None:
                    found[number] = above
                    break
        return found

    def _lay_out(self) -> None:
        names: dict[str, int] = {"": 0}
        module: list[int] = []
        site: list[int] = []
        name: list[int] = []
        first: list[int] = []
        for number, one in enumerate(self.modules):
            first.append(len(module))
            kinds = [(SLOT_SITES.index(kind), 0) for kind in FORWARD]
            for param in one.params:
                code = names.setdefault(param, len(names))
                kinds += [(SLOT_SITES.index(kind), code) for kind in STATE[:_EACH_PARAM]]
            kinds += [(SLOT_SITES.index("buffer"), names.setdefault(buffer, len(names))) for buffer in one.buffers]
            module += [number] * len(kinds)
            site += [kind for kind, _ in kinds]
            name += [code for _, code in kinds]
        self.module = np.array(module, np.int64)
        """Of each slot, its module."""
        self.site = np.array(site, np.int64)
        """Of each slot, its site in `SLOT_SITES`."""
        self.name = np.array(name, np.int64)
        self.names = list(names)
        self.first = np.array([*first, len(module)], np.int64)
        """Of each module its first slot, and the end."""
        self._name_codes = names
        self._named = np.flatnonzero(self.site >= len(FORWARD))
        keys = self._key(self.module[self._named], self.site[self._named], self.name[self._named])
        order = np.argsort(keys)
        self._named, self._named_keys = self._named[order], keys[order]

    def _key(self, module: Integers, site: Integers, name: Integers) -> Integers:
        return (module * len(SLOT_SITES) + site) * len(self.names) + name

    def of_rows(self, module: Integers, site: Integers, name: Integers) -> Integers:
        """The slot of each row, -1 for none.

        Args:
            module: its number, -1 where it is in no tree.
            site: its place in `SLOT_SITES`, -1 for another.
            name: of a parameter or buffer by `name_code`, -1 for one that no module has.
        """
        found = np.full(len(module), -1, np.int64)
        known = (module >= 0) & (site >= 0)
        forward = known & (site < len(FORWARD))
        found[forward] = self.first[module[forward]] + site[forward]
        named = np.flatnonzero(known & (site >= len(FORWARD)) & (name >= 0))
        if len(named) and len(self._named):
            keys = self._key(module[named], site[named], name[named])
            at = np.minimum(np.searchsorted(self._named_keys, keys), len(self._named) - 1)
            found[named] = np.where(self._named_keys[at] == keys, self._named[at], -1)
        return found

    def name_code(self, name: str) -> int:
        """The number of a parameter's or buffer's name; of optimizer state (``weight.exp_avg``) the parameter's."""
        code = self._name_codes.get(name)
        return self._name_codes.get(name.partition(".")[0], -1) if code is None else code

    def _told(self, modules: list[dict[str, Any]]) -> Told:
        selected = np.zeros((len(self.modules), len(SLOT_SITES)), bool)
        hidden = np.zeros(len(self.modules), np.int64)
        untapped = np.zeros((len(self.modules), len(SLOT_SITES)), bool)
        tapped: list[int] = []
        of_dtensors: list[int] = []
        disarmed = np.full((len(self.modules), len(SLOT_SITES)), NEVER, np.int64)
        for module in modules:
            number = self.place[module["root"], module["path"]]
            for site, step in module["disarmed"].items():
                disarmed[number, SLOT_SITES.index(site)] = step
            selected[number] = [site in module["sites"] for site in SLOT_SITES]
            if module["tapped"]:
                shown = {*module["tapped"], *(f"grad_{site}" for site in module["tapped"])}
                untapped[number] = [site in FORWARD and site not in shown for site in SLOT_SITES]
            hidden[number] = module["hidden"]
            if module["tapped"]:
                (of_dtensors if module["dtensor"] else tapped).append(number)
        above = np.maximum(self.parent_of, 0)
        while len(inside := np.flatnonzero((self.parent_of >= 0) & _is_taken(hidden, hidden[above]))):
            hidden[inside] = hidden[above[inside]]  # a graph holds all that its module calls
        hidden[tapped] = HIDDEN.index("tapped") + 1
        hidden[of_dtensors] = HIDDEN.index("dtensor") + 1
        if not self.modules:
            return Told(np.zeros(0, bool), hidden, np.zeros(0, np.int64), np.zeros(0, bool), {})
        of_slots = self.module, self.site
        return Told(selected[of_slots], hidden, disarmed[of_slots], untapped[of_slots], self._tied(modules))

    def _tied(self, modules: list[dict[str, Any]]) -> dict[int, str]:
        found: dict[int, str] = {}
        for module in modules:
            number = self.place[module["root"], module["path"]]
            for name, first in module["tied"].items():
                of_module = range(self.first[number], self.first[number + 1])
                code, states = self._name_codes.get(name), range(len(FORWARD), len(FORWARD) + _EACH_PARAM)
                found |= {slot: first for slot in of_module if self.name[slot] == code and self.site[slot] in states}
        return found


def _is_taken(own: Integers, above: Integers) -> Flags:
    """Whether what hides the module above hides this one too."""
    taken: Flags = (above >= _HOLDS_BELOW) & (own < above)
    return taken


def _hidden(module: dict[str, Any]) -> int:
    key = module.get("hidden")
    if isinstance(key, str) and key in HIDDEN:
        return HIDDEN.index(key) + 1
    return HIDDEN.index("compiled") + 1 if module.get("compiled") is True else 0


def _described(tree: Any) -> Iterable[dict[str, Any]]:
    """The modules of a manifest's roots, each with every member there and of its type."""
    for root in untrusted.objects(tree):
        for module in untrusted.objects(root.get("modules")):
            yield {
                "root": untrusted.text(root.get("name")),
                "path": untrusted.text(module.get("path")),
                "class": untrusted.text(module.get("class")),
                "params": untrusted.texts(module.get("params")),
                "buffers": untrusted.texts(module.get("buffers")),
                "aliases": untrusted.texts(module.get("aliases")),
                "sites": untrusted.texts(module.get("sites")),
                "hidden": _hidden(module),
                "tapped": untrusted.texts(module.get("tapped")),
                "dtensor": module.get("dtensor") is True and isinstance(root.get("model_parallel"), dict),
                "disarmed": _steps(module.get("disarmed")),
                "tied": _names(module.get("tied")),
            }


def _steps(disarmed: Any) -> dict[str, int]:
    if not isinstance(disarmed, dict):
        return {}
    return {site: step for site, step in disarmed.items() if site in SLOT_SITES and type(step) is int and step < NEVER}


def _names(tied: Any) -> dict[str, str]:
    return {name: first for name, first in tied.items() if isinstance(first, str)} if isinstance(tied, dict) else {}


def _join(described: Sequence[Sequence[dict[str, Any]]]) -> list[Module]:
    found: dict[tuple[str, str], Module] = {}
    for modules in described:
        for one in modules:
            key = one["root"], one["path"]
            known = found.get(key)
            if known is None:
                found[key] = Module(*key, one["class"], *(list(dict.fromkeys(one[kind])) for kind in _LISTS))
                continue
            for kept, kind in zip((known.params, known.buffers, known.aliases), _LISTS, strict=True):
                kept += [name for name in one[kind] if name not in kept]
    return list(found.values())


_LISTS = ("params", "buffers", "aliases")


class RuleMatch(NamedTuple):
    """One rule, and the slots that it can select on any rank."""

    rule: Rule
    slots: Flags
    is_limited: Flags
    """Slots of which the rule wants only some names or calls: whether there are such, rows alone can tell."""


def read_rules(manifest: dict[str, Any]) -> tuple[list[Rule], list[str]]:
    """The rules of a manifest, and what is wrong with those that cannot be read."""
    rules: list[Rule] = []
    problems: list[str] = []
    texts = untrusted.texts(manifest.get("rules"))
    if len(texts) > _MAX_RULES:
        problems.append(f"there are {len(texts)} rules; those behind the first {_MAX_RULES} are not judged")
    for text in texts[:_MAX_RULES]:
        try:
            rules += parse_rules(text)
        except (ConfigError, RecursionError) as error:
            problems.append(f"rule {text!r} cannot be read, so nothing is expected by it: {error}")
    return rules, problems


def match_rule(slots: Slots, rule: Rule) -> RuleMatch | None:
    """The slots of one rule; None where it has a regular expression that cannot be judged in bounded time."""
    paths = [module.path for module in slots.modules]
    by_path = _matches(rule.module, paths)
    by_class = _matches(rule.cls, [module.class_name for module in slots.modules])
    by_name = _matches(rule.name, slots.names)
    if by_path is None or by_class is None or by_name is None:
        return None
    modules = by_path & by_class
    if rule.leaf:
        has_children = np.zeros(len(modules), bool)
        has_children[slots.parent_of[slots.parent_of >= 0]] = True
        for module in slots.modules:
            for alias in module.aliases:
                above = slots.place.get((module.root, alias.rpartition(".")[0]))
                if above is not None and alias:
                    has_children[above] = True
        modules &= ~has_children
    sites = np.array([site in rule.site for site in SLOT_SITES])
    own_name = (slots.site >= len(FORWARD)) & (slots.site != SLOT_SITES.index("optim"))
    chosen = modules[slots.module] & sites[slots.site] & (by_name[slots.name] | ~own_name)
    limited = np.full(slots.num_slots, 0 not in rule.call) | (rule.name != ("*",)) & ~own_name
    return RuleMatch(rule, chosen, chosen & limited)


def _matches(patterns: tuple[str, ...], texts: list[str]) -> Flags | None:
    """`patterns.matches` for many texts; regular expressions of a stranger by RE2, which never hangs."""
    if patterns == ANY or not texts:
        return np.ones(len(texts), bool)
    found = [np.zeros(len(texts), bool), np.zeros(len(texts), bool)]
    for which, group in enumerate(sides(patterns)):
        for pattern in group:
            if pattern.startswith(EXPRESSION):
                expression = pattern.removeprefix(EXPRESSION)
                try:
                    hits = pc.match_substring_regex(pa.array(texts), pattern=f"^(?:{expression})$").to_numpy(False)
                except (pa.ArrowInvalid, re.error):
                    return None
            else:
                hits = np.array([matches_glob(pattern, text) for text in texts])
            found[which] |= hits.astype(bool)
    return found[0] & ~found[1]


def distinct(numbers: Integers) -> Integers:
    """Sorted, each once. By sorting: numpy's own looks integers up in a hash table, at a fifth of the speed."""
    found = np.sort(numbers)
    return found[np.insert(np.diff(found) > 0, 0, True)] if len(found) else found
