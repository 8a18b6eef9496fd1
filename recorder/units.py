"""Numbers as people read them."""

from __future__ import annotations


def size(num_bytes: int) -> str:
    """Bytes: 1.5 MB is 1,500,000."""
    amount = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if amount < 1000 or unit == "TB":
            break
        amount /= 1000
    return f"{num_bytes} B" if unit == "B" else f"{amount:.1f} {unit}"


def counted(number: int, noun: str) -> str:
    """``1 row``, ``2,000 rows``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
