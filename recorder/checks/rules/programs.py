"""Rules on what the program does with the model: what its optimizers have, and in which mode its modules are."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator

from ..rows import ModuleFacts, Rows
from ..rule import CheckRule, Finding, Severity

_KINDS = ("Dropout", "Norm")
"""Parts of class names. Modules that have one are of one kind; other modules are of one kind if their class is."""


class _ProgramRule(CheckRule):
    columns = ()

    def add(self, rows: Rows) -> Iterable[Finding]:
        return ()

    def finding_on(
        self, module: tuple[str, str], step: int, what: str, *, name: str = "", severity: Severity | None = None
    ) -> Finding:
        """Return a finding on a module, or on its parameter `name`."""
        root, path = module
        return Finding(
            self.name, self.severity if severity is None else severity, step, root, path, "param" if name else "output",
            name, ranks=(), what=what, measure="", value=math.nan, threshold=math.nan, advice=self.advice,
        )  # fmt: skip


class NotOptimized(_ProgramRule):
    name = "not_optimized"
    sentence = "A parameter has a gradient, and no optimizer has the parameter."
    sites = ("param",)
    advice = "give the parameter to an optimizer, or set its requires_grad to False"

    def finish(self) -> Iterator[Finding]:
        for module, facts in self.catalog.modules.items():
            for name in facts.untrained:
                yield self.finding_on(module, 0, "it has a gradient, and no optimizer has it", name=name)


class NotCleared(_ProgramRule):
    name = "not_cleared"
    sentence = "The gradients of an update are not cleared before the next backward."
    sites = ("grad",)
    advice = "call optimizer.zero_grad() after each optimizer.step()"

    def finish(self) -> Iterator[Finding]:
        for module, facts in self.catalog.modules.items():
            if facts.uncleared is not None:
                what = "the gradients are added to the gradients of the previous step, which were not cleared"
                found = self.finding_on((module[0], ""), facts.uncleared, what)
                yield found._replace(site="grad", detail=f"seen at '{module[1]}'" if module[1] else "")


class EvaluationMode(_ProgramRule):
    """Dropouts and batch norms that are in evaluation mode while the optimizer steps.

    If only some modules of a kind are in this mode, they were probably forgotten. If all modules of the kind are in
    evaluation mode, but the model is not, this is intended.
    """

    name = "evaluation_mode"
    sentence = "A dropout or a batch norm is in evaluation mode while the model is trained."
    sites = ("output",)
    advice = "call model.train() before the training goes on, as after a validation"

    def finish(self) -> Iterator[Finding]:
        kinds: defaultdict[tuple[str, str], dict[tuple[str, str], ModuleFacts]] = defaultdict(dict)
        for module, facts in self.catalog.modules.items():
            kind = next((kind for kind in _KINDS if kind in facts.class_name), facts.class_name)
            if module[1]:
                kinds[module[0], kind][module] = facts
        for (root, _), modules in kinds.items():
            steps = {module: one.evaluated for module, one in modules.items() if one.evaluated is not None}
            whole = self.catalog.modules.get((root, ""))
            is_whole = whole is not None and whole.evaluated is not None
            is_odd = is_whole or len(steps) < len(modules)
            what = "the module is in evaluation mode while the model is trained"
            what += ", as all modules are" if is_whole else "" if is_odd else ", as all of its kind are"
            for module, step in steps.items():
                # The first updates are looked at, and that at which the whole model has this mode; else one in 16.
                is_first = step < 3 or (whole is not None and whole.evaluated == step)
                known = what if is_first else f"{what}; it may have begun before this step"
                yield self.finding_on(module, step, known, severity=None if is_odd else Severity.NOTE)
