"""Executors on other machines: checks that their versions are compatible, and makes an executor of a Dask cluster.

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
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, TypeVar

from ..errors import ClusterError, not_installed

_CONNECT_S = 10.0
_WORKERS_S = 10.0
"""The seconds for which a scheduler may have no worker at first."""
_ALONE_S = 60.0
"""The seconds for which a scheduler may have no worker later: Dask restarts a killed worker within seconds."""
_LOOK_S = 1.0
_PACKAGES = ("recorder", "pyarrow", "numpy", "zstandard", "ml_dtypes")
"""The packages whose versions decide the bytes of the results."""

T = TypeVar("T")


def versions() -> dict[str, str]:
    """Return the versions that another process must have to work for this one."""
    wanted = {"python": ".".join(map(str, sys.version_info[:2]))}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            wanted[package] = version(package)
    return wanted


def check_versions(name: str, installed: Mapping[str, Any], wanted: Mapping[str, str]) -> None:
    """Raise ClusterError if a process has other versions than this one, and might compute other bytes."""
    for package, own_version in wanted.items():
        their_version = installed.get(package)
        if their_version in (None, "None"):
            raise ClusterError(f"{name}: has no {package}; install {package} {own_version} there, as on this machine")
        if their_version != own_version:
            raise ClusterError(
                f"{name}: has {package} {their_version}, but this machine has {own_version}; install the same version"
            )


def worker_name() -> str:
    """Return the name of this process in messages."""
    return f"worker {socket.gethostname()} (process {os.getpid()})"


_kept: dict[int, tuple[bytes, Any]] = {}
"""The last key of each thread of a worker, and the object that the thread has made for it."""


def keep(question: bytes, make: Callable[[], T]) -> T:
    """Return this thread's object for a key; for a new key, drop the old object and make a new one."""
    thread = threading.get_ident()
    if thread in _kept and _kept[thread][0] == question:
        return _kept[thread][1]  # type: ignore[no-any-return]
    _kept.pop(thread, None)
    gc.collect()  # rows refer to each other, and to mapped shards, in cycles
    made = make()
    _kept[thread] = question, made
    return made


def drop_all() -> None:
    """Drop the objects of all threads, because a removed run occupies the disk while its shards are mapped."""
    _kept.clear()
    gc.collect()


@contextmanager
def open_dask(address: str) -> Iterator[tuple[Executor, int]]:
    """Yield the workers of a Dask cluster as an executor, and the number of calls that they run at once.

    ClusterError is raised if there is no cluster, or if it has no workers or workers of other versions.
    """
    if find_spec("distributed") is None:
        raise ClusterError(not_installed("--scheduler", "distributed", "dask"))
    with _quiet():
        client = _connect(address)
        try:
            _wait_for_workers(client, address)
            about = client.get_versions(packages=[*_PACKAGES, "distributed"])
            wanted = versions() | {"distributed": version("distributed")}
            processes = {f"the scheduler {address}": about["scheduler"]}
            processes |= {f"worker {worker}": process for worker, process in about["workers"].items()}
            for name, process in processes.items():
                installed = dict(process["packages"])
                installed["python"] = ".".join(str(installed.get("python")).split(".")[:2])
                check_versions(name, installed, wanted)
            executor = _DaskExecutor(client, address)
            try:
                yield executor, sum(client.nthreads().values())
            finally:
                executor.shutdown(wait=False)
                with suppress(Exception):  # the scheduler may be gone
                    client.sync(client._run, drop_all, callback_timeout=5)
        finally:
            with suppress(Exception):  # the cluster may be gone, which raises various errors
                client.close(timeout=2)


class _DaskExecutor(Executor):
    """Dask's own executor. Its failures become `ClusterError`, and it never waits for a cluster without workers."""

    def __init__(self, client: Any, address: str) -> None:
        self._client = client
        self._address = address
        self._executor: Executor = client.get_executor(pure=False)
        self._pending: set[Future[Any]] = set()
        self._is_closed = threading.Event()
        self._watch = threading.Thread(target=self._look_after, name="recorder-dask", daemon=True)
        self._watch.start()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        try:
            inner = self._executor.submit(fn, *args, **kwargs)
        except Exception as error:  # a lost connection raises various errors
            raise ClusterError(self._lost()) from error
        self._pending.add(future)
        inner.add_done_callback(lambda done: self._pass_on(done, future))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._is_closed.set()
        with suppress(Exception):  # the scheduler may be gone
            self._executor.shutdown(wait=wait)
        self._watch.join(_LOOK_S + 5)

    def _pass_on(self, done: Future[T], future: Future[T]) -> None:
        from distributed.scheduler import KilledWorker

        self._pending.discard(future)
        if future.done():
            return
        try:
            future.set_result(done.result())
        except KilledWorker as error:
            text = f"several workers died over the same unit of work, the last was {error.last_worker.address}"
            advice = "look at their logs: most likely they need more memory"
            future.set_exception(ClusterError(f"{self._address}: {text}; {advice}"))
        except BaseException as error:
            is_of_dask = type(error).__module__.startswith(("distributed", "tornado"))
            is_lost = is_of_dask or isinstance(error, (CancelledError, TimeoutError))
            future.set_exception(ClusterError(self._lost()) if is_lost else error)

    def _lost(self) -> str:
        return f"{self._address}: the scheduler of the Dask cluster is gone"

    def _look_after(self) -> None:
        """Fail the pending calls once the cluster has lost its last worker, because they would wait for ever."""
        alone_s = 0.0
        while alone_s < _ALONE_S:
            if self._is_closed.wait(_LOOK_S):
                return
            try:
                num_workers = len(self._client.scheduler_info(n_workers=-1).get("workers", {}))
            except Exception:  # the connection is being lost, which the client reports to all who wait
                continue
            alone_s = 0.0 if num_workers else alone_s + _LOOK_S
        for future in list(self._pending):
            future.set_exception(ClusterError(f"{self._address}: has had no workers for {_ALONE_S:.0f} s"))


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Dask's log lines about lost connections off the terminal; losses that matter raise a `ClusterError`."""
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
        # A client itself needs 20 s to find these errors, and writes a traceback when it is garbage-collected.
        scheme, host_port = parse_address(address)
        if scheme not in backends:
            raise ValueError(f"{scheme}:// is not known")
        parse_host_port(host_port)
        return Client(address, timeout=_CONNECT_S, set_as_default=False, name="recorder")
    except ValueError as error:
        raise ClusterError(f"{address}: is no address of a scheduler ({error}); it is like tcp://host:8786") from error
    except (OSError, RuntimeError, TypeError, EOFError) as error:
        raise ClusterError(
            f"{address}: no Dask scheduler answers there within {_CONNECT_S:.0f} s; start one with `dask scheduler`"
        ) from error


def _wait_for_workers(client: Any, address: str) -> None:
    try:
        client.wait_for_workers(1, timeout=_WORKERS_S)
    except TimeoutError:
        raise ClusterError(
            f"{address}: the scheduler has no workers after {_WORKERS_S:.0f} s; start some with "
            f"`dask worker {address} --nthreads 1`"
        ) from None
