"""Says along which dim of a value the units of a module lie: neurons, channels or features.

Units are those of what the module gives: of a parameter the dim of the outputs, so that unit 7 of a weight, of its
gradient and of the output are one unit. Nothing here may look at values.
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from ..sites import STATES
from .selection import Selection

LAST = -1
_FIRST = 0
_SECOND = 1


def unit_dim_of(selection: Selection, rule_set: int, module: nn.Module | None, site: str, name: str) -> int:
    """Return the dim along which a value has units; a negative one counts from the last.

    Args:
        selection: of the recording.
        rule_set: the rules that select the value; what one of them says of the dim is what counts.
        module: that the value belongs to, where it is known.
        site: of the value.
        name: of the value.
    """
    if not selection.keeps_units(rule_set):
        return LAST
    chosen = selection.unit_dim(rule_set)
    if chosen is not None:
        return chosen
    return _of_state(module, name) if site in STATES else _of_values(module)


def _of_state(module: nn.Module | None, name: str) -> int:
    """Return the dim of the units of a parameter, its gradient, a buffer or the optimizer's state of it."""
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm)):
        return LAST
    if isinstance(module, _ConvTransposeNd) and name.partition(".")[0] == "weight":
        return _SECOND
    return _FIRST


def _of_values(module: nn.Module | None) -> int:
    """Return the dim of the units of an input, an output or a gradient of one of these."""
    if isinstance(module, _ConvNd):
        return -1 - len(module.kernel_size)  # counted from the last: a batch of one may come without its dim
    if isinstance(module, (_NormBase, nn.GroupNorm)):
        return _SECOND
    return LAST
