"""The operating system: cores, imported modules, processes, memory, file descriptors and locks.

A process id alone does not identify a process, because the kernel reuses ids, and each container has its own. A program
that becomes a daemon closes every descriptor, even the recorder's. The kernel then gives their numbers to files that
the program opens. Nothing here may signal a process, import a module of the program, or write to or close a descriptor
that is no longer the recorder's.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import itertools
import mmap
import os
import resource
import signal
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from ..errors import ConfigError, WriteError

_T = TypeVar("_T")
_IMPORT_S = 1.0
"""A child process that used less processor time than this, in seconds, cannot have imported torch."""


def available_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_program() -> bool:
    """Whether this process runs a user's program and does the work itself, not in child processes.

    The result is False for launchers and compile workers, in which Python runs no file or an installed file. It is also
    False if children used more processor time than an import of torch takes: the user's file is then a launcher.
    """
    main = Path(next(iter(sys.argv), ""))  # when exit functions run, `__main__` has no `__file__` any more
    parent = loaded("multiprocessing", "parent_process")
    installed = {"site-packages", "dist-packages"}.intersection(main.parts)
    is_child = parent is not None and parent() is not None
    if main.suffix != ".py" or installed or is_child or main.is_relative_to(sysconfig.get_path("stdlib")):
        return False
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime < _IMPORT_S


def own_process() -> dict[str, Any]:
    """Return the entries of a manifest that identify this process. `runs` reads them."""
    pid = os.getpid()
    return {"host": os.uname().nodename, "pid": pid, "process": f"{_realm()}:{_started(pid)}"}


def runs(host: str, pid: int, process: str | None) -> bool | None:
    """Whether the process that wrote a manifest still runs. Return None if this process cannot find out.

    It cannot find out about a process on another host, in another container, or from before a reboot. `process` tells
    apart processes with the same id; it is None if the manifest has no such text.
    """
    if host != os.uname().nodename or pid <= 0:
        return None
    if process is None:  # manifests of version 1.0 have only the id
        return _exists(pid)
    realm, _, started = process.rpartition(":")
    if realm != _realm():
        return None
    return _exists(pid) and _started(pid) in (started, "")


def _exists(pid: int) -> bool:
    """Whether a process exists and has not ended. A zombie counts as ended."""
    if _stat(pid)[:1] == ["Z"]:
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _realm() -> str:
    """Return a text that identifies this boot of the kernel and the namespace of process ids. Empty without /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _started(pid: int) -> str:
    return next(iter(_stat(pid)[19:20]), "")


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from `state` on. Empty without /proc, or if the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (OSError, ValueError):
        return []


def loaded(module_name: str, name: str) -> Any:
    """Return an attribute of a module if the program has imported it. Return None if not."""
    return getattr(sys.modules.get(module_name), name, None)


def is_instance(value: object, module_name: str, name: str) -> TypeGuard[Any]:
    """Whether an object is an instance of a class. False if the program has not imported the class."""
    kind = loaded(module_name, name)
    return kind is not None and isinstance(value, kind)


def live_instances(*of: type[_T]) -> list[_T]:
    """Return the live instances of classes and their subclasses. Only types are compared, so no lazy object is loaded.

    No Python runs while a list of all objects exists, not even between two calls, and so no other thread. Another
    thread may be making a tuple from an iterator, and CPython raises a SystemError there if anything else refers to the
    tuple. Each list is read to its end, because what reads it is in it, and would keep it alive.
    """
    kinds: list[type] = [*of]
    for one in kinds:
        kinds += type.__subclasses__(one)
    numbers = set(map(id, kinds))  # the class's metaclass may forbid hashing

    def found(generation: int) -> Iterator[_T]:
        # A list is made when its first object is asked for. Two lists of a generation have the same objects in the same
        # order, and the second one ends with what is new, such as the first.
        lists = (itertools.chain.from_iterable(map(gc.get_objects, (generation,))) for _ in range(2))
        # One list takes two thirds of the time. But `tee` is among the youngest objects, and would hold itself there.
        objects, same = itertools.tee(next(lists)) if generation else lists
        are_chosen = map(numbers.__contains__, map(id, map(type, same)))
        return itertools.compress(itertools.chain(objects, itertools.repeat(None)), are_chosen)

    was_enabled = gc.isenabled()
    gc.disable()  # a collection would move objects, and run the program's finalizers
    try:
        return list(itertools.chain.from_iterable([found(generation) for generation in range(3)]))
    finally:
        if was_enabled:
            gc.enable()


