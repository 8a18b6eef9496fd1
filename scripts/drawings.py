"""The drawings of docs/: boxes in a row, with arrows between them, as SVG. `scripts.pictures` writes them."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

_LETTER_PX, _CAPITAL_PX, _LINE_PX, _PAD_PX, _GAP_PX, _MARGIN_PX = 7.4, 9.6, 20, 14, 46, 12
_FONT = 'font-family="system-ui, sans-serif" font-size="13"'


class Box(NamedTuple):
    """A thing in a drawing: its name, and what is said of it, line by line."""

    name: str
    lines: Sequence[str]
    points_back: bool = False
    """Whether the arrow before it leads from it to the box before."""


class Drawing(NamedTuple):
    """Boxes from left to right; without arrows they are parts of one thing."""

    boxes: Sequence[Box]
    has_arrows: bool = True


DRAWINGS = {
    "call": Drawing(
        (
            Box("the cluster", ("rank 0: sound", "rank 1, step 3:", "a strange output")),
            Box("recording", ("keep=replay:", "inputs, weights,", "random state, output")),
            Box("bundle/", ("tensors.safetensors", "bundle.json", "replay.py")),
            Box("your desk", ("python replay.py", "bit-equal, or", "different: by how much")),
        )
    ),
    "layouts": Drawing(
        (
            Box("fsdp", ("rank 0: rows 0 to 15", "rank 1: rows 16 to 31", "of blocks.0.mlp.up")),
            Box("global view", ("chunks are put together:", "the weight [32, 8]", "of the whole model")),
            Box("diff", ("value by value, over", "steps, modules, sites:", "equal but for rounding")),
            Box("one", ("one process,", "the weight [32, 8]", "as it is"), points_back=True),
        )
    ),
    "variants": Drawing(
        (
            Box("one model", ("and five things", "made of it", "by torch")),
            Box("one batch", ("eager, compiled,", "exported, bfloat16,", "fp8, int8")),
            Box("six recordings", ("the outputs of all", "modules, under the", "same module paths")),
            Box("diff", ("eager against each:", "which layer, by", "how much")),
        )
    ),
    "dataset": Drawing(
        (
            Box("training", ("rank 0, rank 1, ...", "site=output", "keep=tensor,stats")),
            Box("Arrow files", ("one row a tensor:", "step, rank, module,", "statistics, payload")),
            Box("rows", ("DuckDB, pandas, polars", "read columns,", "and no payload")),
            Box("tensors", ("run.tensor: the whole", "batch of all ranks,", "for a DataLoader")),
        )
    ),
    "retention": Drawing(
        (
            Box("steps 0, 500, 1000, 1500", ("kept for good:", "RECORDER_KEEP_STEPS=::500")),
            Box("the steps between", ("deleted, file by file,", "and counted in the accounts")),
            Box("steps 1800 to 1999", ("the newest 200:", "RECORDER_KEEP_NEWEST=200")),
        ),
        has_arrows=False,
    ),
    "bucket": Drawing(
        (
            Box("each node", ("ranks record to", "the local disk,", "as without it")),
            Box("recorder daemon", ("one a node: sealed", "shards, then the index,", "then the manifest")),
            Box("bucket", ("s3://bucket/runs:", "runs, and an index", "of each node")),
            Box("your laptop", ("recorder first, verify,", "report; sql over", "all runs")),
        )
    ),
    "restart": Drawing(
        (
            Box("launch 1", ("a checkpoint after step 3;", "killed at the end", "of step 6")),
            Box("launch 2", ("from the checkpoint:", "steps 4 to 6", "once more")),
            Box("prove", ("both have made", "steps 4 to 6: state,", "batches, gradients")),
            Box("a certificate", ("unchanged, or", "what was lost, at which", "step, on which ranks")),
        )
    ),
    "shard": Drawing(
        (
            Box("ARROW1", ("magic",)),
            Box("schema", ("names and types", "of the columns")),
            Box("batch 0", ("its message, then", "the buffers of", "each column")),
            Box("batch 1, ...", ("one row a tensor;", "column payload:", "its bytes")),
            Box("footer", ("schema again, and", "where each batch", "begins")),
            Box("its length, ARROW1", ("a reader", "begins here")),
        ),
        has_arrows=False,
    ),
}
"""The drawings by the names of their files."""


def _width_px(text: str) -> float:
    """Return a bound on the width of a text."""
    return sum(_CAPITAL_PX if letter.isupper() else _LETTER_PX for letter in text)


def draw(drawing: Drawing) -> str:
    """Return a drawing as SVG. It has a ground of its own, so that it can be read on a dark page, too."""
    height_px = _PAD_PX * 2 + _LINE_PX * (1 + max(len(box.lines) for box in drawing.boxes))
    gap_px = _GAP_PX if drawing.has_arrows else 4
    parts, left_px = [], float(_MARGIN_PX)
    for number, box in enumerate(drawing.boxes):
        width_px = 2 * _PAD_PX + max(map(_width_px, (box.name, *box.lines)))
        if number and drawing.has_arrows:
            middle_px = _MARGIN_PX + height_px / 2
            ends_px = (left_px - gap_px + 6, left_px - 8)
            from_px, to_px = (ends_px[1] + 2, ends_px[0] + 2) if box.points_back else ends_px
            parts.append(
                f'<path d="M{from_px:.0f} {middle_px:.0f}H{to_px:.0f}" stroke="#1f77b4" '
                'stroke-width="2" fill="none" marker-end="url(#tip)"/>'
            )
        parts.append(
            f'<rect x="{left_px:.0f}" y="{_MARGIN_PX}" width="{width_px:.0f}" height="{height_px}" rx="5" '
            'fill="#f3f7fb" stroke="#1f77b4"/>'
        )
        for line, text in enumerate((box.name, *box.lines)):
            weight = ' font-weight="600"' if line == 0 else ""
            y_px = _MARGIN_PX + _PAD_PX + _LINE_PX * line + 13
            parts.append(f'<text x="{left_px + _PAD_PX:.0f}" y="{y_px}"{weight}>{escape(text)}</text>')
        left_px += width_px + gap_px
    width_px, whole_px = left_px - gap_px + _MARGIN_PX, height_px + 2 * _MARGIN_PX
    tip = (
        '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="6" refY="4" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#1f77b4"/></marker></defs>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width_px:.0f}" height="{whole_px}" '
        f'viewBox="0 0 {width_px:.0f} {whole_px}" {_FONT} fill="#1b1f24">'
        f'<rect width="100%" height="100%" fill="#ffffff"/>{tip}{"".join(parts)}</svg>\n'
    )
