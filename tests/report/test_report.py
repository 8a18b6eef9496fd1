"""`recorder report`: what the page holds, for sound runs and for all others, and how bad input is refused."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image, ImageDraw

import recorder
from recorder.analyze.doctor import reply
from recorder.cli.commands import pages
from recorder.columns import COUNTS, STATISTICS
from recorder.globalview.view import GlobalView
from recorder.numerics.histogram import Histogram
from recorder.numerics.units import packed
from recorder.report import statistics
from recorder.report.axes import Axes, DrawnSeries, step_rows
from recorder.report.collect import collect
from recorder.report.page import page, policy, script
from recorder.report.picture import write_picture
from recorder.report.report import write_report
from recorder.report.statistics import StatisticsBlocks
from recorder.report.top import Highlight, folded
from recorder.run.run import Run
from tests.rigs.command_line import Cli, cli
from tests.rigs.handmade import HandmadeWriter, make_row, make_run
from tests.rigs.report_pages import (
    HOSTILE,
    hostile_run,
    read_page,
    run_of,
    run_of_two_models,
    unpacked,
    values_of,
)  # fmt: skip
from tests.rigs.small_runs import make_training
from tests.rigs.synthetic import Shape, write_run

__all__ = ["cli"]
_JUMPS = "'net.fc' output jumps: its l2 at step {} is {} times the largest of the records before it"
GOLDEN = Path(__file__).parents[1] / "golden" / "v1.1"


def test_the_page_holds_the_numbers_of_the_rows(cli: Cli, tmp_path: Path) -> None:
    done = cli("report", GOLDEN, "-o", tmp_path / "r.html")
    assert done.exit_code == 0 and "r.html: " in done.out
    blocks = read_page(tmp_path / "r.html")
    axes = blocks["axes"].data
    numbers, _ = values_of(blocks["values/absmax"])
    modules = [row[0] for row in blocks["modules"].data["modules"]]
    run = recorder.open_run(GOLDEN)
    rows = run.table(["rank", "step", "module_path", "site", "name", "mode", "absmax", "part"]).to_pylist()
    compared = 0
    for row in rows:
        if row["site"] == "scalar" or row["part"] or row["absmax"] is None:
            continue
        key = [modules.index(row["module_path"]), row["site"], row["name"], row["mode"]]
        series = [one[:4] for one in axes["series"]].index(key)
        lane = [lane["rank"] for lane in axes["lanes"]].index(row["rank"])
        drawn = numbers[series, lane, axes["steps"].index(row["step"])]
        compared += 1
        assert drawn >= row["absmax"] * 0.99  # of several calls of a step the largest is drawn
    assert compared > 50


def test_values_of_all_ranks_are_those_of_the_global_view(cli: Cli, tmp_path: Path) -> None:
    assert cli("report", GOLDEN, "-o", tmp_path / "r.html").exit_code == 0
    blocks = read_page(tmp_path / "r.html")
    axes, (numbers, _) = blocks["axes"].data, values_of(blocks["values/l2"])
    assert axes["lanes"][0] == {"kind": "global", "rank": None}
    wanted = {
        (row["module_path"], row["site"], row["name"], row["step"]): row["l2"]
        for row in recorder.open_run(GOLDEN).view().rows().table.to_pylist()
        if row["rank"] is None and row["site"] in ("param", "grad") and row["l2"] is not None
    }
    modules = [row[0] for row in blocks["modules"].data["modules"]]
    assert len(wanted) > 10
    for (module, site, name, step), l2 in wanted.items():
        series = [one[:3] for one in axes["series"]].index([modules.index(module), site, name])
        assert numbers[series, 0, axes["steps"].index(step)] == pytest.approx(l2, rel=1e-2, abs=1e-6)


def test_a_file_is_not_replaced_unless_asked(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "r.html"
    out.write_text("mine")
    refused = cli("report", GOLDEN, "-o", out)
    assert refused.exit_code == 2 and "exists" in refused.err and out.read_text() == "mine"
    assert cli("report", GOLDEN, "-o", out, "--force").exit_code == 0
    assert out.read_text().startswith("<!doctype html>")
    assert list(tmp_path.iterdir()) == [out]


def test_the_progress_begins_before_the_first_look_and_ends_at_its_total(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    totals: list[int] = []
    said: list[int] = []

    @contextmanager
    def noted(title: str, total: int, unit: str = "") -> Iterator[Callable[[int], None]]:
        totals.append(total)
        yield said.append

    checks_of = reply.checks_of

    def doctor(run: Run) -> Iterator[reply.Check]:
        assert totals, "recorder doctor is asked before anything is said"
        return checks_of(run)

    monkeypatch.setattr(pages, "progress", noted)
    monkeypatch.setattr(reply, "checks_of", doctor)
    cli("report", GOLDEN, "-o", tmp_path / "r.html")
    assert totals == [sum(said)] and len(said) >= 4


def test_without_a_name_the_file_is_report_html(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = cli("report", GOLDEN, "--json")
    assert found.exit_code == 0 and found.json["path"] == "report.html"
    assert (tmp_path / "report.html").stat().st_size == found.json["bytes"]


def test_a_run_of_tokens_alone_is_told_what_to_add(cli: Cli, tmp_path: Path) -> None:
    model = torch.nn.Embedding(5, 4)
    for rules in ("site=input,output keep=tokens", "site=input,output keep=tokens; site=output keep=stats"):
        with recorder.attach(model, enabled=True, dir=str(tmp_path), roots="any", rules=rules):
            model(torch.arange(4).reshape(1, 4))
        done = cli("report", tmp_path, "-o", tmp_path / "r.html")
        assert done.exit_code == (0 if "keep=stats" in rules else 2)
        assert ("no rows to draw but those of keep=tokens" in done.err) == ("keep=stats" not in rules)


def test_what_cannot_be_drawn_leaves_no_file(cli: Cli, tmp_path: Path) -> None:
    empty = make_run(tmp_path / "empty")
    HandmadeWriter(empty).finish()
    bare = run_of(tmp_path / "bare", {(0, 0): 1.0})
    nothing = dict.fromkeys((*STATISTICS, *COUNTS))
    bare = run_of(tmp_path / "no-statistics", {(0, 0): 1.0}, keep="tensor", **nothing)
    out = tmp_path / "r.html"
    for arguments, said in (
        (["report", tmp_path / "nowhere"], "nowhere"),
        (["report", empty], "RECORDER_RULES='keep=stats'"),
        (["report", bare], "site=output,grad_output,param,grad keep=stats"),
        (["report", GOLDEN, "--statistics", "l3"], "there are absmax, l2"),
        (["report", GOLDEN, "--statistics", "l2,"], "commas"),
        (["report", GOLDEN, "--against", tmp_path / "nowhere"], "nowhere"),
        (["report", GOLDEN, "--against", empty], f"nothing to compare; why: recorder doctor {tmp_path}/empty"),
    ):
        found = cli(*arguments, "-o", out)
        assert found.exit_code == 2 and said in found.err, found.err
        assert found.err.count("\n") == 1 and not out.exists()


def test_only_the_statistics_that_are_asked_for_are_drawn(cli: Cli, tmp_path: Path) -> None:
    assert cli("report", GOLDEN, "-o", tmp_path / "r.html", "--statistics", "std,mean").exit_code == 0
    blocks = read_page(tmp_path / "r.html")
    assert blocks["axes"].data["statistics"] == ["std", "mean"]
    assert "values/l2" not in blocks and "values/nan_count" in blocks


def test_no_text_of_a_run_is_markup(cli: Cli, tmp_path: Path) -> None:
    run = hostile_run(tmp_path / "run")
    done = cli("report", run, "-o", tmp_path / "r.html")
    assert done.exit_code == 1  # the run says that something failed
    text = (tmp_path / "r.html").read_text()
    assert "document.title" not in text.replace("&lt;script&gt;document.title", "")
    inside = re.findall(r"<(/?\w+)", re.sub(r"<script>.*?</script>|<style>.*?</style>", "", text, flags=re.DOTALL))
    assert set(inside) == {
        "html", "/html", "head", "/head", "meta", "title", "/title", "body", "/body", "div", "/div", "noscript",
        "/noscript", "script", "/script",
    }  # fmt: skip
    blocks = read_page(tmp_path / "r.html")
    assert set(HOSTILE) <= {row[0] for row in blocks["modules"].data["modules"]}


def test_the_policy_allows_these_scripts_and_no_network(cli: Cli, tmp_path: Path) -> None:
    assert cli("report", GOLDEN, "-o", tmp_path / "r.html").exit_code == 0
    text = (tmp_path / "r.html").read_text()
    assert f'content="{policy()}"' in text
    assert policy().startswith("default-src 'none'; script-src 'sha256-") and "unsafe" not in policy()
    assert "http" not in re.sub(r"https?://(github.com|www.w3.org)/\S*", "", text + script()).replace("http-equiv", "")


def test_a_run_that_is_nothing_but_nan_is_drawn(cli: Cli, tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", {(0, step): float("nan") for step in range(3)})
    cli("report", run, "-o", tmp_path / "r.html")
    blocks = read_page(tmp_path / "r.html")
    assert np.isnan(values_of(blocks["values/l2"])[0]).all()
    assert values_of(blocks["values/nan_count"])[0].tolist() == [[[4.0, 4.0, 4.0]]]
    assert blocks["top"].data["findings"][0][0].startswith("nonfinite: 'net.fc' output, step 0, rank 0")


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ([1.0] * 6 + [5000.0, 1.0, 1.0], _JUMPS.format(6, "5,000")),
        ([1.0] * 6 + [5000.0] * 30, _JUMPS.format(6, "5,000")),
        ([1.5**step for step in range(5)] + [5.0**7 * 1.5**step for step in range(5, 9)], _JUMPS.format(5, "117,188")),
        ([10.0 ** -(step * 4) for step in range(9)], None),
        ([1.0] * 20 + [1.4**step for step in range(40)], None),
        ([1.0] * 20 + [10.0**step for step in range(20)], None),
        ([1.0, 1000.0] * 10, None),
    ],
    ids=[
        "a spike", "what stays up", "above a ramp", "what falls from the first step on", "a ramp", "a steep ramp",
        "to and fro",
    ],
)  # fmt: skip
def test_a_value_that_jumps_stands_out(cli: Cli, tmp_path: Path, sizes: list[float], told: str | None) -> None:
    run = run_of(tmp_path / "run", {(0, step): size for step, size in enumerate(sizes)})
    cli("report", run, "-o", tmp_path / "r.html")
    findings = [one[0] for one in read_page(tmp_path / "r.html")["top"].data["findings"] if " jumps: " in one[0]]
    assert findings == ([] if told is None else [told])


def test_values_that_jump_together_are_one_finding_with_the_first_of_them(cli: Cli, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    writer = HandmadeWriter(run)
    rows = []
    for step in range(12):
        for i, path in enumerate(("a", "b", "c")):
            size = 1.0 if step < 8 + (path == "c") else 1000.0 * (i + 1)
            rows.append(make_row(3 * step + i, np.full(4, size, np.float32), step=step, module_path=path))
    writer.add_shard([rows])
    writer.finish()
    cli("report", run, "-o", tmp_path / "r.html")
    jumps = [one[0] for one in read_page(tmp_path / "r.html")["top"].data["findings"] if "jumps" in one[0]]
    assert jumps == [
        "'a' output jumps: its l2 at step 8 is 1,000 times the largest of the records before it; "
        "2 more values jump with it"
    ]


def test_one_fault_is_one_line_with_what_inherits_it_below(cli: Cli, tmp_path: Path) -> None:
    run = make_run(tmp_path / "a run")
    writer = HandmadeWriter(run)
    rows = []
    for step in range(20):
        for i, path in enumerate(("a.inner", "a", "b")):
            values = np.full(4, 1.0 + step / 100, np.float32)
            if step >= 12 or (step, path) == (11, "a.inner"):
                values[:] = 5000.0
            if step >= 13:
                values[0] = np.nan
            rows.append(make_row(4 * step + i, values, step=step, module_path=path))
        loss = np.float64(np.nan if step >= 13 else 1.0)
        rows.append(make_row(4 * step + 3, loss, step=step, module_path="", site="scalar", name="loss"))
    writer.add_shard([rows])
    writer.finish()
    cli("report", run, "-o", tmp_path / "r.html")
    findings = read_page(tmp_path / "r.html")["top"].data["findings"]
    (wrong,) = [one for one in findings if one[2] == "wrong"]
    told = [line for line in cli("check", run).out.splitlines() if line.startswith("error")]
    assert len(told) == 1 and wrong[0] in told[0] and wrong[0].startswith("nonfinite: 'a.inner' output, step 13")
    assert wrong[4]["type"].splitlines()[0] == shlex.join(["recorder", "first", str(run)])
    below = [text for text, *_ in wrong[3]]
    assert any(text.startswith("'a.inner' output jumps: its l2 at step 11") for text in below)


def test_what_the_page_saw_is_folded_below_what_check_found_at_its_step_or_on_its_rank() -> None:
    judged = [
        Highlight("spike", {}, steps=(5, 5), more=(Highlight("loss", {}, steps=(8, 8)),)),
        Highlight("odd rank", {}, steps=(9, 9), ranks=(3,)),
    ]
    own = [
        Highlight("next", {}, steps=(6, 6)), Highlight("with what follows", {}, steps=(7, 7)),
        Highlight("apart", {}, steps=(15, 15)), Highlight("rank 3", {}, ranks=(3,)), Highlight("none", {}, "right"),
    ]  # fmt: skip
    groups = [[one.text for one in group] for group in folded(judged, own, range(20))]
    assert groups == [
        ["spike", "loss", "next", "with what follows"], ["odd rank", "rank 3"], ["apart"], ["none"],
    ]  # fmt: skip


def test_values_near_zero_do_not_jump(cli: Cli, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    writer = HandmadeWriter(run)
    rows = []
    for step in range(12):
        for i, (path, size) in enumerate((("a", 1.0), ("b", 2.0), ("tiny", 1e-10 if step == 8 else 1e-14))):
            rows.append(make_row(3 * step + i, np.full(4, size, np.float32), step=step, module_path=path))
    writer.add_shard([rows])
    writer.finish()
    cli("report", run, "-o", tmp_path / "r.html")
    assert not [one for one in read_page(tmp_path / "r.html")["top"].data["findings"] if "jumps" in one[0]]


def test_histograms_are_shares_of_the_values_by_sign_and_power_of_two(cli: Cli, tmp_path: Path) -> None:
    counts = Histogram(first=-1, counts=np.array([[0, 0, 4], [8, 16, 0]]))
    values = {(rank, step): 1.0 for rank in range(2) for step in range(3)}
    run = run_of(tmp_path / "run", values, histogram=counts.to_bytes(), zero_count=4)
    cli("report", run, "-o", tmp_path / "r.html")
    block = read_page(tmp_path / "r.html")["histograms"]
    assert (block.data["steps"], block.data["ranks"], block.data["shape"][:2]) == ([0, 1, 2], [0, 1], [1, 3])
    codes = block.arrays["codes"][0, 1].astype(int)
    shares = np.where(codes > 0, block.data["least"] ** (1 - (codes - 1) / (block.data["levels"] - 1)), 0)
    exponent_of = {bin_index: block.data["first"] + bin_index - block.data["zero"] for bin_index in range(len(shares))}
    found = {exponent_of[bin_index]: share for bin_index, share in enumerate(shares) if share}
    lowest = block.data["lowest"]
    bins = {lowest - 2: 4 / 32, 0: 4 / 32, -1 - lowest + 1: 8 / 32, 0 - lowest + 1: 16 / 32}
    assert found.keys() == bins.keys()
    assert all(found[one] == pytest.approx(share, rel=0.3) for one, share in bins.items())


def test_every_step_with_a_histogram_is_drawn_however_many_there_are_without(cli: Cli, tmp_path: Path) -> None:
    data = Histogram(first=0, counts=np.array([[0], [4]])).to_bytes()
    run = make_run(tmp_path / "run")
    writer = HandmadeWriter(run)
    writer.add_shard([[make_row(s, [1.0] * 4, step=s, histogram=None if s % 20 else data) for s in range(301)]])
    writer.finish()
    cli("report", run, "-o", tmp_path / "r.html")
    block = read_page(tmp_path / "r.html")["histograms"].data
    assert (block["steps"], block["num_steps"]) == (list(range(0, 301, 20)), 16)


def test_a_weight_is_drawn_by_its_singular_values(cli: Cli, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    turn, other = (np.linalg.qr(rng.standard_normal((size, size)))[0] for size in (6, 8))
    weight = (turn * np.array([8.0, 4, 2, 1, 1, 0])) @ other[:6]
    large = rng.standard_normal((600, 700)) + 1
    broken = np.where(np.eye(4) > 0, np.nan, 1.0)
    weights = {"fc": weight, "large": large, "broken": broken}
    rows = [
        make_row(seq, value.astype(np.float32), module_path=path, site="param", name="weight", phase="optimizer")
        for seq, (path, value) in enumerate(weights.items())
    ]
    run = make_run(tmp_path / "run")
    writer = HandmadeWriter(run)
    writer.add_shard([rows])
    writer.finish()
    cli("report", run, "-o", tmp_path / "r.html")
    block = read_page(tmp_path / "r.html")["images"]
    of = {one["module"]: one for one in block.data["images"]}
    assert [of[path]["kind"] for path in weights] == ["spectrum"] * 3
    codes = block.arrays[of["fc"]["array"]].ravel() / 254 * (of["fc"]["high"] - of["fc"]["low"]) + of["fc"]["low"]
    assert codes == pytest.approx([8, 4, 2, 1, 1, 0], abs=0.04) and of["fc"]["total"] == 6
    assert block.arrays[of["large"]["array"]].size == 1  # no dense decomposition
    assert of["large"]["high"] == pytest.approx(np.linalg.svd(large, compute_uv=False)[0], rel=1e-3)
    assert (of["broken"]["low"], of["broken"]["nan"]) == (None, 1)


def test_units_are_sorted_by_their_size(cli: Cli, tmp_path: Path) -> None:
    sums = np.array([[0.0] * 4, [0.0, 1.0, 16.0, 4.0], [0.0, 1.0, 4.0, 2.0]])
    values = {(rank, step): 1.0 for rank in range(2) for step in range(3)}
    units = packed(1, sums, np.array([1, 0, 0, 0]))
    cli("report", run_of(tmp_path / "run", values, units=units, shape="[1,4]", numel=4), "-o", tmp_path / "r.html")
    block = read_page(tmp_path / "r.html")["units"]
    low, high, levels = (block.data[name] for name in ("low", "high", "levels"))
    codes = block.arrays["codes"][0, 1].astype(int)
    sizes = np.where(codes == 1, 0, 2.0 ** (low + (codes - 2) / (levels - 1) * (high - low)))
    assert sizes[[0, 11, 22, -1]] == pytest.approx([4, 2, 1, 0], rel=0.01)
    assert block.arrays["about"][0, 1].tolist() == [4, 1, 2, 0]
    damaged = run_of(tmp_path / "damaged", values, units=b"x")
    cli("report", damaged, "-o", tmp_path / "d.html")
    assert "units" not in read_page(tmp_path / "d.html")


def test_what_is_not_finite_is_neither_zero_nor_left_out(cli: Cli, tmp_path: Path) -> None:
    # Unit 0 has NaN alone, unit 1 zeros alone, unit 2 numbers: the sums are of finite values.
    units = packed(1, np.array([[0.0] * 3, [0.0, 0.0, 8.0], [0.0, 0.0, 2.0]]), np.array([0, 2, 0]))
    histogram = Histogram(counts=np.zeros((2, 0), np.int64)).to_bytes()
    values = {(0, step): 1.0 for step in range(2)}
    run = run_of(tmp_path / "run", values, units=units, histogram=histogram, shape="[2,3]", numel=6, nan_count=2)
    cli("report", run, "-o", tmp_path / "r.html")
    blocks = read_page(tmp_path / "r.html")
    codes, about = (blocks["units"].arrays[name][0, 1] for name in ("codes", "about"))
    assert codes[0] == 0 and codes[-1] == 1 and about.tolist() == [3, 1, 2, 1]  # not finite on top, dead at the bottom
    assert blocks["histograms"].data["steps"] == [0, 1]
    assert blocks["histograms"].arrays["nonfinite"].tolist() == [[blocks["histograms"].data["levels"]] * 2]


def test_one_step_and_one_value_are_enough(cli: Cli, tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", {(0, 7): 2.0})
    cli("report", run, "-o", tmp_path / "r.html")
    blocks = read_page(tmp_path / "r.html")
    assert blocks["axes"].data["steps"] == [7] and len(blocks["axes"].data["lanes"]) == 1
    assert values_of(blocks["values/l2"])[0].tolist() == [[[4.0]]]


def test_a_run_of_scalars_alone_is_drawn(cli: Cli, tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", {(0, step): 2.0 - step for step in (0, 1)}, site="scalar", name="loss")
    cli("report", run, "-o", tmp_path / "r.html")
    blocks = read_page(tmp_path / "r.html")
    assert (blocks["axes"].data["steps"], blocks["axes"].data["scalar_steps"]) == ([], [0, 1])
    assert blocks["top"].data["findings"][0][0].startswith("No tensor was recorded, only scalars")
    assert values_of(blocks["scalars/mean"])[0].tolist() == [[[2.0, 1.0]]]


def test_the_newer_attempt_of_a_step_is_drawn(cli: Cli, tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", {(0, step): 1.0 for step in range(3)})
    again = HandmadeWriter(run, 0, "20260102-000000-host-2")
    again.add_shard(
        [[make_row(0, np.full(4, 5.0, np.float32), encoding=None, step=2, attempt=1, module_path="net.fc")]]
    )
    again.finish(attempt=1, started_ns=1_700_000_001_000_000_000)
    cli("report", run, "-o", tmp_path / "r.html")
    assert values_of(read_page(tmp_path / "r.html")["values/absmax"])[0].tolist() == [[[1.0, 1.0, 5.0]]]


def test_a_damaged_run_is_drawn_as_far_as_it_can_be_read(cli: Cli, tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", {(rank, step): 1.0 + step for rank in range(2) for step in range(4)})
    shard = next(run.glob("rank=00001/*/*.arrow"))
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    for index in run.glob("rank=00001/*/_*.index"):
        index.unlink()
    done = cli("report", run, "-o", tmp_path / "r.html")
    assert done.exit_code == 1
    blocks = read_page(tmp_path / "r.html")
    assert blocks["top"].data["num_missing"] > 0
    assert not np.isnan(values_of(blocks["values/l2"])[0]).all()


def test_damage_of_either_run_and_of_a_picture_is_exit_code_1(cli: Cli, tmp_path: Path) -> None:
    sound, damaged = (run_of(tmp_path / name, {(0, step): 1.0 for step in range(4)}) for name in ("sound", "damaged"))
    other = run_of(tmp_path / "other", {(0, step): 1.0 for step in range(4)})
    shard = next(damaged.glob("rank=00000/*/*.arrow"))
    shard.write_bytes(shard.read_bytes() + b"more")
    assert cli("report", sound, "--against", other, "-o", tmp_path / "s.html").exit_code == 0
    for arguments in ((sound, "--against", damaged), (damaged, "--against", sound), (damaged, "--png", "map")):
        done = cli("report", *arguments, "-o", tmp_path / ("o.png" if "--png" in arguments else "o.html"), "--force")
        assert done.exit_code == 1 and "note: damaged is damaged, and what cannot be read was left out: " in done.out
    cli("report", sound, "--against", damaged, "-o", tmp_path / "o.html", "--force")
    (told,) = read_page(tmp_path / "o.html")["against"].data["models"]
    assert told.startswith("B is damaged, and its unreadable values were left out: ") and str(shard) in told


def test_a_damaged_probe_is_damage_of_the_run(cli: Cli, tmp_path: Path) -> None:
    run, l2 = run_of(tmp_path / "run", {(0, step): 1.0 for step in range(64)}), np.arange(64.0)
    writer = HandmadeWriter(run, 1)
    note = '{"dtype":"float32","numel":4}'
    writer.add_shard(
        [[make_row(0, l2, site="probe", name="output", rank=1, module_path="net.fc", note=note)]], kind="probe"
    )
    writer.finish()
    path = next(run.glob("rank=00001/*/probe-*.arrow"))
    data = bytearray(path.read_bytes())
    at = data.index(l2[20:30].tobytes())
    data[at : at + 14] = b"\xff" * 14
    path.write_bytes(data)
    checks = reply.checks_of(recorder.open_run(run))
    assert not any(str(path) in check.text for check in checks), "recorder doctor reads no payload"
    done = cli("report", run, "-o", tmp_path / "r.html", "--json")
    top = read_page(tmp_path / "r.html")["top"].data
    assert done.exit_code == 1 and done.json["missing"] == top["num_missing"] > 0
    assert (
        top["checks"][top["num_missing"] - 1][0] == "missing" and str(path) in top["checks"][top["num_missing"] - 1][1]
    )
    assert str(path) in cli("report", run, "--png", "map", "-o", tmp_path / "m.png").out


def test_a_hole_has_its_reason(cli: Cli, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    writer = HandmadeWriter(run)
    modules = [
        {"path": path, "class": "Linear", "source": "train.py:1", "aliases": [], "sites": ["output"], "params": [],
         "buffers": [], "compiled": False} for path in ("", "a", "b")
    ]  # fmt: skip
    rows = [
        make_row(seq, [1.0, 2.0], step=step, module_path=path)
        for seq, (step, path) in enumerate((step, path) for step in range(3) for path in ("a", "b", ""))
        if (step, path) != (1, "a")
    ]
    writer.add_shard([rows])
    writer.finish(roots=[{"name": "model", "class": "Net", "modules": modules}], rules=["site=output keep=tensor"])
    cli("report", run, "-o", tmp_path / "r.html")
    blocks = read_page(tmp_path / "r.html")
    number = [row[0] for row in blocks["modules"].data["modules"]].index("a")
    (gap,) = [one for one in blocks["gaps"].data["gaps"] if number in one["modules"]]
    assert gap["steps"] == [1, 1] and gap["sites"] == ["output"] and "row" in gap["text"] + "row"
    assert len(gap["text"]) > 10


def test_two_runs_are_drawn_beside_each_other(cli: Cli, tmp_path: Path) -> None:
    one = run_of(tmp_path / "one", {(0, step): 1.0 + step for step in range(4)}, keep="tensor")
    two = run_of(tmp_path / "two", {(0, step): 1.0 + step + (step == 2) for step in range(1, 5)}, keep="tensor")
    cli("report", one, "--against", two, "-o", tmp_path / "r.html")
    blocks = read_page(tmp_path / "r.html")
    assert blocks["axes"].data["steps"] == blocks["b.axes"].data["steps"] == [0, 1, 2, 3, 4]
    a, b = (values_of(blocks[f"{prefix}values/absmax"])[0][0, 0] for prefix in ("", "b."))
    assert a[1:4] == pytest.approx([2, 3, 4], rel=1e-3) and b[1:4] == pytest.approx([2, 4, 4], rel=1e-3)
    assert blocks["against"].data["verdict"] == "different"
    (nothing,) = [text for text, _, mark, *_ in blocks["top"].data["findings"] if mark == "right"]
    num = len(cli("check", one, "--json").json["not_judged"])
    assert nothing.endswith(f"; {num} of 35 rules were not judged: recorder check {one} says why")
    assert [row[:3] for row in blocks["against"].data["differing"]] == [[2, "net.fc", "output"]]


def test_the_first_value_that_one_run_alone_has_because_it_is_not_finite_is_the_culprit(
    cli: Cli, tmp_path: Path
) -> None:
    for name, own, last in (("a", [("b", 1, np.nan)], 9.0), ("b", [], 3.0)):
        rows: list[dict[str, Any]] = []
        for path, step, value in [("a", 0, 1.0), ("a", 1, 2.0), *own, ("a", 2, last)]:
            rows.append(make_row(len(rows), np.full(3, value, np.float32), step=step, module_path=path))
        writer = HandmadeWriter(make_run(tmp_path / name), 0)
        writer.add_shard([rows])
        writer.finish()
    told = "culprit: step 1, forward of 'b', rank 0: output is NaN or infinite in 3 elements, in A alone"
    first = "A has its first NaN or infinity: step 1, 'b' output, rank 0; the healthy values before it: recorder first"
    lines = cli("diff", tmp_path / "a", tmp_path / "b", "--brief").out.splitlines()
    at = lines.index(told)
    assert lines[at + 1] == f"hint: {first} {tmp_path / 'a'}" and lines[at + 2].startswith("culprit: step 2")
    assert cli("diff", tmp_path / "b", tmp_path / "a").out.count("in 3 elements, in B alone") == 1
    assert "culprit: step 1" not in cli("diff", tmp_path / "a", tmp_path / "b", "--module", "a").out
    cli("report", tmp_path / "a", "--against", tmp_path / "b", "-o", tmp_path / "r.html")
    data = read_page(tmp_path / "r.html")["against"].data
    culprit = data["culprits"][0]
    assert data["notes"] == ["note: of several culprits only the first is certain; the others may follow from it"]
    assert data["notes"][0] in lines and all(f" {run}" in one["text"] for one in data["culprits"] for run in "A")
    assert (culprit["text"], culprit["step"], culprit["seen_at"], culprit["site"]) == (told, 1, "b", "output")
    assert culprit["hint"].startswith(first)


def test_two_models_are_said_to_differ_before_any_culprit(cli: Cli, tmp_path: Path) -> None:
    for name, classes in (("a", ["", "up", "act"]), ("b", ["", "up", "norm", "down"])):
        writer = HandmadeWriter(make_run(tmp_path / name), 0)
        value = np.full(3, len(classes), np.float32)
        writer.add_shard([[make_row(0, value, step=0, module_path="up")]])
        modules = [{"path": path, "class_name": "Linear"} for path in classes]
        writer.finish(roots=[{"name": "model", "modules": modules}])
    told = "the models differ: 1 module in A alone ('act'); 2 modules in B alone ('norm', 'down')"
    lines = cli("diff", tmp_path / "a", tmp_path / "b").out.splitlines()
    assert lines.index(told) < next(number for number, line in enumerate(lines) if line.startswith("culprit"))
    cli("report", tmp_path / "a", "--against", tmp_path / "b", "-o", tmp_path / "r.html")
    assert read_page(tmp_path / "r.html")["against"].data["models"] == [told]
    assert "the models differ" not in cli("diff", tmp_path / "a", tmp_path / "a" / ".." / "a").out


def test_commands_of_the_page_run_where_the_page_was_made(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_training(tmp_path / "recordings" / "20260101T000000Z-1")
    monkeypatch.chdir(tmp_path)
    cli("report", "recordings", "-o", "r.html")
    abouts = [about for *_, about in read_page(tmp_path / "r.html")["top"].data["findings"]]
    lines = [line for about in abouts for line in about.get("type", "").splitlines() if line.startswith("recorder ")]
    name = recorder.open_run(run).name
    assert lines and not [line for line in lines if "recordings" in line] and f"recorder first {name}" in lines
    assert {cli(*shlex.split(line)[1:]).exit_code for line in lines} <= {0, 1}


def test_a_page_is_written_to_a_file_and_not_to_standard_output(cli: Cli, tmp_path: Path) -> None:
    refused = cli("report", run_of_numbers(tmp_path / "run", {"loss": [1.0]}), "-o", "-")
    assert refused.exit_code == 2 and "-: name a file; no command writes one to standard output" in refused.err


def test_a_name_that_ends_otherwise_than_what_is_written_is_refused(cli: Cli, tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", {(0, 0): 1.0})
    for arguments, name, told in (
        (["--png", "map"], "x.html", "ends in .png"),
        ([], "x.PNG", "ends in .html, or add --png"),
    ):
        refused = cli("report", run, *arguments, "-o", tmp_path / name)
        assert refused.exit_code == 2 and f"{tmp_path / name}: " in refused.err and told in refused.err
        assert not (tmp_path / name).exists()


def test_no_step_below_a_picture_is_cut(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", {(0, 0): 1.0, (0, 10**7): 2.0})
    write_picture(recorder.open_run(run), tmp_path / "m.png", "map")
    assert (pixels_of(tmp_path / "m.png")[-25:, -2:] == 255).all()


@pytest.fixture(scope="module")
def page_of_many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of more ranks than lines, one of which has a NaN."""
    folder = tmp_path_factory.mktemp("many")
    write_run(folder / "run", Shape(ranks=64, steps=200, modules=3, nan=(40, 5), differs=(70, 1)))
    write_report(recorder.open_run(folder / "run"), folder / "r.html")
    return folder / "r.html"


