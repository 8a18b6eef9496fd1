from __future__ import annotations

from typing import Annotated

import typer

from . import COMMANDS

EPILOG = "Examples: recorder help diff    recorder help"


def complete_command(incomplete: str) -> list[str]:
    """Offer the commands that begin with the typed text."""
    return [name for name in COMMANDS if name.startswith(incomplete)]


def command(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(metavar="COMMAND", autocompletion=complete_command)] = None,
) -> int:
    """Show what a command does, with its options."""
    root = context.find_root().command
    root.main([*([name] if name else []), "--help"], prog_name="recorder", standalone_mode=False)
    return 0
