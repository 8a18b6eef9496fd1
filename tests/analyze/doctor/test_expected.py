"""Expected against found: every gap has the reason that it has, and what never was is no loss."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from recorder.analyze.doctor.expected import Expectation, at_steps, compare
from recorder.analyze.doctor.gaps import Gap
from recorder.analyze.doctor.observed import DroppedTail
from recorder.rules import Rule, Schedule
from recorder.run.run import open_run
from tests.rigs.capturing import EVERYTHING, Tiny, batch, flagged
from tests.rigs.handmade import HandmadeWriter, Row, flip, ledger, make_row, make_run
from tests.rigs.writer import Rig

ALL_SITES = ["input", "output", "grad_input", "grad_output", "param", "grad", "buffer", "optim", "tap", "scalar"]
SITES = ("output", "grad_output", "param", "grad", "optim")
RULE = "site=output,grad_output,param,grad,optim keep=stats"
Leave = Callable[[Row], bool]


def module(path: str, sites: Iterable[str] = SITES, params: Iterable[str] = ("weight",), **more: Any) -> dict[str, Any]:
    found = {"path": path, "class": "Linear" if path else "Net", "sites": list(sites), "aliases": [], "buffers": []}
    return found | {"params": list(params) if path else [], "compiled": False} | more


MODULES = [module(""), module("a"), module("b"), module("b.c")]


def root(modules: list[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
    return [{"name": "model", "class": "Net", "modules": MODULES if modules is None else modules}]


def step_rows(step: int, rank: int = 0, paths: Iterable[str] = ("", "a", "b", "b.c"), first: int = 0) -> list[Row]:
    """A training step of `MODULES`: outputs, their gradients, then what is read around the update."""
    rows: list[Row] = []

    def add(path: str, site: str, name: str = "", phase: str = "forward", **columns: Any) -> None:
        key: dict[str, Any] = {
            "step": step,
            "rank": rank,
            "module_path": path,
            "site": site,
            "name": name,
            "phase": phase,
        }
        rows.append(make_row(first + len(rows), **key, **columns))

    for path in paths:
        add(path, "output")
    for path in paths:
        add(path, "grad_output", phase="backward")
    for path in paths:
        if path:
            add(path, "param", "weight", "optimizer", micro_step=None)
            add(path, "grad", "weight", "optimizer", micro_step=None)
            add(path, "optim", "weight.exp_avg", "optimizer", micro_step=None)
    return rows


def training(num_steps: int, rank: int = 0, first_step: int = 0) -> list[Row]:
    rows: list[Row] = []
    for step in range(first_step, first_step + num_steps):
        rows += step_rows(step, rank, first=len(rows))
    return rows


def renumbered(rows: Iterable[Row]) -> list[Row]:
    """Rows as they would be numbered had nothing else ever been seen."""
    return [row | {"seq": number} for number, row in enumerate(rows)]


def record(run: Path, rows: list[Row], rank: int = 0, name: str = "w", **manifest: Any) -> HandmadeWriter:
    writer = HandmadeWriter(run, rank, name)
    writer.add_shard([rows], kind="stats")
    accounts = ledger(len(rows), observed=rows[-1]["seq"] + 1 if rows else 0)
    told: dict[str, Any] = {"roots": root(), "rules": [RULE], "ledger": accounts}
    writer.finish(**told | manifest)
    return writer


def dropped(rows: list[Row], num_all: int, **reasons: int) -> dict[str, object]:
    return ledger(len(rows), observed=num_all, **reasons)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


@pytest.fixture
def dead(tmp_path: Path) -> dict[str, Any]:
    """Of a manifest whose process was killed."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return {"state": "recording", "pid": process.pid, "host": os.uname().nodename}


def found_in(run: Path) -> Expectation:
    return compare(open_run(run))


def totals(found: Expectation) -> dict[str, tuple[int, int]]:
    return {total.site: (total.expected, total.found) for total in found.totals}


def reasons(found: Expectation) -> list[str]:
    return [gap.reason.key for gap in found.gaps]


def only(found: Expectation, reason: str) -> Gap:
    (gap,) = [gap for gap in found.gaps if gap.reason.key == reason]
    return gap


def what(gap: Gap) -> tuple[list[str], list[str], list[int], list[int | None], int]:
    return gap.sites, gap.modules, gap.steps, gap.ranks, gap.num_missing


