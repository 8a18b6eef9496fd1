"""Lists the modules of a root (a model under hooks) for the manifest, and warns of modules whose calls no hook sees.

The list has facts that rows lack: parameters with two names, buffers that a state dict leaves out, and hooks of the
program that run after a value was recorded. The recorder sees an output as the module's forward returned it, before
other hooks run. The hooks of tensor parallel styles turn a DTensor into a plain tensor, which has lost its position in
the global tensor. A change that the program's own hooks make to a value is seen only at the next module. So a reader
who searches for the origin of a value must know of these hooks.

Nothing here keeps the model alive, reads a tensor's values, or calls a hook of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...format.manifest import FACTS
from ...observe import tree
from ...sites import SITES
from ...system.text import listed
from ...taps.instrument import has_scripted_tap
from ...taps.module_taps import Where
from ..local_values import is_dtensor
from .callbacks import CaptureForHooks
from .module import HookedModule
from .module_facts import Ties, about_state, find_ties, foreign_hooks, ids_of
from .parameter_rows import FsdpParameter

_KEPT = (
    *FACTS, "has_many_labels", "has_uneven_calls", "whole_sets", "disarmed", "foreign_hooks", "unfrozen",
    "feeds_trained", "labels_of",
)  # fmt: skip
"""The members of a module's entry that stay when the hooks of a model are put on anew."""
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


class Inventory:
    """The modules of a root (a model under hooks), and what later steps and compiled graphs show of them."""

    def __init__(
        self, capture: CaptureForHooks, root_name: str, hooked: Sequence[HookedModule],
        hooked_by_tap: Mapping[str, HookedModule], module_at: Callable[[str], HookedModule | None], *, began_late: bool,
    ) -> None:  # fmt: skip
        """Begin empty. `describe` fills the inventory, and the root fills `hooked` and `hooked_by_tap`.

        `began_late` is True if anything, perhaps this root, had been compiled when the root got its hooks.
        """
        self._capture, self._root_name = capture, root_name
        self._hooked, self._hooked_by_tap, self._module_at = hooked, hooked_by_tap, module_at
        self._began_late = began_late
        self.entries: list[dict[str, Any]] = []
        """The manifest's entry of each module. Sites that only taps (points in a graph) record are not in it."""
        self._seen_at_taps: dict[str, tuple[str, ...]] = {}
        """By path of a module whose hooks had not run, the sites (such as `output`) that taps in graphs recorded."""
        self._scripted_with_taps: list[str] = []
        self._late: list[str] = []
        """The paths of modules that were compiled before they had hooks."""

    @property
    def paths(self) -> list[str]:
        return [described["path"] for described in self.entries]

    def describe(self, nodes: Sequence[tree.Node], flats: Sequence[FsdpParameter]) -> None:
        ties = find_ties(self._hooked, flats)
        self.entries = [
            self._of_module(node, hooked, ties, flats) for node, hooked in zip(nodes, self._hooked, strict=True)
        ]

    def go_on_from(self, before: Inventory) -> None:
        """Take over what was seen of the modules, by path, before the hooks were put on anew."""
        known = {described["path"]: described for described in before.described}
        for i, described in enumerate(self.entries):
            seen = known.get(described["path"], {})
            if kept := {name: seen[name] for name in _KEPT if name in seen}:
                self.add(i, kept)

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
            return self.entries
        for where, hooked in list(self._hooked_by_tap.items()):
            if not hooked.has_entered:
                site = Where.from_text(where).site
                tapped[hooked.node_path] = tuple(dict.fromkeys((*tapped.get(hooked.node_path, ()), site)))
        for described in self.entries:
            path = described["path"]
            if described.get("hidden") == "scripted" and any(_is_below(path, up) for up in self._scripted_with_taps):
                tapped.setdefault(path, ("output",))
        return [
            {**described, "tapped": list(tapped[described["path"]])} if described["path"] in tapped else described
            for described in self.entries
        ]

    def add_seen_at_tap(self, where: Where, path: str) -> None:
        """List a module whose values a tap in a graph records. The model may have no such module, or a container."""
        hooked = self._module_at(path)
        if hooked is None or not hooked.has_entered:
            known_sites = self._seen_at_taps.get(path, ())
            self._seen_at_taps[path] = tuple(dict.fromkeys((*known_sites, where.site)))
        for i, described in enumerate(self.entries):
            if described["path"] == path:
                if where.site not in described["sites"] or "hidden" in described:
                    self.entries[i] = {**described, **self._of_tap(where)}
                return
        fresh = {"path": path, "aliases": [], "params": [], "buffers": [], "compiled": False, **self._of_tap(where)}
        self.entries = [*self.entries, fresh]

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
        if has_compiled and silent and not any(described["compiled"] for described in self.entries):
            why = {"hidden": "late"} if self._began_late and not self._seen_at_taps else {}
            for i, described in enumerate(self.entries):
                if described["path"] in silent:
                    self.entries[i] = {**described, "compiled": True, **why}
            if why:
                self._say("late", sorted(silent))
            elif not self._seen_at_taps:  # a user who has tapped a part of a compiled model has chosen what to record
                self._say_compiled(sorted(silent))
        elif seen and "" not in seen and not (num_calls or is_artefact or self._seen_at_taps):
            self._say("root_not_called", [""])

    def look_for_foreign_hooks(self) -> None:
        """List the hooks that the program has put on modules since the last call. Removed hooks stay listed."""
        for i, (described, hooked) in enumerate(zip(self.entries, self._hooked, strict=False)):
            known = described.get("foreign_hooks", [])
            module = hooked.module()
            more = [hook for hook in foreign_hooks(module) if hook not in known] if module is not None else []
            if more:
                self.add(i, {"foreign_hooks": [*known, *more]})

    def add(self, number: int, members: Mapping[str, Any]) -> None:
        """Add members to the entry of the module with this number."""
        self.entries[number] = {**self.entries[number], **members}  # the writer thread may be reading the old dict
        self._capture.events.has_changed = True

    def _silent(self, num_calls: int) -> set[str]:
        """Return the paths of modules that must have run although their hooks never fired, for no known reason."""
        explained = {described["path"] for described in self.entries if "hidden" in described}
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
        for i, (described, hooked) in enumerate(zip(self.entries, self._hooked, strict=False)):
            sites = [site for site, rule_set in hooked.rule_sets.items() if rule_set or site in described["sites"]]
            if sites != described["sites"]:  # a new dict, because the writer thread may be reading the old one
                self.entries[i] = {**described, "sites": sites}

    def disarm(self, path: str, sites: tuple[str, ...], step: int) -> None:
        """Note that some sites of one module are not recorded from a step on."""
        for i, described in enumerate(self.entries):
            if described["path"] == path:  # a new dict, because the writer thread may be reading the old one
                disarmed = {**described.get("disarmed", {}), **dict.fromkeys(sites, step)}
                self.entries[i] = {**described, "disarmed": disarmed}

    def disarm_all(self, step: int) -> None:
        """Note that no module is recorded from a step on."""
        self.entries = [{**described, "disarmed": dict.fromkeys(SITES, step)} for described in self.entries]

    def close(self) -> None:
        """Keep the facts that hooks and taps have found, before the hooks and taps are removed."""
        self.entries = self.described
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


def _is_below(path: str, above: str) -> bool:
    return above == "" or path.startswith(above + ".")
