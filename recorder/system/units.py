"""Writes numbers as people read them."""

from __future__ import annotations

import time


def size(num_bytes: int) -> str:
    """Return a number of bytes as text, in powers of ten: ``1.5 MB`` is 1,500,000."""
    amount = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if amount < 1000 or unit == "TB":
            break
        amount /= 1000
    return f"{num_bytes} B" if unit == "B" else f"{amount:.1f} {unit}"


def moment(time_ns: int) -> str:
    """Return a wall clock time as text in local time; empty where it is 0 or out of range."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_ns / 1e9)) if time_ns > 0 else ""
    except (OverflowError, OSError, ValueError):
        return ""
