"""The global view of runs made by hand: what becomes one tensor, what stays with its ranks, and what is said of it."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
import pytest

from recorder.columns import STATISTICS
from recorder.errors import LookupFailedError
from recorder.format.codec import decode
from recorder.format.fingerprint import fingerprint, to_text
from recorder.globalview.view import GlobalRows
from recorder.numerics.dtypes import item_bytes
from recorder.run.run import Run, open_run
from tests.rigs.handmade import HandmadeWriter, Row, make_parts, make_row, make_run

Array = npt.NDArray[Any]
RNG = np.random.Generator(np.random.PCG64(5))
_BEGIN = RNG.bit_generator.state
NOT_MEASURED: dict[str, Any] = {
    **dict.fromkeys(STATISTICS),
    **dict.fromkeys(("nan_count", "inf_count", "zero_count", "fingerprint")),
}
DDP = {"kind": "ddp", "ranks": [0, 1]}


@pytest.fixture(autouse=True)
def _values_of_its_own() -> None:
    """Each test draws the same values, whichever tests ran before it."""
    RNG.bit_generator.state = _BEGIN


def values(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def finger(array: Array) -> str:
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return to_text(fingerprint(data, array.dtype.itemsize, array.shape))


def row(seq: int, array: Array, **columns: Any) -> Row:
    return make_row(seq, array, **({"fingerprint": finger(array)} | columns))


def root_input(seq: int, array: Array, **columns: Any) -> Row:
    return row(seq, array, **({"module_path": "", "site": "input", "name": "x"} | columns))


def run_of(path: Path, rows: Sequence[Sequence[Row]], parallel: Mapping[str, Any] | None = DDP, **manifest: Any) -> Run:
    """A run of as many ranks as there are lists of rows."""
    make_run(path)
    for rank, own in enumerate(rows):
        writer = HandmadeWriter(path, rank=rank)
        writer.add_shard([[one | {"rank": rank} for one in own]])
        paths = sorted({one["module_path"] for some in rows for one in some} | {""})
        root: dict[str, Any] = {"name": "model", "modules": [{"path": module} for module in paths]}
        writer.finish(roots=[root | ({"data_parallel": dict(parallel)} if parallel else {})], **manifest)
    return open_run(path)


def view_row(rows: GlobalRows, number: int = -1, **wanted: Any) -> tuple[int, dict[str, Any]]:
    """The one row, or one of several, with these columns."""
    table = rows.table.to_pylist()
    found = [i for i, one in enumerate(table) if all(one[name] == value for name, value in wanted.items())]
    assert number >= 0 or len(found) == 1, [table[i] for i in found]
    return found[number], table[found[number]]


def decoded(rows: GlobalRows, i: int) -> Array:
    """A row's parts, decoded and laid end to end."""
    width = item_bytes(rows.table.column("dtype")[i].as_py())
    end, pieces = 0, []
    for part in rows.parts(i):
        assert part.flat_offset == end and part.payload_bytes <= 32 << 20
        pieces.append(decode(part.encoding, b"".join(part.data), part.payload_bytes, width))
        end += part.payload_bytes // width
    return np.concatenate([*pieces, np.zeros(0, np.uint8)])


def same(one: Array, two: Array) -> bool:
    return one.dtype == two.dtype and one.shape == two.shape and one.tobytes() == two.tobytes()


