"""The recorder, which joins capture to the writer from the first root call to the end of the process.

Nothing starts before the first root call, because a launcher's agent, a data loader's worker and a
compile worker import torch too. Nothing here may raise into training.
"""

from __future__ import annotations

import atexit
import functools
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .. import config, native
from ..capture import topology
from ..capture.core import Capture
from ..capture.hooks import callbacks
from ..capture.hooks.discovery import Discovery
from ..capture.hooks.root import Root
from ..capture.marks import main_parameter
from ..capture.optimizer import OptimizerHooks, last_step
from ..capture.program_values import LossFinder
from ..capture.staging.pool import Pool, default_capacity_bytes
from ..config import Loaded
from ..format.commands import PAUSE, RESUME, SET, UNDO
from ..observe import tree
from ..observe.module_hooks import has_compiled_anything
from ..records import Measured, Staged
from ..system import log
from ..system.log import Events
from ..system.processes import comes_from_signal_handler, is_program, own_process
from ..system.text import one_line
from .carrying import Carrier
from .commands import Commands
from .description import Description
from .model_search import EarlyOptimizers, collector_paused, is_only_model, model_around, unmatched_rules
from .program import GraphTaps, ProgramCalls, is_data_worker
from .ring import RingWatch
from .signals import TerminationWatch, blocked_in_new_threads, replaced_interrupts, unhandled_exception
from .summary import Estimate, FinalSummary, Summary

_logger = logging.getLogger("recorder")
_MAX_RENEWALS = 20
"""The most searches for modules added after the first call. A step with unknown parameters starts a search."""
_START_PATIENCE_S = 1.0
"""The longest wait of the first forward for the writer to make its directory, if the settings allow a wait."""
_LAST_S = 5.0
"""The seconds for which the writer may go on after the third interrupt."""
_NUM_TRIES = 3
"""The number of attempts to end the recording when interrupts break it off."""


