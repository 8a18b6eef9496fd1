"""The server of `recorder view`: whom it answers, what it may change, and how the command begins and ends."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from recorder.cli.app import run_command
from recorder.cli.commands.pages import listen, view_command
from recorder.errors import ConfigError, install_line
from recorder.report.collect import VIEW, read_panes, save_panes
from recorder.run.finding import _checked as fleet_summary
from recorder.run.finding import find_folder
from recorder.view.server import ViewServer, Watching, _listed_of_fleet
from tests.rigs.handmade import HandmadeWriter, make_row, make_run
from tests.rigs.serving import make_certificate, serving
from tests.rigs.small_runs import NUM_STEPS, make_training


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for number, name in enumerate(("one", "two")):
        run = make_run(folder / name, created_ns=number + 1)
        writer = HandmadeWriter(run)
        writer.add_shard([[make_row(step, [1.0 + step], step=step, module_path="a") for step in range(3)]])
        writer.finish()
    (folder / "secret.txt").write_text("secret")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ViewServer]:
    with serving(folder) as server:
        yield server


def ask(server: ViewServer, path: str, method: str = "GET", body: str | None = None, **headers: str) -> Any:
    """Status and text of an answer; `path` follows the token unless it begins with a slash."""
    address = urlsplit(server.address)
    connection = http.client.HTTPConnection(address.hostname or "", address.port or 0, timeout=30)
    where = path if path.startswith("/") else address.path + path
    connection.request(method, where, body, headers)
    answer = connection.getresponse()
    found = answer.status, "" if "event-stream" in (answer.getheader("content-type") or "") else answer.read().decode()
    connection.close()
    return found


def test_the_list_and_the_pages_are_there_for_who_has_the_token(server: ViewServer) -> None:
    assert ask(server, "")[0] == 200 and 'data-live="runs"' in ask(server, "")[1]
    listed = json.loads(ask(server, "runs")[1])
    assert [run["directory"] for run in listed] == ["two", "one"]
    status, text = ask(server, "run/one/")
    assert status == 200 and "<title>one - recorder</title>" in text
    assert ask(server, "run/one/events")[0] == 200


def test_with_a_certificate_the_pages_are_encrypted_and_panes_can_still_be_saved(folder: Path, tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path)
    context = ssl.create_default_context(cafile=str(certificate))
    with serving(folder, certificate=certificate) as server:
        address = urlsplit(server.address)
        assert address.scheme == "https"
        connection = http.client.HTTPSConnection(address.hostname or "", address.port or 0, timeout=30, context=context)
        connection.request("GET", f"{address.path}runs")
        assert [run["directory"] for run in json.loads(connection.getresponse().read())] == ["two", "one"]
        own = {"Host": address.netloc, "Origin": f"https://{address.netloc}"}
        connection.request("PUT", f"{address.path}run/two/panes", json.dumps({"panes": []}), own)
        assert connection.getresponse().status < 300
        connection.close()


def test_a_certificate_that_is_none_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("nothing of that kind\n")
    with pytest.raises(ConfigError, match=r"--certificate .*file: cannot be used .*expected a PEM file"):
        view_command(str(tmp_path), certificate=tmp_path / "file")


def test_the_list_says_losses_and_findings_of_runs_that_are_over(tmp_path: Path) -> None:
    make_training(tmp_path / "one")
    watching = Watching(tmp_path, None)
    (one,) = watching.listed()
    assert one["is_reading"]
    for _ in range(600):
        (one,) = watching.listed()
        if "loss" in one:
            break
        time.sleep(0.1)
    assert not one["is_reading"] and isinstance(one["notes"], list)
    assert one["loss"][:2] == [3.0, 1.5] and len(one["loss"]) == NUM_STEPS
    assert any(text.startswith("nonfinite: 'head' output") for text in one["found"])
    watching.close()


@pytest.mark.parametrize("path", ["/", "/runs", "/wrong/", "/wrong/runs", "/wrong/run/one/events", "//", "/%C3%A9/"])
def test_without_the_token_nothing_is_said(server: ViewServer, path: str) -> None:
    status, text = ask(server, path)
    assert status == 403 and "token" in text and "one" not in text


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:1", 200),  # as ssh -L has it
        ("127.0.0.1", 200),
        ("[::1]:80", 200),
        ("evil.example", 403),
        ("evil.example:8765", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example", 403),
        ("", 403),
        ("[::1", 403),
    ],
)
def test_a_name_that_another_site_gave_this_machine_is_refused(server: ViewServer, host: str, status: int) -> None:
    assert ask(server, "runs", Host=host)[0] == status


def test_only_a_page_of_this_server_may_save_panes_and_nothing_else_can_be_changed(
    server: ViewServer, folder: Path
) -> None:
    host = urlsplit(server.address).netloc
    own = {"Host": host, "Origin": f"http://{host}"}
    panes = json.dumps([{"name": "mine", "kind": "lines", "state": {"stat": "l2", "evil": "x"}}, {"kind": "none"}, 3])
    for other in (
        {},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://["},
        {"Origin": f"https://{host}"},
    ):
        assert ask(server, "run/one/panes", "PUT", panes, **other)[0] == 403
    assert ask(server, "runs", Origin="http://evil.example")[0] == 403
    assert not (folder / "one" / VIEW).exists()
    status, text = ask(server, "run/one/panes", "PUT", panes, **own)
    assert status == 200 and json.loads(text) == {"why_not_saved": None}
    assert read_panes(folder / "one") == [{"name": "mine", "kind": "lines", "wide": False, "state": {"stat": "l2"}}]
    assert ask(server, "run/one/panes", "PUT", "x" * 300_000, **own)[0] == 413
    assert ask(server, "run/one/panes", "PUT", "[" * 100_000, **own)[0] == 400
    for method, path in (("POST", "run/one/panes"), ("DELETE", "run/one/"), ("PUT", "run/one/"), ("PUT", "runs")):
        assert ask(server, path, method, "", **own)[0] == 405
    assert len(read_panes(folder / "one")) == 1 and not list((folder / "one").glob("*.tmp"))


@pytest.mark.parametrize("name", ["..", "..%2f..%2fetc", "secret.txt", "%2e%2e%2fone", "one%00", "three", "one%2f"])
def test_a_part_of_an_address_is_no_path(server: ViewServer, name: str) -> None:
    status, text = ask(server, f"run/{name}/")
    assert status == 404 and "secret" not in text


def test_panes_of_a_run_that_nobody_may_write_to_are_said_not_to_be_saved(tmp_path: Path) -> None:

    run = make_run(tmp_path / "run")
    (run / f"{VIEW}").mkdir()  # what a rename cannot replace; root may write anywhere
    why = save_panes(run, [{"name": "", "kind": "map", "wide": False, "state": {}}])
    assert why is not None and why.startswith("the panes could not be written")
    assert [path.name for path in run.iterdir() if path.name != "_run.json"] == [VIEW]


def test_a_port_in_use_is_refused_where_it_was_asked_for_and_another_is_taken_otherwise(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with listen("127.0.0.1", None) as first:
        port = first.getsockname()[1]
        with listen("127.0.0.1", None) as second:
            assert second.getsockname()[1] > port
        with pytest.raises(SystemExit) as ended:
            run_command(["view", str(folder), "--port", str(port)])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"port {port}: is in use" in said


def test_without_its_extra_the_command_says_what_to_install(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else find(name))
    with pytest.raises(SystemExit) as ended:
        run_command(["view", str(folder)])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and install_line("view") in said


def test_what_is_no_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(SystemExit) as ended:
        run_command(["view", str(file)])
    assert ended.value.code == 2 and capsys.readouterr().err.count("\n") == 1


def test_a_folder_that_no_run_is_in_yet_is_an_empty_list_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = find_folder("recordings", may_be_empty=True)
    assert folder is not None and find_folder(None, may_be_empty=True) == folder and find_folder("recordings") is None
    assert find_folder("recordigns", may_be_empty=True) is None, "it may be meant as the name of a run"
    watching = Watching(folder, None)
    assert watching.listed() == [] and watching.find("one") is None
    with serving(Path(str(folder))) as server:
        assert ask(server, "")[0] == 200
    Path("recordings").mkdir()
    assert find_folder("recordings", may_be_empty=True) == folder and watching.listed() == []
    make_run(Path("recordings/one"), created_ns=1)
    assert [run["directory"] for run in watching.listed()] == ["one"]
    assert find_folder("recordings/one", may_be_empty=True) is None


def test_ctrl_c_ends_it_while_a_page_is_open(folder: Path) -> None:
    command = [sys.executable, "-m", "recorder", "view", str(folder / "one")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as job:
        assert job.stdout is not None and job.stderr is not None
        found = None
        while found is None:  # a port in use is said first
            found = re.search(r"http://\S+", job.stdout.readline())
        address = urlsplit(found[0])
        with socket.create_connection((address.hostname or "", address.port or 0), timeout=30) as page:
            page.sendall(f"GET {address.path}run/one/events HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            heard = b""
            while b"event: all" not in heard:
                heard += page.recv(65536)
            os.kill(job.pid, signal.SIGINT)
            assert job.wait(30) == 0
        assert job.stderr.read() == ""


def test_the_list_of_a_fleet_has_the_words_of_ranks_and_what_is_damaged() -> None:
    summary = fleet_summary("run-a", {"ranks": [0, 1], "state": "unclosed", "problems": ["a shard is short"]}, False)
    listed = _listed_of_fleet("run-a", summary)
    assert listed["states"] == {"killed or silent": 2} and listed["problems"] == ["a shard is short"]


def test_the_ranks_say_while_the_rules_are_still_asked(folder: Path) -> None:
    watching = Watching(folder, None)
    watching._glancing = threading.current_thread()  # it has not begun
    watching.listed()
    run = watching.find("one")
    assert run is not None and watching.found(run) == (None, False), "nobody will ask"
    watching._glancing = None
    watching.__dict__["_glance"] = lambda *words: None
    described = watching.listed()
    assert watching.found(run) == (None, True)
    Watching._glance(watching, described, {"one": folder / "one", "two": folder / "two"})
    assert watching.found(run) == ([], False)
    watching.close()