class TestBatches:
    @pytest.mark.parametrize("sizes", [(4, 4), (4, 3), (3, 0)], ids=["even", "ragged", "one is empty"])
    def test_the_batch_is_laid_end_to_end_in_the_order_of_ranks(self, tmp_path: Path, sizes: tuple[int, int]) -> None:
        inputs, outputs = [values(n, 5) for n in sizes], [values(n, 2, 3) for n in sizes]
        run = run_of(tmp_path / "run", [[root_input(0, x), row(1, y)] for x, y in zip(inputs, outputs, strict=True)])
        whole = np.concatenate(outputs)
        assert same(run.array("layers.0", step=0), whole)
        rows = run.view().rows()
        i, found = view_row(rows, module_path="layers.0")
        assert (found["rank"], found["layout_source"]) == (None, "assumed")
        assert json.loads(found["shape"]) == list(whole.shape) and found["numel"] == whole.size
        assert found["ranks_present"] == found["ranks_expected"] == "[0,1]"
        assert found["fingerprint"] == finger(whole)
        assert same(rows.array(i), whole) and decoded(rows, i).tobytes() == whole.tobytes()
        wide = whole.astype(np.float64)
        assert (found["min"], found["max"], found["zero_count"]) == (wide.min(), wide.max(), 0)
        assert found["mean"] == pytest.approx(wide.mean(), rel=1e-12)
        assert found["std"] == pytest.approx(wide.std(), rel=1e-12)

    def test_a_tensor_with_the_sequence_first_is_laid_along_its_batch_dim(self, tmp_path: Path) -> None:
        inputs, outputs = [values(3, 7) for _ in range(2)], [values(7, 3, 2) for _ in range(2)]
        run = run_of(tmp_path / "run", [[root_input(0, x), row(1, y)] for x, y in zip(inputs, outputs, strict=True)])
        whole = np.concatenate(outputs, axis=1)
        assert same(run.array("layers.0", step=0), whole)
        rows = run.view().rows()
        i, found = view_row(rows, module_path="layers.0")
        assert json.loads(found["note"])["batch_dim"] == 1
        assert decoded(rows, i).tobytes() == whole.tobytes() and found["fingerprint"] == finger(whole)

    @pytest.mark.parametrize("width", [2, 3], ids=["", "as wide as the batch"])
    def test_batch_and_sequence_in_one_dim_are_laid_end_to_end(self, tmp_path: Path, width: int) -> None:
        inputs, outputs = [values(3, 7) for _ in range(2)], [values(21, width) for _ in range(2)]
        run = run_of(tmp_path / "run", [[root_input(0, x), row(1, y)] for x, y in zip(inputs, outputs, strict=True)])
        assert same(run.array("layers.0", step=0), np.concatenate(outputs))

    def test_what_is_equal_on_all_ranks_and_has_no_batch_dim_is_one_tensor(self, tmp_path: Path) -> None:
        positions = values(8, 2)
        run = run_of(tmp_path / "run", [[root_input(0, values(4, 3)), row(1, positions)] for _ in range(2)])
        assert same(run.array("layers.0", step=0), positions)
        assert view_row(run.view().rows(), module_path="layers.0")[1]["layout_source"] == "inferred"

    @pytest.mark.parametrize("batch", [1, 2])
    def test_a_dim_that_is_a_multiple_of_the_batch_by_chance_is_not_the_batch(self, tmp_path: Path, batch: int) -> None:
        rows = [[root_input(0, values(batch, 5, 3)), row(1, values(8, 7))] for _ in range(2)]
        found = run_of(tmp_path / "run", rows).view().rows()
        assert [finding.kind for finding in found.findings] == ["per_rank"]

    @pytest.mark.parametrize("keep", ["all", "tensor", "stats"])
    @pytest.mark.parametrize(
        "shape", [(4, 8), (8, 4), (1, 5, 3)], ids=["sequence is batch", "width is batch", "batch of one"]
    )
    def test_it_stays_one_where_a_dim_happens_to_have_the_size_of_the_batch(
        self, tmp_path: Path, shape: tuple[int, ...], keep: str
    ) -> None:
        positions, batch = values(*shape), 1 if len(shape) == 3 else 4
        bare = {"all": {}, "tensor": NOT_MEASURED, "stats": {"fingerprint": None, "encoding": None}}[keep]
        back = {"site": "grad_output", "phase": "backward"}
        gradients = [values(*shape) for _ in range(2)]
        rows = [
            [root_input(0, values(batch, 9)), row(1, positions, **bare), row(2, gradient, **back)]
            for gradient in gradients
        ]
        run = run_of(tmp_path / "run", rows)
        _, found = view_row(run.view().rows(), site="output")
        assert (json.loads(found["shape"]), found["layout_source"]) == (list(shape), "inferred")
        assert ("equal_by" in (found["note"] or "")) == (keep == "stats")
        mean = (gradients[0].astype(np.float64) / 2 + gradients[1].astype(np.float64) / 2).astype(np.float32)
        assert np.array_equal(run.array("layers.0", site="grad_output", step=0), mean)

    def test_positions_that_are_expanded_along_the_batch_are_a_batch(self, tmp_path: Path) -> None:
        positions = np.broadcast_to(np.arange(6), (4, 6)).copy()
        run = run_of(tmp_path / "run", [[root_input(0, values(4, 3)), row(1, positions)] for _ in range(2)])
        assert same(run.array("layers.0", step=0), np.concatenate([positions, positions]))

    def test_a_mask_of_ones_is_a_batch(self, tmp_path: Path) -> None:
        ones = np.ones((4, 6), np.float32)
        run = run_of(tmp_path / "run", [[root_input(0, values(4, 3)), row(1, ones)] for _ in range(2)])
        assert run.array("layers.0", step=0).shape == (8, 6)

    @pytest.mark.parametrize("shape", [(12,), (4,)])
    def test_equal_statistics_do_not_make_values_equal(self, tmp_path: Path, shape: tuple[int, ...]) -> None:
        orders = [np.random.default_rng(i).permutation(shape[0]).astype(np.float32) for i in range(2)]
        rows = [[root_input(0, values(5, 3)), row(1, order, fingerprint=None)] for order in orders]
        run = run_of(tmp_path / "run", rows)
        table = run.view().rows().table.to_pylist()
        assert [one["rank"] for one in table if one["site"] == "output"] == [0, 1]

    @pytest.mark.parametrize("has_payload", [(False, False), (True, False)])
    def test_permutations_of_whole_numbers_are_never_taken_for_equal(
        self, tmp_path: Path, has_payload: tuple[bool, bool]
    ) -> None:
        rows = []
        for rank, keeps in enumerate(has_payload):
            statistics = {"mean": 2.0, "std": 2**0.5, "min": 0.0, "max": 4.0, "absmax": 4.0, "l2": 30**0.5}
            counts = {"sum": 10.0, "sum_sq": 30.0, "nan_count": 0, "inf_count": 0, "zero_count": 1}
            order = np.arange(5)[:: 1 - 2 * rank].copy()
            more = statistics | counts | ({} if keeps else {"encoding": None}) | {"fingerprint": None}
            rows.append([root_input(0, values(3, 2)), row(1, order, **more)])
        table = run_of(tmp_path / "run", rows).view().rows().table.to_pylist()
        assert [one["rank"] for one in table if one["site"] == "output"] == [0, 1]

    def test_an_argument_that_is_the_same_on_all_ranks_is_not_the_batch(self, tmp_path: Path) -> None:
        frequencies = values(8)
        rows = [
            [root_input(0, frequencies, name="freqs"), root_input(1, values(3, 8)), row(2, values(3, 8))]
            for _ in range(2)
        ]
        run = run_of(tmp_path / "run", rows)
        assert run.array("layers.0", step=0).shape == (6, 8)
        assert same(run.array("", site="input", name="freqs", step=0), frequencies)

    def test_each_call_of_the_root_has_its_own_batch(self, tmp_path: Path) -> None:
        """A discriminator: called with 6, 4 and 3 samples; a layer in it runs twice each time."""
        back = {"site": "grad_output", "phase": "backward"}
        outputs: list[list[Array]] = [[], []]
        rows: list[list[Row]] = [[], []]
        for rank in range(2):
            for call, size in enumerate((6, 4, 3)):
                rows[rank].append(root_input(len(rows[rank]), values(size, 6), call=call))
                for twice in range(2):
                    outputs[rank].append(values(size, 4))
                    rows[rank].append(row(len(rows[rank]), outputs[rank][-1], call=2 * call + twice))
            for call, output in enumerate(outputs[rank]):
                rows[rank].append(row(len(rows[rank]), output, call=call, **back))
        run = run_of(tmp_path / "run", rows)
        for call, pair in enumerate(zip(*outputs, strict=True)):
            assert same(run.array("layers.0", step=0, call=call), np.concatenate(pair))
            assert same(run.array("layers.0", site="grad_output", step=0, call=call), np.concatenate(pair) / 2)

    def test_the_batch_of_an_evaluation_is_not_taken_from_training(self, tmp_path: Path) -> None:
        rows = [[root_input(0, values(4, 3)), row(1, values(2, 4), mode="no_grad")] for _ in range(2)]
        run = run_of(tmp_path / "run", rows)
        _, found = view_row(run.view().rows(), mode="no_grad")
        assert json.loads(found["shape"]) == [4, 4] and "unknown" in json.loads(found["note"])["batch"]

    def test_an_evaluation_on_one_rank_is_told_as_that(self, tmp_path: Path) -> None:
        train = [[root_input(0, values(4, 3)), row(1, values(4, 2)), root_input(2, values(4, 3), step=1)] for _ in "ab"]
        alone = [root_input(3, values(7, 3), mode="no_grad"), row(4, values(7, 2), mode="no_grad")]
        rows = run_of(tmp_path / "run", [[*train[0], *alone], train[1]]).view().rows()
        assert {finding.kind for finding in rows.findings} == {"alone"}

    def test_samples_of_a_rank_whose_gradient_is_missing_count_in_the_mean(self, tmp_path: Path) -> None:
        back = {"site": "grad_output", "phase": "backward"}
        x, y = [values(n, 3) for n in (1, 3)], [values(n, 2) for n in (1, 3)]
        rows = [[root_input(0, x[0]), row(1, y[0]), row(2, y[0], **back)], [root_input(0, x[1]), row(1, y[1])]]
        found = run_of(tmp_path / "run", rows).view(loss="weighted").rows()
        i, _ = view_row(found, site="grad_output")
        assert np.array_equal(found.array(i), y[0] / 4)

    def test_weights_come_from_the_gradients_where_no_input_was_recorded(self, tmp_path: Path) -> None:
        back = {"site": "grad_output", "phase": "backward"}
        gradients = [values(n, 2) for n in (1, 3)]
        found = run_of(tmp_path / "run", [[row(0, g, **back)] for g in gradients]).view(loss="weighted").rows()
        i, one = view_row(found, site="grad_output")
        assert one["scale"] == "weighted_mean_loss"
        assert np.allclose(found.array(i), np.concatenate([gradients[0] / 4, gradients[1] * 3 / 4]), rtol=1e-7)

    def test_a_0_dim_output_of_one_rank_is_not_the_global_one(self, tmp_path: Path) -> None:
        rows = [[root_input(0, values(4, 3)), row(1, np.array(np.float32(1)))], [root_input(0, values(4, 3))]]
        run = run_of(tmp_path / "run", rows)
        with pytest.raises(LookupFailedError, match="rank 0 alone"):
            run.array("layers.0", step=0)
        assert run.array("layers.0", step=0, partial=True) == 1

    def test_a_number_that_one_rank_reports_is_the_number(self, tmp_path: Path) -> None:
        scalar = {"site": "scalar", "name": "loss", "module_path": "", "micro_step": None}
        x = [root_input(0, values(4, 3)), root_input(0, values(4, 3))]
        run = run_of(tmp_path / "run", [[x[0], row(1, np.array(np.float32(3)), **scalar)], [x[1]]])
        assert run.array("", site="scalar", step=0) == 3
        assert run.view().rows().findings == []

    def test_data_parallel_groups_that_differ_are_not_mixed(self, tmp_path: Path) -> None:
        run = run_of(tmp_path / "run", [[root_input(0, values(2, 3)), row(1, values(2, 2))] for _ in range(4)])
        for path in run.path.glob("rank=*/*/_writer.json"):
            manifest = json.loads(path.read_text())
            manifest["roots"][0]["data_parallel"]["ranks"] = [[0, 2], [1, 3]][manifest["rank"] % 2]
            path.write_text(json.dumps(manifest))
        rows = open_run(run.path).view().rows()
        assert set(rows.table.column("rank").to_pylist()) == {0, 1, 2, 3}
        assert "2 data-parallel groups ([0, 2], [1, 3])" in rows.findings[0].text

    @pytest.mark.parametrize("ranks", [[True, False], [0.0, 1.0], [-1, 0], [0] * 300_000, "01", None, [10**30]])
    def test_ranks_that_are_none_are_taken_for_nothing(self, tmp_path: Path, ranks: Any) -> None:
        rows = [[root_input(0, values(2, 3)), row(1, values(2, 2))] for _ in range(2)]
        run = run_of(tmp_path / "run", rows, {"kind": "ddp", "ranks": ranks})
        assert run.array("layers.0", step=0).shape == (4, 2)
        assert view_row(run.view().rows(), module_path="layers.0")[1]["ranks_expected"] == "[0,1]"

    def test_complex_halves_are_scaled_and_pairs_of_4_bits_are_not(self, tmp_path: Path) -> None:
        back = {"site": "grad_output", "phase": "backward", "fingerprint": None}
        halves = values(2, 3, 2).astype(np.float16)
        pairs = np.arange(6, dtype=np.uint8).reshape(2, 3)
        rows = [
            [
                root_input(0, values(2, 3)),
                make_row(1, halves.view("<u4").reshape(2, 3), dtype="complex32", name="c", **back),
                make_row(2, pairs, dtype="float4_e2m1fn_x2", name="p", **back),
            ]
        ] * 2
        run = run_of(tmp_path / "run", rows)
        found = run.array("layers.0", site="grad_output", name="c", step=0)
        half = (halves.astype(np.float64) / 2).astype(np.float16)
        assert np.array_equal(found["real"][:2], half[..., 0]) and np.array_equal(found["imag"][2:], half[..., 1])
        with pytest.raises(LookupFailedError, match="float4_e2m1fn_x2 cannot be scaled"):
            run.array("layers.0", site="grad_output", name="p", step=0)

    def test_its_gradient_is_the_mean_over_ranks(self, tmp_path: Path) -> None:
        positions, gradients = values(8, 2), [values(8, 2) for _ in range(2)]
        back = {"site": "grad_output", "phase": "backward"}
        run = run_of(
            tmp_path / "run",
            [[root_input(0, values(4, 3)), row(1, positions), row(2, g, **back)] for g in gradients],
        )
        wanted = ((gradients[0].astype(np.float64) + gradients[1]) / 2).astype(np.float32)
        assert np.array_equal(run.array("layers.0", site="grad_output", step=0), wanted)

    def test_equal_batches_on_all_ranks_are_still_batches(self, tmp_path: Path) -> None:
        x, y = values(4, 3), values(4, 2)
        run = run_of(tmp_path / "run", [[root_input(0, x), row(1, y)]] * 2)
        assert run.array("layers.0", step=0).shape == (8, 2)

    def test_where_no_dim_fits_the_rows_stay_with_their_ranks(self, tmp_path: Path) -> None:
        run = run_of(tmp_path / "run", [[root_input(0, values(4, 3)), row(1, values(5, 2))] for _ in range(2)])
        with pytest.raises(LookupFailedError, match=r"no dim of \[5, 2\] is the batch of 4; ask for one of rank=0, 1"):
            run.array("layers.0", step=0)
        rows = run.view().rows()
        assert [one["rank"] for one in rows.table.to_pylist() if one["module_path"] == "layers.0"] == [0, 1]
        (finding,) = rows.findings
        assert (finding.kind, finding.module_path, finding.site) == ("per_rank", "layers.0", "output")

    @pytest.mark.parametrize(
        ("loss", "factors"), [("mean", (1 / 2, 1 / 2)), ("weighted", (3 / 4, 1 / 4)), ("sum", (1.0, 1.0))]
    )
    def test_activation_gradients_are_scaled_to_the_whole_batch(
        self, tmp_path: Path, loss: str, factors: tuple[float, float]
    ) -> None:
        back = {"site": "grad_output", "phase": "backward"}
        gradients = [values(n, 2) for n in (3, 1)]
        run = run_of(
            tmp_path / "run",
            [[root_input(0, values(len(g), 3)), row(1, values(len(g), 2)), row(2, g, **back)] for g in gradients],
        )
        rows = run.view(loss=loss).rows()
        i, found = view_row(rows, site="grad_output")
        wanted = np.concatenate(
            [(g.astype(np.float64) * f).astype(np.float32) for g, f in zip(gradients, factors, strict=True)]
        )
        assert same(rows.array(i), wanted)
        assert decoded(rows, i).tobytes() == wanted.tobytes()
        assert found["scale"] == {"mean": "assumed_mean_loss", "weighted": "weighted_mean_loss", "sum": None}[loss]
        assert found["mean"] == pytest.approx(wanted.mean(dtype=np.float64), rel=1e-6)
        assert found["l2"] == pytest.approx(np.linalg.norm(wanted.astype(np.float64)), rel=1e-6)

    def test_bfloat16_gradients_are_rounded_once(self, tmp_path: Path) -> None:
        gradients = [values(2, 9).astype(ml_dtypes.bfloat16) for _ in range(3)]
        back = {"site": "grad_output", "phase": "backward", "dtype": "bfloat16"}
        run = run_of(
            tmp_path / "run",
            [[root_input(0, values(2, 3)), make_row(1, values(2, 9)), make_row(2, g, **back)] for g in gradients],
            {"kind": "ddp", "ranks": [0, 1, 2]},
        )
        wanted = (np.concatenate(gradients).astype(np.float64) / 3).astype(ml_dtypes.bfloat16)
        assert same(run.array("layers.0", site="grad_output", step=0), wanted)

    def test_ranks_in_another_order_are_laid_in_theirs(self, tmp_path: Path) -> None:
        inputs, outputs = [values(n, 3) for n in (2, 3)], [values(n, 2) for n in (2, 3)]
        run = run_of(
            tmp_path / "run",
            [[root_input(0, x), row(1, y)] for x, y in zip(inputs, outputs, strict=True)],
            {"kind": "fsdp2", "ranks": [1, 0]},
        )
        assert same(run.array("layers.0", step=0), np.concatenate(outputs[::-1]))

    def test_a_rank_that_did_not_run_makes_it_partial_and_is_named(self, tmp_path: Path) -> None:
        x, y = values(4, 3), values(4, 2)
        run = run_of(tmp_path / "run", [[root_input(0, x), row(1, y)], [root_input(0, x, step=1)]])
        with pytest.raises(LookupFailedError, match="rank 0 alone, not on rank 1; partial=True"):
            run.array("layers.0", step=0)
        assert same(run.array("layers.0", step=0, partial=True), y)
        rows = run.view().rows()
        _, found = view_row(rows, module_path="layers.0")
        assert (found["ranks_present"], found["ranks_expected"]) == ("[0]", "[0,1]")
        assert json.loads(found["note"])["partial"] == [1]
        assert ("partial", (1,)) in {(finding.kind, finding.ranks) for finding in rows.findings}

    def test_values_of_only_some_ranks_make_no_global_ones(self, tmp_path: Path) -> None:
        pairs = [(values(4, 3), values(4, 2)) for _ in range(2)]
        rows = [
            [root_input(0, x), row(1, y, **({} if r == 0 else {"encoding": None}))] for r, (x, y) in enumerate(pairs)
        ]
        run = run_of(tmp_path / "run", rows)
        with pytest.raises(LookupFailedError, match="rank 1 has no values"):
            run.array("layers.0", step=0)
        _, found = view_row(run.view().rows(), module_path="layers.0")
        assert found["encoding"] is None and found["mean"] is not None
        assert "values of some ranks" in found["note"]

    @pytest.mark.parametrize(
        ("layout", "wanted"),
        [("shard(1)", (2, 8)), ("shard(0)", (4, 4)), ("replicate", None), ("partial(sum)", (2, 4)), ("per_rank", None)],
    )
    def test_a_layout_can_be_said_afterwards(self, tmp_path: Path, layout: str, wanted: tuple[int, int] | None) -> None:
        outputs = [values(2, 4) for _ in range(2)]
        run = run_of(tmp_path / "run", [[root_input(0, values(9, 3)), row(1, y)] for y in outputs])
        rows = run.view(layouts=["layers.*=per_rank", f"layers.0:output:={layout}"]).rows()
        if wanted is None:
            assert {one["rank"] for one in rows.table.to_pylist() if one["module_path"]} == {0, 1}
            assert rows.findings[0].kind == ("per_rank" if layout == "per_rank" else "inconsistent")
            return
        i, found = view_row(rows, module_path="layers.0")
        assert found["layout_source"] == "override"
        whole = outputs[0] + outputs[1] if "partial" in layout else np.concatenate(outputs, axis=int(layout[6]))
        assert rows.array(i).shape == wanted and np.array_equal(rows.array(i), whole)

    @pytest.mark.parametrize("layout", ["nonsense", "a=shard", "a=shard(-1)", "a=partial(median)", "=replicate"])
    def test_a_layout_that_is_none_is_refused(self, tmp_path: Path, layout: str) -> None:
        run = run_of(tmp_path / "run", [[row(0, values(2))]])
        with pytest.raises(LookupFailedError, match="layout"):
            run.view(layouts=[layout])
        with pytest.raises(LookupFailedError, match="expected one of mean, sum, weighted"):
            run.view(loss="median")


