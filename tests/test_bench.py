"""The bench's own arithmetic: pairs, tables, pictures, stored counts. What it measures is not tested here."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from recorder.rules import Schedule
from scripts.benchmarks import __main__ as dispatch
from scripts.benchmarks import blocks, keep, records, table
from scripts.benchmarks.curves import line_through
from scripts.benchmarks.pairs import is_distinguishable, noise_of, spread
from scripts.benchmarks.picture import draw
from scripts.benchmarks.stopwatch import Stopwatch
from scripts.benchmarks.ways import SETTINGS, WAYS, chosen


def sample(step_s: float, *, digest: str = "a", **more: Any) -> dict[str, Any]:
    cpu_s = {"training": step_s, "writer": 0.0, "others": 0.0} | more.pop("cpu_s", {})
    figures = {"exit_cpu_s": 0.1, "drain_s": 0.2, "peak_rss_bytes": 5e8, "written_bytes": 0.0, "digest": [digest]}
    return {"step_s": step_s, "cpu_s": cpu_s, **figures, **more}


def report() -> dict[str, Any]:
    ours: dict[str, Any] = {
        "cpu_s": {"writer": 0.5},
        "written_bytes": 80e6,
        "drops": {},
        "num_tensors": 10,
        "num_bytes": 100e6,
    }
    samples = {
        "no recording": [sample(1.0), sample(2.0), sample(1.0)],
        "no recording, again": [sample(1.1), sample(2.0), sample(1.0)],
        "hooks that do nothing": [sample(1.0), sample(2.1), sample(1.0)],
        "hooks that copy into a pool and drop": [sample(1.0), sample(2.1), sample(1.0)],
        "TensorBoard histograms": [sample(4.0), None, None],
        "recorder, tensors": [sample(1.5, **ours), sample(3.0, **ours), sample(1.4, digest="b", **ours)],
    }
    setting = {
        "text": "a training",
        "seen": {"num_tensors": 10, "num_bytes": 100e6},
        "keeps_tensors": ["recorder, tensors"],
        "limits": {"copy": 10.0, "codec": 1.0, "crc32c": 20.0},
        "findings": ["something was lost"],
        "samples": samples,
    }
    peers = {"wandb": {"package": "wandb", "reason": "ImportError: no"}, "nnsight": {"package": "n", "version": "1.2"}}
    base = ["no recording", "no recording, again"]
    figures = {"machine": "2 cores", "import_ms": 9.0, "rounds": 3, "steps": 4, "warmup": 1, "base": base}
    return {**figures, "peers": peers, "settings": {"busy": setting}}


def line_of(text: str, name: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_a_spread_has_the_quartiles_of_its_middle_and_its_extremes() -> None:
    assert spread([5.0, 1.0, 2.0, 4.0, 3.0]) == (3.0, 2.0, 4.0, 1.0, 5.0, 5)
    assert spread([1.5]) == (1.5, 1.5, 1.5, 1.5, 1.5, 1)


def test_what_is_no_farther_than_two_of_the_same_kind_cannot_be_told() -> None:
    noise = noise_of(spread([0.96, 1.0, 1.02]))
    assert noise == pytest.approx(0.04)
    assert not is_distinguishable(spread([1.03, 1.04, 1.2]), noise)
    assert is_distinguishable(spread([1.05]), noise)
    assert is_distinguishable(spread([0.95]), noise)


def test_a_ratio_is_of_pairs_of_one_round() -> None:
    cells = line_of(table.markdown(report()), "recorder, tensors")
    assert cells[1:4] == ["1.50", "1.45 to 1.50", "1.40 to 1.50"]


def test_the_table_says_what_is_noise_saved_and_changed() -> None:
    text = table.markdown(report())
    assert line_of(text, "hooks that do nothing")[1] == "1.00 (noise)"
    cells = line_of(text, "recorder, tensors")
    assert cells[4:8] == ["+500", "+500", "+0", "+0"]
    assert cells[8:10] == ["80.0", "20%"] and cells[-2:] == ["0", "DIFFERS"]
    assert "differed by up to 10.0%" in text and "- FINDING something was lost" in text


def test_a_tool_of_fewer_rounds_is_compared_in_those_alone() -> None:
    assert line_of(table.markdown(report()), "TensorBoard histograms")[1:4] == ["4.00", "4.00 to 4.00", "4.00 to 4.00"]


def test_a_tool_that_cannot_be_imported_is_named_with_its_reason() -> None:
    text = table.markdown(report())
    assert "- wandb, wandb: left out (ImportError: no)" in text and "- nnsight, n: 1.2" in text


def test_recording_is_measured_against_the_machine() -> None:
    text = table.markdown(report())
    assert (
        "all threads take 1000 ms of CPU a step beyond no recording; codec and crc32c alone 105 ms, 0.11 of it" in text
    )
    assert "- recorder, tensors: +50000.0 us a record on the training thread beyond the copy" in text


def test_the_picture_is_svg_with_a_dot_for_each_recorder() -> None:
    root = ElementTree.fromstring(draw(table.panels(report())))
    dots = root.findall("{http://www.w3.org/2000/svg}circle")
    centers = [float(dot.attrib["cx"]) for dot in dots]
    assert len(dots) == 5 and max(centers) == centers[3]  # TensorBoard
    texts = [text.text for text in root.findall("{http://www.w3.org/2000/svg}text")]
    assert "recorder, tensors" in texts and "busy: a training" in texts


def test_table_refuses_what_the_bench_did_not_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(SystemExit) as ended:
        table.main([str(tmp_path / "other.json")])
    assert ended.value.code == 2 and "is not what" in capsys.readouterr().err
    (tmp_path / "bench.json").write_text(json.dumps(report()))
    assert table.main([str(tmp_path / "bench.json"), "--picture", str(tmp_path / "it.svg")]) == 0
    assert (tmp_path / "it.svg").read_text().startswith("<svg ")


def test_only_a_count_that_grew_by_more_than_a_tenth_is_a_regression() -> None:
    stored = {"tensors": {"training_calls": 50.0, "blocks": 8.0}}
    assert keep.compare(stored, {"tensors": {"training_calls": 54.9, "blocks": 8.0}})[1] == []
    lines, worse = keep.compare(stored, {"tensors": {"training_calls": 55.1, "blocks": 5.0}})
    assert worse == [lines[0]] and lines[0].startswith("REGRESSION tensors: 55.10 calls on the training thread")
    assert "better, so store it" in lines[1]


def test_stored_counts_of_another_python_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "keep.json").write_text(json.dumps({"of": {"python": "2.7"}, "figures": {}}))
    assert keep.main(["--file", str(tmp_path / "keep.json")]) == 2
    assert "--write stores anew" in capsys.readouterr().err


def test_stored_counts_have_every_case() -> None:
    stored = json.loads(keep.STORED.read_text())
    assert set(stored["figures"]) == set(keep.CASES)
    assert all(figures["training_calls"] > 0 for figures in stored["figures"].values())


def test_the_cost_of_a_record_is_told_for_each_site(capsys: pytest.CaptureFixture[str]) -> None:
    assert records.main(["--rounds", "1", "--steps", "2", "--modules", "5"]) == 0
    text = capsys.readouterr().out
    num_records = {name: int(line_of(text, name)[1]) for name in records.CASES}
    assert num_records["no recording"] == num_records["no recording, again"] == 0
    # One for each module, or each of its two parameters; the first module's input has no gradient.
    sites = {"output": 5, "grad_output": 5, "input": 5, "grad_input": 4, "param": 10, "grad": 10}
    assert {name: num_records[name] for name in sites} == sites


def test_a_line_goes_through_its_points() -> None:
    line = line_through([1, 2, 3], [12.0, 14.0, 16.0])
    assert line == pytest.approx((10.0, 2.0, 0.0), abs=1e-9)
    assert line_through([1, 2, 3], [0.0, 3.0, 0.0]).farthest == pytest.approx(2 / 3)


def test_no_recording_twice_is_measured_whatever_is_chosen() -> None:
    assert chosen("busy", only=["recorder, tensors"], peers=False, sync=False) == [*list(WAYS)[:2], "recorder, tensors"]
    small = chosen("small", only=["recorder, tensors"], peers=False, sync=False)
    assert small == [*list(WAYS)[:4], "recorder, tensors"]
    for setting in SETTINGS:
        assert not any(
            WAYS[name].group in ("peers", "sync") for name in chosen(setting, only=[], peers=False, sync=False)
        )


def test_the_stopwatch_counts_the_cpu_time_of_its_thread() -> None:
    watch = Stopwatch()
    until_s = time.thread_time() + 0.05
    while time.thread_time() < until_s:
        pass
    lap = watch.lap()
    assert 0.05 <= lap.cpu_s["training"] < 2 and lap.wall_s >= 0.05
    assert lap.total_cpu_s >= lap.cpu_s["training"]
    assert lap.cpu_s["writer"] < lap.cpu_s["training"]  # writers of other tests' recordings


def test_an_unknown_bench_and_one_that_is_not_there_are_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dispatch.main(["curve"]) == 2
    assert "no benchmark is called 'curve'; there are:" in capsys.readouterr().err
    monkeypatch.setitem(dispatch.BENCHMARKS, "absent", "nothing")
    assert dispatch.main(["absent"]) == 2
    assert "absent (nothing) is not in this copy: scripts/benchmarks/absent.py" in capsys.readouterr().err


def test_the_bench_explains_itself_without_loading_torch() -> None:
    code = (
        "import sys; from scripts.benchmarks.__main__ import main\n"
        "try: main(['overhead', '--help'])\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "no recording, again" in done.stdout


def test_blocks_are_recorded_as_their_schedule_says() -> None:
    schedule = Schedule.parse(blocks.schedule(4, 5))
    recorded = [blocks.is_recorded(block) for block in range(8)]
    for block, is_recorded in enumerate(recorded):
        begin = blocks.WARMUP + 5 * block
        assert {step in schedule for step in range(begin, begin + 5)} == {is_recorded}
    assert all(one != other for one, other in zip(recorded[::2], recorded[1::2], strict=True))
