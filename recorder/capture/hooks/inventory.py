"""The inventory of a root's modules for the manifest, and one warning of modules that nobody sees.

Nothing here keeps the model alive, or reads a tensor's values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from ...observe import tree
from ...sites import SITES
from ...system.text import listed
from ...taps.finding import has_scripted_tap
from ...taps.module_taps import Where
from ..parallel.flat_parameters import FlatParameter
from ..tensors.dtensors import is_dtensor
from .foreign import foreign_hooks
from .module import Watch
from .recording import Recording
from .state_dict import Ties, about_state, find_ties

_OTHERS = "parameters, gradients and optimizer state are"
_HIDDEN = {
    "compiled": "values inside compiled modules are not recorded ({}); " + _OTHERS + ". RECORDER_COMPILED=tap, or "
    "recorder.instrument(model) before the first call, puts taps into the compiled graph",
    "late": "attached after compilation, so nothing is seen inside ({}); attach first, with RECORDER_COMPILED=tap, or "
    "call torch.compiler.reset()",
    "scripted": "values inside scripted modules are not recorded ({}); " + _OTHERS + ". recorder.instrument(model) "
    "before torch.jit.script or trace puts taps into the scripted code",
    "root_not_called": "its modules ran, and its own call was never seen ({}): call it, not .forward(); of a model "
    "that torch.fx traced, attach what came out",
}
"""The warnings of modules whose calls nobody sees, each of which is given once."""


class DescribedRoot(Protocol):
    """The part of a root that its inventory needs."""

    @property
    def capture(self) -> Recording: ...

    @property
    def name(self) -> str: ...

    @property
    def watches(self) -> list[Watch]: ...

    @property
    def modules_by_tap(self) -> Mapping[str, Watch]: ...

    @property
    def num_calls(self) -> int: ...

    @property
    def artefact(self) -> str | None: ...

    def watch_at(self, path: str) -> Watch | None: ...


class Inventory:
    """The modules of a root as they were attached, with what graphs and steps have shown later."""

    def __init__(self, root: DescribedRoot, *, began_late: bool) -> None:
        """Begin empty, until `describe`.

        Args:
            root: the root whose modules these are.
            began_late: whether something, perhaps this root, had been compiled when the root was attached.
        """
        self._root = root
        self._began_late = began_late
        self._modules: list[dict[str, Any]] = []
        """See `described`."""
        self._seen_at_taps: dict[str, tuple[str, ...]] = {}
        """The sites, by path, at which graphs have shown modules whose hooks had not run."""
        self._scripted_with_taps: list[str] = []
        self._late: list[str] = []
        """The paths of modules that were compiled before they had hooks."""

    @property
    def paths(self) -> list[str]:
        """Return the paths of all modules."""
        return [described["path"] for described in self._modules]

    def describe(self, nodes: Sequence[tree.Node], flats: Sequence[FlatParameter]) -> None:
        """Describe the modules of a model as they are now; each has its watch."""
        watches = self._root.watches
        ties = find_ties(watches, flats)
        self._modules = [self._of_module(node, watch, ties, flats) for node, watch in zip(nodes, watches, strict=True)]

    def say_hidden(self, nodes: Sequence[tree.Node], compiled: list[str], late: list[str]) -> None:
        """Warn of modules whose calls nobody will see.

        Args:
            nodes: all modules.
            compiled: the paths of modules that are compiled.
            late: the paths of modules whose compiled code was there before the hooks.
        """
        untapped: list[str] = []
        self._late = late
        # Where there are taps, the first step tells whether they are in the graph.
        self._say("late", [path for path in late if not self._is_tapped_below(path)])
        scripted = {node.path: node.owner for node in nodes if node.hidden == "scripted"}
        for path in list(scripted):
            if not any(path != above and _is_below(path, above) for above in scripted):
                (self._scripted_with_taps if has_scripted_tap(scripted[path]) else untapped).append(path)
        self._say("scripted", untapped)
        self._say_compiled([path for path in compiled if path not in late])

    @property
    def described(self) -> list[dict[str, Any]]:
        """Return the manifest's entry of each module, with the sites that only graphs show. Any thread."""
        tapped = dict(self._seen_at_taps)
        if not tapped:
            return self._modules
        for where, watch in list(self._root.modules_by_tap.items()):
            if not watch.has_entered:
                site = Where.from_text(where).site
                tapped[watch.node_path] = tuple(dict.fromkeys((*tapped.get(watch.node_path, ()), site)))
        for described in self._modules:
            path = described["path"]
            if described.get("hidden") == "scripted" and any(_is_below(path, up) for up in self._scripted_with_taps):
                tapped.setdefault(path, ("output",))
        return [
            {**described, "tapped": list(tapped[described["path"]])} if described["path"] in tapped else described
            for described in self._modules
        ]

    def add_seen_at_tap(self, where: Where, path: str) -> None:
        """Note that a graph shows a module, which may be missing in the model's tree, or a container there."""
        watch = self._root.watch_at(path)
        if watch is None or not watch.has_entered:
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
        rule_sets = self._root.capture.selection.rule_sets(where.path, where.cls, where.leaf)
        sites = [site for site in SITES if rule_sets[site]]
        return {"class": where.cls, "source": where.source or None, "sites": sites}

    def _say_compiled(self, paths: list[str]) -> None:
        self._say("compiled", [path for path in paths if not self._is_tapped_below(path)])

    def _say(self, why: str, paths: list[str]) -> None:
        if paths:
            paths = [p for p in paths if not any(q != p and _is_below(p, q) for q in paths)]
            shown = listed((repr(path) if path else "the whole model" for path in paths), 3)
            self._root.capture.events.add(why, f"{self._root.name}: {_HIDDEN[why].format(shown)}", key=self._root.name)

    def _is_tapped_below(self, path: str) -> bool:
        return any(
            watch.node_path == path or _is_below(watch.node_path, path) for watch in self._root.modules_by_tap.values()
        )

    def step_is_over(self, *, has_compiled: bool) -> None:
        """Warn, after the first step, of modules with hooks that never ran in it, and say why.

        Where something was compiled, but no part of this model is marked as compiled, a module that has gradients
        without a call ran in the graph of a user's function, without its hooks. A root that never ran while its modules
        did is not the module that was called.
        """
        self.look_for_foreign_hooks()
        seen = [watch.node_path for watch in self._root.watches if watch.was_called]
        self._say("late", [path for path in self._late if not any(_is_below(called, path) for called in seen)])
        silent = self._silent()
        if has_compiled and silent and not any(described["compiled"] for described in self._modules):
            why = {"hidden": "late"} if self._began_late and not self._seen_at_taps else {}
            for i, described in enumerate(self._modules):
                if described["path"] in silent:
                    self._modules[i] = {**described, "compiled": True, **why}
            if why:
                self._say("late", sorted(silent))
            elif not self._seen_at_taps:  # a user who tapped a part of a compiled model has chosen that part
                self._say_compiled(sorted(silent))
        elif seen and "" not in seen and self._is_root_unseen():
            self._say("root_not_called", [""])

    def _is_root_unseen(self) -> bool:
        """Whether the root's own call was never seen, and no tap stands for it."""
        return self._root.num_calls == 0 and self._root.artefact is None and not self._seen_at_taps

    def look_for_foreign_hooks(self) -> None:
        """Add hooks that the program has put on modules since the last look; removed ones stay listed."""
        for i, (described, watch) in enumerate(zip(self._modules, self._root.watches, strict=False)):
            known = described.get("foreign_hooks", [])
            module = watch.module()
            more = [hook for hook in foreign_hooks(module) if hook not in known] if module is not None else []
            if more:
                self._modules[i] = {**described, "foreign_hooks": [*known, *more]}
                self._root.capture.events.has_changed = True

    def _silent(self) -> set[str]:
        """Return the paths of modules that must have run and were not seen to, for no reason in themselves."""
        explained = {described["path"] for described in self._modules if "hidden" in described}
        explained |= {watch.node_path for watch in self._root.modules_by_tap.values()} if self._seen_at_taps else set()
        silent = [watch for watch in self._root.watches if watch.is_silent and watch.node_path not in explained]
        if any(watch.was_called for watch in self._root.watches):
            grads = {w.node_path: [p.grad is not None for _, p in w.own("_parameters")] for w in silent}
            silent = [watch for watch in silent if any(grads[watch.node_path]) or not grads[watch.node_path]]
            is_in_graph = self._root.num_calls == 0 and bool(self._seen_at_taps)
            if not is_in_graph and not any(map(any, grads.values())):
                return set()
        return {watch.node_path for watch in silent}

    def reselect(self) -> None:
        """Note the sites of modules by the rules that there are now; a site that was selected once stays listed."""
        for i, (described, watch) in enumerate(zip(self._modules, self._root.watches, strict=False)):
            sites = [site for site, rule_set in watch.rule_sets.items() if rule_set or site in described["sites"]]
            if sites != described["sites"]:  # another dict: the writer thread may be reading this one
                self._modules[i] = {**described, "sites": sites}

    def disarm(self, path: str, sites: tuple[str, ...], step: int) -> None:
        """Note that some sites of one module are not recorded any more, from a step on."""
        for i, described in enumerate(self._modules):
            if described["path"] == path:  # another dict: the writer thread may be reading this one
                self._modules[i] = {
                    **described,
                    "disarmed": {**described.get("disarmed", {}), **dict.fromkeys(sites, step)},
                }

    def disarm_all(self, step: int) -> None:
        """Note that no module is recorded any more, from a step on."""
        self._modules = [{**described, "disarmed": dict.fromkeys(SITES, step)} for described in self._modules]

    def close(self) -> None:
        """Keep what the hooks have shown, before they are removed."""
        self._modules = self.described
        self._seen_at_taps.clear()

    def _of_module(self, node: tree.Node, watch: Watch, ties: Ties, flats: Sequence[FlatParameter]) -> dict[str, Any]:
        flat_ids = ids_of(flats)
        flat_names = [name for flat in flats for owner, name in flat.names if owner is watch]
        return {
            "path": node.path,
            "class": node.class_name,
            "source": tree.source_line(node.owner),
            "aliases": node.aliases,
            "sites": [site for site, rule_set in watch.rule_sets.items() if rule_set],
            "params": flat_names + [name for name, value in watch.own("_parameters") if id(value) not in flat_ids],
            "buffers": [name for name, _ in watch.own("_buffers")],
            **about_state(node.owner, ties.get(node.path)),
            **({"dtensor": True} if any(is_dtensor(value) for _, value in watch.own("_parameters")) else {}),
            "compiled": node.is_compiled,
            **({"foreign_hooks": foreign} if (foreign := foreign_hooks(node.module)) else {}),
            **({"hidden": hidden} if (hidden := "late" if node.path in self._late else node.hidden) else {}),
        }


def _is_below(path: str, above: str) -> bool:
    return above == "" or path.startswith(above + ".")


def ids_of(flats: Iterable[FlatParameter]) -> set[int]:
    """Return the ids of flat parameters and of their originals."""
    references = [reference for flat in flats for reference in (flat.reference, *(o.reference for o in flat.originals))]
    return {id(parameter) for reference in references if (parameter := reference()) is not None}
