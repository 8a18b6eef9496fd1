"""One process that forks trainings, for all tests of how they end and fork; and a process left as it was found."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator

import pyarrow as pa
import pytest
import torch
from torch.optim import Optimizer

from recorder.lifecycle import active
from recorder.system.processes import live_instances

from .ends import Trainer


@pytest.fixture(scope="module", autouse=True)
def _nothing_left_over() -> None:
    """What tests of other files left alive is no part of these: a recording counts its steps on from any optimizer."""
    if active._current is not None:
        active._current.close()
    gc.collect()
    for optimizer in live_instances(Optimizer):
        optimizer.state.clear()


@pytest.fixture(scope="module", autouse=True)
def _as_it_was() -> Iterator[None]:
    """What is done to keep forked children small is not for the tests of other files."""
    library = logging.getLogger("recorder")
    logs = library.level, library.handlers[:], library.propagate
    threads = torch.get_num_threads(), pa.cpu_count(), pa.io_thread_count()
    yield
    library.level, library.handlers[:], library.propagate = logs
    library.setLevel(library.level)  # forgets what was worked out from the other level
    for restore, number in zip((torch.set_num_threads, pa.set_cpu_count, pa.set_io_thread_count), threads, strict=True):
        restore(number)


@pytest.fixture(scope="session")
def trainer() -> Iterator[Trainer]:
    started = Trainer()
    yield started
    started.close()
