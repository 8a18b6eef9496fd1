"""The page of `recorder report` in a real browser: drawn, read back, clicked, zoomed, printed, without a network."""

from __future__ import annotations

import csv
import json
import urllib.parse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import recorder
from recorder.numerics.histogram import Histogram
from recorder.numerics.units import packed
from recorder.run.finding import shortest_text_of
from tests.browser.conftest import Open, Opened, write_page
from tests.rigs.command_line import module
from tests.rigs.handmade import HandmadeWriter, make_row, make_run
from tests.rigs.report_pages import HOSTILE, hostile_run, run_of, run_of_two_models
from tests.rigs.small_runs import NUM_STEPS
from tests.rigs.synthetic import Shape, write_run

if TYPE_CHECKING:
    from playwright.sync_api import Position

MAGENTA = (230, 0, 122)
DUMP, DUMP_COLOR = "#8a5a00", (0x8A, 0x5A, 0x00)
CELLS = "#panel-map .heat-chunk"
ROW_PIXELS = 17


def rows_of(opened: Opened, panel: str = "map") -> list[str]:
    return opened.page.locator(f"#panel-{panel} .heat-label").all_inner_texts()


def cell_at(opened: Opened, row: int, column: int, columns: int = NUM_STEPS) -> tuple[int, int, int]:
    """The colour a little beside the middle of a cell of the map, where no mark stands."""
    pixels = opened.pixels(CELLS)
    x = int((column + 0.2) * pixels.shape[1] / columns)
    red, green, blue, _ = pixels[row * ROW_PIXELS + 4, x].tolist()
    return red, green, blue


def point_at(opened: Opened, row: int, column: int, columns: int = NUM_STEPS) -> Position:
    width = opened.page.locator(CELLS).first.evaluate("one => one.clientWidth")
    return {"x": (column + 0.5) * width / columns, "y": float(row * ROW_PIXELS + 8)}


def texts_of_charts(opened: Opened) -> list[str]:
    """What is written into canvases when the page is drawn anew."""
    opened.page.evaluate(
        """() => {
            const told = window.written = [], { prototype } = CanvasRenderingContext2D, write = prototype.fillText;
            prototype.fillText = function (text, ...more) { told.push(text); return write.call(this, text, ...more); };
        }"""
    )
    opened.page.set_viewport_size({"width": 1000, "height": 900})
    opened.redrawn()
    written: list[str] = opened.page.evaluate("() => window.written")
    return written


def hash_of(opened: Opened) -> dict[str, str]:
    return dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(opened.page.url).fragment))


def test_every_panel_is_drawn(open_page: Open, trained: Path) -> None:
    opened = open_page(trained)
    assert opened.page.locator("nav a").all_inner_texts() == [
        "Run",
        "Map",
        "Lines",
        "By depth",
        "Graph",
        "Ranks",
        "Images",
    ]
    assert "Net" in opened.text("#panel-top") and "ranks" in opened.text("#panel-top")
    cells = opened.page.locator("#panel-top .findings > tbody > tr").first.locator("td").all_inner_texts()
    assert cells[1].startswith("nonfinite: the value is not finite") and cells[2:6] == ["'head'", "output", "15", "1"]
    assert (
        f"recorder first {trained.parent / 'run'}\n" in cells[1]
        and "RECORDER_RULES='module=head site=* steps=14:16 keep=tensor'" in cells[1]
    )
    assert rows_of(opened) == ["(the model)", "stem", "blocks", "0", "fc", "1", "fc", "head"]
    assert "no row of" not in opened.text("#panel-map > .note"), "'blocks' has no output, and has a row"
    assert opened.page.locator("#panel-lines .plot canvas").count() == 1
    assert opened.page.locator("#panel-top .track strong").all_inner_texts() == ["loss", "gradient norm"]
    assert "of each rank: the ranks have gradients of their own (" in opened.text("#panel-top .tracks")
    assert opened.page.locator("#panel-ranks tbody tr").count() == 2
    assert "judges from 4 data-parallel ranks on" in opened.text("#panel-ranks .note")
    assert opened.page.locator("#panel-images canvas").count() == 4 + 6 + 3
    for canvas in ("#panel-map .heat-chunk", "#panel-lines .plot canvas", "#panel-images .tile"):
        assert len(np.unique(opened.pixels(canvas).reshape(-1, 4), axis=0)) > 5, canvas


def test_what_is_not_finite_and_what_is_missing_look_like_nothing_else(open_page: Open, trained: Path) -> None:
    opened = open_page(trained)
    head, hole = rows_of(opened).index("head"), rows_of(opened).index("fc")
    assert cell_at(opened, head, 15) == MAGENTA
    assert cell_at(opened, head, 14) != MAGENTA and cell_at(opened, hole, 5) != cell_at(opened, hole, 4)
    assert max(cell_at(opened, hole, 5)) - min(cell_at(opened, hole, 5)) < 16  # grey: no colour of the scale
    opened.page.locator(CELLS).hover(position=point_at(opened, head, 15))
    assert "1 NaN" in opened.text(".tooltip")
    opened.page.locator(CELLS).hover(position=point_at(opened, hole, 5))
    assert "not recorded" in opened.text(".tooltip") and "step 5" in opened.text(".tooltip")


def test_a_click_on_the_map_shows_the_line_and_is_in_the_address(open_page: Open, trained: Path) -> None:
    opened = open_page(trained)
    opened.page.locator("#panel-map").evaluate("one => one.scrollIntoView()")
    opened.page.locator(CELLS).click(position=point_at(opened, rows_of(opened).index("head"), 3))
    opened.redrawn()
    assert opened.text("#panel-lines .chart-head strong") == "head output"
    address = hash_of(opened)
    assert address["step"] == "3"
    for panel in ("#panel-lines .plot", "#panel-map .heat-name.chosen"):  # the lines are beside the map
        box = opened.page.locator(panel).bounding_box()
        assert box is not None and box["y"] > 0 and box["y"] + box["height"] <= 900
    assert json.loads(address["pins"])[0][:2] == ["head", "output"]
    again = open_page(trained, "#" + urllib.parse.urlsplit(opened.page.url).fragment)
    assert again.text("#panel-lines .chart-head strong") == "head output"
    again.page.click("#unpin")
    again.redrawn()
    assert "pins" not in hash_of(again) and again.page.locator(".docked").count() == 0


def test_other_values_are_chosen_and_containers_fold(open_page: Open, trained: Path) -> None:
    opened = open_page(trained)
    before = opened.pixels(CELLS)
    opened.page.select_option("#choose-site", label="grad")
    opened.page.select_option("#choose-stat", "std")
    opened.redrawn()
    assert opened.text("#panel-map .legend-title") == "standard deviation of grad"
    assert not np.array_equal(before, opened.pixels(CELLS))
    opened.page.select_option("#choose-lane", label="rank 1")
    opened.redrawn()
    assert {"site": "grad", "stat": "std", "lane": "2"}.items() <= hash_of(opened).items()
    opened.page.get_by_role("button", name="fold blocks").click()
    opened.redrawn()
    assert rows_of(opened) == ["(the model)", "stem", "blocks", "head"]
    assert json.loads(hash_of(opened)["shut"]) == ["blocks"]


@pytest.mark.parametrize(("axes", "rows", "columns"), [("module-rank", 8, 2), ("rank-step", 3, NUM_STEPS)])
def test_the_map_has_any_two_of_module_step_and_rank(
    open_page: Open, trained: Path, axes: str, rows: int, columns: int
) -> None:
    opened = open_page(trained, f"#axes={axes}")
    assert len(rows_of(opened)) == rows
    if axes == "module-rank":
        assert cell_at(opened, 7, 1, columns) == MAGENTA and cell_at(opened, 7, 0, columns) != MAGENTA
    else:
        assert cell_at(opened, 2, 15, columns) == MAGENTA and cell_at(opened, 1, 15, columns) != MAGENTA


def test_a_drag_zooms_all_pictures(open_page: Open, trained: Path) -> None:
    opened = open_page(trained)
    plot = opened.page.locator("#panel-lines .u-over").first
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    assert box is not None
    opened.page.mouse.move(box["x"] + box["width"] * 0.24, box["y"] + 60)
    opened.page.mouse.down()
    opened.page.mouse.move(box["x"] + box["width"] * 0.55, box["y"] + 60, steps=4)
    opened.page.mouse.up()
    opened.redrawn()
    address = hash_of(opened)
    first, last = int(address["from"]), int(address["to"])
    assert 4 <= first <= 6 and 9 <= last <= 11
    assert opened.text("#zoom-out") == f"all steps (now {first} to {last})"
    opened.page.click("#zoom-out")
    opened.redrawn()
    assert "from" not in hash_of(opened)


def drag_over_map(opened: Opened, first: int, last: int) -> None:
    start, end = (point_at(opened, 2, column) for column in (first, last))
    cells = opened.page.locator(CELLS)
    cells.scroll_into_view_if_needed()
    box = cells.bounding_box()
    assert box is not None
    opened.page.mouse.move(box["x"] + start["x"], box["y"] + start["y"])
    opened.page.mouse.down()
    opened.page.mouse.move(box["x"] + end["x"], box["y"] + end["y"], steps=4)
    opened.page.mouse.up()
    opened.redrawn()


