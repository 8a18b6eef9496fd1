"""`recorder.trace`: the values of a model's calls in memory, for the length of a ``with`` block.

A trace puts hooks on the selected modules, copies the values that the hooks receive, and removes the hooks again.
Nothing here may change what the model computes, raise into the model, write a file, or touch a recording that is under
way. (Hooks of any kind keep torch's `TransformerEncoderLayer` off its fused path in evaluation.)
"""

from __future__ import annotations

import html
import shlex
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ..errors import AttachError, ConfigError, TraceError
from ..observe import tree
from ..observe.selection import RuleSelection
from ..records import KEEP_STATS
from ..rules import EVERY, Rule, parse_rules
from ..sites import GRADIENTS, OF_CALLS, OF_MODULES, SITES, values_of
from ..system.processes import comes_from_signal_handler
from .values import Key, TracedModule, Values

__all__ = ["Key", "Trace", "Values", "trace"]

_SEEN_SITES = (*OF_CALLS, *OF_MODULES)
"""The sites whose values exist without an optimizer, and without calls of the recorder by the program."""
_GRADIENTS_OF_CALLS = frozenset(OF_CALLS) & frozenset(GRADIENTS)
_NO_CLAUSES = ("rank", "steps", "micro_step", "keep", "unit_dim", "before", "after")
_INLINED = "in a graph of torch.fx or torch.export, where it has no call of its own"
_is_compiling = torch.compiler.is_compiling
_is_tracing = torch._C._get_tracing_state


def trace(
    model: nn.Module, *, select: object = "site=output", depth: int | None = None, keep_graph: bool = False
) -> Trace:
    """Keep the values of a model's calls in memory: ``with recorder.trace(model, depth=2) as values: model(x)``.

    The trace keeps only calls by the thread that entered the block, but it keeps gradients wherever they are computed,
    even after the block. Parameters and buffers are copied at the start of the block, and each parameter's ``grad`` at
    the end of the block. A checkpointed module's call and its recompute count as one call. The trace has no influence
    on a recording that is under way. Only the arguments and the result of the outermost call of a compiled module are
    kept, unless the trace is entered under ``torch.compiler.set_stance("force_eager")``. A function that is compiled
    for the first time in a block is compiled again outside the block.

    Args:
        model: any module, wrapped or not.
        select: rules as in the setting ``rules``, with the keys module, class, leaf, site, name and call.
        depth: the number of levels of modules below the root whose values are kept; None keeps all levels.
        keep_graph: keep the tensors themselves, too, for `Values.live` and `Values.grad`.

    Raises:
        ConfigError: a rule or the depth is wrong.
        AttachError: the model is no module, or has a scripted module, or a rule matches nothing in it.
    """
    if not isinstance(model, nn.Module):
        raise AttachError(f"trace needs a torch.nn.Module, got {type(model).__name__}")
    scripted = next((path for path, part in model.named_modules() if isinstance(part, torch.jit.ScriptModule)), None)
    if scripted is not None:
        raise AttachError(
            f"trace cannot see into {scripted or 'the root'!r}, a TorchScript module: it calls no Python hooks; trace "
            "the module that it was made from"
        )
    if depth is not None and (not isinstance(depth, int) or isinstance(depth, bool) or depth < 0):
        raise ConfigError(f"depth = {depth!r}: expected None for all modules, or a whole number; 0 is the root alone")
    return Trace(model, _rules(select), depth, keep_graph)


def _rules(select: object) -> tuple[Rule, ...]:
    keys = [key for key in Rule.KEYS if key not in _NO_CLAUSES]
    rules = parse_rules(select, keys=keys, sites=_SEEN_SITES)
    if not rules:
        raise ConfigError(f"select = {select!r}: expected rules, such as 'module=layers.* site=input,output'")
    for clause in _clauses(select):
        if clause in _NO_CLAUSES:
            raise ConfigError(
                f"select = {select!r}: {clause!r} makes no sense in a trace, which keeps whole tensors of the calls in "
                "its block; leave it out"
            )
    for rule in rules:
        unknown = [site for site in rule.site if site not in _SEEN_SITES]
        if unknown and rule.site != SITES:
            raise ConfigError(
                f"select = {select!r}: a trace does not see site {unknown[0]!r}, only a recording does; allowed: "
                f"{', '.join(_SEEN_SITES)}"
            )
    return rules


def _clauses(select: object) -> Iterator[str]:
    if isinstance(select, str):
        for text in select.split(";"):
            yield from (word.partition("=")[0] for word in shlex.split(text))
    elif isinstance(select, Rule):
        is_kept_otherwise = select.keep != KEEP_STATS, select.unit_dim is not None
        given = (select.rank != EVERY, select.steps != EVERY, *is_kept_otherwise, False, False)
        yield from (clause for clause, is_given in zip(_NO_CLAUSES, given, strict=True) if is_given)
    elif isinstance(select, Mapping):
        yield from select
    elif isinstance(select, Sequence):
        for item in select:
            yield from _clauses(item)


