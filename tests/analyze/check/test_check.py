"""`check` over runs: ranges of steps, restarts, damage, and rules that packages install."""

from __future__ import annotations

import itertools
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import recorder
from recorder.analyze.check import check as module
from recorder.analyze.check import reading
from recorder.analyze.check.check import _without_parts, check
from recorder.analyze.check.replicas import NEVER_EQUAL
from recorder.checks.rule import Finding, Severity
from recorder.checks.rules.comparing import Replica
from recorder.checks.rules.data import ONE_BATCH
from recorder.errors import ConfigError
from recorder.rules import parse_rules
from tests.rigs.handmade import HandmadeWriter, Row, ledger, make_row, make_run


def rows_of(rank: int, num_steps: int, seq: int = 0, start: int = 0, **more: Any) -> list[Row]:
    """Outputs of two layers; from step 2 on that of `act` is dead, and on rank 1 one value at step 5 is NaN."""
    rows: list[Row] = []
    for step in range(start, start + num_steps):
        for path in ("up", "act"):
            values = np.random.default_rng((step, rank)).normal(size=8).astype(np.float32)
            if path == "act" and step >= 2:
                values[:] = 0
            if (path, step, rank) == ("up", 5, 1):
                values[0] = np.nan
            rows.append(
                make_row(seq + len(rows), values, encoding=None, rank=rank, step=step, module_path=path, **more)
            )
    return rows


def made(path: Path, num_steps: int = 12) -> Path:
    run = make_run(path, world_size=2)
    for rank in (0, 1):
        writer = HandmadeWriter(run, rank)
        writer.add_shard([rows_of(rank, num_steps)])
        writer.finish()
    return run


def test_findings_are_those_of_all_ranks_and_the_worst_first(tmp_path: Path) -> None:
    found = recorder.check(recorder.open_run(made(tmp_path / "run")))
    assert [(one.rule, one.module_path, one.step, one.ranks) for one in found.findings] == [
        ("nonfinite", "up", 5, (1,)),
        ("dead", "act", 6, (0, 1)),
    ]
    assert found.num_rows == 48 and {"spike", "dead_units"} <= {one.rule for one in found.unjudged}


def test_ranges_of_steps_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = recorder.open_run(made(tmp_path / "run"))
    whole = check(run)
    monkeypatch.setattr(reading, "RANGE_ROWS", 6)
    assert check(run) == whole


