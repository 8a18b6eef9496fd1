"""Rules on what the program does with the model: what its optimizers have, and in which mode its modules are."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ...format.manifest import RecordedModule
from ...sites import CLIP_LIMIT, CLIP_NORM, UPDATE
from ...system.text import counted, number
from ..normal import Moves
from ..rows import Rows, SeriesKey, grouped
from ..rule import CheckRule, Finding, Setting, Severity

_KINDS = ("Dropout", "Norm")
"""Parts of class names. Modules that have one are of one kind; other modules are of one kind if their class is."""

_FUNCTIONS = {
    "LogSoftmax": "the log_softmax of the loss, as of cross_entropy,", "NllLoss": "nll_loss", "NllLoss2D": "nll_loss",
    "BinaryCrossEntropyWithLogits": "binary_cross_entropy_with_logits", "CtcLoss": "ctc_loss", "KlDiv": "kl_div",
    "SoftLabels": "the cross-entropy of soft labels",
}  # fmt: skip
_OF_LOG_PROBABILITIES = {
    "NllLoss": "give nll_loss the log_softmax of the last layer's output over the classes, or use cross_entropy",
    "CtcLoss": "give ctc_loss the log_softmax of the last layer's output over the classes, as [time, batch, classes]",
    "SoftLabels": "take the log_softmax of the outputs over the classes",
    "KlDiv": "give kl_div the log_softmax of the outputs, and probabilities as the target",
}
_BROADCAST = "the loss compares each output with all labels of the batch, because their shapes are broadcast"
_MAKES = {
    "Softmax": "the probabilities that a softmax has made", "Sigmoid": "the probabilities that a sigmoid has made",
    "Relu": "the result of a ReLU, which is never below zero",
    "Batch": "a log_softmax over the samples of the batch, and not over the classes",
    "Time": "a log_softmax over the time or the batch, and not over the classes",
}  # fmt: skip


class _ProgramRule(CheckRule):
    columns = ()

    def add(self, rows: Rows) -> Iterable[Finding]:
        return ()

    def finding_on(
        self, module: tuple[str, str], step: int, what: str, *, name: str = "", severity: Severity | None = None
    ) -> Finding:
        """Return a finding on a module, or on its parameter `name`, that holds since `step`."""
        root, path = module
        return Finding(
            self.name, self.severity if severity is None else severity, step, root, path, "param" if name else "output",
            name, ranks=(), what=what, measure="", value=math.nan, threshold=math.nan, advice=self.advice, since=step,
        )  # fmt: skip


class NotOptimized(_ProgramRule):
    name = "not_optimized"
    sentence = "A parameter has a gradient, and no optimizer that steps has the parameter."
    sites = ("param",)
    advice = "give the parameter to an optimizer, made once the model is complete, or set its requires_grad to False"

    def finish(self) -> Iterator[Finding]:
        """Report the parameters. Where only the last modules of a model are trained, that may be meant: a note."""
        of_root = defaultdict(list)
        for (root, _), facts in self.catalog.modules.items():
            of_root[root].append(facts)
        for module, facts in self.catalog.modules.items():
            yield from self._in_list(module, facts)
            if (since := facts.optimizer_anew_since) is not None:
                one = self.finding_on(module, since, _ANEW.format(facts.optimizer_anew))
                yield one._replace(advice="make the optimizer once, before the loop")
            for name in facts.untrained:
                if "[" in name:
                    continue
                is_held = name in facts.rates
                are_last = not is_held and (facts.feeds_trained or _trains_last(of_root[module[0]]))
                are_last &= facts.unfrozen is None  # a program that unfreezes a parameter means to train it
                what = _NEVER_STEPS if is_held else _NO_OPTIMIZER + _ONLY_LAST * are_last
                severity = Severity.NOTE if are_last else None
                one = self.finding_on(module, facts.untrained_since or 0, what, name=name, severity=severity)
                yield one._replace(advice="call the optimizer's step()") if is_held else one

    def _in_list(self, module: tuple[str, str], facts: RecordedModule) -> Iterator[Finding]:
        """Report modules in a list or dict of Python whose parameters have gradients.

        A list with one module is a note: this hides a teacher, or a network that judges, from `model.parameters()`.
        """
        lists: defaultdict[str, set[str]] = defaultdict(set)
        for parameter in facts.untrained:
            if "[" in parameter:
                lists[parameter.partition("[")[0]].add(parameter.partition("]")[0])
        for name, elements in lists.items():
            num = len(elements)
            severity = self.severity if num > 1 else Severity.NOTE
            one = self.finding_on(module, facts.untrained_since or 0, _IN_LIST, name=name, severity=severity)
            advice = _REGISTER if num > 1 else f"{_REGISTER}; nothing is wrong if the module is not to be trained"
            yield one._replace(advice=advice, detail=counted(num, "module"))


_NEVER_STEPS = "it has a gradient, and the optimizer that has it never steps"
_ANEW = "a new {} makes each update, so that what it keeps for the next update is lost, such as its moments"
_IN_LIST = "a list or dict of Python has modules with gradients, and no optimizer has their parameters"
_REGISTER = "use an nn.ModuleList or nn.ModuleDict, because model.parameters() leaves such modules out"
_NO_OPTIMIZER, _ONLY_LAST = "it has a gradient, and no optimizer has it", "; only modules after it are trained"


def _trains_last(modules: Sequence[RecordedModule]) -> bool:
    """Return whether optimizers have only the last modules of a model, no more than those that they do not have."""
    trained = [at for at, one in enumerate(modules) if set(one.rates) - set(one.untrained)]
    untrained = [at for at, one in enumerate(modules) if one.untrained]
    return bool(trained) and max(untrained) < min(trained) and len(untrained) >= len(trained)


_NOT_SHIFTED = "the labels of the loss are the tokens of the input{}, each at its place"
_SHIFT = "unless the model is to copy, shift the labels, so that each is the token that follows"
_SHIFTED_TWICE = "each label of the loss is the token after the next one of the input{}: the labels are shifted twice"
_SHIFT_ONCE = "shift the labels once, in the data or in the model: the models of Hugging Face shift them"
NEGATED = "Neg of "
"""How the function of a loss begins that is the negative of a loss that is never negative."""


class LossArgument(_ProgramRule):
    name = "loss_argument"
    sentence = "A loss gets something else than logits or log-probabilities, or labels of other tokens."
    sites = ("scalar",)
    advice = "give the loss what the last layer returns, without a softmax, a sigmoid or a ReLU"

    def finish(self) -> Iterator[Finding]:
        for module, facts in self.catalog.modules.items():
            if facts.loss_argument and not facts.loss_argument.startswith(NEGATED):
                function, _, argument = facts.loss_argument.partition(" of ")
                if function == "Shift":
                    places, _, name = argument.partition(" of ")
                    yield self._of_shift(module, facts.loss_argument_since or 0, name, is_twice=places == "2")
                    continue
                of_log_probabilities = _OF_LOG_PROBABILITIES.get(function.removesuffix("2D"))
                expected = "log-probabilities" if of_log_probabilities else "logits"
                made = _MAKES.get(argument, "the result of a layer")
                what = f"{_FUNCTIONS.get(function, function)} expects {expected}, and gets {made}"
                is_broadcast = argument == "Expand"
                one = self.finding_on(module, facts.loss_argument_since or 0, _BROADCAST if is_broadcast else what)
                if is_broadcast:
                    one = one._replace(advice="squeeze or unsqueeze the outputs or the labels")
                elif of_log_probabilities:
                    one = one._replace(advice=of_log_probabilities)
                yield one

    def _of_shift(self, module: tuple[str, str], since: int, name: str, *, is_twice: bool) -> Finding:
        """Return a finding on labels that are not the next tokens. An autoencoder's are those of the input: a note."""
        severity = self.severity if is_twice else Severity.NOTE
        what = (_SHIFTED_TWICE if is_twice else _NOT_SHIFTED).format(f" '{name}'" * bool(name))
        one = self.finding_on(module, since, what, severity=severity)
        return one._replace(advice=_SHIFT_ONCE if is_twice else _SHIFT)


class NotCleared(_ProgramRule):
    name = "not_cleared"
    sentence = "The gradients of an update are not cleared before the next backward."
    sites = ("grad",)
    advice = "call optimizer.zero_grad() after each optimizer.step(), and in a closure before its backward"

    def finish(self) -> Iterator[Finding]:
        for module, facts in self.catalog.modules.items():
            if facts.uncleared is not None:
                what = "the gradients are added to the gradients of the previous step, which were not cleared"
                found = self.finding_on((module[0], ""), facts.uncleared, what)
                yield found._replace(site="grad", detail=f"seen at '{module[1]}'" if module[1] else "")


_EVALUATE = "if it is a validation, call model.eval() before it, and model.train() after it"
_VALIDATED = "the model is called without gradients in training mode, as if for a validation: dropouts and norms act"


class EvaluationMode(_ProgramRule):
    """Dropouts and batch norms that are in evaluation mode while the optimizer steps.

    If only some modules of a kind are in this mode, they were probably forgotten. If all modules of the kind are in
    evaluation mode, but the model is not, this is intended.
    """

    name = "evaluation_mode"
    sentence = "A dropout or batch norm is in evaluation mode in training, or the reverse in a validation."
    sites = ("output",)
    advice = "call model.train() before the training goes on, as after a validation"

    def finish(self) -> Iterator[Finding]:
        kinds: defaultdict[tuple[str, str], dict[tuple[str, str], RecordedModule]] = defaultdict(dict)
        for module, facts in self.catalog.modules.items():
            if (step := facts.validated_in_training) is not None:
                one = self.finding_on(module, step, _VALIDATED, severity=Severity.NOTE)
                yield one._replace(advice=_EVALUATE)
            kind = next((kind for kind in _KINDS if kind in facts.class_name), facts.class_name)
            if module[1]:
                kinds[module[0], kind][module] = facts
        for (root, _), modules in kinds.items():
            steps = {module: one.evaluated for module, one in modules.items() if one.evaluated is not None}
            whole = self.catalog.modules.get((root, ""))
            is_whole = whole is not None and whole.evaluated is not None
            is_odd = is_whole or len(steps) < len(modules)
            what = f"the {'whole model' if is_whole else 'module'} is in evaluation mode while the model is trained"
            what += "" if is_odd else ", as all of its kind are"
            for module, step in steps.items():
                # The first updates are looked at, and that at which the whole model has this mode; else one in 16.
                is_first = step < 3 or (whole is not None and whole.evaluated == step)
                known = what if is_first else f"{what}; it may have begun before this step"
                yield self.finding_on(module, step, known, severity=None if is_odd else Severity.NOTE)