class TestNothingMissing:
    def test_a_whole_run_has_no_holes(self, run: Path) -> None:
        for rank in (0, 1):
            record(run, training(5, rank), rank)
        found = found_in(run)
        assert found.gaps == []
        assert totals(found) == {
            "output": (40, 40), "grad_output": (40, 40), "param": (30, 30), "grad": (30, 30), "optim": (30, 30),
        }  # fmt: skip
        assert (found.silent, found.problems, found.num_filtered, found.uneven, found.num_incomplete) == (
            {},
            [],
            0,
            [],
            0,
        )

    def test_steps_that_no_rule_wants_are_not_expected(self, run: Path) -> None:
        rule = RULE + " steps=0:4:2,pow2"
        rows = [row for row in training(10) if row["step"] in (0, 1, 2, 4, 8)]
        record(run, [*renumbered(rows), make_row(len(rows), step=9, site="scalar", module_path="")], rules=[rule])
        found = found_in(run)
        assert found.gaps == []
        assert (found.num_steps_expected, found.num_steps_lived) == (5, 10)

    def test_a_rule_for_some_ranks_expects_nothing_of_the_others(self, run: Path) -> None:
        rules = ["site=output keep=stats", "site=grad rank=0 keep=stats"]
        for rank in (0, 1):
            wanted = ("output", "grad") if rank == 0 else ("output",)
            rows = renumbered(row for row in training(3, rank) if row["site"] in wanted)
            record(run, rows, rank, rules=rules, roots=root([module(m["path"], wanted) for m in MODULES]))
        found = found_in(run)
        assert found.gaps == []
        assert totals(found) == {"output": (24, 24), "grad": (9, 9)}
        ((rule, inside, outside),) = found.reaches
        assert ("rank=0" in rule, inside, outside) == (True, [0], [1])

    def test_names_that_a_rule_wants_are_expected_where_they_were_seen(self, run: Path) -> None:
        rows = renumbered(row for row in training(3) if row["module_path"] == "a" and row["site"] == "output")
        rows = [row | {"name": "hidden"} for row in rows]
        record(run, rows, rules=["site=output name=hidden keep=stats"], roots=root([module("a"), module("b")]))
        found = found_in(run)
        assert (found.gaps, totals(found), found.num_filtered) == ([], {"output": (3, 3)}, 1)

    def test_module_class_leaf_and_regular_expressions_are_those_of_the_rules(self, run: Path) -> None:
        rules = ["module=re:b(\\.c)? site=output keep=stats", "class=Net site=output", "leaf=yes module=!a site=param"]
        wanted = {("b", "output"), ("b.c", "output"), ("", "output"), ("b.c", "param")}
        rows = [row for row in training(2) if (row["module_path"], row["site"]) in wanted]
        record(run, renumbered(rows), rules=rules)
        found = found_in(run)
        assert (found.gaps, totals(found)) == ([], {"output": (6, 6), "param": (2, 2)})

    def test_a_restart_that_repeats_steps_leaves_no_hole(self, run: Path, dead: dict[str, Any]) -> None:
        record(run, training(6), name="w0", **dead)
        record(run, training(6, first_step=5), name="w1", attempt=1, started_ns=1_800_000_000_000_000_000)
        found = found_in(run)
        assert (found.gaps, totals(found)["output"]) == ([], (44, 44))

    def test_of_attempts_whose_steps_were_counted_the_newest_is_meant(self, run: Path, dead: dict[str, Any]) -> None:
        record(run, training(9), name="w0", step_source="counted", **dead)
        record(run, training(3), name="w1", attempt=1, step_source="counted", started_ns=1_800_000_000_000_000_000)
        assert totals(found_in(run))["output"] == (12, 12)

    def test_steps_that_a_user_named_are_expected_where_somebody_has_them(self, run: Path) -> None:
        rows = [row | {"step": row["step"] * 10**12} for row in training(3)]
        record(run, rows, step_source="user")
        record(run, [row | {"rank": 1} for row in rows], 1, step_source="user")
        assert (found_in(run).gaps, totals(found_in(run))["output"]) == ([], (24, 24))


