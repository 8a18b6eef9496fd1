"""The global view of several ranks is what one process with the whole batch sees: every site, every step.

The bounds, and where the bits must be equal, are derived in `reference`. A few cases run by default, all with -m slow;
``python -m tests.campaigns roundtrip`` prints them as a table.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from recorder.errors import LookupFailedError
from recorder.globalview.view import GlobalRows
from tests.campaigns.roundtrip.programs import train
from tests.campaigns.roundtrip.reference import Key
from tests.campaigns.roundtrip.roundtrip import (
    SITES,
    Case,
    Proof,
    SiteResult,
    blank,
    compare,
    is_same,
    key_of,
    matrix,
    tensor_of,
)
from tests.rigs.fingerprints import fingerprint

from .conftest import Prove

RAGGED = Case(layout="ddp", world_size=2, way="ragged", steps=2)
SQUARE = Case(layout="ddp", world_size=2, way="square", steps=1)
QUICK = [
    RAGGED,
    Case(layout="fsdp2 Shard(1)", world_size=2, way="checkpoint", steps=2),
]
CASES = [
    *(pytest.param(case, id=f"{case}, {case.steps} steps") for case in QUICK),
    *(pytest.param(case, id=str(case), marks=pytest.mark.slow) for case in matrix()),
]
every_case = pytest.mark.parametrize("case", CASES)
GRADIENTS = ("grad_input", "grad_output")
EXACT: dict[str, Callable[[Key], bool]] = {
    "inputs of the model": lambda key: key[:2] == ("input", ""),
    "masks": lambda key: key[0] == "input" and key[2].endswith(("keep", "causal")),
    "first parameters": lambda key: key[0] == "param" and key[3] == 0,
    "first embeddings": lambda key: key[:2] == ("output", "embed") and key[3] == 0 and key[7] == "train",
    "first positions": lambda key: key[:2] == ("output", "positions") and key[3] == 0 and key[7] == "train",
    "steps of the optimizer": lambda key: key[0] == "optim" and key[2].endswith(".step"),
    "learning rates": lambda key: key[0] == "scalar" and key[2].startswith("lr."),
    "buffers that nothing computes": lambda key: key[0] == "buffer" and key[2] in ("num_calls", "frequencies"),
}
SOURCES = {"ddp": "ddp", "fsdp1": "fsdp", "fsdp2": "dtensor", "hsdp": "dtensor"}


def ranks_of(proof: Proof) -> range:
    return range(proof.case.world_size)


def is_gradient(key: Key) -> bool:
    return key[0] in GRADIENTS or (key[0] == "tap" and key[-1] == "backward")


def global_rows(proof: Proof) -> Iterator[tuple[int, dict[str, Any]]]:
    return ((i, row) for i, row in enumerate(proof.table) if row["rank"] is None)


def pieces(proof: Proof, key: Key, ranks: list[int]) -> list[Tensor]:
    """What each of these ranks recorded."""
    return [tensor_of(proof.run, key, rank) for rank in ranks]


@cache
def compared(proof: Proof) -> dict[str, SiteResult]:
    return compare(proof)


@every_case
def test_nothing_is_missing_and_nothing_is_more(prove: Prove, case: Case) -> None:
    results = compared(prove(case))
    assert {site: result.missing for site, result in results.items()} == {site: [] for site in SITES}
    assert {site: result.extra for site, result in results.items()} == {site: [] for site in SITES}
    assert all(result.expected >= 4 for result in results.values())


@every_case
def test_every_value_is_equal_or_within_what_rounding_does(prove: Prove, case: Case) -> None:
    results = compared(prove(case))
    assert {site: result.wrong for site, result in results.items()} == {site: [] for site in SITES}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, id=str(c), marks=[] if str(c) in ("ddp x2 nan", "ddp x2 dead") else pytest.mark.slow)
        for c in blank()
    ],
)
def test_values_that_say_nothing_of_their_layout_have_that_of_the_other_steps(prove: Prove, case: Case) -> None:
    """All NaN, or a bias again and again; steps with tensors, and steps with statistics alone."""
    results = compared(prove(case))
    for what in ("missing", "wrong", "extra"):
        assert {site: getattr(result, what) for site, result in results.items()} == {site: [] for site in SITES}
    assert any(row["encoding"] is None for row in prove(case).table)


@every_case
def test_the_bounds_would_show_a_wrong_factor(prove: Prove, case: Case) -> None:
    """The smallest mistake of an assembly, a factor of 2, is a change by half of a tensor's magnitude."""
    results = compared(prove(case))
    # In bfloat16 even the sign of a small parameter gradient is open (a sum over all rows, of which most cancel), and
    # AdamW makes a whole step of it: such tensors prove nothing there. In float32 all of them do.
    sites = set(SITES) - {"param", "grad", "optim"} if case.options.mixed else SITES
    assert max(results[site].loosest for site in sites) < (0.25 if case.options.mixed else 0.001)


