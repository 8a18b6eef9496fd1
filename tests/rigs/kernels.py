"""torchvision with or without its compiled operators, which its usual wheel can load only beside a torch for CUDA.

Where they do not load, non-maximum suppression and region pooling are done with plain torch operations, which is all
that a detector calls of them. The models themselves are torchvision's own, and never changed.
"""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path
from typing import Any

import torch

_LIBRARIES: list[torch.library.Library] = []


def _can_load() -> bool:
    spec = importlib.util.find_spec("torchvision")
    assert spec is not None and spec.origin is not None, "torchvision is in the extra `test`"
    (library,) = Path(spec.origin).parent.glob("_C*.so")  # _C_stable.so from torchvision 0.29 on
    try:
        ctypes.CDLL(str(library))
    except OSError:
        return False
    return True


def _suppress(boxes: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    """Indices of boxes by falling score, without those that overlap an earlier one."""
    order = scores.argsort(descending=True, stable=True)
    low, high = boxes[order, :2], boxes[order, 2:]
    overlap = (torch.minimum(high[:, None], high) - torch.maximum(low[:, None], low)).clamp(min=0).prod(2)
    area = (high - low).prod(1)
    too_close = (overlap / (area[:, None] + area - overlap) > iou_threshold).tolist()
    kept: list[int] = []
    for i in range(len(order)):
        if not any(too_close[j][i] for j in kept):
            kept.append(i)
    return order[kept]


def vision() -> Any:
    """The package, imported."""
    if not _LIBRARIES and not _can_load():
        library = torch.library.Library("torchvision", "FRAGMENT")
        _LIBRARIES.append(library)  # its operators go with it
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.impl("nms", _suppress, "CPU")
        boxes, roi_align = (importlib.import_module(f"torchvision.ops.{name}") for name in ("boxes", "roi_align"))
        boxes._assert_has_ops = lambda: None  # type: ignore[attr-defined]
        roi_align._roi_align = roi_align._roi_align.__wrapped__  # type: ignore[attr-defined]  # not compiled
    return importlib.import_module("torchvision")
