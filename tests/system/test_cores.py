"""How long a thread waits for a core, as the kernel counts it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from recorder.system.processes import CoreShare


def _spin(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


@pytest.mark.skipif(not os.path.exists("/proc/thread-self/schedstat"), reason="this kernel does not count waits")
def test_a_thread_that_shares_its_core_waits_and_one_that_sleeps_does_not() -> None:
    shares: dict[str, float | None] = {}

    def measure() -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # of this thread alone
        share = CoreShare()
        assert share.look() is None, "too little has run"
        rival = subprocess.Popen([sys.executable, "-c", "while True: pass"])  # on the same core
        _spin(0.5)
        rival.kill()
        rival.wait()
        shares["shared"] = share.look()
        time.sleep(0.3)
        shares["asleep"] = share.look()

    thread = threading.Thread(target=measure)
    thread.start()
    thread.join()
    assert shares["shared"] is not None and shares["shared"] < 0.75
    assert shares["asleep"] is None, "it neither ran nor waited"