@every_case
@pytest.mark.parametrize("what", EXACT)
def test_what_no_rounding_reaches_is_bit_equal(prove: Prove, case: Case, what: str) -> None:
    proof = prove(case)
    keys = [key for key in proof.values if EXACT[what](key) and not proof.is_early(key)]
    assert keys
    assert {proof.bounds[key] for key in keys} == {0.0}
    assert [key for key in keys if not is_same(proof.tensor(key), proof.values[key])] == []


@every_case
def test_the_first_inputs_of_mixed_precision_are_those_that_the_script_gave(prove: Prove, case: Case) -> None:
    proof = prove(case)
    early = [key for key in proof.values if proof.is_early(key)]
    assert bool(early) == case.options.mixed
    for key in early:
        given = proof.tensor(key)
        assert given.dtype == (torch.float32 if proof.values[key].is_floating_point() else proof.values[key].dtype)
        assert is_same(given.to(proof.values[key].dtype), proof.values[key])


@every_case
def test_activation_gradients_are_the_ranks_own_divided_by_their_number(prove: Prove, case: Case) -> None:
    proof = prove(case)
    kinds = set()
    for _, row in global_rows(proof):
        key = key_of(row)
        if not is_gradient(key):
            continue
        assert row["scale"] == "assumed_mean_loss"
        ranks = json.loads(row["ranks_present"])
        raw = pieces(proof, key, ranks)
        dim = json.loads(row["note"] or "{}").get("batch_dim")
        kinds.add(dim)
        whole = torch.cat(raw, dim).double() if dim is not None else torch.stack(raw).double().sum(0)
        assert is_same(proof.tensor(key), (whole / case.world_size).to(raw[0].dtype)), key
    # Batch first, sequence first, and no batch at all: there the ranks' gradients are shares of one sum.
    assert kinds == {0, 1, None}


@every_case
def test_values_without_dims_that_differ_become_their_mean_and_stay(prove: Prove, case: Case) -> None:
    proof = prove(case)
    means = {key_of(row): row for _, row in global_rows(proof) if row["scale"] == "assumed_mean"}
    assert {(key[0], key[1]) for key in means} == {("output", ""), ("output", "energy"), ("scalar", "")}
    stay = [row for row in proof.table if row["rank"] is not None and row["site"] != "buffer"]
    assert {key_of(row) for row in stay} == set(means)
    for key, row in means.items():
        ranks = json.loads(row["ranks_present"])
        assert row["shape"] == "[]"
        assert row["layout_source"] == "assumed"
        assert sorted(other["rank"] for other in stay if key_of(other) == key) == ranks
        mean = torch.stack(pieces(proof, key, ranks)).double().mean()
        assert is_same(proof.tensor(key), mean.to(proof.values[key].dtype))


@every_case
def test_buffers_are_those_of_the_first_rank(prove: Prove, case: Case) -> None:
    proof = prove(case)
    buffers = {key_of(row): row for _, row in global_rows(proof) if row["site"] == "buffer"}
    for key, row in buffers.items():
        assert is_same(proof.tensor(key), tensor_of(proof.run, key, 0))
        others = [rank for rank in json.loads(row["ranks_present"]) if rank]
        differing = [r for r in others if not is_same(tensor_of(proof.run, key, r), tensor_of(proof.run, key, 0))]
        assert json.loads(row["note"] or "{}").get("replicas_differ", []) == differing
        assert bool(differing) == (key[2] == "average" and bool(others))
    found = [finding for finding in proof.rows.findings if finding.kind == "buffers_differ"]
    assert {(finding.module_path, finding.site, finding.name) for finding in found} == {
        ("running", "buffer", "average")
    }


