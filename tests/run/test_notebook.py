"""A run by hand: narrowing to modules, completion, HTML that holds no script, frames in long form."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pytest

from recorder.errors import LookupFailedError
from recorder.read.run import LONG_KEY
from recorder.run.run import Run, open_run
from tests.cli.test_hostile_text import NAMES
from tests.rigs.handmade import HandmadeWriter, Row, make_row, make_run

MODULES = ["", "layers", "layers.0", "layers.0.mlp", "layers.0.mlp.down", "layers.1", "layers.10", "head"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Outputs of some modules and a gradient, at steps 0 to 2; `layers` is a container without rows."""
    path = make_run(tmp_path / "run")
    writer = HandmadeWriter(path)
    rows: list[Row] = []
    for step in range(3):
        for module in ("", "layers.0", "layers.0.mlp", "layers.0.mlp.down", "layers.1", "layers.10"):
            rows.append(make_row(len(rows), np.array([step, len(module)], np.float32), step=step, module_path=module))
        rows.append(
            make_row(len(rows), np.ones(1, np.float32), step=step, module_path="layers.0.mlp", site="grad", name="w")
        )
    writer.add_shard([rows])
    modules = [{"path": path, "class": "Linear", "source": "net.py:3", "sites": ["output"]} for path in MODULES]
    writer.finish(roots=[{"name": "model", "modules": modules}])
    return open_run(path)


def paths(table: object) -> set[str]:
    return set(table.column("module_path").to_pylist())  # type: ignore[attr-defined]


class TestNarrowing:
    def test_a_module_holds_its_rows_and_those_below(self, run: Run) -> None:
        view = run["layers.0"]
        assert paths(view.table()) == {"layers.0", "layers.0.mlp", "layers.0.mlp.down"}
        assert paths(view.table(recurse=False)) == {"layers.0"}
        assert (view.steps, view.sites) == ([0, 1, 2], ["output", "grad"])

    def test_a_path_that_merely_begins_alike_is_another_module(self, run: Run) -> None:
        assert paths(run["layers.1"].table()) == {"layers.1"}

    def test_children_are_reached_by_relative_paths(self, run: Run) -> None:
        assert run["layers"]["0"]["mlp.down"].path == "layers.0.mlp.down"
        assert run["layers"].children == ["0", "1", "10"]
        assert run["layers.0.mlp"].children == ["down"]
        assert run[""].children == ["layers", "head"]
        assert run["head"].children == []

    def test_the_root_holds_everything(self, run: Run) -> None:
        assert run[""].table().equals(run.table())
        assert paths(run[""].table(recurse=False)) == {""}

    def test_a_filter_and_columns_are_those_of_the_run(self, run: Run) -> None:
        view = run["layers.0"]
        frame = view.to_pandas(["step", "l2"], pc.field("step") == 1)
        assert (list(frame.columns), len(frame)) == (["step", "l2"], 4)
        assert view.table(["seq"], pc.field("site") == "grad", recurse=False).num_rows == 0

    def test_a_tensor_is_of_the_module_itself(self, run: Run) -> None:
        assert run["layers.0.mlp"].array(step=2).tolist() == [2, 12]
        assert run["layers.0.mlp"].array("grad", step=2, name="w", rank=0).tolist() == [1]
        assert run["layers.0.mlp"].tensor(step=2).tolist() == [2, 12]

    def test_a_wrong_path_names_the_nearest(self, run: Run) -> None:
        with pytest.raises(
            LookupFailedError, match=r"no module 'mlp.down' in this run; nearest is 'layers.0.mlp.down'"
        ):
            run["mlp.down"]
        with pytest.raises(LookupFailedError, match=r"no module 'mpl' below 'layers.0'; nearest is 'mlp'"):
            run["layers.0"]["mpl"]
        with pytest.raises(LookupError, match="module_paths lists those with rows"):
            run["zzzzzz"]
        with pytest.raises(TypeError, match=r"a module path is text, such as 'layers.0.mlp', not 3"):
            run[3]  # type: ignore[index]

    def test_a_module_without_rows_is_there_and_empty(self, run: Run) -> None:
        assert (run["head"].table().num_rows, run["head"].steps, run["head"].sites) == (0, [], [])


