"""`recorder merge` as it is typed: summary, exit codes, JSON, help, the progress bar on a terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from recorder.run.run import open_run
from tests.rigs.command_line import Cli, cli, on_a_terminal
from tests.rigs.handmade import HandmadeWriter, make_row, make_run
from tests.rigs.merging import add_steps, assert_is_merge, grow, make_small_run, roots, weight

__all__ = ["cli"]


def test_the_summary_says_what_was_merged(cli: Cli, tmp_path: Path) -> None:
    run, out = make_small_run(tmp_path / "run"), tmp_path / "out"
    result = cli("merge", run, "-o", out, "--jobs", 1)
    assert result.exit_code == 0
    assert result.err == ""
    first, last = result.out.splitlines()
    assert first.startswith(f"{out}: 36 tensors of 2 ranks, 1.4 kB of values, ")
    assert "MB/s" not in first
    assert last.startswith("out: no findings (of ranks that are missing")
    assert cli("verify", out).exit_code == 0
    assert_is_merge(out, run)


def test_a_second_call_says_what_was_kept(cli: Cli, tmp_path: Path) -> None:
    run, out = make_small_run(tmp_path / "run"), tmp_path / "out"
    cli("merge", run, "-o", out)
    grow(run, [4])
    result = cli("merge", run, "-o", out)
    assert "1 of 2 units kept" in result.out
    assert result.exit_code == 0


def test_findings_are_named_and_make_the_exit_code_1(cli: Cli, tmp_path: Path) -> None:
    run, out = make_run(tmp_path / "run"), tmp_path / "out"
    for rank in (0, 1):
        writer = HandmadeWriter(run, rank)
        row = make_row(0, weight(0) + rank, rank=rank, site="grad", name="weight", micro_step=None, phase="optimizer")
        writer.add_shard([[row]])
        writer.finish(roots=roots())
    result = cli("merge", run, "-o", out, "--jobs", 1)
    assert result.exit_code == 1
    assert "finding: replicas that differ: 1 row" in result.out
    assert "  step 0 layers.0:grad:weight: rank 1 differs from rank 0" in result.out
    assert result.out.splitlines()[-1] == "out: 1 finding"
    assert open_run(out).num_rows == 2


def test_what_is_no_finding_is_a_note(cli: Cli, tmp_path: Path) -> None:
    run, out = make_small_run(tmp_path / "run", steps=2), tmp_path / "out"
    for rank in (0, 1):
        writer = HandmadeWriter(run, rank, "live")
        add_steps(writer, [2], is_sealed=False)
        writer.finish(state="recording", roots=roots(), host="another")
    result = cli("merge", run, "-o", out, "--jobs", 1)
    assert "note: 2 writers still recording; merge again for later rows" in result.out
    assert result.exit_code == 0


def test_json_has_the_same(cli: Cli, tmp_path: Path) -> None:
    run, out = make_small_run(tmp_path / "run"), tmp_path / "out"
    result = cli("merge", run, "-o", out, "--jobs", 1, "--json").json
    assert (result["tensors"], result["problems"], result["findings"]) == (36, 0, {})
    assert result["kept_units"] == 0
    assert result["merged_bytes"] == result["payload_bytes"] == 1408


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--loss", "median"], "loss 'median'"),
        (["--layout", "layers.0"], "layers.0"),
        (["--layout", "*=diagonal"], "diagonal"),
    ],
)
def test_options_that_make_no_sense_are_misuse(cli: Cli, tmp_path: Path, options: list[str], said: str) -> None:
    run, out = make_small_run(tmp_path / "run"), tmp_path / "out"
    result = cli("merge", run, "-o", out, *options)
    assert result.exit_code == 2
    assert said in result.err
    assert not out.exists()


def test_misuse_is_one_line_and_exit_code_2(cli: Cli, tmp_path: Path) -> None:
    run, out = make_small_run(tmp_path / "run"), tmp_path / "out"
    assert cli("merge", run).exit_code == 2
    assert cli("merge", tmp_path / "nowhere", "-o", out).exit_code == 2
    result = cli("merge", run, "-o", run)
    assert result.exit_code == 2
    assert result.err == f"recorder: {run}: is the run itself; name another directory with -o\n"


def test_help_says_when_it_fails(cli: Cli) -> None:
    result = cli("merge", "--help")
    assert result.exit_code == 0
    for text in ("Exit code 1", "Exit code 2", "recorder merge recordings -o merged", "--layout", "--jobs"):
        assert text in " ".join(result.out.split())


def test_names_of_strangers_reach_no_terminal(cli: Cli, tmp_path: Path) -> None:
    run, out = make_run(tmp_path / "run"), tmp_path / "out"
    for rank in (0, 1):
        writer = HandmadeWriter(run, rank)
        row = make_row(0, weight(0) + rank, rank=rank, site="grad", name="\x1b]0;evil\x07", micro_step=None)
        writer.add_shard([[row | {"phase": "optimizer"}]])
        writer.finish(roots=roots())
    result = cli("merge", run, "-o", out, "--jobs", 1)
    assert result.exit_code == 1
    assert "\x1b" not in result.out
    assert "evil" in result.out


def test_a_terminal_shows_progress(tmp_path: Path) -> None:
    run, out = make_small_run(tmp_path / "run"), tmp_path / "out"
    shown = on_a_terminal("merge", str(run), "-o", str(out), is_plain=True)
    assert "merge" in shown
    assert "no findings" in shown
