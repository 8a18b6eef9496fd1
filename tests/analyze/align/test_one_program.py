"""`recorder align RUN` of a program that generates and trains, as GRPO does with an adapter."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import recorder
from recorder.analyze.align.align import align
from tests.rigs.capturing import flagged
from tests.rigs.command_line import Cli
from tests.rigs.rollouts import NUM_NEW, llama, prompts, whole_mask


class Adapted(nn.Module):
    """A linear module with an adapter, whose parts are modules, as in PEFT."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A, self.lora_B = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features)
        self.is_on = True

    def forward(self, x: torch.Tensor) -> Any:
        own = self.base_layer(x)
        return own + self.lora_B(self.lora_A(x)) if self.is_on else own


@pytest.mark.parametrize("is_on", [True, False])
def test_generation_and_training_of_one_run_are_aligned(is_on: bool, tmp_path: Path, cli: Cli) -> None:
    model, (ids, mask) = llama(), prompts()
    model.requires_grad_(False)
    adapted = model.model.layers[0].self_attn.q_proj = Adapted(model.model.layers[0].self_attn.q_proj)
    optimizer = torch.optim.SGD((one for one in model.parameters() if one.requires_grad), lr=0.1)
    with recorder.attach(model, enabled=True, dir=str(tmp_path), roots="any", rules="", preset="rollout"):
        for _ in range(2):
            adapted.is_on = is_on
            with torch.no_grad():
                texts = model.eval().generate(
                    ids, attention_mask=mask, max_new_tokens=NUM_NEW, min_new_tokens=NUM_NEW, do_sample=False
                )
                model(input_ids=texts, attention_mask=whole_mask(mask))  # a reference, which is neither of the two
            adapted.is_on = True
            model.train()(input_ids=texts, attention_mask=whole_mask(mask), labels=texts).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    found = align(recorder.open_run(tmp_path))
    assert found.num_samples == 6 and found.num_tokens == 2 * (int(whole_mask(mask).sum()) - 3)
    assert found.logprobs is not None and found.logprobs.num_tokens == 6 * (NUM_NEW - 1)
    printed = cli("align", tmp_path)
    assert "engine: the calls of the same run that decode" in printed.out and printed.exit_code == int(not is_on)
    if is_on:
        assert found.is_fine and not found.tokens
    else:
        assert found.parting is not None
        assert "q_proj.lora_A' runs in the trainer alone (an adapter that was not merged" in found.parting.text


def test_an_engine_that_is_a_second_model_is_said_at_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, (ids, mask) = llama(), prompts()
    engine = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with flagged(tmp_path, rules="", preset="rollout"):
        with torch.no_grad():
            texts = engine.generate(ids, attention_mask=mask, max_new_tokens=NUM_NEW, do_sample=False)
        model.train()(input_ids=texts, labels=texts).loss.backward()
        optimizer.step()
    assert "LlamaForCausalLM ran and was not recorded, as no optimizer trained it" in caplog.text