class TestLosses:
    def test_back_pressure_is_told_by_the_numbers_of_the_rows(self, run: Path) -> None:
        for rank in (0, 1):
            rows = training(5, rank)
            kept = [r for r in rows if rank == 0 or r["step"] != 3 or not r["module_path"].startswith("b")]
            record(run, kept, rank, ledger=dropped(kept, len(rows), pool_full=10 * rank))
        found = found_in(run)
        gap = only(found, "dropped")
        assert what(gap) == (list(SITES), ["b", "b.c"], [3], [1], 10)
        assert (gap.detail, gap.reason.is_loss) == ("pool_full", True)
        assert totals(found)["output"] == (40, 38)

    def test_a_step_of_which_everything_was_dropped(self, run: Path) -> None:
        rows = training(5)
        kept = [row for row in rows if row["step"] not in (1, 2)]
        record(run, kept, ledger=dropped(kept, len(rows), **{"write_error:EIO": 34}))
        gap = only(found_in(run), "dropped")
        assert (what(gap)[2:], gap.detail) == (([1, 2], [0], 34), "write_error:EIO")

    def test_where_drops_may_be_the_reason_nothing_is_said_to_be_never_called(self, run: Path) -> None:
        """Of no step is a module's value left, and the drops are too few for all that the rules select."""
        rows = renumbered(
            row
            for step in range(3)
            for row in (
                *(row for row in step_rows(step) if row["site"] != "optim"),
                make_row(0, step=step, site="scalar", name="loss", module_path=""),
            )
        )
        kept = [row for row in rows if row["site"] == "scalar"]
        record(run, kept, rules=["site=* keep=stats"], ledger=dropped(kept, len(rows), disk_full=len(rows) - 3))
        found = found_in(run)
        gap = only(found, "perhaps_dropped")
        assert (gap.num_missing, gap.steps, gap.detail, gap.reason.is_loss) == (51, [0, 1, 2], "disk_full", True)
        assert [total.perhaps_dropped for total in found.totals] == [total.expected for total in found.totals]
        assert (reasons(found), found.silent) == (
            ["perhaps_dropped"],
            {"gone": [("model", m) for m in ("a", "b", "b.c")]},
        )

    def test_of_a_module_that_is_missing_at_every_step_with_drops_it_is_said_that_they_may_be_why(
        self, run: Path
    ) -> None:
        rows = renumbered(row for row in training(3) if row["site"] == "output")
        kept = [row for row in rows if row["module_path"] not in ("a", "b")]
        roots = root([*MODULES, module("d")])
        accounts = dropped(kept, len(rows), pool_full=len(rows) - len(kept))
        record(run, kept, rules=["site=output keep=stats"], ledger=accounts, roots=roots)
        found = found_in(run)
        assert (only(found, "dropped").num_missing, only(found, "perhaps_dropped").num_missing) == (6, 3)
        assert (reasons(found).count("dropped"), len(found.gaps)) == (1, 2)
        assert found.silent == {"gone": [("model", "a"), ("model", "d")], "children": [("model", "b")]}

    def test_modules_of_which_all_lay_in_a_damaged_shard_are_not_said_to_be_never_called(self, run: Path) -> None:
        rows = training(4)
        writer = HandmadeWriter(run)
        shards = [
            writer.add_shard([[row for row in rows if (row["module_path"] == "") == is_kept]], with_index=False)
            for is_kept in (True, False)
        ]
        writer.finish(roots=root(), rules=[RULE])
        flip(shards[1], 8 * shards[1].read_bytes().index(b"grad_output"))
        assert found_in(run).silent == {"gone": [("model", m) for m in ("a", "b", "b.c")]}

    def test_drops_at_the_end_are_no_earlier_end(self, run: Path) -> None:
        record(run, training(5))
        rows = training(2, 1)
        record(run, rows, 1, ledger=dropped(rows, 85, disk_full=51))
        assert what(only(found_in(run), "dropped"))[2:] == ([2, 3, 4], [1], 51)

    def test_a_reason_that_the_step_shows_is_not_replaced_by_that_of_a_step_without_drops(self, run: Path) -> None:
        rows = [row for row in training(4) if row["site"] != "optim"]  # SGD without momentum
        rows = renumbered(row for row in rows if row["step"] < 3 or row["site"] == "output")  # the last was a forward
        kept = [row for row in rows if (row["module_path"], row["site"]) != ("a", "output") or row["step"] == 3]
        record(run, kept, ledger=dropped(kept, len(rows), unsupported=3))
        found = found_in(run)
        assert (only(found, "no_state").sites, only(found, "no_state").steps) == (["optim"], [0, 1, 2])
        assert only(found, "no_update").steps == [3]

    def test_what_was_dropped_behind_the_end_of_the_table_is_told(self, run: Path) -> None:
        rows = training(3)
        record(run, rows, ledger=dropped(rows, 85, disk_full=34))
        record(run, training(3, 1), 1)
        assert found_in(run).tails == [DroppedTail(0, 2, 34)]

    def test_what_was_dropped_before_the_end_of_the_table_is_in_the_table(self, run: Path) -> None:
        rows = training(2, 1)
        record(run, rows, 1, ledger=dropped(rows, 85, disk_full=51))
        record(run, training(5))
        assert found_in(run).tails == []

    def test_accounts_explain_no_more_than_they_hold(self, run: Path) -> None:
        rows = training(5)
        kept = [row for row in rows if row["step"] not in (1, 2)]
        for rank, number in ((0, 34), (1, 33)):
            its = [row | {"rank": rank} for row in kept]
            record(run, its, rank, ledger=dropped(its, len(rows), pool_full=number))
        found = found_in(run)
        assert only(found, "dropped").num_missing == 68
        assert sum(total.dropped for total in found.totals) == 34, "of rank 0 alone"

    def test_a_killed_rank_says_where_its_record_ends(self, run: Path, dead: dict[str, Any]) -> None:
        record(run, training(5))
        record(run, training(3, 1)[:-2], 1, **dead)
        found = found_in(run)
        gap = only(found, "died")
        assert (gap.detail, gap.steps, gap.ranks) == ("the record ends in step 2", [2, 3, 4], [1])
        assert gap.num_missing == 2 + 2 * 17
        assert reasons(found) == ["died"]

    def test_what_a_live_writer_has_not_written_yet_is_no_loss(self, run: Path) -> None:
        record(run, training(5))
        live: dict[str, Any] = {"state": "recording", "pid": os.getpid(), "host": os.uname().nodename}
        record(run, training(4, 1)[:-3], 1, **live)
        found = found_in(run)
        gap = only(found, "live")
        assert (gap.reason.is_loss, gap.steps, gap.ranks) == (False, [3, 4], [1])
        assert reasons(found) == ["live"]

    def test_what_the_quota_removed(self, run: Path) -> None:
        rows = training(6)
        writer = HandmadeWriter(run)
        for first in (0, 2, 4):
            writer.add_shard([[row for row in rows if row["step"] in (first, first + 1)]])
        (writer.directory / "tensors-000001.arrow").unlink()
        (writer.directory / "_tensors-000001.index").unlink()
        accounts = ledger(len(rows)) | {"retired": {"rows": 34, "bytes": 1}}
        writer.finish(roots=root(), rules=[RULE], ledger=accounts)
        found = found_in(run)
        assert what(only(found, "retired"))[2:] == ([2, 3], [0], 34)
        assert sum(total.retired for total in found.totals) == 34
        assert reasons(found) == ["retired"]

    def test_a_damaged_shard_is_named(self, run: Path) -> None:
        rows = training(6)
        writer = HandmadeWriter(run)
        shards = [
            writer.add_shard([[row for row in rows if row["step"] in (first, first + 1)]], with_index=False)
            for first in (0, 2, 4)
        ]
        writer.finish(roots=root(), rules=[RULE])
        flip(shards[1], 8 * shards[1].read_bytes().index(b"grad_output"))
        gap = only(found_in(run), "corrupt")
        assert (gap.detail, gap.steps, gap.num_missing) == ("tensors-000001.arrow", [2, 3], 34)

    def test_a_file_that_somebody_deleted_is_unaccounted_for(self, run: Path) -> None:
        rows = training(6)
        writer = HandmadeWriter(run)
        for first in (0, 2, 4):
            writer.add_shard([[row for row in rows if row["step"] in (first, first + 1)]])
        (writer.directory / "tensors-000001.arrow").unlink()
        writer.finish(roots=root(), rules=[RULE])
        assert only(found_in(run), "unaccounted").steps == [2, 3]

    def test_a_rank_that_left_nothing_is_counted(self, tmp_path: Path) -> None:
        run = make_run(tmp_path / "run", world_size=4)
        for rank in (0, 2):
            record(run, training(2, rank), rank, rules=["site=output keep=stats", "site=grad rank=0,3 keep=stats"])
        found = found_in(run)
        gap = only(found, "absent")
        assert (gap.ranks, gap.sites, gap.num_missing) == ([1, 3], ["output", "grad"], 8 + 8 + 6)

    def test_of_a_rank_without_manifest_the_same_is_expected(self, run: Path) -> None:
        record(run, training(3))
        rows = [row for row in training(3, 1) if row["step"] != 1]
        writer = record(run, rows, 1)
        (writer.directory / "_writer.json").unlink()
        found = found_in(run)
        assert totals(found)["output"] == (24, 20)
        assert [gap.num_missing for gap in found.gaps] == [17]

    def test_a_rank_that_closed_earlier_is_told_as_that(self, run: Path) -> None:
        record(run, training(5))
        record(run, training(3, 1), 1)
        found = found_in(run)
        gap = only(found, "ended")
        assert (gap.detail, gap.steps, gap.num_missing) == ("its last step is 2", [3, 4], 34)
        assert (gap.reason.is_loss, gap.reason.is_harmless) == (False, False)
        assert found.last_steps == {0: 4, 1: 2}

    def test_a_tensor_that_lacks_a_part(self, run: Path) -> None:
        from tests.rigs.handmade import make_parts

        parts = make_parts(0, np.zeros((4, 6), np.float32), 3)
        writer = HandmadeWriter(run)
        writer.add_shard([[parts[0], parts[2]]])
        writer.finish(roots=root([module("layers.0", ["output"])]), rules=[RULE], ledger=ledger(2, pool_full=1))
        assert found_in(run).num_incomplete == 1

    def test_what_never_came_is_not_laid_on_a_loss(self, run: Path) -> None:
        rows = [row for row in training(5) if row["module_path"] != "b"]
        rows = renumbered(rows)
        kept = [row for row in rows if row["step"] != 2 or row["module_path"] != "a"]
        record(run, kept, ledger=dropped(kept, len(rows), pool_full=5))
        found = found_in(run)
        assert what(only(found, "dropped")) == (list(SITES), ["a"], [2], [0], 5)
        assert found.silent == {"children": [("model", "b")]}

    def test_drops_explain_no_more_than_was_dropped_and_nothing_of_another_phase(self, run: Path) -> None:
        """At each step one gradient of an activation is dropped; b.c is frozen and a is never called."""
        rows = [
            row
            for row in training(4)
            if (row["module_path"] != "b.c" or row["phase"] != "optimizer")
            and (row["module_path"] != "a" or row["phase"] == "optimizer")
        ]
        rows = renumbered(rows)
        kept = [r for r in rows if (r["site"], r["module_path"]) != ("grad_output", ("b", "b.c")[r["step"] % 2])]
        record(run, kept, ledger=dropped(kept, len(rows), **{"unsupported_type:X": 4}))
        found = found_in(run)
        gap = only(found, "dropped")
        assert what(gap) == (["grad_output"], ["b", "b.c"], [0, 1, 2, 3], [0], 4)
        assert what(only(found, "bypassed"))[:2] == (["output", "grad_output"], ["a"])
        assert only(found, "not_optimized").modules == ["b.c"]
        assert sum(gap.num_missing for gap in found.gaps if gap.reason.is_loss) == 4

    def test_what_is_regular_was_dropped_rather_than_what_is_not(self, run: Path) -> None:
        rows = [row for row in training(8) if row["module_path"] != "b.c" or row["step"] < 2]
        rows = renumbered(rows)
        kept = [row for row in rows if (row["step"], row["module_path"], row["site"]) != (5, "a", "output")]
        record(run, kept, ledger=dropped(kept, len(rows), pool_full=1))
        assert what(only(found_in(run), "dropped")) == (["output"], ["a"], [5], [0], 1)