@pytest.mark.parametrize(("first", "last"), [(4, 9), (9, 4)])
def test_a_drag_on_the_map_zooms_all_pictures_and_is_no_click(
    open_page: Open, trained: Path, first: int, last: int
) -> None:
    opened = open_page(trained)
    drag_over_map(opened, first, last)
    address = hash_of(opened)
    assert (address["from"], address["to"]) == ("4", "9") and "pins" not in address
    assert opened.text("#zoom-out") == "all steps (now 4 to 9)"
    opened.page.locator(CELLS).click(position=point_at(opened, rows_of(opened).index("head"), 3, 6))
    opened.redrawn()
    assert hash_of(opened)["step"] == "7"  # a click after it is one


def test_a_drag_on_histograms_zooms_these_too(open_page: Open, tmp_path: Path) -> None:
    data = Histogram(first=-2, counts=np.array([[0, 0, 0], [3, 0, 1]])).to_bytes()
    values = {(0, step): 1.0 for step in range(10)}
    run = run_of(tmp_path / "run", values, histogram=data, zero_count=0, nan_count=0, inf_count=0)
    opened = open_page(write_page(run, tmp_path / "r.html"), "#from=2&to=4")
    cells = opened.page.locator("#panel-histograms .heat-cells")
    columns = []
    for share in (0.1, 0.5, 0.9):
        box = cells.bounding_box()
        assert box is not None
        cells.hover(position={"x": share * box["width"], "y": 5})
        columns.append(opened.text(".tooltip div:nth-child(2)"))
    assert columns == ["step 2", "step 3", "step 4"]


def test_back_undoes_a_click_and_forward_does_it_again(open_page: Open, trained: Path) -> None:
    opened = open_page(trained)
    opened.page.select_option("#choose-stat", "std")
    opened.redrawn()
    opened.page.locator(CELLS).click(position=point_at(opened, rows_of(opened).index("head"), 3))
    opened.redrawn()
    drag_over_map(opened, 4, 9)
    assert opened.page.evaluate("() => history.length") == 2 + 3  # an empty page, this one, and what was done
    opened.page.go_back()
    opened.redrawn()
    assert "from" not in hash_of(opened) and opened.text("#panel-lines .chart-head strong") == "head output"
    opened.page.go_back()
    opened.redrawn()
    assert hash_of(opened) == {"stat": "std"} and opened.text("#panel-lines .chart-head strong") == "stem output"
    opened.page.locator("#choose-stat").focus()
    opened.page.go_back()
    opened.redrawn()
    assert hash_of(opened) == {} and opened.page.locator("#choose-stat").input_value() == "absmax"
    for _ in range(2):
        opened.page.go_forward()
        opened.redrawn()
    assert hash_of(opened)["step"] == "3" and opened.text("#panel-lines .chart-head strong") == "head output"


def test_an_unknown_module_is_said_with_the_nearest_names(open_page: Open, trained: Path) -> None:
    opened = open_page(trained)
    field = opened.page.locator("#add-path")
    field.fill("block.1.fc")
    field.press("Enter")
    told = opened.text("#panel-lines .choice .wrong")
    assert told.startswith("There is no module block.1.fc; the nearest names are blocks.1.fc, ")
    opened.page.select_option("#choose-stat", "std")
    opened.redrawn()
    assert (
        opened.text("#panel-lines .choice .wrong") == told
        and opened.page.locator("#add-path").input_value() == "block.1.fc"
    )
    field.fill("blocks.1.fc")
    field.press("Enter")
    opened.redrawn()
    assert opened.text("#panel-lines .choice .wrong") == ""
    assert [pin[0] for pin in json.loads(hash_of(opened)["pins"])] == ["stem", "blocks.1.fc"]


