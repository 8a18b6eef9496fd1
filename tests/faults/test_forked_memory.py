"""A forked child may free what it was born with, and must not take the ground from under its own feet."""

from __future__ import annotations

import mmap
import os

from recorder.write.file import PageMemory


def test_page_memory_is_mapped_and_empty_in_a_forked_child() -> None:
    memory = PageMemory(4 * mmap.PAGESIZE)
    memory.data[:] = 7
    address = memory.data.ctypes.data
    pid = os.fork()
    if pid == 0:
        with open("/proc/self/maps") as maps:
            ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in maps]
        is_mapped = any(start <= address < end for start, end in ranges)
        os._exit(0 if is_mapped and not memory.data.any() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert (memory.data == 7).all()


def test_a_child_that_frees_page_memory_keeps_what_it_has_mapped_since() -> None:
    memory = PageMemory(1 << 20)
    address = memory.data.ctypes.data
    pid = os.fork()
    if pid == 0:
        own = [mmap.mmap(-1, 1 << 20) for _ in range(64)]  # the kernel fills holes first
        del memory
        for region in own:
            region[0] = region[-1] = 1  # a segmentation fault where it was unmapped
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert address