class TestWhatNeverWas:
    def test_a_module_that_is_never_called(self, run: Path) -> None:
        record(run, renumbered(row for row in training(3) if row["module_path"] != "a"))
        found = found_in(run)
        assert found.silent == {"never_called": [("model", "a")]}
        assert what(only(found, "silent"))[:2] == (["output", "grad_output"], ["a"])

    def test_a_module_without_parameters_that_is_never_called_is_a_note(self, run: Path) -> None:
        record(run, training(3), roots=root([*MODULES, module("a.drop", params=())]))
        found = found_in(run)
        assert found.silent == {"without_parameters": [("model", "a.drop")]}
        gap = only(found, "never_called")
        assert what(gap)[:2] == (["output", "grad_output"], ["a.drop"])
        assert not gap.reason.is_loss and not gap.reason.is_harmless, "a finding under --strict alone"

    @pytest.mark.parametrize("sites", [("grad",), ("param", "grad", "optim")])
    def test_a_tied_parameter_is_told_to_be_another_name(self, run: Path, sites: tuple[str, ...]) -> None:
        rows = [row for row in training(3) if row["module_path"] != "b.c" or row["site"] in ("output", "grad_output")]
        rows = [row for row in rows if row["site"] in ("output", "grad_output", *sites)]
        tied = module("b.c", tied={"weight": "a.weight"})
        rules = [f"site=output,grad_output,{','.join(sites)} keep=stats"]
        record(run, renumbered(rows), rules=rules, roots=root([*MODULES[:3], tied]))
        gap = only(found_in(run), "tied")
        assert (gap.sites, gap.modules, gap.detail) == (list(sites), ["b.c"], "tied to 'a.weight'")

    def test_a_compiled_module(self, run: Path) -> None:
        modules = [module(""), module("a", compiled=True), module("b"), module("b.c")]
        forward = ("output", "grad_output")
        rows = renumbered(row for row in training(3) if row["module_path"] != "a" or row["site"] not in forward)
        record(run, rows, roots=root(modules))
        assert what(only(found_in(run), "compiled")) == (list(forward), ["a"], [0, 1, 2], [0], 6)

    def test_what_is_inside_a_compiled_module_is_compiled(self, run: Path) -> None:
        modules = [module(""), module("a"), module("b", compiled=True), module("b.c")]
        rows = [row for row in training(3) if row["module_path"] != "b.c"]
        record(run, renumbered(rows), roots=root(modules))
        assert found_in(run).silent == {"compiled": [("model", "b.c")]}

    def test_a_module_whose_parameters_work_without_its_forward(self, run: Path) -> None:
        forward = ("output", "grad_output")
        record(run, renumbered(row for row in training(3) if row["module_path"] != "a" or row["site"] not in forward))
        gap = only(found_in(run), "bypassed")
        assert (gap.modules, gap.reason.is_harmless) == (["a"], True)

    def test_a_module_that_is_unused(self, run: Path) -> None:
        rows = [row for row in training(3) if row["module_path"] != "a" or row["site"] == "param"]
        record(run, renumbered(rows))
        found = found_in(run)
        assert what(only(found, "unused"))[:2] == (["output", "grad_output"], ["a"])
        assert what(only(found, "no_param_gradient")) == (["grad"], ["a"], [0, 1, 2], [0], 3)
        assert what(only(found, "no_state")) == (["optim"], ["a"], [0, 1, 2], [0], 3)

    def test_a_frozen_parameter(self, run: Path) -> None:
        rows = [row for row in training(3) if row["module_path"] != "a" or row["site"] == "output"]
        record(run, renumbered(rows))
        found = found_in(run)
        assert what(only(found, "not_optimized"))[:2] == (["param", "grad", "optim"], ["a"])
        assert what(only(found, "no_gradient"))[:2] == (["grad_output"], ["a"])
        assert all(gap.reason.is_harmless for gap in found.gaps)

    def test_a_parameter_that_no_optimizer_has_is_told_as_that(self, run: Path) -> None:
        rows = [row for row in training(3) if row["module_path"] != "a" or row["site"] in ("output", "grad_output")]
        modules = [module("a", untrained=["weight"]) if one["path"] == "a" else one for one in MODULES]
        record(run, renumbered(rows), roots=root(modules))
        assert what(only(found_in(run), "in_no_optimizer"))[:2] == (["param", "grad", "optim"], ["a"])

    def test_a_module_that_is_called_now_and_then(self, run: Path) -> None:
        forward = ("output", "grad_output")
        rows = [r for r in training(4) if r["module_path"] != "a" or r["site"] not in forward or r["step"] == 1]
        record(run, renumbered(rows))
        assert what(only(found_in(run), "not_called")) == (list(forward), ["a"], [0, 2, 3], [0], 6)

    def test_a_module_that_only_an_evaluation_calls(self, run: Path) -> None:
        rows = [row for row in training(3) if row["module_path"] != "a" or row["site"] in ("output", "param")]
        rows = [
            row | ({"mode": "no_grad"} if (row["module_path"], row["site"]) == ("a", "output") else {}) for row in rows
        ]
        record(run, renumbered(rows))
        assert what(only(found_in(run), "evaluation"))[:2] == (["grad_output"], ["a"])

    def test_rank_0_that_evaluates_alone_loses_nothing_on_the_others(self, run: Path) -> None:
        rows = training(4)
        for step in (1, 3):
            rows.append(make_row(len(rows), step=step, module_path="probe", mode="no_grad"))
            rows.append(make_row(len(rows), step=step, module_path="a", mode="no_grad"))
        modules = [*MODULES, module("probe", ["output"], [])]
        rows = renumbered(sorted(rows, key=lambda row: int(row["step"])))
        record(run, rows, roots=root(modules))
        record(run, training(4, 1), 1, roots=root(modules))
        found = found_in(run)
        assert what(only(found, "elsewhere")) == (["output"], ["probe"], [0, 1, 2, 3], [1], 4)
        assert all(gap.reason.is_harmless for gap in found.gaps)
        ((mode, ranks, steps, is_alone),) = found.uneven
        assert (mode, ranks, steps, is_alone) == ("no_grad", [0], [1, 3], True)

    def test_a_module_that_trains_on_another_rank_alone_is_no_harmless_hole(self, run: Path) -> None:
        record(run, training(2))
        record(run, renumbered(row for row in training(2, 1) if row["module_path"] != "a"), 1)
        gap = only(found_in(run), "other_ranks")
        assert (gap.modules, gap.ranks, gap.reason.is_harmless) == (["a"], [1], False)

    def test_a_root_that_rests_while_another_trains(self, run: Path) -> None:
        rows = [row | {"root": "model" if row["step"] % 2 else "model_1"} for row in training(4)]
        roots = [{"name": name, "modules": MODULES} for name in ("model", "model_1")]
        record(run, rows, roots=roots)
        found = found_in(run)
        assert {(gap.reason.key, gap.root, tuple(gap.steps)) for gap in found.gaps} == {
            (reason, name, steps)
            for name, steps in (("model", (0, 2)), ("model_1", (1, 3)))
            for reason in ("root_idle", "no_update")
        }

    def test_a_last_step_without_an_update(self, run: Path) -> None:
        rows = [row for row in training(3) if row["step"] < 2 or row["site"] == "output"]
        record(run, renumbered(rows))
        found = found_in(run)
        assert what(only(found, "no_update"))[::2] == (["param", "grad", "optim"], [2], 9)
        assert what(only(found, "no_gradient"))[::2] == (["grad_output"], [2], 4)

    def test_a_module_whose_output_holds_no_tensor(self, run: Path) -> None:
        rows = renumbered(row | {"site": "input", "name": "x"} for row in training(2) if row["site"] == "output")
        rows = [row for row in rows if row["module_path"] == "a"]
        record(run, renumbered(rows), rules=["site=input,output"], roots=root([module("a", ["input", "output"])]))
        assert what(only(found_in(run), "no_tensor"))[:2] == (["output"], ["a"])

    def test_a_shared_module_is_one(self, run: Path) -> None:
        record(run, training(2), roots=root([*MODULES[:2], module("b", aliases=["head"]), MODULES[3]]))
        found = found_in(run)
        assert (found.gaps, found.shared) == ([], [("b", "head")])