class Trace:
    """The context manager that `trace` returns. It can be entered once, and yields a `Values`."""

    def __init__(self, model: nn.Module, rules: tuple[Rule, ...], depth: int | None, keep_graph: bool) -> None:
        nodes = tree.walk(model)
        shown = [node for node in nodes if depth is None or (node.path.count(".") + 1 if node.path else 0) <= depth]
        self.selection = RuleSelection(rules, 0)
        self.selection.at_step(0)
        why = _why_no_hooks(nodes)
        probes = [_TracedModuleHooks(self, node, why.get(node.path, "")) for node in shown]
        problems = self.selection.unmatched([node.path for node in shown])
        if problems:
            hidden = f"; depth={depth} leaves out {len(nodes) - len(shown)} modules" if len(shown) < len(nodes) else ""
            raise AttachError("; ".join(problems) + hidden)
        self._probes = [probe for probe in probes if probe.seen.sites]
        self.values = Values(
            seen=[probe.seen for probe in self._probes],
            aliases={alias: node.path for node in nodes for alias in node.aliases},
            keeps_graph=keep_graph,
        )
        self.thread: int | None = None

    def __repr__(self) -> str:
        if self.thread is None:
            return f"<Trace of {len(self._probes)} modules, not entered: with recorder.trace(model) as values>"
        return f"<Trace: {len(self.values)} values>"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>" if self.thread is None else self.values._repr_html_()

    def __enter__(self) -> Values:
        if self.thread is not None:
            raise TraceError("a trace can be entered only once; call recorder.trace(...) again")
        self.thread = threading.get_ident()
        try:
            for probe in self._probes:
                probe.install()
            for probe in self._probes:
                probe.see_state("param")
                probe.see_state("buffer")
        except BaseException:
            self._remove()
            raise
        return self.values

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            for probe in self._probes:
                probe.see_state("grad")
        finally:
            self._remove()

    def _remove(self) -> None:
        for probe in self._probes:
            probe.remove()
        self._probes = []


def _why_no_hooks(nodes: list[tree.Node]) -> dict[str, str]:
    """Return the reason why no hooks run, for each module inside a graph, by module path."""
    compiled: list[str] = []
    reasons = {}
    for node in nodes:
        around = next((p for p in compiled if p == "" or node.path == p or node.path.startswith(p + ".")), None)
        if around is None and node.is_compiled:
            compiled.append(node.path)
            around = node.path if node.module is node.owner else None  # the hooks of the compile wrapper run
        if node.hidden == "inlined":
            reasons[node.path] = _INLINED
        elif around is not None:
            shown = repr(around) if around else "the root"
            reasons[node.path] = (
                f"inside a compiled graph ({shown} is compiled), which runs no hooks; to see it, enter the trace under "
                "torch.compiler.set_stance('force_eager')"
            )
    return reasons


