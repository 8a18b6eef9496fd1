"""Owns ``recorder doctor``: why something will not be recorded here, or was not in a run.

Must never import torch or the package's training side: it answers also where those are broken.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from ..config import FLAG, is_enabled, load_settings
from ..errors import ConfigError
from ..read.modules import ModuleInfo
from ..read.run import Run
from .output import counted, print_json, printable, say_state, size, span

_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_ENTRY_POINT_GROUP = "torch.backends"
_HOOK = "recorder_autoload"
_MAX_LISTED = 10
_STATES = ("ok", "note", "missing")
"""What matters most stands last, next to the prompt."""


class Check(NamedTuple):
    """One answer."""

    state: str
    """``ok``, ``note``, or ``missing``: something is not, or will not be, recorded."""
    text: str


def examine(run: Run | None, *, as_json: bool) -> int:
    """Print the answers and return the exit code: 1 if something is missing."""
    checks = list(_environment() if run is None else _run(run))
    if as_json:
        print_json([check._asdict() for check in checks])
    else:
        for check in sorted(checks, key=lambda check: _STATES.index(check.state)):
            say_state(check.state, check.text)
    return int(any(check.state == "missing" for check in checks))


def _environment() -> Iterator[Check]:
    try:
        is_on = is_enabled()
        off = f"off; {FLAG}=1 turns it on"
        yield Check("ok" if is_on else "note", f"{FLAG}: recording is {'on' if is_on else off}")
    except ConfigError as error:
        yield Check("missing", str(error))
    if os.environ.get(_AUTOLOAD, "1") == "0":
        yield Check("missing", f"{_AUTOLOAD}=0: torch starts no recorder; unset it, or use: recorder run ...")
    else:
        yield Check("ok", f"{_AUTOLOAD}: on")
    hooks = [point for point in metadata.entry_points(group=_ENTRY_POINT_GROUP) if point.module == _HOOK]
    if hooks:
        yield Check("ok", f"entry point: {hooks[0].name} = {hooks[0].value}")
    else:
        yield Check("missing", f"entry point: none in {_ENTRY_POINT_GROUP!r}, so torch cannot start it; pip install it")
    try:
        yield Check("ok", f"torch: {metadata.version('torch')}")
    except metadata.PackageNotFoundError:
        yield Check("missing", "torch: not installed in this environment")
    yield from _shadows()
    yield from _settings()


def _shadows() -> Iterator[Check]:
    """A user's own module of our name wins over the package in a script's folder."""
    own = Path(__file__).resolve().parents[1]
    for name in (f"{own.name}.py", f"{own.name}/__init__.py"):
        shadow = Path.cwd() / name
        if shadow.exists() and shadow.resolve().parent != own:
            hidden = f"hides the package from `import {own.name}` here; recording by {FLAG}=1 is not affected"
            yield Check("note", f"{shadow}: {hidden}")


def _settings() -> Iterator[Check]:
    try:
        loaded = load_settings()
    except ConfigError as error:
        yield Check("missing", f"settings: {error}")
        return
    changed = [f"{one.name} ({one.source})" for one in loaded.explain() if one.source != "default"]
    yield Check("ok", f"settings: {', '.join(changed) or 'all defaults'}; recorder config --show lists them")
    folder = Path(loaded.settings.dir).absolute()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        yield Check("missing", f"{folder}: cannot be written; set RECORDER_DIR")
        return
    free_bytes = shutil.disk_usage(existing).free
    floor_bytes = loaded.settings.min_free_bytes
    state = "missing" if free_bytes < floor_bytes else "ok"
    yield Check(state, f"{folder}: {size(free_bytes)} free, recording pauses below {size(floor_bytes)}")


def _run(run: Run) -> Iterator[Check]:
    state = "ok" if run.num_rows else "missing"
    ranks, steps = span(run.ranks) or "none", span(run.steps) or "none"
    yield Check(state, f"{run.path.name}: {counted(run.num_rows, 'row')}, ranks {ranks}, steps {steps}")
    for problem in run.problems:
        yield Check("missing", problem)
    if run.world_size:
        absent = sorted(set(range(run.world_size)) - set(run.ranks)) if run.world_size <= 1 << 20 else []
        if absent and run.ranks:
            yield Check("missing", f"ranks: nothing of {_listed(list(map(str, absent)))} of {run.world_size}")
    yield from _recorded_settings(run)
    yield from _recorded_modules(run)
    yield from _events(run)
    yield from _accounts(run)


def _recorded_settings(run: Run) -> Iterator[Check]:
    if not run.writers:
        return
    manifest = run.writers[0].manifest
    settings = manifest.get("settings")
    changed = [
        f"{name}={one.get('value')}"
        for name, one in (settings.items() if isinstance(settings, dict) else ())
        if isinstance(one, dict) and one.get("source") != "default" and name != "rules"
    ]
    yield Check("ok", f"settings: {', '.join(changed) or 'all defaults'}")
    rules = manifest.get("rules")
    for rule in rules if isinstance(rules, list) else ():
        yield Check("ok", f"rule: {rule}")
    start = "by the flag" if manifest.get("autoload") is True else "by attach()"
    yield Check("ok", f"started: {start}, steps by {manifest.get('step_source')}")


def _recorded_modules(run: Run) -> Iterator[Check]:
    if not run.modules:
        yield Check("missing", "roots: none, so no module was watched; no module that an optimizer trains was called")
        return
    pairs = run.table(["root", "module_path"]).group_by(["root", "module_path"]).aggregate([])
    recorded = set(zip(*(pairs.column(name).to_pylist() for name in ("root", "module_path")), strict=True))
    for root in dict.fromkeys(root for root, _ in run.modules):
        infos = [info for info in run.modules.values() if info.root == root]
        selected = [info for info in infos if info.has_values]
        yield Check(
            "ok", f"root {root}: {infos[0].class_name}, {counted(len(infos), 'module')}, {len(selected)} selected"
        )
        silent = [info for info in selected if (info.root, info.path) not in recorded]
        for why, some in _by_reason(silent).items():
            names = [repr(info.path) for info in some]
            yield Check("missing", f"root {root}: {counted(len(some), 'module')} left no rows, {why}: {_listed(names)}")


def _by_reason(silent: list[ModuleInfo]) -> dict[str, list[ModuleInfo]]:
    found: dict[str, list[ModuleInfo]] = {}
    for info in silent:
        why = "compiled (their hooks step aside)" if info.is_compiled else "never called at a recorded step"
        found.setdefault(why, []).append(info)
    return found


def _events(run: Run) -> Iterator[Check]:
    """What the recorder itself had to say; the same event of many ranks once."""
    ranks_of: dict[tuple[str, str], list[str]] = {}
    for writer in run.writers:
        events: Any = writer.manifest.get("events")
        for event in events if isinstance(events, list) else ():
            if isinstance(event, dict):
                key = (str(event.get("kind")), str(event.get("message")))
                ranks_of.setdefault(key, []).append(str(writer.rank))
    for (kind, message), ranks in ranks_of.items():
        yield Check("missing", f"event {kind} (rank {_listed(sorted(set(ranks), key=int))}): {message}")


def _accounts(run: Run) -> Iterator[Check]:
    for writer in run.writers:
        where = f"rank {writer.rank}, {writer.name}"
        balance = writer.balance
        if balance.dropped:
            reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(balance.dropped.items()))
            yield Check(
                "missing", f"{where}: {balance.num_dropped} of {counted(balance.observed, 'row')} dropped: {reasons}"
            )
        if balance.retired_rows:
            yield Check("note", f"{where}: {counted(balance.retired_rows, 'old row')} removed to keep the quota")
        if writer.state == "unclosed":
            yield Check("missing", writer.ending)
        elif writer.state == "recording":
            yield Check("note", f"{where}: is recording now")
        for shard in writer.shards:
            if shard.num_trailing_bytes:
                cut = f"{shard.path.name} ends with {shard.num_trailing_bytes} bytes of a write that was cut"
                yield Check("note", f"{where}: {cut}")


def _listed(names: list[str]) -> str:
    shown = [printable(name) for name in names[:_MAX_LISTED]]
    return ", ".join(shown) + (f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else "")
