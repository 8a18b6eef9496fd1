"""A recording that has begun: its capture, its writer, and the functions that the writer thread calls until the end.

`Recorder` makes a `Recording` at the first call of a model that it records. Nothing here may raise into training.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from .. import native
from ..capture.core import Capture
from ..capture.optimizers.optimizer_hooks import OptimizerHooks
from ..capture.parallel import topology
from ..capture.program_values.loss_finder import LossFinder
from ..capture.staging.pool import Pool, default_capacity_bytes
from ..config import Loaded
from ..format.commands import PAUSE, RESUME, SET, UNDO
from ..format.manifest import EXCEPTION
from ..observe.tree import has_compiled_anything
from ..records import Measured, Staged
from ..system import log
from ..system.log import Events
from ..system.processes import own_process
from .commands import Carrier, Commands
from .description import Description, Estimate, Summary, name_in_commands, quoted
from .findings import worst_of_others
from .ring import RingWatch
from .signals import blocked_in_new_threads

_logger = logging.getLogger("recorder")
_MANY_SLICES = 256
"""More forwards with a backward each than programs accumulate gradients over without an optimizer step."""
_WAIT_FOR_RANKS_S = 1.0
"""The most seconds that the last line of rank 0 waits for the findings of the other ranks."""
_START_PATIENCE_S = 1.0
"""The longest wait of the first forward for the writer to make its directory, if the settings allow a wait."""


class Recording:
    """The parts of one recording, from the first call of a recorded model to the recording's end."""

    def __init__(
        self, loaded: Loaded, ring: RingWatch, events: Events, folder: Path, *, version: str, by_flag: bool,
        on_step: Callable[[Optimizer], None], on_search: Callable[[Optimizer], None],
    ) -> None:  # fmt: skip
        """Make all parts, but start no thread. If a part cannot be made, no hook stays behind.

        `folder` is where run directories go. `on_step` is called after each step of an optimizer, and `on_search`
        when there may be another model to record, as `OptimizerHooks` says.
        """
        from ..capture.staging.measure import measure, measure_small
        from ..write.writer import Writer

        settings, own_topology, self._events = loaded.settings, topology.read(), events
        self._settings, self._ring, self._folder, self._topology = settings, ring, folder, own_topology
        self._description = Description(
            version=version, topology=own_topology, loaded=loaded, process=own_process(), started_ns=time.time_ns(),
            by_flag=by_flag,
        )  # fmt: skip
        self._is_default_folder = loaded.sources.get("dir", "default") == "default"
        self._name_in_commands = ""
        """The run's name for commands; empty while the name is not known."""
        self._is_summed_up = threading.Lock()
        """Acquired by the thread that logs the summary, and never released: the summary is logged once."""
        self._estimate: Estimate | None = None
        """The estimate of bytes, which only rank 0 has."""
        self._is_step_missed = False
        """Whether a model has made `_MANY_SLICES` slices (a forward and its backward each) in one step."""
        if own_topology.rank == 0:
            num_ranks = own_topology.world_size
            self._estimate = Estimate(settings.rules, rank=0, world_size=num_ranks, max_bytes=settings.max_bytes)
        self.commands = Commands(own_topology, events)
        """The commands that are sent to the run while it is under way."""
        self._carrier: Carrier | None = None
        """Carries commands between nodes; None for a single rank, or if the ranks have no common name for the run."""
        self._manifest_key: object = None
        self._last_manifest: Mapping[str, Any] = {}
        """The manifest as of just before the hooks were removed, when there still were modules to describe."""
        self._next_status_s = 0.0
        self._is_closed = False
        self._is_judged = False
        """Whether this rank has judged the run as a whole, so that its status has all its findings."""
        kernels = native.load(settings.native)
        self.writer = Writer(
            settings=settings,
            measure=functools.partial(measure, kernels=kernels),
            measure_small=functools.partial(measure_small, kernels=kernels),
            resolve_dir=self._resolve_target,
            poll=self._poll,
            saw=self._saw,
            observed=lambda: self.capture.observed,
            ending=self._before_last,
            sealed=self._judge_whole,
        )
        capacity = settings.pool_bytes or default_capacity_bytes(own_topology.local_world_size)
        pool = Pool(capacity, progress_s=lambda: self.writer.hurried_progress_s(), clock=time.monotonic)
        ring_memory = ring.start(
            rank=own_topology.rank, world_size=own_topology.world_size, pool=pool, writer=self.writer,
            commands=self.commands, events=events, current_step=lambda: self.capture.clock.step,
            on_trouble=lambda text: self.capture.rule_commands.keep_more(text),
        )  # fmt: skip
        self.capture = Capture(
            settings=settings, rank=own_topology.rank, pool=pool, put=self.writer.put,
            count_drop=self.writer.count_drop, refused=self.writer.refused, events=events, ring=ring_memory,
        )  # fmt: skip
        self.capture.on_probed = ring.probed
        with ExitStack() as undo:
            self.optimizers = OptimizerHooks(self.capture, on_step=on_step, on_search=on_search)
            undo.callback(self.optimizers.close)
            self._loss = LossFinder(self.capture.scalars, on_backward=self.optimizers.looks.backward_begins)
            undo.pop_all()
        rule_commands = self.capture.rule_commands
        rule_commands.changed = self._loss.look_at_rules
        for kind in (SET, UNDO, PAUSE, RESUME):
            self.commands.on(kind, rule_commands.tell)

    @property
    def world_size(self) -> int:
        return self._topology.world_size

    @property
    def run_dir(self) -> Path | None:
        """The run directory; None until the writer has made it."""
        directory = self.writer.directory
        return directory.parent.parent if directory is not None else None

    def start(self, begun: Callable[[], None]) -> None:
        """Start the writer thread, call `begun`, and wait a while for the writer's directory, if the settings allow it.

        So a disk that refuses to write is reported before the first step. A slow disk delays the first step by
        `_START_PATIENCE_S` at most.
        """
        writer, settings = self.writer, self._settings
        writer.set_manifest(self._manifest())
        began_s = writer.last_progress_s
        with blocked_in_new_threads():
            writer.start()
        begun()
        patience_s = settings.wait_s_per_step if settings.policy == "wait" else 0.0
        until_s = time.monotonic() + min(_START_PATIENCE_S, patience_s)
        while writer.last_progress_s == began_s and time.monotonic() < until_s:
            time.sleep(0.001)

    def unhook(self) -> None:
        """Remove the hooks on optimizers and on the loss."""
        self.optimizers.close()
        self._loss.close()

    # -- called by the writer thread ----------------------------------------------------------------------------------

    def _resolve_target(self) -> Any:
        """Decide where to write. Called on the writer thread, because it may wait for the other ranks."""
        from ..write.writer_directory import RunTarget

        name, is_shared = topology.run_id(self._topology, deadline_s=self._settings.join_deadline_s)
        if not is_shared:
            self._events.add(
                "unjoined",
                f"the ranks could not agree on a run name, so this rank writes to {name!r}; start through torchrun or "
                "initialise the process group before the first forward",
            )
        elif self.world_size > 1:
            self._carrier = Carrier(self._topology, self._events, dir_setting=self._settings.dir)
        run_dir = self._folder / name
        return RunTarget(
            run_dir=run_dir,
            run_manifest=self._description.run(name),
            rank=self._topology.rank,
            attempt=self._topology.attempt,
            named=functools.partial(self._take_name, run_dir),
        )

    def _take_name(self, run_dir: Path, name: str) -> None:
        """Set the run's name. Called on the writer thread, because the check for uniqueness may read the disk."""
        folder = Path(self._settings.dir)
        self._name_in_commands = name_in_commands(run_dir, name, folder, is_default=self._is_default_folder)

    def _manifest(self) -> dict[str, Any]:
        self._answer()
        return self._description.writer(self.capture, self.optimizers, self._events, self.commands)

    def _saw(self, records: Sequence[Staged], measured: Sequence[Measured]) -> None:
        self.capture.nonfinite.saw(records, measured)
        if self._estimate is not None:
            self._estimate.saw(records)
        self._ring.saw(records, measured)

    def _poll(self) -> dict[str, Any] | None:
        """Log events. Return the manifest if it was made anew. Called on the writer thread, often."""
        manifest, capture = None, self.capture
        try:
            self._events.say()
            if self._is_closed:
                return None
            self.commands.poll(self.run_dir)
            if self._carrier is not None and self.run_dir is not None:
                self._carrier.start(self.run_dir)
            self._answer()
            self._ring.look(capture)
            if capture.probe is not None and 2 * capture.pool.used_bytes < capture.pool.capacity_bytes:
                capture.probe.flush_old()  # if the pool is full, this thread would wait for itself
            capture.nonfinite.look(self._how_to_learn_more())
            self._look_for_steps()
            if self._estimate is not None and (line := self._estimate.look(capture.clock.step)) is not None:
                log.tell(_logger, lambda: (line,), 0.0)
            roots = tuple((root, *(work is None for work in root.shared_work.values())) for root in capture.roots)
            if self.commands.has_changed:
                self.commands.has_changed = False
                self._events.has_changed = True  # the manifest contains the answers
                self._next_status_s = 0.0
            key = (self._events.has_changed, capture.clock.source, roots)
            if key != self._manifest_key:
                self._events.has_changed = False
                self._manifest_key = (False, *key[1:])
                manifest = self._manifest()
                self._ring.findings.judge_program(manifest["roots"])
            if self._ring.is_judgement_due():
                manifest = manifest or self._manifest()
                self._ring.judge_early(manifest["roots"])
            if time.monotonic() >= self._next_status_s:  # the first status is due at once
                self._next_status_s = time.monotonic() + (self._settings.status_interval_s or math.inf)
                self._show_status()
        except Exception as error:
            self._events.add("hook_error", f"bookkeeping failed: {type(error).__name__}: {error}", key="poll")
        return manifest

    def _before_last(self) -> None:
        """Look for triggers a last time, before the ring gives up its values. Called on the writer thread."""
        try:
            self._ring.findings.judge_program(self._last_manifest.get("roots", ()))
            self._ring.end(self.capture, self.commands)
            if self._ring.has_triggers:
                news = self._description.news(self._events, self.commands)
                self.writer.set_manifest({**self._last_manifest, **news})
            self._show_status()
        except Exception as error:
            self._events.add("hook_error", f"a last trigger failed: {type(error).__name__}: {error}", key="ending")

    def _judge_whole(self) -> None:
        """Judge the run as a whole, once all rows are safe on the disk. Called on the writer thread."""
        try:
            self._ring.judge_whole(self._last_manifest.get("roots", ()))
            self._is_judged = True
            self._show_status()
        except Exception as error:
            self._events.add("hook_error", f"a last judgement failed: {type(error).__name__}: {error}", key="judging")

    def _show_status(self) -> None:
        self._answer()
        self.writer.set_status(self._status())

    def _status(self) -> dict[str, Any]:
        findings = self._ring.findings.for_status(self.capture.nonfinite.first)
        status = self._description.status(self.capture, self.commands, findings)
        return {**status, "replicas": self._replicas()} if self._is_judged else status

    def _replicas(self) -> dict[str, list[Any]]:
        return self._ring.replicas(self._last_manifest.get("roots", ()), self.world_size)

    def status(self) -> dict[str, Any]:
        """Return the content of `_status.json` as of now, with run directory and counts of rows. Any thread."""
        return {"run": str(self.run_dir), **self.writer.stats().ledger, **self._status()}

    def _answer(self) -> None:
        """Update the answers to the commands that change rules. Called on any thread."""
        self.commands.answer_all(self.capture.rule_commands.answers())

    # -- the end --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Remove all hooks, write what remains before the deadline, and log the summary."""
        self._is_closed = True
        self.unhook()
        capture, deadline_s = self.capture, self._settings.close_deadline_s
        until_s = time.monotonic() + deadline_s
        if why := self._why_never_moved():
            may_be_hidden = has_compiled_anything() and self.optimizers.known.by_id
            level = logging.WARNING if self.optimizers.num_steps or may_be_hidden else logging.INFO
            self._events.add("step_never_advanced", f"{why}; recorder.step(n) names steps", level=level)
            if all(one["kind"] != EXCEPTION for one in self._events.as_list()):
                self.optimizers.note_unstepped()
        for root in capture.roots:
            root.say_if_nothing_moved()
            root.inventory.look_for_foreign_hooks()
        capture.objectives.say_if_unused()
        self._last_manifest = self._manifest()
        self.writer.set_manifest(self._last_manifest)
        self._show_status()
        capture.close()
        self.commands.close()
        report = self.writer.close(deadline_s)
        log.log(_logger, logging.DEBUG, "closed: %s", report)
        capture.nonfinite.look(self._how_to_learn_more(), is_last=True)
        self._events.say()  # problems are logged before the summary
        self._sum_up(report.ledger, until_s)

    def finish(self) -> None:
        """Wait until a running `close` is done, or until the deadline. Log the summary."""
        until_s = time.monotonic() + self._settings.close_deadline_s
        report = self.writer.close(self._settings.close_deadline_s)
        self.stop_carrying()
        self._sum_up(report.ledger, until_s)

    def stop_carrying(self) -> None:
        """Let the carrier pass the last commands to the other nodes, after the writer has sent its own last command."""
        if self._carrier is not None:
            self._carrier.close()

    def _sum_up(self, ledger: Mapping[str, Any], until_s: float) -> None:
        if self._topology.rank != 0 or (run_dir := self.run_dir) is None:
            return
        stats, pool = self.writer.stats(), self.capture.pool
        summary = Summary(
            run=self._name_in_commands or quoted(run_dir),
            world_size=self.world_size,
            last_step=stats.last_written_step,
            ledger=ledger,
            nonfinite=self.capture.nonfinite.first,
            finding=self._worst_finding(run_dir, min(until_s, time.monotonic() + _WAIT_FOR_RANKS_S)),
            num_notes=self._ring.findings.num_notes,
            is_judged=self._is_judged,
            written_bytes=stats.written_bytes,
            waited_s=pool.waited_s,
            longest_wait_s=pool.longest_wait_s,
            is_asked_for=any(0 in rule.rank for rule in self._settings.rules),
            num_dumps=len(self.writer.dumps),
            never_moved=self._why_never_moved() if self._is_step_missed else "",
        )
        deadline_s = max(until_s - time.monotonic(), 0.0)
        log.tell(_logger, lambda: summary.lines, deadline_s, lambda: self._is_summed_up.acquire(blocking=False))

    def _worst_finding(self, run_dir: Path, until_s: float) -> str:
        """Return the worst finding of this rank, or else of another rank. If this rank has a NaN, return both."""
        findings, bad = self._ring.findings, self.capture.nonfinite.first
        worst = findings.worst
        told = "" if worst is None else findings.told(worst)
        replicas = self._replicas()
        if self.world_size == 1 or (worst is not None and bad is None and not replicas):
            return told
        own = {"findings": findings.for_status(bad), "replicas": replicas}
        others = worst_of_others(run_dir, own, job=self._topology, world_size=self.world_size, until_s=until_s)
        return "; ".join(filter(None, [others, told]))

    def _how_to_learn_more(self) -> str | None:
        run_dir = self.run_dir
        return None if run_dir is None else f"recorder first {self._name_in_commands or quoted(run_dir)}"

    def _why_never_moved(self) -> str:
        """Return why all values are of one step. Empty if they are not, or if the program has made one step only."""
        clock, num_steps = self.capture.clock, self.optimizers.num_steps
        if self.capture.every_call_is_a_step or clock.source == "user" or clock.has_moved or num_steps == 1:
            return ""
        why = "no optimizer stepped" + (" after the first recorded call" if clock.step else "")
        if has_compiled_anything():
            why = "no step of an optimizer was seen, because it may be in a compiled function"
        if num_steps:
            why = f"optimizers stepped {num_steps} times, and no forward with gradients was seen after a step"
        return f"{why}, so every value is of step {clock.step}"

    def _look_for_steps(self) -> None:
        """Warn once if a model has made many slices (a forward and its backward each) and no step has ended."""
        if not self._is_step_missed and any(root.clock.num_slices >= _MANY_SLICES for root in self.capture.roots):
            self._is_step_missed = True
            if why := self._why_never_moved():
                self._events.add(
                    "step_never_advanced",
                    f"after {_MANY_SLICES} forwards with a backward each, {why}; what the rules keep of a step is kept "
                    "of each forward; recorder.step(n), in each iteration, names steps",
                )
