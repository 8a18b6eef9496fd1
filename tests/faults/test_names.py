"""Names, links and folders of foreign writers, in every command: nothing is followed, written elsewhere or obeyed."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import socket
import stat
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import recorder
from recorder.errors import NotARunError, WriteError
from recorder.merge.merge import merge_run
from recorder.run.run import open_run
from tests.campaigns.fuzz import bases, battery
from tests.campaigns.fuzz.child import contain
from tests.campaigns.fuzz.recipe import write_manifest
from tests.rigs.capturing import Tiny, batch
from tests.rigs.handmade import HandmadeWriter, Row, make_row, make_run

NAMES = (
    "\x1b[2J\x1b]0;owned\x07", "a\rb\nc\td", "\x00", "\u202eevil\u2066", "\x9b31m\x90q\x9c", "[red]x[/red][/]",
    "</script><script>alert(1)</script>", "=cmd|' /C calc'!A0", "../../../evil", "/etc/passwd", "n" * 300, "|x|\n|---|",
    "`$(id)`", "%s%n{0}{x}", "..", "\ufeff\u200b\u2028", "-rf", "\U0001f600" * 120,
)  # fmt: skip


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("sound") / "run"
    bases.make_handmade(path)
    yield path


def _hostile(path: Path) -> None:
    """Each name wherever a run has a text: rows, manifests, header, directory."""
    make_run(path, world_size=2)
    texts = [name.replace("\x00", "\x00\x01") for name in NAMES]
    for rank in (0, 1):
        writer = HandmadeWriter(path, rank, name=f"w{rank} \x1b[2J[red]\n\u202e")
        writer.add_shard([[_row(number, text, rank) for number, text in enumerate(texts)]])
        lights = [
            _row(100 + n, t, rank) | {"encoding": None, "data": None, "payload_bytes": None}
            for n, t in enumerate(texts)
        ]
        writer.add_shard([lights], kind="stats")
        everywhere = [*texts, "\ud800"]
        modules = [
            {"path": t, "class": t, "source": t, "sites": ["output", t], "aliases": [t], "params": [t]}
            for t in everywhere
        ]
        writer.finish(
            host=texts[0], step_source=texts[1], rules=everywhere, optimizers=everywhere,
            versions=dict.fromkeys(everywhere, "x"),
            roots=[{"name": t, "class": t, "modules": modules} for t in ("model", *everywhere)],
            events=[{"kind": t, "message": t, "module": t} for t in everywhere],
            settings={t: {"value": t, "source": t} for t in everywhere}, run_id=texts[0],
            ledger={"observed": 99, "written": 2 * len(texts), "dropped": dict.fromkeys(everywhere, 1)},
        )  # fmt: skip
    manifest = json.loads((path / "_run.json").read_text())
    write_manifest(path / "_run.json", manifest | {"run_id": texts[0], "asked": dict.fromkeys(texts, texts)})


def _row(seq: int, text: str, rank: int) -> Row:
    note = json.dumps({text: text, "no_statistics": text})
    names = dict.fromkeys(("module_path", "name", "root", "mode", "phase", "scope", "layout_source", "scale"), text)
    site = text if seq % 3 == 0 else "output"
    return make_row(seq, [float("nan"), 1.0], rank=rank, note=note, fingerprint=text, site=site, **names)


def test_hostile_names_reach_no_output_as_they_are(tmp_path: Path, sound: Path) -> None:
    run, out = tmp_path / "strange" / "run", tmp_path / "out"
    run.parent.mkdir()
    out.mkdir()
    _hostile(run)

    def check(case: int) -> str:
        return "\n".join(battery.examine(run, sound, out, random.Random(case), 0.5))

    for verdict in contain(check, [0, 1], limit_s=120):
        assert not verdict.finding, verdict.finding


def test_a_notebook_gets_no_markup_of_a_name(tmp_path: Path) -> None:
    _hostile(tmp_path / "run")
    run = open_run(tmp_path / "run")
    for html in (run._repr_html_(), run["</script><script>alert(1)</script>"]._repr_html_()):
        assert "<script" not in html and "</script" not in html
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\u2066]", html)


def test_exported_names_climb_nowhere(tmp_path: Path) -> None:
    _hostile(tmp_path / "run")
    found = recorder.export(open_run(tmp_path / "run"), tmp_path / "out.npz")
    names = zipfile.ZipFile(found.path).namelist()
    assert len(names) > len(NAMES)
    for name in names:
        assert name.isascii() and name.isprintable() and not name.startswith("/")
        assert not {"..", "."} & set(name.split("/")) and all(len(piece) < 255 for piece in name.split("/"))


def _link(at: Path, to: Path) -> None:
    if at.exists():
        shutil.move(at, to.parent / f"moved-{to.name}")
    at.symlink_to(to)


@pytest.mark.parametrize(
    "member", ["_merging", "global", "rank=00001", "global/source", "rank=00000/UNIT", "_merge.json"]
)
def test_a_merge_into_a_strangers_directory_writes_and_removes_nothing_behind_links(
    tmp_path: Path, sound: Path, member: str
) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    merge_run(open_run(sound), out)
    unit = next(name for name in os.listdir(out / "global") if name.startswith("steps"))
    elsewhere.mkdir()
    for name in ("precious", unit, "global"):
        (elsewhere / name).mkdir()
        (elsewhere / name / "file").write_text("precious")
    before = sorted((str(path), path.is_file() and path.read_bytes()) for path in elsewhere.rglob("*"))
    _link(out / member.replace("UNIT", unit), elsewhere)
    with pytest.raises(WriteError):
        merge_run(open_run(sound), out)
    assert sorted((str(path), path.is_file() and path.read_bytes()) for path in elsewhere.rglob("*")) == before


def test_sockets_devices_and_hard_links_are_no_way_out(tmp_path: Path, sound: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(sound, run)
    (writer,) = (run / "rank=00000").iterdir()
    listener = socket.socket(socket.AF_UNIX)
    os.chdir(writer)  # a socket's path has 107 bytes at most
    listener.bind("tensors-000007.arrow")
    os.chdir(Path(__file__).parents[2])
    with pytest.raises(NotARunError, match=r"tensors-000007.arrow: is a pipe, a socket"):
        open_run(run)
    listener.close()
    (writer / "tensors-000007.arrow").unlink()
    (writer / "tensors-000008.arrow").symlink_to("/dev/zero")
    with pytest.raises(NotARunError, match=r"tensors-000008.arrow: is a symbolic link"):
        open_run(run)
    (writer / "tensors-000008.arrow").unlink()
    os.link(writer / "stats-000000.arrow", writer / "stats-000009.arrow")
    names = [shard.path.name for shard in open_run(run).writers[0].shards]
    assert "stats-000009.arrow" in names  # a file like any other: its owner could have copied it


def test_what_is_written_is_for_its_owner_alone(tmp_path: Path) -> None:
    model = Tiny()
    with recorder.attach(model, enabled=True, dir=str(tmp_path / "recordings")):
        model(batch()).sum().backward()
    (run,) = (tmp_path / "recordings").iterdir()
    merge_run(open_run(run), tmp_path / "merged")
    for path in (run, *run.rglob("*"), tmp_path / "merged", *(tmp_path / "merged").rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_an_export_has_the_mode_that_its_user_asks_for(tmp_path: Path, sound: Path) -> None:
    before = os.umask(0o027)
    try:
        recorder.export(open_run(sound), tmp_path / "a.npz")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.npz").stat().st_mode) == 0o640


def test_a_secret_of_the_environment_is_nowhere_in_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "hunter2-3e7f0a"
    for name in ("AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "HF_TOKEN", "PATH_TO_NOTHING", "SLURM_JOB_NAME", "PS1"):
        monkeypatch.setenv(name, secret)
    model = Tiny()
    with recorder.attach(model, enabled=True, dir=str(tmp_path / "recordings")):
        model(batch()).sum().backward()
    (run,) = (tmp_path / "recordings").iterdir()
    merge_run(open_run(run), tmp_path / "merged")
    files = [path for path in (*run.rglob("*"), *(tmp_path / "merged").rglob("*")) if path.is_file()]
    assert len(files) > 5
    assert not [path for path in files if secret.encode() in path.read_bytes() or secret in str(path)]


def test_reading_never_unpickles_connects_or_starts_anything(tmp_path: Path, sound: Path) -> None:
    (tmp_path / "out").mkdir()

    def check(case: int) -> str:
        return "\n".join(battery.examine(sound, sound, tmp_path / "out", random.Random(1), 0.4))

    (verdict,) = contain(check, [0], limit_s=60)  # `fuzz_child` listens to Python's audit events
    assert not verdict.finding, verdict.finding
