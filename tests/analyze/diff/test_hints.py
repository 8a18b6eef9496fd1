"""Modules that two runs have alone: which lines for the file of renamed modules `diff` proposes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import recorder
from recorder.analyze.diff.diff import diff
from recorder.analyze.diff.renames import (
    NO_RENAMES,
    Rename,
    RenameHint,
    Renames,
    UnpairedModules,
    read_renames,
    rename_hints,
)
from recorder.errors import LookupFailedError

from .test_diff import row, write

PARAM: dict[str, Any] = {"site": "param", "name": "weight", "phase": "optimizer", "micro_step": None}
BLOCK = {"norm": "norm", "ff1": "mlp.up", "ff2": "mlp.down"}
OLD = {f"encoder.layers.{i}.{name}": 2 + j for i in range(2) for j, name in enumerate(BLOCK)}
"""Modules of the first run, and how many elements their tensors have."""
NEW = {f"blocks.{i}.{name}": 2 + j for i in range(2) for j, name in enumerate(BLOCK.values())}


def run(path: Path, sizes: Mapping[str, int], seeds: Mapping[str, float] | None = None) -> recorder.Run:
    """Each module has an output and a weight, by default its own: the n-th a multiple of n."""
    rows: list[Any] = []
    for number, (module, size) in enumerate({"head": 9, **sizes}.items()):
        values = np.arange(size, dtype=np.float32) + (seeds or {}).get(module, number)
        rows.append(row(len(rows), values, module_path=module))
        rows.append(row(len(rows), values, module_path=module, **PARAM))
    return write(path, rows)


def lines(found: Any) -> list[str]:
    return [hint.line for hint in found.hints]


def test_a_beginning_stands_for_many_and_the_lines_pair_all(tmp_path: Path) -> None:
    a, b = run(tmp_path / "a", OLD), run(tmp_path / "b", NEW)
    found = diff(a, b)
    assert not found.is_equal and found.num_compared == 2
    assert found.hints[0] == RenameHint("encoder.layers", "blocks", 2, 2)
    inner = {"ff1": "mlp.up", "ff2": "mlp.down"}
    each = {f"encoder.layers.{i}.{old} = blocks.{i}.{new}" for i in range(2) for old, new in inner.items()}
    assert set(lines(found)) == {"encoder.layers = blocks"} | each
    (tmp_path / "names").write_text("\n".join(lines(found)))
    paired = diff(a, b, renames=read_renames(tmp_path / "names"))
    assert paired.is_equal and paired.num_compared == 14 and not paired.hints


def test_what_a_file_leaves_out_is_proposed_beside_it(tmp_path: Path) -> None:
    a, b = run(tmp_path / "a", OLD), run(tmp_path / "b", NEW)
    given = [Rename("encoder.layers", "blocks", "f:1"), Rename("encoder.layers.0.ff1", "blocks.0.mlp.up", "f:2")]
    found = diff(a, b, renames=Renames(given))
    assert "encoder.layers = blocks" not in lines(found) and len(lines(found)) == 3


def test_equal_parameters_tell_modules_of_one_shape_apart(tmp_path: Path) -> None:
    """They run in another order in the second run."""
    a = run(tmp_path / "a", {"attn.q": 4, "attn.k": 4, "attn.v": 4}, {"attn.q": 1, "attn.k": 2, "attn.v": 3})
    b = run(tmp_path / "b", {"wv": 4, "wq": 4, "wk": 4}, {"wq": 1, "wk": 2, "wv": 3})
    found = diff(a, b)
    assert set(lines(found)) == {"attn.q = wq", "attn.k = wk", "attn.v = wv"}
    assert [(hint.num_modules, hint.num_same) for hint in found.hints] == [(1, 1)] * 3


def test_without_equal_parameters_the_order_of_execution_pairs(tmp_path: Path) -> None:
    a = run(tmp_path / "a", {"one": 4, "two": 4})
    found = diff(a, run(tmp_path / "b", {"first": 4, "second": 4}, {"first": 50, "second": 60}))
    assert lines(found) == ["one = first", "two = second"] and not any(hint.num_same for hint in found.hints)


def test_a_beginning_that_others_share_is_no_line(tmp_path: Path) -> None:
    """``stack.out`` is called so in both runs."""
    a = run(tmp_path / "a", {"body.0.up": 3, "body.1.up": 4, "stack.out": 5})
    found = diff(a, run(tmp_path / "b", {"stack.0.up": 3, "stack.1.up": 4, "stack.out": 5}))
    assert set(lines(found)) == {"body.0.up = stack.0.up", "body.1.up = stack.1.up"}


@pytest.mark.parametrize("sizes", [{"up": 4}, {"up": 3, "down": 3}, {}], ids=["shape", "number", "nothing"])
def test_what_looks_otherwise_is_not_proposed(tmp_path: Path, sizes: dict[str, int]) -> None:
    assert diff(run(tmp_path / "a", {"ff": 3}), run(tmp_path / "b", sizes)).hints == []


def test_runs_without_a_common_module_are_refused_with_the_lines(tmp_path: Path) -> None:
    a, b = (write(tmp_path / name, [row(0, np.ones(3), module_path=name)]) for name in ("a", "b"))
    with pytest.raises(LookupFailedError, match="--rename takes a file, such as of these lines: a = b"):
        diff(a, b)


def unpaired(modules: Mapping[str, str], shapes: Mapping[str, int]) -> UnpairedModules:
    found = UnpairedModules(modules)
    columns = {"module_path": [*shapes], "site": "output", "name": "", "shape": [str(n) for n in shapes.values()]}
    columns = {name: [some] * len(shapes) if isinstance(some, str) else some for name, some in columns.items()}
    found.add(pa.table(columns | {"fingerprint": pa.nulls(len(shapes), pa.string())}))
    return found


PATH = st.lists(st.sampled_from("abc"), min_size=1, max_size=4).map(".".join)


@given(st.lists(PATH, unique=True, max_size=8), st.lists(PATH, unique=True, max_size=8), st.data())
def test_lines_rename_what_is_alone_to_what_is_alone_and_nothing_else(a: list[str], b: list[str], data: Any) -> None:
    shapes = {path: data.draw(st.integers(0, 2)) for path in [*a, *b]}
    alone_a, alone_b = ([path for path in one if path not in two] for one, two in ((a, b), (b, a)))
    one, two = (unpaired({p: p for p in some}, {p: shapes[p] for p in some}) for some in (alone_a, alone_b))
    hints = rename_hints(one, two, NO_RENAMES, {path: path for path in b})
    names = Renames(Rename(hint.old, hint.new, "") for hint in hints)
    paired = {path: names.old(path) for path in alone_b if names.old(path) in alone_a}
    assert sum(hint.num_modules for hint in hints) <= len(paired)
    assert all(names.old(path) == path for path in b if path in a)
    assert len({names.old(path) for path in b}) == len(b)
