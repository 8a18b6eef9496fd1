from __future__ import annotations

import json
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from ...config import CONFIG_FILE, DEFAULT_RULES, PRESETS, Settings
from ...errors import ConfigError
from ...system.text import bytes_of_setting

EPILOG = "Examples: recorder init    recorder init slow-disk.toml"


def command(
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
    """Return a TOML file of comments: a setting with its default takes effect once its leading ``# `` is removed."""
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
