"""How a daemon begins, lives and ends: what is said before anything is moved, locks, reloads, signals."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from recorder.daemon.daemon import Daemon
from recorder.daemon.settings import DaemonSettings, load_daemon_settings, reloaded
from recorder.errors import ConfigError, WriteError
from tests.daemon.support import at_work, files, settings
from tests.daemon.test_shipping import small_run
from tests.rigs.command_line import Cli
from tests.rigs.server import StoreServer
from tests.rigs.waiting import wait_until


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--watch", "recordings"], "to: no destination is named"),
        (["--to", "recordings/there"], "lies in the watched folder"),
        (["--once", "--watch", "nowhere", "--to", "there"], "/nowhere': is no folder, and --once does not wait"),
        (["--watch", "wrong.toml", "--to", "there"], "watch = 'wrong.toml': is no folder; name another"),
        (["--watch", "recordings/run-a", "--to", "there"], "is a run; name the folder that it lies in"),
        (["--watch", "recordings", "--watch", "recordings/run-a/..", "--to", "there"], "which is watched, too"),
        (["--watch", "recordings", "--to", "recordings/there"], "lies in the watched folder"),
        (["--watch", "recordings", "--to", "."], "or contains it; name another"),
        (["--watch", "recordings", "--to", "ftp://there"], "expected a folder, or one of s3://"),
        (["--watch", "recordings", "--to", "s3//there"], "to = 's3//there': is no URL; write 's3://there', or for the"),
        (["--watch", "recordings", "--to", "file:/there"], "is no URL; write 'file:///there', or for the folder of"),
        (["prune", "--to", "S3/there", "--older-than", "1d"], "is no URL; write 's3://there', or for the folder of"),
        (["--watch", "recordings", "--to", "s3://user:password@host/x"], "credentials and ports are settings"),
        (["--watch", "recordings", "--to", "there", "--fresh-s", "0"], "fresh_s = 0: allowed is 0.1 to 86400"),
        (["--watch", "recordings", "--to", "there", "--keep-local", "soon"], "keep_local = 'soon': expected a time"),
        (["--watch", "recordings", "--to", "there", "--listen", "here"], "listen = 'here': expected HOST:PORT"),
        (["--watch", "recordings", "--to", "there", "--webhook", "file:///x"], "webhook: expected http"),
        (["--watch", "recordings", "--to", "there", "--threads", "9" * 400], ": expected a whole number"),
        (["--watch", "recordings", "--to", "there", "--max-bytes-per-s", "9" * 400 + "MB"], ": expected bytes"),
        (["--config", "wrong.toml"], "'colour' (file wrong.toml) is no setting of the daemon"),
        (["--config", "nul.toml"], "expected a text without a NUL (file nul.toml)"),
        (["--config", "broken.toml"], "broken.toml: is not TOML"),
        (["--config", "missing.toml"], "missing.toml: cannot be read"),
        (["--once", "--watch", "recordings", "--to", "s3://no-such-bucket/x"], "no such bucket"),
        (["dance"], "dance: expected one of ship, status, prune, keep, unkeep"),
        (["prune", "--to", "there"], "prune: choose what to remove"),
        (["prune", "--older-than", "1d"], "prune: needs --to"),
        (["prune", "--to", "empty", "--older-than", "30", "--yes"], "--older-than = '30': expected a time with a unit"),
        (
            ["--watch", "recordings", "--to", "there", "--keep-local", "90"],
            "expected a time with a unit: 30d, 12h, 45min",
        ),
        (["keep", "run-a", "--to", "there"], "there: no such directory; --to names where the runs are"),
        (["keep", "run-b", "--to", "empty"], "run-b: no such run"),
    ],
)
def test_a_wrong_word_is_one_line_and_moves_nothing(
    tmp_path: Path, store: StoreServer, cli: Cli, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    small_run(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "wrong.toml").write_text("colour = 'red'\n")
    (tmp_path / "nul.toml").write_text('watch = ["a\\u0000b"]\n')
    (tmp_path / "broken.toml").write_text("to = \n")
    monkeypatch.chdir(tmp_path)
    before = files(tmp_path)
    found = cli("daemon", *words, *([] if words[0] in ("dance", "prune", "keep") else ["--state", "state"]))
    assert found.exit_code == 2, found
    assert said in found.err
    assert "user:password" not in found.err
    assert len(found.err.splitlines()) == 1
    assert {name: text for name, text in files(tmp_path).items() if not name.startswith("state/")} == before


@pytest.mark.parametrize("once", [["--once"], []], ids=["once", "for good"])
def test_missing_credentials_are_said_before_anything_is_moved(
    tmp_path: Path, store: StoreServer, cli: Cli, monkeypatch: pytest.MonkeyPatch, once: list[str]
) -> None:
    small_run(tmp_path)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    words = ("--watch", tmp_path / "recordings", "--to", "s3://recordings/x", "--state", tmp_path / "state")
    found = cli("daemon", *once, *words, "--listen", "127.0.0.1:0")
    assert found.exit_code == 2
    assert "no credentials were found" in found.err


def test_a_folder_that_does_not_exist_yet_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    there = tmp_path / "there"
    with at_work(tmp_path, str(there)) as daemon:
        wait_until(lambda: daemon._has_found)
        small_run(tmp_path)
        wait_until(lambda: (there / "run-a" / "_run.json").exists())
        assert daemon.counters.of("errors") == {}
    assert f"{tmp_path}/recordings: there is no such folder yet; the daemon waits for the folder" in caplog.text


def test_a_port_in_use_is_said(tmp_path: Path) -> None:
    small_run(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match="cannot be taken"):
            Daemon(settings(tmp_path, str(tmp_path / "there"), listen=listen)).run()
    assert not (tmp_path / "there").exists()


def test_a_second_daemon_says_who_has_the_destination_and_the_folder(tmp_path: Path, cli: Cli) -> None:
    small_run(tmp_path)
    there = str(tmp_path / "there")
    with at_work(tmp_path, there) as daemon:
        wait_until(lambda: daemon.runs)
        with pytest.raises(WriteError, match=f"another daemon of this node ships to it: process {os.getpid()} "):
            Daemon(settings(tmp_path, there)).run_once()
        with pytest.raises(WriteError, match="another daemon watches this folder, or one in or around it"):
            Daemon(settings(tmp_path, str(tmp_path / "other"))).run_once()
        wait_until(lambda: all(run.is_settled for run in daemon.runs))
        daemon._write_state()
        status = cli("daemon", "status", "--state", tmp_path / "state")
        assert status.exit_code == 0
        assert "1 run, of which 1 shipped completely" in status.out
    assert cli("daemon", "status", "--state", tmp_path / "state").exit_code == 1


def test_signals_by_the_hundred_never_hang_the_daemon(tmp_path: Path) -> None:
    """A handler may interrupt any statement of the main thread, which must not hold a lock that the handler takes."""
    (tmp_path / "recordings").mkdir()
    config = tmp_path / "daemon.toml"
    config.write_text("fresh_s = 1\n")
    daemon = Daemon(
        DaemonSettings(watch=(str(tmp_path / "recordings"),), to=str(tmp_path / "there"), state=str(tmp_path / "state"))
    )
    frames = 0

    def interrupt(frame: FrameType, event: str, _: object) -> Any:
        """Call the handlers at each line of the interrupted method, and of the library's code below it."""
        nonlocal frames
        if event == "line":
            frames += 1
            sys.settrace(None)
            daemon._ask_reload()
            daemon.stop()
            sys.settrace(interrupt)
        return interrupt

    sys.settrace(interrupt)
    try:
        for _ in range(3):
            daemon._rest(0.0)
    finally:
        sys.settrace(None)
    assert frames > 5 and daemon._is_reload_due


