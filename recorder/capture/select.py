"""Which values are kept at the step in hand: rules turned into one bit mask for each set of rules.

The schedule is a function of the step alone, so that ranks agree without talking. At a step change the masks are
worked out once; a hook then costs one list look-up to learn that nothing is wanted.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from ..config import EVERY, Rule
from ..records import KEEP_STATS, KEEP_TENSOR

NOTHING = 0
"""The rule set that never selects anything."""


class Selection:
    """All rule sets that modules use, and what each keeps at the current step."""

    def __init__(self, rules: Sequence[Rule], rank: int) -> None:
        self._rules = tuple(rules)
        self._on_rank = [rank in rule.rank for rule in self._rules]
        self._sets: dict[tuple[int, ...], int] = {(): NOTHING}
        self._members: list[tuple[int, ...]] = [()]
        self._matched = [False] * len(self._rules)
        self.masks: list[int] = [0]
        """Bits of KEEP_* by rule set, at the current step; index 0 is always 0."""
        self._active = [0] * len(self._rules)
        self._limits_calls = [rule.call != EVERY for rule in self._rules]
        self.limited: set[int] = set()
        """Rule sets whose mask also depends on the call; `mask_at_call` tells."""

    def rule_set(self, module_path: str, class_name: str, is_leaf: bool, site: str) -> int:
        """The rules that can select anything of a module at a site; patterns are judged without the rank clause."""
        members = []
        for i, rule in enumerate(self._rules):
            if site in rule.site and rule.matches_module(module_path, class_name, is_leaf):
                self._matched[i] = True
                if self._on_rank[i]:
                    members.append(i)
        return self._intern(tuple(members))

    def narrow(self, rule_set: int, name: str) -> int:
        """The part of a rule set that also selects the leaf ``name``."""
        members = self._members[rule_set]
        return self._intern(tuple(i for i in members if self._rules[i].matches_name(name)))

    def _intern(self, members: tuple[int, ...]) -> int:
        known = self._sets.get(members)
        if known is None:
            known = self._sets[members] = len(self._members)
            self._members.append(members)
            self.masks.append(self._mask(members))
            if any(self._limits_calls[i] for i in members):
                self.limited.add(known)
        return known

    def mask_at_call(self, rule_set: int, call: int) -> int:
        """What is kept of the ``call``-th call in a slice at the current step."""
        return self._mask(tuple(i for i in self._members[rule_set] if call in self._rules[i].call))

    def _mask(self, members: tuple[int, ...]) -> int:
        mask = 0
        for i in members:
            mask |= self._active[i]
        return mask

    def at_step(self, step: int) -> None:
        """Work out what is kept at this step."""
        self._active = [rule.keep if step in rule.steps else 0 for rule in self._rules]
        self.masks[:] = [self._mask(members) for members in self._members]

    def unmatched(self, module_paths: Sequence[str]) -> list[str]:
        """One sentence for each rule whose patterns matched no module so far, with the nearest paths."""
        problems = []
        for rule, matched in zip(self._rules, self._matched, strict=True):
            if matched:
                continue
            wanted = next((p for p in rule.module if not p.startswith("!")), "*")
            near = difflib.get_close_matches(wanted, module_paths, n=3, cutoff=0.3) or list(module_paths[:3])
            shown = ", ".join(repr(path) for path in near)
            problems.append(f"the rule {rule.text!r} matches no module; module paths near it: {shown}")
        return problems


def scalar_keep(mask: int) -> int:
    """What is kept of a scalar: its value is its 0-dim payload, with the mean equal to it."""
    return KEEP_TENSOR | KEEP_STATS if mask else 0
