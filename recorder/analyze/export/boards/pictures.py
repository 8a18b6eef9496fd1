"""What of a tensor of four dims is a picture: the filters of a convolution, and the channels of its values."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_MAX_TILES = 16
_LEAST_SIDE, _MAX_SIDE = 3, 512
_GAP = 1


def is_picture(site: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor may be drawn."""
    if len(shape) != 4 or not all(shape):
        return False
    return site in ("input", "output", "param") and all(_LEAST_SIDE <= side <= _MAX_SIDE for side in shape[2:])


def picture_of(site: str, array: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8] | None:
    """A tensor as a picture of shape (height, width, 3): tiles side by side, from black, the least, to white.

    Args:
        site: where it was seen: of a parameter the filters are drawn, of other values the channels of the first sample.
        array: of four dims.
    """
    if array.shape[1] == 3:
        tiles = array[: _MAX_TILES if site == "param" else 1].transpose(0, 2, 3, 1)
    else:
        gray = array[:_MAX_TILES, 0] if site == "param" else array[0, :_MAX_TILES]
        tiles = np.repeat(gray[..., None], 3, axis=3)
    finite = tiles[np.isfinite(tiles)]
    if not finite.size:
        return None
    low, high = float(finite.min()), float(finite.max())
    scaled = (np.nan_to_num(tiles.astype(np.float64), nan=low, posinf=high, neginf=low) - low) / max(high - low, 1e-300)
    pixels = np.rint(scaled.clip(0, 1) * 255).astype(np.uint8)
    num, height, width, _ = pixels.shape
    across = int(np.ceil(np.sqrt(num)))
    down = -(-num // across)
    sheet = np.full((down * (height + _GAP) - _GAP, across * (width + _GAP) - _GAP, 3), 128, np.uint8)
    for index, tile in enumerate(pixels):
        y, x = index // across * (height + _GAP), index % across * (width + _GAP)
        sheet[y : y + height, x : x + width] = tile
    return sheet
