"""The recorder: finds what to record, begins the recording at the first root call, and ends it with the process.

A root is a model under hooks. Nothing starts before the first root call, because a launcher's agent, a data loader's
worker and a compile worker import torch too. Nothing here may raise into training.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim import Optimizer

from .. import config
from ..capture.core import Capture
from ..capture.hooks.callbacks import ROOTS
from ..capture.hooks.module_hooks import MODULES
from ..capture.hooks.root import Root
from ..capture.parallel import topology
from ..capture.parallel.marks import main_parameter
from ..config import Loaded
from ..format.manifest import EXCEPTION
from ..observe import tree
from ..observe.tree import has_compiled_anything
from ..system import log
from ..system.log import Events
from ..system.processes import comes_from_signal_handler, is_program
from ..system.text import one_line
from .model_search import (
    Discovery,
    EarlyOptimizers,
    collector_paused,
    is_data_worker,
    is_only_model,
    model_around,
    unmatched_rules,
)
from .recording import Recording
from .ring import RingWatch
from .signals import TerminationWatch, replaced_interrupts, unhandled_exception

_logger = logging.getLogger("recorder")
_MAX_RENEWALS = 20
"""After so many finds of modules that were added after the first call, and searches in vain at a step with unknown
parameters, no search follows."""
_SEARCH_EVERY = 16
"""The number of steps from one search to the next. A step with unknown parameters starts a search, too."""
_LAST_S = 5.0
"""The seconds for which the writer may go on after the third interrupt."""
_MOST_SETS = 16
"""The most data loaders whose numbers of samples the manifest has, of those that give all samples in one batch."""
_NUM_TRIES = 3
"""The number of attempts to end the recording when interrupts break it off."""


class Recorder:
    """One recording, made at ``import torch`` or by `attach`. It runs from a model's first call until it is closed."""

    def __init__(
        self, loaded: Loaded, *, version: str, by_flag: bool, on_change: Callable[[Recorder, bool], None]
    ) -> None:
        """Start nothing before a model's first call. Raises ConfigError if a file of rules in the settings is wrong.

        `by_flag` is True if ``RECORDER=1`` asks for the recording, False if the program does. `on_change` is called
        with True when this recorder begins to record, and with False when it is over.
        """
        self.loaded = loaded
        self.settings = loaded.settings
        self._ring = RingWatch(loaded)
        self.by_flag = by_flag
        self._version = version
        self._dir = Path(loaded.settings.dir).absolute()  # as the program may change its directory
        self.events = Events()
        self.recording: Recording | None = None
        """The recording; None before the first call of a model to record."""
        self.capture: Capture | None = None
        """The part of `recording` that runs in training's hooks; None before the first call of a model to record."""
        self._pid = os.getpid()
        self._on_change = on_change
        self._lock = threading.RLock()
        self._termination: TerminationWatch | None = None
        self._is_closed = False
        self._early = EarlyOptimizers(self.events, closure_returned=self._closure_returned)
        self.first_step: int | None = None
        """The step that the program named before the first call of a recorded model; None if it named no step."""
        self._num_optimizers = 0
        self._num_judged = 0
        """The number of module paths when the rules' patterns were last compared with these paths."""
        self._num_renewals = 0
        self._turned_down = (0, "")
        """The largest module that ran without being recorded: its number of parameters and its class name."""
        self.discovery: Discovery | None = None
        if by_flag:
            self.discovery = Discovery(
                is_inside_root=self.is_inside_root,
                wants=self.wants,
                make_root=self.make_root,
                failed=self.discovery_failed,
            )
            self._early.watch_steps()
            atexit.register(self._at_exit)

    # -- called by discovery ----------------------------------------------------------------------------------------

    def is_inside_root(self) -> bool:
        """Return True if this thread is inside a call of a root (a model under hooks)."""
        return self.capture is not None and self.capture.root_calls.depth > 0

    def wants(self, module: nn.Module) -> bool:
        """Return True if a call of an outermost module should be recorded: an optimizer trains it, or may soon."""
        if self.is_over or is_data_worker():
            return False
        if self.capture is not None and (root := self.capture.roots.root_of(module)) is not None:
            return not self.capture.every_call_is_a_step and root.can_enter_at(module)
        parameters = list(module.parameters())
        if not parameters or isinstance(module, ParametrizationList):  # it runs as it is registered, in no model yet
            return False
        trainable = any(p.requires_grad for p in parameters)
        if trainable and torch.is_grad_enabled():
            return True
        optimizers = None if self.recording is None else self.recording.optimizers
        trained = self._early.hold if optimizers is None else optimizers.known.hold
        if trained({id(p) for p in parameters}):
            return True
        if self.settings.roots == "any" and not self._early.live and not (optimizers and optimizers.known.by_id):
            return True
        self._turned_down = max(self._turned_down, (len(parameters), tree.class_name(module)))
        return False

    def make_root(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        """Find or make the root (model under hooks) of a module whose call is running. Return its arguments if changed.

        The setting `jitter` changes arguments. The result is None if the arguments stay as they are.

        Raises:
            SystemExit: with code 2, if a rule matches no module and no other model could be meant.
        """
        has_hooks = self.capture is not None and self.capture.roots.root_of(module) is not None
        root = self._root_for(module)
        if root.can_enter_at(module):
            root.enter_at(module)
        if not root.is_entry(module):
            return None  # TorchScript takes no hooks, so the call's end is unknown, and only taps are recorded
        try:
            root.begins(module)
        except Exception as error:  # the error counts as one in the root's own hook, and discovery goes on
            root.failed(error)
            return None
        moved = root.jitter(module, args, kwargs) if root.jitter is not None else None
        if moved is not None:
            args = moved[0]
            kwargs.update(moved[1])  # in place, because the call goes on with this very dict
        watch = None if has_hooks else next((w for w in root.modules if w.module() is module), None)
        if watch is not None and watch.hooks.pre_hook is not None:
            watch.hooks.pre_hook(module, args, kwargs)
        return args if moved is not None else None

    def _root_for(self, module: nn.Module) -> Root:
        """Return the root (recorded model) that contains a module, or make the outermost model around it a root."""
        capture = self.capture
        if capture is not None and (root := capture.roots.root_of(module)) is not None:
            return root
        model, optimizers, whole_sets = model_around(module, of_any=self.settings.roots == "any")
        if capture is None:
            self._stop_for_rules(model)
            self._early.live = optimizers  # `_start` takes the optimizers, without another scan of all objects
        elif (root := capture.roots.root_of(model)) is not None and self.recording is not None:
            # The root has got another outermost module.
            with self._lock, collector_paused():
                root.renew()
                self.recording.optimizers.rescan()
            return root
        root = self.add_root(model, None)
        if whole_sets:
            root.notes.note(whole_sets=whole_sets[:_MOST_SETS])
        return root

    def _stop_for_rules(self, module: nn.Module) -> None:
        """Stop the launch before the first step if a rule can match no module: its setting must be wrong."""
        source = self.loaded.sources.get("rules", "default")
        if self.settings.roots == "any" or self._early.has_stepped or source == "default":
            return
        with collector_paused():
            problems = unmatched_rules(self.settings.rules, module)
        if not problems or not is_only_model(module):
            return
        shown = f"{config.PREFIX}RULES" if source == "environment" else "rules"
        if self.discovery is not None:
            self.discovery.stop()
        self._undo_start()
        sys.stderr.write(f"recorder: {shown} ({source}): {'; '.join(problems)}\n")
        raise SystemExit(2)

    def discovery_failed(self, error: Exception) -> None:
        """Stop looking for models to record after an error of the recorder itself."""
        if comes_from_signal_handler(error):
            raise error
        self.events.add("start_failed", f"not recording: {type(error).__name__}: {error}", exception=error)
        self.events.say()
        if self.discovery is not None:
            self.discovery.stop()

    @property
    def is_over(self) -> bool:
        """True if the recorder was closed, or belongs to a parent process."""
        return self._is_closed or os.getpid() != self._pid

    # -- roots ----------------------------------------------------------------------------------------------------

    def add_root(self, module: nn.Module, name: str | None) -> Root:
        """Make a module a root (a model under hooks), and put the hooks on it. The first root starts the recording."""
        with self._lock:
            if self.recording is None:
                try:
                    self._start(module)
                except Exception:
                    self._undo_start()
                    raise
                except BaseException:  # such as Ctrl-C: the next call tries again, unless the writer already runs
                    if self.recording is None or not self.recording.writer.stats().is_alive:
                        self._forget_start()
                    raise
            assert self.recording is not None
            with collector_paused():
                root = self.recording.capture.roots.add(module, name)
                self.recording.optimizers.rescan()
            return root

    def _start(self, module: nn.Module) -> None:
        self.recording = recording = Recording(
            self.loaded, self._ring, self.events, self._dir, version=self._version, by_flag=self.by_flag,
            on_step=self._optimizer_stepped, on_search=self._search_again,
        )  # fmt: skip
        self.capture = capture = recording.capture
        live = self._early.take()  # from now on the recorder holds only weak references to the optimizers
        for optimizer in live:
            recording.optimizers.known.groups_of(optimizer)
        if not self.by_flag:  # an earlier training may have left its optimizer, whose steps do not count
            parameters = {id(one) for p in module.parameters() for one in (p, main_parameter(p))}
            live = [o for o in live if any(id(p) in parameters for group in o.param_groups for p in group["params"])]
        capture.every_call_is_a_step = self.settings.roots == "any" and not live
        for optimizer in live:
            recording.optimizers.known.name_of(optimizer)
        clock = capture.clock
        resumed = _last_step(live)
        if resumed is not None:
            clock.step, clock.source = resumed, "optimizer"
        if self.first_step is not None:
            clock.name(self.first_step)
        if clock.source != "counted":
            capture.step_changed()
        self._early.unwatch_steps()
        if not self.by_flag:
            atexit.register(self._at_exit)
        deadline_s = self.settings.close_deadline_s
        trigger = self.settings.trigger_signal if self._ring.has_triggers else ""
        self._termination = TerminationWatch(
            flush=lambda: recording.writer.drain(deadline_s),
            finish=self._finish,
            deadline_s=deadline_s,
            ending=lambda number: self.ask("signal", f"the process was ended by {signal.Signals(number).name}"),
            trigger=signal.Signals[trigger] if trigger else None,
            triggered=lambda: self.ask("user", f"signal {trigger}"),
        )
        self._termination.install()
        recording.start(lambda: self._on_change(self, True))

    def ask(self, kind: str, reason: object, *, step: int | None = None) -> None:
        self._ring.ask(kind, reason, step=step)

    def ask_for_error(self, error: BaseException) -> None:
        """Record that an exception ends the training, and request that the ring (the last steps) is written."""
        reason = f"{type(error).__name__}: {one_line(error)}"
        self.events.add(EXCEPTION, reason, level=logging.DEBUG)  # the program itself prints the exception
        self.ask(EXCEPTION, reason)

    def _undo_start(self) -> None:
        """Undo a failed start (no memory for the pool, or no thread). Training goes on without a recording."""
        self._is_closed = True
        self._early.unwatch_steps()
        self._forget_start()
        atexit.unregister(self._at_exit)
        self._on_change(self, False)

    def _forget_start(self) -> None:
        if self.recording is not None:
            self.recording.unhook()
        if self._termination is not None:
            self._termination.uninstall()
            self._termination = None
        self.recording = self.capture = None

    # -- steps ----------------------------------------------------------------------------------------------------

    def _search_again(self, optimizer: Optimizer) -> None:
        if self.discovery is not None and not self.discovery.is_on and not self._is_closed:
            self.discovery.start()

    def _optimizer_stepped(self, optimizer: Optimizer) -> None:
        """Stop looking for models once all trained parameters are recorded. A new optimizer starts the search again."""
        assert self.recording is not None
        capture, optimizers, discovery = self.recording.capture, self.recording.optimizers, self.discovery
        capture.every_call_is_a_step = False
        if not capture.has_stepped:
            capture.has_stepped = True
            for root in capture.roots:
                root.step_is_over(has_compiled=has_compiled_anything())
        is_known = optimizers.has_root(optimizer)
        is_due = not is_known or capture.clock.num_optimizer_steps % _SEARCH_EVERY == 0
        if is_due and self._num_renewals < _MAX_RENEWALS:
            has_grown = capture.roots.renew_grown()
            self._num_renewals += has_grown or not is_known
            if has_grown:
                optimizers.rescan()
        if discovery is None or not discovery.is_on:
            return
        if optimizers.known.num_named != self._num_optimizers:
            self._num_optimizers = optimizers.known.num_named
            discovery.reconsider()
        if not optimizers.all_have_roots() or optimizers.known.have_common_parameters():
            return
        self._check_patterns(self.recording)
        if not has_compiled_anything():
            discovery.stop()

    def _check_patterns(self, recording: Recording) -> None:
        """Report rules that match nothing. Called at many steps; checks only if the number of modules has changed."""
        capture = recording.capture
        paths = [path for root in capture.roots for path in root.inventory.paths]
        if len(paths) != self._num_judged:
            self._num_judged = len(paths)
            problems = capture.selection.unmatched(paths)
            # FSDP1 takes the parameters out of their modules.
            if not any(root.parameters.flats for root in capture.roots):
                modules = [module for root in capture.roots for module in root.inventory.described]
                problems += capture.selection.without_parameters(modules)
            problems += capture.selection.for_no_rank(recording.world_size)
            for problem in problems:
                self.events.add("pattern_unmatched", problem, key=problem, level=logging.ERROR)

    def _closure_returned(self, optimizer: Optimizer) -> None:
        if self.recording is not None:
            self.recording.optimizers.closure_returned(optimizer)

    # -- called by attachments ---------------------------------------------------------------------------------------

    def flush(self, deadline_s: float) -> bool:
        """Wait until all values observed so far are on disk. Return False if the deadline passes first."""
        if self.recording is None:
            return True
        self.recording.capture.fetch()
        return self.recording.writer.drain(deadline_s)

    def status(self) -> dict[str, Any]:
        """Return the content of `_status.json` as of now, with run directory and counts of rows. Any thread."""
        return {} if self.recording is None else self.recording.status()

    def run_dir(self) -> Path | None:
        """Return the run directory; None until the writer has made it."""
        return None if self.recording is None else self.recording.run_dir

    # -- the end --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Remove all hooks, and write remaining data before the deadline. Idempotent; a no-op in a forked child."""
        if self.is_over:
            return
        self._is_closed = True
        self._on_change(self, False)
        try:
            self._close()
        except Exception as error:
            self.events.add("close_failed", f"the recording ended badly: {error!r}", exception=error)
        finally:
            if self.recording is not None:
                self.recording.stop_carrying()
        atexit.unregister(self._at_exit)  # done last, because an interrupt may have left the writer open
        self.events.say(is_last=True)

    def _at_exit(self) -> None:
        """End the recording as the interpreter ends. After a third Ctrl-C, rows that need over `_LAST_S` are lost.

        The counts of rows are completed however often Ctrl-C comes.
        """
        if os.getpid() != self._pid:
            return
        if (error := unhandled_exception()) is not None:
            self.ask_for_error(error)
        num_interrupts = 0

        def interrupted() -> None:
            nonlocal num_interrupts
            num_interrupts += 1
            if num_interrupts > 1 and self.recording is not None:
                self.recording.writer.hurry(_LAST_S)

        with replaced_interrupts(interrupted):
            for _ in range(_NUM_TRIES):
                try:
                    self._finish()
                    break
                except (KeyboardInterrupt, SystemExit):  # a signal handler of the program has raised this error
                    interrupted()
        recording = self.recording
        if num_interrupts > 1 and recording is not None and not recording.writer.close(_LAST_S).is_complete:
            text = "interrupted while the recording ended; what was not written yet is lost"
            log.log(_logger, logging.WARNING, text)

    def _close(self) -> None:
        if self.discovery is not None:
            self.discovery.stop()
        self._early.unwatch_steps()
        if self.recording is None:
            self._say_why_nothing()
            return
        if self._turned_down[0] and self.settings.preset == "rollout":
            text = f"{self._turned_down[1]} ran and was not recorded, as no optimizer trained it"
            self.events.add("no_root", f"{text}: an engine that is a second model needs a process of its own")
        self.recording.close()
        if self._termination is not None:  # done last, so that a signal before this line cannot prevent the summary
            self._termination.uninstall()

    def _say_why_nothing(self) -> None:
        """Log why nothing was recorded. Only rank 0 logs that no module was called.

        It is not logged if the program failed, or only launched other programs.
        """
        if self._turned_down[0]:
            why = f"{self._turned_down[1]} ran, but no optimizer trains it"
            advice = "RECORDER_ROOTS=any records a process without an optimizer"
        elif topology.read().rank == 0 and is_program() and unhandled_exception() is None:
            why = "this process called no torch.nn.Module with parameters"
            advice = "RECORDER=1 records models in the process that trains them"
            if has_compiled_anything():
                why = "the model ran only in compiled code"
                advice = "compile the model and not the step, or call recorder.instrument(model) before it is compiled"
        else:
            return
        self.events.add("no_root", f"nothing was recorded: {why}; {advice}")

    def _finish(self) -> None:
        """End the recording because the process is about to end. If `close` is running, wait until it is done."""
        if not self._is_closed:
            self.close()
        elif self.recording is not None:
            self.recording.finish()

    def hold_signals(self) -> None:
        """Block signals before a fork, until `TerminationWatch.release`."""
        if self._termination is not None:
            self._termination.hold()

    def abandon(self) -> None:
        """Forget the parent's recording in a forked child, without taking a lock or writing a byte."""
        self._is_closed = True
        MODULES.clear()
        ROOTS.clear()
        if self.capture is not None:
            self.capture.is_open = False
        if self.discovery is not None:
            self.discovery.stop()
        if self._termination is not None:
            self._termination.abandon()
        self._on_change(self, False)


def _last_step(optimizers: list[Optimizer]) -> int | None:
    """Return the largest ``state["step"]`` of the optimizers. Return None if no state has a step.

    Only this function waits for a device. Steps on a device are ignored while a graph is captured there, or if the user
    forbids waiting for the device.
    """
    recorded = [
        state["step"]
        for optimizer in optimizers
        for state in optimizer.state.values()
        if isinstance(state, dict) and "step" in state
    ]
    steps = [int(step) for step in recorded if not _is_on_gpu(step)]
    for device in {step.device for step in recorded if _is_on_gpu(step)}:
        if not torch.cuda.is_current_stream_capturing():
            with contextlib.suppress(RuntimeError):
                there = [step.detach().reshape(()) for step in recorded if _is_on_gpu(step) and step.device == device]
                steps.append(int(torch.stack(there).max()))
    return max(steps, default=None)


def _is_on_gpu(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda
