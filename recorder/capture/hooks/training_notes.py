"""What a training shows of a model's modules at its updates, for the manifest: modes, gradients, and who is trained.

Called on training threads. Nothing here keeps the model alive, or reads a tensor's values.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...observe import tree
from ...observe.clock import RootClock
from ..parallel.marks import main_parameter
from .inventory import Inventory
from .module import HookedModule
from .module_facts import depends_on_mode, unregistered

_BETWEEN_VALIDATIONS = 8
"""The fewest updates before a validation."""
_OFTEN_GIVEN = 16
"""The fewest calls in a row with one of a few tensors as first argument after which the manifest says so."""


class Optimized(NamedTuple):
    """What the optimizers of the process have: the ids of parameters."""

    trained: set[int]
    """The parameters of optimizers that step."""
    fed: set[int]
    """The parameters of optimizers that step with gradients."""
    unstepped: set[int]
    """The parameters that only optimizers have which have never stepped with a gradient."""
    has_copies: bool
    """Whether an optimizer steps with gradients of a tensor that is no parameter of a recorded model, as a copy is."""


class TrainingNotes:
    """Notes in a root's inventory what updates, losses and calls of the model show of its modules."""

    def __init__(
        self, inventory: Inventory, hooked: Sequence[HookedModule], module_at: Callable[[str], HookedModule | None],
        nodes: Sequence[tree.Node],
    ) -> None:  # fmt: skip
        self._inventory, self._hooked, self._module_at = inventory, hooked, module_at
        self._suspects: dict[int, int] = {}
        """By number of a module, the first step at which a parameter of it had a gradient and no optimizer. The program
        may yet make the optimizer, so the manifest says so from the second look on."""
        self._versions: int | None = None
        """The sum of the version counters of all trainable parameters at the last call of `_are_unchanged`."""
        self._taken_for_time: set[int] = set()
        """The numbers of the modules that were seen once to take the batch for the time."""
        self.is_validated_in_training = False
        """Whether the manifest says that the model was called as if for a validation while in training mode."""
        self._evaluated_since: int | None = None
        """The first of the last looks at which the whole model was in evaluation mode; None if it was not."""
        self._unregistered: dict[int, dict[str, weakref.ref[torch.Tensor]]] = {}
        """By number of a module, the parameters of modules that it has in a list or dict of Python, by name."""
        own = {id(parameter) for one in hooked for _, parameter in one.own("_parameters")}
        seen = {id(one) for node in nodes for one in (node.owner, node.module)}
        for i, node in enumerate(nodes):
            if parameters := unregistered(node.owner, own, seen):
                self._unregistered[i] = parameters

    def look_at_update(
        self, optimized: Optimized, step: int, is_trained: bool, is_before_common: bool, feeds_trained: bool
    ) -> None:
        """Note, before an update, parameters that have a gradient but no optimizer, and modules in evaluation mode.

        Args:
            optimized: the parameters that optimizers have.
            step: the step that the update ends.
            is_trained: whether the model is trained in this step, so that the mode of its modules counts.
            is_before_common: whether a model of which two optimizers have parameters was called after this one.
            feeds_trained: whether no optimizer has this model, and has one that was called after this one.
        """
        trained = optimized.trained
        # A frozen model may be in evaluation mode, also inside of a model that is trained.
        of_root = (one for hooked in self._hooked for _, one in hooked.own("_parameters"))
        is_trained = is_trained and any(one.requires_grad for one in of_root)
        untrained: dict[int, list[str]] = {}
        frozen: dict[int, list[str]] = {}
        num_trained, trains_any, own = 0, False, set[int]()
        for i, hooked in enumerate(self._hooked[: len(self._inventory.entries)]):
            described, module = self._inventory.entries[i], hooked.module()
            trains_any |= module is not None and module.training
            is_new = is_trained and module is not None and not module.training and "evaluated" not in described
            if is_new and depends_on_mode(module) and self._is_trained_around(described["path"]):
                self._inventory.add(i, {"evaluated": step})
            for name, parameter in self._parameters_of(i, hooked):
                own.add(id(parameter))
                if not parameter.requires_grad and name in described["params"]:
                    frozen.setdefault(i, []).append(name)
                if not parameter.is_leaf or not parameter.requires_grad or parameter.grad is None:
                    continue
                if id(parameter) in trained:
                    num_trained += 1
                else:
                    untrained.setdefault(i, []).append(name)
            if (is_graphless := hooked.has_entered and not hooked.has_graph) != described.get("graphless", False):
                self._inventory.add(i, {"graphless": is_graphless})
            if hooked.time_and_batch is not None and "batch_as_time" not in described:
                self._look_at_batch(i, hooked.time_and_batch, step)
        if self._hooked:
            given = self._hooked[0].root.given
            since = given.since if given.times >= _OFTEN_GIVEN else None
            if since != self._inventory.entries[0].get("given_again"):
                self.note(given_again=since)
        if not is_trained or trains_any:
            self._evaluated_since = None
        elif self._evaluated_since is None:  # a validation between a backward and its update, perhaps
            self._evaluated_since = step
        elif self._inventory.entries and "evaluated" not in self._inventory.entries[0]:
            self.note(evaluated=self._evaluated_since)
        for i, described in enumerate(self._inventory.entries[: len(self._hooked)]):
            if (names := frozen.get(i, [])) != described.get("frozen", []):
                unfrozen = {"unfrozen": step} if set(described.get("frozen", [])) - set(names) else {}
                self._inventory.add(i, {"frozen": names, **unfrozen})
        trains_others = num_trained > 0 or not trained or not optimized.fed <= own
        # Optimizers may have copies of the parameters, as those of mixed precision do. A model without an optimizer may
        # only pass gradients on, as that of a perceptual loss does. But if it is called before a model that two
        # optimizers have, one of them was to have it, unless the program changes its parameters, as of a mean.
        # A model of an earlier training still has gradients, and no optimizer any more.
        feeds_trained &= is_trained and not any("rates" in described for described in self._inventory.entries)
        is_forgotten = (is_before_common or feeds_trained) and self._are_unchanged()
        may_be_so = optimized.has_copies or not (num_trained or optimized.unstepped & own or is_forgotten)
        if trains_others and may_be_so and sum(map(len, untrained.values())) >= num_trained:
            return
        for i, (described, hooked) in enumerate(zip(self._inventory.entries, self._hooked, strict=False)):
            names = untrained.get(i, described.get("untrained", []))
            if not names:
                continue
            parameters = dict(self._parameters_of(i, hooked))  # the program may have made an optimizer for them later
            if all(name in parameters and id(parameters[name]) in trained for name in names):
                self._suspects.pop(i, None)
                names = []
            elif i not in self._suspects:
                self._suspects[i] = step
                continue
            if names != described.get("untrained", []):
                feeds = {"feeds_trained": feeds_trained and not is_before_common}
                self._inventory.add(i, {"untrained": names, "untrained_since": self._suspects.get(i, step), **feeds})

    def _are_unchanged(self) -> bool:
        """Return whether nothing has changed the parameters since the last call. The first call returns True."""
        trainable = (one for hooked in self._hooked for _, one in hooked.own("_parameters") if one.requires_grad)
        before, self._versions = self._versions, sum(one._version for one in trainable)
        return before in (None, self._versions)

    def _look_at_batch(self, number: int, time_and_batch: tuple[int, int], step: int) -> None:
        """Note a module that takes the batch for the time: what it takes for the time is as long as the labels.

        Labels of each sample and time have both lengths in their shape, in an order that nobody knows. By chance, the
        time may be as long as the batch. Lengths that only one look has seen therefore do not count.
        """
        time, batch = time_and_batch
        known_at, shape = self._hooked[0].labels_shape
        if known_at == step and shape[:1] == (time,) and batch not in (1, time, *shape[1:2]):
            if number in self._taken_for_time:
                self._inventory.add(number, {"batch_as_time": step})
            self._taken_for_time.add(number)

    def _parameters_of(self, number: int, hooked: HookedModule) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters of a module by name, and those of modules that it has in a list or dict of Python."""
        yield from hooked.own("_parameters")
        for name, reference in self._unregistered.get(number, {}).items():
            if (parameter := reference()) is not None:
                yield name, parameter

    def note_rates(self, rates: Mapping[int, str]) -> None:
        """Note the name of each parameter's learning rate. `rates` has it by id of the parameter or of its copy."""
        for i, hooked in enumerate(self._hooked[: len(self._inventory.entries)]):
            own = {
                name: rate
                for name, parameter in hooked.own("_parameters")
                if (rate := rates.get(id(parameter)) or rates.get(id(main_parameter(parameter))))
            }
            if own and own != self._inventory.entries[i].get("rates"):
                self._inventory.add(i, {"rates": own})

    def note_unstepped(self, step: int) -> None:
        """Note the parameters that optimizers have, of which none has stepped at the end of `step`."""
        for i, (described, hooked) in enumerate(zip(self._inventory.entries, self._hooked, strict=False)):
            rates = described.get("rates", {})
            names = [name for name, one in hooked.own("_parameters") if one.requires_grad and name in rates]
            if names:
                self._suspects.setdefault(i, step)
                self._inventory.add(i, {"untrained": names, "untrained_since": step})

    @property
    def _of_model(self) -> Mapping[str, Any]:
        return self._inventory.entries[0] if self._inventory.entries else {}

    def note(self, **members: Any) -> None:
        """Note facts about the whole model, in the entry of its outermost module."""
        if self._inventory.entries:
            self._inventory.add(0, members)

    def note_once(self, fact: str) -> None:
        """Note a fact about the whole model that is true from now on."""
        if fact not in self._of_model:
            self.note(**{fact: True})

    def note_loss_argument(self, argument: str, step: int) -> None:
        """Note which function of a loss got, at `step`, an argument that it does not expect."""
        if self._of_model.get("loss_argument", "Shift").startswith("Shift"):  # a shift may be meant
            self.note(loss_argument=argument, loss_argument_since=step)

    def note_labels_of(self, function: str) -> None:
        """Note which function of a loss has the labels. It is empty once it was another one."""
        known = self._of_model.get("labels_of")
        labels_of = function if known in (None, function) else ""
        if labels_of != known:
            self.note(labels_of=labels_of)

    def look_at_validation(self, clock: RootClock, step: int) -> None:
        """Note that the model is in training mode while it is called as if for a validation, if the mode matters.

        A training that computes targets or scores without gradients does so before nearly each update.
        """
        if self.is_validated_in_training:
            if clock.has_evaluated:
                self.is_validated_in_training = False
                self.note(validated_in_training=None)
        elif clock.num_updates_before >= _BETWEEN_VALIDATIONS and not clock.has_evaluated:
            modules = (one.module() for one in self._hooked)
            if any(module is not None and module.training and depends_on_mode(module) for module in modules):
                self.is_validated_in_training = True
                self.note(validated_in_training=step)

    def note_uncleared(self, parameter: torch.Tensor | None, step: int, with_copies: bool) -> None:
        """Note that a gradient was not cleared between an update and the next backward, at `step` or earlier.

        With `with_copies`, `parameter` may be the copy that an optimizer has of a module's parameter.
        """
        for i, hooked in enumerate(self._hooked[: len(self._inventory.entries)]):
            parameters = [one for _, one in hooked.own("_parameters")]
            own = parameters + [main_parameter(one) for one in parameters if with_copies]
            if any(one is parameter for one in own) and "uncleared" not in self._inventory.entries[i]:
                self._inventory.add(i, {"uncleared": step})

    def _is_trained_around(self, path: str) -> bool:
        """Whether a module's parent has a parameter with a gradient. A frozen part of a model may be in any mode."""
        around = self._module_at(path.rpartition(".")[0])
        module = around.module() if around is not None else None
        return module is not None and any(parameter.grad is not None for parameter in module.parameters())
