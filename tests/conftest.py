"""What holds for every test: nothing of the caller's environment records, Ctrl-C works, GPU tests need a GPU, and
Hypothesis measures no time.
"""

from __future__ import annotations

import gc
import logging
import os
import signal

import hypothesis
import pytest


def pytest_configure() -> None:
    """Before any test imports torch, and so before any child process inherits the flag."""
    for name in [name for name in os.environ if name.startswith(("RECORDER", "_RECORDER"))]:
        del os.environ[name]
    # The inductor asks neither a compiler and a process for each vector width, nor starts processes that compile.
    os.environ.update({"TORCHINDUCTOR_VEC_ISA_OK": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"})
    os.environ.pop("COLUMNS", None)  # pytest-xdist gives it to its workers, and tables in a pipe would obey
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what is to run in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # On a busy machine any example may take long.
    unhurried = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile("unhurried", deadline=None, suppress_health_check=unhurried)
    hypothesis.settings.load_profile("unhurried")


def pytest_collection_finish() -> None:
    """A merge, an attach and a forked child look through all objects: not through those that were imported by now."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _no_optimizer_of_another_module() -> None:
    """A recording goes on from the step of the optimizers that it finds; some lie in cycles, and live until this.

    What lives on is frozen: modules that torch has imported meanwhile, 400,000 objects that each attach looks through.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _log_as_at_the_start() -> None:
    """A command that runs here, in a test or in a fixture of a module, takes the lines of the library for itself."""
    for name in ("recorder", "recorder.daemon"):
        library = logging.getLogger(name)
        library.handlers, library.propagate = [], True
        library.setLevel(logging.NOTSET)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a device where there is none; torch is imported only if some test does."""
    on_device = [item for item in items if item.get_closest_marker("gpu")]
    if not on_device:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_device:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
