"""`instrument` and `strip`: put taps on a model before it is transformed, and take them out of the result.

Nothing is changed before the complete request is known to be possible.
"""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import torch
from torch import nn

from ..errors import TapError
from ..observe import tree
from ..observe.selection import RuleSelection
from ..observe.tree import Node, is_compiled_already, source_line
from ..rules import ANY, EVERY, SCHEDULES, Rule, parse_rules
from ..sites import SITES, VALUES_OF_CALLS
from . import graphs, module_taps
from .module_taps import Where

_M = TypeVar("_M")
_PACKETS = [getattr(torch.ops.recorder, name) for name in ("tap", "tap_grad", "watch", "watch_grad", "see")]
_OPS = (*_PACKETS, *(packet.default for packet in _PACKETS), graphs.through, graphs.see_one)


def instrument(model: _M, *, select: object = "site=output", name: str | None = None) -> _M:
    """Put a tap on the output of modules, so that their values are recorded in every graph made of the model.

    In eager code a tap does nothing: the recorder's own hooks see the value. Where the model is compiled, exported,
    traced, scripted or differentiated by `torch.func`, the tap becomes an op of the graph, ``recorder::tap``, which
    records the value and its gradient and returns a copy. The model is changed in place. It can still be pickled,
    copied and packaged. A graph made of the model records wherever ``import recorder`` was done and a recording is on.
    A process without an optimizer, which only infers, needs ``RECORDER_ROOTS=any`` or `attach` to record.

    Args:
        model: a module, before its first compiled call.
        select: which modules, by rules as in the setting ``rules``, with the keys ``module``, ``class``, ``leaf`` and
            ``site`` (``output``, the default, or ``input``). An input is recorded without a copy.
        name: the name of the root, for artefacts that are called without the model; default ``model``, ``model_1``, ...

    Returns:
        The same model.

    Raises:
        TapError: the model is no module, or was scripted or compiled already; a rule matches nothing in it; or another
            live model has the name.
        ConfigError: a rule is wrong.
    """
    if not isinstance(model, nn.Module):
        raise TapError(f"instrument needs a torch.nn.Module, got {type(model).__name__}; instrument it before it is "
                       "exported or packaged")  # fmt: skip
    rules = tuple(_checked(rule) for rule in parse_rules(select))
    if not rules:
        raise TapError("instrument: select is empty; leave it out to tap every module's output")
    nodes = tree.walk(model)
    for node in nodes:
        if isinstance(node.owner, torch.jit.ScriptModule):
            raise TapError(
                f"instrument: {node.path or 'the model'} is TorchScript already; instrument it before torch.jit.script"
            )
    if is_compiled_already(model):
        raise TapError(
            "instrument: this model, or another of its class, was compiled and called already, and compiled code is "
            "kept; instrument first, or call torch.compiler.reset()"
        )
    selection = RuleSelection(rules, 0)
    wanted = [
        (node, site)
        for node in nodes
        for site, rule_set in selection.rule_sets(node.path, node.class_name, node.is_leaf).items()
        if rule_set and site in VALUES_OF_CALLS and node.is_callable
    ]
    problems = selection.unmatched([node.path for node in nodes])
    if problems or not wanted:
        raise TapError(f"instrument: {'; '.join(problems) or 'no rule matches a module that is called'}")
    name = module_taps.name_for(model, name)
    for node in nodes:
        module_taps.remove(node.owner)
    for node, site in wanted:
        put_tap(node, name, site)
    return model


def _checked(rule: Rule) -> Rule:
    if rule.name != ANY or any(getattr(rule, key) != EVERY for key in SCHEDULES):
        raise TapError(
            f"instrument: {rule.text!r} has more than module, class, leaf and site; what is kept of a tap's values, "
            "and when, the setting rules says where it runs"
        )
    if rule.site == SITES:
        return dataclasses.replace(rule, site=("output",))
    if wrong := [site for site in rule.site if site not in VALUES_OF_CALLS]:
        shown = " and ".join(VALUES_OF_CALLS)
        raise TapError(f"instrument: site={','.join(wrong)}: taps show {shown}, with their gradients")
    return rule


def strip(model: _M) -> _M:
    """Take every tap out: off the modules of a model, and out of its graphs or an exported program.

    Returns:
        The same object, changed in place.

    Raises:
        TapError: TorchScript and compiled packages cannot be changed; strip the model before they are made.
    """
    if isinstance(model, torch.export.ExportedProgram):
        _strip_program(model)
        return model
    if not isinstance(model, nn.Module):
        raise TapError(f"strip needs a torch.nn.Module or an ExportedProgram, got {type(model).__name__}")
    inner_modules = list(model.modules())
    for module in inner_modules:
        if isinstance(module, torch.jit.ScriptModule):
            raise TapError("strip: TorchScript cannot be changed; strip the model before torch.jit.script")
    for module in inner_modules:
        module_taps.remove(module)
        if isinstance(module, torch.fx.GraphModule) and _strip_graph(module.graph):
            module.recompile()
    return model


def _strip_graph(graph: torch.fx.Graph) -> bool:
    taps = [node for node in graph.nodes if node.op == "call_function" and node.target in _OPS]
    for node in taps:
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
    return bool(taps)


def _strip_program(program: torch.export.ExportedProgram) -> None:
    with program.graph_module._set_replace_hook(program.graph_signature.get_replace_hook()):
        for module in program.graph_module.modules():
            if isinstance(module, torch.fx.GraphModule) and _strip_graph(module.graph):
                module.recompile()


def put_tap(node: Node, root: str, site: str) -> None:
    """Put a tap on a module's arguments or output, which are recorded for the root of this name."""
    put = module_taps.tap_output_of if site == "output" else module_taps.tap_inputs_of
    put(node.owner, Where(root, node.path, site, node.class_name, node.is_leaf, source_line(node.owner) or ""))


def has_tap(module: nn.Module, name: str) -> bool:
    """Return True if a method of the module's class calls ``tap`` with this name."""
    codes = (getattr(value, "__code__", None) for cls in type(module).__mro__ for value in vars(cls).values())
    return any(code is not None and "tap" in code.co_names and name in code.co_consts for code in codes)


def has_scripted_tap(module: nn.Module) -> bool:
    """Return True if the code that torch.jit made of a module contains a tap."""
    try:
        return "recorder::" in str(module.inlined_graph)
    except Exception:  # the module's class has no forward
        return False
