"""Lists the modules of a root (a model under hooks) for the manifest, and warns of modules whose calls no hook sees.

The list has facts that rows lack: parameters with two names, buffers that a state dict leaves out, and hooks of the
program that run after a value was recorded. The recorder sees an output as the module's forward returned it, before
other hooks run. The hooks of tensor parallel styles turn a DTensor into a plain tensor, which has lost its position in
the global tensor. A change that the program's own hooks make to a value is seen only at the next module. So a reader
who searches for the origin of a value must know of these hooks.

Nothing here keeps the model alive, reads a tensor's values, or calls a hook of the program.
"""

from __future__ import annotations

import functools
import itertools
import types
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ...format.manifest import FACTS
from ...observe import tree
from ...observe.clock import RootClock
from ...sites import SITES, full_name
from ...system.text import listed
from ...taps.instrument import has_scripted_tap
from ...taps.module_taps import Where
from ..local_values import is_dtensor
from ..parallel.marks import main_parameter
from .callbacks import CaptureForHooks
from .module import HookedModule
from .module_hooks import AfterForward
from .parameter_rows import FsdpParameter

_KEPT = (
    *FACTS, "has_many_labels", "has_uneven_calls", "whole_sets", "disarmed", "foreign_hooks", "unfrozen",
    "feeds_trained", "labels_of",
)  # fmt: skip
"""The members of a module's entry that stay when the hooks of a model are put on anew."""
_BETWEEN_VALIDATIONS = 8
"""The fewest updates before a validation."""
_MOST_SETS = 16
_OFTEN_GIVEN = 16
"""The fewest calls in a row with one of a few tensors as first argument after which the manifest says so."""
_RATES = ("dropout", "drop_prob", "dropout_p", "attention_dropout", "attn_dropout")
"""The attributes in which a module keeps the rate of a dropout that the module applies itself."""
_OTHERS = "parameters, gradients and optimizer state are"
_HIDDEN = {
    "compiled": "values inside compiled modules are not recorded ({}); " + _OTHERS + ". RECORDER_COMPILED=tap, or "
    "recorder.instrument(model) before the first call, puts taps into the compiled graph",
    "late": "attached after compilation, so no hook runs inside ({}); attach first, with RECORDER_COMPILED=tap, or "
    "call torch.compiler.reset()",
    "scripted": "values inside scripted modules are not recorded ({}); " + _OTHERS + ". recorder.instrument(model) "
    "before torch.jit.script or trace puts taps into the scripted code",
    "root_not_called": "its modules ran, but no hook saw its own call ({}): call the model, not .forward(); if "
    "torch.fx traced the model, attach the result of the trace",
}
"""The warnings about modules whose calls no hook observes. Each warning is logged once."""


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


