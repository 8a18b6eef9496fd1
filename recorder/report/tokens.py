"""Makes the block for `recorder report --align`: a map of samples (down) and tokens (across), a layer per module."""

from __future__ import annotations

import numpy as np

from ..analyze.align.align import Aligned
from .blocks import PageBlock

_MAX_SAMPLES = 128
_MAX_CELLS = 1 << 22
"""The most cells (modules times samples times tokens). The samples with the smallest differences are left out."""
_LOWEST, _DECADES = -9.0, 11.0
"""The log scale (1e-9 to 100) of one-byte codes, which say how far apart a module's values are. 0 means no value."""


def tokens_block(found: Aligned) -> PageBlock:
    """Return the block that draws where a trainer and an engine differ. The samples that differ most come first."""
    search, joined = found.search, found.search.joined
    apart = joined.logprobs[0] - joined.logprobs[1]
    samples, positions = joined.samples, joined.positions
    outputs = [one for one in search.compared if one.name.site == "output"]
    worst = np.zeros(int(samples.max(initial=-1)) + 1)
    np.fmax.at(worst, samples, np.abs(apart))
    for one in outputs:
        np.maximum.at(worst, samples[one.slots], np.where(one.is_beyond, 1e-9, 0))
    length = int(positions[joined.is_joined].max(initial=0)) + 1
    most = min(_MAX_SAMPLES, max(1, _MAX_CELLS // (length * max(1, len(outputs)))))
    shown = np.argsort(-worst, kind="stable")
    shown = shown[np.isin(shown, samples[joined.is_joined])][:most]
    row_of = np.full(len(worst), -1)
    row_of[shown] = np.arange(len(shown))
    is_shown = joined.is_joined & (row_of[samples] >= 0)

    logprobs = np.full((len(shown), length), np.nan, np.float32)
    tokens = np.full((len(shown), length), -1, np.int32)
    at = row_of[samples[is_shown]], positions[is_shown]
    logprobs[at], tokens[at] = apart[is_shown], joined.tokens[is_shown]
    codes = np.zeros((len(outputs), len(shown), length), np.uint8)
    for number, one in enumerate(outputs):
        here = is_shown[one.slots]
        size = (np.log10(np.clip(one.apart[here], 10.0**_LOWEST, 100)) - _LOWEST) / _DECADES
        codes[number][row_of[samples[one.slots[here]]], positions[one.slots[here]]] = 1 + np.round(254 * size)
    known = {int(token): search.texts[token] for token in np.unique(tokens).tolist() if token in search.texts}
    values = [
        [value.module_path, value.name, value.bound] for value in search.values if value.site == "output"
    ]  # the layers are in the order of `outputs`
    return PageBlock(
        name="tokens",
        data={
            "verdict": found.told,
            "is_fine": found.is_fine,
            "samples": [joined.name_of(int(number)) for number in shown],
            "num_samples": found.num_samples,
            "length": length,
            "values": values,
            "lowest": _LOWEST,
            "decades": _DECADES,
            "texts": known,
        },
        arrays={"logprobs": logprobs, "tokens": tokens, "codes": codes},
    )
