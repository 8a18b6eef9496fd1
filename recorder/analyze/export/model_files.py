"""A model out of a run as a file that torch loads: safetensors, or a folder of `torch.distributed.checkpoint`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ...errors import LookupFailedError, UnsupportedError
from .model import Model
from .publishing import published_file, published_folder
from .tensorfiles import write_safetensors

FORMATS = ("dcp", "safetensors")
_ONLY_DCP = ("complex32", "complex128", "float4_e2m1fn_x2")
"""Types that safetensors has not: what stands in for them would fit no model."""
_RESERVED = "__metadata__"


def check_format(to: str) -> None:
    """Refuse a format that there is not, or that cannot be written here.

    Raises:
        LookupFailedError: there is no such format.
        UnsupportedError: it needs torch, and that cannot be imported.
    """
    if to not in FORMATS:
        raise LookupFailedError(
            f"format {to!r}: choose of {', '.join(FORMATS)}; other programs' are in recorder export"
        )
    if to == "dcp":
        try:
            from . import checkpoint as checkpoint
        except ImportError as error:
            raise UnsupportedError(
                f"--to dcp needs torch, whose own classes are in such a checkpoint ({error}); "
                "pip install torch, or use --to safetensors"
            ) from error


def write_model(model: Model, path: Path, to: str, report: Callable[[int], None] = lambda done: None) -> int:
    """Write the tensors that a model has, under the name once all is whole.

    Args:
        model: what to write; whether something of it is refused is for the caller to judge.
        path: a new file for safetensors, a new or empty folder for dcp.
        to: one of `FORMATS`.
        report: called with the bytes done since the last call.

    Returns:
        Bytes on disk.

    Raises:
        WriteError: there is something of that name, or it cannot be written.
        UnsupportedError: the format cannot hold some tensor.
        CorruptError: a payload is not what was written.
    """
    check_format(to)
    if to == "dcp":
        from .checkpoint import write_checkpoint

        with published_folder(path) as folder:
            write_checkpoint(folder, model, model.entries, report)
        return sum(file.stat().st_size for file in path.iterdir())
    for entry in model.entries:
        if entry.dtype in _ONLY_DCP or entry.name == _RESERVED:
            what = f"is of {entry.dtype}" if entry.dtype in _ONLY_DCP else "has a name that is the format's own"
            raise UnsupportedError(f"{entry.name} {what}, which safetensors cannot hold so; use --to dcp")
    # Loaders of Hugging Face want to be told that the tensors are torch's.
    about = {"format": "pt", "what": model.what, "root": model.root, "step": str(model.step)}
    with published_file(path) as file:
        write_safetensors(file, model, model.entries, report, about)
    return path.stat().st_size