class TestShowing:
    def test_a_module_in_a_line(self, run: Run) -> None:
        assert repr(run["layers.0"]) == (
            "<Module 'layers.0' (Linear): 12 rows, steps 0 to 2, output, grad, 2 modules below>"
        )
        assert repr(run["head"]) == "<Module 'head' (Linear): 0 rows>"

    def test_completion_offers_paths_and_below_a_module_relative_ones(self, run: Run) -> None:
        assert run._ipython_key_completions_() == MODULES
        assert run["layers.0"]._ipython_key_completions_() == ["mlp", "mlp.down"]

    def test_html_says_what_is_in_it(self, run: Run) -> None:
        found = Cells(run._repr_html_())
        assert found.after("ranks") == "0 of 1"
        assert found.after("steps") == "0 to 2 (3)"
        assert found.after("rows") == "21"
        assert [found.after("output"), found.after("grad")] == ["18", "3"]
        below = Cells(run["layers.0"]._repr_html_())
        assert [below.after("class"), below.after("source"), below.after("children")] == ["Linear", "net.py:3", "mlp"]

    def test_an_empty_run_can_be_shown(self, tmp_path: Path) -> None:
        empty = open_run(make_run(tmp_path / "empty"))
        assert Cells(empty._repr_html_()).after("rows") == "0"
        assert repr(empty[""]) == "<Module '': 0 rows>"


class Cells(HTMLParser):
    """The cells of tables, which must be all that there is."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ("table", "tbody", "thead", "tr", "th", "td"), tag
        assert attrs == []
        if tag in ("th", "td"):
            self.cells.append("")

    def handle_data(self, data: str) -> None:
        self.cells[-1] += data

    def after(self, title: str) -> str:
        return self.cells[self.cells.index(title) + 1]


HOSTILE = [
    "<script>alert(1)</script>", "</td></table><img src=x onerror=alert(1)>", "'\"><svg/onload=alert(1)>", "&lt;b&gt;",
    "javascript:alert(1)", "<" * 400, *(name for name in NAMES if name != "\ud800"),
]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_no_text_of_a_file_becomes_markup(tmp_path: Path, name: str) -> None:
    path = make_run(tmp_path / "run", run_id=name)
    writer = HandmadeWriter(path)
    writer.add_shard([[make_row(0, [1.0], module_path=name, site=name, root=name, name=name)]])
    writer.finish(roots=[{"name": name, "modules": [{"path": name, "class": name, "source": name}]}])
    run = open_run(path)
    for shown in (run._repr_html_(), run[name]._repr_html_()):
        text = "".join(Cells(shown).cells)
        assert all(char.isprintable() for char in text)
        assert len(text) < 2500
    assert all(char.isprintable() or char == "\n" for char in repr(run[name]))
    assert name in run._ipython_key_completions_()


def test_a_path_of_many_levels_is_one_path(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    deep = ".".join(["a"] * 100_000)
    writer = HandmadeWriter(path)
    writer.add_shard([[make_row(0, [1.0], module_path=deep)]])
    writer.finish()
    assert open_run(path)._ipython_key_completions_() == ["", deep]


class TestLongFrames:
    def test_a_value_is_a_row(self, run: Run) -> None:
        frame = run["layers.0.mlp"].to_long(["l2", "max"], recurse=False)
        assert list(frame.columns) == [*LONG_KEY, "statistic", "value"]
        assert len(frame) == 3 * 2 * 2
        values = frame[(frame.statistic == "max") & (frame.site == "output")].set_index("step")["value"]
        assert values.to_dict() == {0: 12, 1: 12, 2: 12}
        assert frame.value.dtype == np.float64

    def test_it_is_the_wide_frame_turned(self, run: Run) -> None:
        wide = run.to_pandas([*LONG_KEY, "mean", "nan_count"])
        long = run.to_long(["mean", "nan_count"])
        turned = long.pivot_table(index=["step", "module_path", "site"], columns="statistic", values="value")
        expected = wide.set_index(["step", "module_path", "site"])[["mean", "nan_count"]].sort_index()
        assert np.array_equal(turned.to_numpy(), expected.to_numpy())

    def test_all_statistics_that_there_are_by_default(self, run: Run) -> None:
        from recorder.columns import COUNTS, STATISTICS

        assert set(run.to_long().statistic) == {*STATISTICS, *COUNTS}

    def test_rows_without_the_statistic_are_left_out(self, tmp_path: Path) -> None:
        path = make_run(tmp_path / "run")
        writer = HandmadeWriter(path)
        writer.add_shard([[make_row(0, [1.0]), make_row(1, np.zeros(0, np.float32), step=1)]])
        writer.finish()
        assert open_run(path).to_long(["mean"]).step.tolist() == [0]
        assert len(open_run(path).to_long([])) == 0

    def test_a_filter_is_that_of_the_run(self, run: Run) -> None:
        assert set(run.to_long(["l2"], pc.field("step") > 0).step) == {1, 2}

    def test_an_unknown_statistic_names_the_nearest(self, run: Run) -> None:
        with pytest.raises(LookupFailedError, match=r"no statistic 'absmx' \(did you mean 'absmax'\?\)"):
            run.to_long(["absmx"])
