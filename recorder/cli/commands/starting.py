"""The commands that are typed before there is a run: help, settings, and the launch of a training."""

from __future__ import annotations

import json
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from ...config import CONFIG_FILE, DEFAULT_RULES, PRESETS, Settings, load_settings
from ...errors import ConfigError
from ...lifecycle.launch import launch
from ...run.reply import Reply, settings_reply
from ...system.text import bytes_of_setting
from . import COMMANDS

EXAMPLES = {
    "help": ("recorder help diff", "recorder help"),
    "run": ("recorder run torchrun --nproc-per-node 2 train.py", "recorder run RECORDER_PRESET=light python train.py"),
    "init": ("recorder init", "recorder init slow-disk.toml"),
    "config": ("recorder config --show", "RECORDER_MAX_BYTES=4GB recorder config --json"),
}
SETTINGS: dict[str, Any] = {
    "run": {
        "add_help_option": False,
        "options_metavar": "[NAME=VALUE ...] COMMAND [ARGUMENT ...]",
        "context_settings": {"ignore_unknown_options": True, "allow_extra_args": True},
    },
}


def complete_command(incomplete: str) -> list[str]:
    """Offer the commands that begin with the typed text."""
    return [name for name in COMMANDS if name.startswith(incomplete)]


def help_command(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(metavar="COMMAND", autocompletion=complete_command)] = None,
) -> int:
    """Show what a command does, with its options."""
    root = context.find_root().command
    root.main([*([name] if name else []), "--help"], prog_name="recorder", standalone_mode=False)
    return 0


def run_command(context: typer.Context) -> NoReturn:
    """Run a training command with recording on.

    Use it where torch does not load entry points.
    """
    launch(context.args)


def init_command(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write.")] = Path("recorder.toml"),
) -> int:
    """Write a TOML file of all settings, each with its default."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(example())
    except FileExistsError:
        raise ConfigError(f"{path}: is there already, and nothing was written; name another file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from None
    print(f"{path}: every setting with its default; change what you want, then")
    print(f"  {CONFIG_FILE}={shlex.quote(str(path))} RECORDER=1 torchrun ... train.py")
    return 0


def example() -> str:
    """Return a TOML file of comments. A setting has its default value once its leading ``# `` is removed."""
    rows = [
        f"## Settings of recorder; {CONFIG_FILE} names this file. A line takes effect without its leading '# '.",
        "",
    ]
    for item in fields(Settings):
        rows.append(f"## {item.metadata['doc']}")
        if choices := item.metadata["choices"]:
            rows.append(f"## one of: {', '.join(choices)}")
        if item.name == "preset":
            for name, rules in PRESETS.items():
                rows += [f"##   {name}:", *(f"##     {rule.text}" for rule in rules)]
        if item.name == "rules":
            rows += ["# rules = [", *(f"#   {json.dumps(rule.text)}," for rule in DEFAULT_RULES), "# ]", ""]
            continue
        default: Any = item.default
        if item.name.endswith("_bytes") and default:
            default = bytes_of_setting(default).partition(" (")[0]
        rows += [f"# {item.name} = {json.dumps(default)}", ""]
    return "\n".join(rows)


def config_command(
    show: Annotated[bool, typer.Option("--show", help="Print the settings in force (the default).")] = True,
) -> Reply:
    """Print the settings in force, and where each comes from."""
    return settings_reply(load_settings().explain())