def test_steps_that_a_restart_did_again_are_left_out_and_counted(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", world_size=1)
    first = HandmadeWriter(run, 0, "20260101-000000-host-1")
    spoiled = rows_of(0, 4)
    spoiled[-1] |= {"nan_count": 3}
    first.add_shard([spoiled])
    first.finish()
    second = HandmadeWriter(run, 0, "20260102-000000-host-1")
    second.add_shard([rows_of(0, 4, start=2, attempt=1)])
    second.finish(attempt=1)
    found = check(recorder.open_run(run), ["nonfinite"])
    assert found.findings == [] and found.num_rows == 12
    assert any("4 rows were left out, because a restart repeated" in note for note in found.notes)


def test_damaged_rows_are_left_out_and_counted(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", world_size=1)
    writer = HandmadeWriter(run, 0)
    rows = rows_of(0, 12)
    writer.add_shard([rows[:12], rows[12:]])
    writer.finish()
    (shard,) = (run / "rank=00000").rglob("*.arrow")
    data = bytearray(shard.read_bytes())
    at = data.index(np.float64(rows[15]["l2"]).tobytes())
    data[at] ^= 255
    shard.write_bytes(data)
    for index in (run / "rank=00000").rglob("*.index"):
        index.unlink()
    found = check(recorder.open_run(run), ["dead"])
    assert found.num_rows == 12
    assert any("damaged" in note and "12 rows" in note for note in found.notes)


def test_rows_that_are_not_there_are_counted_beside_what_was_found(tmp_path: Path) -> None:
    writer = HandmadeWriter(make_run(tmp_path / "run"))
    for start in range(0, 8, 2):
        writer.add_shard([rows_of(0, 2, seq=4 * start, start=start)])
    num_rows = writer.num_rows
    (writer.directory / "tensors-000001.arrow").unlink()
    accounts = ledger(num_rows, num_rows + 12, pool_full=2) | {"passed": 10, "retired": {"rows": 4, "bytes": 1}}
    writer.finish(ledger=accounts)
    told = "not looked at: 2 rows dropped while recording; 10 rows kept in memory alone, because no trigger asked for "
    told += "their steps; 4 rows removed for the quota, between steps 1 and 4"
    notes = recorder.check(recorder.open_run(tmp_path / "run")).notes
    assert any(note.startswith(told) for note in notes), notes


def test_one_rule_alone_with_another_threshold(tmp_path: Path) -> None:
    run = recorder.open_run(made(tmp_path / "run"))
    (one,) = check(run, ["dead"], {"dead": {"records": 2}}).findings
    assert (one.rule, one.step) == ("dead", 3)
    with pytest.raises(ConfigError, match="did you mean 'dead'"):
        check(run, ["deat"])


def test_rules_of_installed_packages_are_asked_and_broken_ones_are_notes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = "recorder.checks"
    points = [
        EntryPoint("forgets", "tests.checks.test_engine:Forgetful", group),
        EntryPoint("raising", "tests.checks.test_engine:Raising", group),
        EntryPoint("unmade", "tests.checks.test_engine:RaisingAtOnce", group),
        EntryPoint("wrong", "tests.checks.test_engine:Wrong", group),
        EntryPoint("nothing", "tests.checks.nowhere:Rule", group),
        EntryPoint("twice", "recorder.checks.rules.activations:Dead", group),
        EntryPoint("number", "math:pi", group),
    ]
    monkeypatch.setattr(module, "entry_points", lambda group: points)
    found = check(recorder.open_run(made(tmp_path / "run")))
    assert [one.rule for one in found.findings] == ["nonfinite", "forgetful", "raising", "unmade", "dead"]
    assert [note.split()[3] for note in found.notes] == ["nothing", "number", "twice", "wrong"]
    unmade = next(one for one in found.findings if one.rule == "unmade")
    assert (unmade.severity, unmade.what) == (
        Severity.WARNING, "the rule raised KeyError ('of mine'), and was not run after that",
    )  # fmt: skip
    sound = recorder.open_run(made(tmp_path / "sound", num_steps=13))
    beside = check(recorder.open_run(made(tmp_path / "beside")), baselines=[sound])
    failed = [one for one in beside.findings if not one.site]
    assert [one.severity for one in failed] == [
        Severity.WARNING
    ] * 3  # that it fails on a sound run, too, excuses nothing


def test_a_sound_run_of_another_model_is_a_note(tmp_path: Path) -> None:
    run = recorder.open_run(made(tmp_path / "run"))
    other = make_run(tmp_path / "other")
    writer = HandmadeWriter(other)
    writer.add_shard([[row | {"module_path": f"else.{row['module_path']}"} for row in rows_of(0, 12)]])
    writer.finish()
    alike = recorder.open_run(made(tmp_path / "alike"))
    strange = recorder.open_run(other)
    assert check(run, baselines=[alike]).notes == []
    assert check(run, baselines=[alike, strange]).notes == [
        f"the sound run {strange.name} has no value of this run: it has another model, other sites or other names; "
        "nothing is compared with it"
    ]


def replicas(
    path: Path, *, num_ranks: int = 2, data_parallel: Any = None, fingerprint: bool = True, num_last: int = 3
) -> recorder.Run:
    """Two parameters of two ranks over three steps; from step 1 on those of rank 1 are others.

    The last rank makes `num_last` steps.
    """
    run = make_run(path, world_size=num_ranks)
    for rank in range(num_ranks):
        writer = HandmadeWriter(run, rank)
        rows: list[Row] = []
        for step in range(num_last if rank == num_ranks - 1 else 3):
            for name in ("weight", "bias"):
                value = 1.0 + (rank == 1 and step > 0) + (name == "bias")
                more = {"fingerprint": f"{int(value):032x}"} if fingerprint else {}
                about = {"site": "param", "name": name, "phase": "optimizer", "module_path": "up"}
                rows.append(make_row(len(rows), [value], encoding=None, rank=rank, step=step, **about) | more)
        writer.add_shard([rows])
        root = {"name": "model", "class": "Net", "modules": [], "data_parallel": data_parallel}
        writer.finish(roots=[root] if data_parallel else [])
    return recorder.open_run(run)


@pytest.mark.parametrize("fingerprint", [True, False])
def test_replicas_that_came_apart_are_an_error(tmp_path: Path, fingerprint: bool) -> None:
    ddp = {"kind": "ddp", "ranks": [0, 1]}
    checked = check(replicas(tmp_path / "run", data_parallel=ddp, fingerprint=fingerprint))
    (one,) = [finding for finding in checked.findings if finding.rule == "replica"]
    assert (one.severity, one.step, one.module_path, one.site, one.ranks) == (Severity.ERROR, 1, "up", "param", (0, 1))
    assert "the first of 2 values at this site that differ" in one.detail
    assert not any(unjudged.rule == "replica" for unjudged in checked.unjudged)
    ((told, _),) = module.told_of([one])
    assert module.command_of("some run", told) == "recorder first 'some run'"


@pytest.mark.parametrize(("name", "severity"), [("running_mean", Severity.NOTE), ("codebook", Severity.ERROR)])
def test_running_statistics_that_ddp_is_told_not_to_broadcast_are_a_note(
    tmp_path: Path, name: str, severity: Severity
) -> None:
    run = make_run(tmp_path / "run", world_size=2)
    for rank in (0, 1):
        writer = HandmadeWriter(run, rank)
        about = {"site": "buffer", "name": name, "module_path": "norm", "rank": rank, "encoding": None}
        writer.add_shard([[make_row(step, [1.0 + rank + step], step=step, **about) for step in range(3)]])
        ddp = {"kind": "ddp", "ranks": [0, 1], "broadcast_buffers": False}
        writer.finish(roots=[{"name": "model", "class": "Net", "modules": [], "data_parallel": ddp}])
    (one,) = check(recorder.open_run(run), ["replica"]).findings
    assert (one.severity, one.module_path) == (severity, "norm") and "broadcast_buffers=False" in one.what


@pytest.mark.parametrize(("num_last", "severity"), [(2, Severity.NOTE), (3, Severity.ERROR)])
def test_ranks_that_join_make_steps_of_their_own(tmp_path: Path, num_last: int, severity: Severity) -> None:
    ddp = {"kind": "ddp", "ranks": [0, 1], "joins": True}
    (one,) = check(replicas(tmp_path / "run", data_parallel=ddp, num_last=num_last), ["replica"]).findings
    assert one.severity is severity and ("join" in one.advice) is (severity is Severity.NOTE)


@pytest.mark.parametrize(
    ("from_step", "of_rank_1", "is_unreduced"),
    [(0, [2.0, 1.0], True), (1, [2.0, 1.0], False), (0, [2.0, 4.0], False)],
)
def test_gradients_that_never_agree_are_not_reduced(
    tmp_path: Path, from_step: int, of_rank_1: list[float], is_unreduced: bool
) -> None:
    """Those that agreed before, and those that one rank has multiplied, were reduced."""
    run = make_run(tmp_path / "run", world_size=2)
    for rank in (0, 1):
        writer = HandmadeWriter(run, rank)
        rows: list[Row] = []
        for step, name in itertools.product(range(3), ("weight", "bias")):
            own = of_rank_1 if rank == 1 and step >= from_step else [1.0, 2.0]
            about = {"site": "grad", "name": name, "phase": "optimizer", "module_path": "up", "rank": rank}
            rows.append(make_row(len(rows), own, encoding=None, step=step, fingerprint=f"{int(own[1]):032x}", **about))
        writer.add_shard([rows])
        ddp = {"kind": "ddp", "ranks": [0, 1]}
        writer.finish(roots=[{"name": "model", "class": "Net", "modules": [], "data_parallel": ddp}])
    (one,) = check(recorder.open_run(run), ["replica"]).findings
    assert (one.step, one.site) == (from_step, "grad")
    assert one.advice == (Replica.advice_unreduced if is_unreduced else Replica.advice)


@pytest.mark.parametrize(
    ("site", "name", "is_named"),
    [("scalar", "loss", True), ("input", "loss.labels", True), ("input", "labels", True), ("input", "x", False),
     ("output", "y", False)],
)  # fmt: skip
def test_the_command_under_a_finding_on_labels_or_on_a_scalar_names_it(site: str, name: str, is_named: bool) -> None:
    what = ("all labels of a batch are equal", "records in a row", 20.0, 20.0, "")
    one = Finding("data", Severity.WARNING, 19, "model", "", site, name, (0,), *what)
    ((told, _),) = module.told_of([one])
    assert (f"--site {site} --name {name} --step" in module.command_of("run", told)) is is_named


def test_check_says_that_it_reads_no_tensors_of_replicas_with_equal_statistics(tmp_path: Path) -> None:
    (note,) = check(replicas(tmp_path / "run", fingerprint=False), ["replica"]).notes
    assert "check reads no tensors, recorder first compares" in note


@pytest.mark.parametrize(
    ("buffers", "why"),
    [
        (["running_var"], "needs keep=stats, and there are no rows of buffer"),
        (["mean"], "no buffer of the model is the running variance of a norm"),
        ([], "the model has no buffers"),
    ],
)
def test_a_rule_that_is_in_force_is_not_advised(tmp_path: Path, buffers: list[str], why: str) -> None:
    run = make_run(tmp_path / "run")
    writer = HandmadeWriter(run, 0)
    writer.add_shard([rows_of(0, 3)])
    module = {"path": "up", "class": "Linear", "params": ["weight"], "buffers": buffers}
    writer.finish(rules=["site=output,buffer keep=stats"], roots=[{"name": "model", "modules": [module]}])
    told = {one.rule: one for one in check(recorder.open_run(run)).unjudged}
    assert told["running_statistics"].setting == ""
    assert told["running_statistics"].why == why
    assert told["dead_units"].setting == "site=output keep=units"


@pytest.mark.parametrize("rule", ["site=buffer keep=stats steps=0", "site=buffer module=down keep=stats"])
def test_a_rule_that_selects_a_part_is_advised_in_full(tmp_path: Path, rule: str) -> None:
    run = make_run(tmp_path / "run")
    writer = HandmadeWriter(run, 0)
    writer.add_shard([rows_of(0, 3)])
    module = {"path": "up", "class": "BatchNorm1d", "params": ["weight"], "buffers": ["running_var"]}
    writer.finish(rules=[rule], roots=[{"name": "model", "modules": [module]}])
    told = {one.rule: one for one in check(recorder.open_run(run)).unjudged}
    assert told["running_statistics"].setting == "site=buffer keep=stats"


@pytest.mark.parametrize("has_gradient", [False, True])
def test_a_run_that_ended_before_its_first_update_is_not_to_record_more(tmp_path: Path, has_gradient: bool) -> None:
    run = make_run(tmp_path / "run")
    writer = HandmadeWriter(run, 0)
    gradient = make_row(2, [1.0], module_path="up", site="grad", name="weight", phase="optimizer")
    writer.add_shard([[*rows_of(0, 1), *([gradient] if has_gradient else [])]])
    writer.finish(rules=["site=output,grad keep=stats"], roots=[{"name": "model", "modules": []}])
    told = {one.rule: one for one in check(recorder.open_run(run)).unjudged}
    early, late = "the run ended before its first update", "it needs 3 records of a value, and the run has 0"
    assert told["unchanged"].why == (late if has_gradient else early) and not told["unchanged"].setting


def test_replicas_are_a_warning_where_nothing_says_that_ranks_share_a_model(tmp_path: Path) -> None:
    (one,) = check(replicas(tmp_path / "run"), ["replica"]).findings
    assert one.severity is Severity.WARNING and "neither DDP nor FSDP" in one.detail


def cut_by_hand(path: Path, *, has_one_batch: bool, is_apart: bool) -> recorder.Run:
    """Two ranks with a weight each, and a bias that is one on both, or comes apart at step 1."""
    run = make_run(path, world_size=2)
    for rank in (0, 1):
        writer = HandmadeWriter(run, rank)
        rows: list[Row] = []
        for step in range(4):
            batch = np.random.default_rng((step, 0 if has_one_batch else rank)).normal(size=8).astype(np.float32)
            numbers = {"weight": 2 + rank, "bias": 4 + rank * (is_apart and step > 0), "x": int(1e6 * abs(batch[0]))}
            for name, number in numbers.items():
                about = {"site": "param", "phase": "optimizer", "module_path": "up"}
                if name == "x":
                    about = {"site": "input", "phase": "forward", "module_path": ""}
                values = batch if name == "x" else [float(number)]
                row = make_row(len(rows), values, encoding=None, rank=rank, step=step, name=name, **about)
                rows.append(row | {"fingerprint": f"{number:032x}"})
        writer.add_shard([rows])
        writer.finish()
    return recorder.open_run(run)


@pytest.mark.parametrize(
    ("has_one_batch", "is_apart", "expected"),
    [
        (True, False, []),
        (True, True, [("replica", "bias", 1)]),
        (False, False, [("replica", "weight", 0)]),
    ],
)  # fmt: skip
def test_ranks_with_one_batch_and_other_weights_have_parts_of_one_model(
    tmp_path: Path, has_one_batch: bool, is_apart: bool, expected: list[tuple[str, str, int]]
) -> None:
    run = cut_by_hand(tmp_path / "run", has_one_batch=has_one_batch, is_apart=is_apart)
    checked = check(run, ["replica", "data"])
    assert [(one.rule, one.name, one.step) for one in checked.findings] == expected
    assert any("parts of one model" in note for note in checked.notes) is has_one_batch


def test_what_was_not_compared_between_ranks_is_said(tmp_path: Path) -> None:
    (one,) = check(replicas(tmp_path / "alone", num_ranks=1), ["replica"]).unjudged
    assert one.why == "it needs parameters, gradients or optimizer states of several ranks"
    (other,) = check(recorder.open_run(made(tmp_path / "run")), ["replica"]).unjudged
    assert one.why in other.why


@pytest.mark.parametrize("is_of_parts", [True, False])
def test_ranks_that_hold_parts_of_one_model_are_not_compared(is_of_parts: bool) -> None:
    one = Finding(
        "outlier_rank", Severity.WARNING, 3, "model", "up", "output", "", ranks=(0, 1), what="unlike", measure="z",
        value=9.0, threshold=8.0, advice="",
    )  # fmt: skip
    said = [one, one._replace(rule="data", what=f"{ONE_BATCH} 0"), one._replace(root="other")]
    if is_of_parts:
        said.append(one._replace(rule="replica", what=NEVER_EQUAL))
    assert _without_parts(said) == (said[2:3] if is_of_parts else said)


@pytest.mark.parametrize(
    ("rates", "wrapper", "found"),
    [
        ((0.1, 0.1), "ddp", []),
        ((0.1, 0.3), "", []),  # without a wrapper, each rank may train a model of its own
        ((0.1, 0.3), "groups", []),
        (
            (0.1, 0.3),
            "fsdp2",
            [((0, 1), "the learning rate is 0.1 on rank 0 and 0.3 on rank 1, which are data-parallel")],
        ),
        ((0.1, 0.1, 0.05), "ddp", [((2,), "the learning rate is 0.05, and that of its data-parallel peers is 0.1")]),
    ],
)
def test_a_rank_with_another_learning_rate_is_named(
    tmp_path: Path, rates: tuple[float, ...], wrapper: str, found: list[tuple[tuple[int, ...], str]]
) -> None:
    ranks = list(range(len(rates)))
    run = make_run(tmp_path / "run", world_size=len(rates))
    for rank, rate in enumerate(rates):
        writer = HandmadeWriter(run, rank)
        writer.add_shard(
            [
                [
                    make_row(step, rate, rank=rank, step=step, site="scalar", name="lr.SGD.0", module_path="")
                    for step in range(5)
                ]
            ]
        )
        parallel = {"data_parallel": {"kind": wrapper, "ranks": ranks}} if wrapper else {}
        module = {"path": "", "class": "Linear", "params": ["weight"], "rates": {"weight": "lr.SGD.0"}}
        # The group of this number may have other parameters on another rank.
        other = module | {"rates": {"bias": "lr.SGD.0"}}
        is_other = rank == 1 and wrapper == "groups"
        writer.finish(roots=[{"name": "model", "modules": [other if is_other else module], **parallel}])
    findings = check(recorder.open_run(run), ["outlier_rank"]).findings
    assert [(one.ranks, one.what) for one in findings] == found
    assert all(one.first_step == 0 and one.severity is Severity.WARNING for one in findings)


@pytest.mark.parametrize("is_pipeline", [False, True])
def test_the_stages_of_a_pipeline_are_no_peers(tmp_path: Path, is_pipeline: bool) -> None:
    rng = np.random.default_rng(0)
    run = make_run(tmp_path / "run", world_size=2)
    for rank in (0, 1):
        writer = HandmadeWriter(run, rank)
        values = [rng.normal(size=64).astype(np.float32) * (1 + 9 * rank * (i > 10)) for i in range(30)]
        writer.add_shard([[make_row(i, one, rank=rank, step=i, encoding=None) for i, one in enumerate(values)]])
        root: dict[str, Any] = {"name": "model", "modules": []}
        if is_pipeline:
            root["pipeline"] = {"stage": rank, "num_stages": 2}
        writer.finish(roots=[root])
    found = check(recorder.open_run(run), ["outlier_rank"]).findings
    assert bool(found) is not is_pipeline


@pytest.mark.parametrize(("optimizers", "said"), [([], True), ([{"name": "SGD", "class": "SGD"}], False)])
def test_rules_that_are_advised_can_be_set_and_are_not_advised_without_an_optimizer(
    tmp_path: Path, optimizers: list[dict[str, str]], said: bool
) -> None:
    run = make_run(tmp_path / "run")
    writer = HandmadeWriter(run, 0)
    writer.add_shard([rows_of(0, 3)])
    writer.finish(rules=["site=output keep=stats", "site=param,grad steps=100 keep=stats"], optimizers=optimizers)
    told = check(recorder.open_run(run)).unjudged
    advised = [one.setting for one in told if one.setting]
    assert advised and all(parse_rules(setting) for setting in advised)
    assert any("no optimizer of torch stepped" in one.why for one in told) is said