class Inventory:
    """The modules of a root (a model under hooks), and what later steps and compiled graphs show of them."""

    def __init__(
        self,
        capture: CaptureForHooks,
        root_name: str,
        hooked: Sequence[HookedModule],
        hooked_by_tap: Mapping[str, HookedModule],
        module_at: Callable[[str], HookedModule | None],
        *,
        began_late: bool,
    ) -> None:
        """Begin empty. `describe` fills the inventory, and the root fills `hooked` and `hooked_by_tap`.

        `began_late` is True if anything, perhaps this root, had been compiled when the root got its hooks.
        """
        self._capture, self._root_name = capture, root_name
        self._hooked, self._hooked_by_tap, self._module_at = hooked, hooked_by_tap, module_at
        self._began_late = began_late
        self._modules: list[dict[str, Any]] = []
        """The manifest's entry of each module. Sites that only taps (points in a graph) record are not in it."""
        self._seen_at_taps: dict[str, tuple[str, ...]] = {}
        """By path of a module whose hooks had not run, the sites (such as `output`) that taps in graphs recorded."""
        self._scripted_with_taps: list[str] = []
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
        self._late: list[str] = []
        """The paths of modules that were compiled before they had hooks."""

    @property
    def paths(self) -> list[str]:
        return [described["path"] for described in self._modules]

    def describe(self, nodes: Sequence[tree.Node], flats: Sequence[FsdpParameter]) -> None:
        ties = find_ties(self._hooked, flats)
        self._modules = [
            self._of_module(node, hooked, ties, flats) for node, hooked in zip(nodes, self._hooked, strict=True)
        ]
        own = {id(parameter) for hooked in self._hooked for _, parameter in hooked.own("_parameters")}
        seen = {id(one) for node in nodes for one in (node.owner, node.module)}
        found = [(i, unregistered(node.owner, own, seen)) for i, node in enumerate(nodes)]
        self._unregistered = {i: parameters for i, parameters in found if parameters}

    def go_on_from(self, before: Inventory) -> None:
        """Take over what was seen of the modules, by path, before the hooks were put on anew."""
        self.is_validated_in_training = before.is_validated_in_training
        known = {described["path"]: described for described in before.described}
        for i, described in enumerate(self._modules):
            seen = known.get(described["path"], {})
            if kept := {name: seen[name] for name in _KEPT if name in seen}:
                self._add(i, kept)

    def say_hidden(self, nodes: Sequence[tree.Node], compiled: list[str], late: list[str]) -> None:
        """Warn of modules whose calls no hook will observe.

        `compiled` are paths of compiled modules; `late` are paths of modules that were compiled before they had hooks.
        """
        untapped: list[str] = []
        self._late = late
        # For a module with taps, only the first step shows whether the taps are in the graph.
        self._say("late", [path for path in late if not self._is_tapped_below(path)])
        scripted = {node.path: node.owner for node in nodes if node.hidden == "scripted"}
        for path in list(scripted):
            if not any(path != above and _is_below(path, above) for above in scripted):
                (self._scripted_with_taps if has_scripted_tap(scripted[path]) else untapped).append(path)
        self._say("scripted", untapped)
        self._say_compiled([path for path in compiled if path not in late])

    @property
    def described(self) -> list[dict[str, Any]]:
        """Return the manifest's entry of each module, with sites that only taps record. Called on any thread."""
        tapped = dict(self._seen_at_taps)
        if not tapped:
            return self._modules
        for where, hooked in list(self._hooked_by_tap.items()):
            if not hooked.has_entered:
                site = Where.from_text(where).site
                tapped[hooked.node_path] = tuple(dict.fromkeys((*tapped.get(hooked.node_path, ()), site)))
        for described in self._modules:
            path = described["path"]
            if described.get("hidden") == "scripted" and any(_is_below(path, up) for up in self._scripted_with_taps):
                tapped.setdefault(path, ("output",))
        return [
            {**described, "tapped": list(tapped[described["path"]])} if described["path"] in tapped else described
            for described in self._modules
        ]

    def add_seen_at_tap(self, where: Where, path: str) -> None:
        """List a module whose values a tap in a graph records. The model may have no such module, or a container."""
        hooked = self._module_at(path)
        if hooked is None or not hooked.has_entered:
            known_sites = self._seen_at_taps.get(path, ())
            self._seen_at_taps[path] = tuple(dict.fromkeys((*known_sites, where.site)))
        for i, described in enumerate(self._modules):
            if described["path"] == path:
                if where.site not in described["sites"] or "hidden" in described:
                    self._modules[i] = {**described, **self._of_tap(where)}
                return
        fresh = {"path": path, "aliases": [], "params": [], "buffers": [], "compiled": False, **self._of_tap(where)}
        self._modules = [*self._modules, fresh]

    def _of_tap(self, where: Where) -> dict[str, Any]:
        rule_sets = self._capture.selection.rule_sets(where.path, where.cls, where.leaf)
        sites = [site for site in SITES if rule_sets[site]]
        return {"class": where.cls, "source": where.source or None, "sites": sites}

    def _say_compiled(self, paths: list[str]) -> None:
        self._say("compiled", [path for path in paths if not self._is_tapped_below(path)])

    def _say(self, why: str, paths: list[str]) -> None:
        if paths:
            paths = [p for p in paths if not any(q != p and _is_below(p, q) for q in paths)]
            shown = listed((repr(path) if path else "the whole model" for path in paths), 3)
            self._capture.events.add(why, f"{self._root_name}: {_HIDDEN[why].format(shown)}", key=self._root_name)

    def _is_tapped_below(self, path: str) -> bool:
        return any(
            hooked.node_path == path or _is_below(hooked.node_path, path) for hooked in self._hooked_by_tap.values()
        )

    def step_is_over(self, *, num_calls: int, is_artefact: bool, has_compiled: bool) -> None:
        """Warn, after the first step, of modules whose hooks never fired, and say why.

        If anything was compiled but no part of this model is marked as compiled, then a module with gradients whose
        hooks never fired has run in the graph of a user's function. If a root never ran although its modules did, the
        program does not call the root.
        """
        self.look_for_foreign_hooks()
        seen = [hooked.node_path for hooked in self._hooked if hooked.was_called]
        self._say("late", [path for path in self._late if not any(_is_below(called, path) for called in seen)])
        silent = self._silent(num_calls)
        if has_compiled and silent and not any(described["compiled"] for described in self._modules):
            why = {"hidden": "late"} if self._began_late and not self._seen_at_taps else {}
            for i, described in enumerate(self._modules):
                if described["path"] in silent:
                    self._modules[i] = {**described, "compiled": True, **why}
            if why:
                self._say("late", sorted(silent))
            elif not self._seen_at_taps:  # a user who has tapped a part of a compiled model has chosen what to record
                self._say_compiled(sorted(silent))
        elif seen and "" not in seen and not (num_calls or is_artefact or self._seen_at_taps):
            self._say("root_not_called", [""])

    def look_for_foreign_hooks(self) -> None:
        """List the hooks that the program has put on modules since the last call. Removed hooks stay listed."""
        for i, (described, hooked) in enumerate(zip(self._modules, self._hooked, strict=False)):
            known = described.get("foreign_hooks", [])
            module = hooked.module()
            more = [hook for hook in foreign_hooks(module) if hook not in known] if module is not None else []
            if more:
                self._add(i, {"foreign_hooks": [*known, *more]})

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
        for i, hooked in enumerate(self._hooked[: len(self._modules)]):
            described, module = self._modules[i], hooked.module()
            trains_any |= module is not None and module.training
            is_new = is_trained and module is not None and not module.training and "evaluated" not in described
            if is_new and depends_on_mode(module) and self._is_trained_around(described["path"]):
                self._add(i, {"evaluated": step})
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
                self._add(i, {"graphless": is_graphless})
            if hooked.time_and_batch is not None and "batch_as_time" not in described:
                self._look_at_batch(i, hooked.time_and_batch, step)
        if self._hooked:
            given = self._hooked[0].root.given
            since = given.since if given.times >= _OFTEN_GIVEN else None
            if since != self._modules[0].get("given_again"):
                self._add(0, {"given_again": since})
        if not is_trained or trains_any:
            self._evaluated_since = None
        elif self._evaluated_since is None:  # a validation between a backward and its update, perhaps
            self._evaluated_since = step
        elif self._modules and "evaluated" not in self._modules[0]:
            self._add(0, {"evaluated": self._evaluated_since})
        for i, described in enumerate(self._modules[: len(self._hooked)]):
            if (names := frozen.get(i, [])) != described.get("frozen", []):
                unfrozen = {"unfrozen": step} if set(described.get("frozen", [])) - set(names) else {}
                self._add(i, {"frozen": names, **unfrozen})
        trains_others = num_trained > 0 or not trained or not optimized.fed <= own
        # Optimizers may have copies of the parameters, as those of mixed precision do. A model without an optimizer may
        # only pass gradients on, as that of a perceptual loss does. But if it is called before a model that two
        # optimizers have, one of them was to have it, unless the program changes its parameters, as of a mean.
        # A model of an earlier training still has gradients, and no optimizer any more.
        feeds_trained &= is_trained and not any("rates" in described for described in self._modules)
        is_forgotten = (is_before_common or feeds_trained) and self._are_unchanged()
        may_be_so = optimized.has_copies or not (num_trained or optimized.unstepped & own or is_forgotten)
        if trains_others and may_be_so and sum(map(len, untrained.values())) >= num_trained:
            return
        for i, (described, hooked) in enumerate(zip(self._modules, self._hooked, strict=False)):
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
                self._add(i, {"untrained": names, "untrained_since": self._suspects.get(i, step), **feeds})

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
                self._add(number, {"batch_as_time": step})
            self._taken_for_time.add(number)

    def _parameters_of(self, number: int, hooked: HookedModule) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters of a module by name, and those of modules that it has in a list or dict of Python."""
        yield from hooked.own("_parameters")
        for name, reference in self._unregistered.get(number, {}).items():
            if (parameter := reference()) is not None:
                yield name, parameter

    def note_rates(self, rates: Mapping[int, str]) -> None:
        """Note the name of each parameter's learning rate. `rates` has it by id of the parameter or of its copy."""
        for i, hooked in enumerate(self._hooked[: len(self._modules)]):
            own = {
                name: rate
                for name, parameter in hooked.own("_parameters")
                if (rate := rates.get(id(parameter)) or rates.get(id(main_parameter(parameter))))
            }
            if own and own != self._modules[i].get("rates"):
                self._add(i, {"rates": own})

    def note_unstepped(self, step: int) -> None:
        """Note the parameters that optimizers have, of which none has stepped at the end of `step`."""
        for i, (described, hooked) in enumerate(zip(self._modules, self._hooked, strict=False)):
            rates = described.get("rates", {})
            names = [name for name, one in hooked.own("_parameters") if one.requires_grad and name in rates]
            if names:
                self._suspects.setdefault(i, step)
                self._add(i, {"untrained": names, "untrained_since": step})

    def note_loss_argument(self, argument: str, step: int) -> None:
        """Note which function of a loss got, at `step`, an argument that it does not expect."""
        if self._modules and self._modules[0].get("loss_argument", "Shift").startswith("Shift"):  # that may be meant
            self._add(0, {"loss_argument": argument, "loss_argument_since": step})

    def note_many_labels(self) -> None:
        """Note that a loss is the sum of losses of several labels."""
        if self._modules and "has_many_labels" not in self._modules[0]:
            self._add(0, {"has_many_labels": True})

    def note_labels_of(self, function: str) -> None:
        """Note which function of a loss has the labels. It is empty once it was another one."""
        known = self._modules[0].get("labels_of") if self._modules else ""
        labels_of = function if known in (None, function) else ""
        if labels_of != known:
            self._add(0, {"labels_of": labels_of})

    def note_whole_sets(self, numbers: list[int]) -> None:
        """Note the numbers of samples of the data loaders that give all their samples in one batch."""
        if self._modules:
            self._add(0, {"whole_sets": numbers[:_MOST_SETS]})

    def note_uneven_calls(self) -> None:
        """Note that the number of calls of the model before a backward varies, as the length of an episode."""
        if self._modules and "has_uneven_calls" not in self._modules[0]:
            self._add(0, {"has_uneven_calls": True})

    def note_anew(self, class_name: str, step: int | None) -> None:
        """Note the step since which optimizers of a class are made anew for each update. None: they are not."""
        if self._modules:
            self._add(0, {"optimizer_anew": class_name, "optimizer_anew_since": step})

    def look_at_validation(self, clock: RootClock) -> None:
        """Note that the model is in training mode while it is called as if for a validation, if the mode matters.

        A training that computes targets or scores without gradients does so before nearly each update.
        """
        if self.is_validated_in_training:
            if clock.has_evaluated:
                self.is_validated_in_training = False
                self._add(0, {"validated_in_training": None})
        elif clock.num_updates_before >= _BETWEEN_VALIDATIONS and not clock.has_evaluated:
            modules = (one.module() for one in self._hooked)
            if any(module is not None and module.training and depends_on_mode(module) for module in modules):
                self.is_validated_in_training = True
                self._add(0, {"validated_in_training": self._capture.clock.step})

    def note_uncleared(self, parameter: torch.Tensor | None, step: int, with_copies: bool) -> None:
        """Note that a gradient was not cleared between an update and the next backward, at `step` or earlier.

        With `with_copies`, `parameter` may be the copy that an optimizer has of a module's parameter.
        """
        for i, hooked in enumerate(self._hooked[: len(self._modules)]):
            parameters = [one for _, one in hooked.own("_parameters")]
            own = parameters + [main_parameter(one) for one in parameters if with_copies]
            if any(one is parameter for one in own) and "uncleared" not in self._modules[i]:
                self._add(i, {"uncleared": step})

    def _is_trained_around(self, path: str) -> bool:
        """Whether a module's parent has a parameter with a gradient. A frozen part of a model may be in any mode."""
        around = self._module_at(path.rpartition(".")[0])
        module = around.module() if around is not None else None
        return module is not None and any(parameter.grad is not None for parameter in module.parameters())

    def _add(self, number: int, members: Mapping[str, Any]) -> None:
        self._modules[number] = {**self._modules[number], **members}  # the writer thread may be reading the old dict
        self._capture.events.has_changed = True

    def _silent(self, num_calls: int) -> set[str]:
        """Return the paths of modules that must have run although their hooks never fired, for no known reason."""
        explained = {described["path"] for described in self._modules if "hidden" in described}
        explained |= {hooked.node_path for hooked in self._hooked_by_tap.values()} if self._seen_at_taps else set()
        silent = [hooked for hooked in self._hooked if hooked.is_silent and hooked.node_path not in explained]
        if any(hooked.was_called for hooked in self._hooked):
            grads = {w.node_path: [p.grad is not None for _, p in w.own("_parameters")] for w in silent}
            silent = [hooked for hooked in silent if any(grads[hooked.node_path]) or not grads[hooked.node_path]]
            is_in_graph = num_calls == 0 and bool(self._seen_at_taps)
            if not is_in_graph and not any(map(any, grads.values())):
                return set()
        return {hooked.node_path for hooked in silent}

    def reselect(self) -> None:
        """Update the listed sites of modules to the present rules. A site that was selected once stays listed."""
        for i, (described, hooked) in enumerate(zip(self._modules, self._hooked, strict=False)):
            sites = [site for site, rule_set in hooked.rule_sets.items() if rule_set or site in described["sites"]]
            if sites != described["sites"]:  # a new dict, because the writer thread may be reading the old one
                self._modules[i] = {**described, "sites": sites}

    def disarm(self, path: str, sites: tuple[str, ...], step: int) -> None:
        """Note that some sites of one module are not recorded from a step on."""
        for i, described in enumerate(self._modules):
            if described["path"] == path:  # a new dict, because the writer thread may be reading the old one
                disarmed = {**described.get("disarmed", {}), **dict.fromkeys(sites, step)}
                self._modules[i] = {**described, "disarmed": disarmed}

    def disarm_all(self, step: int) -> None:
        """Note that no module is recorded from a step on."""
        self._modules = [{**described, "disarmed": dict.fromkeys(SITES, step)} for described in self._modules]

    def close(self) -> None:
        """Keep the facts that hooks and taps have found, before the hooks and taps are removed."""
        self._modules = self.described
        self._seen_at_taps.clear()

    def _of_module(
        self, node: tree.Node, hooked: HookedModule, ties: Ties, flats: Sequence[FsdpParameter]
    ) -> dict[str, Any]:
        flat_ids = ids_of(flats)
        flat_names = [name for flat in flats for owner, name in flat.names if owner is hooked]
        return {
            "path": node.path,
            "class": node.class_name,
            "source": tree.source_line(node.owner),
            "aliases": node.aliases,
            "sites": [site for site, rule_set in hooked.rule_sets.items() if rule_set],
            "params": flat_names + [name for name, value in hooked.own("_parameters") if id(value) not in flat_ids],
            "buffers": [name for name, _ in hooked.own("_buffers")],
            **about_state(node.owner, ties.get(node.path)),
            **({"dtensor": True} if any(is_dtensor(value) for _, value in hooked.own("_parameters")) else {}),
            "compiled": node.is_compiled,
            **({"foreign_hooks": foreign} if (foreign := foreign_hooks(node.module)) else {}),
            **({"hidden": hidden} if (hidden := "late" if node.path in self._late else node.hidden) else {}),
        }


