"""A small engine with the names and shapes of vLLM: fused projections, flat tokens, a paged cache.

The tokens of all samples stand in one row, in chunks of prompts and in decoding steps. Whose they are stands in
`vllm.forward_context`, as in vLLM, and not in the arguments of the model.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

BLOCK = 4
_CONTEXT = "vllm.forward_context"


class Metadata(NamedTuple):
    """What vLLM's attention is given of a batch."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor


@contextmanager
def context(metadata: Metadata | None) -> Iterator[None]:
    """Set the context that vLLM sets around each call of its model."""
    module = types.ModuleType(_CONTEXT)
    layers = {} if metadata is None else {"model.layers.0.self_attn.attn": metadata}
    module._forward_context = types.SimpleNamespace(attn_metadata=layers)  # type: ignore[attr-defined]
    sys.modules[_CONTEXT] = module
    try:
        yield
    finally:
        del sys.modules[_CONTEXT]


class RMSNorm(nn.Module):
    """A norm that adds a residual first, and returns it, too."""

    def __init__(self, of: Any) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(of.weight.detach().clone()), of.variance_epsilon

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        summed = x if residual is None else x + residual
        normed = self.weight * summed * torch.rsqrt(summed.pow(2).mean(-1, keepdim=True) + self.eps)
        return normed if residual is None else (normed, summed)


class MergedLinear(nn.Module):
    """One projection out of several, which returns its bias, too."""

    def __init__(self, *of: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.cat([one.weight.detach() for one in of]).clone())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return nn.functional.linear(x, self.weight), None


