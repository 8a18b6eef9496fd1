"""The run by hand that the tests of reading have."""

from tests.rigs.small_runs import run_path

__all__ = ["run_path"]