def unregistered(module: nn.Module, known: Container[int], seen: set[int]) -> dict[str, weakref.ref[torch.Tensor]]:
    """Return the parameters of modules that a module has in lists or dicts of Python, as ``blocks[0].weight``.

    Such a list may name parts of the model once more: `known` are the ids of the parameters of the whole model. `seen`
    are the ids of the modules that need no search, as those of the model. The modules that are searched are added.
    """
    found: dict[str, weakref.ref[torch.Tensor]] = {}
    for name, value in list(vars(module).items()):
        if type(value) not in _OF_PYTHON or name in _OF_TORCH:
            continue
        held = value.items() if isinstance(value, dict) else enumerate(value)
        for key, one in list(itertools.islice(held, _MAX_HELD)):
            if not isinstance(one, nn.Module) or id(one) in seen:
                continue
            seen.add(id(one))
            for path, parameter in nn.Module.named_parameters(one):
                if id(parameter) not in known:
                    found[f"{name}[{key!r}].{path}"] = weakref.ref(parameter)
    return found


_OF_PYTHON = (list, tuple, dict)
_OF_TORCH = frozenset(vars(nn.Module()))
"""The attributes that every module has, such as `_modules`."""
_MAX_HELD = 1_000
"""How many elements of a list of Python are searched for modules."""