def test_values_of_all_ranks_at_some_steps_read_each_batch_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "run", Shape(ranks=2, steps=400, modules=2))
    windows: list[tuple[int | None, int | None]] = []
    rows_of = GlobalView.rows

    def noted(view: GlobalView, first: int | None = None, last: int | None = None, only: Any = None) -> Any:
        windows.append((first, last))
        return rows_of(view, first, last, only)

    monkeypatch.setattr(statistics, "_MAX_GLOBAL_ROWS", 12 * 9)
    monkeypatch.setattr(GlobalView, "rows", noted)
    blocks = {block.name: unpacked(block.encoded()) for block in collect(recorder.open_run(tmp_path / "run"))}
    assert windows == [(0, 391)] and blocks["axes"].data["global_steps"] == 9  # one window, and not one a step
    numbers = values_of(blocks["values/l2"])[0][:, 0]
    assert np.flatnonzero(~np.isnan(numbers).any(axis=0)).tolist() == [0, 4, 9, 14, 19, 24, 29, 34, 39]


def test_many_ranks_are_summed_up(page_of_many: Path) -> None:
    axes = read_page(page_of_many)["axes"].data
    assert [lane["kind"] for lane in axes["lanes"][:4]] == ["global", "low", "median", "high"]
    assert len(axes["lanes"]) <= 8 and axes["num_ranks"] == 64


