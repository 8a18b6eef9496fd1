"""GRPO of TRL, with an adapter of PEFT, on a tiny Llama and tokens of its own: FOLDER [off], where off switches the
adapter off while the model generates.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

WORDS = ["<pad>", "<bos>", "<eos>", *(chr(ord("a") + number) for number in range(26))]


def reward(completions: Sequence[str], **_: Any) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]


def main(folder: str, how: str = "") -> None:
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, padding_side="left", **names)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"vocab_size": len(WORDS), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **ids, max_position_embeddings=64, initializer_range=0.2))
    config = GRPOConfig(
        output_dir=folder, max_steps=3, per_device_train_batch_size=4, num_generations=2, max_completion_length=8,
        learning_rate=1e-2, use_cpu=True, bf16=False, report_to="none", save_strategy="no",
    )  # fmt: skip
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    data = Dataset.from_dict({"prompt": ["a b c", "d e", "f g h i", "j k"] * 4})
    trainer = GRPOTrainer(model, reward, args=config, train_dataset=data, processing_class=tokenizer,
                          peft_config=adapter)  # fmt: skip
    if how == "off":
        generate = trainer.model.generate

        def without_adapter(*args: Any, **kwargs: Any) -> Any:
            with trainer.model.disable_adapter():
                return generate(*args, **kwargs)

        trainer.model.generate = without_adapter
    trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
