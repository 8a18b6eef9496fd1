"""Owns the way to a Dask cluster and back: whether it fits, what is handed to its workers, and how it may be lost.

A worker gets names, options and ranges of steps, and opens runs itself; rows and payloads of a run never go to it. Must
never start a scheduler or a worker, and changes none but for what it keeps open for this command.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import pickle
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Executor, Future
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from .errors import ClusterError, RecorderError

_CONNECT_S = 10.0
_WORKERS_S = 10.0
"""How long a scheduler may be without a worker at first."""
_ALONE_S = 60.0
"""How long it may be so later: a worker that was killed is started again by its nanny in seconds."""
_LOOK_S = 1.0
_SEES_TRIES = 5
"""A network file system may show a new file a few seconds late."""
_CALL_S = 60.0
_PIECES_PER_WORKER = 2
"""One that it works on, and one that waits."""
_PACKAGES = ("recorder", "distributed", "pyarrow", "numpy", "zstandard", "ml_dtypes")
"""Whose versions decide over the bytes that come out, and whether both ends understand each other."""
_NOISY = ("distributed", "tornado", "asyncio")
_LOGGER = (__package__ or "recorder").partition(".")[0]

T = TypeVar("T")
logger = logging.getLogger(__name__)


@contextmanager
def open_cluster(address: str) -> Iterator[Cluster]:
    """Connect to a Dask cluster, and make sure that its workers can do what is asked of them.

    Args:
        address: of the scheduler, such as ``tcp://host:8786``.

    Raises:
        ClusterError: there is none, it has no workers, or they are of other versions.
    """
    if find_spec("distributed") is None:
        raise ClusterError("--scheduler needs Dask, which is not installed: pip install '.[dask]' (or distributed)")
    with _quiet():
        client = _connect(address)
        try:
            cluster = Cluster(client, address)
            try:
                yield cluster
            finally:
                cluster.close()
        finally:
            with suppress(Exception):  # it may be gone, in many ways
                client.close(timeout=2)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what Dask says of lost connections from a terminal: what matters of it becomes an error of ours."""
    import distributed

    assert distributed  # configures its loggers
    loggers = [logging.getLogger(name) for name in _NOISY]
    before = [(one.level, one.propagate, one.handlers) for one in loggers]
    children = [logging.getLogger(name) for name in list(logging.root.manager.loggerDict) if name.startswith(_NOISY)]
    was_disabled = [one.disabled for one in children]
    for one in loggers:
        one.setLevel(logging.CRITICAL + 1)
        one.handlers, one.propagate = [logging.NullHandler()], False
    for one in children:
        one.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for one, (level, propagate, handlers) in zip(loggers, before, strict=True):
            one.setLevel(level)
            one.handlers, one.propagate = handlers, propagate
        for one, disabled in zip(children, was_disabled, strict=True):
            one.disabled = disabled


def _connect(address: str) -> Any:
    from distributed import Client
    from distributed.comm.addressing import parse_address, parse_host_port
    from distributed.comm.registry import backends

    try:
        # What a client finds of this by itself costs it 20 s, and a traceback when it is collected.
        scheme, place = parse_address(address)
        if scheme not in backends:
            raise ValueError(f"{scheme}:// is not known")
        parse_host_port(place)
        return Client(address, timeout=_CONNECT_S, set_as_default=False, name="recorder")
    except ValueError as error:
        raise ClusterError(f"{address}: is no address of a scheduler ({error}); it is like tcp://host:8786") from error
    except (OSError, RuntimeError, TypeError, EOFError) as error:
        raise ClusterError(
            f"{address}: no Dask scheduler answers there within {_CONNECT_S:.0f} s; start one with `dask scheduler`"
        ) from error


