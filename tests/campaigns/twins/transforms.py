"""What is made of a model before it is trained, and how the recorder is told to see into it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import recorder


@dataclass(frozen=True, kw_only=True)
class Transform:
    make: Callable[[nn.Module], nn.Module] = lambda model: model
    without: str = ""
    """The transform of the twin that is not recorded, where it is another: one without taps."""
    settings: Mapping[str, str] = field(default_factory=dict)
    is_instrumented: bool = False
    """`recorder.instrument` was called on the model that is recorded."""
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    """What the forward and the loss run under."""

    @property
    def has_taps(self) -> bool:
        """Taps are in the graph, which must show the values of modules, and is not the same graph."""
        return bool(self.without) and self.without != "none"

    def apply(self, model: nn.Module, *, is_recorded: bool) -> nn.Module:
        if self.is_instrumented and is_recorded:
            recorder.instrument(model)
        return self.make(model)


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, *, use_reentrant: bool) -> None:
        super().__init__()
        self.inner = inner
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        # Reentrant checkpointing gives gradients only where an argument requires one.
        return checkpoint(self._run, x, torch.ones((), requires_grad=True), use_reentrant=self.use_reentrant)  # type: ignore[no-any-return]

    def _run(self, x: Tensor, _: Tensor) -> Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


def _compiled(backend: str) -> Callable[[nn.Module], nn.Module]:
    return lambda model: torch.compile(model, backend=backend)  # type: ignore[return-value]


_TAP = {"compiled": "tap"}

TRANSFORMS: dict[str, Transform] = {
    "none": Transform(),
    "instrument": Transform(without="none", is_instrumented=True),
    "compile eager": Transform(make=_compiled("eager")),
    "compile aot_eager": Transform(make=_compiled("aot_eager")),
    "compile inductor": Transform(make=_compiled("inductor")),
    "tap eager": Transform(make=_compiled("eager"), without="compile eager", settings=_TAP),
    "tap aot_eager": Transform(make=_compiled("aot_eager"), without="compile aot_eager", settings=_TAP),
    "instrument aot_eager": Transform(make=_compiled("aot_eager"), without="compile aot_eager", is_instrumented=True),
    "checkpoint": Transform(make=lambda model: Checkpointed(model, use_reentrant=False)),
    "checkpoint reentrant": Transform(make=lambda model: Checkpointed(model, use_reentrant=True)),
    "fx": Transform(make=torch.fx.symbolic_trace),
    "instrument fx": Transform(make=torch.fx.symbolic_trace, without="fx", is_instrumented=True),
    "autocast bf16": Transform(around=lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
}
