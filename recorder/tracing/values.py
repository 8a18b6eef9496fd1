"""The values of a trace: an ordered mapping from keys to tensors, with look-ups by short keys.

A `Values` contains copies of tensors, on request the tensors themselves, and the reasons why values are missing.
Nothing here may run a module, put a hook on anything, or issue a collective, not even to show a tensor.
"""

from __future__ import annotations

import dataclasses
import difflib
import html
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import TraceError, TraceKeyError
from ..sites import GRADIENTS, OF_CALLS, OF_MODULES
from ..system.processes import comes_from_signal_handler
from ..system.text import listed

_MAX_ROWS = 40
_MAX_NOTES = 5
_MAX_KEY_WIDTH = 72
_MAX_COMPARED = 2000
"""The most keys that are compared with a missing key to find the most similar ones."""


class Key(NamedTuple):
    """The place at which a tensor was recorded. A look-up may leave out everything but the module path."""

    module_path: str
    site: str = "output"
    """``input``, ``output``, ``grad_input``, ``grad_output``, ``param``, ``buffer`` or ``grad``."""
    name: str = ""
    """The argument, the path in a nested value, or the parameter. In a look-up, ``""`` also means the only value."""
    call: int = 0
    """The index of the module's call in the trace, from 0."""
    repeat: int = 0
    """The index of the tensor among tensors with an otherwise equal key, from 0. At a second backward it is 1."""

    @property
    def short(self) -> str:
        """The shortest text by which a look-up finds the value."""
        parts: list[object] = list(self)
        for default in (0, 0, "", "output"):
            if parts[-1] != default:
                break
            parts.pop()
        return repr(parts[0] if len(parts) == 1 else tuple(parts))


@dataclasses.dataclass(slots=True, kw_only=True)
class TracedModule:
    """The sites of one module (such as output) whose values a trace keeps, and counts of the module's calls."""

    path: str
    class_name: str
    sites: tuple[str, ...]
    why_no_hooks: str = ""
    """The reason why the module's hooks may not run at all."""
    num_calls: int = 0
    num_calls_elsewhere: int = 0
    """The number of calls in other threads than the trace's."""
    num_recomputed: int = 0
    """The number of calls that were recomputed in a backward."""