def test_of_many_ranks_the_first_bad_one_is_named(page_of_many: Path) -> None:
    texts = [finding[0] for finding in read_page(page_of_many)["top"].data["findings"]]
    assert any("step 40" in text and "rank 5" in text for text in texts)


def test_the_spread_of_many_ranks_is_in_order(page_of_many: Path) -> None:
    numbers, _ = values_of(read_page(page_of_many)["values/l2"])
    low, median, high = (numbers[:, lane] for lane in (1, 2, 3))
    known = ~np.isnan(median)
    assert known.any() and (low[known] <= median[known]).all() and (median[known] <= high[known]).all()


def test_an_odd_rank_has_a_line_of_its_own_and_stands_out_of_the_map_of_ranks(cli: Cli, tmp_path: Path) -> None:
    values = {(rank, step): 1.0 + step + 0.01 * (rank % 3) for rank in range(12) for step in range(6)}
    run = run_of(tmp_path / "run", values | {(7, step): 40.0 for step in range(6)})
    cli("report", run, "-o", tmp_path / "r.html")
    blocks = read_page(tmp_path / "r.html")
    assert blocks["ranks"].data["odd"] == [7]
    assert blocks["axes"].data["lanes"][-1] == {"kind": "odd", "rank": 7}
    told = [finding[0] for finding in blocks["top"].data["findings"] if finding[0].startswith("Rank 7 is odd")]
    assert len(told) == 1 and "far from the median of all ranks, most of all net.fc output, step 0" in told[0]
    farthest = blocks["ranks"].data["titles"].index("farthest")
    assert [row[farthest] for row in blocks["ranks"].data["rows"]] == [
        "net.fc output, step 0" if rank == 7 else "" for rank in range(12)
    ]
    apart, _ = values_of(blocks["by-rank/deviation"])
    assert int(np.nanargmax(apart[0, 0])) == 7


