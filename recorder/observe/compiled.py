"""Tells what dynamo has compiled in this process: code that it made before a hook was put on runs without the hook.

Nothing here may import dynamo: where the program never imported it, nothing was compiled.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


def has_compiled(module: nn.Module, wrapper: nn.Module) -> bool:
    """Whether dynamo holds code for a compiled module already, made without hooks that are put on it now.

    For torch's own classes dynamo compiles a function around the forward, which all of them share.
    """
    frames = sys.modules.get("torch._dynamo.eval_frame")
    if frames is None:
        return False
    functions: list[Any] = [type(module).forward]
    if wrapper is not module:
        functions.append(frames.innermost_fn(wrapper.forward))
    codes = [function.__code__ for function in functions if hasattr(function, "__code__")]
    return any(bool(frames._debug_get_cache_entry_list(code)) for code in codes)


def has_compiled_anything() -> bool:
    """Whether dynamo has made a graph in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and bool(utils.counters.get("stats"))


def is_compiled_already(model: nn.Module) -> bool:
    """Whether dynamo has made code of a forward in this model, which no hook can enter any more."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    if frames is None:
        return False
    codes = {getattr(type(module).forward, "__code__", None) for module in model.modules()}
    return any(code is not None and bool(frames._debug_get_cache_entry_list(code)) for code in codes)