class TestMergedRuns:
    def merged(self, run: Path, rows: list[Row], **manifest: Any) -> Path:
        (run / "_run.json").write_text(
            json.dumps(json.loads((run / "_run.json").read_text()) | {"merged_from": {"path": "there"}})
        )
        writer = HandmadeWriter(run)
        whole = run / "global" / "w"
        whole.parent.mkdir()
        writer.add_shard([[row | {"rank": None} for row in rows]], kind="stats")
        writer.finish(**{"rank": None, "roots": root(), "rules": [RULE + " rank=1"]} | manifest)
        writer.directory.rename(whole)
        writer.directory.parent.rmdir()
        return run

    def test_it_is_whole_where_the_ranks_together_were(self, run: Path) -> None:
        found = found_in(self.merged(run, training(3)))
        assert (found.is_merged, found.gaps, totals(found)["output"]) == (True, [], (12, 12))

    def test_rows_that_lack_ranks_are_told(self, run: Path) -> None:
        rows = [
            row | {"ranks_present": "[0]" if row["step"] else "[0,1]", "ranks_expected": "[0,1]"} for row in training(3)
        ]
        ((missing, num_rows, steps, mode),) = found_in(self.merged(run, rows)).partial
        assert (missing, num_rows, steps, mode) == ([1], 34, [1, 2], "train")

    def test_a_hole_of_a_lossy_source_is_not_called_harmless(self, run: Path) -> None:
        rows = renumbered(row for row in training(3) if row["step"] != 1 or row["module_path"] != "a")
        source = {"rank": 0, "writer": "w", "state": "closed", "dropped": {"pool_full": 5}}
        found = found_in(self.merged(run, rows, merged_writers=[source]))
        assert what(only(found, "not_merged"))[1:4] == (["a"], [1], [None])