class TestState:
    PARAM: ClassVar[dict[str, Any]] = {"site": "param", "name": "weight", "phase": "optimizer", "micro_step": None}

    def test_replicas_are_stored_once(self, tmp_path: Path) -> None:
        weight = values(300, 70)
        run = run_of(tmp_path / "run", [[row(0, weight, **self.PARAM, encoding="compressed")]] * 2)
        rows = run.view().rows()
        i, found = view_row(rows)
        assert (found["rank"], found["layout_source"], found["fingerprint"]) == (None, "ddp", finger(weight))
        assert same(rows.array(i), weight) and same(run.array("layers.0", site="param", step=0), weight)
        (part,) = rows.parts(i)
        assert part.encoding == "planes", "the frames are copied"
        assert rows.findings == []

    def test_a_replica_whose_values_only_another_rank_has_is_had_from_there(self, tmp_path: Path) -> None:
        weight = values(4, 3)
        run = run_of(tmp_path / "run", [[row(0, weight, **self.PARAM, encoding=None)], [row(0, weight, **self.PARAM)]])
        assert same(run.array("layers.0", site="param", step=0), weight)

    def test_replicas_with_equal_statistics_are_compared_by_value(self, tmp_path: Path) -> None:
        weights = [np.array(w, np.float32) for w in ([1, 2, 3], [3, 2, 1])]
        run = run_of(tmp_path / "run", [[row(0, weight, **self.PARAM, fingerprint=None)] for weight in weights])
        assert [finding.kind for finding in run.view().rows().findings] == ["replicas_differ"]

    @pytest.mark.parametrize("known_by", ["fingerprint", "statistics", "values"])
    def test_a_replica_that_differs_is_a_finding_and_no_average(self, tmp_path: Path, known_by: str) -> None:
        weights = [values(4, 3), values(4, 3)]
        statistics = {"fingerprint": None, "encoding": None}
        hidden = {"fingerprint": {}, "statistics": statistics, "values": NOT_MEASURED}[known_by]
        run = run_of(tmp_path / "run", [[row(0, weight, **self.PARAM, **hidden)] for weight in weights])
        rows = run.view().rows()
        assert [one["rank"] for one in rows.table.to_pylist()] == [0, 1]
        (finding,) = rows.findings
        assert finding.kind == "replicas_differ" and finding.ranks == (0, 1)
        assert (finding.module_path, finding.site, finding.name, finding.step) == ("layers.0", "param", "weight", 0)
        if known_by != "statistics":
            with pytest.raises(LookupFailedError, match="rank 1 differs from rank 0; ask for one of rank=0, 1"):
                run.array("layers.0", site="param", step=0)

    def test_of_a_buffer_that_differs_the_first_ranks_is_taken_and_said(self, tmp_path: Path) -> None:
        buffers = [values(4), values(4)]
        buffer = self.PARAM | {"site": "buffer", "name": "running_mean"}
        run = run_of(tmp_path / "run", [[row(0, value, **buffer)] for value in buffers])
        assert same(run.array("layers.0", site="buffer", step=0), buffers[0])
        rows = run.view().rows()
        table = rows.table.to_pylist()
        assert [one["rank"] for one in table] == [None, 0, 1]
        assert json.loads(table[0]["note"])["replicas_differ"] == [1]
        assert [finding.kind for finding in rows.findings] == ["buffers_differ"]

    def test_a_0_dim_value_is_shown_as_the_mean_beside_the_ranks_own(self, tmp_path: Path) -> None:
        losses = [np.float32(1.0), np.float32(2.0)]
        scalar = {"site": "scalar", "name": "loss", "module_path": "", "micro_step": None}
        run = run_of(tmp_path / "run", [[row(0, np.array(loss), **scalar)] for loss in losses])
        assert run.array("", site="scalar", step=0) == np.float32(1.5)
        assert run.array("", site="scalar", step=0, rank=1) == np.float32(2.0)
        table = run.view().rows().table.to_pylist()
        assert [(one["rank"], one["mean"]) for one in table] == [(None, 1.5), (0, 1.0), (1, 2.0)]
        assert (table[0]["layout_source"], table[0]["scale"]) == ("assumed", "assumed_mean")

    def test_learning_rates_that_differ_are_not_averaged(self, tmp_path: Path) -> None:
        rate = {"site": "scalar", "name": "lr.SGD.0", "module_path": "", "micro_step": None}
        equal, unlike = (
            run_of(tmp_path / str(other), [[row(0, np.array(np.float32(one)), **rate)] for one in (1, other)])
            for other in (1, 2)
        )
        assert [one["rank"] for one in equal.view().rows().table.to_pylist()] == [None]
        assert [(one["rank"], one["mean"]) for one in unlike.view().rows().table.to_pylist()] == [(0, 1.0), (1, 2.0)]
        with pytest.raises(LookupFailedError, match=r"different learning rates.*; ask for one of rank=0, 1"):
            unlike.array("", site="scalar", step=0)

    def test_a_loss_that_is_nan_on_one_rank_is_nan(self, tmp_path: Path) -> None:
        scalar = {"site": "scalar", "name": "loss", "module_path": "", "micro_step": None}
        losses = [np.float32(1.0), np.float32(np.nan)]
        run = run_of(tmp_path / "run", [[row(0, np.array(loss), **scalar)] for loss in losses])
        assert np.isnan(run.array("", site="scalar", step=0))
        found = run.view().rows().table.to_pylist()[0]
        assert (found["rank"], found["mean"], found["nan_count"], found["inf_count"]) == (None, None, 1, 0)

    def test_one_question_does_not_answer_another(self, tmp_path: Path) -> None:
        wide, tall = values(3, 4), values(5, 2)
        rows = [[row(0, wide, **self.PARAM), row(1, tall, **(self.PARAM | {"name": "bias", "step": 1}))]] * 2
        run = run_of(tmp_path / "run", rows)
        assert same(run.array("layers.0", site="param", name="weight", step=0), wide)
        assert same(run.array("layers.0", site="param", name="bias", step=1), tall)

    def test_a_count_that_differs_is_not_rounded_to_one(self, tmp_path: Path) -> None:
        scalar = {"site": "scalar", "name": "tokens", "module_path": "", "micro_step": None}
        run = run_of(tmp_path / "run", [[row(0, np.array(n), **scalar)] for n in (1, 2)])
        assert run.array("", site="scalar", step=0) == 1.5

    def shards(
        self, *, mesh: Sequence[Mapping[str, Any]] | None = None, number: int = 0, **columns: Any
    ) -> tuple[Array, list[list[Row]]]:
        whole = values(7, 4)
        rows = []
        for rank, (start, stop) in enumerate([(0, 4), (4, 7)]):
            layout = {
                "global_shape": "[7,4]",
                "offsets": f"[{start},0]",
                "placements": '[{"kind":"Shard","dim":0}]',
                "mesh": json.dumps(mesh[rank] if mesh else {"shape": [2], "coordinate": [rank]}),
                "layout_source": "dtensor",
            }
            own = whole[start:stop]
            data = np.ascontiguousarray(own).reshape(-1).view(np.uint8)
            mark = to_text(fingerprint(data, 4, own.shape, (start, 0)))
            rows.append([make_row(number, own, **(self.PARAM | layout | {"fingerprint": mark} | columns))])
        return whole, rows

    def test_uneven_shards_are_one_tensor(self, tmp_path: Path) -> None:
        whole, rows = self.shards()
        run = run_of(tmp_path / "run", rows, {"kind": "fsdp2", "ranks": [0, 1]})
        i, found = view_row(run.view().rows())
        assert (found["layout_source"], found["offsets"], found["placements"]) == ("dtensor", None, None)
        assert found["fingerprint"] == finger(whole)
        assert same(run.array("layers.0", site="param", step=0), whole)
        assert decoded(run.view().rows(), i).tobytes() == whole.tobytes()

    def test_a_missing_shard_leaves_no_tensor_but_says_so(self, tmp_path: Path) -> None:
        _, rows = self.shards()
        run = run_of(tmp_path / "run", [rows[0], []], {"kind": "fsdp2", "ranks": [0, 1]})
        with pytest.raises(LookupFailedError, match="the chunks of rank 1 are missing"):
            run.array("layers.0", site="param", step=0)
        table = run.view().rows().table.to_pylist()
        assert [(one["rank"], one["encoding"]) for one in table] == [(None, None), (0, "plain")]
        assert (table[0]["ranks_present"], table[0]["mean"], table[0]["shape"]) == ("[0]", None, "[7,4]")

    def test_pieces_that_contradict_each_other_are_refused_and_the_rest_is_not(self, tmp_path: Path) -> None:
        _, rows = self.shards(mesh=[{"shape": [2], "coordinate": [0]}, {"shape": [4], "coordinate": [1]}])
        sound, more = self.shards(module_path="layers.1", number=1)
        run = run_of(tmp_path / "run", [[*a, *b] for a, b in zip(rows, more, strict=True)])
        view = run.view().rows()
        (finding,) = view.findings
        assert finding.kind == "inconsistent" and "rank 0 [2], rank 1 [4]" in finding.text
        assert same(view.array(view_row(view, module_path="layers.1")[0]), sound)
        assert [one["rank"] for one in view.table.to_pylist() if one["module_path"] == "layers.0"] == [0, 1]

    @pytest.mark.parametrize("encoding", ["plain", "compressed"])
    @pytest.mark.parametrize("dim", [0, 1, 2])
    def test_large_tensors_are_put_together_part_by_part(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dim: int, encoding: str
    ) -> None:
        monkeypatch.setattr("recorder.globalview.assembler.PART_BYTES", 256)
        monkeypatch.setattr("recorder.globalview.assembler._CACHE_BYTES", 600)
        whole = values(8, 6, 4)
        rows = []
        for rank, own in enumerate(np.split(whole, 2, axis=dim)):
            offsets = [0, 0, 0]
            offsets[dim] = rank * own.shape[dim]
            layout = {
                "global_shape": "[8,6,4]",
                "offsets": json.dumps(offsets),
                "placements": json.dumps([{"kind": "Shard", "dim": dim}]),
                "mesh": json.dumps({"shape": [2], "coordinate": [rank]}),
            }
            rows.append(make_parts(0, np.ascontiguousarray(own), 3, encoding=encoding, **(self.PARAM | layout)))
        run = run_of(tmp_path / "run", rows, {"kind": "fsdp2", "ranks": [0, 1]})
        found = run.view().rows()
        assert len(found) == 1 and found.payload_bytes[0] == whole.nbytes
        assert same(found.array(0), whole)
        assert decoded(found, 0).tobytes() == whole.tobytes()
        sizes = [part.payload_bytes for part in found.parts(0)]
        assert max(sizes) <= 256 and len(sizes) >= 3

    def test_shards_that_are_not_what_their_mesh_makes_are_refused(self, tmp_path: Path) -> None:
        pieces = [values(6, 1 << 8), values(2, 1 << 8)]
        rows = []
        for rank, (start, own) in enumerate(zip((0, 6), pieces, strict=True)):
            layout = {
                "global_shape": "[8,256]",
                "offsets": f"[{start},0]",
                "placements": '[{"kind":"Shard","dim":0}]',
                "mesh": json.dumps({"shape": [2], "coordinate": [rank]}),
            }
            rows.append(make_parts(0, own, 3, **(self.PARAM | layout)))
        run = run_of(tmp_path / "run", rows, {"kind": "fsdp2", "ranks": [0, 1]})
        found = run.view().rows()
        assert len(found) == 2, "the shards are not what torch.chunk makes of 8"
        assert found.findings[0].kind == "inconsistent"

    @pytest.mark.parametrize("is_replica", [True, False])
    def test_a_tensor_that_lacks_a_part_has_no_values(self, tmp_path: Path, is_replica: bool) -> None:
        rows = [make_parts(0, values(8, 4), 3, **self.PARAM) for _ in range(2)]
        if is_replica:
            rows[1] = [dict(one) for one in rows[0]]
        run = run_of(tmp_path / "run", [rows[0], [rows[1][0], rows[1][2]]])
        found = run.view().rows()
        assert found.table.column("rank").to_pylist() == ([None] if is_replica else [0, 1])
        i = len(found) - 1
        if is_replica:
            assert same(found.array(i), run.array("layers.0", site="param", step=0, rank=0))
        else:
            assert (found.payload_bytes[1], found.table.column("encoding")[1].as_py()) == (0, None)
            assert json.loads(found.table.column("note")[1].as_py())["no_values"] == "a part of the tensor is missing"
            with pytest.raises(LookupFailedError, match="no values"):
                found.array(1)

    @pytest.mark.parametrize("lacking", [0, 1])
    def test_a_tensor_of_which_one_rank_kept_statistics_alone_says_why_it_has_no_values(
        self, tmp_path: Path, lacking: int
    ) -> None:
        rows = []
        for rank in range(2):
            kept = {"encoding": None} if rank == lacking else {}
            rows.append([root_input(0, values(2, 3)), row(1, values(2, 2), **kept)])
        found = run_of(tmp_path / "run", rows).view().rows().table
        of_output = found.filter(pc.field("site") == "output").to_pylist()
        assert [one["encoding"] for one in of_output] == [None]
        assert json.loads(of_output[0]["note"])["no_values"] == "the values of some ranks were not recorded"

    def test_parts_of_one_rank_come_back_as_one(self, tmp_path: Path) -> None:
        whole = values(8, 256)
        run = run_of(tmp_path / "run", [make_parts(0, whole, 3, **self.PARAM)] * 2)
        found = run.view().rows()
        assert same(found.array(0), whole) and decoded(found, 0).tobytes() == whole.tobytes()


