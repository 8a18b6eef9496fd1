"""What would keep this environment from recording: the flag, the hook in torch, the settings, the disk.

Nothing here imports torch or the training side of the package: doctor answers also where those are broken.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from ...config import FLAG, is_enabled, load_settings
from ...errors import ConfigError, install_line
from ...system.text import size
from .reply import AUTOLOAD, Check

_ENTRY_POINT_GROUP = "torch.backends"
_HOOK = "recorder_autoload"


def environment_checks() -> Iterator[Check]:
    """Yield the lines about this environment: what would keep torch from starting the recorder, and the settings."""
    try:
        is_on = is_enabled()
        off = f"off; {FLAG}=1 turns it on"
        yield Check("ok" if is_on else "note", f"{FLAG}: recording is {'on' if is_on else off}")
    except ConfigError as error:
        yield Check("missing", str(error))
    if os.environ.get(AUTOLOAD, "1") == "0":
        yield Check("missing", f"{AUTOLOAD}=0: torch starts no recorder; unset it, or use: recorder run ...")
    else:
        yield Check("ok", f"{AUTOLOAD}: on")
    hooks = [point for point in metadata.entry_points(group=_ENTRY_POINT_GROUP) if point.module == _HOOK]
    if hooks:
        yield Check("ok", f"entry point: {hooks[0].name} = {hooks[0].value}")
    else:
        what = f"entry point: none in {_ENTRY_POINT_GROUP!r}, so torch cannot start it: {install_line()}"
        yield Check("missing", what)
    try:
        yield Check("ok", f"torch: {metadata.version('torch')}")
    except metadata.PackageNotFoundError:
        yield Check("missing", "torch: not installed in this environment: pip install torch")
    yield from _shadows()
    yield from _settings()


def _shadows() -> Iterator[Check]:
    """Find a module of the user's with our name, which hides the package in a script's folder."""
    own = Path(__file__).resolve().parents[2]
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
    changed = [f"{item.name} ({item.source})" for item in loaded.explain() if item.source != "default"]
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
