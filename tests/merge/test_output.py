"""The output directory: what a merge may take up, and what it never touches."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from recorder.errors import WriteError
from recorder.merge.merge import merge_run
from recorder.run.run import open_run
from tests.rigs.fakes import FaultyDisk
from tests.rigs.merging import assert_is_merge, make_small_run


def tree(path: Path) -> dict[str, bytes | None]:
    """Everything in a directory."""
    return {str(one.relative_to(path)): one.read_bytes() if one.is_file() else None for one in path.rglob("*")}


def assert_refused(run: Path, out: Path, match: str) -> None:
    """The merge says why, and nothing was touched."""
    target = out if out.is_dir() else out.parent
    before = tree(target)
    with pytest.raises(WriteError, match=match):
        merge_run(open_run(run), out)
    assert tree(target) == before


def test_a_directory_with_something_else_in_it_is_refused(tmp_path: Path) -> None:
    run, out = make_small_run(tmp_path / "run"), tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("precious")
    assert_refused(run, out, "holds thesis.tex and is no merge of 'run'")


def test_another_recorded_run_is_refused(tmp_path: Path) -> None:
    run = make_small_run(tmp_path / "run")
    assert_refused(run, make_small_run(tmp_path / "other"), "is a recorded run \\('other'\\)")


def test_a_merge_of_another_run_is_refused(tmp_path: Path) -> None:
    run, other, out = make_small_run(tmp_path / "run"), make_small_run(tmp_path / "other"), tmp_path / "out"
    merge_run(open_run(other), out)
    assert_refused(run, out, "is a merge of another run, 'other'")


def test_a_merge_with_other_options_is_refused(tmp_path: Path) -> None:
    run, out = make_small_run(tmp_path / "run"), tmp_path / "out"
    merge_run(open_run(run), out, loss="sum")
    assert_refused(run, out, 'other options \\(.*"loss": "sum"')


def test_the_run_itself_and_what_lies_inside_or_around_it_are_refused(tmp_path: Path) -> None:
    run = make_small_run(tmp_path / "folder" / "run")
    assert_refused(run, run, "is the run itself")
    assert_refused(run, run / "merged", "lies inside the run")
    assert_refused(run, run / "rank=00000" / "deep" / "merged", "lies inside the run")
    assert_refused(run, tmp_path / "folder", "lies inside it")
    (tmp_path / "link").symlink_to(run)
    assert_refused(run, tmp_path / "link", "is the run itself")
    assert_refused(run, tmp_path / "link" / "merged", "lies inside the run")


def test_what_lies_inside_another_run_is_refused(tmp_path: Path) -> None:
    run, other = (make_small_run(tmp_path / name) for name in ("run", "other"))
    (tmp_path / "link").symlink_to(other / "rank=00000")
    for inside in (other / "merged", other / "rank=00000" / "deep" / "merged", tmp_path / "link" / "merged"):
        assert_refused(run, inside, f"lies inside the run {other}")


def test_a_file_and_a_broken_link_are_refused(tmp_path: Path) -> None:
    run = make_small_run(tmp_path / "run")
    (tmp_path / "file").write_text("precious")
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    assert_refused(run, tmp_path / "file", "is a file")
    assert_refused(run, tmp_path / "broken", "a link that leads nowhere")


def test_a_directory_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    run = make_small_run(tmp_path / "run")
    assert_refused(run, tmp_path / "file" / "out", r"out: cannot be made \(Not a directory\); name another directory")


def test_a_merge_manifest_of_somebody_else_is_refused(tmp_path: Path) -> None:
    run, out = make_small_run(tmp_path / "run"), tmp_path / "out"
    out.mkdir()
    (out / "_merge.json").write_text('{"format": "something else"}')
    assert_refused(run, out, "of another program or version")
    (out / "_merge.json").write_text("no JSON")
    assert_refused(run, out, "not JSON")


def test_an_empty_directory_is_taken(tmp_path: Path) -> None:
    run, out = make_small_run(tmp_path / "run"), tmp_path / "out"
    out.mkdir()
    merge_run(open_run(run), out)
    assert_is_merge(out, run)


def test_missing_parents_are_made_and_directories_are_private(tmp_path: Path) -> None:
    run, out = make_small_run(tmp_path / "run"), tmp_path / "a" / "b" / "out"
    merge_run(open_run(run), out)
    assert stat.S_IMODE(out.stat().st_mode) & 0o077 == 0


def test_a_full_disk_is_one_error_and_the_merge_goes_on_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, out = make_small_run(tmp_path / "run", steps=6), tmp_path / "out"
    source = tree(run)
    monkeypatch.setattr("recorder.merge.unit.UNIT_BYTES", 700)
    disk = FaultyDisk()
    monkeypatch.setattr("recorder.merge.shards.Disk", lambda: disk)
    disk.free_for_writes = 200_000
    with pytest.raises(WriteError, match=r"the merge stopped \(.*No space left.*what is finished is kept"):
        merge_run(open_run(run), out)
    assert not (out / "_run.json").exists()
    assert not [path for path in (out / "_merging").iterdir() if path.name.startswith("_")]
    disk.recover()
    report = merge_run(open_run(run), out)
    assert 0 < report.num_kept_units < report.num_units
    assert_is_merge(out, run)
    assert tree(run) == source


def test_a_directory_that_cannot_be_written_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, out = make_small_run(tmp_path / "run"), tmp_path / "out"

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(out))

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(WriteError, match="Read-only file system"):
        merge_run(open_run(run), out)
