"""What of a run the store has confirmed: one line of JSON a file, beside the run, appended and never changed.

It may be lost, or lack its last line: what it does not name is put again, and found there. Of a document that changes,
the last line says which state of it is there.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from typing import NamedTuple

from ..watching import Folder, Stamp

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
_MAX_BYTES = 1 << 30


class Confirmed(NamedTuple):
    """A file that the store has."""

    size_bytes: int
    how: str
    """``etag``, ``read``, ``synced`` or ``there``, as `Destination.put_new` says; ``crc:`` and the checksum of a
    document; ``rows:`` and the rows of a catalog."""


def ledger_name(url: str) -> str:
    """Return the name of the ledger for a destination: a run may be shipped to several, one after the other."""
    return f"_shipped-{hashlib.sha256(url.encode()).hexdigest()[:8]}.jsonl"


class ShippedLedger:
    """The confirmed files of one run by their names below it. Any thread."""

    def __init__(self, folder: Folder, url: str) -> None:
        """Read what was confirmed before; where the ledger cannot be kept, `problem` says why.

        Args:
            folder: the run; it is used now and not kept.
            url: the destination.
        """
        self.name = ledger_name(url)
        self.problem = ""
        self._lock = threading.Lock()
        self._files: dict[str, Confirmed] = {}
        self._descriptor = -1
        try:
            self._descriptor = os.open(self.name, _FLAGS, 0o600, dir_fd=folder.descriptor)
            self._load()
        except OSError as error:
            self.problem = f"{folder.path}/{self.name}: cannot be kept ({error.strerror}); the store's listing is used"

    def _load(self) -> None:
        size_bytes = min(os.fstat(self._descriptor).st_size, _MAX_BYTES)
        with open(os.dup(self._descriptor), "rb") as file:
            file.seek(0)
            text = file.read(size_bytes)
        for line in text.split(b"\n"):
            try:
                entry = json.loads(line)
                name, size, how = entry["name"], entry["bytes"], entry["how"]
            except (ValueError, KeyError, TypeError, RecursionError):
                continue  # a kill has cut the last line, or somebody has written into it
            if isinstance(name, str) and isinstance(size, int) and isinstance(how, str):
                self._files[name] = Confirmed(size, how)
        if text and not text.endswith(b"\n"):
            os.write(self._descriptor, b"\n")

    def get(self, name: str) -> Confirmed | None:
        """Return what was confirmed of a file."""
        return self._files.get(name)

    def has(self, name: str, stamp: Stamp) -> bool:
        """Whether the store has confirmed a file of this size under this name."""
        confirmed = self.get(name)
        return confirmed is not None and confirmed.size_bytes == stamp.size_bytes

    def names(self) -> dict[str, Confirmed]:
        """Return all that was confirmed."""
        with self._lock:
            return dict(self._files)

    def add(self, name: str, size_bytes: int, how: str) -> None:
        """Note that the store has a file."""
        line = json.dumps({"name": name, "bytes": size_bytes, "how": how}, separators=(",", ":")) + "\n"
        with self._lock:
            self._files[name] = Confirmed(size_bytes, how)
            if self._descriptor >= 0:
                try:
                    os.write(self._descriptor, line.encode())
                except OSError as error:  # a full disk: what is not noted is found in the store
                    self.problem = (
                        f"{self.name}: cannot be written ({error.strerror}); what it lacks is found in the store"
                    )

    def forget(self, names: list[str]) -> None:
        """Take files for not shipped: the store has lost them."""
        with self._lock:
            for name in names:
                self._files.pop(name, None)
            if self._descriptor < 0:
                return
            lines = [
                json.dumps({"name": name, "bytes": one.size_bytes, "how": one.how}, separators=(",", ":"))
                for name, one in self._files.items()
            ]
            try:
                os.ftruncate(self._descriptor, 0)
                os.write(self._descriptor, "".join(f"{line}\n" for line in lines).encode())
            except OSError as error:
                self.problem = f"{self.name}: cannot be written ({error.strerror}); what it lacks is found in the store"

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