@every_case
def test_rows_say_where_their_layout_comes_from(prove: Prove, case: Case) -> None:
    proof = prove(case)
    state = next(SOURCES[word] for word in SOURCES if case.layout.startswith(word))
    state = "fsdp" if case.layout == "hsdp fsdp1" else state
    for _, row in global_rows(proof):
        if row["site"] in ("param", "grad") or (row["site"] == "optim" and row["shape"] != "[]"):
            assert row["layout_source"] == state
        elif row["site"] in ("input", "output", "grad_input", "grad_output", "tap"):
            assert row["layout_source"] in ("assumed", "inferred")
        columns = ("global_shape", "offsets", "placements", "mesh")
        assert [row[name] for name in columns] == [None] * len(columns)


@every_case
def test_rows_say_which_ranks_are_in_them(prove: Prove, case: Case) -> None:
    proof = prove(case)
    everyone = list(ranks_of(proof))
    for _, row in global_rows(proof):
        present, expected = (json.loads(row[name]) for name in ("ranks_present", "ranks_expected"))
        assert present == (
            [rank for rank in expected if rank != everyone[-1]] if key_of(row) in proof.lacking else expected
        )
        without = set(everyone) - set(expected)
        assert not without or (row["site"] == "optim" and case.layout in ("fsdp1", "fsdp1 flat", "hsdp fsdp1"))
        for rank in without:  # FSDP1's optimizer keeps nothing for a rank whose slice is empty
            name = row["name"].partition(".")[0]
            assert not proof.run.tensor(row["module_path"], "param", row["step"], name=name, rank=rank).numel()
    assert bool(proof.lacking) == (case.layout == "ddp" and case.options.ragged)
    found = [finding for finding in proof.rows.findings if finding.kind == "partial"]
    assert sum(finding.num_rows for finding in found) == len(proof.lacking)
    assert {finding.ranks for finding in found} <= {(everyone[-1],)}


def has_batch_dim(key: Key) -> bool:
    site, path, name, *_ = key
    without = path == "positions" or name in ("index", "causal", "masks.causal", "scale", "energy") or path == "energy"
    return site in ("input", "output", *GRADIENTS, "tap") and not without


@every_case
def test_half_a_batch_is_never_shown_as_a_whole_one(prove: Prove, case: Case) -> None:
    proof = prove(case)
    rows = {key_of(row): row for _, row in global_rows(proof)}
    notes = {key: json.loads(rows[key]["note"] or "{}") for key in proof.lacking if has_batch_dim(key)}
    last = [case.world_size - 1]
    assert [key for key, note in notes.items() if note.get("partial") != last] == []


def test_what_lacks_a_rank_is_given_only_where_it_is_asked_for(prove: Prove) -> None:
    proof = prove(RAGGED)
    key = ("output", "head", "", RAGGED.steps - 1, 0, 0, 0, "train", "forward")
    assert key in proof.lacking
    with pytest.raises(LookupFailedError, match=r"rank 0 alone.*partial=True"):
        tensor_of(proof.run, key)
    assert len(proof.tensor(key)) == train.RAGGED[2][0]
    with pytest.raises(LookupFailedError, match="partial=True"):
        tensor_of(proof.merged, key)
    assert len(proof.merged_tensor(key)) == train.RAGGED[2][0]


def rows_with_values(rows: GlobalRows) -> Iterator[tuple[dict[str, Any], Any]]:
    for i, row in enumerate(rows.table.to_pylist()):
        if row["rank"] is None:
            yield row, rows.array(i)