class Values(Mapping[Any, torch.Tensor]):
    """The tensors of a trace by `Key`, in the order in which they were computed. A key may be shortened.

    ``values["layers.0"]`` is the first call's result, ``values["layers.0", "input"]`` its only argument, and
    ``values["layers.0", "output", "hidden", 1]`` a part of the second call's result. Each value is a detached copy,
    made when the hook received the tensor. Iteration gives complete keys.
    """

    def __init__(self, *, seen: list[TracedModule], aliases: dict[str, str], keeps_graph: bool) -> None:
        self.skipped: dict[Key, str] = {}
        """The values that could not be kept, with the reasons."""
        self._tensors: dict[Key, torch.Tensor] = {}
        self._live: dict[Key, torch.Tensor] = {}
        self._edges: dict[Key, GradientEdge] = {}
        self._num_repeats: dict[Key, int] = {}
        self._seen = {module.path: module for module in seen}
        self._aliases = aliases
        self._keeps_graph = keeps_graph
        self.is_asking = False
        """True while `grad` runs the graph. Hooks then ignore the gradients, which are not the program's."""

    def put(self, key: Key, tensor: torch.Tensor) -> None:
        """Keep a copy of a tensor, or the reason why it cannot be copied. Called from any thread."""
        try:
            copied = _copy(tensor)
            edge = None
            if self._keeps_graph and tensor.requires_grad:
                with _disable_current_modes():
                    edge = get_gradient_edge(tensor)  # now, as in-place operations would change the edge
        except _NotKeptError as error:
            self.skip(key, str(error))
            return
        except Exception as error:  # the tensor is of a kind that cannot be copied, or memory is out
            if comes_from_signal_handler(error):
                raise
            self.skip(key, f"{type(error).__name__}: {error}")
            return
        repeat = self._num_repeats.get(key, 0)
        self._num_repeats[key] = repeat + 1
        key = key._replace(repeat=repeat)
        self._tensors[key] = copied
        if self._keeps_graph:
            self._live[key] = tensor
        if edge is not None:
            self._edges[key] = edge

    def skip(self, key: Key, reason: str) -> None:
        """Note the reason why a value is missing."""
        self.skipped[key] = reason

    @property
    def silent(self) -> dict[str, str]:
        """The selected modules for which no call was recorded, by path, with the reasons."""
        return {
            seen.path: self._why_silent(seen)
            for seen in self._seen.values()
            if not seen.num_calls and not set(OF_MODULES).issuperset(seen.sites)
        }

    def _why_silent(self, seen: TracedModule) -> str:
        if seen.why_no_hooks:
            return seen.why_no_hooks
        if seen.num_calls_elsewhere:
            return "called in another thread only; a trace sees the calls of the thread that entered it"
        if seen.num_recomputed:
            return "called only within a backward, as a recompute"
        parent = self._seen.get(seen.path.rpartition(".")[0])
        if parent is not None and parent is not seen and parent.num_calls:
            return (
                f"not called, though {parent.path!r} was ({parent.class_name}): it had nothing to do, or another way "
                "took its parameters, as fused kernels, a call of its forward and compiled functions do"
            )
        return "not called while the trace ran, or only inside a compiled function"

    def __getitem__(self, key: Any) -> torch.Tensor:
        return self._tensors[self.key(key)]

    def __iter__(self) -> Iterator[Key]:
        return iter(tuple(self._tensors))

    def __len__(self) -> int:
        return len(self._tensors)

    # Mapping's own methods compare tensors with ==, whose result has no truth value.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def key(self, key: Any) -> Key:
        """Return the complete key for a shortened key.

        Raises:
            TraceKeyError: there is no such value, or several. The message names the nearest keys and the reason.
        """
        parts = (key,) if isinstance(key, str) else key
        kinds = (str, str, str, int, int)
        if not isinstance(parts, tuple) or not 1 <= len(parts) <= 5 or not all(map(isinstance, parts, kinds)):
            raise TraceKeyError(
                f"{key!r} is no key of a trace; expected a module path, or a tuple of it with site, name, call and "
                "repeat, such as ('layers.0', 'output', 'hidden', 1)"
            )
        wanted = Key(*parts)
        wanted = wanted._replace(module_path=self._canonical(wanted.module_path))
        if wanted in self._tensors:
            return wanted
        if not wanted.name:
            leaves = [known for known in self._tensors if known._replace(name="") == wanted]
            if len(leaves) == 1:
                return leaves[0]
            if leaves:
                raise TraceKeyError(
                    f"{wanted.short} has several values, name one: {listed(key.short for key in leaves)}"
                )
        raise TraceKeyError(self._why_missing(wanted))

    def _canonical(self, path: str) -> str:
        for alias, canonical in self._aliases.items():
            if path == alias or path.startswith(alias + "."):
                return canonical + path[len(alias) :]
        return path

    def _why_missing(self, key: Key) -> str:
        reason = self.skipped.get(key)
        if reason is None:
            reason = next((why for other, why in self.skipped.items() if other[:2] == key[:2]), None)
        seen = self._seen.get(key.module_path)
        if reason is None and seen is not None:
            sites = {known.site for known in self._tensors if known.module_path == seen.path}
            if key.site not in seen.sites:
                reason = f"select='site={key.site}' would select it"
            elif not seen.num_calls and (why := self.silent.get(seen.path)):
                reason = f"{seen.path!r} is silent: {why}"
            elif key.site in OF_CALLS and key.site in GRADIENTS and key.site not in sites:
                reason = "no gradient has arrived there: there was no backward yet, or none passed through it"
            elif key.site == "grad" and key.site not in sites:
                reason = "a parameter's grad is read at the end of the block, and it was None"
        near = self._nearest(key)
        return (
            f"no value at {key.short}"
            + (f" ({reason})" if reason else "")
            + (f"; nearest: {listed(key.short for key in near)}" if near else "; the trace holds no values")
        )

    def _nearest(self, key: Key) -> list[Key]:
        some = {known.short: known for known in list(self._tensors)[:_MAX_COMPARED]}
        near = difflib.get_close_matches(key.short, some, n=3, cutoff=0.3) or list(some)[:3]
        return [some[text] for text in near]

    def live(self, key: Any) -> torch.Tensor:
        """Return the tensor itself with its graph, if the trace keeps graphs. Later in-place operations change it.

        Raises:
            TraceError: the trace keeps no graph.
            TraceKeyError: there is no such value.
        """
        whole_key = self.key(key)
        self._check_graph()
        return self._live[whole_key]

    def _check_graph(self) -> None:
        if not self._keeps_graph:
            raise TraceError("this trace holds detached copies only; use recorder.trace(model, ..., keep_graph=True)")

    def grad(self, y: Any, x: Any, v: torch.Tensor | None = None) -> torch.Tensor:
        """Return the vector-Jacobian product of two values: the gradient of ``x`` if the gradient of ``y`` is ``v``.

        Both are the tensors that passed the trace's hooks. The call may be repeated, and changes no ``.grad`` and
        nothing in the trace. Other hooks on the graph run, as in any `torch.autograd.grad`.

        Args:
            y: the key of the value that is differentiated.
            x: the key of the value that it is differentiated by.
            v: a tensor of the shape of ``y``; None stands for 1 if ``y`` has one element.

        Raises:
            TraceError: the trace keeps no graph, no graph leads from ``x`` to ``y``, or ``v`` does not fit ``y``.
            TraceKeyError: there is no such value.
        """
        self._check_graph()
        of, by = self.key(y), self.key(x)
        for key in (of, by):
            if key not in self._edges:
                raise TraceError(
                    f"{key.short} has no graph: it required no gradient when seen. Run the model with gradients "
                    "on, and call requires_grad_() on an input that you differentiate by"
                )
        value = self._tensors[of]
        if v is None:
            if value.numel() != 1:
                raise TraceError(
                    f"{of.short} has shape {tuple(value.shape)}: give v, a tensor of that shape to multiply the "
                    "Jacobian by; only where y has one element it may be left out"
                )
            v = torch.ones_like(value)
        elif not isinstance(v, torch.Tensor) or v.shape != value.shape:
            got = f"shape {tuple(v.shape)}" if isinstance(v, torch.Tensor) else type(v).__name__
            raise TraceError(f"v has to be a tensor of the shape of {of.short}, {tuple(value.shape)}; got {got}")
        self.is_asking = True
        try:
            (gradient,) = torch.autograd.grad(
                [self._edges[of]], [self._edges[by]], [v], retain_graph=True, allow_unused=True
            )
        except RuntimeError as error:
            if "backward through the graph a second time" not in str(error):
                raise
            raise TraceError(
                f"the graph between {by.short} and {of.short} was freed by a backward; ask before it, or call "
                "backward(retain_graph=True)"
            ) from error
        finally:
            self.is_asking = False
        if gradient is None:
            raise TraceError(f"{of.short} does not depend on {by.short}: the graph has no path between them")
        return gradient.detach()

    def __repr__(self) -> str:
        table = self._table()
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
        return "\n".join([self._summary, *lines, *self._notes()])

    def _repr_html_(self) -> str:
        head, *rows = self._table() or [()]
        cells = [f"<tr>{''.join(f'<th>{title}</th>' for title in head)}</tr>"]
        cells += [f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows]
        lines = "<br>".join(map(html.escape, [self._summary, *self._notes()]))
        return f"<p>{lines}</p><table><tbody>{''.join(cells if rows else [])}</tbody></table>"

    @property
    def _summary(self) -> str:
        return f"{len(self)} values, {sum(map(_num_bytes, self._tensors.values())):,} bytes"

    def _table(self) -> list[tuple[str, ...]]:
        """Return the titles, and a row for each value. If there are many values, the middle ones are left out."""
        keys = list(self._tensors)
        shown = keys if len(keys) <= _MAX_ROWS else keys[: _MAX_ROWS * 3 // 4] + keys[-_MAX_ROWS // 4 :]
        rows = [_row(key, self._tensors[key]) for key in shown]
        if len(keys) > len(shown):
            rows.insert(_MAX_ROWS * 3 // 4, (f"... {len(keys) - len(shown)} more", "", "", "", ""))
        return [("key", "dtype", "shape", "mean", "absmax"), *rows] if rows else []

    def _notes(self) -> list[str]:
        lines: list[str] = []
        skipped = {key.short: why for key, why in self.skipped.items()}
        for title, notes in (("silent", self.silent), ("skipped", skipped)):
            lines += [f"{title} {_cut(path or 'the root')}: {why}" for path, why in list(notes.items())[:_MAX_NOTES]]
            if len(notes) > _MAX_NOTES:
                lines.append(f"{title}: {len(notes) - _MAX_NOTES} more in values.{title}")
        return lines


class _NotKeptError(Exception):
    """Raised for a tensor that cannot be copied, with the reason."""


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the same class without a graph. No mode of the caller intercepts the copying."""
    functorch = torch._C._functorch
    if functorch.peek_interpreter_stack() is not None or functorch.is_legacy_batchedtensor(tensor):
        raise _NotKeptError("seen inside vmap, grad or another function transform, outside which it has no meaning")
    if is_lazy(tensor):
        raise _NotKeptError("not initialised yet")
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise _NotKeptError("the hook ran while a CUDA graph was captured")
    if _is_plain(tensor) and not tensor.is_meta and tensor.numel() and not tensor.untyped_storage().nbytes():
        raise _NotKeptError("its memory was freed, as FSDP does between uses")
    # The modes are disabled, too: selective checkpointing counts the operations of a forward, and would not find this
    # copy in the recompute.
    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        if tensor._is_zerotensor():  # autograd creates tensors without memory for gradients that are zero
            return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        return tensor.clone()


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_quantized
    )


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size() if tensor.layout is torch.strided else 0


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_KEY_WIDTH else text[: _MAX_KEY_WIDTH - 3] + "..."


def _row(key: Key, tensor: torch.Tensor) -> tuple[str, str, str, str, str]:
    mean = absmax = ""
    if _is_plain(tensor) and tensor.numel() and not tensor.is_meta:
        try:
            # float8 and other types have no arithmetic. Complex numbers are not converted: their mean is complex.
            wide = tensor if tensor.is_complex() else tensor.to(torch.float64 if tensor.is_cpu else torch.float32)
            mean, absmax = f"{wide.mean().item():.4g}", f"{wide.abs().max().item():.4g}"
        except RuntimeError:
            pass  # a dtype that cannot be converted is printed without statistics
    try:
        shape = "x".join(map(str, tensor.shape)) or "()"
    except RuntimeError:  # nested tensors have no such shape
        shape = "nested"
    return _cut(key.short), str(tensor.dtype).removeprefix("torch."), shape, mean, absmax