def test_a_thousand_modules_and_steps_fit_into_two_megabytes_whatever_their_numbers() -> None:
    """Numbers that no codec can compress; weights, as replicas, are equal on both ranks."""
    run = recorder.open_run(GOLDEN)
    keys = [DrawnSeries("", f"m{i}", site, "", "train") for i in range(1000) for site in ("output", "param", "grad")]
    axes = Axes(
        index={key: number for number, key in enumerate(keys)}, is_scalar=[False] * 3000, steps=set(range(1000))
    )
    axes.shapes, axes.dtypes, axes.numels = ["[4096,4096]"] * 3000, ["float32"] * 3000, [1 << 24] * 3000
    collected = StatisticsBlocks(run, axes)
    rng = np.random.default_rng(0)
    for values in collected.cube.values.values():
        values[:, 0] = rng.standard_normal((3000, collected.cube.shape[2]))
        values[:, 1:] = values[:, :1]
        values[::3, 1:] = rng.standard_normal(values[::3, 1:].shape)
    for name in ("nan_count", "inf_count", "zero_count", "numel"):
        collected.cube.values[name][:] = 0
    collected.cube.has_row[:] = True
    modules = {key.module_path: number for number, key in enumerate(keys)}
    num_bytes = sum(map(len, page("size", collected.blocks(modules))))
    assert collected.cube.shape[2] >= 64 and num_bytes < 1_950_000


