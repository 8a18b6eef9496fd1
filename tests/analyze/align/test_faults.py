"""Faults between a trainer and an engine: each is named by its first module, its first token and its reason."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from tests.rigs.rollouts import aligned, llama, prompts, score, whole_mask, write


class Fault(NamedTuple):
    """A change of the engine's model, and what is said of it."""

    change: Callable[[Any], object]
    value: str
    reason: str
    position: int
    """The first position at which it shows."""
    words: str
    how: dict[str, Any] | None = None
    """How the engine generates."""


def _scaled(module: Any, factor: float = 1.05) -> None:
    with torch.no_grad():
        module.weight.mul_(factor)


def _after(module: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    own = module.forward
    module.forward = lambda *args: change(own(*args))


def _halved(model: Any) -> None:
    _after(model.lm_head, lambda output: output / 2)


def _quantised(model: Any) -> None:
    """The cache keeps its values coarsely: what attention reads back in decoding is not what was written."""
    attention = model.model.layers[1].self_attn
    own = attention.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("past_key_values")
        if cache is not None and cache.get_seq_length(1):
            layer = cache.layers[1]
            layer.values = (layer.values * 8).round() / 8
        return own(*args, **kwargs)

    attention.forward = forward


def _reused(model: Any) -> None:
    """A block of the cache is given to two samples: the first one reads the keys of the second."""
    attention = model.model.layers[0].self_attn
    own = attention.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("past_key_values")
        if cache is not None and cache.get_seq_length(0):
            keys = cache.layers[0].keys.clone()
            keys[0, :, 2:4] = keys[1, :, 2:4]
            cache.layers[0].keys = keys
        return own(*args, **kwargs)

    attention.forward = forward


def _narrow(model: Any) -> None:
    """One module computes in bfloat16 inside a model in float32."""
    module = model.model.layers[1].mlp.gate_proj
    module.forward = lambda x: nn.functional.linear(x.bfloat16(), module.weight.bfloat16())
    _after(model.model.layers[1].mlp, lambda output: output.float())
    model.model.layers[1].mlp.down_proj.forward = lambda x: nn.functional.linear(
        x.float(), model.model.layers[1].mlp.down_proj.weight
    )


def _dropping(model: Any) -> None:
    _after(model.model.layers[0].mlp.down_proj, lambda output: nn.functional.dropout(output, 0.2))


def _late_by_one(model: Any) -> None:
    """Each decoding step is given the position before its own, as after an error of one in the padding."""
    own = model.forward

    @functools.wraps(own)  # `generate` looks at the signature
    def forward(*args: Any, **kwargs: Any) -> Any:
        if kwargs["input_ids"].shape[1] == 1:
            kwargs["position_ids"] = kwargs["position_ids"] - 1
        return own(*args, **kwargs)

    model.forward = forward


def _other_eps(model: Any) -> None:
    model.model.layers[1].post_attention_layernorm.variance_epsilon = 1e-2


def _other_base(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.9)


def _untied(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 1.01)


def _leaking(model: Any) -> None:
    """Attention looks at what is yet to come, in the tokens that run at once."""
    attention = model.model.layers[1].self_attn
    own = attention.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        mask = kwargs["attention_mask"]
        return own(*args, **{**kwargs, "attention_mask": None if mask is None else mask.any(2, keepdim=True)})

    attention.is_causal = False
    attention.forward = forward


def _with_temperature(model: Any) -> None:
    """The engine divides its logits by a temperature, behind the head."""
    own = model.forward

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        output = own(*args, **kwargs)
        output.logits = output.logits / 0.7
        return output

    model.forward = forward


def _other_scale(model: Any) -> None:
    model.model.layers[0].self_attn.scaling *= 1.1


def _other_activation(model: Any) -> None:
    model.model.layers[0].mlp.act_fn.forward = lambda x: x * torch.sigmoid(1.702 * x)


def _without_residual(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    layer = model.model.layers[0]
    kept: dict[str, torch.Tensor] = {}
    layer.post_attention_layernorm.register_forward_pre_hook(lambda _, args: kept.update(residual=args[0]))
    _after(mlp, lambda output: output - 0.1 * kept["residual"])


def _off_at_edge(model: Any) -> None:
    """What attention reads of the cache ends one token early where a second chunk of a prompt begins."""
    attention = model.model.layers[1].self_attn
    own = attention.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("past_key_values")
        if cache is not None and cache.get_seq_length(1) == 4:
            layer = cache.layers[1]
            layer.values = torch.cat([layer.values[:, :, :3], torch.zeros_like(layer.values[:, :, :1])], 2)
        return own(*args, **kwargs)

    attention.forward = forward


FAULTS = {
    "one weight is another": Fault(
        lambda m: _scaled(m.model.layers[1].self_attn.q_proj), "'model.layers.1.self_attn.q_proj' output", "weights", 0,
        "model.layers.1.self_attn.q_proj.weight equals the trainer's parameter at no recorded step",
    ),
    "a norm was not synchronised": Fault(
        lambda m: _scaled(m.model.norm), "'model.norm' output", "weights", 0, "model.norm.weight",
    ),
    "the embedding is another": Fault(
        lambda m: _scaled(m.model.embed_tokens), "'model.embed_tokens' output", "weights", 0, "embed_tokens.weight",
    ),
    "another epsilon": Fault(
        _other_eps, "'model.layers.1.post_attention_layernorm' output", "module", 0, "the module itself",
    ),
    "another base of the rotary positions": Fault(
        _other_base, "'model.rotary_emb' output 0", "module", 1, "the module itself",
    ),
    "one module in bfloat16": Fault(
        _narrow, "'model.layers.1.mlp.gate_proj' output", "dtype", 0, "float32 in the trainer, bfloat16 in the engine",
    ),
    "the head scales its logits": Fault(_halved, "'lm_head' output", "module", 3, "the module itself"),
    "a quantised cache": Fault(
        _quantised, "'model.layers.1.self_attn.o_proj' input", "module", 4, "'model.layers.1.self_attn' passes",
    ),
    "a block of the cache that two samples have": Fault(
        _reused, "'model.layers.0.self_attn.o_proj' input", "module", 6, "'model.layers.0.self_attn' passes on",
    ),
    "a position late by one in decoding": Fault(
        _late_by_one, "'model.rotary_emb' output 0", "inputs", 4, "was given position_ids 6 in the trainer and 5 in",
    ),
    "attention that looks ahead": Fault(
        _leaking, "'model.layers.1.self_attn.o_proj' input", "module", 0, "'model.layers.1.self_attn' passes on",
    ),
    "a temperature behind the head": Fault(
        _with_temperature, "(the model) output logits", "module", 3, "what runs before it agree",
    ),
    "another scale of attention": Fault(
        _other_scale, "'model.layers.0.self_attn.o_proj' input", "module", 1,
        "'model.layers.0.self_attn' passes on",
    ),
    "another activation": Fault(_other_activation, "'model.layers.0.mlp.act_fn' output", "module", 0, "itself"),
    "a part of the residual lost": Fault(_without_residual, "'model.layers.0.mlp' output", "module", 0, "itself"),
    "an edge of a chunk off by one": Fault(
        _off_at_edge, "'model.layers.1.self_attn.o_proj' input", "module", 2,
        "'model.layers.1.self_attn' passes on",
        {"prefill_chunk_size": 2},
    ),
    "a dropout that is on": Fault(_dropping, "'model.layers.0.mlp.down_proj' output", "module", 0, "the module itself"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_engine_is_named_by_module_token_and_reason(name: str, tmp_path: Path) -> None:
    fault, (ids, mask), model = FAULTS[name], prompts(), llama()
    fault.change(model)
    sequences = write(tmp_path / "engine", model, ids, mask, fault.how)
    score(tmp_path / "trainer", llama(), sequences, whole_mask(mask))
    found = aligned(tmp_path)
    assert found.parting is not None and not found.is_fine
    told = found.parting.value.text, found.parting.reason, found.parting.first.position
    assert told == (fault.value, fault.reason, fault.position), found.parting.text
    assert fault.words in found.parting.text
