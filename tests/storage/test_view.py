"""`recorder view` of runs in a store: what is drawn is what is drawn of the copy on a disk, also when they grow."""

from __future__ import annotations

from pathlib import Path

from recorder.report.collect import why_not_saved
from recorder.run.finding import find_folder, find_run
from recorder.view.drawing import Drawing
from recorder.view.server import Watching
from tests.rigs.handmade import HandmadeWriter, make_row, make_run
from tests.rigs.server import BUCKET, StoreServer


def drawn(path: Path | str) -> Drawing:
    found = Drawing(*find_run(path))
    while found.refresh():
        pass
    return found


def without_top(drawing: Drawing) -> dict[str, str]:
    """What is drawn; the top has the time and sizes in it."""
    return {name: block for name, block in drawing.blocks().items() if name != "top"}


def test_a_run_in_a_store_is_drawn_and_listed_as_its_copy_on_a_disk(store: StoreServer, tmp_path: Path) -> None:
    run = make_run(tmp_path / "recordings" / "run")
    writer = HandmadeWriter(run)
    writer.add_shard([[make_row(step, [1.0 + step], step=step, module_path="a") for step in range(3)]])
    writer.finish()
    url = store.upload(run, f"{tmp_path.name}/run")
    in_store = drawn(url)
    assert without_top(in_store) == without_top(drawn(run))
    assert (in_store.growing.num_rows, in_store.state) == (3, "over")

    later = HandmadeWriter(run, name="20260102-000000-host-2")
    later.add_shard([[make_row(step, [1.0 + step], step=step, module_path="a") for step in range(3, 6)]])
    later.finish(attempt=1)
    store.upload(run, f"{tmp_path.name}/run")
    while in_store.refresh():
        pass
    assert in_store.growing.num_rows == 6

    location, _ = find_run(url)
    watching = Watching(location.parent, None)
    assert [one["directory"] for one in watching.listed()] == ["run"]
    assert "object store" in (why_not_saved(location) or "")


def test_a_prefix_without_a_run_yet_is_an_empty_list_that_waits(store: StoreServer, tmp_path: Path) -> None:
    url = f"s3://{BUCKET}/{tmp_path.name}/runs"
    folder = find_folder(url, may_be_empty=True)
    assert folder is not None and str(folder) == url
    assert find_folder(url) is None and find_folder(f"{url}/@-1", may_be_empty=True) is None
    watching = Watching(folder, None)
    assert watching.listed() == [] and watching.find("run") is None
    store.upload(make_run(tmp_path / "run"), f"{tmp_path.name}/runs/run")
    watching._index_at_s = 0.0  # ten seconds later
    assert [one["directory"] for one in watching.listed()] == ["run"]
    assert find_folder(f"{url}/rnu", may_be_empty=True) is None, "it may be meant as the name of a run"