def test_a_value_of_the_whole_model_is_of_the_one_series_that_is_called_so() -> None:
    def table(*roots: str) -> Any:
        names = {"module_path": "fc", "site": "output", "name": "", "mode": "train", "shape": "[2]", "dtype": "float32"}
        columns: dict[str, Any] = {name: [text] * len(roots) for name, text in names.items()}
        columns |= {name: list(range(len(roots))) for name in ("step", "seq", "numel")}
        return pa.table(columns | {"root": list(roots), "global_shape": pa.nulls(len(roots), pa.string())})

    axes = Axes()
    axes.add(table("stage0"))
    assert axes.numbers_of(table("stage0", "model")).tolist() == [0, 0]
    axes.add(table("stage0", "stage1"))
    assert axes.numbers_of(table("stage1", "model")).tolist() == [1, -1]  # of either of them


def test_the_map_is_written_as_a_picture_without_a_browser(cli: Cli, tmp_path: Path) -> None:
    run, out = make_training(tmp_path / "run"), tmp_path / "map.png"
    assert cli("report", run, "--png", "map", "-o", out).out.startswith(f"{out}: ")
    pixels = pixels_of(out)
    is_bad, is_white = ((pixels[50:] == color).all(axis=-1) for color in ((230, 0, 122), (255, 255, 255)))
    rows, columns = np.flatnonzero(is_bad.any(axis=1)), np.flatnonzero(is_bad.any(axis=0))
    assert len(rows) == 15 and abs((columns[0] - 300) / 1100 * 20 - 15) < 0.1, "one row, at step 15 of 20"
    cell = is_white[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    assert 10 < cell.sum() < 40, "a cross in the first cell that is not finite"
    bar = pixels[31:41, 300:520].reshape(-1, 3)
    assert len(np.unique(bar, axis=0)) > 100, "the colours"
    assert "exists" in cli("report", run, "--png", "map", "-o", out).err
    assert "expected map, loss, gradients" in cli("report", run, "--png", "graph").err


def pixels_of(path: Path) -> Any:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def run_of_numbers(path: Path, numbers: dict[str, list[float]]) -> Path:
    run, rows = make_run(path), list[dict[str, Any]]()
    for name, values in numbers.items():
        for step, value in enumerate(values):
            common: dict[str, Any] = {"site": "scalar", "name": name, "module_path": "", "encoding": None}
            rows.append(make_row(len(rows), np.array(value, np.float32), step=step, **common))
    writer = HandmadeWriter(run, 0)
    writer.add_shard([rows], kind="stats")
    writer.finish()
    return run


def test_the_loss_is_written_as_a_picture_without_a_browser(cli: Cli, tmp_path: Path) -> None:
    losses = [*np.linspace(4.0, 1.0, 2000).tolist(), float("nan")]
    numbers = {"lr.AdamW.0": [0.1] * 2001, "objective.norm.a": [1.0] * 2001, "loss": losses}
    run, out = run_of_numbers(tmp_path / "run", numbers), tmp_path / "loss.png"
    assert cli("report", run, "--png", "loss", "-o", out).out.startswith(f"{out}: ")
    pixels = pixels_of(out)
    assert len(pixels) == 50 + 2 * 160 + 30, "the loss and the rate"
    of_loss = pixels[50:210]
    (heights, columns), (_, bad) = (
        (of_loss == color).all(axis=-1).nonzero() for color in ((36, 87, 197), (230, 0, 122))
    )
    first, last = (float(heights[columns == column].mean()) for column in (columns.min(), columns.max()))
    assert last - first > 130 and {*bad} == {1398, 1399}, "the loss comes first, falls, and is not finite in the end"
    ticks = (of_loss[:, 280:296] < 128).all(axis=-1).any(axis=1)
    assert np.count_nonzero(np.diff(ticks.astype(int)) == 1) >= 4, "numbers beside the line: 1, 2, 3 and 4"
    assert cli("report", run, "--png", "objectives", "-o", tmp_path / "o.png").exit_code == 0
    write_run(tmp_path / "modules", Shape(ranks=2, steps=10))
    assert "no values for --png objectives" in cli("report", tmp_path / "modules", "--png", "objectives").err


def test_more_panels_are_written_as_pictures(cli: Cli, tmp_path: Path) -> None:
    write_run(tmp_path / "few", Shape(ranks=2, steps=40, nan=(20, 1)))
    write_run(tmp_path / "many", Shape(ranks=12, steps=40, nan=(20, 1)))
    for run, panel, num_rows in (("few", "gradients", 6), ("few", "ranks", 2), ("many", "ranks", 12)):
        out = tmp_path / f"{run}-{panel}.png"
        assert cli("report", tmp_path / run, "--png", panel, "-o", out).out.startswith(f"{out}: ")
        assert len(pixels_of(out)) == 50 + 16 * num_rows + 30
        has_bad = (pixels_of(out)[50:] == (230, 0, 122)).all(axis=-1).any()
        assert has_bad == (panel == "ranks"), "the NaN is in an output"
    for panel, line in (
        ("histograms", "RECORDER_PRESET=default RECORDER_RULES='site=output,grad keep=histogram'"),
        ("experts", "it needs modules that are called experts.0"),
        ("objectives", "type recorder.objective('main', hidden) into the model"),
    ):
        told = cli("report", tmp_path / "few", "--png", panel).err
        assert f"no values for --png {panel}" in told and line in told
    refused = cli("report", tmp_path / "few", "--png", "map", "--against", tmp_path / "many")
    assert refused.exit_code == 2 and "--png draws one run" in refused.err


def test_steps_of_the_optimizer_are_drawn_over_the_norms_of_the_weights(cli: Cli, tmp_path: Path) -> None:
    run, rows = make_run(tmp_path / "run"), list[dict[str, Any]]()
    common: dict[str, Any] = {"module_path": "fc", "phase": "optimizer"}
    for step in range(4):
        values = np.full((2, 2), 2.0, np.float32)
        rows.append(make_row(len(rows), values, site="param", name="weight", step=step, encoding=None, **common))
    writer = HandmadeWriter(run, 0)
    writer.add_shard([rows], kind="stats")
    note, l2 = '{"dtype":"float32","numel":4}', np.array([0.4, 0.2, 0.1, 0.05], np.float32)
    probed = make_row(len(rows), l2, site="probe", name="update weight", step=0, note=note, **common)
    writer.add_shard([[probed]], kind="probe")
    writer.finish()
    axes, opened = Axes(), recorder.open_run(run)
    with step_rows(opened) as tables:
        probe = axes.read(opened, tables)
        collected = StatisticsBlocks(opened, axes)
        collected.collect(tables, probe)
    chosen, sizes = collected.updates()
    assert [collected.series[one].site for one in chosen] == ["param"]
    assert sizes == pytest.approx(l2[None].astype(np.float64) / 4, rel=1e-6)
    assert cli("report", run, "--png", "updates", "-o", tmp_path / "u.png").exit_code == 0
    refused = cli("report", run_of_numbers(tmp_path / "loss", {"loss": [1.0, 2.0]}), "--png", "updates").err
    assert "it needs matrices whose updates the probe measures" in refused


def test_a_row_of_a_parameter_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        make_row(
            number, np.ones(2, np.float32), site="grad", name=name, module_path="fc", phase="optimizer", encoding=None
        )
        for number, name in enumerate(("weight", "bias"))
    ]
    run, drawn = make_run(tmp_path / "run"), list[str]()
    writer = HandmadeWriter(run, 0)
    writer.add_shard([rows], kind="stats")
    writer.finish()
    monkeypatch.setattr(ImageDraw.ImageDraw, "text", lambda self, at, text, **_: drawn.append(text))
    write_picture(recorder.open_run(run), tmp_path / "g.png", "gradients")
    assert {"fc weight", "fc bias"} <= set(drawn)


