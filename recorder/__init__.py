"""recorder: a flight recorder for the numbers inside PyTorch training.

``RECORDER=1 torchrun --nproc-per-node 2 train.py`` records an unmodified script. Further functions are `attach`, `tap`,
`scalar` and `step` for the training side, and `open_run` and `decode` to read a run.
Importing this module loads neither torch nor pyarrow.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from . import errors as errors
from .errors import RecorderError as RecorderError

if TYPE_CHECKING:
    from torch import nn

    from .analyze.align.align import align as align
    from .analyze.check.check import check as check
    from .analyze.diff.diff import diff as diff
    from .analyze.export.export import export as export
    from .analyze.first.first import first as first
    from .analyze.stats import stats as stats
    from .lifecycle.attachment import Attachment
    from .read.payload import decode as decode
    from .report.report import open_run as open_run
    from .run.run import Run as Run
    from .taps.instrument import instrument as instrument
    from .taps.instrument import strip as strip
    from .taps.module_taps import objective as objective
    from .taps.module_taps import tap as tap
    from .tracing.trace import trace as trace

__version__ = "0.1.0"
__all__ = [
    "RecorderError",
    "Run",
    "align",
    "attach",
    "check",
    "decode",
    "diff",
    "errors",
    "export",
    "first",
    "instrument",
    "objective",
    "open_run",
    "scalar",
    "stats",
    "step",
    "strip",
    "tap",
    "tokens",
    "trace",
    "trigger",
]

_active: Any = None
"""The recorder that records in this process, set by `lifecycle.active`."""

_program: Any = None
"""Passes what the program gives to the recorder that records, or that ``RECORDER=1`` has made; `lifecycle.active` sets
it. While it is None, `tap` does nothing."""

_LAZY = {
    "align": "analyze.align.align",
    "open_run": "report.report",
    "Run": "run.run",
    "check": "analyze.check.check",
    "decode": "read.payload",
    "diff": "analyze.diff.diff",
    "export": "analyze.export.export",
    "first": "analyze.first.first",
    "instrument": "taps.instrument",
    "objective": "taps.module_taps",
    "stats": "analyze.stats",
    "strip": "taps.instrument",
    "tap": "taps.module_taps",
    "trace": "tracing.trace",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        value = globals()[name] = getattr(import_module(f".{_LAZY[name]}", __name__), name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


def attach(model: nn.Module, *, enabled: bool | None = None, name: str | None = None, **settings: object) -> Attachment:
    """Record a model from now on; use the result as a context manager, or call ``close()`` on it.

    Does nothing unless the flag ``RECORDER=1`` is set or ``enabled`` is true. Attach after wrapping (DDP,
    `fully_shard`) and before the first compiled call.

    Args:
        model: the module; each call of it counts as one forward of training.
        enabled: True records without the flag, False never records; None follows the flag.
        name: the name of the root; default ``model``, ``model_1``, ...
        **settings: any setting by name, such as ``rules="site=output keep=tensor"`` or ``dir="/scratch/run"``.

    Raises:
        ConfigError: a setting is wrong, or differs from the settings of a recording that is under way.
        AttachError: the model is no module, or a Pipe (its stages are called one by one), or a rule matches nothing.
    """
    from .config import is_enabled

    if enabled is False or (enabled is None and not is_enabled()):
        from .lifecycle.attachment import Inactive

        return Inactive()
    from .lifecycle.active import attach as attach_now

    return attach_now(model, name=name, settings=settings)


def scalar(name: str, value: Any) -> None:
    """Record a number of this step, such as a loss: a float, an int, or a tensor of one element (without a sync).

    With ``RECORDER=1`` a recording begins with the first call of the model. Scalars before that call are counted and
    not recorded; `attach` begins the recording earlier.
    """
    if _program is not None:
        _program.scalar(name, value)


def step(number: int) -> None:
    """Set the step's number at the top of each iteration. After the first call, only such calls change the step."""
    if _program is not None:
        _program.name_step(number)


def tokens(*, sample_ids: Any = None, positions: Any = None, texts: Any = None) -> AbstractContextManager[None]:
    """Say, for ``recorder align``, to which samples the tokens of a model's call inside the ``with`` block belong.

    It is needed only if the model's own arguments do not say so, or if samples have names. Never raises.

    Args:
        sample_ids: for each row of the batch, or each sequence of a packed row, the sample's name: text or a number.
        positions: the position of each token in its sample, in the shape of the tokens: a tensor, or lists.
        texts: the text of each token, as one list for each row; the run stores the texts, for ``report --align``.
    """
    return nullcontext() if _program is None else _program.tokens(sample_ids, positions, texts)


def trigger(reason: str) -> None:
    """Make all ranks write the ring's steps (rules with ``keep=ring``) around the current step. Never waits.

    Args:
        reason: the reason, for people; the run keeps this text.
    """
    if _active is not None:
        _active.ask("program", reason)


if "torch" in sys.modules:  # a model that was loaded with taps needs the op; without torch there is none yet
    from .taps import ops as _ops  # noqa: F401