class TestAttempts:
    def test_a_writer_that_left_nothing_supersedes_nothing(self, tmp_path: Path) -> None:
        run = run_of(tmp_path / "run", [[root_input(0, values(2, 3)), row(1, values(2, 2))] for _ in range(2)])
        HandmadeWriter(run.path, rank=0, name="0-early").finish(started_ns=1)
        found = open_run(run.path)
        assert found.array("layers.0", step=0).shape == (4, 2)
        assert found.view().rows().findings == []

    def test_what_counts_at_a_step_is_decided_for_all_ranks_together(self, tmp_path: Path) -> None:
        run = self.restarted(tmp_path / "run", is_complete=True)
        with pytest.raises(LookupFailedError, match="a later attempt recorded this step again"):
            run.array("layers.0", site="param", step=2, attempt=0)

    def restarted(self, path: Path, *, source: str = "optimizer", is_complete: bool) -> Run:
        """Attempt 0 records steps 0 to 3 on both ranks; attempt 1 steps 2 to 4, of which 4 may not be complete."""
        make_run(path)
        for rank in range(2):
            for attempt, steps in enumerate([range(4), range(2, 5)]):
                writer = HandmadeWriter(path, rank=rank, name=f"w{attempt}")
                rows = [
                    row(i, np.full(3, attempt, np.float32), step=s, rank=rank, attempt=attempt, site="param")
                    for i, s in enumerate(steps)
                ]
                writer.add_shard([rows])
                state = "closed" if attempt == 1 and is_complete else "recording"
                writer.finish(attempt=attempt, state=state, step_source=source)
        return open_run(path)

    @pytest.mark.parametrize("is_complete", [True, False])
    def test_the_newest_attempt_that_completed_a_step_wins(self, tmp_path: Path, is_complete: bool) -> None:
        run = self.restarted(tmp_path / "run", is_complete=is_complete)
        rows = run.view().rows()
        found = {one["step"]: one["mean"] for one in rows.table.to_pylist()}
        assert found == {0: 0, 1: 0, 2: 1, 3: 1, 4: 1}
        assert [finding.kind for finding in rows.findings] == ["superseded"]
        assert run.array("layers.0", site="param", step=2)[0] == 1
        assert run.array("layers.0", site="param", step=2, rank=0, attempt=0)[0] == 0

    def test_counted_steps_are_not_joined(self, tmp_path: Path) -> None:
        run = self.restarted(tmp_path / "run", source="counted", is_complete=True)
        assert {one["step"]: one["mean"] for one in run.view().rows().table.to_pylist()} == {2: 1, 3: 1, 4: 1}

    def test_a_writer_of_another_run_is_left_out_and_named(self, tmp_path: Path) -> None:
        run = run_of(tmp_path / "run", [[row(0, values(3), site="param")]])
        stranger = HandmadeWriter(tmp_path / "run", rank=1, name="stranger")
        stranger.add_shard([[row(0, values(3), site="param", rank=1)]])
        stranger.finish(run_id="another")
        rows = open_run(run.path).view().rows()
        assert len(rows) == 1
        assert any("stranger" in finding.text and "another run" in finding.text for finding in rows.findings)