class Cluster:
    """A Dask cluster that was found fit."""

    def __init__(self, client: Any, address: str) -> None:
        """Made by `open_cluster`.

        Raises:
            ClusterError: it has no workers, or they are of other versions.
        """
        self._client = client
        self.address = address
        self._token = os.urandom(8).hex()
        self._failure: ClusterError | None = None
        self._pending: set[_Handle] = set()
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._wait_for_workers()
        self._check_versions()
        self.num_workers = sum(self._ask("which workers there are", self._client.nthreads).values())
        """Pieces that it works on at once."""
        self._watch = threading.Thread(target=self._look_after, name="recorder-cluster", daemon=True)
        self._watch.start()

    @property
    def executor(self) -> Executor:
        """Does single calls."""
        return _ClusterExecutor(self)

    def close(self) -> None:
        """Give up what is not done, and have the workers let go of the runs that they opened."""
        self._is_closed.set()
        with self._lock:
            pending = list(self._pending)
        self.cancel(pending)
        if self._failure is None:
            with suppress(Exception):  # it may be gone by now
                self._client.sync(self._client._run, _forget, self._token, callback_timeout=5)
        self._watch.join(_LOOK_S + 5)

    def check_sees(self, runs: Sequence[Path]) -> None:
        """Make sure that every worker opens the same runs under the same paths.

        Raises:
            ClusterError: one does not.
        """
        from .read.which import find_run

        wanted = [(str(path), _identity(find_run(path)[1])) for path in (run.absolute() for run in runs)]
        self._refuse(self._on_every(_misses_run, wanted))

    def check_folder(self, folder: Path) -> None:
        """Make sure that every worker sees a folder, and can write there.

        Raises:
            ClusterError: one does not.
        """
        probe = folder / f"_probe-{self._token}"
        probe.touch()
        try:
            for left in reversed(range(_SEES_TRIES)):
                found = self._on_every(_misses_folder, str(folder), probe.name)
                if not left or not any(found.values()):
                    break
                time.sleep(1)
            self._refuse(found)
        finally:
            probe.unlink(missing_ok=True)

    def spread(
        self, make: Callable[..., Callable[..., T]], arguments: tuple[Any, ...], pieces: Iterable[tuple[Any, ...]]
    ) -> Iterator[T]:
        """Work on pieces on the workers; see `analyze.pieces.Spread`. Answers wait there until they are asked for.

        A piece of a run that a worker finds changed, because it is being recorded, is worked on here.

        Raises:
            ClusterError: the cluster was lost.
            RecorderError: what a piece raised.
        """
        from .read.again import ChangedError

        shipped = pickle.dumps((make, tuple(_as_opened(one) for one in arguments)))
        token = f"{self._token}-{hashlib.blake2b(shipped, digest_size=8).hexdigest()}"
        left = iter(pieces)
        running: deque[tuple[_Handle, tuple[Any, ...]]] = deque()
        work: Callable[..., T] | None = None
        told: set[str] = set()
        try:
            while True:
                while len(running) < _PIECES_PER_WORKER * self.num_workers and (piece := next(left, None)) is not None:
                    running.append((self.submit(_work_on, token, shipped, piece), piece))
                if not running:
                    return
                handle, piece = running.popleft()
                try:
                    answer, messages = handle.result()
                except ChangedError:
                    work = make(*arguments) if work is None else work
                    answer, messages = work(*piece), []
                finally:
                    self.cancel([handle])  # else the workers would keep the answer
                for level, text in messages:
                    if text not in told:
                        told.add(text)
                        logger.log(level, "%s", text)
                yield answer
        finally:
            self.cancel([handle for handle, _ in running])

    def submit(self, function: Callable[..., Any], *arguments: Any) -> _Handle:
        """Have a function of a module called by a worker."""
        if self._failure is not None:
            raise self._failure
        try:
            dask_future = self._client.submit(function, *arguments, pure=False)
        except Exception as error:  # of the many ways in which a connection may be lost
            raise ClusterError(self._lost()) from error
        handle = _Handle(self, dask_future)
        with self._lock:
            self._pending.add(handle)
        dask_future.add_done_callback(handle.done)
        return handle

    def cancel(self, handles: Sequence[_Handle]) -> None:
        """Let go of calls, done or not."""
        with self._lock:
            self._pending.difference_update(handles)
        waiting = [handle.dask_future for handle in handles if not handle.dask_future.done()]
        if waiting and self._client.status == "running":
            with suppress(Exception):  # the scheduler is gone
                self._client.sync(self._client._cancel, waiting, callback_timeout=5)
        for handle in handles:
            handle.dask_future.release()

    def as_ours(self, error: BaseException) -> BaseException:
        """What Dask raised, as an error of ours; what a function raised as it is."""
        from distributed.comm.core import CommClosedError
        from distributed.scheduler import KilledWorker

        if isinstance(error, KilledWorker):
            return ClusterError(
                f"{self.address}: several workers died over the same piece, the last was {error.last_worker.address}; "
                "look at their logs: most likely they need more memory"
            )
        if isinstance(error, (CancelledError, CommClosedError, TimeoutError)) or type(error).__module__.startswith(
            ("distributed", "tornado")
        ):
            return ClusterError(self._lost())
        return error

    def _lost(self) -> str:
        return f"{self.address}: the scheduler of the Dask cluster is gone"

    def _look_after(self) -> None:
        """Fail what would wait for ever: of a cluster without any worker."""
        alone_s = 0.0
        while not self._is_closed.wait(_LOOK_S):
            try:
                num_workers = len(self._client.scheduler_info(n_workers=-1).get("workers", {}))
            except Exception:  # the connection is being lost: the client says so to whoever waits
                continue
            alone_s = 0.0 if num_workers else alone_s + _LOOK_S
            if alone_s >= _ALONE_S:
                self._fail(f"{self.address}: has had no workers for {_ALONE_S:.0f} s; look at their logs")
                return

    def _fail(self, text: str) -> None:
        self._failure = ClusterError(text)
        with self._lock:
            pending = list(self._pending)
        for handle in pending:
            handle.fail(self._failure)

    def _ask(self, what: str, function: Callable[..., T], *arguments: Any, **options: Any) -> T:
        try:
            return function(*arguments, **options)
        except RecorderError:
            raise
        except Exception as error:
            raise ClusterError(f"{self.address}: cannot say {what} ({error or type(error).__name__})") from error

    def _wait_for_workers(self) -> None:
        try:
            self._client.wait_for_workers(1, timeout=_WORKERS_S)
        except TimeoutError:
            raise ClusterError(
                f"{self.address}: the scheduler has no workers after {_WORKERS_S:.0f} s; start some with "
                f"`dask worker {self.address} --nthreads 1`"
            ) from None
        except Exception as error:
            raise ClusterError(self._lost()) from error

    def _check_versions(self) -> None:
        """Refuse those that would make other bytes. Asked of Dask itself: what is not there cannot be called."""
        found = self._ask("which versions it has", self._client.get_versions, packages=list(_PACKAGES))
        own = _versions()
        others = {f"the scheduler {self.address}": found["scheduler"]}
        others |= {f"worker {address}": about for address, about in found["workers"].items()}
        for name, about in others.items():
            packages = about.get("packages", {}) if isinstance(about, Mapping) else {}
            for package, wanted in own.items():
                there = packages.get(package)
                if package == "python":
                    there = ".".join(str(there).split(".")[:2])
                if there is None or there == "None":
                    raise ClusterError(f"{name}: has no {package}; install there what is here, {package} {wanted}")
                if there != wanted:
                    raise ClusterError(f"{name}: has {package} {there}, and here is {wanted}; install the same there")

    def _on_every(self, function: Callable[..., str], *arguments: Any) -> dict[str, str]:
        return self._ask(
            "what its workers see",
            self._client.sync,
            self._client._run,
            function,
            *arguments,
            callback_timeout=_CALL_S,
        )

    def _refuse(self, found: Mapping[str, str]) -> None:
        wrong = {address: text for address, text in found.items() if text}
        if wrong:
            address, text = next(iter(wrong.items()))
            more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
            raise ClusterError(
                f"worker {address}{more}: {text}; every worker has to see runs and output as this process does"
            )


