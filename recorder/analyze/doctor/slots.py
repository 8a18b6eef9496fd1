"""Lists the values that may exist at a step, from the manifests of a run, and the values that rules select.

A slot is a site of a module, a parameter or a buffer. This module must never read rows. It must never raise an error
because of untrusted JSON or rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ...errors import ConfigError
from ...numerics.keys import Integers
from ...records import KEEP_PROBE, KEEP_TOKENS
from ...rules import ANY, Rule, parse_rules
from ...run.run import RecordedModule, RecordedRoot, WriterManifest
from ...sites import GRADIENT_OF, OF_BUFFERS, OF_CALLS, OF_PARAMETERS, SITE_OF

Flags = npt.NDArray[np.bool_]

SLOT_SITES = (*OF_CALLS, *OF_PARAMETERS, *OF_BUFFERS)
"""The sites whose values follow from the module tree. Values at taps (points in graphs) and scalars do not."""
_OF_OPTIMIZERS = [number for number, site in enumerate(SLOT_SITES) if SITE_OF[site].is_of_optimizer]
"""The indices in `SLOT_SITES` of optimizer states. Their names begin with the parameter's name: ``weight.exp_avg``."""
NEVER = 1 << 62
"""A step number that is larger than all others."""
_MAX_DEPTH = 200
"""The most levels of a module tree. A path is untrusted and may have any length."""
HIDDEN = ("fused", "inlined", "tapped", "dtensor", "scripted", "compiled", "late")
"""The reasons for which hooks cannot observe calls of a module, by their keys in manifests and `gaps.REASONS`. The last
three reasons also apply to all modules below the module."""
_HOLDS_BELOW = HIDDEN.index("scripted") + 1
_MAX_RULES = 1000
"""The most rules of one writer that are judged. An untrusted file may have any number of rules."""


class DescribedModule(NamedTuple):
    """A module of one root, as the manifests of all writers together describe it."""

    root: str
    path: str
    class_name: str
    params: list[str]
    buffers: list[str]
    aliases: list[str]


class WriterSlots(NamedTuple):
    """The contents of the manifest of one writer, or of a rank's writers, for each slot (a site of a module)."""

    selected: Flags
    """For each slot, whether a rule selects the site on the writer's rank."""
    hidden: Integers
    """For each module, why hooks cannot observe its calls: 1 + the index in `HIDDEN`, or 0 if they can."""
    disarmed: Integers
    """For each slot, the step from which its hooks are disarmed, because they kept failing. `NEVER` if they are not."""
    untapped: Flags
    """For each slot, whether the module is recorded by taps (points in a compiled graph), but not at this site."""
    tied: dict[int, str]
    """For each slot of a tied parameter, the other name under which the parameter is recorded."""
    untrained: frozenset[int]
    """The slots of parameters that have a gradient, but belong to no optimizer."""

    @classmethod
    def joined(cls, slots: Slots, some: Iterable[WriterSlots]) -> WriterSlots:
        """Join the `WriterSlots` of several writers. If there is no writer, no slot is selected."""
        of_slots, of_modules = np.zeros(slots.num_slots, bool), np.zeros(len(slots.modules), np.int64)
        joined = cls(of_slots, of_modules, np.full(slots.num_slots, NEVER, np.int64), of_slots, {}, frozenset())
        for one in some:
            joined = cls(
                joined.selected | one.selected,
                np.maximum(joined.hidden, one.hidden),
                np.minimum(joined.disarmed, one.disarmed),
                joined.untapped | one.untapped,
                joined.tied | one.tied,
                joined.untrained | one.untrained,
            )
        return joined


