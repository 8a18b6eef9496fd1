"""Runs at the end of ``import torch`` (entry point group ``torch.backends``) and starts `recorder` if the user asks.

If ``RECORDER`` is off, it imports only `os` and `sys`. If the program has imported `recorder` before torch, it also
registers the ops that loaded artefacts may contain. It must never break ``import torch``: every failure except a wrong
setting is one line on stderr. A user's own ``recorder.py`` next to the script may hide this package from ``import
recorder``. The package is then loaded under another name, so that both work.
"""

import os
import sys

_BESIDE = "_recorder_beside_users_own"


def start() -> None:
    """Start recording if ``RECORDER`` is set.

    Raises:
        SystemExit: with code 2, if a setting is wrong. It leaves ``import torch`` and stops the launch.
    """
    if "_RECORDER_PROBE" in os.environ:  # `recorder prove` compares this program's launches
        try:
            import importlib

            importlib.import_module("recorder_probe").start()
        except Exception as error:
            print(f"recorder: prove does not see this process: {type(error).__name__}: {error}", file=sys.stderr)
    is_off = os.environ.get("RECORDER", "").strip().lower() in ("", "0", "false", "no", "off")
    if is_off and "recorder" not in sys.modules:
        return
    try:
        import importlib

        if is_off:
            importlib.import_module(f"{_package()}.taps.ops")
            return
        launch = importlib.import_module(f"{_package()}.lifecycle.launch")
        if launch.is_launcher():
            launch.start_in_launcher()
        else:
            importlib.import_module(f"{_package()}.lifecycle.active").start_from_environment()
    except Exception as error:
        print(f"recorder: not recording: {type(error).__name__}: {error}", file=sys.stderr)


def lightning(package: str = "lightning.pytorch") -> list[object]:
    """Return Lightning's callbacks for validation losses: entry point ``lightning.pytorch.callbacks_factory``."""
    try:
        active = sys.modules.get("recorder.lifecycle.active") or sys.modules.get(f"{_BESIDE}.lifecycle.active")
        return [active.lightning_callback(package)] if active is not None else []
    except Exception as error:
        print(f"recorder: Lightning's losses are not recorded: {type(error).__name__}: {error}", file=sys.stderr)
        return []


def pytorch_lightning() -> list[object]:
    """Return the callbacks for the package ``pytorch_lightning``, whose classes are others than Lightning's."""
    return lightning("pytorch_lightning")


def _package() -> str:
    """Return the name under which this package can be imported. If needed, import it under another name first."""
    import importlib.util

    own_folder = os.path.dirname(os.path.abspath(__file__))
    beside, above = os.path.join(own_folder, "recorder"), os.path.dirname(own_folder)
    folder = beside if os.path.isfile(os.path.join(beside, "records.py")) else above
    ours = os.path.join(folder, "__init__.py")
    try:
        spec = importlib.util.find_spec("recorder")
    except (ImportError, ValueError):
        spec = None
    if spec is not None and spec.origin is not None and os.path.realpath(spec.origin) == os.path.realpath(ours):
        return "recorder"
    name = _BESIDE
    if name not in sys.modules:
        own = importlib.util.spec_from_file_location(name, ours, submodule_search_locations=[folder])
        if own is None or own.loader is None:
            raise ImportError(f"no package at {ours}")
        module = importlib.util.module_from_spec(own)
        sys.modules[name] = module
        own.loader.exec_module(module)
    return name
