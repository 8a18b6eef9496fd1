"""Runs by hand of ranks on a mesh: what DTensor and the wrappers would have said of them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from recorder.format.fingerprint import fingerprint, to_text
from recorder.run.run import Run, open_run
from tests.rigs.handmade import HandmadeWriter, Row, make_row, make_run

Array = npt.NDArray[Any]
Placement = dict[str, Any]
REPLICATE: Placement = {"kind": "Replicate"}
PARTIAL: Placement = {"kind": "Partial", "reduce_op": "sum"}
PARAM: dict[str, Any] = {"site": "param", "name": "weight", "phase": "optimizer", "micro_step": None}
BACK: dict[str, Any] = {"site": "grad_output", "phase": "backward"}


def shard(dim: int) -> Placement:
    return {"kind": "Shard", "dim": dim}


class Mesh:
    """A mesh of global ranks, such as ``Mesh([[0, 1], [2, 3]])``."""

    def __init__(self, ranks: Any) -> None:
        self.ranks = np.array(ranks)

    def axis(self, axis: int) -> Mesh:
        """The mesh of the ranks along one axis from each rank on: of rank r that through r."""
        return Axis(self.ranks, axis)

    def of(self, rank: int) -> Array:
        return self.ranks

    def row(self, rank: int, seq: int, whole: Array, placements: Sequence[Placement], **columns: Any) -> Row:
        """What a rank of it records of a tensor."""
        ranks = self.of(rank)
        coordinate = [int(i) for i in np.argwhere(ranks == rank)[0]]
        ranges = [np.arange(size) for size in whole.shape]
        for placement, num, at in zip(placements, ranks.shape, coordinate, strict=True):
            if placement["kind"] == "Shard":
                own = ranges[placement["dim"]]
                size = -(-len(own) // num)
                ranges[placement["dim"]] = own[at * size : (at + 1) * size]
        local = np.ascontiguousarray(whole[np.ix_(*ranges)])
        offsets = [int(r[0]) if len(r) else 0 for r in ranges]
        is_partial = any(p["kind"] == "Partial" for p in placements)
        mesh = {
            "shape": list(ranks.shape),
            "dim_names": None,
            "coordinate": coordinate,
            "ranks": ranks.ravel().tolist(),
        }
        layout = {
            "global_shape": json.dumps(list(whole.shape)),
            "offsets": None if is_partial else json.dumps(offsets),
            "placements": json.dumps(list(placements)),
            "mesh": json.dumps(mesh),
            "layout_source": "dtensor",
            "fingerprint": finger(local, (0,) * local.ndim if is_partial else tuple(offsets)),
        }
        return make_row(seq, local, **(layout | columns))


class Axis(Mesh):
    """One axis of a mesh."""

    def __init__(self, ranks: Array, axis: int) -> None:
        super().__init__(ranks)
        self._axis = axis

    def of(self, rank: int) -> Array:
        at: list[Any] = [int(i) for i in np.argwhere(self.ranks == rank)[0]]
        at[self._axis] = slice(None)
        return np.array(self.ranks[tuple(at)])


def finger(array: Array, offsets: tuple[int, ...] | None = None) -> str:
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return to_text(fingerprint(data, array.dtype.itemsize, array.shape, offsets or (0,) * array.ndim))


def plain(seq: int, array: Array, **columns: Any) -> Row:
    return make_row(seq, array, **({"fingerprint": finger(array)} | columns))


def root_input(seq: int, array: Array, **columns: Any) -> Row:
    return plain(seq, array, **({"module_path": "", "site": "input", "name": "x"} | columns))


def grid_facts(ranks: Any, rank: int, kind: str | None = "ddp") -> dict[str, Any]:
    """`data_parallel` and `model_parallel` of a rank on a (dp, tp) grid; tensor parallel alone of a list of ranks."""
    grid = np.array(ranks)
    if grid.ndim == 1:
        return {"model_parallel": {"ranks": grid.tolist(), "shape": [len(grid)], "dim_names": ["tp"]}}
    dp, tp = (int(i) for i in np.argwhere(grid == rank)[0])
    model = {"ranks": grid[dp].tolist(), "shape": [grid.shape[1]], "dim_names": ["tp"]}
    return {"data_parallel": {"kind": kind, "ranks": grid[:, tp].tolist()}, "model_parallel": model}


def _class_of(module_path: str) -> str:
    return "Linear" if module_path.rpartition(".")[2].startswith("fc") else "GELU"


def mesh_run(path: Path, rows: Mapping[int, Sequence[Row]], facts: Mapping[int, Mapping[str, Any]], **more: Any) -> Run:
    """A run of ranks with their rows and what their manifests say of root ``model``."""
    make_run(path, **more)
    paths = sorted({one["module_path"] for one in itertools.chain(*rows.values())} | {""})
    for rank, own in rows.items():
        writer = HandmadeWriter(path, rank=rank)
        writer.add_shard([[one | {"rank": rank} for one in own]])
        known = {one["module_path"] for one in own} | {""} if "pipeline" in facts[rank] else paths
        root = {"name": "model", "modules": [{"path": path, "class": _class_of(path)} for path in sorted(known)]}
        writer.finish(roots=[root | dict(facts[rank])])
    return open_run(path)