class Slots:
    """Every value that may exist at a step, as a slot (a site of a module). The slots of a module form one range."""

    def __init__(self, manifests: Iterable[WriterManifest]) -> None:
        trees: list[tuple[RecordedRoot, ...]] = []
        numbers = []
        for manifest in manifests:
            tree = manifest.roots
            number = next((n for n, known in enumerate(trees) if known == tree), len(trees))
            if number == len(trees):
                trees.append(tree)
            numbers.append(number)
        described = [[(root, module) for root in tree for module in root.modules] for tree in trees]
        self.modules = _join(described)
        self.number_of = {(module.root, module.path): number for number, module in enumerate(self.modules)}
        """By root and path, the index of each module in `modules`."""
        self.roots = list(dict.fromkeys(module.root for module in self.modules))
        root_number = {root: number for number, root in enumerate(self.roots)}
        self.root_of = np.array([root_number[module.root] for module in self.modules], np.int64)
        self.parent_of = self._parents()
        """For each module, the index of its parent module; -1 for a root."""
        self._lay_out()
        writer_slots = [self._writer_slots(modules) for modules in described]
        self.writer_slots = [writer_slots[number] for number in numbers]
        """The `WriterSlots` of each manifest, in the order of the manifests."""

    @property
    def num_slots(self) -> int:
        return len(self.module)

    def _parents(self) -> Integers:
        parents = np.full(len(self.modules), -1, np.int64)
        for number, module in enumerate(self.modules):
            path = module.path
            while path and path.count(".") < _MAX_DEPTH:
                path = path.rpartition(".")[0]
                if (above := self.number_of.get((module.root, path))) is not None:
                    parents[number] = above
                    break
        return parents

    def _lay_out(self) -> None:
        names: dict[str, int] = {"": 0}
        rows: list[tuple[int, int, int]] = []
        first: list[int] = []
        for number, one in enumerate(self.modules):
            first.append(len(rows))
            rows += [(number, SLOT_SITES.index(site), 0) for site in OF_CALLS]
            for own_names, sites in ((one.params, OF_PARAMETERS), (one.buffers, OF_BUFFERS)):
                for name in own_names:
                    code = names.setdefault(name, len(names))
                    rows += [(number, SLOT_SITES.index(site), code) for site in sites]
        self.module, self.site, self.name = np.ascontiguousarray(np.array(rows, np.int64).reshape(-1, 3).T)
        """For each slot, the indices of its module, of its site in `SLOT_SITES`, and of its name in `names`."""
        self.names = list(names)
        self.first = np.array([*first, len(rows)], np.int64)
        """For each module, the index of its first slot (site of the module). The last entry is the number of slots."""
        self._name_codes = names
        self._named = np.flatnonzero(self.site >= len(OF_CALLS))
        keys = self._key(self.module[self._named], self.site[self._named], self.name[self._named])
        order = np.argsort(keys)
        self._named, self._named_keys = self._named[order], keys[order]

    def _key(self, module: Integers, site: Integers, name: Integers) -> Integers:
        return (module * len(SLOT_SITES) + site) * len(self.names) + name

    def of_rows(self, module: Integers, site: Integers, name: Integers) -> Integers:
        """Return the index of each row's slot (a site of a module). -1 for a row without a slot.

        `module` is the module's index, `site` the index in `SLOT_SITES`, and `name` the code from `name_code`. -1:
        unknown.
        """
        slots = np.full(len(module), -1, np.int64)
        known = (module >= 0) & (site >= 0)
        forward = known & (site < len(OF_CALLS))
        slots[forward] = self.first[module[forward]] + site[forward]
        named = np.flatnonzero(known & (site >= len(OF_CALLS)) & (name >= 0))
        if len(named) and len(self._named):
            keys = self._key(module[named], site[named], name[named])
            at = np.minimum(np.searchsorted(self._named_keys, keys), len(self._named) - 1)
            slots[named] = np.where(self._named_keys[at] == keys, self._named[at], -1)
        return slots

    def name_code(self, name: str) -> int:
        """Return the code of a parameter or buffer. The state ``weight.exp_avg`` has the code of its parameter."""
        code = self._name_codes.get(name)
        return self._name_codes.get(name.partition(".")[0], -1) if code is None else code

    def _writer_slots(self, modules: Sequence[tuple[RecordedRoot, RecordedModule]]) -> WriterSlots:
        selected = np.zeros((len(self.modules), len(SLOT_SITES)), bool)
        hidden = np.zeros(len(self.modules), np.int64)
        untapped = np.zeros((len(self.modules), len(SLOT_SITES)), bool)
        tapped: list[int] = []
        of_dtensors: list[int] = []
        disarmed = np.full((len(self.modules), len(SLOT_SITES)), NEVER, np.int64)
        for root, module in modules:
            number = self.number_of[root.name, module.path]
            disarmed[number] = [module.disarmed.get(site, NEVER) for site in SLOT_SITES]
            selected[number] = [site in module.sites for site in SLOT_SITES]
            why = module.hidden if module.hidden in HIDDEN else "compiled" if module.is_compiled else None
            hidden[number] = 0 if why is None else HIDDEN.index(why) + 1
            if module.tapped:
                shown = {*module.tapped, *(GRADIENT_OF[site] for site in module.tapped if site in GRADIENT_OF)}
                untapped[number] = [site in OF_CALLS and site not in shown for site in SLOT_SITES]
                is_of_dtensors = module.has_dtensors and root.model_parallel is not None
                (of_dtensors if is_of_dtensors else tapped).append(number)
        above = np.maximum(self.parent_of, 0)
        while True:  # a graph also hides the modules below the compiled module
            is_inside = (self.parent_of >= 0) & (hidden[above] >= _HOLDS_BELOW) & (hidden < hidden[above])
            if not is_inside.any():
                break
            hidden[is_inside] = hidden[above[is_inside]]
        hidden[tapped] = HIDDEN.index("tapped") + 1
        hidden[of_dtensors] = HIDDEN.index("dtensor") + 1
        of_slots = self.module, self.site
        tied, untrained = dict[int, str](), set[int]()
        for root, module in modules:
            for name, first in module.tied.items():
                tied |= dict.fromkeys(self._slots_of(root, module, name), first)
            for name in module.untrained:
                untrained.update(self._slots_of(root, module, name))
        of_calls = selected[of_slots], hidden, disarmed[of_slots], untapped[of_slots]
        return WriterSlots(*of_calls, tied, frozenset(untrained))

    def _slots_of(self, root: RecordedRoot, module: RecordedModule, name: str) -> list[int]:
        number, code = self.number_of[root.name, module.path], self._name_codes.get(name)
        of_module = range(self.first[number], self.first[number + 1])
        states = range(len(OF_CALLS), len(OF_CALLS) + len(OF_PARAMETERS))
        return [slot for slot in of_module if self.name[slot] == code and self.site[slot] in states]


