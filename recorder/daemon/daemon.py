"""The daemon's main loop: it scans the watched folders and gives jobs to threads until a signal stops it.

The main thread scans and decides what to do. Other threads ship files. Every wait has a deadline. Jobs that a stop
leaves unfinished are found again at the next start.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path

from ..errors import ConfigError, RunError, StoreError
from ..run.finding import FLEET
from ..run.notes import damage
from ..run.run import open_location
from ..storage.clients import DESTINATIONS
from ..system.processes import is_loopback, set_malloc
from . import errands
from .destination import Throttle, parse_destination
from .errands import StoreCarrier, read_key, tell
from .fleet import NODE, FleetDocument, node_name
from .metrics import DaemonCollector, MetricsServer
from .run_shipper import RunShipper
from .settings import DaemonSettings, reloaded
from .shipped import Shipping
from .telemetry import held_lock, holds_folder, state_folder, write_state
from .watching import Entries, Folder, find_runs

logger = logging.getLogger("recorder.daemon")

_PASS_S = 1.0
_FIND_S = 5.0
_STATE_S = 5.0
_SUMMARY_S = 30.0
"""The least seconds between two uploads of this node's document in the fleet's index. Each upload costs a request."""
_ASK_S = 60.0
"""An idle daemon makes a test request if the store has answered no request for this many seconds."""
_LATE_S = 60.0
"""The daemon reports itself unhealthy if its main thread has begun no pass over the runs for this many seconds."""
_ERRAND_END_S = 0.5
"""After a stop has killed the processes of errands (repairs, checks), it waits this many more seconds."""
_LOW_PRIORITY = 10


class Daemon:
    """The daemon. `run` ships until a signal arrives. `run_once` ships until the destination has all files."""

    def __init__(self, settings: DaemonSettings, reload: Callable[[], DaemonSettings] | None = None) -> None:
        """Check the settings without a request to the store. Raise ConfigError for a wrong setting.

        `reload` is called after SIGHUP, and reads the settings again.
        """
        self._reload = reload
        read_key(settings.key_file)
        self._watched = _watched_folders(settings)
        self._throttle = Throttle(settings.max_bytes_per_s)
        destination = parse_destination(settings.to, self._throttle)
        for folder in self._watched if destination.path else ():
            if holds_folder(folder, str(destination.path)) or holds_folder(str(destination.path), folder):
                raise ConfigError(
                    f"to = {settings.to!r}: lies in the watched folder {folder}, or contains it; name another"
                )
        self._is_stopping = False
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        """An item for each reason to begin a pass. A signal handler may put one; the `set` of an event would wait for
        the lock of the event, which the interrupted thread may hold."""
        self._over = threading.Event()
        self._is_reload_due = False
        self.shared = Shipping(
            destination=destination, settings=settings, is_stopping=lambda: self._is_stopping, is_over=self._over.is_set
        )
        self.counters, self.health = self.shared.counters, self.shared.health
        self._runs: dict[tuple[str, tuple[str, ...]], RunShipper] = {}
        self._counts = Entries()
        self._unshipped_before: dict[str, str] = {}
        self._fleet: FleetDocument | None = None
        """This node's document in the fleet's index. None until a watched folder exists to keep the node's name."""
        self._pools = {
            lane: ThreadPoolExecutor(num_threads, f"recorder-{lane}")
            for lane, num_threads in (("small", settings.threads), ("large", settings.threads), ("errand", 1))
        }
        self._under_way: set[Future[None]] = set()
        self._busy: set[tuple[RunShipper | None, str]] = set()
        """The runs and the names of the named jobs that are under way."""
        self._carriers: dict[RunShipper, StoreCarrier] = {}
        self._last_pass_s = time.monotonic()
        self._next_find_s = self._next_summary_s = self._next_state_s = 0.0
        self._has_found = False
        self._state_path: Path | None = None
        self.damaged: list[str] = []
        """The damage that `run_once` has found: one sentence for each damaged run."""
        self.strangers: list[str] = []
        """The ignored paths in runs' directories. If no run was found, the ignored paths in the watched folders."""
        self.url, self.port = "", 0
        """The URL and the port at which metrics are served. Empty and 0 if no metrics are served."""

    @property
    def runs(self) -> list[RunShipper]:
        return list(self._runs.values())

    def seen(self) -> dict[str, int]:
        """Return the numbers of ignored entries: ``foreign`` (of no run) and ``refused`` (links, bad names)."""
        counted = [self._counts, *(one for run in self.runs for one in run.counted)]
        return {kind: sum(len(getattr(one, kind)) for one in counted) for kind in ("foreign", "refused")}

    def check_store(self) -> None:
        """Make one request to the store. Raise StoreError if a setting is wrong, or if the store does not answer."""
        self.shared.destination.check()
        self.health.succeeded()

    def run(self) -> int:
        with self._locked(), self._signals():
            with contextlib.ExitStack() as serving:
                if self.shared.settings.listen:
                    serving.callback(self._serve().close)
                try:
                    self.check_store()
                except StoreError as error:
                    if error.kind == "anonymous":
                        raise
                    self.shared.failed(error, "the start")  # a store that is unreachable now may come back
                _lower_priority()
                # Without these limits, each malloc arena keeps the largest buffer that its thread has freed.
                set_malloc(M_ARENA_MAX=2, M_MMAP_THRESHOLD=1 << 18, M_TRIM_THRESHOLD=1 << 20)
                self._say_start()
                while not self._is_stopping:
                    if self._is_reload_due:
                        self._is_reload_due = False
                        self._reload_settings()
                    self._pass()
                    self._rest(min(_PASS_S, self.shared.look_s))
            self._finish()
            return 0

    def _serve(self) -> MetricsServer:
        requests, to = self.shared.destination.requests, self.shared.destination.url
        collector = DaemonCollector(
            counters=self.counters, health=self.health, requests=requests, runs=lambda: self.runs,
            seen=self.seen, watched=self._watched, to=to,
        )  # fmt: skip
        server = MetricsServer(self.shared.settings, collector, self._is_alive, self._why_not_ready)
        self.url, self.port = server.url, server.port
        return server

    def run_once(self) -> int:
        """Upload all files that exist now. Return 0 if the destination then has all of them, else 1.

        The result is also 1 if a run is damaged, holds foreign files or is in conflict with another run. An undamaged
        run that the destination has had for `keep_local` is removed from this disk, if this call shipped nothing of it.
        """
        taken_bytes, moved_s = -1, time.monotonic()
        for folder in filter(lambda folder: not os.path.isdir(folder), self._watched):
            raise ConfigError(f"watch = {folder!r}: is no folder, and --once does not wait for a folder; name another")
        with self._locked(), self._signals():
            self.check_store()
            self.shared.is_once = True
            while not self._is_stopping:
                self._pass()
                if self._is_all_there():
                    break
                has_moved = self._throttle.taken_bytes != taken_bytes or bool(self._under_way)
                if has_moved and not self.health.problem:  # a job that is running has its own timeout
                    taken_bytes, moved_s = self._throttle.taken_bytes, time.monotonic()
                if time.monotonic() > moved_s + self.shared.settings.deadline_s:
                    break
                self._rest(0.1)
            if self._is_all_there() and not self._is_stopping:
                self._judge_runs()
            is_all_there = self._is_all_there() and not self._is_stopping
            self._finish()
            self.left = [f"{one.path}/{name}" for run in self.runs for one in run.all_writers for name in one.backlog]
            self.left += [path for run in self.runs if run.there.was_pruned for path in run.backlog]
            beside = sorted([*self._counts.foreign, *self._counts.refused]) if not self._runs else []
            self.strangers = [path for run in self.runs for path in run.strangers] or beside
            what = (self.counters.total("conflicts"), self.left, self.unshipped, self.damaged, self.strangers)
            return int(not is_all_there or any(what))

    def _judge_runs(self) -> None:
        """Look for damage in shipped runs. Remove a sound run from this disk if it is old and has no foreign files."""
        for run in self.runs:
            if run.there.conflict or run.unreadable:
                continue
            try:
                run.damage = damage(open_location(Path(run.path)))
            except (RunError, OSError) as error:
                run.damage = str(error)
            if run.damage:
                self.damaged.append(run.damage)
            elif not (run.strangers or run.there.has_shipped) and self._is_outdated(run, time.monotonic()):
                try:
                    self._remove(run)
                except (StoreError, OSError) as error:
                    self.shared.failed(error, run.key)
                    run.look_again()

    @property
    def unshipped(self) -> dict[str, str]:
        """The files and directories that may belong to a run and are not shipped, by path, each with the reason."""
        return self._counts.unshipped | {path: why for run in self.runs for path, why in run.unshipped.items()}

    def stop(self) -> None:
        """Make the daemon stop soon. Signal handlers call this method, so it is re-entrant."""
        self._is_stopping = True
        self._wakes.put(None)

    def _rest(self, seconds: float) -> None:
        """Wait for a reason to begin a pass, for at most `seconds`."""
        with contextlib.suppress(queue.Empty):
            self._wakes.get(timeout=seconds)
            for _ in range(self._wakes.qsize()):
                self._wakes.get_nowait()

    def _is_all_there(self) -> bool:
        return self._has_found and not self._under_way and all(map(self._is_done, self.runs))

    def _is_idle(self) -> bool:
        """Return True if a test request is useful. While an upload fails, a GET that succeeds hides the failure."""
        return not self._under_way and (not self.health.problem or all(map(self._is_done, self.runs)))

    def _is_done(self, run: RunShipper) -> bool:
        if run.there.conflict:
            return True
        if run.is_recording or run.has_stuck_files:
            return run.is_put
        return run.is_settled

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        settings = self.shared.settings
        with held_lock(state_folder(settings.state), self.shared.destination.url, self._watched) as path:
            self._state_path = path
            yield

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Inside the block, stop at SIGTERM and SIGINT, and reload at SIGHUP. Do nothing outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        stop, reload = (lambda *_: self.stop()), (lambda *_: self._ask_reload())
        handlers = {signal.SIGTERM: stop, signal.SIGINT: stop, signal.SIGHUP: reload}
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _ask_reload(self) -> None:
        self._is_reload_due = True
        self._wakes.put(None)

    def _say_start(self) -> None:
        for folder in self._watched:
            if not os.path.isdir(folder):
                logger.warning("%s: there is no such folder yet; the daemon waits for the folder", folder)
        where = f"; metrics at {self.url}/metrics" if self.url else ""
        logger.info("ships %s to %s%s", ", ".join(self._watched), self.shared.destination.url, where)
        settings = self.shared.settings
        names = [name for name in ("listen_certificate", "listen_password_file") if not getattr(settings, name)]
        if self.url and names and not is_loopback(settings.address[0]):
            lacks = " and ".join(names)
            logger.warning("whoever reaches %s reads names and figures of runs: %s not set", self.url, lacks)
        self._say_unsigned()

    def _say_unsigned(self) -> None:
        if self.shared.settings.accept_commands and not self.shared.settings.key_file:
            text = "accept_commands: everybody who can write to %s can change what runs on this node record; a key_file"
            logger.warning(
                f"{text} with a key of at least 16 bytes admits only signed commands", self.shared.destination.url
            )

    def _reload_settings(self) -> None:
        if self._reload is None:
            return
        try:
            settings, kept = reloaded(self.shared.settings, self._reload())
            read_key(settings.key_file)
        except ConfigError as error:
            self.counters.add("reloads", "refused")
            logger.error("the settings were not reloaded, the old ones stay in force: %s", error)
            return
        self.shared.settings = settings
        self._throttle.max_bytes_per_s = settings.max_bytes_per_s
        self.counters.add("reloads", "done")
        self._say_unsigned()
        stay = f"; {', '.join(kept)} stay as they are until a restart" if kept else ""
        logger.info("the settings were reloaded%s", stay)

    # The methods of one pass over the runs.

    def _pass(self) -> None:
        now_s = self._last_pass_s = time.monotonic()
        self._under_way = {future for future in self._under_way if not future.done()}
        if now_s >= self._next_find_s:
            self._next_find_s = now_s + min(_FIND_S, self.shared.settings.fresh_s / 2)
            self._find_runs()
        is_open = self.health.is_open
        for run in self.runs:
            try:
                jobs = run.look(now_s) if is_open else []
            except FileNotFoundError:
                self._next_find_s = 0.0  # the run was removed meanwhile
                continue
            except OSError as error:
                self.shared.failed(error, run.key)
                continue
            for lane, job in jobs:
                self._submit(lane, job, run)
            if is_open:
                self._run_errands(run, now_s)
                self._carry(run, now_s)
                if news := run.live_news():
                    self._submit("small", partial(tell, run, news), run)
        if now_s >= self._next_summary_s or self._is_index_late():
            self._next_summary_s = now_s + max(_SUMMARY_S, self.shared.settings.status_s)
            if is_open:
                self._submit("small", self._summarise, name="summary")
        if is_open and time.time() >= self.health.answered_s + _ASK_S and self._is_idle():
            self._submit("small", self.check_store)
        if now_s >= self._next_state_s:
            self._next_state_s = now_s + _STATE_S
            self._write_state()

    def _is_index_late(self) -> bool:
        """Return True if the fleet's index, by which commands find runs, lacks a run of this node or a run's end."""
        return self._fleet is not None and any(
            run.is_known and not run.there.conflict and self._fleet.is_late(run.key, run.is_recording)
            for run in self.runs
        )

    def _submit(self, lane: str, job: Callable[[], None], run: RunShipper | None = None, name: str = "") -> None:
        """Run a job on the thread pool `lane` (``small``, ``large``, ``errand``).

        A job with a `name` is left out while the earlier job of this run and name is under way.
        """
        if (run, name) in self._busy:
            return
        if name:
            self._busy.add((run, name))

        def do() -> None:
            try:
                if not self._is_stopping or (lane == "errand" and not self._over.is_set()):
                    job()
            except Exception as error:
                self.shared.failed(error, run.key if run is not None else "the destination")
            finally:
                self._busy.discard((run, name))
                self._wakes.put(None)

        self._under_way.add(self._pools[lane].submit(do))

    def _find_runs(self) -> None:
        counts, runs = Entries(), set[tuple[str, tuple[str, ...]]]()
        if self._fleet is None and any(map(os.path.isdir, self._watched)):
            self.shared.node = node_name(self._watched)
            self._fleet = FleetDocument(self.shared.destination, self.shared.node, self._say_clash)
        for root in self._watched:
            try:
                with Folder.root(root) as folder:
                    runs |= {(root, names) for names in find_runs(folder, counts)}
            except OSError as error:
                if not isinstance(error, FileNotFoundError):  # the missing folder may still appear
                    self.shared.failed(error, root)
                runs |= {key for key in self._runs if key[0] == root}  # the folder may appear again
        for key in sorted(runs - self._runs.keys()):
            try:
                self._runs[key] = RunShipper(*key, self.shared)
            except OSError as error:
                self.shared.failed(error, "/".join(key[1]))
        for key in self._runs.keys() - runs:
            run = self._runs.pop(key)
            run.close()
            if run.is_recording:
                logger.warning("%s: its folder vanished during the recording; shipped files stay", run.key)
            self.shared.said.pop(run.key, None)
            self._carriers.pop(run, None)
        self._counts = counts
        for path in self.unshipped.keys() - self._unshipped_before.keys():
            logger.warning("%s: is not shipped: %s", path, self.unshipped[path])
        self._unshipped_before = self.unshipped
        self._has_found = True

    def _say_clash(self, host: str) -> None:
        self.counters.add("conflicts", "node")
        logger.error(
            "%s/%s: another daemon, on host %s, writes this node's documents there, too, so that `recorder ls` misses"
            " ranks; let one daemon watch %s, or, where the folder was copied, remove its file %s and restart this one",
            self.shared.destination.url, FLEET, host, self._watched[0], NODE,
        )  # fmt: skip

    def _summarise(self) -> None:
        if self._fleet is not None:
            self._fleet.put({run.key: run.summary() for run in self.runs if run.is_known and not run.there.conflict})

    def _run_errands(self, run: RunShipper, now_s: float) -> None:
        if (run, "errand") in self._busy or run.there.conflict or not run.writers:
            return
        check_s = self.shared.settings.check_s
        if run.needs_repair:
            self._submit("errand", lambda: errands.repair(run), run, "errand")
        elif any(writer.needs_count for writer in run.all_writers):
            self._submit("errand", lambda: errands.count(run), run, "errand")
        elif self._is_outdated(run, now_s) and not self.shared.is_once:
            self._submit("errand", lambda: self._remove(run), run, "errand")
        elif check_s and now_s >= run.next_check_s and not run.is_settled:
            run.next_check_s = now_s + check_s
            self._submit("errand", lambda: tell(run, errands.check(run)), run, "errand")

    def _is_outdated(self, run: RunShipper, now_s: float) -> bool:
        return run.may_go and now_s >= run.settled_since_s + self.shared.settings.keep_local_s

    def _carry(self, run: RunShipper, now_s: float) -> None:
        settings = self.shared.settings
        is_wanted = settings.accept_commands and run.there.run_id and not run.there.conflict
        if not is_wanted or (run, "carry") in self._busy or now_s < run.next_carry_s or not run.is_recording:
            return
        run.next_carry_s = now_s + settings.status_s
        self._submit("small", self._carriers.setdefault(run, StoreCarrier(run)).carry, run, "carry")

    def _remove(self, run: RunShipper) -> None:
        """Remove an ended run from this disk. List the store first, and keep the run if a file is missing there."""
        missing = run.missing_there()
        if missing:
            logger.error("%s: %s is missing at the destination; nothing is removed from this disk", run.key, missing)
            run.there.suspect()
            run.look_again()
            return
        num_bytes, is_gone = run.remove()
        self.counters.add("removed_runs", amount=int(is_gone))
        self.counters.add("removed_bytes", amount=num_bytes)
        logger.info("%s: is at the destination completely, and was removed from this disk", run.key)
        self._next_find_s = 0.0

    # The methods about the daemon's own state.

    def _is_alive(self) -> bool:
        return time.monotonic() - self._last_pass_s < _LATE_S

    def _why_not_ready(self) -> str:
        if not self._has_found:
            return "the watched folders were not scanned yet"
        return self.health.problem

    def _write_state(self) -> None:
        if self._state_path is None:
            return
        backlog = [stamp for run in self.runs for stamp in run.backlog.values()]
        state = {
            "pid": os.getpid(),
            "to": self.shared.destination.url,
            "watch": self._watched,
            "url": self.url,
            "time_s": time.time(),
            "runs": len(self._runs),
            "settled": sum(run.is_settled for run in self.runs),
            "backlog_files": len(backlog),
            "backlog_bytes": sum(stamp.size_bytes for stamp in backlog),
            "uploads": self.counters.total("uploads"),
            "uploaded_bytes": self.counters.total("uploaded_bytes"),
            "errors": self.counters.of("errors"),
            "conflicts": self.counters.total("conflicts"),
            "problem": self.health.problem,
            **self.seen(),
        }
        write_state(self._state_path, state)

    def _finish(self) -> None:
        """Wait up to `stop_s` for running jobs, then put the last documents. The next start does the rest."""
        until_s = time.monotonic() + self.shared.settings.stop_s
        self._is_stopping = True
        are_all_done = not wait(self._under_way, self.shared.settings.stop_s).not_done
        if are_all_done and not self.health.problem:
            self._submit("errand", self._put_last_documents)  # jobs of other lanes end at once after a stop
            wait(self._under_way, until_s - time.monotonic())
        self._over.set()
        num_parked = len(wait(self._under_way, _ERRAND_END_S).not_done)
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
        self.is_parked = num_parked > 0
        if num_parked:
            logger.warning("stops with %d uploads under way; the next start goes on with them", num_parked)
        for run in self.runs:
            run.close()
        if not self.shared.is_once:
            logger.info("stopped")

    def _put_last_documents(self) -> None:
        """Put the last summaries and statuses of this node's runs, because no later pass puts them."""
        self._summarise()
        for run in self.runs:
            run.put_shown()

    left: list[str]
    """The paths of the files that `run_once` could not upload."""
    is_parked = False
    """True if jobs still ran when the stop gave up waiting. The process must then end without joining their threads."""


