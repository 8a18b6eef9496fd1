"""A sample of the campaign `python -m tests.campaigns stall`: one setting, a disk that hangs in the kernel."""

from __future__ import annotations

import pytest

from tests.campaigns.faults import seccomp
from tests.campaigns.faults.stall import Setting, judge, measure


@pytest.mark.skipif(not seccomp.is_possible(), reason="system calls can be held on x86_64 Linux only")
def test_no_hook_takes_longer_than_configured_while_the_disk_hangs() -> None:
    setting = Setting(wait_s_per_step=0.2)
    found = measure(setting, 60)
    assert judge(setting, found) == []
    assert found.longest_hook_s > 0.1, "it did wait"
