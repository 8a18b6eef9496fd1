"""recorder: a flight recorder for the numbers inside PyTorch training.

``RECORDER=1 torchrun --nproc-per-node 2 train.py`` records an unmodified script. A program may also call `attach`,
`tap`, `scalar` and `step` while it trains. `open_run` and `decode` read a run. Importing this module loads neither
torch nor pyarrow.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from . import errors as errors
from .errors import RecorderError as RecorderError

if not (_arguments := getattr(sys, "argv", [])):  # if embedded; the import of crc32c reads `argv`
    sys.argv = [""]
    import crc32c as crc32c

    sys.argv = _arguments
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
"""The recorder that is recording in this process. Set by `lifecycle.active`."""

_program: Any = None
"""Passes values and steps from the program to the active recorder, or to the one that ``RECORDER=1`` has made. Set by
`lifecycle.active`. While it is None, `tap` does nothing."""

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
    """Record a model from now on. Use the result as a context manager, or call ``close()`` on it.

    Does nothing unless ``RECORDER=1`` is set or ``enabled`` is true. Call it after wrapping the model (DDP,
    `fully_shard`) and before the first compiled call.

    Args:
        model: the module. Each call of it counts as one forward of training.
        enabled: True records without ``RECORDER=1``, and False never records. None follows the variable.
        name: the name of the model in the run; default ``model``, ``model_1``, ...
        **settings: any setting by name, such as ``rules="site=output keep=tensor"`` or ``dir="/scratch/run"``.

    Raises:
        ConfigError: a setting is wrong, or differs from those of a recording that has already begun.
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

    With ``RECORDER=1`` a recording begins at the first call of the model. Scalars before that call are counted, but not
    recorded. Call `attach` to begin the recording earlier.
    """
    if _program is not None:
        _program.scalar(name, value)


def step(number: int) -> None:
    """Set the number of the step. Call it at the top of each iteration; from then on nothing else changes the step."""
    if _program is not None:
        _program.name_step(number)


def tokens(*, sample_ids: Any = None, positions: Any = None, texts: Any = None) -> AbstractContextManager[None]:
    """Say to which samples the tokens of a model's call in the ``with`` block belong. ``recorder align`` reads it.

    The call is needed only if the model's arguments do not show the samples, or if samples have names. Never raises.

    Args:
        sample_ids: for each row of the batch, or each sequence of a packed row, the sample's name: text or a number.
        positions: the position of each token in its sample, in the shape of the tokens: a tensor, or lists.
        texts: the text of each token, as one list for each row. The run stores the texts, for ``report --align``.
    """
    return nullcontext() if _program is None else _program.tokens(sample_ids, positions, texts)


def trigger(reason: str) -> None:
    """Make all ranks write the steps around the current one that rules with ``keep=ring`` hold in memory. Never waits.

    Args:
        reason: a text for people, which the run keeps.
    """
    if _active is not None:
        _active.ask("program", reason)


if "torch" in sys.modules:  # a loaded model with taps needs the op; without torch no model is loaded yet
    from .taps import ops as _ops  # noqa: F401
