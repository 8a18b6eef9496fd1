"""The recorder of this process: joins capture to the writer, from the first root call to the end of the process.

One is active at a time. Nothing starts before the first root call: a launcher's agent, a data loader's worker and a
compile worker import torch too. Nothing here may raise into training.
"""

from __future__ import annotations

import atexit
import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from . import __version__, config
from .attachment import Attachment
from .capture import hooks, topology, tree
from .capture.core import Capture
from .capture.discovery import Discovery, has_compiled_anything
from .capture.events import Events, comes_from_signal_handler
from .capture.optimizers import OptimizerWatch, find_live, last_step, wrap_closure
from .capture.pool import Pool, default_capacity_bytes
from .capture.root import Root
from .config import Loaded
from .errors import AttachError, ConfigError
from .signals import TerminationWatch

_logger = logging.getLogger("recorder")
_package = sys.modules[__package__]
_start_lock = threading.RLock()
_MAX_LIVE_SCANS = 5
"""Scans of all objects for optimizers (0.1 s for 361,000 objects) before a process without one is left alone."""
_MAX_RENEWALS = 20
"""Looks for modules that came after the first call, at steps that update parameters of unknown origin."""
_SETTLE_S = 1.0
"""How long the first forward waits for the writer to have its directory."""


class Recorder:
    """One recording: armed at ``import torch`` or by `attach`, running from the first root call, then closed."""

    def __init__(self, loaded: Loaded, *, by_flag: bool) -> None:
        self.loaded = loaded
        self.settings = loaded.settings
        self.by_flag = by_flag
        self._dir = Path(loaded.settings.dir).absolute()  # the program may change its working directory later
        self.events = Events()
        self.capture: Capture | None = None
        self._pid = os.getpid()
        self._optimizers: OptimizerWatch | None = None
        self._writer: Any = None
        self._topology: topology.Topology | None = None
        self._termination: TerminationWatch | None = None
        self._started_ns = 0
        self._is_closed = False
        self._live_scans = 0
        self._live: list[Optimizer] = []
        self._has_stepped = False
        self._num_optimizers = 0
        self._num_renewals = 0
        self._turned_down = (0, "")
        """The largest module that ran under no root, by its number of parameters."""
        self._manifest_key: object = None
        self.discovery = Discovery(self) if by_flag else None
        self._early_handles: list[Any] = []
        if by_flag:
            self._early_handles = [
                register_optimizer_step_pre_hook(self._steps_before_root),
                register_optimizer_step_post_hook(self._stepped_without_root),
            ]
            atexit.register(self.close)

    # -- what discovery asks --------------------------------------------------------------------------------------

    def is_inside_root(self) -> bool:
        """Whether this thread is inside a root's call."""
        return self.capture is not None and self.capture.nesting.depth > 0

    def wants(self, module: nn.Module) -> bool:
        """Whether an outermost module is a root: an optimizer trains it, or it is about to be trained."""
        if self._is_closed or os.getpid() != self._pid or _is_data_worker():
            return False
        if self.capture is not None and self.capture.knows(module):
            return False
        parameters = list(module.parameters())
        if not parameters:
            return False
        trainable = any(p.requires_grad for p in parameters)
        if trainable and torch.is_grad_enabled():
            return True
        if self._is_trained({id(p) for p in parameters}):
            return True
        if self.settings.roots == "any" and not self._live and not (self._optimizers and self._optimizers.known):
            return True
        self._turned_down = max(self._turned_down, (len(parameters), tree.class_name(module)))
        return False

    def _is_trained(self, parameters: set[int]) -> bool:
        if self._optimizers is not None:
            return self._optimizers.holds(parameters)
        if not self._live and self._live_scans < _MAX_LIVE_SCANS:
            self._live_scans += 1
            self._live = find_live()
        return any(id(p) in parameters for o in self._live for g in o.param_groups for p in g["params"])

    def found(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make a module a root; its call is under way."""
        root = self.add_root(module, None)
        root.begins(module)
        watch = next((w for w in root.watches if w.module() is module), None)
        if watch is not None and watch.pre_hook is not None:
            watch.pre_hook(module, args, kwargs)

    def discovery_failed(self, error: Exception) -> None:
        """An error of ours while a root was looked for."""
        if comes_from_signal_handler(error):
            raise error
        self.events.add("start_failed", f"not recording: {type(error).__name__}: {error}", exception=error)
        self.events.say()
        if self.discovery is not None:
            self.discovery.stop()

    # -- roots ----------------------------------------------------------------------------------------------------

    def add_root(self, module: nn.Module, name: str | None) -> Root:
        """Start if this is the first root, and put hooks on it."""
        with _start_lock:
            if self.capture is None:
                self._start()
            assert self.capture is not None and self._optimizers is not None
            root = self.capture.add_root(module, name)
            self._optimizers.rescan()
            return root

    def _start(self) -> None:
        from .capture.measure import measure
        from .write.writer import Writer

        self._started_ns = time.time_ns()
        here = self._topology = topology.read()
        capacity = self.settings.pool_bytes or default_capacity_bytes(here.local_world_size)
        writer = Writer(
            settings=_write_settings(self.settings),
            measure=measure,
            resolve_dir=self._resolve_place,
            poll=self._poll,
            observed=lambda: self.capture.observed if self.capture is not None else 0,
        )
        pool = Pool(capacity, progress_s=lambda: writer.last_progress_s, clock=time.monotonic)
        self._writer = writer
        self.capture = Capture(settings=self.settings, rank=here.rank, pool=pool, channel=writer, events=self.events)
        self._optimizers = OptimizerWatch(self.capture, on_step=self._optimizer_stepped, on_new=self._optimizer_made)
        live = self._live or find_live()
        self._live = []  # known from now on by weak references
        for optimizer in live:
            self._optimizers.name_of(optimizer)
        self.capture.every_call_is_a_step = self.settings.roots == "any" and not live
        clock = self.capture.clock
        resumed = last_step(live)
        if resumed is not None:
            clock.step, clock.source = resumed, "optimizer"
            self.capture.step_changed()
        self._remove_early_hooks()
        if not self.by_flag:
            atexit.register(self.close)
        deadline_s = self.settings.close_deadline_s
        self._termination = TerminationWatch(flush=lambda: self.flush(deadline_s), finish=self._finish)
        self._termination.install()
        writer.set_manifest(self._manifest())
        unsettled_s = writer.last_progress_s
        writer.start()
        _package._active = self  # type: ignore[attr-defined]
        # A disk that takes nothing is said before the first step; one that is merely slow holds nothing up.
        until_s = time.monotonic() + _SETTLE_S
        while writer.last_progress_s == unsettled_s and time.monotonic() < until_s:
            time.sleep(0.001)

    def _resolve_place(self) -> Any:
        """Where to write; on the writer thread, for it may wait for the other ranks."""
        from .write.writer import RunPlace

        here = self._topology
        assert here is not None
        name, is_shared = topology.run_id(here, deadline_s=self.settings.join_deadline_s)
        if not is_shared:
            self.events.add(
                "unjoined",
                f"the ranks could not agree on a run name, so this rank writes to {name!r}; start through torchrun or "
                "initialise the process group before the first forward",
            )
        manifest = {
            "format": "recorder",
            "version": [1, 0],
            "run_id": name,
            "world_size": here.world_size,
            "created_ns": self._started_ns,
            "asked": {item.name: item.value for item in self.loaded.explain() if item.source != "default"},
        }
        return RunPlace(run_dir=self._dir / name, run_manifest=manifest, rank=here.rank, attempt=here.attempt)

    def _manifest(self) -> dict[str, Any]:
        """What `_writer.json` says; any thread."""
        here, capture = self._topology, self.capture
        assert here is not None and capture is not None
        optimizers = self._optimizers
        return {
            "rank": here.rank,
            "local_rank": here.local_rank,
            "node_rank": here.node_rank,
            "world_size": here.world_size,
            "host": here.host,
            "pid": self._pid,
            "attempt": here.attempt,
            "started_ns": self._started_ns,
            "versions": {"recorder": __version__, "python": platform.python_version(), "torch": torch.__version__},
            "step_source": capture.clock.source,
            "settings": {e.name: {"value": e.value, "source": e.source} for e in self.loaded.explain()},
            "rules": [rule.text for rule in self.settings.rules],
            "pool_bytes": capture.pool.capacity_bytes,
            "pool_peak_bytes": capture.pool.peak_bytes,
            "waited_s": round(capture.pool.waited_s, 3),
            "roots": [_describe_root(root) for root in capture.past_roots + capture.roots],
            "optimizers": optimizers.names() if optimizers is not None else [],
            "events": self.events.as_list(),
            "autoload": self.by_flag,
        }

    def _poll(self) -> None:
        """On the writer thread, several times a second: log what happened, keep the manifest up to date."""
        try:
            self.events.say()
            if self._termination is not None:
                self._termination.poll()
            capture = self.capture
            if capture is None or self._is_closed:
                return
            roots = tuple((root, root.data_parallel is None) for root in capture.roots)
            key = (self.events.has_changed, capture.clock.source, roots)
            if key != self._manifest_key:
                self.events.has_changed = False
                self._manifest_key = (False, *key[1:])
                self._writer.set_manifest(self._manifest())
        except Exception as error:
            self.events.add("hook_error", f"bookkeeping failed: {type(error).__name__}: {error}", key="poll")

    # -- steps ----------------------------------------------------------------------------------------------------

    def _optimizer_made(self, optimizer: Optimizer) -> None:
        """A new optimizer may train a model that is not known yet."""
        if self.discovery is not None and not self.discovery.is_on and not self._is_closed:
            self.discovery.start()

    def _optimizer_stepped(self, optimizer: Optimizer) -> None:
        """Once every parameter has a root, nothing is left to discover; a new optimizer starts the search again."""
        capture, discovery, optimizers = self.capture, self.discovery, self._optimizers
        assert capture is not None and optimizers is not None
        capture.every_call_is_a_step = False
        if not self._has_stepped:
            self._has_stepped = True
            if has_compiled_anything():
                for root in capture.roots:
                    root.mark_silent_as_compiled()
        if not optimizers.has_root(optimizer) and self._num_renewals < _MAX_RENEWALS:
            self._num_renewals += 1
            if capture.renew_grown_roots():
                optimizers.rescan()
        if discovery is None or not discovery.is_on:
            return
        if len(optimizers.known) != self._num_optimizers:
            self._num_optimizers = len(optimizers.known)
            discovery.reconsider()
        if not optimizers.all_have_roots():
            return
        for problem in capture.selection.unmatched(self._module_paths()):
            self.events.add("pattern_unmatched", problem, key=problem, level=logging.ERROR)
        if not has_compiled_anything():
            discovery.stop()

    def _steps_before_root(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The first forward may run in a closure that this step is given."""
        if self.capture is not None or os.getpid() != self._pid or torch.compiler.is_compiling():
            return None

        def returned() -> None:
            if self._optimizers is not None:
                self._optimizers.closure_returned(optimizer)

        return wrap_closure(args, kwargs, returned)

    def _remove_early_hooks(self) -> None:
        for handle in self._early_handles:
            handle.remove()
        self._early_handles.clear()

    def _stepped_without_root(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.capture is not None or os.getpid() != self._pid:
            return
        self.events.add(
            "no_root",
            f"not recording: {type(optimizer).__name__} stepped, but no module with its parameters was seen to run "
            "(compiled in place, or called through .forward()); call recorder.attach(model) before the first step",
        )
        self.events.say()
        self._remove_early_hooks()

    def _module_paths(self) -> list[str]:
        assert self.capture is not None
        return [path for root in self.capture.roots for path in root.paths]

    # -- what users call ------------------------------------------------------------------------------------------

    def tap(self, name: str, tensor: Any) -> None:
        """`recorder.tap`; the module is the one whose forward is running."""
        if torch.compiler.is_compiling() or self.capture is None or not isinstance(tensor, torch.Tensor):
            return
        try:
            self.capture.tap(name, tensor, self._calling_module())
        except Exception as error:
            self.capture.hook_failed(f"tap {name!r}", error)

    def _calling_module(self) -> nn.Module | None:
        """The innermost module of a root on the call stack, so that a tap needs no bookkeeping elsewhere."""
        frame = sys._getframe(3)
        capture = self.capture
        while frame is not None and capture is not None:
            code = frame.f_code
            if code.co_argcount and code.co_varnames[0] == "self":
                candidate = frame.f_locals.get("self")
                if isinstance(candidate, nn.Module) and capture.knows(candidate):
                    return candidate
            frame = frame.f_back  # type: ignore[assignment]
        return None

    def scalar(self, name: str, value: Any) -> None:
        """`recorder.scalar`."""
        if torch.compiler.is_compiling() or self.capture is None:
            return
        try:
            self.capture.scalar(name, value)
        except Exception as error:
            self.capture.hook_failed(f"scalar {name!r}", error)

    def name_step(self, number: int) -> None:
        """`recorder.step`."""
        if self.capture is not None:
            self.capture.clock.name(int(number))
            self.capture.step_changed()

    def flush(self, deadline_s: float) -> bool:
        """Everything seen so far is on disk; False where the deadline came first."""
        return self._writer is None or bool(self._writer.drain(deadline_s))

    def place(self) -> Path | None:
        """The run directory."""
        directory = self._writer.directory if self._writer is not None else None
        return directory.parent.parent if directory is not None else None

    # -- the end --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Remove all hooks, write what is left within the deadline. Idempotent; in a forked child it does nothing."""
        if self._is_closed or os.getpid() != self._pid:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        _forget(self)
        try:
            self._close()
        except Exception as error:
            self.events.add("close_failed", f"the recording ended badly: {error!r}", exception=error)
        self.events.say()

    def _close(self) -> None:
        if self.discovery is not None:
            self.discovery.stop()
        self._remove_early_hooks()
        if self._optimizers is not None:
            self._optimizers.close()
        if self.capture is None:
            if self._turned_down[0]:
                self.events.add(
                    "no_root",
                    f"nothing was recorded: {self._turned_down[1]} ran, but no optimizer trains it; "
                    "RECORDER_ROOTS=any records a process without an optimizer",
                )
            return
        self._say_if_step_never_moved(self.capture)
        self._writer.set_manifest(self._manifest())
        self.capture.close()
        report = self._writer.close(self.settings.close_deadline_s)
        if self._termination is not None:
            self._termination.uninstall()
        _logger.debug("closed: %s", report)

    def _finish(self) -> None:
        """The process is about to go: end the recording, or wait for the end that is under way."""
        if self._is_closed:
            self._writer.close(self.settings.close_deadline_s)
        else:
            self.close()

    def _say_if_step_never_moved(self, capture: Capture) -> None:
        optimizers = self._optimizers
        by_call = capture.every_call_is_a_step or capture.clock.source == "user"
        if optimizers is not None and optimizers.num_steps == 0 and not by_call:
            self.events.add(
                "step_never_advanced",
                f"no optimizer stepped, so every value is of step {capture.clock.step}; recorder.step(n) names steps",
                level=logging.INFO,
            )

    def abandon(self) -> None:
        """In a forked child: nothing of the parent's recording may be touched, no lock taken, no byte written."""
        self._is_closed = True
        hooks.WATCHES.clear()
        hooks.ROOTS.clear()
        if self.capture is not None:
            self.capture.is_open = False
        if self.discovery is not None:
            self.discovery.stop()
        if self._termination is not None:
            self._termination.abandon()
        _forget(self)


def _describe_root(root: Root) -> dict[str, Any]:
    facts = {} if root.data_parallel is None else {"data_parallel": root.data_parallel}
    return {"name": root.name, "class": root.class_name, **facts, "modules": root.modules}


def _write_settings(settings: config.Settings) -> Any:
    from dataclasses import fields

    from .write.writer import WriteSettings

    shared = {item.name for item in fields(WriteSettings)} & {item.name for item in fields(config.Settings)}
    return WriteSettings(**{name: getattr(settings, name) for name in shared})


def _is_data_worker() -> bool:
    data = sys.modules.get("torch.utils.data")
    return data is not None and data.get_worker_info() is not None


_current: Recorder | None = None


def _forget(recorder: Recorder) -> None:
    global _current
    if _current is recorder:
        _current = None
    if getattr(_package, "_active", None) is recorder:
        _package._active = None  # type: ignore[attr-defined]


def start_from_environment() -> None:
    """Arm the recorder that the flag asks for. Called at the end of ``import torch``.

    Raises:
        SystemExit: code 2, a setting is wrong and no process above has found it right.
    """
    global _current
    try:
        if _current is not None or not config.is_enabled():
            return
        loaded = config.load_settings()
    except ConfigError as error:
        if os.environ.get(config.CHECKED_MARK):
            _logger.error("recorder: not recording: %s", error)
            return
        sys.stderr.write(f"recorder: {error}\n")
        raise SystemExit(2) from None
    os.environ[config.CHECKED_MARK] = "1"
    _current = Recorder(loaded, by_flag=True)


def attach(model: nn.Module, *, name: str | None, settings: Mapping[str, object]) -> Attachment:
    """Attach a model, with the recorder that runs or a new one; see `recorder.attach`."""
    global _current
    if not isinstance(model, nn.Module):
        raise AttachError(f"attach needs a torch.nn.Module, got {type(model).__name__}")
    with _start_lock:
        recorder = _current
        if recorder is None:
            recorder = Recorder(config.load_settings(settings), by_flag=False)
        elif settings:
            wanted = config.load_settings(settings).settings
            if wanted != recorder.settings:
                raise ConfigError(
                    f"a recording is under way with other settings than {', '.join(sorted(settings))}; "
                    "close it first, or leave them out"
                )
        roots = recorder.capture.roots if recorder.capture is not None else []
        root = next((root for root in roots if root.module() is model), None)
        if root is None:
            _check_rules(recorder, model)
            _current = recorder
            root = recorder.add_root(model, name)
        root.num_attached += 1
    return Attachment(detach=partial(_detach, recorder, root), flush=recorder.flush, place=recorder.place)


def _check_rules(recorder: Recorder, model: nn.Module) -> None:
    from .capture.select import Selection

    selection = Selection(recorder.settings.rules, 0)
    nodes = tree.walk(model)
    for node in nodes:
        for site in config.SITES:
            selection.rule_set(node.path, node.class_name, node.is_leaf, site)
    problems = selection.unmatched([node.path for node in nodes])
    if problems:
        raise AttachError("; ".join(problems))


def _detach(recorder: Recorder, root: Root) -> None:
    """The flag goes on recording; without it the last attached model ends the recording."""
    root.num_attached -= 1
    capture = recorder.capture
    if recorder.by_flag or root.num_attached or capture is None or root not in capture.roots:
        return
    if len(capture.roots) == 1:
        recorder.close()
    else:
        capture.remove_root(root)


def _after_fork_in_child() -> None:
    if _current is not None:
        _current.abandon()


os.register_at_fork(after_in_child=_after_fork_in_child)