def depends_on_mode(module: nn.Module | None) -> bool:
    """Whether a module computes something else in evaluation mode than in training: a dropout, or a batch norm.

    So does a module with a rate of dropout of its own, such as `MultiheadAttention`, `LSTM` and `DropPath`. A module
    with frozen parameters is left out, because its statistics are frozen on purpose, too.
    """
    rates = [vars(module).get(name) for name in (*_RATES, "p" if "Drop" in type(module).__name__ else "")]
    depends = any(isinstance(rate, (int, float)) and rate is not True and 0 < rate <= 1 for rate in rates)
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        depends = module.running_mean is not None
    own = list(module.parameters()) if depends and module is not None else []
    return depends and (not own or any(parameter.requires_grad for parameter in own))


def _is_below(path: str, above: str) -> bool:
    return above == "" or path.startswith(above + ".")


def ids_of(flats: Iterable[FsdpParameter]) -> set[int]:
    """Return the ids of flat parameters and of the original parameters inside them."""
    references = [reference for flat in flats for reference in (flat.reference, *(o.reference for o in flat.originals))]
    return {id(parameter) for reference in references if (parameter := reference()) is not None}


Ties = dict[str, dict[str, str]]
"""Maps module path and name of a tied parameter to the full name under which the parameter is recorded."""