_BATCH_AS_TIME = (
    "the module takes the first dim of its input, which is as long as the labels of the loss, for the time: if it is "
    "the batch, samples are mixed"
)


class BatchFirst(_ProgramRule):
    name = "batch_first"
    sentence = "A recurrent or attention module takes the dim of the batch for the time."
    sites = ("output",)
    advice = "construct the module with batch_first=True, or transpose its input"

    def finish(self) -> Iterator[Finding]:
        for module, facts in self.catalog.modules.items():
            if facts.batch_as_time is not None:
                yield self.finding_on(module, facts.batch_as_time, _BATCH_AS_TIME)


PROGRAM_RULES = (NotOptimized, LossArgument, NotCleared, EvaluationMode, BatchFirst)
"""The rules that read only facts about modules. So they can judge a training as soon as a fact is known."""


_CLIPS_NOTHING = (
    "each clip finds a norm of 0, or one that is not finite, and cuts nothing: it comes before the backward or after "
    "the gradients were cleared, or its parameters have none"
)


class Clipping(CheckRule):
    """Clipping that always cuts. The finding is a note where the weights move all the same, as they do with Adam."""

    name = "clipping"
    sentence = "Clipping cuts the gradients to a tiny part of their norm in nearly every step, or finds none."
    sites, columns, reads_probe = ("scalar", "param", UPDATE), ("mean", "sum_sq"), True
    settings = (
        Setting("ratio", 100, "times max_norm", "usual clipping cuts a norm of 2 to 30 to 1"),
        Setting("steps", 20, "steps, nine of ten until the end", "ours"),
        Setting("moved", 1e-4, "of the weights' norm, in an update", "usual is 1e-3; the decay of AdamW is 1e-5"),
    )
    advice = "look at max_norm, at the reduction of the loss, and whether GradScaler unscales the gradients before"

    def set_up(self) -> None:
        self._moves, self._lane, self._balance = Moves(), -1, 0
        self._empty: tuple[int, int] | None = None
        """The first step and the number of steps, if every clip has found gradients of norm zero."""
        self._cuts: tuple[int, int, int, float] | None = None
        """Since nine of ten steps are cut: the first and the last of them, their number, the sum of the cuts' logs."""

    def wants(self, key: SeriesKey) -> bool:
        return key.site != "scalar" or key.name in (CLIP_NORM, CLIP_LIMIT)

    def add(self, rows: Rows) -> Iterable[Finding]:
        """Judge each step by its largest norm and its largest limit: at least one clip cuts by as much.

        In a step with a clip that has no limit, the largest norm may be this clip's, so that nothing is cut.
        """
        rows = self._moves.add(rows)
        ids, firsts = grouped(rows.steps)
        is_limit, largest = rows.where("limit", lambda key: key.name == CLIP_LIMIT), np.zeros((2, len(firsts)))
        np.maximum.at(largest, (is_limit.astype(np.int64), ids), rows["mean"])
        are_paired = np.bincount(ids, np.where(is_limit, 1, -1)) == 0
        largest[0] *= are_paired | (largest[1] == 0)
        for step, norm, limit in zip(rows.steps[firsts].tolist(), *largest.tolist(), strict=True):
            begun, num = self._empty or (step, 0)
            self._empty = (begun, num + 1) if not norm and num >= 0 else (begun, -1)
            self._lane = int(rows.lanes[0])
            is_cut = 0 < self.thresholds["ratio"] * limit < norm
            self._balance = min(self._balance + (1 if is_cut else -9 * (norm > 0)), 90)  # not finite: recorded as 0
            if self._balance < 0:
                self._cuts, self._balance = None, 0
            elif is_cut:
                first, _, num, total = self._cuts or (step, 0, 0, 0.0)
                self._cuts = first, step, num + 1, total + math.log(norm / limit)
        return ()

    def finish(self) -> Iterator[Finding]:
        if self._lane < 0:
            self.why_not_judged = "needs a call of torch.nn.utils.clip_grad_norm_"
        since, num = self._empty or (0, -1)
        if num >= self.thresholds["steps"] and self._moves.total > 0:
            one = self.finding(self._lane, since, _CLIPS_NOTHING, "", 0.0, 0.0, since=since)
            yield one._replace(ranks=(), advice="clip after the backward, and before optimizer.step()")
        first, last, num, total = self._cuts or (0, 0, 0, 0.0)
        if num >= self.thresholds["steps"]:
            moved, cut = self._moves.total / max(self._moves.num, 1), math.exp(total / num)
            moves, limit = moved > self.thresholds["moved"], self.thresholds["ratio"]
            what = "the norm of the gradients before the clip is far above max_norm in nearly every step"
            what, severity = what + "; the weights move all the same" * moves, Severity(int(not moves))
            one = self.finding(self._lane, last, what, "times max_norm", cut, limit, severity, first)
            yield one._replace(ranks=(), detail=f"an update moves the weights by {number(moved)} of their norm")
