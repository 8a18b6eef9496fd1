"""Programs that tests run and pip does not install."""

from __future__ import annotations

import os
import shutil

import pytest

PACKAGES = {
    "chromium": "chromium",
    "node": "nodejs",
    "openssl": "openssl",
    "prometheus": "prometheus",
    "promtool": "prometheus",
    "systemd-analyze": "systemd",
}
"""By program, the package of Debian that has it. `prepare_debian` of scripts/environment.sh installs all of them."""


def needs(program: str) -> str:
    """Return the path of a program, one of `PACKAGES`. Without it the test is skipped, and fails where `CI` is set."""
    path = shutil.which(program)
    if path is None:
        reason = f"{program} is not installed: apt-get install --no-install-recommends {PACKAGES[program]}"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return path