def find_ties(modules: Iterable[HookedModule], flats: Iterable[FsdpParameter]) -> Ties:
    """Return the further names of tied parameters. Each maps to the parameter's first name, which the rows use."""
    ties: Ties = {}
    first_names: dict[int, str] = {}
    for hooked in modules:
        for name, parameter in hooked.own("_parameters"):
            full = full_name(hooked.node_path, name)
            first = first_names.setdefault(id(parameter), full)
            if first != full:
                ties.setdefault(hooked.node_path, {})[name] = first
    for flat in flats:
        for hooked, name, first_watch, first_name in flat.ties:
            ties.setdefault(hooked.node_path, {})[name] = full_name(first_watch.node_path, first_name)
    return ties


def about_state(module: nn.Module, tied: Mapping[str, str] | None) -> dict[str, Any]:
    """Return a module's manifest entries about its state dict: tied parameters, and buffers that are not saved."""
    unsaved = getattr(module, "_non_persistent_buffers_set", ())  # TorchScript and torch.package may lack this set
    left_out = sorted(name for name in unsaved if name in module._buffers)
    return {**({"tied": dict(tied)} if tied else {}), **({"non_persistent": left_out} if left_out else {})}


_KNOWN = ("torch", "torchao", "torch_xla", "contextlib", __name__.partition(".")[0])
"""The packages whose hooks are not the program's. `contextlib` is here for the recorder's own disabled hooks."""


