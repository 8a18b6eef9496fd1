"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 30.0
"""Far more than an idle machine takes: a busy one has seconds to spare."""


def wait_until(is_true: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
    """Look until something holds; fail after `patience_s` seconds."""
    until_s = time.monotonic() + patience_s
    while not is_true():
        assert time.monotonic() < until_s, f"nothing happened in {patience_s:g} s"
        time.sleep(0.01)
