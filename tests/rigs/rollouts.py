"""A trainer and an engine of one tiny language model: Transformers' own `generate` writes, a forward computes again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import recorder
from recorder.analyze.align.align import Aligned, align
from tests.rigs.kernels import vision

RULES = "site=input,output name='!past_key_values*' keep=tokens; site=param keep=fingerprint,stats"
PAD, BOS, EOS = 0, 1, 2
LENGTH = 6
NUM_NEW = 5
Change = Callable[[Any], object]


def llama(**changes: Any) -> Any:
    """A decoder with rotary positions and grouped heads, the same at each call."""
    vision()  # which transformers imports where it is installed
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": PAD, "bos_token_id": BOS,
        "eos_token_id": EOS, "initializer_range": 0.2,
    }  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**(sizes | changes))).eval()


def gpt2() -> Any:
    """A decoder with learned positions, which do not forgive a shift."""
    vision()
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2}
    return GPT2LMHeadModel(GPT2Config(**sizes, pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS)).eval()


def mixtral() -> Any:
    """A mixture of experts."""
    vision()
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 64, "num_local_experts": 4, "num_experts_per_tok": 2}
    config = MixtralConfig(**sizes, initializer_range=0.2, pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS)
    return MixtralForCausalLM(config).eval()


def prompts(num: int = 3, length: int = LENGTH) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of several lengths, padded on the left, and their mask."""
    ids = torch.randint(3, 64, (num, length), generator=torch.Generator().manual_seed(7))
    ids[:, 0] = BOS
    mask = torch.ones_like(ids)
    for row in range(num):
        short = row % 3
        mask[row, :short] = 0
        ids[row, :short] = PAD
        ids[row, short] = BOS
    return ids, mask


def write(
    folder: Path, model: Any, ids: torch.Tensor, mask: torch.Tensor, how: Any = None, **settings: Any
) -> torch.Tensor:
    """Record the engine: the tokens that `generate` writes behind the prompts."""
    with (
        recorder.attach(model, enabled=True, dir=str(folder), roots="any", **({"rules": RULES} | settings)),
        torch.inference_mode(),
    ):
        sequences = model.generate(
            ids, attention_mask=mask, max_new_tokens=NUM_NEW, min_new_tokens=NUM_NEW, do_sample=False, **(how or {})
        )
    return torch.as_tensor(sequences.tolist())


def score(
    folder: Path, model: Any, ids: torch.Tensor, mask: torch.Tensor | None, settings: Any = None, **more: Any
) -> None:
    """Record the trainer: one forward over whole sequences."""
    positions = {} if mask is None else {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    with recorder.attach(model, enabled=True, dir=str(folder), roots="any", **(settings or {"rules": RULES})):
        model(input_ids=ids, attention_mask=mask, **(positions | more))


def whole_mask(mask: torch.Tensor) -> torch.Tensor:
    """Return the mask of the prompts and what was written behind them."""
    return torch.cat([mask, torch.ones(len(mask), NUM_NEW, dtype=mask.dtype)], 1)


def aligned(folder: Path, **options: Any) -> Aligned:
    """Align the runs below a folder."""
    return align(recorder.open_run(folder / "trainer"), recorder.open_run(folder / "engine"), **options)
