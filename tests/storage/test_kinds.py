"""A run in a store of Google's or Azure's kind is read as one in S3 is, and the kinds are known in one place."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest

import recorder
from recorder.errors import StoreError
from recorder.storage import clients
from tests.rigs.command_line import Cli
from tests.rigs.server import BUCKET, SECRET_KEY, StoreServer
from tests.storage.runs import NUM_RANKS, make_large_run

KINDS = pytest.mark.parametrize("scheme", ["gs", "az"])


@pytest.fixture(scope="module")
def large(server: StoreServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_large_run(tmp_path_factory.mktemp("local") / "large")
    server.upload(path, "kinds/large")
    return path


@KINDS
@pytest.mark.parametrize("command", ["ls", "show layers.0", "stats --by step --global", "verify"])
def test_a_command_says_what_it_says_of_the_copy_on_a_disk(
    store: StoreServer, large: Path, cli: Cli, scheme: str, command: str
) -> None:
    name, *options = command.split()
    url = f"{scheme}://{BUCKET}/kinds/large"
    with store.counting() as counts:
        remote = cli(name, url, *options, "--json")
    local = cli(name, large, *options, "--json")
    assert (remote.exit_code, remote.out.replace(url, str(large))) == (local.exit_code, local.out)
    assert counts["LIST"] == 1 and counts["HEAD"] == 0


@KINDS
def test_values_and_scans_are_those_of_the_disk(store: StoreServer, large: Path, scheme: str) -> None:
    local, remote = recorder.open_run(large), recorder.open_run(f"{scheme}://{BUCKET}/kinds/large")
    assert remote.ranks == list(range(NUM_RANKS))
    assert np.array_equal(remote.array("layers.0", step=5, rank=1), local.array("layers.0", step=5, rank=1))
    assert remote.dataset().to_table(columns=["step"]).num_rows == local.num_rows
    assert recorder.open_run(f"{scheme}://{BUCKET}/kinds").path == remote.path


@KINDS
def test_a_bucket_that_is_not_there_is_said(store: StoreServer, scheme: str) -> None:
    with pytest.raises(StoreError, match=f"{scheme}://no-such-bucket: no such bucket in the store at {store.url}"):
        recorder.open_run(f"{scheme}://no-such-bucket/run")


@pytest.mark.parametrize(
    ("scheme", "setting", "value"),
    [("gs", "GOOGLE_BEARER_TOKEN", f"{SECRET_KEY}-not"), ("az", "AZURE_STORAGE_ACCOUNT_NAME", "another")],
)
def test_refused_credentials_are_said_without_them(
    store: StoreServer, monkeypatch: pytest.MonkeyPatch, scheme: str, setting: str, value: str
) -> None:
    monkeypatch.setenv(setting, value)
    with pytest.raises(StoreError, match="refuses the credentials") as refused:
        recorder.open_run(f"{scheme}://{BUCKET}/kinds/large")
    assert value not in str(refused.value)
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", f"/nowhere/{value}")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", f"{value} is no base64")
    with pytest.raises(StoreError) as refused:
        recorder.open_run(f"{scheme}://{BUCKET}/kinds/large")
    assert value not in str(refused.value)


def test_no_other_module_asks_which_scheme_it_is() -> None:
    package = Path(recorder.__file__).parent
    asking = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.rstrip(":/") in clients.KINDS
    }
    assert asking == {"storage/clients.py"}


def test_every_kind_is_on_the_page_and_in_the_docstring_of_open_run() -> None:
    page = (Path(__file__).parents[2] / "docs" / "object-stores.md").read_text()
    for scheme in clients.KINDS:
        assert f"| `{scheme}://" in page
        assert f"``{scheme}://" in (recorder.open_run.__doc__ or "")
