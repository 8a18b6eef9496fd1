"""Asks the system for memory to hold tensors."""

from __future__ import annotations

import contextlib
import mmap

_WIPE_ON_FORK = 18
"""MADV_WIPEONFORK (Linux 4.14), which `mmap` does not name."""


def private_memory(nbytes: int) -> mmap.mmap:
    """Return page-aligned memory that is empty in forked children; pages that are not touched cost nothing.

    Its pages are large where the system has large ones: a direct write pins each page that it is made from.

    Raises:
        OSError: there is no such memory left.
    """
    region = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Not MADV_DONTFORK: a child that frees this would unmap what the kernel has since put at its address.
    for advice in (_WIPE_ON_FORK, mmap.MADV_HUGEPAGE):
        with contextlib.suppress(OSError):
            region.madvise(advice)
    return region
