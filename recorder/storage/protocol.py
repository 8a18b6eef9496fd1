"""`Store`, the one way to what lies in a directory or in an object store."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol, TypeVar

from ..format.rundir import MAX_MANIFEST_BYTES
from .untrusted_files import ByteSource

IsPart = Callable[[str], bool]
Item = TypeVar("Item")
Found = TypeVar("Found")


class FileFacts(NamedTuple):
    """The facts that a listing gives of a file."""

    size_bytes: int
    changed_ns: int
    inode: int = 0
    e_tag: str = ""
    """An object store's name for these bytes; another object under the same key has another ETag."""


class Store(Protocol):
    """Access to the files of one kind of storage. A store shows its content as it was when listed, until `refresh`."""

    @property
    def filesystem(self) -> Any:
        """The file system for `pyarrow.dataset`; None for the local one."""

    def is_directory(self, path: Any) -> bool: ...

    def is_file(self, path: Any) -> bool: ...

    def exists(self, path: Any) -> bool: ...

    def list_directory(self, path: Any, *, directories: bool, is_part: IsPart = lambda name: False) -> list[str]:
        """Return the sorted names of the real directories, or of the regular files, in a directory. Links are neither.

        Args:
            path: the directory.
            directories: True for its directories, False for its files.
            is_part: whether a name is that of a part of a run, which no link, pipe or device may have.

        Raises:
            NotARunError: it cannot be listed, or a part of a run in it is a link, a pipe or a device.
        """

    def look_at(self, path: Any) -> FileFacts:
        """Return what is known of a file, without following links; raises OSError where there is none."""

    def read_json(self, path: Any, max_bytes: int = MAX_MANIFEST_BYTES) -> dict[str, Any]:
        """Read a manifest, as `format.rundir.read_json` does."""

    def open_sealed(self, path: Any) -> ByteSource:
        """Open a file that nobody changes any more; raises FileNotFoundError where it is gone."""

    def open_growing(self, path: Any) -> ByteSource:
        """Open a file whose writer may be at work; raises FileNotFoundError where it is gone."""

    def each(self, function: Callable[[Item], Found], items: Iterable[Item]) -> Iterable[Found]:
        """Return the function's results for the items, in order; calls overlap where each waits for an answer."""

    def refresh(self) -> None:
        """Forget the listing, so that the next question lists anew."""

    def arrow_path(self, path: Any) -> str:
        """Return a path as `filesystem` writes it."""