def foreign_hooks(module: nn.Module) -> list[str]:
    """Describe each hook of the program on a module: when the hook runs, its name, and its code's file and line."""
    if isinstance(module, torch.jit.ScriptModule):
        return []  # TorchScript modules have TorchScript's hooks and no Python hooks
    after = list(module._forward_hooks.values())
    ours = [i for i, hook in enumerate(after) if isinstance(hook, AfterForward)]
    after = after[ours[0] + 1 :] if ours else after
    backward = [*module._backward_pre_hooks.values(), *module._backward_hooks.values()]
    return [*_descriptions("forward", after), *_descriptions("backward", backward)]


def _descriptions(when: str, registered: list[Any]) -> Iterator[str]:
    for hook in registered:
        function = _function(hook)
        home = str(getattr(function, "__module__", None) or type(function).__module__)
        if home.partition(".")[0] in _KNOWN:
            continue
        code = getattr(function, "__code__", None)
        source = f" {code.co_filename}:{code.co_firstlineno}" if code is not None else ""
        yield f"{when} {getattr(function, '__qualname__', type(function).__qualname__)}{source}"


def _function(hook: Any) -> Any:
    """Return the function inside a hook, which may be a partial, a method, or an object with a ``__call__``."""
    while isinstance(hook, (functools.partial, types.MethodType)):
        hook = hook.func if isinstance(hook, functools.partial) else hook.__func__
    if isinstance(hook, (types.FunctionType, types.BuiltinFunctionType)):
        return hook
    return type(hook).__call__
