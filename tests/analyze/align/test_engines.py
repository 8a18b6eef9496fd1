"""An engine with vLLM's names and shapes against a trainer of Transformers: what is joined, and what is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import recorder
from tests.rigs.engines import LlamaForCausalLM, serve
from tests.rigs.rollouts import PAD, RULES, aligned, llama, prompts, score

NUM_WRITTEN = 7
PRESET = {"rules": "", "preset": "rollout"}


def _texts(num: int = 6) -> list[list[int]]:
    ids, mask = prompts(num, 12)
    texts = [row[here.bool()].tolist() for row, here in zip(ids, mask, strict=True)]
    return [*texts, [*texts[0][:8], 5, 6, 7], texts[2]]  # which find their first blocks in the cache


def _recorded(
    folder: Path, change: Callable[[Any], object] = lambda engine: None, settings: Any = None, **how: Any
) -> list[torch.Tensor]:
    """Record an engine and the trainer that scores what it has written."""
    settings = settings or {"rules": RULES}
    engine = LlamaForCausalLM(llama()).eval()
    change(engine)
    with recorder.attach(engine, enabled=True, dir=str(folder / "engine"), roots="any", **settings):
        whole = [torch.tensor(text) for text in serve(engine, _texts(), num_new=NUM_WRITTEN, **how)]
    ids = nn.utils.rnn.pad_sequence(whole, batch_first=True, padding_value=PAD)
    lengths = torch.tensor([len(text) for text in whole])
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    score(folder / "trainer", llama(), ids, mask, settings=settings)
    return whole


@pytest.mark.parametrize("settings", [{"rules": RULES}, PRESET], ids=["rules", "preset"])
def test_an_engine_with_flat_tokens_and_fused_weights_agrees_with_a_forward(settings: Any, tmp_path: Path) -> None:
    whole = _recorded(tmp_path, settings=settings)
    found = aligned(tmp_path)
    assert found.is_fine and not found.tokens and not found.num_unknown, (found.parting, found.tokens)
    assert found.num_samples == len(whole)
    assert found.logprobs is not None and found.logprobs.num_tokens >= len(whole) * (NUM_WRITTEN - 1)
    assert abs(found.logprobs.largest.apart) < 1e-4
    fused = {state.fused.rpartition(".")[0].rpartition(".")[2] for state in found.weights}
    assert fused == {"", "qkv_proj", "gate_up_proj"} and {state.state for state in found.weights} == {"equal"}
    paths = {value.module_path for value in found.values}
    assert {"model.norm", "model.layers.1.input_layernorm", "model.layers.0.self_attn.o_proj"} <= paths


def _stale_slice(engine: Any) -> None:
    with torch.no_grad():
        engine.model.layers[1].self_attn.qkv_proj.weight[32:48].mul_(1.05)  # the keys'


def _other_eps(engine: Any) -> None:
    engine.model.layers[1].post_attention_layernorm.eps = 1e-2


def _late(engine: Any) -> None:
    own = engine.model.forward

    def forward(input_ids: Any, positions: Any, *args: Any) -> Any:
        return own(input_ids, positions - (positions > 5).long(), *args)

    engine.model.forward = forward


FAULTS: dict[str, tuple[Callable[[Any], object], str, int, str]] = {
    "a slice of a fused weight": (
        _stale_slice, "'model.layers.1.self_attn.o_proj' input", 1,
        "model.layers.1.self_attn.k_proj.weight (a slice of model.layers.1.self_attn.qkv_proj.weight) equals the "
        "trainer's parameter at no recorded step",
    ),
    "another epsilon": (_other_eps, "'model.layers.1.post_attention_layernorm' output", 0, "the module itself"),
    "positions that are late by one": (_late, "'model.layers.0.self_attn.o_proj' input", 6, "passes on some"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_an_engine_with_fused_modules_is_named(name: str, tmp_path: Path) -> None:
    change, value, position, words = FAULTS[name]
    _recorded(tmp_path, change)
    found = aligned(tmp_path).parting
    assert found is not None and (found.value.text, found.first.position) == (value, position), found
    assert words in found.text


def test_drafts_that_an_engine_throws_away_are_no_difference(tmp_path: Path) -> None:
    whole = _recorded(tmp_path, num_drafts=2, max_tokens=64)
    found = aligned(tmp_path)
    assert found.is_fine and not found.num_unknown and found.num_samples == len(whole), (found.parting, found.tokens)
    assert found.logprobs is None or abs(found.logprobs.largest.apart) < 1e-4


def test_flat_tokens_of_an_engine_are_joined_by_a_name_for_each(tmp_path: Path) -> None:
    """Two samples whose positions go on from one to the other by chance are two."""

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

        def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> Any:
            return self.head(self.embed(input_ids) + positions[:, None] / 8)

    texts = {"a": [3, 1, 4, 1, 5, 9], "b": [2, 7, 1, 8, 2, 8, 1]}
    calls = [[("a", 0, 3), ("b", 0, 4)], [("a", 3, 4), ("b", 4, 5)], [("b", 5, 6), ("a", 4, 6)], [("b", 6, 7)]]
    for side, batches in (("engine", calls), ("trainer", [[("a", 0, 6), ("b", 0, 7)]])):
        model = Flat()
        with recorder.attach(model, enabled=True, dir=str(tmp_path / side), roots="any", rules=RULES):
            for batch in batches:
                ids = torch.tensor([token for name, first, last in batch for token in texts[name][first:last]])
                positions = torch.tensor([at for _, first, last in batch for at in range(first, last)])
                with recorder.tokens(sample_ids=[name for name, first, last in batch for _ in range(first, last)]):
                    model(ids, positions)
    found = aligned(tmp_path)
    assert found.is_fine and found.joined_by == "names" and found.num_tokens == 13 and found.num_samples == 2