def test_a_bad_reload_keeps_the_old_settings() -> None:
    old = DaemonSettings(watch=("a",), to="b")
    new, kept = reloaded(old, DaemonSettings(watch=("c",), to="b", fresh_s=3))
    assert (new.watch, new.fresh_s, kept) == (("a",), 3, ["watch"])


def test_the_command_line_wins_over_the_environment_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "daemon.toml"
    file.write_text("fresh_s = 1\nstatus_s = 1\nthreads = 1\nmax_bytes_per_s = '5MB'\nwatch = ['a', 'b']\n")
    environ = {"RECORDERD_STATUS_S": "2", "RECORDERD_THREADS": "2"}
    found = load_daemon_settings(str(file), {"threads": 3, "to": None}, environ)
    assert (found.fresh_s, found.status_s, found.threads) == (1, 2, 3)
    assert (found.max_bytes_per_s, found.watch) == (5_000_000, ("a", "b"))


def test_signals_reload_and_stop_and_lines_are_json(tmp_path: Path) -> None:
    small_run(tmp_path)
    config = tmp_path / "daemon.toml"
    config.write_text("fresh_s = 1\n")
    words = ["--watch", tmp_path / "recordings", "--to", tmp_path / "there", "--config", config, "--log", "json"]
    words += ["--state", tmp_path / "state", "--listen", "127.0.0.1:0"]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.getcwd()}
    process = subprocess.Popen(
        [sys.executable, "-m", "recorder", "daemon", *map(str, words)],
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stderr is not None
    lines: list[str] = []

    def next_line(text: str) -> dict[str, object]:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            found: dict[str, object] = json.loads(line)
            if text in str(found["message"]):
                return found
        raise AssertionError(lines)

    try:
        assert next_line("ships ")["level"] == "info"
        config.write_text("fresh_s = 'soon'\n")
        process.send_signal(signal.SIGHUP)
        assert next_line("were not reloaded, the old ones stay in force")["level"] == "error"
        config.write_text("fresh_s = 5\nto = 'elsewhere'\n")
        process.send_signal(signal.SIGHUP)
        next_line("the settings were reloaded")
        wait_until((tmp_path / "there" / "run-a" / "_run.json").exists)
        process.send_signal(signal.SIGTERM)
        next_line("stopped")
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
