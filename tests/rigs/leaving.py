"""How a rank of a script ends whose end is not what is tested."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from typing import NoReturn

import torch.distributed as dist


def leave() -> NoReturn:
    """End the process well, when all ranks are here, with what a recording does at the exit, but without a teardown.

    In a teardown torch 2.13 can block, where a DDP object outlives its process group, and abort, where a thread of gloo
    drops the last collective's tensors while the interpreter is finalized (it does so without a recorder too).
    """
    dist.barrier()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def train_each(train: Callable[[str], object]) -> NoReturn:
    """Train on gloo ranks what each word of the command line names, and leave."""
    dist.init_process_group("gloo")
    for name in sys.argv[1:]:
        train(name)
    leave()
