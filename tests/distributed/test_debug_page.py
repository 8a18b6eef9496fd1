"""The recorder's page of torch's debug server shows steps and findings of each rank, and has all write the ring."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.rigs import jobs
from tests.rigs.jobs import SCRIPTS, Finished


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    pytest.importorskip("torch.distributed.debug._frontend", reason="this torch has no debug server")
    folder = tmp_path_factory.mktemp("debugged")
    rules = "site=output keep=ring before=3 after=1; site=scalar keep=stats"
    words = (f"--port={jobs.free_port()}", f"--out={folder}")
    recording = jobs.recording(rules, triggers="spike")
    return jobs.succeeded(jobs.ranks(folder, SCRIPTS / "debugged.py", *words, num=2, **recording))


@pytest.fixture(scope="module")
def folder(finished: Finished) -> Path:
    return finished.folder


def test_the_page_has_the_step_and_the_findings_of_each_rank(folder: Path) -> None:
    page = (folder / "page.html").read_text()
    assert '<a href="/recorder">recorder</a>' in page
    assert "rank 0: step 9, observed " in page and "rank 1: step 9, observed " in page
    assert page.count("nonfinite: ") == 1
    assert "nonfinite: step 5, scalar loss: not finite (1 NaN of 1 element)" in page
    assert "asked for a dump" not in page


def test_its_button_has_all_ranks_write_the_ring(folder: Path, finished: Finished) -> None:
    assert (folder / "pagedump=1.html").read_text().count("asked for a dump") == 1
    (dump,) = finished.run.dumps
    assert dump.reason == "the debug page of torch.distributed"
    assert {row.rank for row in finished.run.to_pandas().query("site == 'output'").itertuples()} == {0, 1}


def test_the_periodic_dump_of_torch_has_it_too(folder: Path) -> None:
    texts = [path.read_text() for path in folder.glob("recorder_*.txt")]
    assert texts and all(text.startswith("rank 0: ") and "\nrank 1: " in text for text in texts)


def test_a_process_with_the_page_ends_as_one_without() -> None:
    pytest.importorskip("torch.distributed.debug._frontend", reason="this torch has no debug server")
    script = "from recorder.lifecycle.debug_page import RecorderHandler; RecorderHandler()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