class TestStrangers:
    @pytest.mark.parametrize(
        "roots",
        [
            None, 7, "x", [7], [{}], [{"modules": 3}], [{"modules": [{}, 5, {"path": 3}]}],
            [{"name": [], "modules": [{"path": "a", "sites": "output", "params": [1, None], "compiled": "yes"}]}],
            [{"name": "model", "modules": [module("a"), module("a", params=["other"])]}],
        ],
    )  # fmt: skip
    @pytest.mark.parametrize(
        "rules", [None, "x", [3], ["site=nothing"], ["site=output steps=99999999999999999999:"], [RULE]]
    )
    def test_any_manifest_is_borne(self, run: Path, roots: Any, rules: Any) -> None:
        record(run, training(2), roots=roots, rules=rules)
        found = found_in(run)
        assert isinstance(found.gaps, list)

    def test_a_rule_that_cannot_be_read_is_said(self, run: Path) -> None:
        record(run, training(2), rules=["keep=somewhere", RULE])
        (problem,) = found_in(run).problems
        assert "'keep=somewhere' cannot be read" in problem

    def test_a_site_of_a_later_version_in_a_rule_is_said_and_the_others_are_judged(self, run: Path) -> None:
        record(run, training(2), rules=["site=output,nowhere keep=stats"])
        found = found_in(run)
        (problem,) = found.problems
        assert problem.endswith("names sites that are unknown to this version, and are not judged: 'nowhere'")
        assert [total.site for total in found.totals] == ["output"]

    def test_a_regular_expression_that_would_take_for_ever_does_not(self, run: Path) -> None:
        path = "a" * 60
        record(run, training(1), rules=["module=re:(a+)+b site=output"], roots=root([module(path)]))
        assert found_in(run).gaps == []

    def test_one_that_needs_more_than_that_is_said(self, run: Path) -> None:
        record(run, training(1), rules=["module=re:(?!a).* site=output", RULE])
        (problem,) = found_in(run).problems
        assert "(?!a)" in problem and "cannot be judged" in problem

    def test_steps_at_the_ends_of_their_range(self, run: Path) -> None:
        rows = [make_row(n, step=step, module_path="a") for n, step in enumerate((-(2**53), -1, 0, 2**53 - 1))]
        record(run, rows, roots=root([module("a", ["output"])]))
        assert totals(found_in(run))["output"] == (2, 2), "no schedule holds a step below 0"

    @pytest.mark.parametrize("text", ["::1", "5", "3:9", "::7", "2:40:5,pow2", "pow2", "0:10,10:100:10,60::20", "9:3"])
    def test_schedules_mean_what_they_mean_when_recording(self, text: str) -> None:
        steps = np.arange(-3, 150)
        rule = Rule(steps=Schedule.parse(text))
        assert steps[at_steps(rule, steps)].tolist() == [step for step in steps.tolist() if step in rule.steps]

    def test_a_path_of_a_million_levels(self, run: Path) -> None:
        path = "a." * 1_000_000 + "a"
        record(run, training(1), roots=root([module(path), module("a")]))
        assert {module for gap in found_in(run).gaps for module in gap.modules} == {path}

    def test_fifty_thousand_modules(self, run: Path) -> None:
        modules = [module(f"layers.{i // 10}.m{i % 10}") for i in range(50_000)]
        rows = [make_row(i, step=i % 2, module_path=modules[i % 50_000]["path"]) for i in range(2000)]
        rows = renumbered(sorted(rows, key=lambda row: int(row["step"])))
        record(run, rows, roots=root(modules), rules=["site=output keep=stats"])
        found = found_in(run)
        assert totals(found) == {"output": (100_000, 2000)}
        assert len(found.silent["never_called"]) == 48_000
        assert only(found, "not_called").num_missing == 2000


