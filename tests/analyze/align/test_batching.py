"""Transformers' continuous batching with a paged cache against a trainer's forward, padded and packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import recorder
from tests.rigs.rollouts import PAD, RULES, aligned, llama, prompts, score

NUM_WRITTEN = 9


def _serve(folder: Path, model: Any, texts: list[list[int]]) -> list[list[int]]:
    """Record an engine whose scheduler mixes chunks of prompts with decoding; return the texts with what is written."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    how = GenerationConfig(max_new_tokens=NUM_WRITTEN, do_sample=False, eos_token_id=-1, pad_token_id=PAD)
    pages = ContinuousBatchingConfig(page_size=4, num_blocks=32, max_batch_tokens=16)
    with recorder.attach(model, enabled=True, dir=str(folder), roots="any", rules=RULES):
        written = model.generate_batch(texts, generation_config=how, continuous_batching_config=pages)
    return [text + list(one.generated_tokens) for text, one in zip(texts, written.values(), strict=True)]


def _texts(num: int) -> list[list[int]]:
    ids, mask = prompts(num, 12)
    return [row[here.bool()].tolist() for row, here in zip(ids, mask, strict=True)]


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_continuous_batching_agrees_with_a_forward(layout: str, tmp_path: Path) -> None:
    texts = _texts(6)
    texts.append([*texts[0][:8], 5, 6, 7])  # its first blocks are in the cache, where another text has put them
    whole = [torch.tensor(text) for text in _serve(tmp_path / "engine", llama(), texts)]
    if layout == "padded":
        ids = nn.utils.rnn.pad_sequence(whole, batch_first=True, padding_value=PAD)
        lengths = torch.tensor([len(text) for text in whole])
        score(tmp_path / "trainer", llama(), ids, (torch.arange(ids.shape[1]) < lengths[:, None]).long())
    else:
        positions = torch.cat([torch.arange(len(text)) for text in whole])[None]
        score(tmp_path / "trainer", llama(), torch.cat(whole)[None], None, position_ids=positions, use_cache=False)
    found = aligned(tmp_path)
    assert found.is_fine and not found.tokens and not found.num_unknown, (found.parting, found.tokens)
    assert found.num_samples == len(texts)
    assert found.logprobs is not None and found.logprobs.num_tokens == len(texts) * (NUM_WRITTEN - 1)
    assert abs(found.logprobs.largest.apart) < 1e-4


def test_a_block_that_the_scheduler_gives_to_two_texts_is_named(tmp_path: Path) -> None:
    model = llama()
    attention = model.model.layers[1].self_attn
    own = attention.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        read = kwargs["read_index"][0]
        if read.numel() > 24:  # the last text of the batch reads a block of the first one
            kwargs["read_index"][0] = torch.cat([read[:-8], read[:4], read[-4:]])
        return own(*args, **kwargs)

    attention.forward = forward
    whole = [torch.tensor(text) for text in _serve(tmp_path / "engine", model, _texts(3))]
    ids = nn.utils.rnn.pad_sequence(whole, batch_first=True, padding_value=PAD)
    lengths = torch.tensor([len(text) for text in whole])
    score(tmp_path / "trainer", llama(), ids, (torch.arange(ids.shape[1]) < lengths[:, None]).long())
    found = aligned(tmp_path).parting
    assert found is not None and found.value.text == "'model.layers.1.self_attn.o_proj' input"
    assert "'model.layers.1.self_attn' passes on something else in its own code" in found.text
