"""How much of a run a command asks a store for, by the store's own count."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import recorder
from tests.rigs.command_line import Cli
from tests.rigs.handmade import HandmadeWriter, make_row, make_run
from tests.rigs.server import StoreServer
from tests.storage.runs import NUM_RANKS, NUM_STEPS, make_large_run


class Uploaded:
    """A run here and there."""

    def __init__(self, path: Path, url: str) -> None:
        self.path = path
        self.url = url
        self.num_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        self.num_objects = sum(file.is_file() for file in path.rglob("*"))


@pytest.fixture(scope="module")
def large(server: StoreServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Uploaded]:
    path = make_large_run(tmp_path_factory.mktemp("local") / "large")
    yield Uploaded(path, server.upload(path, "counted/large"))


@pytest.mark.parametrize(
    "command",
    ["ls", "show", "show layers.0", "stats", "stats --by step --global", "doctor", "first", "top", "stats --step 3"],
)
def test_what_needs_no_payload_reads_a_small_part_of_the_run(
    store: StoreServer, large: Uploaded, cli: Cli, command: str
) -> None:
    name, *options = command.split()
    with store.counting() as counts:
        assert cli(name, large.url, *options).exit_code in (0, 1)
    assert counts["LIST"] == (2 if name == "top" else 1), "top asks for the documents of nodes first"
    assert counts["HEAD"] <= large.num_objects
    assert counts["GET"] <= 2 * large.num_objects
    assert 0 < counts.num_bytes < 0.05 * large.num_bytes
    assert set(counts) <= {"LIST", "HEAD", "GET", "bytes"}


def test_one_value_costs_its_batch_and_not_the_shard(store: StoreServer, large: Uploaded, cli: Cli) -> None:
    (shard_bytes,) = {p.stat().st_size for p in large.path.glob("rank=00000/*/tensors-000000.arrow")}
    value = "--module layers.0 --site output --step 5 --rank 1"
    out = large.path.parent / "a.npz"
    with store.counting() as counts:
        assert cli("export", large.url, *value.split(), "-o", out, "--force").exit_code == 0
    assert shard_bytes / 3 < counts.num_bytes < shard_bytes / 3 + (512 << 10)
    assert counts["LIST"] == 1


def test_reading_everything_reads_it_about_once(store: StoreServer, large: Uploaded, cli: Cli) -> None:
    with store.counting() as counts:
        assert cli("verify", large.url).exit_code == 0
    assert large.num_bytes < counts.num_bytes < 1.3 * large.num_bytes


def test_an_open_run_asks_again_for_nothing_that_it_has(store: StoreServer, large: Uploaded) -> None:
    run = recorder.open_run(large.url)
    assert run.ranks == list(range(NUM_RANKS))
    assert run.steps == list(range(NUM_STEPS))
    table = run.table()
    with store.counting() as counts:
        assert run.table().equals(table)
    assert counts.num_requests == 0


def test_the_ranks_of_a_run_are_asked_for_at_once(store: StoreServer, tmp_path: Path) -> None:
    path = make_run(tmp_path / "wide")
    for rank in range(24):
        writer = HandmadeWriter(path, rank)
        writer.add_shard([[make_row(0, np.full(8, rank, np.float32), rank=rank)]])
        writer.finish()
    url = store.upload(path, "counted/wide")
    store.delay_s = 0.03
    with store.counting() as counts:
        run = recorder.open_run(url)
        whole = run.array("layers.0", step=0)
    assert np.array_equal(whole, np.repeat(np.arange(24), 8))
    assert counts["LIST"] == 1
    assert 8 <= store.at_once <= 16