class Shared(nn.Module):
    """A block that the model holds twice, tied weights, a head of an evaluation, a part that returns no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4, bias=False)
        self.block = nn.Linear(4, 4)
        self.again = self.block
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.embed.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.names = Names()
        self.probe = nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor, evaluate: bool = False) -> torch.Tensor:
        assert self.names(x) == "x"
        y: torch.Tensor = self.norm(self.again(self.block(self.frozen(self.embed(x)))))
        return self.probe(y) if evaluate else self.tied(y)  # type: ignore[no-any-return]


class Names(nn.Module):
    def forward(self, x: torch.Tensor) -> str:
        return "x"


def train_thrice(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(3):
        model(batch(i)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


class TestRecordedRuns:
    def test_a_plain_training_is_whole(self, tmp_path: Path) -> None:
        with flagged(tmp_path, EVERYTHING) as recording:
            model = Tiny()
            optimizer = torch.optim.AdamW(model.parameters())
            for i in range(4):
                model(batch(i)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        found = compare(recording.run)
        assert {(h.reason.key, tuple(h.sites), tuple(h.modules)) for h in found.gaps} == {
            ("no_gradient", ("grad_input",), ("", "first"))
        }
        assert totals(found)["optim"] == (16, 16)
        assert found.silent == {}

    def test_what_a_model_does_not_do_is_no_loss(self, tmp_path: Path) -> None:
        with flagged(tmp_path, EVERYTHING) as recording:
            model = Shared()
            optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
            for i in range(4):
                model(batch(i)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if i == 2:
                    model.eval()
                    with torch.no_grad():
                        model(batch(9), evaluate=True)
                    model.train()
        found = compare(recording.run)
        assert all(gap.reason.is_harmless for gap in found.gaps)
        assert found.silent == {}
        assert found.shared == [("block", "again")]
        by_reason: dict[str, set[tuple[str, str]]] = {}
        for gap in found.gaps:
            by_reason.setdefault(gap.reason.key, set()).update((s, m) for s in gap.sites for m in gap.modules)
        assert by_reason["no_tensor"] == {("output", "names")}
        assert {("input", "probe"), ("output", "probe")} <= by_reason["not_called"]
        assert ("grad_output", "probe") in by_reason["evaluation"]
        assert ("param", "frozen") in by_reason["not_optimized"]
        assert ("param", "tied") in by_reason["tied"]
        assert ("grad", "probe") in by_reason["no_param_gradient"]
        assert ("optim", "block") in by_reason["no_state"]
        assert totals(found)["buffer"] == (12, 12)

    def test_drops_of_a_full_pool_are_found_where_they_were(self, tmp_path: Path) -> None:
        with flagged(tmp_path, "site=output keep=tensor", policy="drop", pool_bytes=1 << 20) as recording:
            train_thrice(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 400_000)))
        found = compare(recording.run)
        assert totals(found) == {"output": (9, 3)}
        assert set(reasons(found)) == {"dropped"}
        assert only(found, "dropped").detail == "too_large"

    def test_gradients_that_no_pool_holds_were_there(self, tmp_path: Path) -> None:
        with flagged(tmp_path, "site=output,grad keep=tensor", pool_bytes=1 << 20) as recording:
            train_thrice(nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 40_000)))
        found = compare(recording.run)
        gap = only(found, "dropped")
        assert (gap.sites, gap.modules, gap.num_missing) == (["grad"], ["1"], 3)
        assert set(reasons(found)) == {"dropped"}

    def test_shards_that_a_writer_retired(self, tmp_path: Path) -> None:
        rig = Rig(tmp_path, max_bytes=4 << 20, codec="none", batch_bytes=1).start()
        rig.writer.set_manifest({"roots": root([module("a", ["output"])]), "rules": [RULE], "step_source": "counted"})
        values = np.random.default_rng(0).integers(0, 256, 100_000, dtype=np.uint8)
        for step in range(100):
            rig.put(values, module_path="a", step=step)
            rig.drain()
        retired = rig.close().ledger["retired"]["rows"]
        found = compare(open_run(tmp_path))
        assert only(found, "retired").num_missing == retired > 0
        assert reasons(found) == ["retired"]


class TestRings:
    """Values that wait for a trigger are expected at the steps of dumps, and nowhere else."""

    RULES = ("site=output keep=ring", "site=scalar keep=stats")
    DUMP: ClassVar[dict[str, Any]] = {
        "first_step": 4,
        "last_step": 6,
        "reason": "NaN",
        "by": "rank 0",
        "rows": 12,
        "time_ns": 5,
    }

    def rows(self, rank: int, steps: Iterable[int]) -> list[Row]:
        """One row of each module for each step, of twenty that were numbered at each."""
        return [
            make_row(20 * step + number, step=step, rank=rank, module_path=path, site="output")
            for step in steps
            for number, path in enumerate(("", "a", "b", "b.c"))
        ]

    def record(self, run: Path, rank: int, steps: Iterable[int], dumps: list[dict[str, Any]], **accounts: int) -> None:
        rows = self.rows(rank, steps)
        dropped = sum(accounts.values())
        told = ledger(len(rows), observed=200, **accounts) | {"passed": 200 - len(rows) - dropped}
        record(run, rows, rank, rules=list(self.RULES), dumps=dumps, ledger=told)

    def test_a_run_with_all_of_a_dump_has_no_holes(self, run: Path) -> None:
        for rank in (0, 1):
            self.record(run, rank, range(4, 7), [self.DUMP])
        found = found_in(run)
        assert totals(found) == {"output": (24, 24)}
        assert found.gaps == []

    def test_a_run_without_a_dump_expects_nothing(self, run: Path) -> None:
        rows = [make_row(20 * step, step=step, site="scalar", name="loss", module_path="") for step in range(10)]
        told = ledger(10, observed=200) | {"passed": 190}
        record(run, rows, rules=list(self.RULES), ledger=told)
        found = found_in(run)
        assert (found.gaps, found.totals, found.silent) == ([], [], {})
        assert (found.num_steps_lived, found.num_steps_expected, found.num_steps_passed) == (10, 0, 10)

    def test_steps_that_the_ring_passed_are_told_from_those_that_no_rule_wants(self, run: Path) -> None:
        rows = [make_row(20 * step, step=step, site="scalar", name="loss", module_path="") for step in range(10)]
        rows += self.rows(0, [4, 6])
        told = ledger(18, observed=200) | {"passed": 182}
        rules = ["site=output keep=ring steps=::2", "site=scalar keep=stats"]
        record(run, sorted(rows, key=lambda row: int(row["seq"])), rules=rules, dumps=[self.DUMP], ledger=told)
        found = found_in(run)
        assert (found.num_steps_lived, found.num_steps_expected, found.num_steps_passed) == (10, 2, 3)

    def test_a_rank_that_never_heard_of_it_has_a_hole_that_is_explained(self, run: Path) -> None:
        self.record(run, 0, range(4, 7), [self.DUMP])
        self.record(run, 1, [5], [{**self.DUMP, "first_step": 5, "last_step": 5, "reason": "another"}])
        gap = only(found_in(run), "trigger_missed")
        assert (gap.steps, gap.ranks, gap.num_missing) == ([4, 6], [1], 8)
        assert not gap.reason.is_loss and not gap.reason.is_harmless

    def test_a_rank_that_heard_too_late_has_a_hole_that_is_explained(self, run: Path) -> None:
        self.record(run, 0, range(4, 7), [self.DUMP])
        self.record(run, 1, [6], [{**self.DUMP, "missed": [4, 5], "num_missed": 2}])
        found = found_in(run)
        assert reasons(found) == ["trigger_missed"]
        assert only(found, "trigger_missed").steps == [4, 5]

    def test_drops_of_a_dump_are_drops(self, run: Path) -> None:
        rows = [row for row in self.rows(0, range(4, 7)) if (row["step"], row["module_path"]) != (5, "b")]
        told = ledger(len(rows), observed=200, disk_full=1) | {"passed": 200 - len(rows) - 1}
        record(run, rows, rules=list(self.RULES), dumps=[self.DUMP], ledger=told)
        gap = only(found_in(run), "dropped")
        assert (gap.modules, gap.steps, gap.num_missing) == (["b"], [5], 1)

    def test_a_rule_that_also_keeps_statistics_is_expected_at_every_step(self, run: Path) -> None:
        rows = self.rows(0, range(10))
        told = ledger(len(rows), observed=200) | {"passed": 200 - len(rows)}
        record(run, rows[:-1], rules=["site=output keep=ring,stats"], ledger=told)
        assert totals(found_in(run)) == {"output": (40, 39)}

    def test_senseless_dumps_are_none(self, run: Path) -> None:
        dumps: Any = [{"first_step": -1, "last_step": "x", "missed": 7, "reason": 3}, "dump", None]
        record(run, self.rows(0, [4]), rules=list(self.RULES), dumps=dumps)
        assert found_in(run).problems == []
