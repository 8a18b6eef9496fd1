"""Decides what to upload next of one run.

The files of the run's writers come first, then the run's documents, and last the run's manifest. Of a writer's files,
data comes first, then indexes, then the final manifest. A file must never be removed from this disk unless a new
listing of the destination has just shown the file.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from ..checks.causes import order_of
from ..errors import RunError
from ..format.rundir import NODES, RUN_MANIFEST, STATUS, WRITER_MANIFEST, Members, encode_manifest
from ..storage.untrusted_files import FileFacts
from .shipped import ShippedRun, Shipping
from .watching import Entries, Folder, RefusedError, WriterFiles, list_run, list_writer
from .writer_shipper import QUIET_LOOK_S, WriterShipper

_SETTLED_LOOK_S = 5.0
"""The seconds between two scans of a run that is shipped completely. It may grow again when its job restarts."""


class RunShipper:
    """Ships one run of a watched folder. One thread calls `look`. Other threads run the jobs that `look` returns."""

    def __init__(self, root: str, names: tuple[str, ...], shared: Shipping) -> None:
        self.there = ShippedRun(root, names, shared)
        self.key, self.path, self.shared = self.there.key, self.there.path, shared
        self.writers: dict[tuple[str, str], WriterShipper] = {}
        self.damage: str | None = None
        """A sentence on the run's damage. Empty without damage, None if the daemon has not looked for damage."""
        self.unreadable = ""
        """Why the run's manifest cannot be read. Empty if it can be read."""
        self.is_settled = False
        self.settled_since_s = 0.0
        """The monotonic time since which the destination has had all files, maybe shipped by an earlier process."""
        self.found_s = time.time()
        self.next_check_s = self.next_carry_s = 0.0
        self.findings: dict[tuple[str, str], int] = {}
        """The number of findings of the last `recorder check` of the run, by rule and severity."""
        self._seen_findings: set[tuple[str, str, int]] = set()
        """The findings in training that `live_news` has returned, by rule, module and step."""
        self._counts = Entries()
        self._next_look_s = self._next_settled_look_s = self._next_shown_s = 0.0
        self._has_reconciled = self.has_looked = self._was_removed = False
        self._changes: dict[str, int] = {}

    @property
    def all_writers(self) -> list[WriterShipper]:
        """A copy of the list of writers, because the scanning thread may add and remove writers meanwhile."""
        return list(self.writers.values())

    def close(self) -> None:
        self.there.ledger.close()

    def look(self, now_s: float) -> list[tuple[str, Callable[[], None]]]:
        """Return the jobs that are due now. Each has the name of its thread pool, ``small`` or ``large``."""
        if self.is_settled and not self.there.is_listing_due(now_s):
            if now_s < self._next_settled_look_s:
                return []
            self._next_settled_look_s = now_s + min(_SETTLED_LOOK_S, self.shared.settings.fresh_s / 2)
            if not self._has_changed():
                return []
        if self.there.conflict or now_s < self._next_look_s:
            return []
        self._next_look_s = now_s + self.shared.look_s
        if not self._has_reconciled or self.there.is_listing_due(now_s):
            return [("small", self._reconcile)]
        self.is_settled = False
        with self.there.open() as folder:
            writers, self.there.stamps, counts = list_run(folder)
            if self.there.stamps.get(RUN_MANIFEST) != self.there.manifest:  # the name is another run's
                return [("small", self._reconcile)]
            self._changes = {".": folder.changed_ns()}
            for rank in {rank for rank, _ in writers}:
                self._changes[rank] = folder.changed_ns(rank)
        self.has_looked = True
        self._counts = counts
        for names in writers:
            if names not in self.writers:
                self.writers[names] = WriterShipper(self.there, *names)
        for names in self.writers.keys() - set(writers):
            del self.writers[names]
        is_shown, jobs = self._is_shown, list[tuple[str, Callable[[], None]]]()
        for writer in self.all_writers:
            jobs += writer.look(now_s)
        if not jobs and not counts.unshipped and all(writer.is_settled for writer in self.all_writers):
            if self.there.are_documents_there and is_shown:
                self.is_settled = True
                self.settled_since_s = self.settled_since_s or now_s - self.there.ledger.age_s
            else:
                jobs.append(("small", self.there.put_documents))
        is_due = now_s >= self._next_shown_s or self.shared.is_once
        if is_due and not is_shown and self._may_show:
            self._next_shown_s = now_s + self.shared.settings.status_s
            jobs.append(("small", self.put_shown))
        if not self.is_settled:
            self.settled_since_s = 0.0
        return jobs

    @property
    def _is_shown(self) -> bool:
        """True if the destination has the statuses of this node's writers as they were at the last scan."""
        return self.shared.destination.puts_are_free or self.there.has_document(self._node_name, self._node_document())

    @property
    def _node_name(self) -> str:
        return f"{NODES}/{self.shared.node}.json"

    @property
    def _may_show(self) -> bool:
        is_of_it = self.has_looked and not self.there.conflict
        return is_of_it and all(writer.shown is not None or writer.stuck for writer in self.all_writers)

    def put_shown(self) -> None:
        """Put a document with the statuses of this node's writers, unless the destination has it already."""
        if self._may_show and not self._is_shown:
            is_ours, is_noted = (lambda there: True), not self.is_recording
            self.there.put_document(self._node_name, self._node_document(), is_ours=is_ours, is_noted=is_noted)

    def _node_document(self) -> bytes:
        """Return a document with the statuses of this node's writers.

        Its ``host`` is the node's name, because nodes may share a host's name. A rank's newest writer has all members.
        Earlier writers have only ``attempt`` and ``state``.
        """
        newest, shown = self.newest_writers, {}
        for writer in self.all_writers:
            if not writer.shown:
                continue
            is_newest = writer in newest
            members = {key: one for key, one in writer.shown.items() if is_newest or key in ("attempt", "state")}
            members["state"] = "killed" if writer.state == "dead" else members.get("state")
            if interval_s := Members(members).number("interval_s"):  # a status arrives as late as it is put
                members["interval_s"] = interval_s + self.shared.settings.status_s
            shown["/".join(writer.names)] = members | {"host": self.shared.node}
        return encode_manifest({"writers": shown})

    @property
    def name(self) -> str:
        """The name of the run in its manifest, or else the name of its directory."""
        return str(self.there.facts.get("name") or self.there.names[-1])

    @property
    def num_rows(self) -> int:
        """The number of rows that this node's writers of the run have written and not deleted."""
        return sum(writer.num_rows for writer in self.all_writers)

    @property
    def newest_writers(self) -> list[WriterShipper]:
        in_order = sorted(self.all_writers, key=lambda one: (one.lifetime.attempt, one.lifetime.started_ns))
        return list({writer.rank: writer for writer in in_order if writer.rank is not None}.values())

    @property
    def backlog(self) -> dict[str, FileFacts]:
        """The sealed files that the store has not confirmed, by path. The list comes from the disk, not the store."""
        is_out = self.there.conflict and not self.there.was_pruned
        if self.is_settled or is_out or self.unreadable:
            return {}
        found: dict[str, FileFacts] = {}
        with contextlib.suppress(OSError), self.there.open() as folder:
            for names in list_run(folder)[0]:
                with contextlib.suppress(OSError), folder.below(*names) as inner:
                    files = list_writer(inner)
                    sealed, has = (files.sealed | files.indexes).items(), self.there.ledger.has
                    found |= {
                        f"{inner.path}/{name}": one for name, one in sealed if not has("/".join((*names, name)), one)
                    }
        return found

    @property
    def has_stuck_files(self) -> bool:
        """True if files cannot be shipped until a person intervenes."""
        return bool(self.unshipped) or any(writer.stuck for writer in self.all_writers)

    @property
    def unshipped(self) -> dict[str, str]:
        """The files and directories of the run that cannot be read, by path, each with the reason."""
        own = {f"{self.path}/{RUN_MANIFEST}": self.unreadable} if self.unreadable else {}
        of_writers = {one.path: one.unreadable for one in self.all_writers if one.unreadable}
        return own | self._counts.unshipped | of_writers

    @property
    def strangers(self) -> list[str]:
        """The paths of files, links and directories that lie in the run's directory and are not part of the run."""
        own = [f"{self.path}/{name}" for name in (*self._counts.foreign, *self._counts.refused)]
        of_writers = ((one.path, one.files) for one in self.all_writers)
        return sorted(own + [f"{path}/{name}" for path, its in of_writers for name in (*its.foreign, *its.refused)])

    @property
    def is_recording(self) -> bool:
        return any(writer.state == "alive" for writer in self.all_writers)

    @property
    def counted(self) -> list[Entries | WriterFiles]:
        """The listings of the run's directories, with the entries that are refused or belong to no run."""
        return [self._counts, *(writer.files for writer in self.all_writers)]

    @property
    def needs_repair(self) -> bool:
        """True if a writer has ended and has left a shard open."""
        return any(writer.needs_repair for writer in self.all_writers)

    @property
    def is_put(self) -> bool:
        """True if all that the last scan found was put, also of recording writers. True if the run cannot be read."""
        are_put = self.has_looked and self.there.are_documents_there and all(one.is_put for one in self.all_writers)
        return (are_put and self._is_shown) or bool(self.unreadable)

    @property
    def is_known(self) -> bool:
        """True if every writer was scanned, so that a summary is meaningful."""
        return self.has_looked and all(writer.has_looked for writer in self.all_writers)

    @property
    def may_go(self) -> bool:
        """True if the run may be removed from this disk: it is shipped completely, and all its writers have ended."""
        have_ended = all(writer.state != "quiet" for writer in self.all_writers)
        return self.is_settled and not self._was_removed and have_ended and bool(self.writers)

    def missing_there(self) -> str:
        """List the destination. Return the name of a file of this node that is missing there, or an empty text."""
        held = self.there.listed()
        for writer in self.all_writers:
            files = writer.files
            for name, stamp in (files.sealed | files.indexes | files.opened).items():
                there = held.get(writer.below + name)
                # At the destination an open shard ends with its last complete batch, so the shard may be smaller there.
                if there is None or (there.size_bytes != stamp.size_bytes and not name.endswith(".open")):
                    return writer.below + name
            if files.manifest is not None and writer.below + WRITER_MANIFEST not in held:
                return writer.below + WRITER_MANIFEST
        return "" if RUN_MANIFEST in held else RUN_MANIFEST

    def remove(self) -> tuple[int, bool]:
        """Remove the run's shipped files from this disk. Return their size in bytes, and True if no file is left.

        A directory with newer files stays, and so does the run. A removal that is killed is completed by a later pass.
        """
        self._was_removed = True
        num_bytes = sum(writer.files.num_bytes for writer in self.all_writers)
        with self.there.open() as folder, contextlib.suppress(OSError):
            for writer in self.all_writers:
                with folder.below(*writer.names) as inner:
                    files = writer.files
                    last = [name for name, one in ((STATUS, files.status), (WRITER_MANIFEST, files.manifest)) if one]
                    for name in [*files.opened, *files.sealed, *files.indexes, *files.aside, *last]:
                        os.unlink(name, dir_fd=inner.descriptor)
                with folder.below(writer.names[0]) as rank:
                    os.rmdir(writer.names[1], dir_fd=rank.descriptor)
            for rank_name in {writer.names[0] for writer in self.all_writers}:
                os.rmdir(rank_name, dir_fd=folder.descriptor)
            self.there.ledger.close()
            for name in sorted(self.there.stamps, key=lambda name: name == RUN_MANIFEST):
                os.unlink(name, dir_fd=folder.descriptor)
            os.unlink(self.there.ledger.name, dir_fd=folder.descriptor)
            with Folder.root(self.there.root) as top, top.below(*self.there.names[:-1]) as parent:
                os.rmdir(self.there.names[-1], dir_fd=parent.descriptor)
            return num_bytes, True
        return num_bytes, False

    def live_news(self) -> list[dict[str, Any]]:
        """Return findings of rules in training that no earlier call returned: causes first, each with its ranks."""
        news: dict[tuple[str, str, int], dict[str, Any]] = {}
        found = [(one, writer.rank) for writer in self.all_writers for one in writer.findings]
        for one, rank in sorted(found, key=lambda some: order_of(some[0].step, some[0].site, some[0].rule)):
            if (key := (one.rule, one.module, one.step)) not in self._seen_findings:
                first = {"rule": one.rule, "severity": one.severity, "step": one.step, "ranks": []}
                told = news.setdefault(key, {**first, "module_path": one.module, "text": one.text})
                told["ranks"].append(rank)
        self._seen_findings |= news.keys()
        return list(news.values())

    def look_again(self) -> None:
        self._next_look_s = 0.0
        self.is_settled = False
        for writer in self.all_writers:
            writer.look_again()

    def _has_changed(self) -> bool:
        """Return True if the run may have changed since the last scan. This costs one stat of each directory."""
        writers = self.all_writers
        if any(writer.state == "quiet" and writer.has_changed() for writer in writers):
            return True
        seen = {"/".join(writer.names): writer.changed_ns for writer in writers if writer.state != "quiet"}
        try:
            with self.there.open() as folder:
                return any(folder.changed_ns(path) != changed_ns for path, changed_ns in (self._changes | seen).items())
        except OSError:
            return True

    def _reconcile(self) -> None:
        """List the destination, and forget confirmed files that the destination has lost."""
        try:
            self.unreadable = ""
            is_ours = self.there.identify()
        except (PermissionError, RunError, RefusedError) as error:
            self.unreadable = str(error)
            self._next_look_s = time.monotonic() + QUIET_LOOK_S
            self.shared.failed(error, self.path)
            return
        if not is_ours:
            return
        self.there.reconcile()
        for writer in self.all_writers:
            writer.reconciled()
        self._has_reconciled = True
        self.look_again()

    def summary(self) -> dict[str, Any]:
        """Return the entry for this node's part of the run in the fleet's index."""
        writers = [writer.summary() for writer in self.all_writers]
        states = {writer["state"] for writer in writers}
        dropped = sum((Counter(writer["dropped"]) for writer in writers), Counter[str]())
        steps = [writer["step"] for writer in writers if writer["step"] is not None]
        return {
            "run_id": self.there.run_id,
            "name": self.name,
            "created_ns": self.there.facts.get("created_ns") or 0,
            "started_ns": min((writer["started_ns"] for writer in writers if writer["started_ns"]), default=0),
            "world_size": self.there.facts.get("world_size") or 0,
            "ranks": sorted({writer["rank"] for writer in writers if writer["rank"] is not None}),
            "last_step": max(steps, default=None),
            "rows": self.num_rows,
            "bytes": sum(writer["bytes"] for writer in writers),
            "dropped": dict(dropped),
            "findings": sorted({f"{one.rule}: {one.text}" for writer in self.all_writers for one in writer.findings}),
            "state": next((state for state in ("unclosed", "recording", "closed") if state in states), "empty"),
            **({} if self.damage is None else {"problems": [self.damage] * bool(self.damage)}),
        }