def test_a_panel_is_of_one_model_in_the_order_of_its_modules(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, drawn, out = run_of_two_models(tmp_path / "run"), list[str](), tmp_path / "g.png"
    monkeypatch.setattr(ImageDraw.ImageDraw, "text", lambda self, at, text, **_: drawn.append(text))
    assert cli("report", run, "--png", "gradients", "--model", "model_1", "-o", out).exit_code == 0
    assert [text for text in drawn if text.endswith(" weight")] == ["first weight", "last weight"]
    assert drawn[0].endswith("of 2 values of grad, of model_1") and "3" in drawn and "1" not in drawn
    refused = cli("report", run, "--png", "gradients", "--model", "other", "-o", tmp_path / "o.png")
    assert "--model other: expected model, model_1" in refused.err
    assert "is for --png" in cli("report", run, "--model", "model", "-o", tmp_path / "p.html").err
    drawn.clear()
    assert cli("report", run, "--png", "loss", "-o", tmp_path / "l.png").exit_code == 0
    losses = {
        "loss, before the steps of Adam_1, which trains model_1",
        "Adam loss, before the steps of Adam, which trains model",
    }
    assert losses | {"gradient norm, of all models"} <= {text.replace("\n", " ") for text in drawn}
    refused = cli("report", run, "--png", "loss", "--model", "model_1", "-o", tmp_path / "n.png")
    assert "--model model_1: --png loss shows all models together; leave out --model" in refused.err


def test_ranks_are_compared_by_their_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, drawn = make_run(tmp_path / "run"), list[str]()
    for rank in (0, 1):
        writer, rows = HandmadeWriter(run, rank), list[dict[str, Any]]()
        for site, size in (("output", 1.0), ("grad", 1.0 + 9 * rank)):
            of: dict[str, Any] = {"module_path": "fc", "site": site, "rank": rank, "encoding": None}
            rows.append(
                make_row(len(rows), np.full(4, size, np.float32), name="" if site == "output" else "weight", **of)
            )
        writer.add_shard([rows], kind="stats")
        writer.finish()
    monkeypatch.setattr(ImageDraw.ImageDraw, "text", lambda self, at, text, **_: drawn.append(text))
    write_picture(recorder.open_run(run), tmp_path / "r.png", "ranks")
    assert drawn[0].endswith(" of grad of each rank")
    write_picture(recorder.open_run(run), tmp_path / "l.png", "loss")
    assert {"gradient norm of rank 0", "gradient norm of rank 1"} <= set(drawn)


def test_an_exception_that_ended_a_run_is_said_by_check_first_diff_and_the_page(cli: Cli, tmp_path: Path) -> None:
    errors = ("RuntimeError: connection closed", "KeyError: 'sample_2'")
    for name in ("sound", "crashed"):
        run = make_run(tmp_path / name)
        for rank, error in enumerate(errors):
            writer = HandmadeWriter(run, rank)
            rows = [make_row(step, np.ones(4, np.float32), step=step, rank=rank) for step in range(4 - rank)]
            writer.add_shard([rows])
            event = {"kind": "exception", "message": error, "time_ns": 9 - rank, "count": 1}
            writer.finish(events=[event] if name == "crashed" else [])
    sound, crashed = tmp_path / "sound", tmp_path / "crashed"
    told = [
        f"rank {rank} ended with an exception: {errors[rank]}; the record ends in step {3 - rank}" for rank in (1, 0)
    ]
    for command in ("check", "first"):
        assert [line for line in cli(command, crashed).out.splitlines() if "exception" in line] == [
            f"note: {one}" for one in told
        ]
        assert "exception" not in cli(command, sound).out
    compared = cli("diff", sound, crashed, "--brief")
    assert compared.out.splitlines()[3:5] == [f"note: in B {one}" for one in told] and compared.exit_code == 0
    assert cli("diff", crashed, sound, "--json").json["raised_a"] == told
    found = []
    for run in (sound, crashed):
        write_report(recorder.open_run(run), tmp_path / f"{run.name}.html")
        found.append([one[:3] for one in read_page(tmp_path / f"{run.name}.html")["top"].data["findings"]])
    ((nothing, _, mark), *_), (*exceptions, last) = found
    assert (mark, nothing.replace("sound", "crashed")) == ("right", last[0]) and last[2] == "note"
    assert exceptions == [[f"R{one[1:]}", {}, "note"] for one in told]


def test_of_many_exceptions_only_the_first_are_named(cli: Cli, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for rank in range(6):
        event = {"kind": "exception", "message": f"ValueError: {rank}", "time_ns": rank, "count": 1}
        HandmadeWriter(run, rank).finish(events=[event])
    lines = cli("ls", run).out.splitlines()
    assert lines[-2:] == [
        "rank 3 ended with an exception: ValueError: 3",
        "2 more exceptions, which recorder doctor names",
    ]


def test_ls_says_that_a_program_ended_with_an_exception(cli: Cli, tmp_path: Path) -> None:
    writer = HandmadeWriter(make_run(tmp_path / "runs" / "run"))
    event = {"kind": "exception", "message": "ValueError: no", "time_ns": 1, "count": 1}
    writer.finish(events=[event])
    assert "closed, exception" in cli("ls", tmp_path / "runs").out
    assert "rank 0 ended with an exception: ValueError: no" in cli("ls", tmp_path / "runs" / "run").out
    assert "note    event exception (rank 0): ValueError: no" in cli("doctor", tmp_path / "runs" / "run").out