class _Handle:
    """A call on its way."""

    def __init__(self, cluster: Cluster, dask_future: Any) -> None:
        self._cluster = cluster
        self.dask_future = dask_future
        self._is_done = threading.Event()
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._callback: Callable[[], None] | None = None

    def on_done(self, callback: Callable[[], None]) -> None:
        """Have something called once it is done, in any thread."""
        with self._lock:
            self._callback = callback
            is_done = self._is_done.is_set()
        if is_done:
            callback()

    def done(self, _: Any = None) -> None:
        with self._lock:
            callback = None if self._is_done.is_set() else self._callback
            self._is_done.set()
        if callback is not None:
            callback()

    def fail(self, error: BaseException) -> None:
        """Make it end with an error, if it has not ended."""
        if not self._is_done.is_set():
            self._failure = error
            self.done()

    def result(self) -> Any:
        """What came of it, once it is done."""
        self._is_done.wait()
        if self._failure is not None:
            raise self._failure
        try:
            return self.dask_future.result(timeout=_CALL_S)
        except BaseException as error:
            ours = self._cluster.as_ours(error)
            if ours is error:
                raise
            raise ours from error


class _ClusterExecutor(Executor):
    """A cluster as an executor."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()

        def take() -> None:
            try:
                answer, messages = handle.result()
            except BaseException as error:
                future.set_exception(error)
            else:
                for level, text in messages:
                    logger.log(level, "%s", text)
                future.set_result(answer)
            finally:
                self._cluster.cancel([handle])

        handle = self._cluster.submit(_call, pickle.dumps((fn, args, kwargs)))
        handle.on_done(take)
        return future


def _as_opened(argument: Any) -> Any:
    """An argument for another process: runs as what opens them."""
    from .read.again import RunAsOpened
    from .read.run import Run

    if isinstance(argument, Run):
        return RunAsOpened.of(argument)
    if type(argument) in (tuple, list) and any(isinstance(one, Run) for one in argument):
        return _Runs(tuple(RunAsOpened.of(run) for run in argument))
    return argument


class _Runs(tuple[Any, ...]):
    """Several runs, each as what opens it."""

    __slots__ = ()


# What follows is called on the workers.

_works: dict[int, tuple[str, Callable[..., Any]]] = {}
"""By thread: of which command, and what its pieces are handed to."""


def _work_on(token: str, shipped: bytes, piece: tuple[Any, ...]) -> tuple[Any, list[tuple[int, str]]]:
    """The answer to a piece, and what was warned of."""
    with _heard() as messages:
        thread = threading.get_ident()
        known = _works.get(thread)
        if known is None or known[0] != token:
            _works.pop(thread, None)
            known = None
            gc.collect()  # rows hold each other, and the mapped shards, in circles
            make, arguments = pickle.loads(shipped)
            _works[thread] = known = token, make(*map(_opened, arguments))
        return known[1](*piece), messages


def _call(shipped: bytes) -> tuple[Any, list[tuple[int, str]]]:
    with _heard() as messages:
        function, arguments, options = pickle.loads(shipped)
        return function(*arguments, **options), messages


def _forget(token: str) -> None:
    """Let go of the runs of a command."""
    for thread, (of, _) in list(_works.items()):
        if of.startswith(token):
            _works.pop(thread, None)
    gc.collect()


def _opened(argument: Any) -> Any:
    from .read.again import RunAsOpened

    if isinstance(argument, _Runs):
        return tuple(one.open() for one in argument)
    return argument.open() if isinstance(argument, RunAsOpened) else argument


@contextmanager
def _heard() -> Iterator[list[tuple[int, str]]]:
    """Collects what this thread logs: it is for whoever asked, not for the log of a worker."""
    found: list[tuple[int, str]] = []
    thread = threading.get_ident()

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.thread == thread:
                found.append((record.levelno, record.getMessage()))

    library, handler = logging.getLogger(_LOGGER), Collector(logging.WARNING)
    library.addHandler(handler)
    try:
        yield found
    finally:
        library.removeHandler(handler)


def _misses_run(runs: Sequence[tuple[str, Any]]) -> str:
    """Why a worker does not see one of some runs; empty where it does."""
    from .read.places import place_of
    from .read.which import find_run

    for path, identity in runs:
        try:
            found = _identity(find_run(place_of(path))[1])
        except (RecorderError, OSError) as error:
            return f"does not see the run ({error})"
        if found != identity:
            return f"sees another run at {path}"
    return ""


def _misses_folder(folder: str, probe: str) -> str:
    """Why a worker cannot write in a folder that has a file in it; empty where it can."""
    if not os.path.isfile(os.path.join(folder, probe)):
        return f"does not see the output {os.path.dirname(os.path.dirname(folder))}"
    own = os.path.join(folder, f"{probe}-{os.getpid()}-{threading.get_ident()}")
    try:
        with open(own, "xb"):
            pass
        os.unlink(own)
    except OSError as error:
        return f"cannot write the output {os.path.dirname(os.path.dirname(folder))} ({error.strerror})"
    return ""


def _identity(manifest: Mapping[str, Any]) -> Any:
    return manifest.get("run_id"), manifest.get("created_ns")


def _versions() -> dict[str, str]:
    """What the workers have to have."""
    import sys

    found = {"python": ".".join(map(str, sys.version_info[:2]))}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
