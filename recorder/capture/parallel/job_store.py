"""A connection of our own to the store of the job's process group, each of whose calls has a deadline.

The training's own connections are never used. A call of torch's client waits for ever for a store that is stopped, and
a thread that comes back from one while the interpreter is being torn down aborts the process. So the kernel bounds
what the connection's socket waits for, and whoever ends the recording can cut it.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
from typing import Any

from .topology import is_distributed

_DEADLINE_S = 5.0
_HANDLE = re.compile(r"client=TCPClient\(SocketImpl\(fd=([0-9]{1,9}),")


class JobStore:
    """A store with names of our own. One thread calls, and may wait; another may `cut` it.

    Calls raise what torch raises.
    """

    def __init__(self, client: Any, connection: socket.socket, prefix: str) -> None:
        """Take a connection; `open_job_store` makes one."""
        self._client = client
        self._connection = connection
        self._prefix = prefix

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which is 0 at first, and return the sum."""
        return int(self._client.add(self._prefix + key, amount))

    def put(self, key: str, value: bytes) -> None:
        """Set a value."""
        self._client.set(self._prefix + key, value)

    def get(self, key: str) -> bytes | None:
        """Return a value; None where there is none."""
        return bytes(self._client.get(self._prefix + key)) if self._client.check([self._prefix + key]) else None

    def first(self, key: str, value: str) -> str:
        """Return the value that was set first, which is this one where there was none."""
        answer = self._client.compare_set(self._prefix + key, "", value)
        return answer.decode(errors="replace") if isinstance(answer, bytes) else str(answer)

    def cut(self) -> None:
        """Have a call that is under way come back with an error, and those after it. Any thread."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let the connection go."""
        self._client = None
        self._connection.close()


def open_job_store(prefix: str) -> JobStore | None:
    """Connect to the store; None where the process group has none on a server, or one whose waiting cannot be bounded.

    May wait, and raises what torch raises.

    Args:
        prefix: what the names of all keys begin with.
    """
    if not is_distributed():
        return None
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed.distributed_c10d import _get_default_store

    store: Any = _get_default_store()
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    if not isinstance(store, TCPStore) or not hasattr(store, "clone"):
        return None
    client = store.clone()
    connection = _connection_of(client)
    return None if connection is None else JobStore(client, connection, prefix)


def _connection_of(client: Any) -> socket.socket | None:
    """Return another handle of the client's socket, which waits a bounded time; None where it is not known."""
    match = _HANDLE.search(repr(client))
    if match is None:
        return None
    descriptor = os.dup(int(match[1]))
    try:
        connection = socket.socket(fileno=descriptor)
    except OSError:
        os.close(descriptor)
        return None
    try:
        if connection.getpeername()[1] == client.port:
            deadline = struct.pack("@ll", int(_DEADLINE_S), 0)
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                connection.setsockopt(socket.SOL_SOCKET, option, deadline)
            return connection
    except OSError:
        pass
    connection.close()
    return None