def _watched_folders(settings: DaemonSettings) -> list[str]:
    if not settings.watch:
        raise ConfigError("watch: no folder is named; --watch DIR is where this node's runs are")
    if not settings.to:
        raise ConfigError(f"to: no destination is named; --to {DESTINATIONS} or file:///FOLDER")
    folders: list[str] = []
    for name in settings.watch:
        folder = os.path.realpath(name)
        if os.path.lexists(folder) and not os.path.isdir(folder):
            raise ConfigError(f"watch = {name!r}: is no folder; name another")
        if os.path.lexists(f"{folder}/_run.json"):
            raise ConfigError(f"watch = {name!r}: is a run; name the folder that it lies in")
        if os.path.isdir(folder) and not os.access(folder, os.R_OK | os.X_OK):
            raise ConfigError(f"watch = {name!r}: may not be read by this user")
        for other in folders:
            if holds_folder(other, folder) or holds_folder(folder, other):
                raise ConfigError(f"watch = {name!r}: is, holds or lies in {other}, which is watched, too")
        folders.append(folder)
    return folders


def _lower_priority() -> None:
    """Lower the priority of this process, so that training goes first. The disk is used only when it is idle."""
    with contextlib.suppress(OSError):
        os.nice(_LOW_PRIORITY)
    with contextlib.suppress(Exception):
        libc = ctypes.CDLL(None, use_errno=True)
        io_priority_set, who_process, idle = 251, 1, 3 << 13
        if os.uname().machine == "x86_64":
            libc.syscall(io_priority_set, who_process, 0, idle)
