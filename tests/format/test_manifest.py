"""Manifests of unknown origin: what is of its kind is taken, what is not counts as missing and is told."""

from __future__ import annotations

from typing import Any

import pytest

from recorder.format.manifest import RowCounts, RunManifest, Stage, WriterManifest
from recorder.format.rundir import Shared

MODULE = {"path": "up", "class": "Linear", "params": ["weight"], "tied": {"weight": "down.weight"}, "dtensor": True}
ROOT = {
    "name": "model",
    "modules": [MODULE],
    "data_parallel": {"kind": "ddp", "ranks": [0, 2, 0], "broadcast_buffers": False},
    "pipeline": {"stage": 1, "num_stages": 2},
    "jitter": {"moved": ["inputs"], "eps": 1e-3},
}
WRITER = {
    "writer": "w",
    "attempt": 2,
    "pid": 7,
    "closed_ns": None,
    "ledger": {"observed": 5, "written": 3, "dropped": {"too_large": 2, "other": 0}, "retired": {"rows": 1}},
    "settings": {"keep_newest": {"value": 9, "source": "argument"}},
    "retired_earlier": {"v": {"shards": {"stats-000000.arrow": {"rows": 4, "bytes": 40}}}},
    "merged_writers": [{"rank": 1, "state": "closed", "observed": 8}],
    "of_a_version_to_come": {"any": [1]},
}


def read(**changes: Any) -> WriterManifest:
    return WriterManifest.read({**WRITER, "roots": [ROOT], **changes})


def test_what_is_of_its_kind_is_taken() -> None:
    found = read()
    assert (found.writer, found.attempt, found.pid, found.process, found.problems) == ("w", 2, 7, None, ())
    assert found.balance == RowCounts(observed=5, written=3, dropped={"too_large": 2}, retired_rows=1)
    assert found.whole_setting("keep_newest") == 9
    assert found.retired_earlier["v"].shards["stats-000000.arrow"].retired_rows == 4
    assert found.merged_writers[0].balance.observed == 8
    (root,) = found.roots
    assert root.data_parallel is not None and root.data_parallel.ranks == (0, 2)
    assert root.data_parallel.broadcast_buffers is False
    assert (root.stage, root.model_parallel) == (Stage(1, 2), None)
    assert root.jitter is not None and (root.jitter.moved, root.jitter.eps) == (("inputs",), 1e-3)
    (module,) = root.modules
    assert (module.class_name, module.params, module.tied) == ("Linear", ("weight",), {"weight": "down.weight"})
    assert module.has_dtensors and not module.is_compiled


def test_what_is_missing_has_its_default_and_is_no_problem() -> None:
    assert WriterManifest.read({}) == WriterManifest()
    assert RunManifest.read({}) == RunManifest()


def test_what_a_later_version_adds_is_kept_for_whoever_writes_it_again() -> None:
    assert read().members["of_a_version_to_come"] == {"any": [1]}
    assert read(roots=[{**ROOT, "more": 1}]).roots[0].members["more"] == 1


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"pid": True}, "pid is True, expected a whole number, not negative"),
        ({"pid": -1}, "pid is -1, expected a whole number, not negative"),
        ({"attempt": 1 << 63}, f"attempt is {1 << 63}, expected a whole number, not negative"),
        ({"host": ["a"]}, "host is ['a'], expected a text"),
        ({"autoload": 1}, "autoload is 1, expected true or false"),
        ({"ledger": {"dropped": {"a": "b"}}}, "ledger.dropped.a is 'b', expected a whole number, not negative"),
        ({"roots": {}}, "roots is {}, expected a list of objects"),
        ({"roots": [ROOT, 3]}, "roots is 3, expected a list of objects, in every item"),
        (
            {"roots": [{"modules": [{"path": "a"}, {"params": "weight"}]}]},
            "roots[0].modules[1].params is 'weight', expected a list of texts",
        ),
        (
            {"roots": [{"data_parallel": {"ranks": [0, -1]}}]},
            "roots[0].data_parallel.ranks is [0, -1], expected a list of at most 16384 ranks",
        ),
        ({"roots": [{"jitter": {"eps": 2.0}}]}, "roots[0].jitter.eps is 2.0, expected a number from 0 to 1"),
        ({"host": 10**60}, f"host is {'1' + '0' * 39}..., expected a text"),
    ],
)
def test_what_is_of_another_kind_counts_as_missing_and_is_told_once(changes: dict[str, Any], told: str) -> None:
    assert read(**changes).problems == (told,)


def test_what_is_of_another_kind_is_not_written_again() -> None:
    found = read(pid="x", roots=[ROOT, 3, {"name": "other", "modules": [{"path": 7, "more": 1}]}])
    assert "pid" not in found.members
    assert [root.members.get("name") for root in found.roots] == ["model", "other"]
    assert found.roots[1].modules[0].members == {"more": 1}
    assert WriterManifest.read(dict(found.members)).problems == ()


def test_a_manifest_of_nothing_but_nonsense_tells_of_a_hundred_members_at_most() -> None:
    assert len(read(roots=[{"name": 1} for _ in range(1000)]).problems) == 100


@pytest.mark.parametrize("pipeline", [{}, {"stage": 1}, {"stage": "0", "num_stages": 2}, {"stage": 2, "num_stages": 2}])
def test_a_stage_that_cannot_be_is_none(pipeline: dict[str, Any]) -> None:
    assert read(roots=[{"pipeline": pipeline}]).roots[0].stage is None


def test_what_is_no_name_of_a_run_is_none_and_half_a_character_is_written_out() -> None:
    found = RunManifest.read({"name": "../x", "run_id": "a\ud800", "world_size": 0, "merged_from": {"path": "p"}})
    assert (found.name, found.run_id, found.world_size) == (None, "a\\ud800", None)
    assert found.merged_from is not None and found.merged_from.path == "p"


def test_what_manifests_say_alike_is_in_memory_once() -> None:
    shared = Shared()
    raws = [{"writer": name, "roots": [{"name": "model", "modules": [{"path": "up"}]}]} for name in ("v", "w")]
    first, second = (WriterManifest.read(raw, shared) for raw in raws)
    assert first.roots is second.roots and first.members["roots"] is second.members["roots"]


def test_problems_that_manifests_share_are_told_of_each() -> None:
    shared = Shared()
    first, second = (WriterManifest.read({"roots": [{"name": 3}]}, shared) for _ in range(2))
    assert first.problems == second.problems == ("roots[0].name is 3, expected a text",)
