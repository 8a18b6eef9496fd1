"""Reads the first nodes of a loss's autograd graph: its labels, and arguments that its function does not expect.

Nothing here computes a value on a device, or holds a graph. Called on training threads as a backward begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

_MAX_NODES = 16
"""How many nodes of a loss's graph are searched."""
_LEAST_SIDE = 4
"""The least side of a matrix of differences: smaller ones are square by chance."""
_OF_LOGITS = ("Softmax", "Sigmoid", "Relu")
_WRONG_BELOW = {
    "LogSoftmax": _OF_LOGITS, "BinaryCrossEntropyWithLogits": _OF_LOGITS,
    "NllLoss": (*_OF_LOGITS, "Addmm", "Convolution"), "NllLoss2D": (*_OF_LOGITS, "Convolution"),
    "CtcLoss": (*_OF_LOGITS, "Addmm", "Mm", "Convolution"),
}  # fmt: skip
"""By the kind of a node of autograd, the kinds of nodes that make an argument which the function does not expect."""
_SHAPES_ALONE = (
    "View", "UnsafeView", "Reshape", "Transpose", "T", "Permute", "Select", "Slice", "Squeeze", "Unsqueeze", "Alias",
    "Clone", "ToCopy", "Index", "IndexSelect",
)  # fmt: skip
"""The kinds of nodes that change only how elements lie, or choose some."""
_OUTPUTS = ("Addmm", "Slice", "Sigmoid", "Tanh", "Relu", "Softplus")
"""The kinds of nodes that make the outputs of a model."""
_OF_DIFFERENCES = ("MseLoss", "SmoothL1Loss", "HuberLoss")
_BOUNDED = ("Sigmoid", "Softmax", "Tanh", "Relu")
"""The kinds of nodes whose results have bounds that labels may lie beyond."""
_NEVER_NEGATIVE = (*_OF_DIFFERENCES, "NllLoss", "NllLoss2D", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits")
_NO_REDUCTION, _MEAN = 0, 1
"""Autograd's numbers of a loss of each element, and of a loss that is a mean."""
_REDUCTIONS = {_NO_REDUCTION: " by element", 2: " summed"}
"""What is said of a loss that is no mean, by autograd's number."""
_MAX_MADE_BY = 64
"""How many nodes are searched for the parameters that have made an argument."""


def children_of(node: Any) -> list[Any]:
    """Return the nodes that made the arguments of a node's function, as far as they have a graph."""
    return [child for child, _ in node.next_functions[:_MAX_NODES] if child is not None]


def _first_nodes(loss: Any, is_passed: Callable[[Any], bool] = lambda node: True) -> Iterator[Any]:
    """Yield the first nodes of a loss, the nearest first. Below a node that is not passed, none is yielded."""
    nodes = [loss]
    for node in nodes:
        yield node
        if is_passed(node):
            nodes += children_of(node)[: _MAX_NODES - len(nodes)]


def labels_below(loss: Any, *, is_first_enough: bool) -> tuple[torch.Tensor | None, str, bool]:
    """Return the labels that one of the first nodes of a loss has saved for the backward, or None.

    Unless the first labels are enough, also return the name of this function, as ``MseLoss summed`` if it takes no
    mean, and whether another node has saved other labels. Only whole numbers count, which may be classes.
    """
    first, function = None, ""
    for node in _first_nodes(loss):
        if (labels := _saved(node, "target")) is None:
            pass
        elif first is None:
            if _compares_samples(node):
                return None, "", False
            first = labels
            if is_first_enough:
                break
            function = _function(node)
        elif not (labels.is_floating_point() or first.is_floating_point()) and labels.data_ptr() != first.data_ptr():
            return first, function, True
    return first, function, False


def _function(node: Any) -> str:
    """Return the name of the function of a loss, with its number of classes, and with how it adds up, if by no mean.

    A loss of differences from what a function returns that has bounds is ``MseLoss of Sigmoid``, for example. A weight
    of each element, which may be 0, counts as a loss by element.
    """
    kind, reduction = kind_of(node), getattr(node, "_saved_reduction", _MEAN)
    if kind.startswith("BinaryCrossEntropy") and _saved(node, "weight") is not None:
        reduction = _NO_REDUCTION
    scores = _saved(node, "self") if kind == "NllLoss" else None
    of = "" if scores is None else f" of {scores.shape[-1]} classes"
    if kind in _OF_DIFFERENCES and (made := _behind_shapes(node)) is not None and kind_of(made) in _BOUNDED:
        of = f" of {kind_of(made)}"
    return f"{kind}{of}{_REDUCTIONS.get(reduction, '')}"


def wrong_argument(loss: Any) -> tuple[str, Any] | None:
    """Return the first function of a loss that gets what it does not expect, and its node: ``LogSoftmax of Softmax``.

    If the whole loss is the negative of a loss that is never negative, it is ``Neg of NllLoss``, for example.

    A loss of differences whose two arguments are both expanded, one of them along the batch, compares each output with
    all labels. So does one of outputs [n, 1] and of labels that were made [n, n], and the difference of outputs [n, 1]
    and of labels [n] or [n, n].
    """
    if (negated := _negated(loss)) is not None:
        return f"Neg of {kind_of(negated)}", negated
    if (made := _in_divergence(loss)) is not None:
        return made
    if (difference := _column_of_square(loss)) is not None:
        return "Sub of Expand", difference
    for node in _first_nodes(loss):
        kind, below = kind_of(node), _first_below(node)
        if kind == "NllLoss" and below is not None and _is_over_batch(below):
            return "NllLoss of Batch", node
        below = _behind_shapes(node)
        if below is not None and kind_of(below) in _WRONG_BELOW.get(kind, ()):
            return f"{kind} of {kind_of(below)}", node
        if kind == "CtcLoss" and below is not None and _is_over_time(below, node):
            return "CtcLoss of Time", node
        if kind in _OF_DIFFERENCES:
            sizes = [_expanded_dims(node, name) for name in ("self", "target")]
            is_crossed = sizes[0] and sizes[1] and not sizes[0] & sizes[1] and 0 in sizes[0] | sizes[1]
            is_alone = node.next_functions[1:] == ((None, 0),) and below is not None and kind_of(below) == "Expand"
            if is_crossed or (is_alone and sizes == [{1}, set()] and _is_square(_shape_of(below))):
                return f"{kind} of Expand", node
    return None


def _shape_of(node: Any) -> tuple[int, ...]:
    """Return the shape of the first result of a node. Empty if autograd does not tell it."""
    known = getattr(node, "_input_metadata", ())
    return tuple(known[0].shape) if known else ()


def _is_square(shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and shape[0] == shape[1] >= _LEAST_SIDE


def _column_of_square(loss: Any) -> Any:
    """Return the node of a difference [n, n] of a layer's outputs [n, 1] and a constant, of which a loss is the mean.

    Return None without one. Other functions of such a difference, such as its least element, compare all with all on
    purpose.
    """
    for node in _first_nodes(loss, _is_of_powers):
        children, shape = children_of(node), _shape_of(node)
        is_of_one = kind_of(node) == "Sub" and len(children) == 1 and len(node.next_functions) == 2
        is_of_output = is_of_one and kind_of(children[0]) in _OUTPUTS
        if is_of_output and _is_square(shape) and _shape_of(children[0]) == (shape[0], 1):
            return node
    return None


def _is_of_powers(node: Any) -> bool:
    """Return whether a node adds up magnitudes or powers, or makes them."""
    is_square = kind_of(node) == "Mul" and len(set(children_of(node))) == 1
    return is_square or kind_of(node) in ("Mean", "Sum", "Pow", "Abs", "Div", "Add", "Sqrt")


def _is_of_terms(node: Any) -> bool:
    """Return whether a node adds up terms, or multiplies one by a constant. The square of a difference is no term."""
    is_scaled = kind_of(node) == "Mul" and len(children_of(node)) == 1
    return is_scaled or kind_of(node) in ("Mean", "Sum", "Div", "Add", "Neg")


def _is_over_batch(node: Any) -> bool:
    """Return whether a node is a log_softmax of [N, C] over N. A square of similarities, [N, N], has no classes."""
    kind, below = "LogSoftmax", _first_below(node)
    if kind_of(node) == "Log" and below is not None:
        kind, node = "Softmax", below
    made = _saved(node, "result") if kind_of(node) == kind else None
    is_of_classes = made is not None and made.dim() == 2 and made.shape[0] != made.shape[1] > 1
    return is_of_classes and _dim_of(node) in (0, -2)


def _is_of_layer(node: Any) -> bool:
    """Return whether a node gets what a linear layer with a bias returned, and no similarities of samples."""
    below = _first_below(node)
    return below is not None and kind_of(below) == "Addmm" and hasattr(_first_below(below), "variable")


def _is_beside_classes(node: Any) -> bool:
    """Return whether a node is a log_softmax of what a linear layer returned, and not over the last dim, its units."""
    made, below = (_saved(node, "result") if kind_of(node) == "LogSoftmax" else None), _first_below(node)
    while below is not None and kind_of(below) in ("Div", "Mul"):  # a temperature
        below = _first_below(below)
    if made is None or made.dim() < 3 or below is None or kind_of(below) not in ("View", "UnsafeView"):
        return False
    linear = _first_below(below)
    is_linear = linear is not None and kind_of(linear) in ("Addmm", "Mm") and _shape_of(linear)[1:] == made.shape[-1:]
    return is_linear and made.shape[_dim_of(node)] < made.shape[-1]  # scores of few places are compared over the places


def _is_over_time(node: Any, loss: Any) -> bool:
    """Return whether a node is a log_softmax over T or N elements, if a CTC loss gets [T, N, C] and C is another."""
    made, given = (_saved(node, "result") if kind_of(node) == "LogSoftmax" else None), _saved(loss, "log_probs")
    if made is None or given is None:
        return False
    num = made.shape[_dim_of(node)]
    return num in given.shape[:-1] and num != given.shape[-1]


def _in_divergence(loss: Any) -> tuple[str, Any] | None:
    """Return what a `kl_div` or a cross-entropy of soft labels gets by mistake, and its node: ``KlDiv of Softmax``.

    `kl_div` computes ``xlogy(target, target) - target * input``, in which only the input has a graph, and programs
    compute ``target * input`` of soft labels themselves.
    """
    for node in _first_nodes(loss, _is_of_terms):
        kind, children, function = kind_of(node), children_of(node), "SoftLabels"
        if kind == "Sub" and _first_below(node) is None and children and kind_of(children[0]) == "Mul":
            kind, children, function = "Mul", children_of(children[0]), "KlDiv"
        if kind != "Mul" or len(children) != 1:
            continue
        made = children[0]
        if function == "KlDiv" and kind_of(made) in ("Softmax", "Sigmoid"):
            return f"KlDiv of {kind_of(made)}", made
        if _is_over_batch(made) and (function == "KlDiv" or _is_of_layer(made)):
            return f"{function} of Batch", made
        if _is_beside_classes(made):
            return f"{function} of Time", made
    return None


def _dim_of(node: Any) -> int:
    """Return the dim that a node has saved, which autograd gives as an unsigned number of 64 bits."""
    return int((node._saved_dim + 2**63) % 2**64 - 2**63)


def _negated(loss: Any) -> Any:
    """Return the node of a loss that is never negative, if the whole loss is its negative times a number; else None."""
    is_below_zero, node = False, loss
    for _ in range(_MAX_NODES):
        kind, children = kind_of(node), children_of(node)
        if kind in _NEVER_NEGATIVE:
            return node if is_below_zero else None
        if len(children) != 1 or kind not in ("Neg", "Mul", "Div", "Mean", "Sum", *_SHAPES_ALONE):
            return None
        is_below_zero ^= kind == "Neg" or (kind in ("Mul", "Div") and is_negative(node))
        node = children[0]
    return None


def is_negative(node: Any) -> bool:
    """Return whether the factor of a product is a number below zero, or all of its elements are."""
    factor = _saved(node, "other")
    # A number is saved as a tensor in host memory. A tensor of a device, as of a GradScaler, is not waited for.
    return factor is not None and factor.is_cpu and bool((factor < 0).all())


def _expanded_dims(node: Any, name: str) -> set[int]:
    """Return the dims along which an argument that a node has saved repeats its elements. Empty if it is not known."""
    tensor = _saved(node, name)
    is_known = tensor is not None and tensor.layout is torch.strided
    strides = zip(tensor.shape, tensor.stride(), strict=True) if is_known else ()
    return {dim for dim, (size, stride) in enumerate(strides) if size > 1 and not stride}


def _saved(node: Any, name: str) -> Any:
    """Return a tensor that a node has saved, or None. A hook on saved tensors may compute it anew, or wait."""
    saved = getattr(node, f"_raw_saved_{name}", None)
    if not isinstance(saved, torch._C._autograd.SavedTensor) or getattr(saved, "unpack_hook", saved) is not None:
        return None
    return getattr(node, f"_saved_{name}")


def parameters_below(node: Any) -> set[int]:
    """Return the ids of the parameters that the first nodes below a node lead to."""
    nodes, found = [node], set[int]()
    for one in nodes:
        if hasattr(one, "variable"):
            found.add(id(one.variable))
        nodes += [child for child in children_of(one) if child not in nodes][: _MAX_MADE_BY - len(nodes)]
    return found


def _first_below(node: Any) -> Any:
    """Return the node of a function's first argument. None if the argument needs no gradient, or there is none."""
    return node.next_functions[0][0] if node.next_functions else None


def _behind_shapes(node: Any) -> Any:
    """Return the node that computed the elements of a function's first argument. None if no gradient goes there."""
    below = _first_below(node)
    while below is not None and kind_of(below) in _SHAPES_ALONE:
        below = _first_below(below)
    return below


def kind_of(node: Any) -> str:
    """Return the name of a node's function, such as ``LogSoftmax``."""
    return str(node.name()).partition("Backward")[0]


def _compares_samples(node: Any) -> bool:
    """Whether the logits of a loss are joined of parts. Then they compare samples, and labels are no classes."""
    for _ in range(_MAX_NODES):
        if len(children := children_of(node)) != 1:
            break
        node = children[0]
    return bool(node.name() == "CatBackward0")