class _TracedModuleHooks:
    def __init__(self, trace: Trace, node: tree.Node, why_no_hooks: str) -> None:
        self._trace = trace
        self._module, self._owner = node.module, node.owner
        is_callable = node.is_callable or node.hidden is not None
        self._rule_sets = trace.selection.rule_sets(node.path, node.class_name, node.is_leaf, is_callable=is_callable)
        self.seen = TracedModule(
            path=node.path,
            class_name=node.class_name,
            sites=tuple(site for site in _SEEN_SITES if self._rule_sets[site]),
            why_no_hooks=why_no_hooks,
        )
        self._sees_inputs = any(values_of(site) == "input" for site in self.seen.sites)
        self._signature: tree.Signature | None = None
        self._num_graphless = 0
        """The number of calls with gradients disabled. Reentrant checkpoints make such calls."""
        self._open: dict[int, list[int | None]] = {}
        """For each thread, the indexes of the calls that have begun and not ended; None for a call that is not kept."""
        self._handles: list[Any] = []

    def install(self) -> None:
        if self.seen.why_no_hooks != _INLINED and _is_forced_eager():
            self.seen.why_no_hooks = ""
        if set(OF_CALLS).isdisjoint(self.seen.sites) or self.seen.why_no_hooks:
            return
        # As in a recording, the arguments are those that the forward receives, and its output is taken before other
        # hooks change it. There are no more hooks than needed, because each is a guard of a function that is compiled
        # within the block.
        if self._sees_inputs:
            before = _Hook(self._guard("input", self._before))
            self._handles.append(self._module.register_forward_pre_hook(before, with_kwargs=True))
        after = _Hook(self._guard("output", self._after))
        self._handles.append(self._module.register_forward_hook(after, prepend=True))
        tree.keep_first(self._module._forward_hooks)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _guard(self, site: str, see: Callable[..., None]) -> Callable[..., None]:
        """Wrap a function for use in a hook, so that it never raises into the model."""

        def seen(module: nn.Module, *values: Any) -> None:
            if module is not self._module or _is_tracing() is not None:
                return  # the caller is a replica, which has copies of the hooks, or torch.jit.trace
            try:
                see(*values)
            except Exception as error:
                if comes_from_signal_handler(error):
                    raise
                self._trace.values.skip(Key(self.seen.path, site), f"{type(error).__name__}: {error}")

        return seen

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = self._begin()
        self._open.setdefault(threading.get_ident(), []).append(call)
        if call is None:
            return
        if self._signature is None:
            self._signature = tree.Signature(self._owner)
        for name, tensor in self._signature.leaves(args, kwargs):
            self._see("input", "grad_input", name, tensor, call)

    def _after(self, args: tuple[Any, ...], output: Any) -> None:
        if self._sees_inputs:
            begun = self._open.get(threading.get_ident())
            call = begun.pop() if begun else None
        else:
            call = self._begin()
        if call is not None:
            for name, tensor in tree.tensor_leaves(output):
                self._see("output", "grad_output", name, tensor, call)

    def _begin(self) -> int | None:
        """Count a call that begins, and return its index. Return None for a call whose values are not kept."""
        seen = self.seen
        if _is_in_backward():
            return self._recomputed_call()
        if threading.get_ident() != self._trace.thread:
            seen.num_calls_elsewhere += 1
            return None
        seen.num_calls += 1
        self._num_graphless += not torch.is_grad_enabled()
        return seen.num_calls - 1

    def _recomputed_call(self) -> int | None:
        """Return the index of the recomputed call. Return None if unknown, or if the forward made the graph."""
        seen = self.seen
        seen.num_recomputed += 1
        if self._num_graphless and seen.num_calls > 1:
            for site in _GRADIENTS_OF_CALLS.intersection(seen.sites):
                self._trace.values.skip(
                    Key(seen.path, site),
                    f"recomputed in the backward, and which of its {seen.num_calls} calls that was is not known; "
                    "checkpoint with use_reentrant=False",
                )
        return 0 if self._num_graphless and seen.num_calls == 1 else None

    def _see(self, site: str, gradient_site: str, name: str, tensor: torch.Tensor, call: int) -> None:
        values, path = self._trace.values, self.seen.path
        if not _is_in_backward() and self._is_selected(site, name, call):
            values.put(Key(path, site, name, call), tensor)
        if tensor.requires_grad and torch.is_grad_enabled() and self._is_selected(gradient_site, name, call):
            hook = _GradientArrives(values, Key(path, gradient_site, name, call))
            handle = tensor.register_hook(hook)
            if tensor.is_leaf:
                hook.handle = handle

    def _is_selected(self, site: str, name: str, call: int) -> bool:
        selection = self._trace.selection
        rule_set = selection.narrow(self._rule_sets[site], name)
        if rule_set in selection.limited:
            return bool(selection.mask_at_call(rule_set, None, call))
        return bool(selection.masks[rule_set])

    def see_state(self, site: str) -> None:
        """Keep copies of the module's own parameters, their gradients, or its buffers."""
        if not self._rule_sets[site]:
            return
        for name, tensor in (self._owner._buffers if site == "buffer" else self._owner._parameters).items():
            if tensor is not None and self._is_selected(site, name, 0):
                value = tensor.grad if site == "grad" and not nn.parameter.is_lazy(tensor) else tensor
                if value is not None:
                    self._trace.values.put(Key(self.seen.path, site, name), value)


def _is_forced_eager() -> bool:
    """Return True if compiled functions run eagerly. Otherwise the hooks would make a function compile twice."""
    stance = getattr(sys.modules.get("torch._dynamo.eval_frame"), "_stance", None)
    return getattr(stance, "stance", None) == "force_eager"


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class _Hook(tree.Hook):
    """A hook of a trace, as torch registers it. It does nothing while a compiler traces it."""

    __slots__ = ("_see",)
    _why_not_scripted = "torch.jit.script cannot compile the hooks of a trace; script the model outside its block"

    def __init__(self, see: Callable[..., None]) -> None:
        self._see = see

    def __call__(self, *values: Any) -> None:
        if not _is_compiling():
            self._see(*values)


class _GradientArrives:
    """A tensor hook that keeps a gradient. Its reference to the trace is weak, as the trace may keep the graph."""

    __slots__ = ("_key", "_values", "handle")
    __torch_unserializable__ = True
    """True, so that torch does not warn that this hook is lost when a leaf tensor is saved."""

    def __init__(self, values: Values, key: Key) -> None:
        self._values = weakref.ref(values)
        self._key = key
        self.handle: Any = None
        """The handle of this hook on a leaf tensor, which outlives the graph. The hook is removed once it has fired."""

    def __call__(self, gradient: torch.Tensor | None) -> None:
        values = self._values()
        if _is_compiling() or gradient is None or (values is not None and values.is_asking):
            return
        if self.handle is not None:
            self.handle.remove()
        if values is not None:
            values.put(self._key, gradient)
