"""Executors on a Dask or Ray cluster, and the check that its processes have compatible versions.

Nothing here may start a scheduler or a worker.
"""

from __future__ import annotations

import gc
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Executor, Future
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, TypeVar
from urllib.parse import urlsplit

from ..errors import ClusterError, not_installed

_CONNECT_S = 10.0
_WORKERS_S = 10.0
"""The longest wait for a first worker after connecting."""
_ALONE_S = 60.0
"""The longest time without workers during the work. Dask soon restarts a killed worker."""
_LOOK_S = 1.0
_RAY_PORT = 10001
"""The port of a Ray cluster if its address has none."""
_RAY_TRIES = 3
"""The most tries to connect to Ray. Ray's head forks a process for each try. 8 of 73 such processes died in gRPC's
handler of forks (https://github.com/ray-project/ray/issues/63202), which Ray's client reports after 40 s."""
_LOST = "the scheduler of the cluster is gone"
_KILLED = "several workers died over the same unit of work (see their logs: most likely they need more memory)"
_PACKAGES = ("torch-recorder", "pyarrow", "numpy", "zstandard", "ml_dtypes")
"""The packages whose versions affect the bytes of results."""

T = TypeVar("T")
_logger = logging.getLogger(__name__)


def versions() -> dict[str, str]:
    """Return the package versions that a worker must have, too."""
    wanted = {"python": ".".join(map(str, sys.version_info[:2]))}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            wanted[package] = version(package)
    return wanted


def check_versions(name: str, installed: Mapping[str, Any], wanted: Mapping[str, str]) -> None:
    """Raise ClusterError if a process has other versions than this one, because its bytes might differ."""
    for package, own_version in wanted.items():
        their_version = installed.get(package)
        if their_version in (None, "None"):
            raise ClusterError(f"{name}: has no {package}; install {package} {own_version}, as on this machine")
        if their_version != own_version:
            raise ClusterError(
                f"{name}: has {package} {their_version}, but this machine has {own_version}; install the same version"
            )


def worker_name() -> str:
    """Return this process's name for messages."""
    return f"worker {socket.gethostname()} (process {os.getpid()})"


_kept: dict[int, tuple[bytes, Any]] = {}
"""By thread id of a worker: the thread's latest key, and the object made for that key."""


def keep(question: bytes, make: Callable[[], T]) -> T:
    """Return this thread's object for a key. A new key drops the old object and makes a new one."""
    thread = threading.get_ident()
    if thread in _kept and _kept[thread][0] == question:
        return _kept[thread][1]  # type: ignore[no-any-return]
    _kept.pop(thread, None)
    gc.collect()  # the rows of a run, which refer to mapped shards, form reference cycles
    made = make()
    _kept[thread] = question, made
    return made


def drop_all() -> None:
    """Drop the objects of all threads. A removed run occupies the disk as long as its shards are mapped."""
    _kept.clear()
    gc.collect()


def open_cluster(address: str) -> AbstractContextManager[tuple[Executor, int]]:
    """Enter a Dask or Ray cluster. Yield its executor and the number of calls that the executor runs at once.

    Raises ClusterError if there is no cluster, or if it has no workers, or workers of other versions.
    """
    return _open_ray(address) if address.startswith("ray://") else _open_dask(address)


@contextmanager
def _open_dask(address: str) -> Iterator[tuple[Executor, int]]:
    if find_spec("distributed") is None:
        raise ClusterError(not_installed("--scheduler", "distributed", "dask"))
    with _quiet():
        client = _connect(address)
        try:
            try:
                client.wait_for_workers(1, timeout=_WORKERS_S)
            except TimeoutError:
                raise ClusterError(
                    f"{address}: the scheduler has no workers after {_WORKERS_S:.0f} s; start some with "
                    f"`dask worker {address} --nthreads 1`"
                ) from None
            about = client.get_versions(packages=[*_PACKAGES, "distributed"])
            wanted = versions() | {"distributed": version("distributed")}
            processes = {f"the scheduler {address}": about["scheduler"]}
            processes |= {f"worker {worker}": process for worker, process in about["workers"].items()}
            for name, process in processes.items():
                installed = dict(process["packages"])
                installed["python"] = ".".join(str(installed.get("python")).split(".")[:2])
                check_versions(name, installed, wanted)
            start = client.get_executor(pure=False)
            executor = _ClusterExecutor(
                address,
                start.submit,
                lambda: len(client.scheduler_info(n_workers=-1).get("workers", {})),
                _dask_failure,
            )
            try:
                yield executor, sum(client.nthreads().values())
            finally:
                executor.shutdown()
                with suppress(Exception):  # the scheduler may be gone
                    start.shutdown(wait=False)
                with suppress(Exception):
                    client.sync(client._run, drop_all, callback_timeout=5)
        finally:
            with suppress(Exception):  # the cluster may be gone, which raises various errors
                client.close(timeout=2)


