"""A small engine with the modules, arguments and batches of SGLang, whose cache has a place for each token.

As in SGLang, the program calls `model.forward`, which hooks of the model do not see; prompts and decoding steps are
batches of their own; and a text whose beginning the cache has is given the places of the text before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, auto
from typing import Any

import torch
from torch import nn

from tests.rigs.engines import MLP, MergedLinear, RMSNorm, RotaryEmbedding


class ForwardMode(IntEnum):
    EXTEND = auto()
    DECODE = auto()


class ReqToTokenPool:
    """The place in the cache of each token of each request."""

    def __init__(self, num_requests: int, max_context_len: int) -> None:
        self.req_to_token = torch.zeros(num_requests, max_context_len, dtype=torch.int32)


class TokenToKVPool:
    """The keys and values by place."""

    def __init__(self, num_layers: int, num_places: int, num_heads: int, size: int) -> None:
        self.k_buffer = [torch.zeros(num_places, num_heads, size) for _ in range(num_layers)]
        self.v_buffer = [torch.zeros(num_places, num_heads, size) for _ in range(num_layers)]


@dataclass
class ForwardBatch:
    """What the modules are told of a batch."""

    forward_mode: ForwardMode
    batch_size: int
    input_ids: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    out_cache_loc: torch.Tensor
    seq_lens_sum: int
    positions: torch.Tensor
    extend_num_tokens: int | None = None
    extend_seq_lens: torch.Tensor | None = None
    extend_prefix_lens: torch.Tensor | None = None
    extend_start_loc: torch.Tensor | None = None
    req_to_token_pool: ReqToTokenPool | None = None
    token_to_kv_pool: TokenToKVPool | None = None


@dataclass
class LogitsProcessorOutput:
    next_token_logits: torch.Tensor
    hidden_states: torch.Tensor | None = None


class RadixAttention(nn.Module):
    """Writes keys and values to `out_cache_loc`, and reads those of each request."""

    def __init__(self, num_heads: int, layer_id: int) -> None:
        super().__init__()
        self.num_heads, self.layer_id = num_heads, layer_id

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, forward_batch: ForwardBatch) -> torch.Tensor:
        places, pool = forward_batch.req_to_token_pool, forward_batch.token_to_kv_pool
        assert places is not None and pool is not None
        keys, values = pool.k_buffer[self.layer_id], pool.v_buffer[self.layer_id]
        keys[forward_batch.out_cache_loc], values[forward_batch.out_cache_loc] = k, v
        repeat, first, outputs = self.num_heads // k.shape[1], 0, []
        own = torch.ones_like(forward_batch.seq_lens)
        own = own if forward_batch.extend_seq_lens is None else forward_batch.extend_seq_lens
        of_requests = zip(
            forward_batch.req_pool_indices.tolist(), forward_batch.seq_lens.tolist(), own.tolist(), strict=True
        )
        for request, length, num in of_requests:
            at = places.req_to_token[request, :length].long()
            read_k, read_v = (one[at].repeat_interleave(repeat, 1).transpose(0, 1) for one in (keys, values))
            mask = torch.ones(num, length, dtype=torch.bool).tril(length - num)
            asked = q[first : first + num].transpose(0, 1)
            outputs.append(nn.functional.scaled_dot_product_attention(asked, read_k, read_v, mask).transpose(0, 1))
            first += num
        return torch.cat(outputs).flatten(1)


class LlamaAttention(nn.Module):
    def __init__(self, of: Any, rotary: Any, config: Any, layer_id: int) -> None:
        super().__init__()
        self.heads = config.num_attention_heads, config.num_key_value_heads
        self.qkv_proj = MergedLinear(of.q_proj, of.k_proj, of.v_proj)
        self.o_proj = MergedLinear(of.o_proj)
        self.rotary_emb = RotaryEmbedding(rotary)
        self.attn = RadixAttention(config.num_attention_heads, layer_id)

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        num, num_kv = self.heads
        size = qkv.shape[-1] // (num + 2 * num_kv)
        q, k, v = (
            part.unflatten(-1, (-1, size)) for part in qkv.split([size * num, size * num_kv, size * num_kv], dim=-1)
        )
        q, k = self.rotary_emb(positions, q, k)
        output, _ = self.o_proj(self.attn(q, k, v, forward_batch))
        return output  # type: ignore[no-any-return]


class LlamaDecoderLayer(nn.Module):
    def __init__(self, of: Any, rotary: Any, config: Any, layer_id: int) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(of.self_attn, rotary, config, layer_id)
        self.mlp = MLP(of.mlp)
        self.input_layernorm = RMSNorm(of.input_layernorm)
        self.post_attention_layernorm = RMSNorm(of.post_attention_layernorm)

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, forward_batch: ForwardBatch,
        residual: torch.Tensor | None,
    ) -> Any:  # fmt: skip
        if residual is None:
            residual, hidden_states = hidden_states, self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions=positions, hidden_states=hidden_states, forward_batch=forward_batch)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


class LlamaModel(nn.Module):
    def __init__(self, of: Any, config: Any) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding.from_pretrained(of.embed_tokens.weight.detach().clone(), freeze=False)
        self.layers = nn.ModuleList(
            [LlamaDecoderLayer(layer, of.rotary_emb, config, number) for number, layer in enumerate(of.layers)]
        )
        self.norm = RMSNorm(of.norm)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch,
        input_embeds: torch.Tensor | None = None, pp_proxy_tensors: Any = None,
    ) -> torch.Tensor:  # fmt: skip
        hidden_states, residual = self.embed_tokens(input_ids), None
        for layer in self.layers:
            hidden_states, residual = layer(positions, hidden_states, forward_batch, residual)
        hidden_states, _ = self.norm(hidden_states, residual)
        return hidden_states  # type: ignore[no-any-return]


class LogitsProcessor(nn.Module):
    """Makes the logits of the last token of each request."""

    def forward(
        self, input_ids: torch.Tensor, hidden_states: torch.Tensor, lm_head: nn.Module, logits_metadata: ForwardBatch
    ) -> LogitsProcessorOutput:
        if logits_metadata.extend_seq_lens is not None:
            hidden_states = hidden_states[logits_metadata.extend_seq_lens.cumsum(0) - 1]
        return LogitsProcessorOutput(nn.functional.linear(hidden_states, lm_head.weight))  # type: ignore[arg-type]


class LlamaForCausalLM(nn.Module):
    """A Llama of Transformers with its weights, as SGLang has it."""

    def __init__(self, of: Any) -> None:
        super().__init__()
        self.config = of.config
        self.model = LlamaModel(of.model, of.config)
        self.lm_head = nn.Linear(1, 1, bias=False)
        self.lm_head.weight = nn.Parameter(of.lm_head.weight.detach().clone())
        self.logits_processor = LogitsProcessor()

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch,
        input_embeds: torch.Tensor | None = None, get_embedding: bool = False,
    ) -> LogitsProcessorOutput:  # fmt: skip
        hidden_states = self.model(input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors=None)
        return self.logits_processor(input_ids, hidden_states, self.lm_head, forward_batch)  # type: ignore[no-any-return]


@dataclass(slots=True)
class _Request:
    tokens: list[int]
    num_wanted: int
    row: int
    places: list[int] = field(default_factory=list)


class Server:
    """The scheduler: batches of prompts, batches of decoding steps, and a cache of prefixes."""

    def __init__(self, model: Any, *, num_requests: int = 32, num_places: int = 512) -> None:
        config = model.config
        self.model = model
        self.places = ReqToTokenPool(num_requests, config.max_position_embeddings)
        size = config.hidden_size // config.num_attention_heads
        self.pool = TokenToKVPool(config.num_hidden_layers, num_places, config.num_key_value_heads, size)
        self.free = list(range(num_places - 1, 0, -1))
        self.known: dict[tuple[int, ...], int] = {}

    def serve(self, texts: list[list[int]], *, num_new: int, max_seqs: int = 4) -> list[list[int]]:
        """Write behind texts, some of them at a time; what a text has written is free at its end, and used again."""
        requests = [_Request(list(text), len(text) + num_new, row) for row, text in enumerate(texts)]
        waiting, running = list(requests), list[_Request]()
        with torch.inference_mode():
            while waiting or running:
                begun = waiting[: max_seqs - len(running)]
                del waiting[: len(begun)]
                for one in begun:
                    for end in range(1, len(one.tokens)):
                        if (place := self.known.get(tuple(one.tokens[:end]))) is None:
                            break
                        one.places.append(place)
                if begun:
                    self._run(begun, ForwardMode.EXTEND)
                    for one in begun:
                        for end in range(1, len(one.places) + 1):
                            self.known.setdefault(tuple(one.tokens[:end]), one.places[end - 1])
                    running += begun
                else:
                    self._run(running, ForwardMode.DECODE)
                for one in [one for one in running if len(one.tokens) >= one.num_wanted]:
                    running.remove(one)
                    self.free += [place for place in one.places if place not in self.known.values()]
        return [one.tokens for one in requests]

    def _run(self, requests: list[_Request], mode: ForwardMode) -> None:
        prefixes = [len(one.places) for one in requests]
        own = [one.tokens[first:] for one, first in zip(requests, prefixes, strict=True)]
        for one, tokens in zip(requests, own, strict=True):
            one.places += [self.free.pop() for _ in tokens]
            self.places.req_to_token[one.row, : len(one.places)] = torch.tensor(one.places, dtype=torch.int32)
        lengths = torch.tensor([len(one.places) for one in requests])
        at = [(one, first, len(one.places)) for one, first in zip(requests, prefixes, strict=True)]
        counts = torch.tensor([len(tokens) for tokens in own], dtype=torch.int32)
        batch = ForwardBatch(
            forward_mode=mode, batch_size=len(requests),
            input_ids=torch.tensor([token for tokens in own for token in tokens]),
            req_pool_indices=torch.tensor([one.row for one in requests]), seq_lens=lengths,
            out_cache_loc=torch.tensor([place for one, first, last in at for place in one.places[first:last]]),
            seq_lens_sum=int(lengths.sum()),
            positions=torch.tensor([place for _, first, last in at for place in range(first, last)]),
            req_to_token_pool=self.places, token_to_kv_pool=self.pool,
        )  # fmt: skip
        if mode is ForwardMode.EXTEND:
            batch.extend_num_tokens, batch.extend_seq_lens = int(counts.sum()), counts
            batch.extend_prefix_lens = torch.tensor(prefixes, dtype=torch.int32)
            batch.extend_start_loc = counts.cumsum(0) - counts
        output = self.model.forward(batch.input_ids, batch.positions, batch)
        for one, token in zip(requests, output.next_token_logits.argmax(-1).tolist(), strict=True):
            one.tokens.append(token)
