"""Decides which values are kept at the current step, by turning each set of rules into a bit mask.

Masks depend on the step alone, so ranks agree without communication. They are computed once per step, so a hook needs
one list look-up to find that nothing is wanted.

For rules that keep sums over units (neurons or channels), `unit_dim_of` returns the dim of a value along which the
units lie. The units of a parameter lie along its dim of outputs, so unit 7 of a weight, of its gradient and of the
module's output are one unit. Nothing here may read values.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from ..config import DEFAULT_RULES
from ..records import KEEP_PROBE, KEEP_RING, KEEP_STATS, KEEP_TENSOR, KEEP_UNITS
from ..rules import ANY, EVERY, KEEPS, Rule, Schedule, nearest
from ..sites import OF_PARAMETERS, SITES, STATES
from ..system.text import listed

_DEFAULTS = frozenset(rule.written for rule in DEFAULT_RULES)
NOTHING = 0
"""The rule set that selects no value."""
_USUAL = f" keep={next(word for word, bit in KEEPS.items() if bit == KEEP_STATS)}"
"""The last words in the text of a rule that keeps only statistics, as most rules do."""
_FIRST_CALLS, _FIRST_MICRO_STEPS = 16, 1024
"""Masks are remembered for so many calls of a module in so many micro-steps. Most modules are called once."""
_MAX_COMPARED = 2000
"""The most paths that are compared with an unmatched pattern, to suggest similar ones. Each comparison takes 40 us."""


class NoMasks:
    """The masks of a paused recording. Every mask is 0."""

    def __getitem__(self, rule_set: int) -> int:
        return 0


class RuleSelection:
    """The sets of rules that modules use, and what each set keeps at the current step."""

    def __init__(self, rules: Sequence[Rule], rank: int) -> None:
        self._rank = rank
        self._rules: tuple[Rule, ...] = ()
        self._takes_all: list[bool] = []
        self._matched: list[bool] = []
        self._active: list[int] = []
        self._sets: dict[tuple[int, ...], int] = {(): NOTHING}
        self._members: list[tuple[int, ...]] = [()]
        self._class_names: dict[str, None] = {}
        self.masks: list[int] = [0]
        """For each rule set, its mask at the current step: bits of KEEP_*. The mask of rule set 0 is always 0."""
        self.limited: set[int] = set()
        """The rule sets whose mask also depends on the micro-step or the call. `mask_at_call` returns this mask."""
        self._by_name: set[int] = set()
        """The rule sets that select tensors by name."""
        self._named: set[int] = set()
        """The rule sets with a rule that has patterns of names, or that is a default rule."""
        self._of_units: set[int] = set()
        """The rule sets that keep sums over units (neurons or channels) at some step."""
        self.first_calls: dict[tuple[int, int | None, int], int] = {}
        """The masks of first calls at the current step, by rule set, micro-step and call."""
        self._masks_of_first_call: tuple[int, ...] = ()
        """What `masks_of_first_call` returns; shorter than `masks` if it must be made anew."""
        self.has_ring = self._had_ring = False
        """Whether there is a ring: memory for values that wait for a trigger. Without it, rules keep no ring values."""
        self.has_probe = True
        """Whether the probe (one number of each value at every step) can measure. If not, rules keep nothing for it."""
        self.rule_set_of: dict[Hashable, int] = {}
        """The rule set of each recorded parameter and gradient, by its origin."""
        self._by_matching: dict[tuple[tuple[int, ...], bool], dict[str, int]] = {}
        self._without_module: Mapping[str, int] | None = None
        """For each site, the rule set of values that belong to no module. None until a value asks."""
        self.extend(rules)

    def extend(self, rules: Sequence[Rule]) -> None:
        """Append rules. A module uses them once it asks for its `rule_sets` again."""
        self._rules = (*self._rules, *rules)
        self._without_module = None
        self._takes_all += [rule.module == rule.cls == ANY and not rule.leaf for rule in rules]
        self._matched += [False] * len(rules)
        self._active += [0] * len(rules)

    def reschedule(self, schedules: Sequence[Schedule]) -> None:
        """Replace the steps of all rules, in the rules' order. The new steps apply from the next `at_step` on."""
        self._rules = tuple(
            rule if rule.steps is steps else replace(rule, steps=steps)
            for rule, steps in zip(self._rules, schedules, strict=True)
        )

    @property
    def num_rules(self) -> int:
        """Return the number of rules, whether they are in force or not."""
        return len(self._rules)

    def rule_sets(
        self, module_path: str, class_name: str, is_leaf: bool, *, is_callable: bool = True
    ) -> Mapping[str, int]:
        """Return, for each site, the set of this rank's rules that can select a value of a module.

        Modules with the same matching rules share the result, because a model may have many thousands of modules. A
        module that is not callable has only parameters and buffers.
        """
        self._class_names[class_name] = None
        matching = tuple(
            i
            for i, rule in enumerate(self._rules)
            if self._takes_all[i] or rule.matches_module(module_path, class_name, is_leaf)
        )
        by_site = self._by_matching.get((matching, is_callable))
        if by_site is None:
            sites = SITES if is_callable else STATES
            by_site = dict.fromkeys(SITES, NOTHING) | {site: self._of_site(matching, site) for site in sites}
            self._by_matching[matching, is_callable] = by_site
        return by_site

    def _of_site(self, matching: tuple[int, ...], site: str) -> int:
        members = [i for i in matching if site in self._rules[i].site]
        for i in members:
            self._matched[i] = True
        return self._intern(tuple(i for i in members if self._rank in self._rules[i].rank))

    def narrow(self, rule_set: int, name: str) -> int:
        """Return the set of rules of `rule_set` that also select the tensor ``name``."""
        if rule_set not in self._by_name:
            return rule_set
        members = self._members[rule_set]
        return self._intern(tuple(i for i in members if self._rules[i].matches_name(name)))

    def names_tensors(self, rule_set: int) -> bool:
        """Whether a rule of the set has patterns of names or is a default rule; others select what modules get."""
        return rule_set in self._named

    def keeps_units(self, rule_set: int) -> bool:
        """Whether a rule of the set keeps sums over units (neurons or channels) at some step."""
        return rule_set in self._of_units

    def unit_dim(self, rule_set: int) -> int | None:
        """Return the dim of units that a rule of the set names. Return None if no rule names one."""
        dims = (self._rules[i].unit_dim for i in self._members[rule_set])
        return next((dim for dim in dims if dim is not None), None)

    def rule_set_of_name(self, site: str, name: str) -> int:
        """Return the rule set of a tap (a tensor that the program names) or a scalar. Both belong to no module."""
        if self._without_module is None:
            self._without_module = self.rule_sets("", "", False)
        return self.narrow(self._without_module[site], name)

    def _intern(self, members: tuple[int, ...]) -> int:
        known = self._sets.get(members)
        if known is None:
            known = self._sets[members] = len(self._members)
            self._members.append(members)
            self.masks.append(self._mask(members))
            if any(self._rules[i].call != EVERY or self._rules[i].micro_step != EVERY for i in members):
                self.limited.add(known)
            if any(self._rules[i].name != ANY for i in members):
                self._by_name.add(known)
            if known in self._by_name or any(self._rules[i].written in _DEFAULTS for i in members):
                self._named.add(known)
            if any(self._rules[i].keep & KEEP_UNITS for i in members):
                self._of_units.add(known)
        return known

    def mask_at_call(self, rule_set: int, micro_step: int | None, call: int) -> int:
        """Return the mask (bits of KEEP_*) of a module's ``call``-th call in a micro-step of the current step.

        `micro_step` is None for a value that belongs to the step as a whole, such as a gradient after its accumulation.
        """
        key = rule_set, micro_step, call
        mask = self.first_calls.get(key)
        if mask is None:
            rules = ((i, self._rules[i]) for i in self._members[rule_set])
            mask = self._mask(
                tuple(
                    i
                    for i, rule in rules
                    if call in rule.call and (micro_step is None or micro_step in rule.micro_step)
                )
            )
            if call < _FIRST_CALLS and (micro_step or 0) < _FIRST_MICRO_STEPS:
                self.first_calls[key] = mask
        return mask

    def _mask(self, members: tuple[int, ...]) -> int:
        mask = 0
        for i in members:
            mask |= self._active[i]
        return mask & ~KEEP_RING if mask & KEEP_TENSOR or not self.has_ring else mask

    def at_step(self, step: int) -> None:
        """Apply the rules to a step. At most steps nothing changes, and the masks of the step before stay in force."""
        keeps = -1 if self.has_probe else ~KEEP_PROBE
        active = [rule.keep & keeps if step in rule.steps else 0 for rule in self._rules]
        if active == self._active and self.has_ring == self._had_ring:
            return
        self._active, self._had_ring = active, self.has_ring
        self.first_calls.clear()
        self.masks[:] = [self._mask(members) for members in self._members]
        self._masks_of_first_call = ()

    def masks_of_first_call(self) -> tuple[int, ...]:
        """Return, for each rule set, the mask (bits of KEEP_*) of a value that belongs to the step as a whole."""
        if len(self._masks_of_first_call) < len(self.masks):
            self._masks_of_first_call = tuple(
                self.mask_at_call(rule_set, None, 0) if rule_set in self.limited else mask
                for rule_set, mask in enumerate(self.masks)
            )
        return self._masks_of_first_call

    def keeps(self, site: str) -> bool:
        """Whether some rule may keep a value of a site at the current step, for any module."""
        return any(mask and site in rule.site for mask, rule in zip(self._active, self._rules, strict=True))

    def num_ring_steps(self, first: int, num_steps: int) -> int:
        """Return how many of `num_steps` steps from `first` on have rules that keep values in this rank's ring."""
        schedules = {rule.steps for rule in self._rules if self._rank in rule.rank and rule.keep & KEEP_RING}
        return sum(any(step in steps for steps in schedules) for step in range(first, first + num_steps))

    def asks_for(self, *sites: str) -> bool:
        """Whether a rule keeps values of one of the sites on this rank at some step."""
        return any(self._rank in rule.rank and set(sites) & set(rule.site) for rule in self._rules)

    def unmatched(self, module_paths: Sequence[str]) -> list[str]:
        """Return a sentence for each rule that matched no module so far, with similar paths or class names."""
        problems = []
        for rule, matched in zip(self._rules, self._matched, strict=True):
            if matched:
                continue
            by_class = Rule(cls=rule.cls)
            is_class_wrong = not any(by_class.matches_module("", name, True) for name in self._class_names)
            patterns, candidates = (
                (rule.cls, list(self._class_names)) if is_class_wrong else (rule.module, module_paths)
            )
            wanted = next((p for p in patterns if not p.startswith("!")), "*")
            candidates = list(dict.fromkeys(candidates))[:_MAX_COMPARED]  # two models may have equal paths
            near = nearest(wanted, candidates, cutoff=0.3) or candidates[:3]
            shown = ", ".join(repr(text) for text in near)
            kind = "class names" if is_class_wrong else "module paths"
            problems.append(f"the rule {_written(rule)!r} matches no module; {kind} near it: {shown}")
        return problems

    def without_parameters(self, modules: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return a sentence for each rule that selects parameters only, and only of modules without own parameters.

        `modules` are the modules of a model, as the manifest lists them.
        """
        problems = []
        for rule in self._rules:
            if not set(OF_PARAMETERS).issuperset(rule.site) or rule.leaf:
                continue
            chosen = [one for one in modules if rule.matches_module(one["path"], one["class"], False)]
            if chosen and not any(one["params"] for one in chosen):
                shown = listed((repr(one["path"]) for one in chosen), 3)
                problems.append(
                    f"the rule {_written(rule)!r} selects no value: none of {shown} holds a parameter of its own; "
                    f"parameters belong to the layers inside, which module=NAME.* selects"
                )
        return problems

    def for_no_rank(self, world_size: int) -> list[str]:
        """Return a sentence if no rule is for a rank of this run. Some rules may be meant for runs with more ranks."""
        if any(rank in rule.rank for rule in self._rules for rank in range(world_size)):
            return []
        ranks = "the only rank is 0" if world_size == 1 else f"the ranks are 0 to {world_size - 1}"
        some = ", ".join(repr(_written(rule)) for rule in self._rules[:3])
        return [f"nothing is recorded: no rule is for a rank of this run ({some}); {ranks}"]


def _written(rule: Rule) -> str:
    return rule.written or rule.text.removesuffix(_USUAL)


def scalar_keep(mask: int) -> int:
    """Return what is kept of a scalar: the payload, and the statistics, whose mean is the scalar."""
    return KEEP_TENSOR | KEEP_STATS if mask else 0


LAST = -1
_FIRST = 0
_SECOND = 1


def unit_dim_of(selection: RuleSelection, rule_set: int, module: nn.Module | None, site: str, name: str) -> int:
    """Return the dim along which the units (neurons or channels) of a value lie. A negative dim counts from the last.

    A dim that a rule of the set names takes precedence. `module` is None if the value's module is unknown.
    """
    if not selection.keeps_units(rule_set):
        return LAST
    chosen = selection.unit_dim(rule_set)
    if chosen is not None:
        return chosen
    return _of_state(module, name) if site in STATES else _of_values(module)


def _of_state(module: nn.Module | None, name: str) -> int:
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm)):
        return LAST
    if isinstance(module, _ConvTransposeNd) and name.partition(".")[0] == "weight":
        return _SECOND
    return _FIRST


def _of_values(module: nn.Module | None) -> int:
    if isinstance(module, _ConvNd):
        return -1 - len(module.kernel_size)  # a negative dim, because a single sample may come without the batch dim
    if isinstance(module, (_NormBase, nn.GroupNorm)):
        return _SECOND
    return LAST