def test_windows_cover_every_step_once(tmp_path: Path) -> None:
    rows = [[row(i, values(2), step=step, site="param") for i, step in enumerate([0, 1, 2, 5, 9])] for _ in range(2)]
    run = run_of(tmp_path / "run", rows)
    view = run.view()
    assert view.windows(max_rows=4) == [(0, 2), (2, 9), (9, 10)]
    assert view.windows() == [(0, 10)]
    steps = [step for window in view.windows(4) for step in view.rows(*window).table.column("step").to_pylist()]
    assert sorted(set(steps)) == [0, 1, 2, 5, 9] and len(steps) == 10, "the replicas differ, so both ranks' stay"


def test_a_window_of_steps_answers_as_the_whole_does(tmp_path: Path) -> None:
    """The root's input at step 0 alone: what it says of the batch holds at all steps, whichever are read together."""
    rows = [
        [root_input(0, values(3, 7)), *(row(1 + step, values(7, 3, 2), step=step) for step in range(3))]
        for _ in range(2)
    ]
    run = run_of(tmp_path / "run", rows)
    view = run.view()
    windows = view.windows(max_rows=2)
    assert len(windows) == 3
    parts = [one for window in windows for one in run.view().rows(*window).table.to_pylist()]
    assert parts == view.rows().table.to_pylist()
    assert [run.array("layers.0", step=step).shape for step in range(3)] == [(7, 6, 2)] * 3


def test_a_run_of_one_rank_is_its_own_view(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    y = values(4, 2)
    with caplog.at_level(logging.WARNING):
        run = run_of(tmp_path / "run", [[root_input(0, values(4, 3)), row(1, y)]], None)
        rows = run.view().rows()
    i, found = view_row(rows, module_path="layers.0")
    assert (found["rank"], found["layout_source"], found["scale"]) == (None, "single", None)
    assert same(rows.array(i), y) and rows.findings == [] and not caplog.records


def test_a_word_that_no_question_knows_is_refused(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", [[row(0, values(2), site="param")]])
    with pytest.raises(TypeError, match=r"'rnk' \(did you mean 'rank'"):
        run.array("layers.0", site="param", rnk=0)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"'modee' \(did you mean 'mode'"):
        run["layers.0"].tensor(site="param", modee="train")  # type: ignore[call-arg]


def test_an_empty_run_has_an_empty_view(tmp_path: Path) -> None:
    view = open_run(make_run(tmp_path / "run")).view()
    assert view.windows() == [] and len(view.rows()) == 0 and view.rows().table.num_rows == 0
