from __future__ import annotations

from typing import Any, NoReturn

import typer

from ...lifecycle.launch import launch

EPILOG = (
    "Examples: recorder run torchrun --nproc-per-node 2 train.py    recorder run RECORDER_PRESET=light python train.py"
)
SETTINGS: dict[str, Any] = {
    "add_help_option": False,
    "options_metavar": "[NAME=VALUE ...] COMMAND [ARGUMENT ...]",
    "context_settings": {"ignore_unknown_options": True, "allow_extra_args": True},
}


def command(context: typer.Context) -> NoReturn:
    """Run a training command with recording on.

    Use it where torch does not load entry points.
    """
    launch(context.args)
