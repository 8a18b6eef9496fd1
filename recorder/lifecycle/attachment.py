"""The handles that `attach` returns: `Attachment` for a model that is recorded, and `Inactive`, which does nothing."""

from __future__ import annotations

import html
from collections.abc import Callable
from pathlib import Path
from types import TracebackType


class Attachment:
    """A handle on a model that is recorded; usable as a context manager."""

    def __init__(
        self,
        *,
        detach: Callable[[], None],
        flush: Callable[[float], bool],
        run_dir: Callable[[], Path | None],
        failed: Callable[[BaseException], None] = lambda error: None,
    ):
        self._detach: Callable[[], None] | None = detach
        self._flush = flush
        self._run_dir = run_dir
        self._failed = failed

    @property
    def is_attached(self) -> bool:
        """True until the handle is closed."""
        return self._detach is not None

    @property
    def run_dir(self) -> Path | None:
        """The run directory; None until the writer has made it, or if the writer could not make it."""
        return self._run_dir()

    def __repr__(self) -> str:
        run_dir = self.run_dir
        return f"<Attachment: {self._state}{'' if run_dir is None else f', {str(run_dir)!r}'}>"

    def _repr_html_(self) -> str:
        run_dir = self.run_dir
        shown = {"attachment": self._state} | ({} if run_dir is None else {"run": repr(str(run_dir))})
        rows = "".join(f"<tr><th>{key}</th><td>{html.escape(text)}</td></tr>" for key, text in shown.items())
        return f"<table><tbody>{rows}</tbody></table>"

    @property
    def _state(self) -> str:
        return "recording" if self.is_attached else "closed"

    def flush(self, deadline_s: float = 5.0) -> bool:
        """Wait until all values observed so far are on disk. Return False if the deadline passes first."""
        return self._flush(deadline_s)

    def close(self) -> None:
        """Remove the hooks. The last attached model also ends the recording. A second call does nothing."""
        detach, self._detach = self._detach, None
        if detach is not None:
            detach()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._failed(error)
        self.close()


class Inactive(Attachment):
    """The handle for when recording is off: every method is a no-op."""

    def __init__(self) -> None:
        super().__init__(detach=lambda: None, flush=lambda deadline_s: True, run_dir=lambda: None)

    @property
    def _state(self) -> str:
        return "not recording; enabled=True or RECORDER=1 turns recording on"