@every_case
def test_statistics_are_those_of_the_whole_tensor(prove: Prove, case: Case) -> None:
    """Counts and extremes exactly; sums to the rounding of float64, in which n numbers are added in some order.

    With u = 2**-53 each of them has an error of at most n u / (1 - n u) times the sum of magnitudes (Higham, 4.2).
    A sum of squares has one more rounding in each term, and a scaled one another.
    """
    for row, array in rows_with_values(prove(case).rows):
        values = array.astype(np.float64).reshape(-1)
        assert row["numel"] == values.size
        note = json.loads(row["note"] or "{}")
        if row["nan_count"] is None:
            assert note["no_statistics"] == "reduced over ranks"
            assert row["scale"] is not None
            continue
        assert row["nan_count"] == np.isnan(values).sum()
        assert row["inf_count"] == np.isinf(values).sum()
        assert row["zero_count"] == (values == 0).sum()
        values = values[np.isfinite(values)]
        if not values.size:
            assert row["mean"] is row["sum"] is row["max"] is None
            continue
        assert (row["min"], row["max"], row["absmax"]) == (values.min(), values.max(), abs(values).max())
        n = values.size
        exact, squares, magnitudes = math.fsum(values), math.fsum(values * values), math.fsum(abs(values))
        relative = (n + 2) * 2.0**-53 / (1 - (n + 2) * 2.0**-53)
        assert abs(row["sum"] - exact) <= relative * magnitudes
        assert abs(row["mean"] - exact / n) <= 2 * relative * magnitudes / n
        assert abs(row["sum_sq"] - squares) <= relative * squares
        assert abs(row["l2"] - math.sqrt(squares)) <= relative * math.sqrt(squares)
        assert abs(row["sum_abs"] - magnitudes) <= relative * magnitudes
        fourths = math.fsum(values**4)
        assert abs(row["sum_fourth"] - fourths) <= 4 * relative * fourths
        variance = math.fsum((values - exact / n) ** 2) / n
        assert abs(row["std"] ** 2 - variance) <= 4 * relative * squares / n


@every_case
def test_fingerprints_are_those_of_the_whole_tensor(prove: Prove, case: Case) -> None:
    num_checked: dict[str, int] = {}
    for row, array in rows_with_values(prove(case).rows):
        if row["fingerprint"] is None:  # what was computed has none; a copy has
            assert row["scale"] is not None or row["site"] == "scalar"
            continue
        assert row["fingerprint"] == fingerprint(array), key_of(row)
        num_checked[row["site"]] = num_checked.get(row["site"], 0) + 1
    assert set(num_checked) >= {"input", "output", "param", "grad", "buffer", "optim", "tap"}


@every_case
def test_rows_have_the_tensors_that_a_look_up_gives(prove: Prove, case: Case) -> None:
    proof = prove(case)
    for row, array in rows_with_values(proof.rows):
        found = proof.tensor(key_of(row))
        assert row["dtype"] == str(found.dtype).removeprefix("torch.")
        assert json.loads(row["shape"]) == list(found.shape) == list(array.shape)
        assert np.array_equal(array.astype(np.float64), found.double().numpy(), equal_nan=True)


@every_case
def test_the_merged_run_gives_the_same_answers(prove: Prove, case: Case) -> None:
    proof = prove(case)
    assert [key for key in proof.values if not is_same(proof.merged_tensor(key), proof.tensor(key))] == []


@every_case
def test_the_merged_run_has_the_same_rows(prove: Prove, case: Case) -> None:
    proof = prove(case)
    own = {"seq", "attempt", "encoding", "time_ns", "payload_bytes"}
    names = [name for name in proof.rows.table.column_names if name not in own]
    direct, merged = (rows.table.select(names).to_pylist() for rows in (proof.rows, proof.merged.view().rows()))
    by_key = {(key_of(row), row["rank"]): row for row in merged}
    assert len(by_key) == len(merged) == len(direct)
    assert [row for row in direct if row != by_key.get((key_of(row), row["rank"]))] == []


def whole_batch_gradients(options: Any) -> dict[str, Tensor]:
    """Gradients of the plain mean over all samples, in the first step."""
    torch.manual_seed(7)
    net = train.Net()
    batch, target = train.make_batch(0, 0, train.BATCH)
    index, fixed = train.constants()
    output = net(batch, index, **fixed)
    for tensor in (output["prediction"], output["logits"]):
        tensor.retain_grad()
    train.loss_of(output, batch["tokens"], target, with_energy=not options.ragged).backward()
    return {name: output[name].grad for name in ("prediction", "logits")}


