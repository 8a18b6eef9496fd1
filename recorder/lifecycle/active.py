"""The active recorder of this process, made at ``import torch`` under ``RECORDER=1``, or else by the first `attach`.

At most one recorder is active at a time. A forked child has none. Only wrong settings may raise into training.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from .. import config
from ..capture.hooks.root import Root
from ..capture.parallel.groups import is_whole_pipe
from ..errors import AttachError, ConfigError
from ..sites import is_validation_loss
from ..system import log
from ..taps import ops
from .attachment import Attachment, Inactive
from .model_search import collector_paused, unmatched_rules
from .program import GraphTaps, ProgramCalls
from .recorder import Recorder
from .signals import TerminationWatch

_logger = logging.getLogger("recorder")
_package = sys.modules[__name__.partition(".")[0]]
_lock = threading.RLock()
_current: Recorder | None = None


def _changed(recorder: Recorder, is_recording: bool) -> None:
    global _current
    if is_recording:
        _listen(recorder)
        _package._active = recorder  # type: ignore[attr-defined]
        return
    if _current is recorder:
        _current = _package._program = None  # type: ignore[attr-defined]
        ops.set_sink(None)
    if getattr(_package, "_active", None) is recorder:
        _package._active = None  # type: ignore[attr-defined]


def _listen(recorder: Recorder) -> None:
    """Connect the program's calls and the taps in its graphs to a recorder, unless they are connected already."""
    if _package._program is None:
        _package._program = ProgramCalls(recorder)  # type: ignore[attr-defined]
        ops.set_sink(GraphTaps(recorder))


def start_from_environment() -> None:
    """Make the recorder that ``RECORDER=1`` asks for. Called at the end of ``import torch``.

    Raises:
        SystemExit: with code 2, if a setting is wrong and no parent process has found the settings valid.
    """
    global _current
    try:
        if _current is not None or not config.is_enabled():
            return
        loaded = config.load_settings()
        if not os.environ.get(config.CHECKED_MARK):
            config.check_dir(loaded)
        made = Recorder(loaded, version=_package.__version__, by_flag=True, on_change=_changed)
    except ConfigError as error:
        if os.environ.get(config.CHECKED_MARK):
            log.log(_logger, logging.ERROR, "not recording: %s", error)
            return
        sys.stderr.write(f"recorder: {error}\n")
        raise SystemExit(2) from None
    os.environ[config.CHECKED_MARK] = "1"
    _current = made
    _listen(made)  # the program may compile a graph or call an artifact before the recording starts


def attach(model: nn.Module, *, name: str | None, settings: Mapping[str, object]) -> Attachment:
    """Attach a model to the recorder that runs, or to a new recorder; see `recorder.attach`."""
    global _current
    if not isinstance(model, nn.Module):
        raise AttachError(f"attach needs a torch.nn.Module, got {type(model).__name__}")
    if is_whole_pipe(model):
        raise AttachError(
            "attach got a whole Pipe, which no rank calls; attach its stages: pipe.build_stage(...).submod"
        )
    with _lock:
        recorder = _current
        if recorder is None:
            loaded = config.load_settings(settings)
            config.check_dir(loaded)
            recorder = Recorder(loaded, version=_package.__version__, by_flag=False, on_change=_changed)
        elif settings:
            wanted = config.load_settings(settings).settings
            if wanted != recorder.settings:
                raise ConfigError(
                    f"a recording is under way with other settings than {', '.join(sorted(settings))}; "
                    "close that recording first, or leave these settings out"
                )
        roots = recorder.capture.roots if recorder.capture is not None else []
        root = next((root for root in roots if root.module() is model), None)
        if root is None:
            with collector_paused():
                problems = unmatched_rules(recorder.settings.rules, model)
            if problems:
                raise AttachError("; ".join(problems))
            _current = recorder
            try:
                root = recorder.add_root(model, name)
            except Exception as error:  # for example there is no memory for the pool, which must not make training fail
                recorder.discovery_failed(error)
                return Inactive()
        # A handle may be dropped without being closed, as by a notebook cell that runs again. Its model stays recorded.
        root.is_kept = root.is_kept or any(handle() is None for handle in root.attachments)
        attachment = Attachment(
            detach=partial(_detach, recorder, root),
            flush=recorder.flush,
            run_dir=recorder.run_dir,
            failed=recorder.ask_for_error,
        )
        root.attachments.append(weakref.ref(attachment))
    return attachment


def lightning_callback(package: str) -> Any:
    """Make the callback to which Lightning, as the package of this name, gives the losses that a program logs."""
    base = importlib.import_module(package).Callback
    # A copy of it, or a spawned process, makes a callback of its own, because the class cannot be pickled.
    members = {"on_validation_end": _validated, "__reduce__": lambda callback: (lightning_callback, (package,))}
    return type("ValidationLosses", (base,), members)()


def _validated(callback: Any, trainer: Any, module: Any) -> None:
    try:
        for name, value in {} if trainer.sanity_checking else dict(trainer.callback_metrics).items():
            if is_validation_loss("scalar", name):
                _package.scalar(name, value)
    except Exception as error:
        log.log(_logger, logging.WARNING, "Lightning's validation losses are not recorded: %r", error)


def _detach(recorder: Recorder, root: Root) -> None:
    """Detach one handle. A model's last handle removes its hooks. The last model ends what `attach` began."""
    root.attachments = [handle for handle in root.attachments if (held := handle()) is not None and held.is_attached]
    capture = recorder.capture
    if recorder.by_flag or root.attachments or root.is_kept or capture is None or root not in capture.roots:
        return
    if all(other is root or other.is_stand_in for other in capture.roots):
        recorder.close()
    else:
        capture.roots.end(root)


def _before_fork() -> None:
    if _current is not None:
        _current.hold_signals()


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.RLock()  # another thread of the parent may have held the lock at the fork
    if _current is not None:
        _current.abandon()
    TerminationWatch.release()


os.register_at_fork(before=_before_fork, after_in_parent=TerminationWatch.release, after_in_child=_after_fork_in_child)
