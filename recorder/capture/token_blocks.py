"""Records what `recorder align` needs of each token, without the values, for rules with ``keep=tokens``.

Three things are kept of a model call that is given tokens: its whole-number arguments, the log-probabilities of its
tokens, and a sketch of every token (`numerics/units.py`) for each inner value that a rule selects. One row has the data
of a block of calls, so a decoding step of few tokens has no row of its own. The data stays where the model computes
until a block is full.

A token's log-probability is computed from the logits of the token before it. So the logits of a call's last tokens wait
for the next call, which is given the chosen tokens. Nothing here may wait for a device or hold a tensor of the program.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from ..numerics.units import signs, token_rows
from ..records import KEEP_TENSOR, Chunk, SeenValue, StepPosition, ValuePlace
from ..sites import TOKENS

_BLOCK_CALLS = 64
_BLOCK_BYTES = 1 << 20
_BLOCK_S = 30.0
"""The longest time of a block, in seconds. A process that is killed loses the tokens of at most this time."""
_PIECE = 1 << 23
"""The most logits that are widened to float32 at a time."""
_MAX_PAIRS = 1 << 12
_MAX_WHOLE = 64
"""An integer value, such as a router's chosen experts, is kept if the value has at most this many numbers per token."""
_MAX_NUMBER = (1 << 31) - 1
_IDS = ("input_ids", "tokens", "ids", "idx")
"""Names of the argument with the token ids, best first. Without a match, a root's first integer argument is used."""
_GIVEN = {
    "position_ids": "positions", "positions": "positions", "cache_position": "cache_position",
    "cu_seqlens": "lengths", "cu_seqlens_q": "lengths", "cu_seq_lens_q": "lengths",
    "logits_to_keep": "kept", "logits_indices": "kept", "write_index.0": "slots",
}  # fmt: skip
"""Maps arguments that tell a token's sample or position to the names of these arguments in the rows."""
_OF_ATTENTION = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")
"""Attributes of vLLM's attention metadata: start, length and cache blocks of samples, cache slots of tokens."""
_LOGITS = "logits_processor"
"""The path, in an inference engine, of the module that makes the logits."""
_NO_IDS = ("labels", "attention_mask", "mask", "cache_position", "position", "cu_seq", "past_key_value", "kv_cache")
"""Prefixes of the names of arguments that may be integers but are no token ids."""


class SaidTokens(threading.local):
    """What the program has told `recorder.tokens` about the next model call on this thread."""

    names: list[str] | None = None
    positions: torch.Tensor | None = None
    """The position of each token in its sample."""
    texts: list[list[str]] | None = None


SAID_TOKENS = SaidTokens()


class _CallBlock:
    """The data of several calls that becomes one row. Each origin (a module and a name) has one block."""

    def __init__(self, origin: ValuePlace, order: int) -> None:
        self.origin = origin
        self.order = order
        self.begin()

    def begin(self) -> None:
        self.moment: StepPosition | None = None
        self.began_s = time.monotonic()
        self.calls: list[Mapping[str, Any]] = []
        self.parts: list[torch.Tensor] = []
        self.num_bytes = 0


class _CallOfModel(threading.local):
    """The model call that this thread is executing."""

    number: int | None = None
    """The number of the call on this rank. None outside of calls that are given tokens."""
    module_path = ""
    ids: torch.Tensor | None = None
    """The call's tokens, as [samples, tokens]; a flat argument counts as one sample."""
    num_kept = 0
    has_late_logits = False
    """Whether another module makes the logits after the call, as in vLLM and SGLang."""
    seen: dict[ValuePlace, int]
    """For each origin (a module and a name), the index of its latest value in this call, counted from 0."""


