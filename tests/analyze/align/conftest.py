"""The command line in this process."""

from tests.rigs.command_line import cli

__all__ = ["cli"]