class Recorder:
    """One recording: made at ``import torch`` or by `attach`, running from the first root call until it is closed."""

    def __init__(
        self, loaded: Loaded, *, version: str, by_flag: bool, on_change: Callable[[Recorder, bool], None]
    ) -> None:
        """Start nothing before the first root call. ConfigError: the settings name a file of rules that is wrong.

        `by_flag` is True if ``RECORDER=1`` asks for the recording, False if the program does. `on_change` is called
        when this recorder begins to record (True) and when it is over (False).
        """
        self.loaded = loaded
        self.settings = loaded.settings
        self._ring = RingWatch(loaded)
        self.by_flag = by_flag
        self._version = version
        self._final_summary = FinalSummary(
            dir_setting=loaded.settings.dir, is_default=loaded.sources.get("dir", "default") == "default"
        )
        self._dir = Path(loaded.settings.dir).absolute()  # the program may change its working directory
        self.events = Events()
        self.capture: Capture | None = None
        self.commands: Commands | None = None
        """The commands that are sent to the run while it is under way; None before the recording starts."""
        self._carrier: Carrier | None = None
        """The carrier of commands between nodes; None if the ranks have no common name for the run."""
        self._pid = os.getpid()
        self._on_change = on_change
        self._lock = threading.RLock()
        self._optimizers: OptimizerHooks | None = None
        self._loss: LossFinder | None = None
        self._writer: Any = None
        self._description: Description | None = None
        self._estimate: Estimate | None = None
        """The estimate of bytes, which only rank 0 has."""
        self._termination: TerminationWatch | None = None
        self._is_closed = False
        self._early = EarlyOptimizers(self.events, closure_returned=self._closure_returned)
        self.program = ProgramCalls(self)
        self.graph_taps = GraphTaps(self)
        self._num_optimizers = 0
        self._num_judged = 0
        """The number of module paths when the patterns of the rules were last compared with the paths."""
        self._num_renewals = 0
        self._turned_down = (0, "")
        """The largest module that ran under no root: its number of parameters and its class name."""
        self._manifest_key: object = None
        self._last_manifest: Mapping[str, Any] = {}
        """The manifest from just before the capture was closed, while there were still modules to describe."""
        self._next_status_s = 0.0
        self.discovery = Discovery(self) if by_flag else None
        if by_flag:
            self._early.watch_steps()
            atexit.register(self._at_exit)

    # -- what discovery asks --------------------------------------------------------------------------------------

    def is_inside_root(self) -> bool:
        return self.capture is not None and self.capture.root_calls.depth > 0

    def wants(self, module: nn.Module) -> bool:
        """Return True if an outermost module should be a root's: an optimizer trains it, or soon may."""
        if self.is_over or is_data_worker():
            return False
        if self.capture is not None and (root := self.capture.root_of(module)) is not None:
            return not self.capture.every_call_is_a_step and root.can_enter_at(module)
        parameters = list(module.parameters())
        if not parameters:
            return False
        trainable = any(p.requires_grad for p in parameters)
        if trainable and torch.is_grad_enabled():
            return True
        trained = self._early.hold if self._optimizers is None else self._optimizers.holds
        if trained({id(p) for p in parameters}):
            return True
        if self.settings.roots == "any" and not self._early.live and not (self._optimizers and self._optimizers.known):
            return True
        self._turned_down = max(self._turned_down, (len(parameters), tree.class_name(module)))
        return False

    def make_root(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        """Find or make the root of a module while the module's call is running; return changed arguments under jitter.

        Raises:
            SystemExit: with code 2, if a rule matches no module and no other model could be meant.
        """
        has_hooks = self.capture is not None and self.capture.root_of(module) is not None
        root = self._root_for(module)
        if root.can_enter_at(module):
            root.enter_at(module)
        if not root.is_entry(module):
            return None  # TorchScript takes no hooks, so the call's end is unknown, and only taps are recorded
        try:
            root.begins(module)
        except Exception as error:  # an error counts for the root, as one in the root's own hook, and discovery goes on
            root.failed(error)
            return None
        moved = root.jitter(module, args, kwargs) if root.jitter is not None else None
        if moved is not None:
            args = moved[0]
            kwargs.update(moved[1])  # in place, because the call goes on with this very dict
        watch = None if has_hooks else next((w for w in root.modules if w.module() is module), None)
        if watch is not None and watch.pre_hook is not None:
            watch.pre_hook(module, args, kwargs)
        return args if moved is not None else None

    def _root_for(self, module: nn.Module) -> Root:
        """Return the root that contains a module, or make the outermost model around the module a root."""
        capture = self.capture
        if capture is not None and (root := capture.root_of(module)) is not None:
            return root
        model = model_around(module)
        if capture is None:
            self._stop_for_rules(model)
        elif (root := capture.root_of(model)) is not None and self._optimizers is not None:  # the root has a new module
            with self._lock, collector_paused():
                root.renew()
                self._optimizers.rescan()
            return root
        return self.add_root(model, None)

    def _stop_for_rules(self, module: nn.Module) -> None:
        """Stop the launch if a rule can match no module, as its setting must be wrong; only before the first step."""
        if self.settings.roots == "any" or self._early.has_stepped:
            return
        with collector_paused():
            problems = unmatched_rules(self.settings.rules, module)
        if not problems or not is_only_model(module):
            return
        source = self.loaded.sources.get("rules", "default")
        shown = f"{config.PREFIX}RULES" if source == "environment" else "rules"
        if self.discovery is not None:
            self.discovery.stop()
        self._undo_start()
        sys.stderr.write(f"recorder: {shown} ({source}): {'; '.join(problems)}\n")
        raise SystemExit(2)

    def discovery_failed(self, error: Exception) -> None:
        """Stop looking for roots after an error of the recorder itself."""
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
        """Start the recording if this is its first root, and put hooks on the root."""
        with self._lock:
            if self.capture is None:
                try:
                    self._start(module)
                except Exception:
                    self._undo_start()
                    raise
                except BaseException:  # for example Ctrl-C: the next call starts again, unless the writer already runs
                    if self._writer is None or not self._writer.stats().is_alive:
                        self._writer = None
                        self._forget_start()
                    raise
            assert self.capture is not None and self._optimizers is not None
            with collector_paused():
                root = self.capture.add_root(module, name)
                self._optimizers.rescan()
            return root

    def _start(self, module: nn.Module) -> None:
        from ..capture.staging.measure import measure, measure_small
        from ..write.writer import Writer

        own_topology = topology.read()
        self._description = Description(
            version=self._version,
            topology=own_topology,
            loaded=self.loaded,
            process=own_process(),
            started_ns=time.time_ns(),
            by_flag=self.by_flag,
        )
        if own_topology.rank == 0:
            self._estimate = Estimate(
                self.settings.rules, rank=0, world_size=own_topology.world_size, max_bytes=self.settings.max_bytes
            )
        self.commands = commands = Commands(own_topology, self.events)
        capacity = self.settings.pool_bytes or default_capacity_bytes(own_topology.local_world_size)
        kernels = native.load(self.settings.native)
        writer = Writer(
            settings=self.settings,
            measure=functools.partial(measure, kernels=kernels),
            measure_small=functools.partial(measure_small, kernels=kernels),
            resolve_dir=self._resolve_target,
            poll=self._poll,
            saw=self._saw,
            observed=lambda: self.capture.observed if self.capture is not None else 0,
            ending=self._before_last,
        )
        pool = Pool(capacity, progress_s=lambda: writer.last_progress_s, clock=time.monotonic)
        self._writer = writer
        self.capture = Capture(
            settings=self.settings,
            rank=own_topology.rank,
            pool=pool,
            channel=writer,
            events=self.events,
            ring=self._ring.start(
                rank=own_topology.rank,
                world_size=own_topology.world_size,
                pool=pool,
                writer=writer,
                commands=commands,
                events=self.events,
                current_step=lambda: None if self.capture is None else self.capture.clock.step,
            ),
        )
        self.capture.on_probed = self._ring.probed
        self._optimizers = OptimizerHooks(self.capture, on_step=self._optimizer_stepped, on_new=self._optimizer_made)
        self._loss = LossFinder(self.capture.scalars)
        rule_commands = self.capture.rule_commands
        rule_commands.changed = self._loss.look_at_rules
        for kind in (SET, UNDO, PAUSE, RESUME):
            commands.on(kind, rule_commands.tell)
        live = self._early.take()  # the recorder then holds only weak references to the optimizers
        self.capture.every_call_is_a_step = self.settings.roots == "any" and not live
        if not self.by_flag:  # an earlier training of the process may have left its optimizer, whose steps are its own
            parameters = {id(one) for p in module.parameters() for one in (p, main_parameter(p))}
            live = [o for o in live if any(id(p) in parameters for group in o.param_groups for p in group["params"])]
        for optimizer in live:
            self._optimizers.name_of(optimizer)
        clock = self.capture.clock
        resumed = last_step(live)
        if resumed is not None:
            clock.step, clock.source = resumed, "optimizer"
        if self.program.first_step is not None:
            clock.name(self.program.first_step)
        if clock.source != "counted":
            self.capture.step_changed()
        self._early.unwatch_steps()
        if not self.by_flag:
            atexit.register(self._at_exit)
        deadline_s = self.settings.close_deadline_s
        trigger = self.settings.trigger_signal if self._ring.has_triggers else ""
        self._termination = TerminationWatch(
            flush=lambda: writer.drain(deadline_s),
            finish=self._finish,
            deadline_s=deadline_s,
            ending=lambda number: self.ask("signal", f"the process was ended by {signal.Signals(number).name}"),
            trigger=signal.Signals[trigger] if trigger else None,
            triggered=lambda: self.ask("user", f"signal {trigger}"),
        )
        self._termination.install()
        writer.set_manifest(self._manifest())
        began_s = writer.last_progress_s
        with blocked_in_new_threads():
            writer.start()
        self._on_change(self, True)
        # A disk that refuses to write is reported before the first step; a disk that is only slow delays nothing.
        patience_s = self.settings.wait_s_per_step if self.settings.policy == "wait" else 0.0
        until_s = time.monotonic() + min(_START_PATIENCE_S, patience_s)
        while writer.last_progress_s == began_s and time.monotonic() < until_s:
            time.sleep(0.001)

    def ask(self, kind: str, reason: object, *, step: int | None = None) -> None:
        self._ring.ask(kind, reason, step=step)

    def ask_for_error(self, error: BaseException) -> None:
        """Request that the last steps are written, because an exception leaves the training."""
        self.ask("exception", f"{type(error).__name__}: {one_line(error)}")

    def _undo_start(self) -> None:
        """Undo a failed start (no memory for the pool, or no thread); training goes on without a recording."""
        self._is_closed = True
        self._early.unwatch_steps()
        self._forget_start()
        atexit.unregister(self._at_exit)
        self._on_change(self, False)

    def _forget_start(self) -> None:
        if self._optimizers is not None:
            self._optimizers.close()
            self._optimizers = None
        if self._loss is not None:
            self._loss.close()
            self._loss = None
        if self._termination is not None:
            self._termination.uninstall()
            self._termination = None
        self.capture = None

    def _resolve_target(self) -> Any:
        """Decide where to write. Called on the writer thread, because it may wait for the other ranks."""
        from ..write.writer import RunTarget

        assert self._description is not None
        own_topology = self._description.topology
        name, is_shared = topology.run_id(own_topology, deadline_s=self.settings.join_deadline_s)
        if not is_shared:
            self.events.add(
                "unjoined",
                f"the ranks could not agree on a run name, so this rank writes to {name!r}; start through torchrun or "
                "initialise the process group before the first forward",
            )
        elif own_topology.world_size > 1:
            self._carrier = Carrier(own_topology, self.events, dir_setting=self.settings.dir)
        run_dir = self._dir / name
        return RunTarget(
            run_dir=run_dir,
            run_manifest=self._description.run(name),
            rank=own_topology.rank,
            attempt=own_topology.attempt,
            named=functools.partial(self._final_summary.take_name, run_dir),
        )

    def _manifest(self) -> dict[str, Any]:
        assert self.capture is not None and self._description is not None and self.commands is not None
        self._answer(self.capture)
        return self._description.writer(self.capture, self._optimizers, self.events, self.commands)

    def _saw(self, records: Sequence[Staged], measured: Sequence[Measured]) -> None:
        if self.capture is not None:
            self.capture.nonfinite.saw(records, measured)
        if self._estimate is not None:
            self._estimate.saw(records)
        self._ring.saw(records, measured)

    def _poll(self) -> dict[str, Any] | None:
        """Log events, and return the manifest if it has changed. Called on the writer thread, often."""
        manifest = None
        try:
            self.events.say()
            capture = self.capture
            if capture is None or self.commands is None or self._is_closed:
                return None
            run_dir = self.run_dir()
            self.commands.poll(run_dir)
            if self._carrier is not None and run_dir is not None:
                self._carrier.start(run_dir)
            self._answer(capture)
            self._ring.look(capture)
            capture.nonfinite.look(self._how_to_learn_more())
            if self._estimate is not None and (line := self._estimate.look(capture.clock.step)) is not None:
                log.tell(_logger, lambda: (line,), 0.0)
            roots = tuple((root, *(work is None for work in root.shared_work.values())) for root in capture.roots)
            if self.commands.has_changed:
                self.commands.has_changed = False
                self.events.has_changed = True  # the manifest contains the answers
                self._next_status_s = 0.0
            key = (self.events.has_changed, capture.clock.source, roots)
            if key != self._manifest_key:
                self.events.has_changed = False
                self._manifest_key = (False, *key[1:])
                manifest = self._manifest()
            if time.monotonic() >= self._next_status_s:  # the first status is written even if no later one is
                self._next_status_s = time.monotonic() + (self.settings.status_interval_s or math.inf)
                self._show_status(capture)
        except Exception as error:
            self.events.add("hook_error", f"bookkeeping failed: {type(error).__name__}: {error}", key="poll")
        return manifest

    def _before_last(self) -> None:
        """Look for triggers a last time, before the waiting values are lost. Called on the writer thread."""
        try:
            if self.capture is None or self.commands is None:
                return
            self._ring.end(self.capture, self.commands)
            if self._description is None:
                return
            if self._ring.has_triggers:
                news = self._description.news(self.events, self.commands)
                self._writer.set_manifest({**self._last_manifest, **news})
            self._show_status(self.capture)
        except Exception as error:
            self.events.add("hook_error", f"a last trigger failed: {type(error).__name__}: {error}", key="ending")

    def _show_status(self, capture: Capture) -> None:
        self._answer(capture)
        self._writer.set_status(self._status(capture))

    def _status(self, capture: Capture) -> dict[str, Any]:
        assert self._description is not None and self.commands is not None
        return self._description.status(capture, self.commands, self._ring.findings(capture.nonfinite.first))

    def status(self) -> dict[str, Any]:
        """Return what the rank's status would say now, with its run and its accounts. Any thread."""
        if self.capture is None:
            return {}
        return {"run": str(self.run_dir()), **self._writer.stats().ledger, **self._status(self.capture)}

    def _answer(self, capture: Capture) -> None:
        """Set the present answers to commands that change rules. Any thread."""
        if self.commands is not None:
            self.commands.answer_all(capture.rule_commands.answers())

    # -- steps ----------------------------------------------------------------------------------------------------

    def _optimizer_made(self, optimizer: Optimizer) -> None:
        if self.discovery is not None and not self.discovery.is_on and not self._is_closed:
            self.discovery.start()

    def _optimizer_stepped(self, optimizer: Optimizer) -> None:
        """Stop looking for roots once every parameter has one; a new optimizer starts the search again."""
        capture, discovery, optimizers = self.capture, self.discovery, self._optimizers
        assert capture is not None and optimizers is not None
        capture.every_call_is_a_step = False
        if not capture.has_stepped:
            capture.has_stepped = True
            for root in capture.roots:
                root.step_is_over(has_compiled=has_compiled_anything())
        if not optimizers.has_root(optimizer) and self._num_renewals < _MAX_RENEWALS:
            self._num_renewals += 1
            if capture.renew_grown_roots():
                optimizers.rescan()
        if discovery is None or not discovery.is_on:
            return
        if optimizers.num_named != self._num_optimizers:
            self._num_optimizers = optimizers.num_named
            discovery.reconsider()
        if not optimizers.all_have_roots():
            return
        self._check_patterns(capture)
        if not has_compiled_anything():
            discovery.stop()

    def _check_patterns(self, capture: Capture) -> None:
        """Report rules that match nothing. As this may run at every step, it checks once for each number of modules."""
        paths = [path for root in capture.roots for path in root.inventory.paths]
        if len(paths) != self._num_judged:
            self._num_judged = len(paths)
            problems = capture.selection.unmatched(paths)
            if not any(root.flats for root in capture.roots):  # FSDP1 takes the parameters out of their modules
                modules = [module for root in capture.roots for module in root.inventory.described]
                problems += capture.selection.without_parameters(modules)
            if self._description is not None:
                problems += capture.selection.for_no_rank(self._description.topology.world_size)
            for problem in problems:
                self.events.add("pattern_unmatched", problem, key=problem, level=logging.ERROR)

    def _closure_returned(self, optimizer: Optimizer) -> None:
        if self._optimizers is not None:
            self._optimizers.closure_returned(optimizer)

    # -- what attachments ask --------------------------------------------------------------------------------------

    def flush(self, deadline_s: float) -> bool:
        """Wait until all values observed so far are on disk; return False if the deadline came first."""
        if self.capture is not None:
            self.capture.fetch()
        return self._writer is None or bool(self._writer.drain(deadline_s))

    def run_dir(self) -> Path | None:
        """Return the run directory; None until the writer has made it."""
        directory = self._writer.directory if self._writer is not None else None
        return directory.parent.parent if directory is not None else None

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
            self._stop_carrying()
        atexit.unregister(self._at_exit)  # not earlier: an interrupt may have left the writer open
        self.events.say(is_last=True)

    def _at_exit(self) -> None:
        """End the recording as the interpreter ends. After a third Ctrl-C, rows that take over `_LAST_S` are lost.

        The ledger is closed however often Ctrl-C comes.
        """
        if os.getpid() != self._pid:
            return
        if (error := unhandled_exception()) is not None:
            self.ask_for_error(error)
        num_interrupts = 0

        def interrupted() -> None:
            nonlocal num_interrupts
            num_interrupts += 1
            if num_interrupts > 1 and self._writer is not None:
                self._writer.hurry(_LAST_S)

        with replaced_interrupts(interrupted):
            for _ in range(_NUM_TRIES):
                try:
                    self._finish()
                    break
                except (KeyboardInterrupt, SystemExit):  # raised by a signal handler of the program
                    interrupted()
        if num_interrupts > 1 and self._writer is not None and not self._writer.close(_LAST_S).is_complete:
            text = "interrupted while the recording ended; what was not written yet is lost"
            log.log(_logger, logging.WARNING, text)

    def _close(self) -> None:
        if self.discovery is not None:
            self.discovery.stop()
        self._early.unwatch_steps()
        if self._optimizers is not None:
            self._optimizers.close()
        if self._loss is not None:
            self._loss.close()
        if self.capture is None:
            self._say_why_nothing()
            return
        until_s = time.monotonic() + self.settings.close_deadline_s
        self._say_if_step_never_moved(self.capture)
        for root in self.capture.roots:
            root.say_if_nothing_moved()
            root.inventory.look_for_foreign_hooks()
        self._last_manifest = self._manifest()
        self._writer.set_manifest(self._last_manifest)
        self._show_status(self.capture)
        self.capture.close()
        if self.commands is not None:
            self.commands.close()
        report = self._writer.close(self.settings.close_deadline_s)
        log.log(_logger, logging.DEBUG, "closed: %s", report)
        self.capture.nonfinite.look(self._how_to_learn_more(), is_last=True)
        self.events.say()  # problems are logged before the summary
        self._sum_up(self.capture, report.ledger, until_s)
        if self._termination is not None:  # last, so that a signal before this line cannot prevent the summary
            self._termination.uninstall()

    def _say_why_nothing(self) -> None:
        """Log why there was no root, on rank 0 of a program that neither failed nor only launched other programs."""
        if self._turned_down[0]:
            why = f"{self._turned_down[1]} ran, but no optimizer trains it"
            advice = "RECORDER_ROOTS=any records a process without an optimizer"
        elif topology.read().rank == 0 and is_program() and unhandled_exception() is None:
            why = "this process called no torch.nn.Module with parameters"
            advice = "RECORDER=1 records models in the process that trains them"
        else:
            return
        self.events.add("no_root", f"nothing was recorded: {why}; {advice}")

    def _sum_up(self, capture: Capture, ledger: Mapping[str, Any], until_s: float) -> None:
        run_dir, description = self.run_dir(), self._description
        if description is None or description.topology.rank != 0 or run_dir is None:
            return
        stats = self._writer.stats()
        summary = Summary(
            run=self._final_summary.name_in_commands(run_dir),
            world_size=description.topology.world_size,
            last_step=stats.last_written_step,
            ledger=ledger,
            nonfinite=capture.nonfinite.first,
            finding=self._ring.worst.text if self._ring.worst is not None else "",
            written_bytes=stats.written_bytes,
            waited_s=capture.pool.waited_s,
            longest_wait_s=capture.pool.longest_wait_s,
            is_asked_for=any(0 in rule.rank for rule in self.settings.rules),
            num_dumps=len(self._writer.dumps),
        )
        self._final_summary.say(summary, max(until_s - time.monotonic(), 0.0))

    def _how_to_learn_more(self) -> str | None:
        run_dir = self.run_dir()
        return None if run_dir is None else f"recorder first {self._final_summary.name_in_commands(run_dir)}"

    def _finish(self) -> None:
        """End the recording because the process is about to end, or wait until a running `close` is done."""
        if not self._is_closed:
            self.close()
            return
        if self._writer is None:
            return
        until_s = time.monotonic() + self.settings.close_deadline_s
        report = self._writer.close(self.settings.close_deadline_s)
        self._stop_carrying()
        if self.capture is not None:
            self._sum_up(self.capture, report.ledger, until_s)

    def _stop_carrying(self) -> None:
        """Let the carrier pass the last commands to the other nodes, after the writer has sent its own last command."""
        if self._carrier is not None:
            self._carrier.close()

    def _say_if_step_never_moved(self, capture: Capture) -> None:
        clock = capture.clock
        if self._optimizers is None or capture.every_call_is_a_step or clock.source == "user" or clock.has_moved:
            return
        num_steps = self._optimizers.num_steps
        if num_steps == 1:
            return
        why = "no optimizer stepped"
        if num_steps:
            why = f"optimizers stepped {num_steps} times, and no forward with gradients was seen after a step"
        self.events.add(
            "step_never_advanced",
            f"{why}, so every value is of step {clock.step}; recorder.step(n) names steps",
            level=logging.WARNING if num_steps else logging.INFO,
        )

    def hold_signals(self) -> None:
        """Block signals before a fork, until `TerminationWatch.release`."""
        if self._termination is not None:
            self._termination.hold()

    def abandon(self) -> None:
        """Forget the parent's recording in a forked child, without taking a lock or writing a byte."""
        self._is_closed = True
        callbacks.MODULES.clear()
        callbacks.ROOTS.clear()
        if self.capture is not None:
            self.capture.is_open = False
        if self.discovery is not None:
            self.discovery.stop()
        if self._termination is not None:
            self._termination.abandon()
        self._on_change(self, False)
