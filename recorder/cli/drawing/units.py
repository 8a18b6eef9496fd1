"""Writes bytes as a person would write them in a setting."""

from __future__ import annotations


def bytes_of_setting(value: int) -> str:
    """Return bytes in the unit that makes the shortest number: ``16 GiB (17179869184)``, ``4 GB (4000000000)``."""
    units = [(1000**power, name) for power, name in enumerate(("B", "kB", "MB", "GB", "TB"))]
    units += [(1024**power, name) for power, name in enumerate(("B", "KiB", "MiB", "GiB", "TiB"))]
    count, name = min((value / scale, name) for scale, name in units if scale <= max(value, 1))
    exact = [(value // scale, name) for scale, name in units if scale <= value and value % scale == 0]
    if exact:
        count, name = min(exact)
    return str(value) if name == "B" else f"{count:.4g} {name} ({value})"
