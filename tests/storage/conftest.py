"""A store for the session, and the command line."""

from tests.rigs.command_line import cli
from tests.rigs.stores import server, store

__all__ = ["cli", "server", "store"]
