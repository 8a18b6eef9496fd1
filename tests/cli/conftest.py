"""The command line in this process, and a run to point it at."""

from tests.rigs.command_line import cli, recorded

__all__ = ["cli", "recorded"]
