"""Owns ``recorder config``: every setting in force, where it comes from, what it does; and ``init``, a file of them."""

from __future__ import annotations

import json
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..config import CONFIG_FILE, DEFAULT_RULES, PRESETS, Settings, load_settings
from ..errors import ConfigError
from ..native import in_force
from .output import Column, Table, print_json


def show_settings(*, as_json: bool) -> int:
    """Print the settings and return the exit code. A wrong one raises `ConfigError`."""
    settings = load_settings().explain()
    if as_json:
        print_json({one.name: {"value": one.value, "source": one.source, "doc": one.doc} for one in settings})
        return 0
    rows = []
    for one in settings:
        first, *others = lines(one.value, one.name)
        rows.append([one.name, first, one.source, one.doc])
        rows += [["", other, "", ""] for other in others]
    titles = ("setting", "value", "source", "what it does")
    columns = [
        Column(title=title, is_prose=title in ("value", "what it does"), drop=int(title == titles[-1]))
        for title in titles
    ]
    Table(columns, rows).print()
    return 0


def write_example(path: Path) -> int:
    """Write a file of all settings, each a comment with its default, and return the exit code.

    Raises:
        ConfigError: there is such a file, or it cannot be written.
    """
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
    """A TOML file that changes nothing: a line without its ``# `` is a setting with its default."""
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
            default = _bytes(default).partition(" (")[0]
        rows += [f"# {item.name} = {json.dumps(default)}", ""]
    return "\n".join(rows)


def lines(value: Any, name: str = "") -> list[str]:
    """A value for people: each rule on a line of its own, bytes also in the largest unit that holds them."""
    if name.endswith("_bytes") and type(value) is int:
        return ["0 (automatic)" if value == 0 and name == "pool_bytes" else _bytes(value)]
    if isinstance(value, list):
        return [str(item) for item in value] or ["none"]
    if name == "native":
        return [in_force(bool(value))]
    return [str(value) if value != "" else "(empty)"]


def _bytes(value: int) -> str:
    """In the unit in which it is a short number: ``16 GiB (17179869184)``, ``4 GB (4000000000)``."""
    units = [(1000**power, name) for power, name in enumerate(("B", "kB", "MB", "GB", "TB"))]
    units += [(1024**power, name) for power, name in enumerate(("B", "KiB", "MiB", "GiB", "TiB"))]
    count, name = min((value / scale, name) for scale, name in units if scale <= max(value, 1))
    exact = [(value // scale, name) for scale, name in units if scale <= value and value % scale == 0]
    if exact:
        count, name = min(exact)
    return str(value) if name == "B" else f"{count:.4g} {name} ({value})"
