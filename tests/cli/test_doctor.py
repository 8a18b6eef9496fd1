"""`recorder doctor RUN`: the table, holes with their reasons, what ends with which exit code."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recorder.format.rundir import RUN_MANIFEST, encode_manifest, read_json
from recorder.system.text import grouped
from tests.analyze.doctor import test_expected
from tests.analyze.doctor.test_expected import RULE, record, renumbered, root, step_rows, training
from tests.rigs import jobs
from tests.rigs.command_line import Cli, Result, on_a_terminal
from tests.rigs.handmade import HandmadeWriter, ledger, make_row, make_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


def lines(result: Result, *words: str) -> list[str]:
    return [line for line in result.out.splitlines() if all(word in line for word in words)]


def codes(cli: Cli, run: Path) -> tuple[int, int]:
    return cli("doctor", run).exit_code, cli("doctor", run, "--strict").exit_code


def test_a_whole_run_is_a_table_of_sites_and_ends_with_zero(cli: Cli, run: Path) -> None:
    record(run, training(5))
    record(run, training(5, 1), 1)
    found = cli("doctor", run)
    assert codes(cli, run) == (0, 0)
    assert {line.split()[0] for line in found.out.splitlines()} == {"ok"}
    table = [line.split()[1:] for line in lines(found, "values were recorded")]
    assert table == [
        [site, "all", str(number), "values", "were", "recorded"]
        for site, number in (("output", 40), ("grad_output", 40), ("param", 30), ("grad", 30), ("optim", 30))
    ]


def test_a_loss_is_a_line_with_sites_modules_steps_ranks_and_reason(cli: Cli, run: Path) -> None:
    record(run, training(5))
    rows = training(5, 1)
    kept = [row for row in rows if row["step"] not in (2, 3) or not row["module_path"].startswith("b")]
    record(run, kept, 1, ledger=ledger(len(kept), observed=len(rows), pool_full=20))
    found = cli("doctor", run)
    assert found.exit_code == 1
    (line,) = lines(found, "missing ", "values missing")
    assert line == (
        "missing output, grad_output, param, grad, optim: 20 values missing, rank 1, steps 2..3: "
        "seen and dropped (pool_full): 'b', 'b.c'"
    )
    (hole,) = [check for check in cli("doctor", run, "--json").json["checks"] if check.get("reason") == "dropped"]
    assert (hole["ranks"], hole["steps"], hole["modules"], hole["missing"]) == ([1], [2, 3], ["b", "b.c"], 20)
    (site,) = [check for check in cli("doctor", run, "--json").json["checks"] if check.get("site") == "param"]
    assert (site["expected"], site["found"], site["missing"], site["explained"]) == (30, 26, 4, 0)


def test_a_rank_with_a_trigger_of_its_own_for_the_same_steps_need_not_hear_of_anothers(cli: Cli, run: Path) -> None:
    box = test_expected.TestRings()
    for rank in (0, 1):
        box.record(run, rank, range(4, 7), [{**box.DUMP, "by": f"rank {rank}", "reason": f"NaN {rank}"}])
    found = cli("doctor", run, "--strict")
    assert found.exit_code == 0
    assert len(lines(found, "ok", "dump of steps 4 to 6")) == 2


def test_a_dump_before_a_restart_does_not_hide_who_never_heard_of_one_after_it(cli: Cli, run: Path) -> None:
    box = test_expected.TestRings()
    for rank in (0, 1):
        box.record(run, rank, range(4, 7), [box.DUMP])
    later = {"rules": list(box.RULES), "attempt": 1, "started_ns": 1_800_000_000_000_000_000}
    for rank, dumps in ((0, [box.DUMP]), (1, [])):
        record(run, box.rows(rank, range(4, 7) if rank == 0 else []), rank, name="w1", dumps=dumps, **later)
    assert lines(cli("doctor", run), "note", "dump of steps 4 to 6, rank 0", "rank 1 never heard of the dump")


def test_ranks_that_see_the_same_at_once_make_one_dump_of_the_first(cli: Cli, run: Path) -> None:
    box = test_expected.TestRings()
    for rank, time_ns in ((0, 6), (1, 5)):
        box.record(run, rank, range(4, 7), [{**box.DUMP, "by": f"rank {rank}", "time_ns": time_ns}])
    (line,) = lines(cli("doctor", run, "--strict"), "ok", "dump of steps 4 to 6")
    assert "ranks 0..1" in line and line.endswith("NaN (rank 1)")


def test_a_rank_that_never_heard_of_a_trigger_is_named(cli: Cli, run: Path) -> None:
    box = test_expected.TestRings()
    box.record(run, 0, range(4, 7), [box.DUMP])
    box.record(run, 1, [5], [{**box.DUMP, "first_step": 5, "last_step": 5}])
    found = cli("doctor", run, "--strict")
    assert found.exit_code == 1
    assert lines(found, "note", "dump of steps 4 to 6, rank 0", "rank 1 never heard of the dump")


def test_what_never_was_is_a_note_and_no_finding_however_strict(cli: Cli, run: Path) -> None:
    record(run, renumbered(row for row in training(3) if row["module_path"] != "a" or row["site"] in ("param", "grad")))
    found = cli("doctor", run)
    assert codes(cli, run) == (0, 0)
    assert lines(found, "note", "though its parameters have gradients: used directly, or called as .forward(): 'a'")
    for site in ("output", "grad_output"):
        (line,) = [line for line in lines(found, "values were recorded") if line.split()[1] == site]
        assert " ".join(line.split()[2:]) == "9 of 12 values were recorded; the 3 missing values are explained below"


def test_one_missing_value_is_no_values(cli: Cli, run: Path) -> None:
    record(run, renumbered(row for row in training(1) if row["module_path"] != "a" or row["site"] in ("param", "grad")))
    told = [line for line in lines(cli("doctor", run), "values were recorded") if "missing" in line]
    assert told and all(line.endswith("; the 1 missing value is explained below") for line in told)


@pytest.mark.parametrize("kind", ["ended", "other_ranks", "live", "retired", "unreadable_rule"])
def test_what_may_be_a_loss_is_a_finding_of_the_strict(cli: Cli, run: Path, kind: str) -> None:
    record(run, training(5))
    rows, more = training(5, 1), dict[str, Any]()
    if kind == "ended":
        rows = training(4, 1)
    elif kind == "other_ranks":
        rows = renumbered(row for row in rows if row["module_path"] != "a")
    elif kind == "live":
        more = {"state": "recording", "pid": os.getpid(), "host": os.uname().nodename}
    elif kind == "retired":
        more = {"ledger": ledger(len(rows)) | {"retired": {"rows": 3, "bytes": 1}}}
    else:
        more = {"rules": ["site=output,grad_output,param,grad,optim keep=stats", "no rule"]}
    record(run, rows, 1, **more)
    assert codes(cli, run) == (0, 1)


def test_triggers_that_came_soon_after_another_are_no_finding_and_those_that_were_refused_are(
    cli: Cli, run: Path
) -> None:
    event = {"kind": "trigger_passed", "message": "only counted", "time_ns": 1, "count": 3}
    record(run, training(3), events=[event])
    record(run, training(3, 1), 1)
    assert codes(cli, run) == (0, 0)
    assert lines(cli("doctor", run), "note", "event trigger_passed (rank 0)")
    record(run, training(3, 2), 2, events=[event | {"kind": "trigger_refused"}])
    assert codes(cli, run) == (1, 1)


def test_files_that_are_no_commands_and_what_other_nodes_did_not_hear_are_findings_of_strictness_alone(
    cli: Cli, run: Path
) -> None:
    events = [
        {"kind": kind, "message": "not done", "time_ns": 1, "count": 1} for kind in ("command_refused", "uncarried")
    ]
    record(run, training(3), events=events)
    assert codes(cli, run) == (0, 1)
    why = lines(cli("doctor", run, "--strict"), "exit code 1, because --strict counts: ")
    assert why and "event command_refused (rank 0): not done; event uncarried" in why[0]
    assert not lines(cli("doctor", run), "exit code 1")
    for event in events:
        assert lines(cli("doctor", run), "note", f"event {event['kind']} (rank 0): not done")


def test_ranks_of_nodes_with_a_file_system_of_their_own_are_said_to_be_there(cli: Cli, run: Path) -> None:
    event = {"kind": "nodes_apart", "message": "each has a directory", "time_ns": 1, "count": 1}
    record(run, training(3), events=[event])
    assert codes(cli, run) == (0, 0)
    manifest = run / RUN_MANIFEST
    manifest.write_bytes(encode_manifest({**read_json(manifest), "world_size": 2}))
    assert lines(cli("doctor", run), "missing", "no files of 1 of 2: nodes share no file system", "copied into one")


def test_steps_that_the_ring_left_out_are_laid_to_the_ring(cli: Cli, run: Path) -> None:
    rows = [make_row(step, step=step, site="scalar", name="loss", module_path="") for step in range(4)]
    rules = ["site=output keep=ring steps=0:3", "site=scalar keep=stats"]
    record(run, rows, rules=rules, ledger=ledger(4, observed=40) | {"passed": 36})
    answer = cli("doctor", run)
    assert lines(answer, "ok", "filtered by steps=: 3 of 4 steps are wanted")
    assert lines(
        answer, "ok", "kept only by keep=ring: 3 of 4 steps were not written, because no trigger asked for them"
    )


def test_unequal_steps_are_told_also_where_no_rule_wants_the_steps_between(cli: Cli, run: Path) -> None:
    rule = "site=output,grad_output,param,grad,optim steps=0 keep=stats"
    for rank, last in ((0, 7), (1, 7), (2, 5)):
        rows = step_rows(0, rank)
        rows.append(make_row(len(rows), step=last, rank=rank, module_path="", site="scalar", name="loss"))
        record(run, rows, rank, rules=[rule])
    assert lines(cli("doctor", run), "note", "the record ends on rank 2 in step 5, ranks 0..1 in step 7")
    assert codes(cli, run) == (0, 1)


def test_what_the_accounts_explain_is_a_note_and_no_ok(cli: Cli, run: Path) -> None:
    rows = training(5)
    kept = [row for row in rows if row["step"] not in (1, 2)]
    record(run, kept, ledger=ledger(len(kept), observed=len(rows), pool_full=34))
    (line,) = lines(cli("doctor", run), "note", "param ")
    assert line.split()[1:7] == ["param", "9", "of", "15", "values", "were"]
    assert line.endswith("recorded; the ledger explains the 6 missing values: 6 dropped")
    assert not [line for line in lines(cli("doctor", run), "values were recorded") if line.startswith("ok")]


def test_what_never_was_and_what_the_accounts_explain_are_told_apart(cli: Cli, run: Path) -> None:
    rows = renumbered(row for row in training(5) if row["module_path"] != "a" or row["site"] in ("param", "grad"))
    kept = [row for row in rows if row["step"] not in (1, 2) or not row["module_path"].startswith("b")]
    record(run, kept, ledger=ledger(len(kept), observed=len(rows), pool_full=20))
    (line,) = lines(cli("doctor", run), "note    output ", " of 20 values were recorded")
    assert line.endswith("; 5 of the 9 missing values are explained below, the others by the ledger: 4 dropped")


def test_what_never_was_is_not_laid_on_steps_of_which_everything_was_dropped(cli: Cli, run: Path) -> None:
    rows = renumbered(row for row in training(5) if row["module_path"] != "a" or row["site"] in ("param", "grad"))
    kept = [row for row in rows if row["step"] not in (1, 2)]
    record(run, kept, ledger=ledger(len(kept), observed=len(rows), pool_full=28))
    (line,) = lines(cli("doctor", run), "note    output ", " of 20 values were recorded")
    assert line.endswith("; 5 of the 11 missing values are explained below, the others by the ledger: 6 dropped")


def test_what_no_account_covers_is_not_explained_by_them(cli: Cli, run: Path) -> None:
    rows = training(5)
    kept = [row for row in rows if row["step"] not in (1, 2)]
    record(run, kept, ledger=ledger(len(kept), observed=len(kept) + 3, pool_full=3))
    (line,) = lines(cli("doctor", run), "note", "param ")
    assert line.endswith("; the 6 missing values are listed below")


def test_what_was_dropped_or_never_there_is_explained_and_not_said_to_be_never_called(cli: Cli, run: Path) -> None:
    rows = [make_row(7 * step, step=step, module_path="", site="scalar", name="loss") for step in range(5)]
    record(run, rows, ledger=ledger(len(rows), observed=29, disk_full=24))
    found = cli("doctor", run)
    (line,) = lines(found, "note", "param ")
    assert line.endswith("the ledger explains the 15 missing values: 15 dropped or never there")
    assert lines(found, "missing", "85 values", "dropped, or never there", "(disk_full)")
    assert "never called" not in found.out
    told = [one for one in cli("doctor", run, "--json").json["checks"] if one.get("site") == "param"]
    assert (told[0]["missing"], told[0]["perhaps_dropped"], told[0]["dropped"]) == (15, 15, 0)


def test_what_the_accounts_explain_is_told_beside_what_they_do_not(cli: Cli, run: Path) -> None:
    rows = training(5)
    kept = [row for row in rows if row["step"] not in (1, 2)]
    for rank, number in ((0, 34), (1, 3)):
        its = [row | {"rank": rank} for row in kept]
        record(run, its, rank, ledger=ledger(len(its), observed=len(rows), pool_full=number))
    (line,) = lines(cli("doctor", run), "note", "param ")
    assert line.endswith("; the 12 missing values are listed below; the ledger has 6 dropped")


def test_steps_behind_the_last_recorded_one_are_said_to_be_in_no_table(cli: Cli, run: Path) -> None:
    rows = training(3)
    record(run, rows, ledger=ledger(len(rows), observed=85, disk_full=34))
    (line,) = lines(cli("doctor", run), "note", "seen after the last")
    assert line == (
        "note    rank 0: 34 rows were seen after the last recorded row, of step 2, and dropped: "
        "later steps, if there were any, are not in the table"
    )


@pytest.mark.parametrize(("keep_newest", "setting"), [(5, "keep_newest"), (0, "max_bytes"), ("x", "max_bytes")])
def test_retention_is_told_with_the_setting_that_is_in_force(
    cli: Cli, run: Path, keep_newest: Any, setting: str
) -> None:
    writer = HandmadeWriter(run)
    rows = training(6)
    for first in (0, 2, 4):
        writer.add_shard([[row for row in rows if row["step"] in (first, first + 1)]])
    (writer.directory / "tensors-000001.arrow").unlink()
    accounts = ledger(len(rows)) | {"retired": {"rows": 34, "bytes": 1}}
    settings = {"keep_newest": {"value": keep_newest, "source": "default"}, "max_bytes": {"value": 1, "source": "env"}}
    writer.finish(roots=root(), rules=[RULE], ledger=accounts, settings=settings)
    found = cli("doctor", run)
    assert lines(found, "note", "34 values missing, rank 0, steps 2..3", f": removed by retention ({setting}): ")
    assert all(line.startswith("note") and "the ledger" in line for line in lines(found, "values were recorded"))


def test_each_of_several_strays_of_a_directory_is_named(cli: Cli, run: Path) -> None:
    record(run, training(5))
    assert codes(cli, run) == (0, 0)
    folder = next(run.glob("rank=00000/*/"))
    os.mkfifo(folder / "a.arrow")
    (folder / "b.arrow").symlink_to("/etc/hostname")
    (folder / "c.arrow").touch()
    os.mkfifo(folder / "d.arrow")
    found = cli("doctor", run)
    for name in "abcd":
        assert lines(found, "note", f"{folder / name}.arrow", "none of the run's shards"), name
    assert codes(cli, run) == (0, 1)


def test_a_shard_that_is_gone_is_no_early_end_of_its_rank(cli: Cli, run: Path) -> None:
    for rank in (0, 1):
        writer = HandmadeWriter(run, rank)
        rows = training(5, rank)
        writer.add_shard([rows], kind="stats", with_index=False)
        probe = make_row(len(rows), np.ones(5), step=0, rank=rank, site="probe", name="output")
        writer.add_shard([[probe]], kind="probe")
        writer.finish(roots=root(), rules=[RULE], ledger=ledger(len(rows) + 1))
    next(run.glob("rank=00001/*/stats-*.arrow")).unlink()
    found = cli("doctor", run)
    assert found.exit_code == 1 and "closed its record earlier" not in found.out
    assert lines(found, "missing", "rank 1, steps 0..4")
    gone = f"{next(run.glob('rank=00001/*'))}: 85 of 86 rows that were written are gone; the last shards here: probe"
    assert gone in found.out and gone in cli("check", run).out
    told = cli("layouts", run)
    assert told.exit_code == 1 and gone in told.out


def test_of_runs_of_one_name_the_path_is_told(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECORDER_DIR", str(tmp_path))
    for number in (1, 2):
        record(make_run(tmp_path / f"run-{number}", name="gpt", created_ns=number), training(5))
    for number in (1, 2):
        told = f"to check all bytes: recorder verify {tmp_path}/run-{number}\n"
        assert cli("doctor", tmp_path / f"run-{number}").out.endswith(told)


def test_a_forged_count_of_removed_rows_is_not_told_as_a_fact(cli: Cli, run: Path) -> None:
    rows = training(5)
    record(run, rows, ledger=ledger(len(rows)) | {"retired": {"rows": 123456789, "bytes": 1}})
    found = cli("doctor", run)
    assert found.exit_code == 1 and "123456789" not in found.out
    assert lines(found, "missing", "its counts of rows contradict each other")


def test_absent_ranks_are_told_with_what_may_have_kept_them(cli: Cli, tmp_path: Path) -> None:
    for name, autoload, why in (
        ("a", True, "TORCH_DEVICE_BACKEND_AUTOLOAD=0"),
        ("b", False, "attached only other ranks"),
    ):
        run = make_run(tmp_path / name, world_size=3)
        record(run, training(2), autoload=autoload)
        found = cli("doctor", run)
        assert found.exit_code == 1
        assert lines(found, "missing", "ranks: no files of 1, 2 of 3", why)
        assert lines(found, "output", "8 of 24 values were recorded")


def test_a_rule_for_one_rank_is_told_as_a_filter(cli: Cli, run: Path) -> None:
    for rank in (0, 1):
        rows = training(2, rank) if rank == 0 else [make_row(0, step=s, rank=1, site="scalar") for s in range(1)]
        record(run, rows, rank, rules=["site=output,grad_output,param,grad,optim rank=0 keep=stats"])
    assert lines(cli("doctor", run), "ok", "filtered by rank=: recorded on ranks 0, not on 1: ", "rank=0")


def test_many_gaps_do_not_fill_the_screen(cli: Cli, run: Path) -> None:
    modules = [{"path": "a", "sites": ["output"], "params": [], "buffers": []}]
    roots = [{"name": f"model_{i}", "modules": modules} for i in range(100)]
    rows = [make_row(0, root="model_0", module_path="a"), make_row(1, root="model_0", module_path="a", step=1)]
    rows += [make_row(1 + i, root=f"model_{i}", module_path="a", step=i % 2) for i in range(1, 100)]
    record(run, renumbered(sorted(rows, key=lambda row: int(row["step"]))), roots=roots, rules=["site=output"])
    found = cli("doctor", run)
    assert lines(found, "note", "59 gaps smaller than the following; --json has all")
    assert len(lines(found, "values missing")) + len(lines(found, "1 value missing")) == 40
    assert len([check for check in cli("doctor", run, "--json").json["checks"] if "reason" in check]) == 99


def test_it_fits_a_terminal_and_what_is_missing_stands_last(run: Path) -> None:
    rows = [row for row in training(3) if row["step"] != 1]
    record(run, rows, ledger=ledger(len(rows), observed=51, pool_full=17))
    shown = on_a_terminal("doctor", str(run), is_plain=True).splitlines()
    states = [line.split()[0] for line in shown]
    assert states == sorted(states, key=["ok", "note", "missing"].index)
    assert states[-1] == "missing"


@pytest.mark.parametrize(
    ("paths", "shown"),
    [
        ([f"blocks.{i}.mlp" for i in range(12)], ["'blocks.{0..11}.mlp'"]),
        ([f"a.{i}.b.{j}" for i in (0, 1) for j in (3, 5)], ["'a.{0..1}.b.{3,5}'"]),
        (["a.0", "a.1"], ["'a.0'", "'a.1'"]),
        (["a.0.1", "a.1.0", "a.2.2"], ["'a.0.1'", "'a.1.0'", "'a.2.2'"]),
        (["", "head", "a.3.x", "a.4.x", "a.5.x"], ["(the model)", "'head'", "'a.{3..5}.x'"]),
        (["a.00", "a.01", "a.02"], ["'a.00'", "'a.01'", "'a.02'"]),
        ([f"a.{i}.7" for i in range(3)], ["'a.{0..2}.7'"]),
        ([f"{i}.0" for i in range(0, 130, 2)], ["'{0,2,4,...,128 (65)}.0'"]),
    ],
)
def test_modules_that_differ_in_numbers_alone_are_one_name(paths: list[str], shown: list[str]) -> None:
    assert grouped(paths) == shown


def test_help_tells_the_exit_codes(cli: Cli) -> None:
    found = cli("doctor", "--help")
    assert "--strict" in found.out and "Exit code 1" in found.out


def test_a_rank_that_was_killed_under_torchrun(cli: Cli, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(KILLED)
    rules = "site=output,grad_output,param,grad,buffer keep=stats"
    job = jobs.torchrun(tmp_path / "job", script, **jobs.recording(rules, flush_interval_s="0.1"))
    killed = job.wait()
    assert killed.returncode != 0
    found = cli("doctor", killed.run.path)
    assert found.exit_code == 1
    (died,) = lines(found, "the process ended without closing")
    assert killed.run.writers[1].last_step == 4, "it lived until all of five steps were on disk"
    assert "rank 1, steps 5.." in died
    assert "the record ends in step 4" in died
    assert lines(found, "missing rank 1 (writer", "the record ends in step 4")
    assert not lines(found, "rank 0", "missing ", "values")


KILLED = """
import os, signal, time
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10):
    model(torch.randn(4, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 4:
        time.sleep(1.5)
        dist.barrier()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
time.sleep(3)
"""
