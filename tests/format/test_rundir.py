"""Names in a run directory are parsed strictly, and a manifest that is not as it was written is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recorder.errors import CorruptError, NotARunError, UnsupportedError
from recorder.format import rundir
from recorder.format.rundir import check_version


@given(st.integers(0, 10**8))
def test_names_and_numbers_go_both_ways(number: int) -> None:
    assert rundir.parse_rank_dir(rundir.rank_dir(number)) == number
    for kind in rundir.SHARD_KINDS:
        shard = rundir.shard_name(kind, number)
        assert rundir.parse_shard_name(shard) == (kind, number, False)
        assert rundir.parse_shard_name(rundir.open_name(shard)) == (kind, number, True)
        assert rundir.parse_shard_name(rundir.index_name(shard)) is None


def test_names_are_those_of_the_specification() -> None:
    assert rundir.rank_dir(3) == "rank=00003"
    assert rundir.shard_name("tensors", 12) == "tensors-000012.arrow"
    assert rundir.open_name("tensors-000012.arrow") == "_tensors-000012.arrow.open"
    assert rundir.index_name("tensors-000012.arrow") == "_tensors-000012.index"
    with pytest.raises(ValueError, match="'logs'"):
        rundir.shard_name("logs", 0)


@pytest.mark.parametrize(
    "name",
    [
        "rank=3",
        "rank=000003",
        "rank=-0003",
        "rank=00003 ",
        "rank=00003\n",
        "rank=\u0663\u0663\u0663\u0663\u0663",
        "Rank=00003",
        "rank=00003/..",
    ],
)
def test_no_other_name_is_a_rank(name: str) -> None:
    assert rundir.parse_rank_dir(name) is None


@pytest.mark.parametrize(
    "name",
    [
        "tensors-12.arrow",
        "tensors-0000012.arrow",
        "tensors-000012.arrow.open",
        "_tensors-000012.arrow",
        "../tensors-000012.arrow",
        "tensors-000012.arrow\n",
        "other-000012.arrow",
        "_writer.json",
    ],
)
def test_no_other_name_is_a_shard(name: str) -> None:
    assert rundir.parse_shard_name(name) is None


def test_a_manifest_reads_back_and_every_flipped_bit_of_it_is_seen(tmp_path: Path) -> None:
    path = tmp_path / rundir.WRITER_MANIFEST
    manifest = {"format": "recorder", "version": [1, 1], "rank": 3, "host": "a", "state": "recording"}
    text = rundir.encode_manifest(manifest)
    path.write_bytes(text)
    assert rundir.read_json(path) == manifest
    assert json.loads(text).keys() == {rundir.CHECKSUM, *manifest}
    for bit in range(8 * len(text)):
        flipped = bytearray(text)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(CorruptError, match=r"_writer\.json"):
            rundir.read_json(path)


@pytest.mark.parametrize(("minor", "is_read"), [(0, True), (1, False), (7, False)])
def test_a_manifest_without_a_checksum_is_of_version_1_0(tmp_path: Path, minor: int, is_read: bool) -> None:
    path = tmp_path / rundir.RUN_MANIFEST
    path.write_text(json.dumps({"format": "recorder", "version": [1, minor]}))
    if is_read:
        assert rundir.read_json(path)["version"] == [1, 0]
    else:
        with pytest.raises(CorruptError, match="no checksum"):
            rundir.read_json(path)


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"null", b"\xff\xfe", b"[" * 100_000])
def test_what_is_no_object_is_corrupt_and_named(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "_run.json"
    path.write_bytes(text)
    with pytest.raises(CorruptError, match=r"_run\.json"):
        rundir.read_json(path)


def test_a_manifest_above_the_bound_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "_run.json"
    path.write_text(json.dumps({"a": "x" * 100}))
    assert rundir.read_json(path, max_bytes=200)
    with pytest.raises(CorruptError, match="larger than the 50 bytes"):
        rundir.read_json(path, max_bytes=50)


def test_links_pipes_directories_and_nothing_are_no_manifests(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("{}")
    (tmp_path / "link").symlink_to("target")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", "missing", "."):
        with pytest.raises(NotARunError, match="manifest"):
            rundir.read_json(tmp_path / name)


@pytest.mark.parametrize(
    ("manifest", "error"),
    [
        ({"format": "recorder", "version": [2, 0]}, UnsupportedError),
        ({"format": "other", "version": [1, 0]}, NotARunError),
        ({}, NotARunError),
        ({"format": "recorder"}, CorruptError),
        ({"format": "recorder", "version": "1.0"}, CorruptError),
    ],
)
def test_only_this_major_version_is_read(manifest: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match="here"):
        check_version(manifest, "here")
    check_version({"format": "recorder", "version": [1, 7]}, "here")