def test_attention_that_is_not_finite_is_said_to_be_so(open_page: Open, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    shares = np.full((2, 3, 9, 9), 1 / 9, np.float32)
    rows = []
    for step, some in enumerate((0, 1, 3)):
        bad = shares.copy()
        bad[0, :some] = np.nan
        common: dict[str, Any] = {
            "site": "tap",
            "name": "attention",
            "step": step,
            "module_path": "a" if step < 2 else "b",
        }
        rows.append(make_row(2 * step, bad, **common))
        rows.append(make_row(2 * step + 1, shares, **{**common, "module_path": "b", "step": 0})) if step == 2 else None
    writer = HandmadeWriter(run)
    writer.add_shard([rows])
    writer.finish()
    opened = open_page(write_page(run, tmp_path / "r.html"))
    told = opened.page.locator("#panel-images .dim").all_inner_texts()
    ranges = [text.split("[2, 3, 9, 9] · ")[1] for text in told]
    assert ranges == ["0.111 to 0.111", "0.111 to 0.111 · 81 NaN", "0.111 to 0.111", "243 NaN"]
    assert all(text.startswith("attention") for text in told)


def test_a_finding_leads_into_the_picture(open_page: Open, trained: Path) -> None:
    opened = open_page(trained)
    opened.page.locator("#panel-top .findings a").first.click()
    opened.redrawn()
    assert opened.text("#panel-lines .chart-head strong") == "head output"
    assert "NaN or infinite" in opened.text("#panel-lines .chart-legend")


def test_the_keyboard_is_enough(open_page: Open, trained: Path) -> None:
    opened = open_page(trained)
    opened.page.locator("#panel-map .heat-cells").focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
        opened.page.keyboard.press(key)
    assert "step 1" in opened.text(".tooltip")
    opened.page.keyboard.press(" ")
    opened.redrawn()
    assert rows_of(opened) == ["(the model)", "stem", "blocks", "head"]
    opened.page.keyboard.press("ArrowDown")
    opened.page.keyboard.press("Enter")
    opened.redrawn()
    assert opened.text("#panel-lines .chart-head strong") == "head output"


def test_the_map_is_searched_while_one_types(open_page: Open, trained: Path) -> None:
    opened = open_page(trained)
    opened.page.locator("#find").press_sequentially("stem")
    opened.redrawn()
    assert "stem" in rows_of(opened) and "head" not in rows_of(opened)
    opened.page.locator("#find").fill("")
    opened.redrawn()
    assert "head" in rows_of(opened)


def test_the_graph_opens_and_closes(open_page: Open, trained: Path) -> None:
    opened = open_page(trained)
    boxes = opened.page.locator("#panel-graph .box-name")
    assert boxes.all_inner_texts() == ["(the model)", "stem", "blocks", "0", "fc", "1", "fc", "head"]
    opened.page.get_by_role("button", name="close blocks").click()
    opened.redrawn()
    assert boxes.all_inner_texts() == ["(the model)", "stem", "blocks", "head"]
    assert opened.page.locator("#panel-graph .box-head.bad").count() == 1


def test_the_graph_marks_the_first_nan_and_pales_what_inherits(open_page: Open, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    writer = HandmadeWriter(run)
    paths = ("a", "b", "c", "")
    bad_from = {"b": 3, "c": 3, "": 3, "a": 4}
    rows = [
        make_row(4 * step + i, np.full(4, np.nan if step >= bad_from[path] else 1.0, np.float32), step=step)
        | {"module_path": path, "encoding": None, "payload_bytes": None, "data": None}
        for step in range(6)
        for i, path in enumerate(paths)
    ]
    writer.add_shard([rows], kind="stats")
    writer.finish(roots=[{"name": "model", "class": "Net", "modules": [module(one, "Linear") for one in paths]}])
    opened = open_page(write_page(run, tmp_path / "r.html"))
    boxes = opened.page.locator("#panel-graph")
    assert boxes.locator(".box-head.bad .box-name").all_inner_texts() == ["b"]
    assert boxes.locator(".box-head.later .box-name").all_inner_texts() == ["(the model)", "a", "c"]
    assert boxes.locator(".box-head.bad .box-value").inner_text() == "4 NaN"  # of one step, not of all three


def test_histograms_are_drawn_over_steps(open_page: Open, tmp_path: Path) -> None:
    counts = Histogram(first=-1, counts=np.array([[0, 0, 4], [8, 16, 0]]))
    values = {(0, step): 1.0 for step in range(4)}
    run = run_of(tmp_path / "run", values, histogram=counts.to_bytes(), zero_count=4)
    opened = open_page(write_page(run, tmp_path / "r.html"))
    labels = rows_of(opened, "histograms")
    assert [label for label in labels if label in ("2⁰ to 2¹", "2⁻¹ to 2⁰", "0", "-2² to -2¹")] == [
        "2⁰ to 2¹", "2⁻¹ to 2⁰", "0", "-2² to -2¹",
    ]  # fmt: skip
    assert "⋯" in labels
    opened.page.locator("#panel-histograms .heat-chunk").hover(
        position={"x": 20, "y": labels.index("2⁰ to 2¹") * 17 + 8}
    )
    assert "% of the values" in opened.text(".tooltip")
    opened.page.select_option("#choose-stat", "numel")
    opened.redrawn()
    assert opened.text("#panel-map .legend-title").startswith("elements")
    assert opened.page.locator("#panel-map .legend-ticks span").all_inner_texts() == ["4"], "of each value alike"
    opened.page.click("#ridges")
    opened.redrawn()
    ridges = opened.page.locator("#panel-histograms canvas[role=img]")
    assert hash_of(opened)["ridges"] == "1" and len(np.unique(opened.pixels("#panel-histograms canvas[role=img]"))) > 5
    assert (ridges.get_attribute("aria-label") or "").count("most 2⁰ to 2¹") == 4, "a ridge for each recorded step"


def test_units_are_drawn_sorted_over_steps(open_page: Open, tmp_path: Path) -> None:
    sums = np.array([[0.0] * 4, [0.0, 1.0, 16.0, 4.0], [0.0, 1.0, 4.0, 2.0]])
    units = packed(1, sums, np.array([1, 0, 0, 0]))
    run = run_of(tmp_path / "run", {(0, step): 1.0 for step in range(4)}, units=units, shape="[1,4]", numel=4)
    opened = open_page(write_page(run, tmp_path / "r.html"))
    labels = rows_of(opened, "units")
    assert labels == ["largest", "", "", "least"]  # a row for each of few units
    assert "4 units, the largest is unit 2, 1 all zero" in opened.text("#panel-units")
    opened.page.locator("#panel-units .heat-chunk").hover(position={"x": 20, "y": 8})
    assert "root mean square about 4" in opened.text(".tooltip")
    pixels = opened.pixels("#panel-units .heat-chunk")
    assert len({tuple(pixels[row * ROW_PIXELS + 8, 20]) for row in range(4)}) == 4


def run_with_loss(path: Path) -> Path:
    """A layer whose output is recorded at steps 0, 10, 20 and 30, and the loss at each step up to 35."""
    run = make_run(path)
    rows = [
        make_row(0, np.float64(1.0), step=step, site="scalar", name="loss", module_path="", encoding=None)
        if is_loss
        else make_row(
            0, np.ones(4, np.float32) * (8 if step == 30 else 1), step=step, module_path="net.fc", encoding=None
        )
        for step in range(36)
        for is_loss in (False, True)
        if is_loss or step % 10 == 0
    ]
    writer = HandmadeWriter(run)
    writer.add_shard([[row | {"seq": seq} for seq, row in enumerate(rows)]], kind="stats")
    modules = [module("", "Net"), module("net.fc", "Linear")]
    writer.finish(roots=[{"name": "model", "class": "Net", "modules": modules}])
    return run


@pytest.mark.parametrize("is_log", [False, True])
@pytest.mark.parametrize(
    "ends", [(2.05, 3.9), (3, 7), (1.0001, 1.0004), (0, 7), (-4, 0.002), (0.15, 9), (3e-12, 8e9), (0, 3e9)]
)
def test_each_axis_of_numbers_has_two_marks_at_least(
    open_page: Open, tmp_path: Path, ends: tuple[float, float], is_log: bool
) -> None:
    low, high = ends
    numbers = [low, high, *((low + (high - low) / 10**place) for place in range(1, 12))]
    run, rows = make_run(tmp_path / "run"), list[dict[str, Any]]()
    for step, value in enumerate(numbers, 1000):
        for more in ({"module_path": "a"}, {"module_path": "", "site": "scalar", "name": "loss"}):
            common: dict[str, Any] = {"step": step, "encoding": None, "payload_bytes": None, "data": None}
            rows.append(make_row(len(rows), np.full(4 if len(more) == 1 else (), value, np.float64)) | more | common)
    writer = HandmadeWriter(run)
    writer.add_shard([rows], kind="stats")
    writer.finish(roots=[{"name": "model", "class": "Net", "modules": [module("a", "Linear")]}])
    opened = open_page(write_page(run, tmp_path / "r.html"), f"#stat=mean&log={int(is_log)}")
    opened.page.evaluate(
        """() => {
            const { prototype } = CanvasRenderingContext2D, write = prototype.fillText;
            prototype.fillText = function (text, ...more) {
              const plot = this.canvas.closest(".plot");
              if (plot) (plot.written ??= []).push(text);
              return write.call(this, text, ...more);
            };
        }"""
    )
    opened.page.set_viewport_size({"width": 1000, "height": 900})
    opened.redrawn()
    charts = opened.page.evaluate("() => [...document.querySelectorAll('.chart .plot')].map(one => one.written)")
    assert len(charts) == 2
    for texts in charts:
        marks = [text for text in texts if text.replace("e", "").replace("-", "").replace(".", "").isdigit()]
        of_numbers = [text for text in marks if not 1000 <= float(text) <= 1012]
        assert len(of_numbers) == len(set(of_numbers)) >= 2, texts


def test_the_area_of_nan_begins_at_the_step_of_the_first(open_page: Open, tmp_path: Path) -> None:
    num, first = 1300, 1001
    values = {(0, step): np.nan if step >= first else 1.0 + step % 7 for step in range(num)}
    opened = open_page(write_page(run_of(tmp_path / "run", values), tmp_path / "r.html"), "#view=lines")
    assert "columns: each shows the value that stands out most" in opened.text("#panel-map")
    left, width = opened.page.locator("#panel-lines .u-over").evaluate("one => [one.offsetLeft, one.offsetWidth]")
    row = opened.pixels("#panel-lines canvas.u-canvas, #panel-lines .plot canvas")[120].astype(int)
    is_pink = (row[:, 3] > 0) & (row[:, 0] - row[:, 1] > 30)
    begins = left + (first + 0.5) / num * width
    assert abs(np.flatnonzero(is_pink)[0] - begins) <= 1
    assert is_pink[int(begins) + 2 : left + int((num - 4) / num * width)].all(), "one area, not a bar a step"


LONG = "a_name_that_has_more_letters_than_there_is_room_for_at_the_left_of_any_picture_and_ends_in_this"


@pytest.mark.parametrize("width", [1200, 400])
def test_long_names_are_cut_where_they_say_least(open_page: Open, tmp_path: Path, width: int) -> None:
    run, writer = make_run(tmp_path / "run"), HandmadeWriter(tmp_path / "run")
    writer.add_shard([[make_row(step, np.float64(1), step=step, module_path=f"outer.{LONG}") for step in range(4)]])
    writer.finish(roots=[{"name": "model", "class": "Net", "modules": [module(f"outer.{LONG}", "Linear")]}])
    opened = open_page(write_page(run, tmp_path / "r.html"), width=width)
    ends = opened.page.locator("#panel-map .heat-label").last.evaluate(
        "one => [...[one, one.firstChild].map(part => part.getBoundingClientRect().right), one.scrollWidth]"
    )
    assert abs(ends[0] - ends[1]) <= 1 and ends[2] > 240, "the end of the name is seen"
    name = opened.page.locator("#panel-graph .box-name").last
    assert "…" in name.inner_text() and name.inner_text().endswith("s_in_this")
    assert opened.page.evaluate(
        "() => { const one = document.querySelector('.graph'); return one.scrollWidth <= one.clientWidth; }"
    )
    assert LONG in (name.locator("..").get_attribute("title") or "")
    opened.page.locator("#panel-graph .fold").last.focus()
    opened.page.keyboard.press("Tab")
    opened.page.keyboard.press("Tab")
    assert LONG in opened.text(".tooltip")


def test_numbers_that_are_not_drawn_are_unfolded(open_page: Open, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []
    for step in range(3):
        for name in range(11):
            common: dict[str, Any] = {"site": "scalar", "name": f"n{name}", "module_path": "", "encoding": None}
            rows.append(make_row(len(rows), np.float64(step), step=step, **common))
    run = make_run(tmp_path / "run")
    writer = HandmadeWriter(run)
    writer.add_shard([rows], kind="stats")
    writer.finish()
    opened = open_page(write_page(run, tmp_path / "r.html"))
    assert opened.page.locator("#panel-numbers .track").count() == 8
    opened.page.get_by_role("button", name="all 11 numbers").click()
    opened.redrawn()
    assert opened.page.locator("#panel-numbers .track").count() == 11
    assert not opened.page.get_by_role("button", name="all 11 numbers").is_visible()


def test_all_pictures_have_one_axis_of_steps_to_scale(open_page: Open, tmp_path: Path) -> None:
    opened = open_page(write_page(run_with_loss(tmp_path / "run"), tmp_path / "r.html"))
    where = "one => { const box = one.getBoundingClientRect(); return [box.left, box.width]; }"
    pictures = ("#panel-top .u-over", "#panel-lines .u-over", "#panel-map .heat-cells")
    left, width = opened.page.locator(pictures[0]).first.evaluate(where)
    for picture in pictures:
        assert opened.page.locator(picture).first.evaluate(where) == pytest.approx([left, width], abs=0.5), picture
    cells = opened.page.locator("#panel-map .heat-cells")
    for step, told in ((4, 0), (6, 10), (14, 10), (26, 30), (34, 30)):  # a column reaches half way to those beside it
        cells.hover(position={"x": (step + 0.5) * width / 36, "y": 5})
        assert f"step {told}" in opened.page.locator(".tooltip div").all_inner_texts(), step
    cursor = opened.page.locator("#panel-top .u-cursor-x").first.evaluate(where)[0]
    assert cursor - left == pytest.approx(30.5 * width / 36, abs=2)  # one cursor for all


def test_colours_may_be_against_the_median_of_the_row(open_page: Open, trained: Path) -> None:
    opened = open_page(trained)
    stem, head = (rows_of(opened).index(name) for name in ("stem", "head"))
    before = cell_at(opened, stem, 3)
    opened.page.select_option("#choose-colors", "median")
    opened.redrawn()
    assert opened.text("#panel-map .legend-title") == "largest magnitude of output, against the median of its row"
    assert cell_at(opened, stem, 3) != before and cell_at(opened, head, 15) == MAGENTA
    opened.page.locator(CELLS).hover(position=point_at(opened, stem, 3))
    assert "times the median of its row" in opened.text(".tooltip")
    assert hash_of(opened)["colors"] == "median"


def test_modules_are_found_by_name_or_class_and_unfolded_to_a_depth(open_page: Open, trained: Path) -> None:
    opened = open_page(trained)
    opened.page.locator("#find").fill("fc")
    opened.page.keyboard.press("Enter")
    opened.redrawn()
    assert rows_of(opened) == ["blocks", "0", "fc", "1", "fc"]
    opened.page.locator("#find").fill("")
    opened.page.keyboard.press("Enter")
    opened.page.select_option("#choose-depth", "2")
    opened.redrawn()
    assert rows_of(opened) == ["(the model)", "stem", "blocks", "0", "1", "head"]
    opened.page.locator("#find").fill("zz")
    opened.page.wait_for_selector("#panel-map .note .wrong")
    assert opened.text("#panel-map .note") == 'No module or class with output has "zz" in its name.'


def test_what_came_after_the_first_nan_is_paler(open_page: Open, tmp_path: Path) -> None:
    values = {(0, step): 1.0 if step < 5 else float("nan") for step in range(10)}
    opened = open_page(write_page(run_of(tmp_path / "run", values), tmp_path / "r.html"))
    row = rows_of(opened).index("fc")
    assert cell_at(opened, row, 5, 10) == MAGENTA
    assert cell_at(opened, row, 6, 10) not in (MAGENTA, cell_at(opened, row, 4, 10))
    assert opened.page.locator("#panel-map .legend-item").all_inner_texts()[:2] == [
        "the first NaN or infinity",
        "after it",
    ]


def test_a_flag_leads_to_its_finding_on_the_map(open_page: Open, trained: Path) -> None:
    opened = open_page(trained)
    flag = opened.page.locator("#panel-top .flags .flag").first
    assert flag.inner_text() == "1" and "nonfinite: 'head' output, step 15" in (flag.get_attribute("title") or "")
    for axis in ("#panel-map .heat-axis", "#panel-lines .plot canvas"):
        pixels = opened.pixels(axis)[-26:] if "plot" in axis else opened.pixels(axis)
        marks = (pixels[..., :3] == MAGENTA).all(axis=2).any(axis=0).nonzero()[0]
        left, room = (0, 0) if "axis" in axis else (240, 4)  # a chart has room for the half of its last dot
        marks = marks[marks > pixels.shape[1] / 2]  # another finding begins at step 0
        assert abs(marks.mean() - left - 15.5 / NUM_STEPS * (pixels.shape[1] - left - room)) < 2, axis
    flag.click()
    opened.redrawn()
    assert opened.page.locator("#panel-map .heat-name.chosen .heat-label").inner_text() == "head"
    assert opened.text("#panel-lines .chart-head strong") == "head output"


def run_of_objectives(path: Path) -> Path:
    """Three ranks and three objectives with long names, whose cosines are small; a NaN in the loss at step 7."""
    run = make_run(path)
    names = ["a_first_objective", "another_of_the_objectives", "the_third_one_of_the_objectives"]
    pairs = [f"cosine.{one}:{other}" for one in names for other in names if one < other]
    numbers = [("loss", 1.0), *((f"objective.norm.{name}", 2.0) for name in names)]
    numbers += [(f"objective.{pair}", 0.01) for pair in pairs]
    for rank in range(3):
        writer, rows = HandmadeWriter(run, rank), list[dict[str, Any]]()
        for step in range(10):
            for name, value in numbers:
                number = np.float64(np.nan if (name, step) == ("loss", 7) else value * (1 + rank / 10))
                common: dict[str, Any] = {"site": "scalar", "name": name, "module_path": "", "encoding": None}
                rows.append(make_row(len(rows), number, step=step, rank=rank, **common))
        writer.add_shard([rows], kind="stats")
        writer.finish()
    return run


@pytest.mark.parametrize("width", [1300, 400])
def test_no_name_of_a_legend_is_cut_or_over_another(open_page: Open, tmp_path: Path, width: int) -> None:
    opened = open_page(write_page(run_of_objectives(tmp_path / "run"), tmp_path / "r.html"), width=width)
    assert opened.page.evaluate("() => document.documentElement.scrollWidth") <= width
    folded = opened.page.locator(".track").filter(has_text="more").locator(".line-name:last-child")
    while folded.count():
        folded.first.click()
    boxes = opened.page.evaluate(
        """() => [...document.querySelectorAll(".track")].map(track => [track, ...track.querySelectorAll(
            ".chart-head strong, .line-name")].map(one => {
                const { left, top, right, bottom } = one.getBoundingClientRect();
                return [left, top, right, bottom, one.textContent];
            }))"""
    )
    assert max(len(names) for _, *names in boxes) > 9
    for track, *names in boxes:
        for name in names:
            assert track[0] <= name[0] < name[2] <= track[2] + 1 and track[1] <= name[1] < name[3] <= track[3] + 1, name
            for other in names:
                apart = name[2] <= other[0] or other[2] <= name[0] or name[3] <= other[1] + 1 or other[3] <= name[1] + 1
                assert other is name or apart, (name, other)


def test_objectives_have_the_flags_of_findings_and_cosines_from_minus_one_to_one(
    open_page: Open, tmp_path: Path
) -> None:
    opened = open_page(write_page(run_of_objectives(tmp_path / "run"), tmp_path / "r.html"))
    flags = opened.page.locator("#panel-objectives .flag:visible")
    assert flags.all_inner_texts() == ["1"] and "nonfinite" in (flags.first.get_attribute("title") or "")
    written = texts_of_charts(opened)
    assert "-1" in written and "0.01" not in written
    for kind, names in (("norm", ("a_first", "another", "the_third")), ("cosine", ("and another", "and the_third"))):
        track = opened.page.locator("#panel-objectives .track").filter(has_text=f"the mean of the ranks' {kind}s")
        legend = track.locator(".line-name").all_inner_texts()
        assert all(any(name in line for line in legend[:3]) for name in names) and legend[3] == "and 9 more"


def test_a_chart_is_moved_in_and_zoomed_by_the_keyboard(open_page: Open, trained: Path) -> None:
    opened = open_page(trained)
    opened.page.locator("#panel-top .chart-body").first.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowRight"):
        opened.page.keyboard.press(key)
    assert opened.text("#panel-top .at") == "step 2"
    assert opened.text("#panel-top .chart-legend .reading").strip() == "1"
    opened.page.keyboard.press("+")
    opened.redrawn()
    assert (hash_of(opened)["from"], hash_of(opened)["to"]) == ("0", "7")
    assert opened.text("#panel-top .at") == "step 2", "the chart keeps the focus, and the cursor its step"
    opened.page.keyboard.press("+")
    opened.redrawn()
    assert (hash_of(opened)["from"], hash_of(opened)["to"]) == ("0", "4")
    for _ in range(2):
        opened.page.go_back()
        opened.redrawn()
    assert "from" not in hash_of(opened)


def test_a_zoom_by_key_goes_to_the_ends_at_most_and_keeps_the_step_under_the_cursor(
    open_page: Open, trained: Path
) -> None:
    opened = open_page(trained, "#from=12&to=17")
    opened.page.locator("#panel-lines .chart-body").first.focus()
    opened.page.keyboard.press("-")
    opened.redrawn()
    assert (hash_of(opened)["from"], hash_of(opened)["to"]) == ("9", str(NUM_STEPS - 1))
    for _ in range(2):
        opened.page.keyboard.press("-")
        opened.redrawn()
    assert not {"from", "to"} & hash_of(opened).keys() and not opened.page.locator("#zoom-out").is_visible()
    opened.page.locator("#panel-map .heat-cells").focus()
    for _ in range(13):
        opened.page.keyboard.press("ArrowRight")
    for key in ("+", "+"):
        opened.page.keyboard.press(key)
        opened.redrawn()
        assert "step 12" in opened.text(".tooltip")
    opened.page.keyboard.press("ArrowRight")
    assert "step 13" in opened.text(".tooltip")


def test_a_chart_tells_a_screen_reader_the_numbers_under_its_cursor(open_page: Open, trained: Path) -> None:
    opened = open_page(trained)
    chart = opened.page.locator("#panel-lines .chart").first
    chart.locator(".chart-body").focus()
    opened.page.keyboard.press("ArrowRight")
    heard = chart.locator("[aria-live]").text_content() or ""
    assert heard.startswith("step 0: ") and float(heard.split()[-1].replace(",", "")) > 0


class Scaled(nn.Module):
    """Gives its inner module what it has multiplied."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x * self.scale)
        return out


def test_a_culprit_names_its_module_and_the_value_that_shows_it(open_page: Open, tmp_path: Path) -> None:
    for name, scale in (("a", 1.0), ("b", 1.5)):
        torch.manual_seed(0)
        model = Scaled(scale)
        with recorder.attach(model, enabled=True, rules="site=input,output keep=tensor,stats", dir=tmp_path / name):
            model(torch.ones(2, 4))
    opened = open_page(write_page(tmp_path / "a", tmp_path / "r.html", tmp_path / "b"))
    assert opened.text("#of-a").startswith("A alone: the rules of recorder check found nothing")
    assert opened.page.locator("#panel-top .flag.right").count() == 0
    told = opened.page.locator("#panel-against .findings a").first
    assert told.inner_text() == "culprit: step 0, forward of '': input of 'inner' is 1.5 times its value in A"
    assert opened.page.locator("#choose-site").input_value() == "input train"  # where the runs part


def test_two_runs_are_beside_each_other(open_page: Open, pair: Path) -> None:
    opened = open_page(pair)
    assert "different" in opened.text("#diff-verdict")
    assert "step 10" in opened.text("#panel-against .findings")
    pixels = opened.pixels("#panel-against .heat-chunk")
    step = pixels.shape[1] / NUM_STEPS
    equal, apart = pixels[4, int(4.5 * step)].tolist(), pixels[4, int(12.5 * step)].tolist()
    assert equal[:3] == [0x44, 0x01, 0x54] and apart != equal
    is_marked = (pixels[:, : int(14 * step), :3] == np.array([0xE6, 0x00, 0x7A])).all(axis=-1).any(axis=0)
    marked = is_marked.nonzero()[0] / step
    assert 9.9 < marked.min() < marked.max() < 11.1  # the culprit's cell
    assert "B: all ranks together" in opened.text("#panel-lines .chart-legend")
    assert not any(text == "false" for text in opened.page.locator("section").all_inner_texts())


def test_lines_of_the_longer_of_two_runs_go_to_its_end(open_page: Open, tmp_path: Path) -> None:
    one = run_of(tmp_path / "one", {(0, step): 2.0 for step in range(10)})
    two = run_of(tmp_path / "two", {(0, step): 1.0 + step for step in range(5, 40)})
    for a, b, side in ((one, two, "B"), (two, one, "A")):
        opened = open_page(write_page(a, tmp_path / f"{side}.html", b))
        rows = opened.page.evaluate("() => document.querySelector('#panel-lines .chart').table()")
        values = {row[0]: row[1 + (side == "B")] for row in rows[1:]}
        assert sorted(values) == list(range(40)) and rows[0][1 + (side == "B")] == f"{side}: rank 0"
        assert [step for step, value in values.items() if value is not None] == list(range(5, 40))


def test_a_dot_at_the_last_of_many_steps_is_whole(open_page: Open, tmp_path: Path) -> None:
    values = {(0, step): 1.0 for step in (0, 10**6, 10**7)}
    opened = open_page(write_page(run_of(tmp_path / "run", values), tmp_path / "r.html"))
    is_drawn = opened.pixels("#panel-lines .plot canvas")[..., 3] > 200
    height = is_drawn[: is_drawn.shape[0] // 2 + 40].sum(axis=0)
    assert not is_drawn[:, -1].any() and height[-6:].any(), "the dot ends within the canvas"
    widths = "() => [...document.querySelectorAll('.chart-body')].map((one) => one.clientWidth)"
    before = opened.page.evaluate(widths)
    opened.page.set_viewport_size({"width": 1201, "height": 900})
    opened.page.set_viewport_size({"width": 1200, "height": 900})
    opened.redrawn()
    assert opened.page.evaluate(widths) == before


def test_no_name_does_anything(open_page: Open, tmp_path: Path) -> None:
    opened = open_page(write_page(hostile_run(tmp_path / "run"), tmp_path / "r.html"))
    assert "owned" not in opened.page.title()
    assert opened.page.locator("#page script, #page img, #page iframe, #page [onerror]").count() == 0
    shown = opened.page.locator("#page").inner_text()
    assert HOSTILE[0] in shown and HOSTILE[4] in shown and "\\u202eevil" in shown
    labels = rows_of(opened)
    assert any(label.startswith("<!--") for label in labels)
    for row in range(len(labels)):
        opened.page.locator(CELLS).click(position=point_at(opened, row, 1, 2))
        opened.redrawn()
    assert "owned" not in opened.page.title()


def test_a_script_that_is_not_the_pages_own_does_not_run(browser: object, trained: Path, tmp_path: Path) -> None:
    """The policy holds: this is what would happen if something ever slipped through."""
    changed = tmp_path / "changed.html"
    injected = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"></body>"
    changed.write_text(trained.read_text().replace("</body>", injected))
    page = browser.new_page()  # type: ignore[attr-defined]
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.goto(changed.as_uri())
    page.wait_for_selector("html[data-drawn]")
    assert page.title() != "owned" and any("Content Security Policy" in text for text in said)
    page.close()


@pytest.mark.parametrize("dark", [False, True])
def test_a_narrow_window_needs_no_scrolling_to_the_side(open_page: Open, pair: Path, dark: bool) -> None:
    opened = open_page(pair, width=390, dark=dark)
    width = opened.page.evaluate("() => document.documentElement.scrollWidth")
    assert width <= 390
    back = opened.page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert (back == "rgb(255, 255, 255)") is not dark


def test_it_prints(open_page: Open, trained: Path) -> None:
    opened = open_page(trained, dark=True)
    opened.page.evaluate(
        """() => {
            const told = window.filled = {}, { prototype } = CanvasRenderingContext2D, fill = prototype.fillRect;
            prototype.fillRect = function (x, y, width, height) {
              if (height >= 10) (told[this.canvas.className] ??= []).push([x, x + width]);
              return fill.call(this, x, y, width, height);
            };
        }"""
    )
    opened.page.evaluate("() => window.dispatchEvent(new Event('beforeprint'))")
    opened.redrawn()
    filled = opened.page.evaluate("() => window.filled")
    for name in ("legend-bar", "heat-chunk"):
        pairs = [(one, other) for one, other in zip(filled[name], filled[name][1:], strict=False) if other[0] > one[0]]
        assert len(pairs) > 50 and sum(other[0] >= one[1] for one, other in pairs) <= (name == "heat-chunk"), "no gaps"
    axis = opened.pixels("#panel-map .heat-axis")[6:]  # below the mark of the finding
    assert axis[..., :3][axis[..., 3] > 200].max() < 130  # dark numbers, as paper is light
    edges = opened.page.evaluate(
        "() => [...document.querySelectorAll('main canvas')].map(one => one.getBoundingClientRect().right)"
    )
    assert 900 < max(edges) <= 1000, "all pictures have the width of paper"
    rows = opened.page.locator("#panel-map .heat-name").count()
    assert opened.page.locator("#panel-map .heat-chunk").count() == rows, "a sheet may end below any row"
    opened.page.evaluate("() => window.dispatchEvent(new Event('afterprint'))")
    opened.redrawn()
    axis = opened.pixels("#panel-map .heat-axis")[6:]
    assert axis[..., :3][axis[..., 3] > 200].min() > 130
    opened.page.emulate_media(media="print")
    assert (
        not opened.page.locator("nav").is_visible() and opened.page.locator("#panel-map .heat-chunk").first.is_visible()
    )
    assert not opened.page.locator("input:visible, select:visible, .take:visible").count()
    for whole in ("#panel-graph .box-head", "#panel-ranks .scroll", "#panel-depth", "#panel-lines"):
        style = opened.page.locator(whole).first.evaluate("one => getComputedStyle(one).breakInside")
        assert style == "avoid", whole
    printed = opened.page.pdf(print_background=True)
    assert printed.startswith(b"%PDF") and len(printed) > 20_000


@pytest.mark.parametrize(
    "values",
    [
        {(0, 0): 1.0},
        {(0, step): float("nan") for step in range(4)},
        {(rank, step): 1.0 + rank for rank in range(12) for step in range(3)},
    ],
    ids=["one step", "all NaN", "many ranks"],
)
def test_a_run_of_any_kind_is_drawn(open_page: Open, tmp_path: Path, values: dict[tuple[int, int], float]) -> None:
    opened = open_page(write_page(run_of(tmp_path / "run", values), tmp_path / "r.html"))
    assert opened.page.locator(CELLS).count() == 1
    assert opened.page.locator("#panel-lines .plot").count() == 1
    assert opened.page.get_by_text("false", exact=True).count() == 0
    for axes in ("module-rank", "rank-step") if len(values) > 20 else ():
        opened.page.select_option("#choose-axes", axes)
        opened.redrawn()
        assert len(rows_of(opened)) == {"module-rank": 2, "rank-step": 12}[axes]
    assert opened.page.locator(".verdict:has-text('could not be drawn')").count() == 0


def test_a_dump_is_marked_on_the_steps_and_told(open_page: Open, tmp_path: Path) -> None:
    reason = "spike: <b>loss</b>"
    dump = {"first_step": 6, "last_step": 9, "reason": reason, "by": "rank 1", "time_ns": 5, "rows": 8, "bytes": 128}
    run = run_of(tmp_path / "run", {(rank, step): 1.0 for rank in range(2) for step in range(NUM_STEPS)}, dumps=[dump])
    opened = open_page(write_page(run, tmp_path / "r.html"))
    assert opened.page.evaluate("() => getComputedStyle(document.documentElement).getPropertyValue('--dump')") == DUMP
    marked = (opened.pixels("#panel-map .heat-axis")[2, :, :3] == DUMP_COLOR).all(axis=1).nonzero()[0]
    width = opened.pixels("#panel-map .heat-axis").shape[1]
    assert abs(marked[0] - 6 * width / NUM_STEPS) < 2 and abs(marked[-1] - 10 * width / NUM_STEPS) < 3
    for plot in ("#panel-lines .plot canvas", "#panel-map .heat-axis"):
        assert (opened.pixels(plot)[..., :3] == DUMP_COLOR).all(axis=2).sum() > 100, plot
    text = f"dump of steps 6 to 9: {reason} (rank 1)"
    for column, is_inside in ((6, True), (9, True), (5, False), (10, False)):
        opened.page.locator(CELLS).hover(position=point_at(opened, 0, column))
        assert (text in opened.text(".tooltip")) is is_inside
    opened.page.locator("#panel-top .findings a", has_text=f"{text}; 16 rows").click()
    opened.redrawn()
    assert (hash_of(opened)["from"], hash_of(opened)["to"]) == ("6", "9")
    assert opened.text("#zoom-out") == "all steps (now 6 to 9)"
    assert opened.page.locator("b", has_text="loss").count() == 0


def test_what_check_says_is_told_with_a_link_to_the_lines(open_page: Open, trained: Path) -> None:
    opened = open_page(trained)
    opened.page.locator("#panel-top .findings a", has_text="nonfinite: the value is not finite").first.click()
    opened.redrawn()
    assert opened.text("#panel-lines .chart-head strong") == "head output"
    assert hash_of(opened)["step"] == "15"


def run_of_optimizer(
    path: Path,
    *,
    rate: float = 1e-3,
    other_rate: float | None = None,
    has_updates: bool = False,
    has_bias: bool = False,
) -> Path:
    """AdamW trains two layers at a rate that leaps at step 150; the loss spikes a step later. The head is frozen."""
    run, rows = make_run(path), list[dict[str, Any]]()
    for step in range(200):
        for name, value in (
            ("loss", 9.0 if step == 151 else 1 / (1 + step / 50)),
            ("lr.AdamW.0", 100 * rate if step == 150 else rate),
            *([("lr.AdamW.1", other_rate)] if other_rate else []),
        ):
            rows.append(
                make_row(0, np.float64(value), step=step, site="scalar", name=name, module_path="", encoding=None)
            )
        for layer in ("net.first", "net.last"):
            for site in ("param", "grad"):
                size = 0.5 + step * 1e-5 if site == "param" else 0.01
                values = np.where(np.arange(100).reshape(10, 10) % 2, -size, size).astype(np.float32)
                common = {"step": step, "site": site, "name": "weight", "phase": "optimizer", "encoding": None}
                rows.append(make_row(0, values, module_path=layer, **common))
                if has_bias:
                    rows.append(make_row(0, values[0], module_path=layer, **common | {"name": "bias"}))
    writer = HandmadeWriter(run)
    writer.add_shard([[row | {"seq": seq} for seq, row in enumerate(rows)]], kind="stats")
    frozen = module("net.head", "Linear", sites=["param"], frozen=["weight"])
    layers = [
        module("net.first", "Linear"),
        module("net.last", "Linear"),
        module("net.idle", "Linear", sites=["param"]),
    ]
    if has_updates:
        for described in layers[:2]:
            described["rates"] = {"weight": "lr.AdamW.0"}
        common = {
            "site": "probe",
            "name": "update weight",
            "phase": "optimizer",
            "note": '{"dtype":"float32","numel":100}',
        }
        sizes = {"net.first": 10 * rate, "net.last": 20 * rate}
        probed = [
            make_row(
                number,
                np.where(np.arange(200) == 150, 100 * size, size).astype(np.float32),
                step=0,
                module_path=layer,
                **common,
            )
            for number, (layer, size) in enumerate(sizes.items())
        ]
        writer.add_shard([[row | {"seq": len(rows) + number} for number, row in enumerate(probed)]], kind="probe")
    modules = [module("", "Net"), *layers, frozen]
    writer.finish(roots=[{"name": "model", "class": "Net", "modules": modules}], rules=[f"rate={rate}"])
    return run


def test_a_finding_about_the_loss_shows_the_loss_around_its_step(open_page: Open, tmp_path: Path) -> None:
    opened = open_page(write_page(run_of_optimizer(tmp_path / "run"), tmp_path / "r.html"))
    assert "the learning rate lr.AdamW.0 rose 100 times at step 150" in opened.text("#panel-top .findings tbody tr")
    opened.page.locator("#panel-top .findings a").first.click()
    opened.redrawn()
    address = hash_of(opened)
    assert (address["view"], address["from"], address["to"], address["step"]) == ("top", "127", "175", "151")
    tracks = opened.page.locator("#panel-top .track strong").all_inner_texts()
    assert tracks == ["loss", "gradient norm", "lr.AdamW.0"]


def test_steps_of_the_optimizer_are_set_against_what_is_usual(open_page: Open, tmp_path: Path) -> None:
    page = write_page(run_of_optimizer(tmp_path / "run", has_updates=True), tmp_path / "r.html")
    opened = open_page(page, "#site=param&stat=update")
    for name, size in (("first", "0.002"), ("last", "0.004")):
        opened.page.locator(CELLS).hover(position=point_at(opened, rows_of(opened).index(name), 20, 200))
        texts = opened.page.locator(".tooltip div").all_inner_texts()
        assert any(text.endswith(f"step of the optimizer / weight: {size}") for text in texts)
    idle = opened.page.locator("#panel-map .heat-name").nth(rows_of(opened).index("idle"))
    assert idle.inner_text().endswith("in no optimizer")
    assert opened.page.locator("#panel-map .legend-ticks span").nth(1).inner_text() == "1"
    assert "How far the step of the optimizer moved the weight" in opened.text("#panel-map .note")
    head = rows_of(opened).index("head")
    assert opened.page.locator("#panel-map .heat-name").nth(head).inner_text().endswith("frozen")
    opened.page.locator(CELLS).hover(position=point_at(opened, head, 20, 200))
    assert "requires_grad is False" in opened.text(".tooltip")
    exact = "of a sample of 1,024 elements; parameters of at most 1,024 elements are exact"
    for panel in ("#panel-map .note", "#panel-lines .chart-head", "#panel-depth .note"):
        assert exact in opened.text(panel)
    assert csv_of(opened, "By depth", tmp_path / "depth.csv")[1] == ["net.first", "0.00199", "0.00199", "0.199"]
    body = opened.page.locator("#panel-depth .chart-body")
    assert "4 modules" in (body.get_attribute("aria-label") or "")
    body.focus()
    for _ in range(4):
        opened.page.keyboard.press("ArrowRight")
    assert "net.head Linear: frozen" in opened.text("#panel-depth .note")
    assert "net.head (frozen)" in texts_of_charts(opened)


def test_a_vector_has_no_update_and_the_page_says_so(open_page: Open, tmp_path: Path) -> None:
    page = write_page(run_of_optimizer(tmp_path / "run", has_bias=True, has_updates=True), tmp_path / "r.html")
    opened = open_page(page, "#site=param&stat=update&name=bias")
    assert "Dotted: a vector, such as a bias or the weight of a norm, is not set against its norm" in opened.text(
        "#panel-map .note"
    )
    opened.page.locator(CELLS).hover(position=point_at(opened, rows_of(opened).index("first"), 20, 200))
    assert "a vector, such as a bias" in opened.text(".tooltip")


def test_the_line_of_the_usual_step_says_its_number(open_page: Open, tmp_path: Path) -> None:
    page = write_page(run_of_optimizer(tmp_path / "run", rate=1e-4, has_updates=True), tmp_path / "r.html")
    opened = open_page(page, "#site=param&stat=update")
    assert opened.page.locator("#panel-depth [aria-current='true']").inner_text() == "updates"
    opened.page.evaluate(
        """() => {
            const { prototype } = CanvasRenderingContext2D, write = prototype.fillText;
            prototype.fillText = function (text, ...more) {
              const plot = this.canvas.closest(".plot"), left = plot?.querySelector(".u-over").offsetLeft;
              if (text === "1e-3") window.label = [this.textAlign, more[0] / devicePixelRatio, left];
              return write.call(this, text, ...more);
            };
        }"""
    )
    written = texts_of_charts(opened)
    assert "1e-3" in written and "step / weight" in written, "the title of the axis says what it is over"
    align, x, left_of_lines = opened.page.evaluate("() => window.label")
    assert align == "left" and x > left_of_lines, "the label is beside the numbers of the axis, not over them"


def test_rows_that_only_single_ranks_have_say_so_below_the_map(open_page: Open, tmp_path: Path) -> None:
    values = {(rank, step): 1.0 + step + rank for rank in (0, 1) for step in range(4)}
    run = run_of(tmp_path / "run", values, site="param", name="weight", phase="optimizer")
    opened = open_page(write_page(run, tmp_path / "r.html"))
    assert "1 row has values of each rank and none of all: choose a rank" in opened.text("#panel-map .note")
    opened.page.select_option("#choose-lane", label="rank 1")
    opened.redrawn()
    assert "choose a rank" not in opened.text("#panel-map .note")


def test_the_slider_shows_a_step_by_depth(open_page: Open, trained: Path) -> None:
    opened = open_page(trained, "#view=depth&step=3")
    assert opened.text("#panel-depth .slide .dim").startswith("step 3: largest magnitude of output")
    label = opened.page.locator("#panel-depth .chart-body").get_attribute("aria-label") or ""
    assert label.startswith("largest magnitude of output of 7 modules at step 3"), "containers are modules, too"
    slider = opened.page.locator("#depth-step")
    slider.focus()
    opened.page.keyboard.press("ArrowRight")
    opened.redrawn()
    assert hash_of(opened)["step"] == "4" and slider.get_attribute("aria-valuetext") == "step 4"
    opened.page.locator("#panel-depth .chart-body").focus()
    for key in ("ArrowRight", "ArrowRight", "Enter"):
        opened.page.keyboard.press(key)
    opened.redrawn()
    assert opened.text("#panel-lines .chart-head strong") == "blocks.0.fc output"


def test_zeros_and_modules_without_neighbours_are_drawn_by_depth(open_page: Open, tmp_path: Path) -> None:
    run, rows = make_run(tmp_path / "run"), list[dict[str, Any]]()
    sizes = {"a": (1.0, 100.0), "c": (0.0, 0.0), "e": (0.001, 0.002)}
    for path in "abcde":
        rows.append(make_row(len(rows), np.ones(1, np.float32), site="output", module_path=path, encoding=None))
    for step in range(2):
        for path, own in sizes.items():
            common: dict[str, Any] = {"site": "param", "name": "weight", "phase": "optimizer", "encoding": None}
            rows.append(make_row(len(rows), np.full(1, own[step], np.float32), step=step, module_path=path, **common))
    frozen = {"sites": ["param"], "frozen": ["weight"]}
    modules = [module(path, "Linear", **({} if path in sizes else frozen)) for path in "abcde"]
    writer = HandmadeWriter(run)
    writer.add_shard([rows], kind="stats")
    writer.finish(roots=[{"name": "model", "class": "Net", "modules": [module("", "Net"), *modules]}])
    opened = open_page(write_page(run, tmp_path / "r.html"), "#site=param&stat=l2&step=0")
    assert opened.text("#panel-depth .slide .dim").endswith("the band spans all steps; zeros lie at the lower edge")
    over = opened.page.locator("#panel-depth .u-over")
    left, top, width, height = over.evaluate(
        "one => [one.offsetLeft, one.offsetTop, one.clientWidth, one.clientHeight]"
    )
    pixels = opened.pixels("#panel-depth canvas")[top : top + height].astype(int)
    drawn = []
    for path in "ae":
        x = left + round(("abcde".index(path) + 0.5) / 5 * width)
        bar, beside = ((pixels[:, at, 3] > 0).sum() for at in (x - 2, x - 12))
        drawn.append(int(bar - beside))
    assert drawn[0] > height / 5 and drawn[1] > 3, "bars from the smallest to the largest of all steps"
    middle = pixels[:, left + round(0.5 * width)]
    is_dot = middle[:, 2] - middle[:, 0] > 60
    assert is_dot[-4:].any() and not is_dot[:-8].any(), "zero is at the lower edge"
    assert {"0.01", "0.1", "1", "10"} <= set(texts_of_charts(opened)), "the axis is logarithmic"


def test_a_picture_is_taken_along_as_png_and_its_numbers_as_csv(open_page: Open, trained: Path, tmp_path: Path) -> None:
    opened = open_page(trained)
    taken = {}
    for kind in ("PNG", "CSV"):
        with opened.page.expect_download() as download:
            opened.page.get_by_role("button", name=f"Map as {kind}").click()
        download.value.save_as(tmp_path / download.value.suggested_filename)
        taken[kind] = (tmp_path / f"run-map.{kind.lower()}").read_bytes()
    assert taken["PNG"].startswith(b"\x89PNG") and len(taken["PNG"]) > 5_000
    head, *rows = [line.split(",") for line in taken["CSV"].decode().splitlines()]
    assert head == ["", *(f"step {step}" for step in range(NUM_STEPS))]
    of_head = next(row for row in rows if row[0] == "head")
    assert of_head[16] == "not finite" and float(of_head[1]) > 0


def csv_of(opened: Opened, panel: str, path: Path) -> list[list[str]]:
    with opened.page.expect_download(timeout=5_000) as download:
        opened.page.get_by_role("button", name=f"{panel} as CSV").click()
    download.value.save_as(path)
    return list(csv.reader(path.read_text().splitlines()))


def test_ranks_and_graph_have_their_numbers_as_csv(open_page: Open, trained: Path, tmp_path: Path) -> None:
    opened = open_page(trained)
    ranks = csv_of(opened, "Ranks", tmp_path / "ranks.csv")
    assert ranks[0][0] == "rank" and [row[0] for row in ranks[1:]] == ["0", "1"]
    head, *rows = csv_of(opened, "Graph", tmp_path / "graph.csv")
    assert head[:3] == ["module", "class", "shape"]
    blocks = ["blocks", "blocks.0", "blocks.0.fc", "blocks.1", "blocks.1.fc"]
    assert [row[0] for row in rows] == ["(the model)", "stem", *blocks, "head"]
    assert next(row for row in rows if row[0] == "head")[3] == "nan"


def test_a_step_that_is_not_finite_is_nan_in_csv_and_no_smallest_number(open_page: Open, tmp_path: Path) -> None:
    run, writer = make_run(tmp_path / "run"), HandmadeWriter(tmp_path / "run")
    rows: list[dict[str, object]] = []
    for step, value in enumerate((2.0, 1.0, np.nan)):
        for more in ({"module_path": "a"}, {"module_path": "", "site": "scalar", "name": "loss"}):
            row = make_row(len(rows), np.full(4 if len(more) == 1 else (), value, np.float32), step=step)
            rows.append(row | more | {"encoding": None, "payload_bytes": None, "data": None})
    writer.add_shard([rows], kind="stats")
    writer.finish(roots=[{"name": "model", "class": "Net", "modules": [module("a", "Linear")]}])
    opened = open_page(write_page(run, tmp_path / "r.html"), "#step=2")
    of_depth = csv_of(opened, "By depth", tmp_path / "depth.csv")
    assert of_depth[1] == ["a", "nan", "1", "2"]
    head = csv_of(opened, "Run", tmp_path / "top.csv")
    at = head.index(["loss"])
    assert [row[1] for row in head[at + 2 : at + 5]] == ["2", "1", "nan"]
    assert ["facts"] in head and ["what stands out"] in head


def test_many_ranks_are_a_grid_by_node(open_page: Open, tmp_path: Path) -> None:
    write_run(tmp_path / "run", Shape(ranks=48, steps=30))
    opened = open_page(write_page(tmp_path / "run", tmp_path / "r.html"))
    assert rows_of(opened, "ranks") == [f"node {node}" for node in range(6)]
    cells = opened.page.locator("#panel-ranks .heat-cells")
    width = cells.evaluate("one => one.clientWidth")
    cells.click(position={"x": 3.5 * width / 8, "y": 2 * ROW_PIXELS + 5})
    opened.redrawn()
    assert hash_of(opened)["rank"] == "19" and opened.text("#panel-ranks tr.chosen td") == "19"
    cells.hover(position={"x": 3.5 * width / 8, "y": 2 * ROW_PIXELS + 5})
    assert opened.page.locator(".tooltip div").all_inner_texts()[:2] == ["rank 19", "node0002, node 2, GPU 3"]


def test_lines_of_several_nodes_have_a_mark_for_each_node(open_page: Open, tmp_path: Path) -> None:
    write_run(tmp_path / "run", Shape(ranks=320, steps=10, modules=2))
    opened = open_page(write_page(tmp_path / "run", tmp_path / "r.html"), width=390)
    assert rows_of(opened, "ranks")[:2] == ["nodes 0–1", "2–3"]
    is_mark = opened.pixels("#panel-ranks .heat-axis")[1, :, 3] > 0
    assert np.count_nonzero(np.diff(is_mark.astype(int)) == 1) == 2
    assert opened.page.evaluate("() => document.documentElement.scrollWidth") <= 390


def test_two_runs_begin_with_what_differs_between_them(open_page: Open, tmp_path: Path) -> None:
    one, two = run_of_optimizer(tmp_path / "one"), run_of_optimizer(tmp_path / "two", rate=2e-3)
    opened = open_page(write_page(one, tmp_path / "r.html", two))
    rows = opened.page.locator("#panel-against .unlike tbody tr").all_inner_texts()
    assert [row.split() for row in rows] == [["rule", "rate=0.001", "rate=0.002"]]
    norms = opened.page.locator("#panel-top .track", has_text="gradient norm").locator(".chart-legend")
    assert norms.inner_text().split("\n") == ["A: rank 0", "B: rank 0"]
    assert "of the parameters that an optimizer has" in opened.text("#panel-top .tracks")
    assert (
        opened.text("#of-a")
        == f"Of A alone. For B: recorder check {shortest_text_of(two, recorder.open_run(two).name)}"
    )
    assert opened.text("#panel-top .line").startswith("A alone:") and opened.text("#panel-lines h2") == "Lines"
    assert opened.text("#panel-ranks h2") == "Ranks of A alone"
    runs = [f"{run.parent.name}/{recorder.open_run(run).name}" for run in (one, two)]
    assert opened.text("h1") == f"A: {runs[0]}, B: {runs[1]}"


def test_rates_of_two_runs_are_labelled_and_all_are_named(open_page: Open, tmp_path: Path) -> None:
    one, two = (run_of_optimizer(tmp_path / name, other_rate=rate) for name, rate in (("one", 1e-3), ("two", 2e-3)))
    opened = open_page(write_page(one, tmp_path / "r.html", two))
    assert opened.text("#panel-top p.note") == "lr.AdamW.1: A 0.001, B 0.002 at all steps."
    strip = opened.page.locator("#panel-top .track", has_text="lr.AdamW.0").locator(".chart-legend")
    assert strip.inner_text().split("\n") == ["A: rank 0", "B: rank 0"]


@pytest.mark.parametrize(
    ("rates", "told"),
    [
        ([1e-3, 1e-3], "lr.SGD.0: 0.001 at all steps."),
        ([1e-3, 2e-3], "lr.SGD.0: rank 0 0.001, rank 1 0.002 at all steps."),
    ],
)
def test_a_rate_that_is_another_on_a_rank_is_told_of_each(
    open_page: Open, tmp_path: Path, rates: list[float], told: str
) -> None:
    run = make_run(tmp_path / "run", world_size=2)
    for rank, rate in enumerate(rates):
        writer, scalar = HandmadeWriter(run, rank), {"module_path": "", "site": "scalar", "encoding": None}
        values = [(step, name, value) for step in range(4) for name, value in (("loss", 1.0), ("lr.SGD.0", rate))]
        rows = [
            make_row(seq, np.float64(value), step=step, rank=rank, name=name, **scalar)
            for seq, (step, name, value) in enumerate(values)
        ]
        writer.add_shard([rows], kind="stats")
        writer.finish()
    notes = open_page(write_page(run, tmp_path / "r.html")).page.locator("#panel-top p.note").all_inner_texts()
    assert told in [note.strip() for note in notes]


def test_the_map_leads_to_a_sites_values_in_another_mode(open_page: Open, tmp_path: Path) -> None:
    writer, modes = HandmadeWriter(make_run(tmp_path / "run"), 0), ["train", "train", "eval", "eval"]
    rows = [make_row(i, np.full(2, 1.0 + i), step=i, mode=mode, encoding=None) for i, mode in enumerate(modes)]
    writer.add_shard([rows], kind="stats")
    writer.finish()
    opened = open_page(write_page(tmp_path / "run", tmp_path / "r.html"))
    assert opened.text("#panel-map > .note").endswith("Values in another mode: output (eval)")
    opened.page.locator("#panel-map > .note a").click()
    assert hash_of(opened)["mode"] == "eval"
    assert opened.text("#panel-map > .note").endswith("Values in another mode: output")


def test_objectives_of_two_tensors_have_pictures_of_their_own(open_page: Open, tmp_path: Path) -> None:
    run, names = make_run(tmp_path / "run"), ("norm.main", "norm.aux", "cosine.main:aux")
    common: dict[str, Any] = {"module_path": "", "site": "scalar", "encoding": None}
    rows = [
        make_row(0, np.float64(1.0), step=step, name=f"objective.{name}{number}", **common)
        for step in range(4) for number in ("#2", "") for name in names
    ]  # fmt: skip
    writer = HandmadeWriter(run)
    writer.add_shard([[row | {"seq": seq} for seq, row in enumerate(rows)]], kind="stats")
    writer.finish()
    opened = open_page(write_page(run, tmp_path / "r.html"))
    told = opened.page.locator("#panel-objectives .chart-head .dim").all_inner_texts()
    assert told == [f"of objectives in (the model), tensor {number}" for number in (1, 1, 2, 2)]


def test_a_line_of_all_ranks_says_what_it_leaves_out(open_page: Open, trained: Path) -> None:
    opened = open_page(trained, "#site=output&module=head")
    legend = opened.text("#panel-lines .chart-legend")
    assert "all ranks together (finite elements alone where a rank is not finite)" in legend or (
        "all ranks together (no number where a rank is not finite)" in legend
    )


def test_the_spectrum_of_a_weight_says_its_stable_rank(open_page: Open, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    writer = HandmadeWriter(run)
    common: dict[str, Any] = {"module_path": "fc", "site": "param", "name": "weight", "phase": "optimizer"}
    sizes = ([2.0, 2, 1, 0], [4.0, 0, 0, 0])
    writer.add_shard(
        [[make_row(s, np.diag(size).astype(np.float32), step=s, **common) for s, size in enumerate(sizes)]]
    )
    writer.finish()
    opened = open_page(write_page(run, tmp_path / "r.html"))
    told = opened.page.locator("#panel-images .dim").all_inner_texts()
    assert [text.split(" · ")[-1] for text in told] == ["stable rank 2.3 of 4", "stable rank 1 of 4"]
    assert opened.text("#panel-images h2").startswith("Spectra")
    first = opened.pixels("#panel-images .tile")
    tall = [(first[:, column, 3] > 0).mean() for column in (4, 300)]
    assert tall[0] == pytest.approx(0.5, abs=0.03) and tall[1] < 0.03  # half of the largest of both records
    opened.page.emulate_media(color_scheme="dark")
    opened.redrawn()
    dark = opened.pixels("#panel-images .tile")
    assert dark.shape == first.shape and dark[-1, 4].tolist() != first[-1, 4].tolist()
    assert opened.page.locator("#panel-images .image").count() == 2


def test_of_two_models_with_the_same_names_one_is_chosen(open_page: Open, tmp_path: Path) -> None:
    run, rows = make_run(tmp_path / "run"), list[dict[str, Any]]()
    for step in range(4):
        for root, size in (("model", 1.0), ("model_1", 8.0)):
            of = {"root": root, "module_path": "0", "site": "output", "step": step, "encoding": None}
            rows.append(make_row(len(rows), np.full(int(4 * size), size, np.float32), **of))
    writer = HandmadeWriter(run)
    writer.add_shard([rows], kind="stats")
    layers = [("model", "ReLU"), ("model_1", "LeakyReLU")]
    writer.finish(
        roots=[
            {"name": root, "class": "Net", "modules": [module("", "Net"), module("0", name)]} for root, name in layers
        ]
    )
    opened = open_page(write_page(run, tmp_path / "r.html"), "#site=output&stat=absmax")
    assert opened.page.locator("#choose-root option").all_inner_texts() == ["model", "model_1"]
    assert "ReLU or LeakyReLU" in opened.text("#panel-map")
    for root, text in (("model", "1"), ("model_1", "8")):
        opened.page.select_option("#choose-root", root)
        opened.redrawn()
        opened.page.locator(CELLS).hover(position=point_at(opened, rows_of(opened).index("0"), 2, 4))
        assert any(line.endswith(f": {text}") for line in opened.page.locator(".tooltip div").all_inner_texts())
        assert opened.text("#panel-graph [data-path='0'] .box-shape") == f"[{4 * int(text)}]"


def test_each_optimizer_of_two_models_has_its_loss(open_page: Open, tmp_path: Path) -> None:
    opened = open_page(write_page(run_of_two_models(tmp_path / "run"), tmp_path / "r.html"))
    tracks = opened.page.locator("#panel-top .track")
    assert tracks.locator("strong").all_inner_texts() == ["loss", "Adam loss", "gradient norm"]
    notes = tracks.locator(".chart-head .dim").all_inner_texts()
    assert notes[0] == "before the steps of Adam_1, which trains model_1"
    assert notes[1] == "before the steps of Adam, which trains model"
    assert "of all models" in notes, "the norm of the gradients"
    head = csv_of(opened, "Run", tmp_path / "top.csv")
    for name, value in (("loss", "3"), ("Adam loss", "1")):
        at = head.index([name])
        assert [row[1] for row in head[at + 2 : at + 6]] == [value] * 4


def test_a_loss_of_micro_batches_says_that_it_is_their_mean(open_page: Open, tmp_path: Path) -> None:
    rows = [
        make_row(0, np.float64(1 + repeat), step=step, site="scalar", name="loss", module_path="", repeat=repeat)
        for step in range(3) for repeat in range(4)
    ]  # fmt: skip
    run, writer = make_run(tmp_path / "run"), HandmadeWriter(tmp_path / "run")
    writer.add_shard([[row | {"seq": seq, "encoding": None} for seq, row in enumerate(rows)]], kind="stats")
    writer.finish()
    opened = open_page(write_page(run, tmp_path / "r.html"))
    assert opened.text("#panel-top .track .dim") == "the mean of its 4 values in a step"


def test_the_norm_of_gradients_has_a_line_for_each_rank_where_ranks_differ(open_page: Open, tmp_path: Path) -> None:
    values = {(rank, step): 1.0 + 9 * rank for rank in (0, 1) for step in range(4)}
    run = run_of(tmp_path / "run", values, site="grad", name="weight", phase="optimizer")
    opened = open_page(write_page(run, tmp_path / "r.html"))
    track = opened.page.locator("#panel-top .track", has_text="gradient norm")
    assert track.locator(".line-name").all_inner_texts() == ["rank 0", "rank 1"]
    assert "of each rank: the ranks have gradients of their own" in track.inner_text()


def test_a_run_that_died_of_an_exception_says_so_and_its_ranks_in_words(open_page: Open, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for rank in (0, 1):
        writer = HandmadeWriter(run, rank)
        writer.add_shard([[make_row(step, np.ones(4, np.float32), step=step) for step in range(3)]], kind="stats")
        event = {"kind": "exception", "message": "ValueError: no\u202etext", "time_ns": 1, "count": 1}
        writer.finish(events=[event] * rank)
    line = open_page(write_page(run, tmp_path / "r.html")).text("#panel-top .line")
    assert "ranks 2" in line and "0 to 1" not in line
    assert "2 closed, 1 rank with the exception ValueError: no" in line and "\u202e" not in line


def test_images_have_a_row_each_as_csv(open_page: Open, tmp_path: Path) -> None:
    run, writer = make_run(tmp_path / "run"), HandmadeWriter(tmp_path / "run")
    common: dict[str, Any] = {"module_path": "fc", "site": "param", "name": "weight", "phase": "optimizer"}
    writer.add_shard([[make_row(0, np.diag([2.0, 2, 1, 0]).astype(np.float32), step=0, **common)]])
    writer.finish()
    opened = open_page(write_page(run, tmp_path / "r.html"))
    head, row = csv_of(opened, "Spectra", tmp_path / "images.csv")
    assert head[:4] == ["module", "value", "name", "kind"] and row[:5] == ["fc", "param", "weight", "spectrum", "0"]
    assert [float(one) for one in row[head.index("singular values") :]] == pytest.approx([2, 2, 1, 0], abs=0.01)


def test_modules_stand_in_the_order_of_the_model_where_gradients_come_first(open_page: Open, tmp_path: Path) -> None:
    run, writer, rows = make_run(tmp_path / "run"), HandmadeWriter(tmp_path / "run"), list[dict[str, Any]]()
    for path in ("last", "first"):  # backward
        of = {"module_path": path, "site": "grad", "name": "weight", "phase": "optimizer"}
        rows.append(make_row(len(rows), np.ones((4, 4), np.float32), **of))
    writer.add_shard([rows], kind="stats")
    layers = [module("", "Net"), module("first", "Linear"), module("last", "Linear")]
    writer.finish(roots=[{"name": "model", "class": "Net", "modules": layers}])
    opened = open_page(write_page(run, tmp_path / "r.html"))
    assert rows_of(opened) == ["first", "last"]
    assert [row[0] for row in csv_of(opened, "Graph", tmp_path / "g.csv")[1:]] == ["(the model)", "first", "last"]
