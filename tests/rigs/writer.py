"""A writer under test with its counter of observed rows, and a reader that needs nothing but pyarrow."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from recorder.config import Settings
from recorder.format.integrity import BatchHeader, check_batch
from recorder.records import Measured, MeasureSmall, Staged
from recorder.rules import RingWindow
from recorder.write.file import Disk
from recorder.write.ring import Room
from recorder.write.writer import CloseReport, Writer
from recorder.write.writer_directory import RunTarget
from tests.rigs.fakes import FakeBlock, fake_measure, fake_staged
from tests.rigs.waiting import PATIENCE_S


def settings_of_any_size(*, batch_bytes: int = 8 << 20, shard_rows: int = 65536, **settings: Any) -> Settings:
    """Return settings that are not checked: tests write shards that are smaller than a user may ask for."""
    own = {"batch_bytes": batch_bytes, "shard_rows": shard_rows, "__slots__": (), "__post_init__": lambda self: None}
    kind: type[Settings] = type("Settings", (Settings,), own)
    return kind(**{"min_free_bytes": 0, **settings})


class Rig:
    """Numbers records as capture would, and checks at the end what must hold in every case."""

    def __init__(
        self,
        run_dir: Path,
        *,
        disk: Disk | None = None,
        measure: Callable[..., Measured] = fake_measure,
        measure_small: MeasureSmall | None = None,
        poll: Callable[[], dict[str, Any] | None] = lambda: None,
        rank: int = 0,
        attempt: int = 0,
        resolve_dir: Callable[[], RunTarget] | None = None,
        window: RingWindow | None = None,
        ring_bytes: int = 1 << 20,
        ending: Callable[[], None] = lambda: None,
        **settings: Any,
    ) -> None:
        self.num_observed = 0
        self.staged: list[Staged] = []
        target = RunTarget(run_dir=run_dir, run_manifest={"run_id": run_dir.name}, rank=rank, attempt=attempt)
        self.writer = Writer(
            settings=settings_of_any_size(**settings),
            measure=measure,
            measure_small=measure_small,
            observed=lambda: self.num_observed,
            resolve_dir=resolve_dir or (lambda: target),
            poll=poll,
            disk=disk,
            ending=ending,
        )
        if window is not None:
            self.writer.hold(window, Room(ring_bytes, self.held_bytes))

    def held_bytes(self) -> int:
        """The bytes of blocks that were not given back."""
        blocks = [staged.block for staged in list(self.staged) if isinstance(staged.block, FakeBlock)]
        return sum(len(block.data) for block in blocks if not block.num_releases)

    def start(self) -> Rig:
        self.writer.start()
        return self

    def put(self, *args: Any, **kwargs: Any) -> Staged:
        """Number and hand over one `fake_staged`."""
        staged = fake_staged(*args, seq=self.num_observed, **kwargs)
        self.num_observed += staged.num_parts
        self.staged.append(staged)
        self.writer.put(staged)
        return staged

    def drain(self) -> bool:
        return self.writer.drain(PATIENCE_S)

    def close(self, deadline_s: float = PATIENCE_S) -> CloseReport:
        """Close, and see that the ledger balances and that every block went back to the pool once."""
        report = self.writer.close(deadline_s)
        ledger = report.ledger
        assert ledger["observed"] == self.num_observed
        assert ledger["observed"] == ledger["written"] + sum(ledger["dropped"].values()) + ledger.get("passed", 0)
        return report

    def assert_blocks_are_released(self) -> None:
        for staged in self.staged:
            assert isinstance(staged.block, FakeBlock)
            assert staged.block.num_releases == 1

    @property
    def directory(self) -> Path:
        assert self.writer.directory is not None
        return self.writer.directory

    def files(self, pattern: str) -> list[Path]:
        return sorted(self.directory.glob(pattern))

    def rows(self) -> list[dict[str, Any]]:
        """The rows of all shards, sealed or open, by seq."""
        batches = [batch for path in self.files("*.arrow") for batch, _ in read_sealed(path)]
        batches += [batch for path in self.files("_*.arrow.open") for batch, _ in read_open(path)]
        return sorted((row for batch in batches for row in batch.to_pylist()), key=lambda row: int(row["seq"]))

    def manifest(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.directory / "_writer.json").read_text())
        return found


def read_sealed(path: Path) -> list[tuple[Any, BatchHeader]]:
    """The batches of a sealed shard with their headers, checked; the seal is looked at and left out."""
    with pa.OSFile(str(path)) as source:
        file = pa.ipc.open_file(source)
        found = [file.get_batch_with_custom_metadata(number) for number in range(file.num_record_batches)]
    batches = [(batch, check_batch(batch, metadata, where=path.name)) for batch, metadata in found]
    assert [header.number for _, header in batches] == list(range(len(batches)))
    seal, header = batches.pop()
    assert seal.num_rows == 0
    assert header.is_seal
    assert header.num_batches == len(found)
    return batches


def read_open(path: Path) -> list[tuple[Any, BatchHeader]]:
    """What a reader finds in an open shard: an IPC stream after the first 8 bytes, up to the last whole batch."""
    content = path.read_bytes()
    return [
        (batch, check_batch(batch, metadata, where=path.name))
        for batch, metadata in _stream(content[8:])
        if batch.num_rows
    ]


def _stream(content: bytes) -> Iterator[tuple[Any, Any]]:
    try:
        reader = pa.ipc.open_stream(content)
        while True:
            yield reader.read_next_batch_with_custom_metadata()
    except (StopIteration, pa.ArrowInvalid, OSError):
        return