class SiluAndMul(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return nn.functional.silu(gate) * up


class RotaryEmbedding(nn.Module):
    def __init__(self, of: Any) -> None:
        super().__init__()
        self.inv_freq: torch.Tensor
        self.register_buffer("inv_freq", of.inv_freq.clone())

    def forward(self, positions: torch.Tensor, *values: torch.Tensor) -> Any:
        angles = positions[:, None].float() * self.inv_freq
        cos, sin = (torch.cat([one, one], -1)[:, None] for one in (angles.cos(), angles.sin()))
        halves = [one.chunk(2, -1) for one in values]
        return tuple(one * cos + torch.cat([-b, a], -1) * sin for one, (a, b) in zip(values, halves, strict=True))


class Attention(nn.Module):
    """Writes keys and values to their places in the cache, and reads those of the sample."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        layers = sys.modules[_CONTEXT]._forward_context.attn_metadata
        if not layers:
            return query.flatten(1)
        metadata = next(iter(layers.values()))
        self.cache |= zip(metadata.slot_mapping.tolist(), zip(key, value, strict=True), strict=True)
        starts, outputs = metadata.query_start_loc.tolist(), []
        for number, length in enumerate(metadata.seq_lens.tolist()):
            table = metadata.block_table[number].tolist()
            kept = [self.cache[table[at // BLOCK] * BLOCK + at % BLOCK] for at in range(length)]
            repeat = self.num_heads // kept[0][0].shape[0]
            keys, values = (
                torch.stack(side).repeat_interleave(repeat, 1).transpose(0, 1) for side in zip(*kept, strict=True)
            )
            own = query[starts[number] : starts[number + 1]].transpose(0, 1)
            mask = torch.ones(own.shape[1], length, dtype=torch.bool).tril(length - own.shape[1])
            outputs.append(nn.functional.scaled_dot_product_attention(own, keys, values, mask).transpose(0, 1))
        return torch.cat(outputs).flatten(1)


class SelfAttention(nn.Module):
    def __init__(self, of: Any, rotary: Any, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.heads = num_heads, num_kv_heads
        self.qkv_proj = MergedLinear(of.q_proj, of.k_proj, of.v_proj)
        self.rotary_emb = RotaryEmbedding(rotary)
        self.attn = Attention(num_heads)
        self.o_proj = MergedLinear(of.o_proj)

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        num, num_kv = self.heads
        size = qkv.shape[-1] // (num + 2 * num_kv)
        parts = qkv.split([size * num, size * num_kv, size * num_kv], -1)
        query, key, value = (part.unflatten(-1, (-1, size)) for part in parts)
        query, key = self.rotary_emb(positions, query, key)
        output, _ = self.o_proj(self.attn(query, key, value))
        return output  # type: ignore[no-any-return]


class MLP(nn.Module):
    def __init__(self, of: Any) -> None:
        super().__init__()
        self.gate_up_proj = MergedLinear(of.gate_proj, of.up_proj)
        self.act_fn = SiluAndMul()
        self.down_proj = MergedLinear(of.down_proj)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = self.gate_up_proj(x)
        x, _ = self.down_proj(self.act_fn(x))
        return x


class DecoderLayer(nn.Module):
    def __init__(self, of: Any, rotary: Any, config: Any) -> None:
        super().__init__()
        self.self_attn = SelfAttention(of.self_attn, rotary, config.num_attention_heads, config.num_key_value_heads)
        self.mlp = MLP(of.mlp)
        self.input_layernorm = RMSNorm(of.input_layernorm)
        self.post_attention_layernorm = RMSNorm(of.post_attention_layernorm)

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None) -> Any:
        if residual is None:
            residual, hidden_states = hidden_states, self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions=positions, hidden_states=hidden_states)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


class LlamaModel(nn.Module):
    def __init__(self, of: Any, config: Any) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding.from_pretrained(of.embed_tokens.weight.detach().clone(), freeze=False)
        self.layers = nn.ModuleList([DecoderLayer(layer, of.rotary_emb, config) for layer in of.layers])
        self.norm = RMSNorm(of.norm)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, intermediate_tensors: Any, inputs_embeds: Any = None
    ) -> torch.Tensor:
        hidden_states, residual = self.embed_tokens(input_ids), None
        for layer in self.layers:
            hidden_states, residual = layer(positions, hidden_states, residual)
        return self.norm(hidden_states, residual)[0]  # type: ignore[no-any-return]


class LogitsProcessor(nn.Module):
    def forward(self, lm_head: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(hidden_states, lm_head.weight)  # type: ignore[arg-type]


class LlamaForCausalLM(nn.Module):
    """A Llama of Transformers with its weights, as an engine has it."""

    def __init__(self, of: Any) -> None:
        super().__init__()
        self.model = LlamaModel(of.model, of.config)
        self.lm_head = nn.Linear(1, 1, bias=False)
        self.lm_head.weight = nn.Parameter(of.lm_head.weight.detach().clone())
        self.logits_processor = LogitsProcessor()

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, intermediate_tensors: Any = None,
        inputs_embeds: Any = None,
    ) -> torch.Tensor:  # fmt: skip
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)  # type: ignore[no-any-return]

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.logits_processor(self.lm_head, hidden_states)  # type: ignore[no-any-return]


@dataclass(slots=True)
class _Request:
    tokens: list[int]
    num_wanted: int
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)


def serve(
    model: Any, texts: list[list[int]], *, num_new: int, max_tokens: int = 16, max_seqs: int = 4, num_drafts: int = 0
) -> list[list[int]]:
    """Write behind texts, some of them at a time, each call with at most so many tokens. Full blocks are shared."""
    waiting = [_Request(list(text), len(text) + num_new) for text in texts]
    requests, running, known = list(waiting), list[_Request](), dict[tuple[int, ...], int]()
    free, num_blocks = list[int](), 1
    with torch.inference_mode():
        with context(None):
            model(torch.zeros(max_tokens, dtype=torch.long), torch.zeros(max_tokens, dtype=torch.long))  # warms up
        while waiting or running:
            while waiting and len(running) < max_seqs:
                running.append(waiting.pop(0))
                one = running[-1]
                for end in range(BLOCK, len(one.tokens), BLOCK):
                    if (block := known.get(tuple(one.tokens[:end]))) is None:
                        break
                    one.blocks.append(block)
                    one.num_computed = end
            batch, left = list[tuple[_Request, list[int]]](), max_tokens
            for one in sorted(running, key=lambda one: len(one.tokens) - one.num_computed):
                own = [*one.tokens[one.num_computed :], *one.drafts][:left]
                left -= len(own)
                while len(one.blocks) * BLOCK < one.num_computed + len(own):
                    if not free:
                        free.append(num_blocks)
                        num_blocks += 1
                    one.blocks.append(free.pop())
                if own:
                    batch.append((one, own))
            ids = torch.tensor([token for _, own in batch for token in own])
            places = [one.num_computed + at for one, own in batch for at in range(len(own))]
            slots = [one.blocks[p // BLOCK] * BLOCK + p % BLOCK
                     for one, own in batch for p in range(one.num_computed, one.num_computed + len(own))]  # fmt: skip
            ends = torch.tensor([0, *(len(own) for _, own in batch)]).cumsum(0)
            lengths = torch.tensor([one.num_computed + len(own) for one, own in batch])
            widest = max(len(one.blocks) for one, _ in batch)
            table = torch.tensor([one.blocks + [0] * (widest - len(one.blocks)) for one, _ in batch])
            with context(Metadata(ends.int(), lengths.int(), table.int(), torch.tensor(slots))):
                hidden = model(input_ids=ids, positions=torch.tensor(places))
            logits = model.compute_logits(hidden if num_drafts else hidden[ends[1:] - 1])
            for number, (one, own) in enumerate(batch):
                one.num_computed += len(own)
                for end in range(BLOCK, min(one.num_computed, len(one.tokens)) + 1, BLOCK):
                    known.setdefault(tuple(one.tokens[:end]), one.blocks[end // BLOCK - 1])
                if one.num_computed < len(one.tokens):
                    continue
                rows = logits[ends[number] : ends[number + 1]] if num_drafts else logits[number : number + 1]
                chosen = rows.argmax(-1)[len(own) - 1 - len(one.drafts) if num_drafts else 0 :].tolist()
                kept = [chosen[0]]
                while len(kept) < len(chosen) and one.drafts[len(kept) - 1] == kept[-1]:
                    kept.append(chosen[len(kept)])
                one.num_computed = len(one.tokens) + len(kept) - 1
                one.tokens += kept
                one.drafts = [kept[-1], (7 * kept[-1] + 5) % 60][:num_drafts]
            for one in [one for one in running if len(one.tokens) >= one.num_wanted]:
                running.remove(one)
                free += [block for block in one.blocks if block not in known.values()]  # others take them at once
    return [one.tokens for one in requests]