def comes_from_signal_handler(error: BaseException) -> bool:
    """Whether the program's signal handler raised this error while our code ran. Such an error must not be caught."""
    handlers = (signal.getsignal(number) for number in signal.valid_signals())
    codes = {code for handler in handlers if (code := getattr(handler, "__code__", None)) is not None}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False


_WIPE_ON_FORK = 18
"""The value of MADV_WIPEONFORK (Linux 4.14), which `mmap` does not define."""


_MIN_NS = 250_000_000
"""The nanoseconds that a thread must have run or waited before `CoreShare` gives a result."""


class CoreShare:
    """Measures whether the calling thread gets a CPU core when it wants one. Works only on Linux."""

    def __init__(self) -> None:
        self._ran_ns = self._waited_ns = 0

    def look(self) -> float | None:
        """Return the fraction of the thread's time since the last result in which the thread did not wait for a core.

        Return None if the kernel does not measure this, or if the thread has not run or waited for a quarter of a
        second yet. A wait for the disk or for the interpreter's lock does not count.
        """
        try:
            with open("/proc/thread-self/schedstat", encoding="ascii") as file:
                ran_ns, waited_ns = map(int, file.read().split()[:2])
        except (OSError, ValueError):
            return None
        ran, waited = ran_ns - self._ran_ns, waited_ns - self._waited_ns
        if ran + waited < _MIN_NS:
            return None
        self._ran_ns, self._waited_ns = ran_ns, waited_ns
        return ran / (ran + waited)


def private_memory(nbytes: int) -> mmap.mmap:
    """Return page-aligned memory. It is empty in forked children, and pages that are not touched cost nothing.

    Large pages are used if the system has them, because a direct write pins each page that it reads from.

    Raises:
        OSError: no memory is left.
    """
    region = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # MADV_DONTFORK is not used. A child that frees the memory would unmap whatever the kernel has mapped there since.
    for advice in (_WIPE_ON_FORK, mmap.MADV_HUGEPAGE):
        with contextlib.suppress(OSError):
            region.madvise(advice)
    return region


class Descriptor(int):
    """A file descriptor that remembers its file. It is an `int`, and is used as one."""

    _file: tuple[int, int]

    @classmethod
    def of(cls, number: int) -> Descriptor:
        """Return a new descriptor as a `Descriptor`. If its file cannot be identified, close it and raise OSError."""
        try:
            status = os.fstat(number)
        except OSError:
            os.close(number)
            raise
        kept = cls(number)
        kept._file = status.st_dev, status.st_ino
        return kept

    @property
    def is_ours(self) -> bool:
        """Whether the descriptor still refers to the file that was opened."""
        try:
            status = os.fstat(self)
        except OSError as error:
            return error.errno != errno.EBADF  # other errors do not prove a close
        return (status.st_dev, status.st_ino) == self._file


def require_ours(descriptor: int) -> None:
    """Raise OSError (EBADF) if the descriptor was closed, even if its number is in use again."""
    if isinstance(descriptor, Descriptor) and not descriptor.is_ours:
        raise OSError(errno.EBADF, "somebody else closed the descriptor")


@contextlib.contextmanager
def locked_folder(folder: Path, work: str) -> Iterator[None]:
    """Lock a folder, if its file system has locks. Raises WriteError if another process does the same `work` in it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise WriteError(f"{folder}: another {work} works in this folder; wait until it has ended") from error
        yield
    finally:
        os.close(descriptor)


def sync_directory(path: Path | str) -> None:
    """Make the names in a directory durable, if the file system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def set_malloc(**parameters: int) -> None:
    """Set parameters of glibc's allocator, by their ``mallopt`` names in malloc.h."""
    numbers = {"M_TRIM_THRESHOLD": -1, "M_MMAP_THRESHOLD": -3, "M_ARENA_MAX": -8}
    import ctypes

    with contextlib.suppress(OSError, AttributeError):  # the C library is not glibc
        mallopt = ctypes.CDLL(None).mallopt
        for name, value in parameters.items():
            mallopt(numbers[name], value)


def is_loopback(host: str) -> bool:
    """Return whether a host address can be reached from this machine alone."""
    return host in ("localhost", "::1") or host.startswith("127.")


def tls_context(certificate: str | os.PathLike[str], setting: str) -> Any:
    """Return a server's TLS context from a PEM file. Raises ConfigError, which names `setting`, for a bad file."""
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, password="")  # otherwise OpenSSL asks for a password
    except OSError as error:  # ssl.SSLError is a subclass of OSError
        why = error.strerror or error
        raise ConfigError(
            f"{setting}: cannot be used ({why}); expected a PEM file with a certificate and its key"
        ) from None
    return context
