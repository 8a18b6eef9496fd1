"""What is said where a store refuses, is not there, or has changed: one line, exit code 2, soon, and no secret."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import recorder
from recorder.config import load_settings
from recorder.errors import ConfigError, NotARunError, StoreError, install_line
from recorder.storage.clients import KINDS
from tests.rigs.command_line import Cli, Result
from tests.rigs.handmade import HandmadeWriter, make_row, make_run
from tests.rigs.server import ACCESS_KEY, BUCKET, SECRET_KEY, StoreServer

SHARD = "rank=00000/20260101-000000-host-1/tensors-000000.arrow"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A run of one shard of two batches of 1.2 MB."""
    run = make_run(tmp_path / "run")
    writer = HandmadeWriter(run)
    rng = np.random.default_rng(0)
    writer.add_shard([[make_row(n, rng.standard_normal(300_000, np.float32), step=n)] for n in range(2)])
    writer.finish()
    return run


@pytest.fixture
def key(store: StoreServer, path: Path) -> str:
    """Of the run in the bucket."""
    store.upload(path, f"{path.parent.name}/run")
    return f"{path.parent.name}/run"


@pytest.fixture
def silent_port() -> Iterator[int]:
    """Of a server that takes connections and never answers."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(50)
        yield int(listening.getsockname()[1])


def refusal(result: Result) -> str:
    """The one line, which must hold no secret."""
    assert (result.exit_code, result.out) == (2, "")
    assert result.err.startswith("recorder: ") and result.err.count("\n") == 1
    for secret in (SECRET_KEY, ACCESS_KEY, "AKIA", "Signature", "Credential"):
        assert secret not in result.err
    return result.err


def test_a_bucket_or_a_run_that_is_not_there_is_said(store: StoreServer, cli: Cli) -> None:
    assert f"s3://no-such-bucket: no such bucket in the store at {store.url}" in refusal(
        cli("ls", "s3://no-such-bucket/run")
    )
    assert f"s3://{BUCKET}/nothing: no such directory" in refusal(cli("show", f"s3://{BUCKET}/nothing"))
    assert "expected s3://BUCKET/PATH" in refusal(cli("show", "s3:///run"))


@pytest.mark.parametrize("url", ["runs/./run", "runs/../run", "runs//run"])
def test_a_path_that_a_store_may_take_for_another_is_refused(cli: Cli, url: str) -> None:
    assert "without names that are empty, '.' or '..'" in refusal(cli("verify", f"s3://{BUCKET}/{url}"))


@pytest.mark.parametrize("bucket", [f"user:{SECRET_KEY}@{BUCKET}", f"{BUCKET}:80"])
def test_credentials_and_ports_in_a_path_are_refused_and_not_repeated(cli: Cli, bucket: str) -> None:
    assert "credentials and ports are settings" in refusal(cli("ls", f"s3://{bucket}/run"))


def test_a_file_url_that_names_no_folder_is_refused(cli: Cli) -> None:
    assert "file://host/run: expected file:///FOLDER, with three slashes" in refusal(cli("ls", "file://host/run"))


@pytest.mark.parametrize(
    "url", ["hdfs://host/run", "ftp://host/run", "foo://bar", "https://host/run", "s3a://bucket/run"]
)
def test_other_stores_are_refused_by_name(cli: Cli, url: str) -> None:
    scheme = url.partition(":")[0]
    assert (
        f"{url}: {scheme}:// is not supported; runs are read from directories and from s3://, gs://, az://"
        in refusal(cli("ls", url))
    )


@pytest.mark.parametrize(
    "arguments",
    [
        "repair RUN",
        "export RUN -o s3://bucket/a.npz",
        "merge RUN -o s3://bucket/merged",
        "checkpoint RUN --to dcp -o gs://b/a",
    ],
)
def test_nothing_is_written_to_a_store(store: StoreServer, cli: Cli, key: str, arguments: str) -> None:
    words = arguments.replace("RUN", f"s3://{BUCKET}/{key}").split()
    with store.counting() as counts:
        message = refusal(cli(*words))
    assert counts.num_requests == 0
    assert "a copy on a disk" in message if words[0] == "repair" else "name a path on a disk" in message


def test_a_recording_into_a_store_is_refused_at_launch() -> None:
    for url in ("s3://bucket/recordings", "s3:/bucket", "gs://bucket"):
        with pytest.raises(ConfigError, match=r"RECORDER_DIR .*recording goes to a file system.*copy the run up"):
            load_settings(environ={"RECORDER": "1", "RECORDER_DIR": url})


def test_refused_credentials_are_said_without_them(
    store: StoreServer, cli: Cli, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAANOTHER")
    assert "refuses the credentials: the access key is unknown" in refusal(cli("ls", f"s3://{BUCKET}/{key}"))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert "no credentials were found" in refusal(cli("ls", f"s3://{BUCKET}/{key}"))


def test_credentials_and_endpoint_of_a_profile_are_used(
    store: StoreServer, cli: Cli, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_REGION"):
        monkeypatch.delenv(name)
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(
        f"[lab]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
    )
    (tmp_path / ".aws" / "config").write_text(f"[profile lab]\nregion = eu-west-1\nendpoint_url = {store.url}\n")
    monkeypatch.setenv("AWS_PROFILE", "lab")
    assert cli("ls", f"s3://{BUCKET}/{key}").exit_code == 0


def test_the_endpoint_of_s3_alone_comes_first() -> None:
    found = {"AWS_ENDPOINT_URL": "http://all", "AWS_ENDPOINT_URL_S3": "http://s3"}
    assert KINDS["s3"].endpoint(found) == "http://s3"
    assert KINDS["s3"].endpoint(found | {"AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true"}) == ""


def test_a_store_that_cannot_be_reached_is_given_up_soon(
    store: StoreServer, cli: Cli, monkeypatch: pytest.MonkeyPatch, silent_port: int
) -> None:
    monkeypatch.setattr("recorder.storage.clients._SILENCE_TIMEOUT_S", 1)
    begun_s = time.monotonic()
    for endpoint, reason in ((1, "it takes no connection"), (silent_port, "it does not answer")):
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{endpoint}")
        message = refusal(cli("ls", f"s3://{BUCKET}/run"))
        assert f"the store at http://127.0.0.1:{endpoint} cannot be reached: {reason}" in message
    assert time.monotonic() - begun_s < 30


@pytest.mark.parametrize("endpoint", ["localhost:9000", "ftp://host", "http://", "http://user:word@host"])
def test_an_endpoint_that_is_none_is_refused(
    store: StoreServer, cli: Cli, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    message = refusal(cli("ls", f"s3://{BUCKET}/run"))
    assert "AWS_ENDPOINT_URL: expected http://HOST:PORT" in message and "word" not in message


def test_a_store_that_goes_is_no_damage_of_the_run(
    store: StoreServer, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recorder.storage.clients._SILENCE_TIMEOUT_S", 1)
    run = recorder.open_run(f"s3://{BUCKET}/{key}")

    def refuse(kind: str, path: str) -> None:
        raise ConnectionError("the test's store hangs up")

    store.before = refuse
    with pytest.raises(StoreError):
        run.array("layers.0", step=1, rank=0)
    assert run.problems == []


def test_a_role_that_a_machine_has_not_is_no_credential(
    store: StoreServer, cli: Cli, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is then asked without any, as it is where nobody may ask the machine."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_EC2_METADATA_DISABLED"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
    begun_s = time.monotonic()
    with store.counting() as counts:
        assert "no credentials were found" in refusal(cli("ls", f"s3://{BUCKET}/{key}"))
    assert counts["GET"] == 1 and time.monotonic() - begun_s < 10


@pytest.mark.parametrize("setting", ["role_arn = arn:aws:iam::1:role/none", "credential_process = /nowhere/tool"])
def test_a_profile_without_keys_leads_to_one_line(
    store: StoreServer, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "config").write_text(f"[profile lab]\n{setting}\nsource_profile = {SECRET_KEY}\n")
    monkeypatch.setenv("AWS_PROFILE", "lab")
    assert f"{setting.split()[0]} of the profile leads to no credentials" in refusal(cli("ls", f"s3://{BUCKET}/run"))
    monkeypatch.setitem(sys.modules, "boto3", None)
    assert f"of the profile needs boto3, which is not installed: {install_line('store')}" in refusal(
        cli("ls", f"s3://{BUCKET}/run")
    )


def test_an_object_whose_name_is_no_path_is_refused(store: StoreServer, cli: Cli, key: str) -> None:
    store.put(f"{key}/rank=00000//hidden", b"content")
    assert f"s3://{BUCKET}/{key}: holds an object with '//', '.' or '..' in its path" in refusal(
        cli("ls", f"s3://{BUCKET}/{key}")
    )


def test_what_consoles_put_for_a_folder_is_none_of_its_files(store: StoreServer, path: Path, key: str) -> None:
    for folder in ("", "rank=00000/", f"{Path(SHARD).parent}/", "empty/"):
        store.put(f"{key}/{folder}", b"")
    assert recorder.open_run(f"s3://{BUCKET}/{key}").table().equals(recorder.open_run(path).table())


@pytest.mark.parametrize("has_read", [False, True])
@pytest.mark.parametrize("change", ["shorter", "longer", "other"])
def test_an_object_that_changed_since_it_was_listed_is_said(
    store: StoreServer, path: Path, key: str, change: str, has_read: bool
) -> None:
    run = recorder.open_run(f"s3://{BUCKET}/{key}")
    if has_read:
        run.array("layers.0", step=0, rank=0)
    content = (path / SHARD).read_bytes()
    changed = {"shorter": content[: len(content) // 2], "longer": content + content, "other": bytes(len(content))}
    store.put(f"{key}/{SHARD}", changed[change])
    with pytest.raises(StoreError, match="the object was replaced since the run was listed"):
        run.array("layers.0", step=1, rank=0)
    assert run.problems == []


@pytest.mark.parametrize("has_read", [False, True])
def test_an_object_that_is_gone_since_it_was_listed_is_said(store: StoreServer, key: str, has_read: bool) -> None:
    run = recorder.open_run(f"s3://{BUCKET}/{key}")
    if has_read:
        run.array("layers.0", step=0, rank=0)
    store.client.delete_object(Bucket=BUCKET, Key=f"{key}/{SHARD}")
    with pytest.raises(NotARunError, match=r"is gone .*open it again"):
        run.array("layers.0", step=1, rank=0)


def test_a_shard_that_goes_between_listing_and_opening_is_listed_again(
    store: StoreServer, path: Path, key: str
) -> None:
    """As retention does it on a disk: the second listing does not name it any more."""
    index = f"{key}/{SHARD}".replace("tensors-000000.arrow", "_tensors-000000.index")
    store.client.delete_object(Bucket=BUCKET, Key=index)  # so that the shard itself has to be opened
    num_seen = 0

    def remove(kind: str, asked: str) -> None:
        nonlocal num_seen
        if kind == "GET" and asked.endswith(SHARD):
            num_seen += 1
            store.before = lambda kind, asked: None
            store.client.delete_object(Bucket=BUCKET, Key=f"{key}/{SHARD}")

    store.before = remove
    run = recorder.open_run(f"s3://{BUCKET}/{key}")
    assert (num_seen, run.num_rows) == (1, 0)
