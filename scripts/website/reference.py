"""The reference pages, made from the code: settings, commands, rules of checking, and what is called from Python.

Nothing here states a fact of its own: what a page says of a setting, an option or a rule is what the program says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import recorder
from recorder.checks.book import RULES
from recorder.cli.app import load_command
from recorder.cli.commands import COMMANDS
from recorder.config import DEFAULT_RULES, PREFIX, PRESETS, RANGES, Settings

Row = Sequence[str]


class Page(NamedTuple):
    """A page made from the code."""

    name: str
    make: Callable[[], str]


def _table(titles: Row, rows: Iterable[Row]) -> str:
    """Return a table of Markdown; a bar in a cell is no border."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def size_of(num_bytes: int) -> str:
    """Return a number of bytes as people write it."""
    for shift, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes and num_bytes % (1 << shift) == 0:
            return f"{num_bytes >> shift} {unit}"
    return str(num_bytes)


def bound_of(end: float, *, is_bytes: bool) -> str:
    """Return the end of a range as people write it."""
    if is_bytes:
        return size_of(int(end))
    is_power = isinstance(end, int) and end > 1 << 30 and end.bit_count() == 1
    return f"2^{int(end).bit_length() - 1}" if is_power else f"{end:g}"


def default_of(item: Any) -> str:
    """Return the default of a setting as a page shows it."""
    if item.name == "rules":
        return "the default rules"
    if isinstance(item.default, bool):
        return str(item.default).lower()
    return size_of(item.default) if item.name.endswith("_bytes") else str(item.default)


def make_settings() -> str:
    """Return the page of all settings."""
    ranges = {name: (low, high) for name, low, high in RANGES}
    rows = []
    for item in fields(Settings):
        allowed = ", ".join(map(_code, item.metadata["choices"]))
        if item.name in ranges:
            low, high = ranges[item.name]
            allowed = " to ".join(bound_of(end, is_bytes=item.name.endswith("_bytes")) for end in (low, high))
        elif isinstance(item.default, bool):
            allowed = "`true`, `false`"
        rows.append([_code(item.name), _code(default_of(item)), allowed, item.metadata["doc"]])
    presets = "\n\n".join(
        f"### `{name}`\n\n```text\n" + "\n".join(rule.text for rule in rules) + "\n```"
        for name, rules in PRESETS.items()
    )
    return (
        "# All settings\n\nThis page is made from the code. [Settings](../docs/settings.md) says what to set when.\n"
        f"In the environment a setting is `{PREFIX}` and its name in capitals.\n\n"
        + _table(["setting", "default", "allowed", "what it does"], rows)
        + "\n## The default rules\n\n```text\n"
        + "\n".join(rule.text for rule in DEFAULT_RULES)
        + f"\n```\n\n[Choose what is recorded](../docs/choose.md) explains rules.\n\n## Presets\n\n{presets}\n"
    )


def paragraphs_of(text: str) -> str:
    """Return the text of a help as Markdown, whose signs mean nothing there."""
    return re.sub(r"([*_<`\[\]@{])", r"\\\1", text)


def make_commands() -> str:
    """Return the page of all commands: what each does, its arguments and options, and its examples."""
    parts = ["# All commands\n\nThis page is made from the code. `recorder help COMMAND` says the same.\n"]
    parts.append(_table(["command", "does"], ([f"[`{name}`](#{name})", what] for name, (_, what) in COMMANDS.items())))
    for name in COMMANDS:
        command = load_command(name)
        context = command.make_context(name, [], resilient_parsing=True)
        context.info_name = f"recorder {name}"
        records = [record for one in command.get_params(context) if (record := one.get_help_record(context))]
        usage = " ".join([context.info_name, *command.collect_usage_pieces(context)])
        parts.append(f"## {name}\n\n```text\n{usage}\n```\n\n{paragraphs_of(command.help or '')}\n")
        if records:
            rows = ([_code(typed), paragraphs_of(what)] for typed, what in records)
            parts.append(_table(["argument or option", "what it does"], rows))
        examples = "\n".join(examples_of(command.epilog))
        parts.append(f"```bash\n{examples}\n```\n")
    return "\n".join(parts)


def examples_of(epilog: str) -> list[str]:
    """Return the commands that the last lines of a help show."""
    return [line.strip() for line in epilog.splitlines()[2:]]


def make_rules() -> str:
    """Return the page of the rules of `recorder check`."""
    parts = [
        "# Rules of `recorder check`\n\nThis page is made from the code. `recorder check --list` says the same, and\n"
        "[Check a training](../docs/check.md) explains how rules judge.\n"
    ]
    rows = ([_code(rule.name), rule.severity.word, rule.sentence] for rule in RULES)
    parts.append(_table(["rule", "severity", "finds"], rows))
    parts.append("## Thresholds\n\n`--set RULE.THRESHOLD=NUMBER` sets one.\n")
    thresholds = (
        [_code(f"{rule.name}.{one.name}"), f"{one.default:g}", one.unit, one.source]
        for rule in RULES
        for one in rule.settings
    )
    parts.append(_table(["threshold", "default", "unit", "where the default comes from"], thresholds))
    return "\n".join(parts)


_TRAINING = ("attach", "step", "scalar", "tap", "instrument", "strip", "trace")


def _documented() -> Iterator[tuple[str, list[str]]]:
    names = [name for name in recorder.__all__ if name not in ("errors", "RecorderError")]
    yield "While a model trains", [name for name in _TRAINING if name in names]
    yield "What was recorded", [name for name in names if name not in _TRAINING]


def make_python() -> str:
    """Return the page of what is called from Python, of which Sphinx fills in the docstrings."""
    parts = ["# From Python\n\nThis page is made from the docstrings.\n"]
    for title, names in _documented():
        parts.append(f"## {title}\n")
        for name in names:
            kind = "autoclass" if isinstance(getattr(recorder, name), type) else "autofunction"
            members = "   :members:\n   :inherited-members:\n" if kind == "autoclass" else ""
            parts.append(f"```{{eval-rst}}\n.. {kind}:: recorder.{name}\n{members}```\n")
    parts.append("## Errors\n\nAll of them are in `recorder.errors`.\n")
    for name, kind in vars(recorder.errors).items():
        if isinstance(kind, type):
            parts.append(f"```{{eval-rst}}\n.. autoexception:: recorder.errors.{name}\n   :show-inheritance:\n```\n")
    return "\n".join(parts)


PAGES = (
    Page("settings.md", make_settings),
    Page("commands.md", make_commands),
    Page("rules.md", make_rules),
    Page("python.md", make_python),
)
"""All of them, in the order of the table of contents."""