@contextmanager
def _open_ray(address: str) -> Iterator[tuple[Executor, int]]:
    if find_spec("ray") is None:
        raise ClusterError(not_installed("--scheduler ray://", "ray[client]", "ray"))
    import ray

    try:
        parts = urlsplit(address)
        # The address is tried first: Ray's own client searches for a missing cluster for 35 s.
        socket.create_connection((parts.hostname or "", parts.port or _RAY_PORT), _CONNECT_S).close()
        connect = partial(ray.init, address, logging_level=logging.CRITICAL, log_to_driver=False)
        client = _connect_ray(address, connect)
    except ValueError as error:
        raise ClusterError(f"{address}: is no address of a cluster ({error}); expected ray://host:10001") from error
    except ConnectionAbortedError as error:
        text = f"has started no process for this command in {_RAY_TRIES} tries ({' '.join(str(error).split())})"
        raise ClusterError(f"{address}: {text}; start the cluster's head with GRPC_ENABLE_FORK_SUPPORT=0") from error
    except (OSError, RuntimeError) as error:  # Ray raises RuntimeError for other versions of Ray or Python
        text = f"no Ray cluster that can be used ({' '.join(str(error).split())})"
        raise ClusterError(f"{address}: {text}; `ray start --head` starts one") from error
    with client:
        call = ray.remote(_call)
        executor = _ClusterExecutor(
            address,
            lambda *work, **options: call.remote(*work, **options).future(),
            lambda: int(ray.cluster_resources().get("CPU", 0)),
            _ray_failure,
        )
        try:
            if not (num_workers := executor.num_workers()):
                raise ClusterError(f"{address}: the Ray cluster has no CPUs; add a node with `ray start --address`")
            yield executor, num_workers
        finally:
            executor.shutdown()


def _connect_ray(address: str, connect: Callable[[], T]) -> T:
    for number in range(2, _RAY_TRIES + 1):
        with suppress(ConnectionAbortedError):
            return connect()
        _logger.warning("%s: has started no process for this command; try %d of %d", address, number, _RAY_TRIES)
    return connect()


def _call(fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    return fn(*args, **kwargs)


class _ClusterExecutor(Executor):
    """An executor on a cluster. Failures become `ClusterError`. Calls fail if all workers are gone for a time."""

    def __init__(
        self,
        address: str,
        start: Callable[..., Future[Any]],
        num_workers: Callable[[], int],
        explain: Callable[[BaseException], BaseException | str],
    ) -> None:
        """Watch the cluster. `explain` turns a future's error into the error of the called function, or a text."""
        self.num_workers = num_workers
        self._address = address
        self._start = start
        self._explain = explain
        self._pending: set[Future[Any]] = set()
        self._is_closed = threading.Event()
        self._watch = threading.Thread(target=self._look_after, name="recorder-cluster", daemon=True)
        self._watch.start()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        try:
            inner = self._start(fn, *args, **kwargs)
        except Exception as error:  # a lost connection raises various errors
            raise ClusterError(f"{self._address}: {_LOST}") from error
        self._pending.add(future)
        inner.add_done_callback(lambda done: self._pass_on(done, future))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._is_closed.set()
        self._watch.join(_LOOK_S + 5)

    def _pass_on(self, done: Future[T], future: Future[T]) -> None:
        self._pending.discard(future)
        if future.done():
            return
        try:
            future.set_result(done.result())
        except BaseException as error:
            told = self._explain(error)
            future.set_exception(ClusterError(f"{self._address}: {told}") if isinstance(told, str) else told)

    def _look_after(self) -> None:
        """Fail the pending calls once the last worker is gone, because they would wait for ever."""
        alone_s = 0.0
        while alone_s < _ALONE_S:
            if self._is_closed.wait(_LOOK_S):
                return
            try:
                num_workers = self.num_workers()
            except Exception:  # the client reports a lost connection to all waiting calls
                continue
            alone_s = 0.0 if num_workers else alone_s + _LOOK_S
        for future in list(self._pending):
            future.set_exception(ClusterError(f"{self._address}: has had no workers for {_ALONE_S:.0f} s"))


def _dask_failure(error: BaseException) -> BaseException | str:
    from distributed.scheduler import KilledWorker

    if isinstance(error, KilledWorker):
        return f"{_KILLED}; the last of them was {error.last_worker.address}"
    is_of_dask = type(error).__module__.startswith(("distributed", "tornado"))
    return _LOST if is_of_dask or isinstance(error, (CancelledError, TimeoutError)) else error


def _ray_failure(error: BaseException) -> BaseException | str:
    from ray.exceptions import RayError, RayTaskError

    if isinstance(error, RayTaskError):
        return error.cause  # type: ignore[no-any-return]
    return _KILLED if isinstance(error, RayError) else _LOST


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Dask's log lines about lost connections. A loss that matters raises a `ClusterError`."""
    import distributed

    assert distributed  # the import configures distributed's loggers
    names = [name for name in logging.root.manager.loggerDict if name.startswith(("distributed", "tornado", "asyncio"))]
    before = [(logger, logger.disabled) for logger in map(logging.getLogger, names)]
    try:
        for logger, _ in before:
            logger.disabled = True
        yield
    finally:
        for logger, was_disabled in before:
            logger.disabled = was_disabled


def _connect(address: str) -> Any:
    from distributed import Client
    from distributed.comm.addressing import parse_address, parse_host_port
    from distributed.comm.registry import backends

    try:
        # A Dask client finds such errors only after 20 s, and writes a traceback when it is garbage-collected.
        scheme, host_port = parse_address(address)
        if scheme not in backends:
            raise ValueError(f"{scheme}:// is not known")
        parse_host_port(host_port)
        return Client(address, timeout=_CONNECT_S, set_as_default=False, name="recorder")
    except ValueError as error:
        raise ClusterError(f"{address}: is no address of a scheduler ({error}); expected tcp://host:8786") from error
    except (OSError, RuntimeError, TypeError, EOFError) as error:
        raise ClusterError(
            f"{address}: no Dask scheduler answers within {_CONNECT_S:.0f} s; start one with `dask scheduler`"
        ) from error
