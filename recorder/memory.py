"""Owns how memory for tensors is asked of the system."""

from __future__ import annotations

import contextlib
import mmap

_WIPE_ON_FORK = 18
"""MADV_WIPEONFORK (Linux 4.14), which `mmap` does not name."""


def private_memory(nbytes: int) -> mmap.mmap:
    """Page-aligned memory that is empty in forked children; pages that are not touched cost nothing.

    In large pages where the system has some: a direct write takes hold of each page that it is made from.

    Raises:
        OSError: there is none.
    """
    region = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Not MADV_DONTFORK: a child that frees this would unmap what the kernel has since put at its address.
    for advice in (_WIPE_ON_FORK, mmap.MADV_HUGEPAGE):
        with contextlib.suppress(OSError):
            region.madvise(advice)
    return region
