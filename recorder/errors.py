"""Every error that the package raises on purpose, and nothing else.

RecorderError
├── ConfigError          a setting is wrong: unknown key, impossible value, unreadable file
├── AttachError          a model cannot be attached, or a pattern matches nothing
├── TraceError           a trace cannot answer what was asked
│   └── TraceKeyError a trace has no such value, or several
├── TapError             a model cannot be instrumented or stripped, or a tap has a wrong name
├── WriteError           the run directory cannot be used, or the writer gave up
├── CommandError         a run under way cannot take this command, or a file holds no command
├── StoreError           an object store cannot be reached, refuses, or has other objects than it listed
├── ClusterError         a Dask or Ray cluster cannot be used, or was lost
└── RunError             a recorded run cannot be read
    ├── NotARunError         the path is missing, or holds no run of ours
    ├── CorruptError         bytes are not what was written
    ├── UnsupportedError     a newer format version or an unknown encoding
    └── LookupFailedError    no row, or more than one, answers the question

A message says where, what, what was expected and what to do.
"""


class RecorderError(Exception):
    """The base of all errors of the package."""


class ConfigError(RecorderError, ValueError):
    """A setting is wrong. The message names the key, its value, its source and what is allowed."""


class AttachError(RecorderError):
    """A model cannot be attached as requested. The model is unchanged."""


class TapError(RecorderError):
    """A model cannot be instrumented or stripped as requested, or a tap's name is wrong. The model is unchanged."""


class TraceError(RecorderError):
    """A trace cannot answer. It keeps no graph, no graph joins two values, or a vector has the wrong shape."""


class TraceKeyError(TraceError, KeyError):
    """A trace has no such value, or several. The message names the most similar keys and the reason, if known."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would print the repr of its message


class WriteError(RecorderError):
    """The run directory cannot be used, or the writer thread gave up. Committed rows stay readable."""


class CommandError(RecorderError):
    """A command cannot be sent to a run that is under way, or a command's file contains no command."""


class StoreError(RecorderError):
    """An object store cannot be reached, refuses the credentials, or has changed. The run itself may be sound."""

    def __init__(self, message: str, kind: str = "failed") -> None:
        """Store the message and the kind of failure.

        The kind is ``unreachable``, ``refused``, ``anonymous`` (credentials are needed, and none were found), ``busy``,
        ``changed``, ``damaged`` or ``failed``.
        """
        super().__init__(message)
        self.kind = kind


class ClusterError(RecorderError):
    """A Dask or Ray cluster cannot be used, or was lost. The message names the scheduler or worker, and the reason."""


class RunError(RecorderError):
    """A recorded run cannot be read as asked."""


class NotARunError(RunError):
    """The path is missing, or is not a run directory of this format."""


class CorruptError(RunError):
    """Bytes on disk are not the bytes that were written. The message names the file and the check that failed."""


class UnsupportedError(RunError):
    """The file is of a newer format version, or a payload has an encoding that this reader does not know."""


class LookupFailedError(RunError, LookupError):
    """No row, or more than one, answers the question. The message lists the possible choices."""


def not_installed(what: str, package: str, extra: str) -> str:
    """Return the message that `what` needs a missing package, with the command that installs it."""
    return f"{what} needs {package}, which is not installed: {install_line(extra)} (or {package} alone)"


def install_line(extra: str = "", *, is_upgrade: bool = False) -> str:
    """Return the command that installs this package with an extra. A package from a clone is installed from the clone.

    To upgrade, the command first updates the clone.
    """
    # These imports are local because every process that records loads this module.
    import contextlib
    import json
    import os
    import shlex
    from importlib import metadata
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    source, options, first = "torch-recorder", "--upgrade " if is_upgrade else "", ""
    with contextlib.suppress(Exception):  # the package has no metadata, or its direct_url.json is not what pip writes
        origin = json.loads(metadata.distribution(source).read_text("direct_url.json") or "")
        folder = url2pathname(urlsplit(origin["url"]).path)
        if "dir_info" in origin and os.path.isdir(folder):
            source = "." if os.path.samefile(folder, os.curdir) else folder
            options = "-e " if origin["dir_info"].get("editable") else ""
            first = f"git -C {shlex.quote(source)} pull && " if is_upgrade else ""
    return f"{first}pip install {options}{shlex.quote(f'{source}[{extra}]' if extra else source)}"
