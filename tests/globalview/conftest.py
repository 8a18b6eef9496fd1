"""The run by hand that the tests of reading have."""

from tests.read.conftest import run_path

__all__ = ["run_path"]