class TokenBlocks:
    """Collects the token data of one rank. Called on the threads that run models."""

    def __init__(self, observe: Callable[..., None]) -> None:
        """Begin empty. `observe` records a tensor, as `Capture.observe` does."""
        self._observe = observe
        self._call = _CallOfModel()
        self._changing = threading.RLock()
        """A lock, held while a block grows or is recorded, because several threads may run models."""
        self._blocks: dict[ValuePlace, _CallBlock] = {}
        self._num_calls = 0
        self._pending: dict[str, tuple[int, torch.Tensor | None]] = {}
        """For each root: the number of its last call, and the logits of that call's last tokens, None until made."""
        self._block_tokens: torch.Tensor | None = None
        """The number of tokens in a block of vLLM's cache, as a tensor on the device."""
        self._signs: dict[tuple[int, torch.dtype, torch.device], torch.Tensor] = {}

    def call_begins(self, origin: ValuePlace, moment: StepPosition, leaves: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Record a module's arguments if they contain tokens. Do nothing inside a call that was given tokens."""
        call = self._call
        if origin.module_path == _LOGITS:
            return  # an inference engine also passes the tokens to an inner module
        around = f"{call.module_path}." if call.module_path else ""
        if call.number is not None and origin.module_path != call.module_path and origin.module_path.startswith(around):
            return
        call.number = None
        arguments = dict(leaves)
        tokens = _tokens_of(arguments, is_root=not origin.module_path)
        if tokens is None or tokens.dim() not in (1, 2) or not tokens.numel():
            return
        context = getattr(sys.modules.get("vllm.forward_context"), "_forward_context", None)
        if context is not None and not context.attn_metadata:
            return  # the warm-up of vLLM has no real tokens
        with self._changing:
            call.number, self._num_calls = self._num_calls, self._num_calls + 1
        call.module_path, call.seen = origin.module_path, {}
        call.ids = ids = tokens.detach().reshape(-1, tokens.shape[-1])
        parts = {"tokens": tokens, **dict(_given(arguments, ids.shape))}
        if context is not None:
            parts |= self._given_by_vllm(context.attn_metadata)
        of_sglang = dict(_given_by_sglang(arguments))
        parts |= of_sglang
        call.has_late_logits = context is not None or bool(of_sglang)
        call.num_kept = parts["kept"].numel() if "kept" in parts else 0
        facts = {"step": moment.step, "mode": moment.mode, "past": _past(arguments, ids.shape[1])}
        if SAID_TOKENS.positions is not None:
            parts["said"] = SAID_TOKENS.positions.to(tokens.device)
        if SAID_TOKENS.names is not None:
            facts["names"] = SAID_TOKENS.names
        if SAID_TOKENS.texts is not None:
            facts["texts"] = SAID_TOKENS.texts
        facts["shapes"] = {name: tuple(one.shape) for name, one in parts.items()}
        numbers = [one.detach().clamp(-1, _MAX_NUMBER).to(torch.int32).reshape(-1) for one in parts.values()]
        self._add(origin, "inputs", moment, facts, torch.cat(numbers))
        after, logits = self._pending.pop(origin.root, (0, None))
        if logits is not None:
            self._add_chosen(origin, moment, after, logits, ids, parts.get("lengths"))

    def _given_by_vllm(self, layers: Any) -> dict[str, torch.Tensor]:
        """Return tensors, by name, from vLLM's attention metadata, that tell which sample each token belongs to."""
        of = next(iter(layers.values())) if isinstance(layers, dict) else None
        if any(not isinstance(getattr(of, name, None), torch.Tensor) for name in _OF_ATTENTION):
            return {}
        starts, lengths, table, slots = (getattr(of, name) for name in _OF_ATTENTION)
        own = starts[1:] - starts[:-1]
        begun = slots[starts[:-1].long().clamp(max=len(slots) - 1)]
        # Computed from samples that begin in this call.
        size = torch.where(lengths == own, begun // table[:, 0].clamp(min=1), 0).max()
        self._block_tokens = size = size if self._block_tokens is None else torch.maximum(size, self._block_tokens)
        before = (lengths - own - 1).clamp(min=0)
        block = (before // size.clamp(min=1)).clamp(max=table.shape[1] - 1).long()
        behind = table.gather(1, block[:, None])[:, 0] * size + before % size.clamp(min=1)
        behind = torch.where(lengths > own, behind, -1)
        return {"lengths": starts, "slots": slots, "kept": starts[1:] - 1, "goes_on_behind": behind}

    def _add_chosen(
        self, origin: ValuePlace, moment: StepPosition, after: int, logits: torch.Tensor, ids: torch.Tensor,
        lengths: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """Add the log-probabilities of the tokens that this call is given, from the logits of the last call."""
        facts = {"after": after, "packed": lengths is not None and len(ids) == 1}
        if lengths is not None and len(ids) == 1:  # all pairs; a reader can tell which sample goes on
            first = ids[0, lengths.reshape(-1)[:-1].long().clamp(max=ids.shape[1] - 1)]
            if len(first) * len(logits) > _MAX_PAIRS:
                return
            told = torch.stack([_logprobs(logits, token.expand(len(logits))) for token in first])
        elif len(ids) == len(logits):  # without a cache, the program passes all tokens again, and the chosen token last
            told = torch.stack([_logprobs(logits, ids[:, column]) for column in (0, -1)])
        else:
            return
        self._add(origin, "chosen", moment, {**facts, "shape": tuple(told.shape)}, told)

    def call_ends(self, origin: ValuePlace, moment: StepPosition, leaves: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Add the log-probabilities of the tokens inside this call, if this module was given the tokens."""
        call, ids = self._call, self._call.ids
        if origin.module_path == _LOGITS and (waiting := self._pending.get(origin.root)) is not None:
            # Other values are the logits of a draft model.
            made = (value.detach().clone() for _, value in leaves if len(value) == call.num_kept)
            self._pending[origin.root] = waiting[0], next(made, None)
        if call.number is None or ids is None or call.module_path != origin.module_path:
            return
        if call.has_late_logits:
            self._pending[origin.root], call.number, call.ids = (call.number, None), None, None
            return
        values = {name: value for name, value in leaves if value.is_floating_point()}
        # TRL's heads return log-probabilities instead of logits, with 0 for tokens without a label.
        of_head = values.get("log_probs")
        if of_head is not None and of_head.shape == (len(ids), ids.shape[1] - 1):
            own = of_head.detach().float().masked_fill(of_head == 0, torch.nan)
            self._add(origin, "logprobs", moment, {"shape": tuple(own.shape)}, own)
        logits = values.get("logits", next(iter(values.values())) if len(values) == 1 else None)
        shape = () if logits is None else tuple(logits.shape)
        rows = token_rows(shape, (ids.shape[0], ids.shape[1]), call.num_kept)
        if logits is not None and type(logits) is torch.Tensor and rows and len(shape) == rows.num_dims + 1:
            is_kept = call.num_kept > 0 and shape[:2] == (1, call.num_kept)
            by_sample = logits.detach().reshape(1 if is_kept else len(ids), -1, shape[-1])
            if (num := by_sample.shape[1] - 1) and not is_kept:
                told = [_logprobs(rows[:-1], of[-num:]) for rows, of in zip(by_sample, ids, strict=True)]
                self._add(origin, "logprobs", moment, {"shape": (len(ids), num)}, torch.cat(told))
            self._pending[origin.root] = call.number, (by_sample[0] if is_kept else by_sample[:, -1]).clone()
        call.number = call.ids = None

    def saw(self, origin: ValuePlace, moment: StepPosition, value: torch.Tensor, *, is_sure: bool) -> None:
        """Add a sketch of each token of a module's value inside a call. Integer values are added as they are.

        `is_sure` is False for a plain tensor in a tensor parallel region, which may be a chunk of columns or of tokens.
        Readers see a chunk of columns by its shape.
        """
        call, ids = self._call, self._call.ids
        if call.number is None or ids is None or not value.numel():
            return
        shape = tuple(value.shape)
        rows = token_rows(shape, (ids.shape[0], ids.shape[1]), call.num_kept)
        if rows is None or value.is_complex() or value.dtype is torch.bool or (rows.kind == "last" and not is_sure):
            return
        flat = value.detach().reshape(rows.num(shape), -1)
        if value.is_floating_point():
            flat = self._sketched(flat)
        elif flat.shape[1] > _MAX_WHOLE:
            return
        else:
            flat = flat.clamp(-1, _MAX_NUMBER).to(torch.int32)
        occurrence = call.seen[origin] = call.seen.get(origin, -1) + 1
        name = f"{origin.site} {origin.name}".rstrip()
        self._add(origin, name, moment, {"shape": shape, "occurrence": occurrence}, flat)

    def _sketched(self, flat: torch.Tensor) -> torch.Tensor:
        if flat.itemsize < 2:  # torch multiplies no matrices of 8-bit floats
            flat = flat.float()
        key = (flat.shape[1], flat.dtype, flat.device)
        if (table := self._signs.get(key)) is None:
            table = self._signs[key] = torch.from_numpy(signs(flat.shape[1])).to(flat.device, flat.dtype)
        kind = flat.device.type
        if not torch.is_autocast_enabled(kind):
            return flat @ table
        with torch.autocast(kind, enabled=False):
            return flat @ table

    def _add(
        self, origin: ValuePlace, name: str, moment: StepPosition, facts: Mapping[str, Any], part: torch.Tensor
    ) -> None:
        number, part = self._call.number, part.reshape(-1)
        origin = ValuePlace(origin.root, origin.module_path, TOKENS, name)
        with self._changing:
            block = self._blocks.get(origin)
            if block is None:
                block = self._blocks[origin] = _CallBlock(origin, len(self._blocks))
            if block.parts and block.parts[0].dtype is not part.dtype:
                self._record(block)
            block.moment = block.moment or moment
            block.calls.append({"call": number, "num": part.numel(), **facts})
            block.parts.append(part)
            block.num_bytes += part.numel() * part.itemsize
            is_old = time.monotonic() - block.began_s > _BLOCK_S
            if len(block.parts) == _BLOCK_CALLS or block.num_bytes > _BLOCK_BYTES or is_old:
                self._record(block)

    def _record(self, block: _CallBlock) -> None:
        calls, parts, moment = block.calls, block.parts, block.moment
        block.begin()
        if moment is not None:
            note = json.dumps({"order": block.order, "calls": calls}, separators=(",", ":"))
            self._observe(SeenValue(block.origin, moment, "forward", note=note), KEEP_TENSOR, torch.cat(parts))

    def flush(self) -> None:
        with self._changing:
            for block in self._blocks.values():
                self._record(block)


def is_whole(chunk: Chunk) -> bool:
    """Whether a rank's chunk is the whole tensor."""
    return "Shard" not in chunk.placements and "Partial" not in chunk.placements


def _given_by_sglang(arguments: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors that tell which request of SGLang each token belongs to."""
    of = {name.removeprefix("forward_batch."): one for name, one in arguments.items()}
    slots, lengths, requests = (of.get(name) for name in ("out_cache_loc", "seq_lens", "req_pool_indices"))
    places = of.get("req_to_token_pool.req_to_token")
    if slots is None or lengths is None or requests is None or places is None:
        return
    # The attribute is absent if every request decodes.
    own = of.get("extend_seq_lens", torch.ones_like(lengths)).to(lengths.dtype)
    ends = own.cumsum(0)
    yield from (("slots", slots), ("lengths", torch.cat([ends.new_zeros(1), ends])), ("kept", ends - 1))
    behind = places[requests.long(), (lengths - own - 1).clamp(min=0).long()]
    yield "goes_on_behind", torch.where(lengths > own, behind, -1)


def _tokens_of(arguments: Mapping[str, torch.Tensor], *, is_root: bool) -> torch.Tensor | None:
    """Return the argument with the token ids, or None. If the program said only a root's positions, ids are -1."""
    named = next((arguments[name] for name in _IDS if name in arguments and _is_whole(arguments[name])), None)
    if named is not None or not is_root:
        return named
    said = SAID_TOKENS.positions
    unknown = None if said is None else torch.full_like(said, -1)
    return next((one for name, one in arguments.items() if _is_whole(one) and not name.startswith(_NO_IDS)), unknown)


def _is_whole(value: torch.Tensor) -> bool:
    return value.dtype in (torch.int64, torch.int32, torch.int16, torch.uint8)


def _past(arguments: Mapping[str, torch.Tensor], length: int) -> int | None:
    """Return the number of tokens, with padding, in a call's cache. Return None if no shape tells the number."""
    mask = arguments.get("attention_mask")
    if mask is not None:
        return max(0, mask.shape[1] - length) if mask.dim() == 2 else None
    caches = (one for name, one in arguments.items() if name.startswith(("past_key_value", "kv_cache", "cache.")))
    return next((one.shape[-2] for one in caches if one.dim() > 2), None)


def _given(arguments: Mapping[str, torch.Tensor], grid: tuple[int, ...]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors that tell which sample a token belongs to: positions, lengths, masks, cache places."""
    yield from ((_GIVEN[name], one) for name, one in arguments.items() if name in _GIVEN and _is_whole(one))
    packed, mask = arguments.get("cu_seq_lens_q"), arguments.get("attention_mask")
    if packed is None and mask is not None:
        if mask.dim() == 2 and mask.shape[0] == grid[0] and mask.shape[1] >= grid[1]:
            yield "mask", mask[:, -grid[1] :] != 0
        elif mask.dim() == 4 and mask.shape[2] == grid[1]:
            visible = mask if mask.dtype is torch.bool else mask == 0  # a float mask is added to the scores
            yield "seen", visible.any(2).any(1)
    read, whole = arguments.get("read_index.0"), arguments.get("cu_seq_lens_k.full_attention")
    if packed is not None and whole is not None and read is not None and read.numel():
        own = packed[1:] - packed[:-1]
        before = (whole[1:] - own - 1).clamp(min=0).long()
        yield "goes_on_behind", torch.where(whole[1:] - whole[:-1] > own, read[before].to(own.dtype), -1)


def _logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each token from the logits in its row, in float32. Works on some rows at a time."""
    num = max(1, _PIECE // logits.shape[1])
    told = []
    for first in range(0, len(logits), num):
        wide = logits[first : first + num].float()
        chosen = tokens[first : first + num].long().clamp(0, logits.shape[1] - 1)
        told.append(wide.gather(1, chosen[:, None])[:, 0] - wide.logsumexp(1))
    return torch.cat(told)