def test_weights_for_ragged_batches_make_each_sample_count_once(prove: Prove) -> None:
    proof = prove(RAGGED)
    rows = proof.run.view(loss="weighted").rows()
    at = {key_of(row): i for i, row in enumerate(rows.table.to_pylist()) if row["rank"] is None}
    sizes = train.RAGGED[2]
    for name, wanted in whole_batch_gradients(RAGGED.options).items():
        key = ("grad_output", "", name, 0, 0, 0, 0, "train", "backward")
        assert rows.table.column("scale")[at[key]].as_py() == "weighted_mean_loss"
        # The bound is that of the mean of means, of which each rank's part is here larger by at most this.
        bound = proof.bounds[key] * max(sizes) * len(sizes) / sum(sizes)
        assert np.abs(rows.array(at[key]) - wanted.numpy()).max() <= bound
        plain = proof.tensor(key).numpy()
        assert np.abs(plain - wanted.numpy()).max() > bound


def test_a_sum_leaves_gradients_as_the_ranks_had_them(prove: Prove) -> None:
    proof = prove(RAGGED)
    rows = proof.run.view(loss="sum").rows()
    at = {key_of(row): i for i, row in enumerate(rows.table.to_pylist()) if row["rank"] is None}
    key = ("grad_output", "", "logits", 0, 0, 0, 0, "train", "backward")
    assert rows.table.column("scale")[at[key]].as_py() is None
    assert np.array_equal(rows.array(at[key]), torch.cat(pieces(proof, key, [0, 1])).numpy())


def sequence_first(key: Key) -> bool:
    """Whether the batch is the second dim there."""
    site, path, name, *_ = key
    return (
        path.startswith("blocks.")
        and site in ("input", "output", *GRADIENTS)
        and name in ("", "0", "x", "input")
        and path.rpartition(".")[2] not in ("scores", "up", "act", "down")
    )


def test_where_shapes_do_not_tell_the_batch_the_row_says_so(prove: Prove) -> None:
    """With as many samples on a rank as positions in a sample, [S, B, D] looks like [B, S, D], which is taken."""
    proof = prove(SQUARE)
    wrong = {text.partition("): ")[0] + ")" for result in compared(proof).values() for text in result.wrong}
    assert wrong == {str(key) for key in proof.values if sequence_first(key)} != set()
    notes = {str(key_of(row)): json.loads(row["note"] or "{}") for _, row in global_rows(proof)}
    assert {tuple(notes[key]["batch_dims"]) for key in wrong} == {(0, 1)}


@pytest.mark.parametrize("gradients", [False, True], ids=["gradients follow", "gradients are named, too"])
def test_an_override_puts_it_right(prove: Prove, gradients: bool) -> None:
    """A layout says where values lie, not what the loss is: gradients are scaled as everywhere."""
    proof = prove(SQUARE)
    named = [key for key in proof.values if sequence_first(key) and (gradients or not is_gradient(key))]
    wanted = {f"{path}:{site}:{name}=shard(1)" for site, path, name, *_ in named}
    rows = proof.run.view(layouts=sorted(wanted)).rows()
    at = {key_of(row): i for i, row in enumerate(rows.table.to_pylist()) if row["rank"] is None}
    results = compare(proof, lambda key: torch.from_numpy(np.array(rows.array(at[key]))))
    assert {site: result.wrong for site, result in results.items()} == {site: [] for site in SITES}


def swapped_ranks(proof: Proof, key: Key, found: Tensor) -> Tensor:
    return found.flip(0) if key[:2] == ("output", "head") else found


def unscaled(proof: Proof, key: Key, found: Tensor) -> Tensor:
    return found * proof.case.world_size if key[0] == "grad_output" else found


def one_element(proof: Proof, key: Key, found: Tensor) -> Tensor:
    if key[0] == "param" and key[3] == 1 and key[2] == "bias" and key[1] == "head":
        return found + 2 * proof.bounds[key]
    return found


def lost(proof: Proof, key: Key, found: Tensor) -> Tensor:
    if key[:2] == ("grad", "embed"):
        raise LookupFailedError("lost")
    return found


@pytest.mark.parametrize(
    ("mistake", "site"), [(swapped_ranks, "output"), (unscaled, "grad_output"), (one_element, "param"), (lost, "grad")]
)
def test_the_comparison_sees_a_mistake(
    prove: Prove, mistake: Callable[[Proof, Key, Tensor], Tensor], site: str
) -> None:
    proof = prove(RAGGED)
    results = compare(proof, lambda key: mistake(proof, key, proof.tensor(key)))
    assert [name for name, result in results.items() if result.wrong or result.missing] == [site]