def _join(described: Sequence[Sequence[tuple[RecordedRoot, RecordedModule]]]) -> list[DescribedModule]:
    module_of: dict[tuple[str, str], DescribedModule] = {}
    for root, one in (pair for modules in described for pair in modules):
        lists = [list(dict.fromkeys(names)) for names in (one.params, one.buffers, one.aliases)]
        described_here = DescribedModule(root.name, one.path, one.class_name, *lists)
        known = module_of.setdefault((root.name, one.path), described_here)
        for kept, more in zip((known.params, known.buffers, known.aliases), lists, strict=True):
            kept += [name for name in more if name not in kept]
    return list(module_of.values())


class RuleMatch(NamedTuple):
    """One rule, and the slots (sites of modules) that the rule can select on some rank."""

    rule: Rule
    slots: Flags
    is_limited: Flags
    """For each slot, whether the rule limits names, micro-steps or calls. Then rows alone show if the value exists."""


def read_rules(manifest: WriterManifest) -> tuple[list[Rule], list[str]]:
    """Return the rules of a manifest that record values as rows, and texts about the rules that cannot be read."""
    rules: list[Rule] = []
    problems: list[str] = []
    texts = manifest.rules
    if len(texts) > _MAX_RULES:
        problems.append(f"there are {len(texts)} rules; only the first {_MAX_RULES} are judged")
    for text in texts[:_MAX_RULES]:
        try:
            parsed = parse_rules(text, takes_unknown_sites=True)
        except (ConfigError, RecursionError) as error:
            problems.append(f"rule {text!r} cannot be read, so no value is expected by it: {error}")
            continue
        rules += parsed
        if unknown := [site for rule in parsed for site in rule.site if site not in SITE_OF]:
            sites = ", ".join(map(repr, unknown))
            problems.append(f"rule {text!r} names sites that are unknown to this version, and are not judged: {sites}")
    try:
        return [rule for rule in manifest.in_force(rules) if rule.keep & ~(KEEP_PROBE | KEEP_TOKENS)], problems
    except (ConfigError, RecursionError) as error:
        problems.append(f"rules that were sent during the run cannot be read, so no value is expected by them: {error}")
        return rules, problems


def match_rule(slots: Slots, rule: Rule) -> RuleMatch | None:
    """Return the slots (sites of modules) that match a rule, or None if its expressions have no bounded run time."""
    expressions = _BoundedExpressions([text for m in slots.modules for text in (m.path, m.class_name)] + slots.names)
    is_leaf = _leaves(slots) if rule.leaf else np.ones(len(slots.modules), bool)
    try:
        with_leaf = zip(slots.modules, is_leaf.tolist(), strict=True)
        chosen_modules = [rule.matches_module(m.path, m.class_name, leaf, expressions) for m, leaf in with_leaf]
        by_name = np.array([rule.matches_name(name, expressions) for name in slots.names], bool)
    except (pa.ArrowInvalid, re.error):
        return None
    modules = np.array(chosen_modules, bool)
    sites = np.array([site in rule.site for site in SLOT_SITES])
    own_name = (slots.site >= len(OF_CALLS)) & ~np.isin(slots.site, _OF_OPTIMIZERS)
    chosen = modules[slots.module] & sites[slots.site] & (by_name[slots.name] | ~own_name)
    limited = np.full(slots.num_slots, 0 not in rule.call or 0 not in rule.micro_step) | (rule.name != ANY) & ~own_name
    return RuleMatch(rule, chosen, chosen & limited)


def _leaves(slots: Slots) -> Flags:
    is_leaf = np.ones(len(slots.modules), bool)
    is_leaf[slots.parent_of[slots.parent_of >= 0]] = False
    for module in slots.modules:
        for alias in module.aliases:
            above = slots.number_of.get((module.root, alias.rpartition(".")[0]))
            if above is not None and alias:
                is_leaf[above] = False
    return is_leaf


class _BoundedExpressions:
    """Matches untrusted regular expressions against known texts, using RE2, whose time is linear in the text."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = list(dict.fromkeys(texts))
        self._matching: dict[str, set[str]] = {}

    def __call__(self, expression: str, text: str) -> bool:
        """Return whether the expression matches the whole of `text`, which is one of the known texts.

        Raises: pa.ArrowInvalid: RE2 does not support a part of the expression, such as a backward reference.
        """
        if expression not in self._matching:
            matching = pc.match_substring_regex(pa.array(self._texts, pa.string()), pattern=f"^(?:{expression})$")
            self._matching[expression] = set(pa.array(self._texts, pa.string()).filter(matching).to_pylist())
        return text in self._matching[expression]


def distinct(numbers: Integers) -> Integers:
    """Return the distinct integers, ascending. `numpy.unique`, with its hash table, takes five times as long."""
    ascending = np.sort(numbers)
    return ascending[np.insert(np.diff(ascending) > 0, 0, True)] if len(ascending) else ascending
