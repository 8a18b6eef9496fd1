"""What `recorder align` says of sound pairs, of samples that differ, and of weights that are behind."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import recorder
from recorder.analyze.align.align import align
from recorder.errors import LookupFailedError
from recorder.run.probe import token_blocks
from tests.rigs import jobs
from tests.rigs.command_line import Cli
from tests.rigs.rollouts import (
    BOS,
    NUM_NEW,
    PAD,
    RULES,
    aligned,
    gpt2,
    llama,
    mixtral,
    prompts,
    score,
    whole_mask,
    write,
)  # fmt: skip


def _right_padded(sequences: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [ids[here.bool()] for ids, here in zip(sequences, mask, strict=True)]
    padded = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
    lengths = torch.tensor([len(row) for row in rows])
    return padded, (torch.arange(padded.shape[1]) < lengths[:, None]).long()


def _sound(folder: Path, sequences: torch.Tensor, mask: torch.Tensor, pair: str) -> None:
    """Record a trainer that computes the same in another way."""
    if pair == "padded on the left":
        score(folder, llama(), sequences, mask)
    elif pair == "padded on the right":
        score(folder, llama(), *_right_padded(sequences, mask))
    elif pair == "without position ids":
        score(folder, llama(), sequences, mask, position_ids=None)
    elif pair == "in another order":
        score(folder, llama(), sequences.flip(0), mask.flip(0))
    elif pair == "one sample a call":
        with recorder.attach(model := llama(), enabled=True, dir=str(folder), roots="any", rules=RULES):
            for ids, here in zip(sequences, mask, strict=True):
                model(input_ids=ids[here.bool()][None])
    elif pair == "packed":
        rows = [ids[here.bool()] for ids, here in zip(sequences, mask, strict=True)]
        positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
        score(folder, llama(), torch.cat(rows)[None], None, position_ids=positions, use_cache=False)
    elif pair == "with more padding":
        score(folder, llama(), *(nn.functional.pad(one, (4, 2)) for one in (sequences, mask)))
    elif pair == "with checkpoints of activations":
        model = llama().train()
        model.activation_checkpointing_enable()
        with recorder.attach(model, enabled=True, dir=str(folder), rules=RULES):
            model(input_ids=sequences, attention_mask=mask, labels=sequences).loss.backward()
    elif pair == "in bfloat16":
        score(folder, llama().bfloat16(), sequences, mask)
    else:
        raise AssertionError(pair)


PAIRS = ("padded on the left", "padded on the right", "without position ids", "in another order", "one sample a call",
         "packed", "with more padding", "with checkpoints of activations", "in bfloat16")  # fmt: skip


@pytest.mark.parametrize("pair", PAIRS)
def test_a_sound_pair_has_no_finding(pair: str, tmp_path: Path) -> None:
    ids, mask = prompts()
    sequences = write(tmp_path / "engine", llama(), ids, mask)
    _sound(tmp_path / "trainer", sequences, whole_mask(mask), pair)
    found = aligned(tmp_path)
    assert found.is_fine, found.parting or found.tokens or found.weights
    assert found.num_tokens == int(whole_mask(mask).sum()) - len(ids)  # nobody computes on what is written last
    assert found.num_samples == len(ids) and not found.num_unknown
    assert found.logprobs is not None and found.logprobs.num_tokens == len(ids) * (NUM_NEW - 1)
    is_rounded = pair == "in bfloat16"
    assert abs(found.logprobs.largest.apart) < (0.3 if is_rounded else 1e-4)
    assert any("what the narrower type rounds is noise" in note for note in found.notes) == is_rounded
    assert all(state.state == ("not comparable" if is_rounded else "equal") for state in found.weights)


ENGINES: dict[str, dict[str, Any]] = {
    "chunks of a prompt": {"prefill_chunk_size": 2},
    "a static cache": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
}


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_that_works_in_another_way_is_joined(name: str, tmp_path: Path) -> None:
    ids, mask = prompts()
    sequences = write(tmp_path / "engine", llama(), ids, mask, ENGINES[name])
    score(tmp_path / "trainer", llama(), sequences, whole_mask(mask))
    found = aligned(tmp_path)
    assert found.is_fine and not found.num_unknown and found.num_samples == len(ids)
    assert found.num_tokens == int(whole_mask(mask).sum()) - len(ids)


def test_the_log_probabilities_are_those_of_torch(tmp_path: Path) -> None:
    ids, mask = prompts()
    sequences = write(tmp_path / "engine", llama(), ids, mask)
    trainer = llama()
    with torch.no_grad():
        trainer.model.norm.weight.mul_(1.3)
    score(tmp_path / "trainer", trainer, sequences, whole_mask(mask))
    found = aligned(tmp_path).logprobs
    assert found is not None
    chosen = []
    for model in (trainer, llama()):
        positions = (whole_mask(mask).cumsum(1) - 1).clamp(min=0)
        logits = model(input_ids=sequences, attention_mask=whole_mask(mask), position_ids=positions).logits
        told = logits.double().log_softmax(-1)[:, :-1].gather(2, sequences[:, 1:, None])[:, -NUM_NEW:-1, 0]
        chosen.append(told.detach())
    apart = (chosen[0] - chosen[1]).flatten()
    ratio = apart.exp()
    expected = (apart.mean(), apart.abs().mean(), (ratio - 1 - apart).mean(), ((ratio - 1).abs() > 0.2).double().mean())
    assert found[1:5] == pytest.approx([float(one) for one in expected], abs=1e-4)
    assert found.largest.apart == pytest.approx(float(apart[apart.abs().argmax()]), abs=1e-4)


def _cut(sequences: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return sequences[:, :-3], mask[:, :-3]


def _without_bos(sequences: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return sequences, mask & (sequences != BOS)


def _unmasked(sequences: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return sequences, torch.ones_like(mask)


def _one_other(sequences: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    changed = sequences.clone()
    changed[1, 7] = 63 - changed[1, 7]
    return changed, mask


SAMPLES: dict[str, tuple[Callable[..., tuple[torch.Tensor, torch.Tensor]], str, int]] = {
    "truncated": (_cut, "the trainer's ends after 8 tokens, and the engine's has 2 more (truncated?)", 8),
    "another BOS": (_without_bos, "the engine alone has 1 token in front: [1] (another tokenizer's BOS?)", 0),
    "padding without a mask": (_unmasked, "the trainer alone has 2 tokens in front: [0, 0] (padding", 0),
    "another token": (_one_other, "the token at position 6 is", 6),
}


@pytest.mark.parametrize("at", [1, 4])
def test_tokens_that_another_chat_template_puts_between_are_named_where_they_stand(at: int, tmp_path: Path) -> None:
    ids, mask = prompts()
    sequences = write(tmp_path / "engine", llama(), ids[:1], mask[:1])
    longer = torch.cat([sequences[:, :at], torch.tensor([[33, 34]]), sequences[:, at:]], 1)
    score(tmp_path / "trainer", llama(), longer, None)
    with pytest.raises(LookupFailedError, match="no token in common") as raised:
        aligned(tmp_path)
    words = f"sample 0: the trainer alone has 2 tokens at position {at}: [33, 34] (another chat template?)"
    assert words in str(raised.value)


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_that_differ_are_named_with_the_first_token(name: str, tmp_path: Path, cli: Cli) -> None:
    change, words, position = SAMPLES[name]
    ids, mask = prompts()
    sequences = write(tmp_path / "engine", llama(), ids, mask)
    score(tmp_path / "trainer", llama(), *change(sequences, whole_mask(mask)))
    if name == "another BOS":
        with pytest.raises(LookupFailedError, match="no token in common") as raised:
            aligned(tmp_path)
        assert words in str(raised.value)
        return
    found = aligned(tmp_path)
    told = [one for one in found.tokens if words in one.text]
    assert told and told[0].is_finding and told[0].position == position and not found.is_fine, found.tokens
    printed = cli("align", tmp_path / "trainer", tmp_path / "engine")
    assert printed.exit_code == 1 and printed.out.splitlines()[2].startswith("fault   "), printed.out


def test_positions_that_padding_shifts_are_named_where_they_are_learned(tmp_path: Path) -> None:
    ids, mask = prompts()
    sequences = write(tmp_path / "engine", gpt2(), ids, mask)
    score(tmp_path / "trainer", gpt2(), sequences, whole_mask(mask), position_ids=None)
    found = aligned(tmp_path).parting
    assert found is not None and found.reason == "inputs"
    assert (
        found.value.text == "'transformer.wpe' output"
        and "was given 1 in the trainer and 0 in the engine for sample 1" in found.text
    )


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_a_trainer_of_two_ranks_is_joined_as_one(layout: str, tmp_path: Path) -> None:
    ids, mask = prompts(4)
    engine = llama()
    with torch.no_grad():
        engine.model.layers[0].mlp.gate_proj.weight.mul_(1.05)
    sequences = write(tmp_path / "engine", engine, ids, mask)
    torch.save({"ids": sequences, "mask": whole_mask(mask)}, tmp_path / "written.pt")
    jobs.succeeded(jobs.ranks(tmp_path, Path(__file__).parent / "scripts" / "trainer.py", tmp_path, layout))
    found = aligned(tmp_path)
    assert found.num_samples == 4 and found.logprobs is not None and found.logprobs.num_tokens == 4 * (NUM_NEW - 1)
    assert found.parting is not None and found.parting.value.text == "'model.layers.0.mlp.gate_proj' output"
    assert found.parting.reason == "weights" and [one.state for one in found.weights if one.behind != 0] == ["differs"]


def test_a_tensor_parallel_engine_agrees_with_a_trainer_under_fsdp(tmp_path: Path) -> None:
    program = Path(__file__).parent / "scripts" / "trainer.py"
    for layout in ("tp", "fsdp"):
        jobs.succeeded(jobs.ranks(tmp_path, program, tmp_path, layout))
    found = aligned(tmp_path)
    assert found.is_fine and not found.num_unknown, (found.parting, found.weights)
    assert found.num_samples == 4 and found.logprobs is not None and found.logprobs.num_tokens == 4 * (NUM_NEW - 1)
    whole = {value.module_path for value in found.values}
    assert {"model.layers.0.input_layernorm", "model.layers.1", "lm_head"} <= whole


def _near_ties(model: Any, side: float) -> Any:
    """Return a model in which the first two experts of a layer are all but tied for each token."""
    weight = model.model.layers[1].mlp.gate.weight
    with torch.no_grad():
        weight[0] *= 4  # both are wanted by many tokens
        weight[1] = weight[0] * (1 + side * 1e-6)
        weight[2:] *= 0.01
    return model


def test_experts_that_a_tie_swaps_are_counted_and_named(tmp_path: Path) -> None:
    ids, mask = prompts()
    sequences = write(tmp_path / "sound" / "engine", mixtral(), ids, mask)
    score(tmp_path / "sound" / "trainer", mixtral(), sequences, whole_mask(mask))
    found = aligned(tmp_path / "sound")
    assert found.is_fine and set(found.experts) == {"model.layers.0.mlp", "model.layers.1.mlp"}
    for one in found.experts.values():
        assert (one.num_other, one.num_tokens) == (0, 27) and one.load_trainer == one.load_engine
        assert sum(one.load_trainer) == 2 * 27 and len(one.load_trainer) <= 4
    for model, name, side in ((mixtral(), "engine", 1.0), (mixtral(), "trainer", -1.0)):
        for layer in _near_ties(model, side).model.layers:
            layer.mlp.gate.top_k = 1
        if name == "engine":
            sequences = write(tmp_path / name, model, ids, mask)
        else:
            score(tmp_path / name, model, sequences, whole_mask(mask))
    found = aligned(tmp_path)
    assert found.parting is not None and found.parting.value.module_path == "model.layers.1.mlp.experts"
    assert found.parting.reason == "inputs" and "was given top_k_index" in found.parting.text


def _named(folder: Path, model: Any, names: list[str], sequences: torch.Tensor, positions: torch.Tensor) -> None:
    attached = recorder.attach(model, enabled=True, dir=str(folder), roots="any", rules=RULES)
    with attached, recorder.tokens(sample_ids=names, positions=positions):
        model(input_ids=sequences)


def test_a_mask_of_one_side_is_not_compared_with_the_tokens_of_the_other(tmp_path: Path) -> None:
    ids = torch.randint(3, 64, (3, 6), generator=torch.Generator().manual_seed(1))
    scaled = llama()
    forward = scaled.forward

    @functools.wraps(forward)
    def scale(**given: Any) -> Any:
        output = forward(**given)
        output.logits *= 0.9
        return output

    scaled.forward = scale
    engine = llama()
    with recorder.attach(engine, enabled=True, dir=str(tmp_path / "engine"), roots="any", rules=RULES):
        engine(input_ids=ids)
    score(tmp_path / "trainer", scaled, ids, torch.ones_like(ids))
    found = aligned(tmp_path)
    assert found.parting is not None and "attention_mask" not in found.parting.text


def test_samples_with_names_are_joined_by_them_and_a_wrong_order_is_named(tmp_path: Path) -> None:
    ids = torch.randint(3, 64, (3, 6), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(6).expand(3, 6)
    _named(tmp_path / "engine", llama(), ["a", "b", "c" * 60], ids, positions)
    _named(tmp_path / "trainer", llama(), ["b", "a", "c" * 60], ids[[1, 0, 2]], positions)
    _named(tmp_path / "wrong" / "trainer", llama(), ["a", "b", "c" * 60], ids[[1, 0, 2]], positions)
    found = aligned(tmp_path)
    assert found.is_fine and found.joined_by == "names" and found.num_tokens == 18
    wrong = align(recorder.open_run(tmp_path / "wrong" / "trainer"), recorder.open_run(tmp_path / "engine"))
    assert "they are the tokens of the trainer's sample 'b'" in wrong.tokens[0].text and not wrong.is_fine


def test_a_repeat_of_the_engine_in_another_batch_measures_the_noise(tmp_path: Path) -> None:
    ids, mask = prompts()
    model = llama()
    with torch.no_grad():
        model.model.norm.weight.mul_(1 + 3e-5)  # 1e-5 is within the noise of a processor without AVX-512
    sequences = write(tmp_path / "engine", llama(), ids, mask)
    write(tmp_path / "again", llama(), ids[:1], mask[:1])
    score(tmp_path / "trainer", model, sequences, whole_mask(mask))
    assert aligned(tmp_path).parting is None
    found = aligned(tmp_path, noise=[recorder.open_run(tmp_path / "again")])
    assert found.parting is not None and found.parting.value.text == "'model.norm' output"


def _train(
    folder: Path,
    model: Any,
    num_steps: int,
    on_step: Callable[[int], object] = lambda step: None,
    rules: str = RULES,
    texts: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    ids, mask = texts or prompts()
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.05)
    with recorder.attach(model, enabled=True, dir=str(folder), rules=rules):
        for step in range(num_steps):
            on_step(step)
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            model(input_ids=ids, attention_mask=mask, position_ids=positions, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def _fused(model: Any) -> nn.Module:
    """A module of an engine that fuses three projections into one parameter, as vLLM and SGLang do."""
    attention = model.model.layers[0].self_attn
    parts = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    attention.qkv_proj = nn.Linear(parts[0].shape[1], sum(len(part) for part in parts), bias=False)
    attention.qkv_proj.weight = nn.Parameter(torch.cat(parts).detach().clone())
    return attention.qkv_proj  # type: ignore[no-any-return]


def test_weights_say_which_tensor_is_stale_and_by_how_many_updates(tmp_path: Path, cli: Cli) -> None:
    kept: dict[int, dict[str, torch.Tensor]] = {}
    model = llama()
    _train(tmp_path / "trainer", model, 4, lambda step: kept.update({step: _copied(model)}))
    ids, mask = prompts()
    for name, change in {
        "synced": {},
        "missed": {key: kept[1][key] for key in kept[1]},
        "one": {"model.layers.1.mlp.up_proj.weight": kept[2]["model.layers.1.mlp.up_proj.weight"]},
    }.items():
        engine = llama()
        engine.load_state_dict({**kept[3], **change})
        write(tmp_path / name / "engine", engine, ids, mask)
        found = align(recorder.open_run(tmp_path / "trainer"), recorder.open_run(tmp_path / name / "engine"), step="3")
        behind = {state.name: state.behind for state in found.weights if state.state != "equal"}
        assert set(behind.values()) == {"synced": set(), "missed": {2}, "one": {1}}[name]
        assert (found.parting is None) == (name == "synced")
        if name == "one":
            assert list(behind) == ["model.layers.1.mlp.up_proj.weight"] and found.parting is not None
            assert found.parting.value.text == "'model.layers.1.mlp.up_proj' output"
            assert "up_proj.weight is the trainer's of step 2: stale by 1 update" in found.parting.text
    printed = cli("align", tmp_path / "trainer", tmp_path / "one" / "engine", "--weights", "--step", "3")
    assert printed.exit_code == 1 and "stale by 1 update" in printed.out and "up_proj.weight" in printed.out
    assert re.search(r"wrong ones first \(8 of \d\d\)", printed.out), "the table says that it is not whole"


def test_an_engine_that_is_synchronised_during_its_run_is_held_against_the_step_of_its_tokens(tmp_path: Path) -> None:
    texts = torch.randint(3, 64, (3, 2, 8), generator=torch.Generator().manual_seed(5))  # those of three steps
    texts[:, :, 0] = BOS  # so that all samples begin alike, each with the weights of its step
    kept: dict[int, dict[str, torch.Tensor]] = {}

    def train(folder: Path, rules: str, on_step: Callable[[int, Any], object]) -> None:
        model = llama()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with recorder.attach(model, enabled=True, dir=str(folder), rules=rules):
            for step in range(3):
                on_step(step, model)
                model(input_ids=texts[step], labels=texts[step]).loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    train(tmp_path / "before", "site=scalar keep=stats", lambda step, model: kept.update({step: _copied(model)}))
    for name, versions in {"engine": (0, 1, 2), "late": (0, 0, 1)}.items():
        engine = llama()
        with recorder.attach(engine, enabled=True, dir=str(tmp_path / name), roots="any", rules=RULES), torch.no_grad():
            for step, version in enumerate(versions):
                engine.load_state_dict(kept[version])
                for length in (6, 7, 8):  # without a cache
                    engine(input_ids=texts[step][:, :length], use_cache=False)
    train(tmp_path / "trainer", RULES, lambda step, model: None)
    trainer = recorder.open_run(tmp_path / "trainer")
    found = align(trainer, recorder.open_run(tmp_path / "engine"))
    assert found.parting is None and {one.state for one in found.weights} == {"equal"} and found.weights_step == 2
    late = align(trainer, recorder.open_run(tmp_path / "late"))
    assert {one.behind for one in late.weights} == {1} and late.parting is not None and late.parting.reason == "weights"


def test_weights_of_a_step_that_the_trainer_did_not_record_are_not_judged(tmp_path: Path) -> None:
    model = llama()
    kept: dict[int, dict[str, torch.Tensor]] = {}
    rules = RULES.replace("site=param", "site=param steps=::4")
    _train(tmp_path / "trainer", model, 4, lambda step: kept.update({step: _copied(model)}), rules)
    engine = llama()
    engine.load_state_dict(kept[3])
    write(tmp_path / "engine", engine, *prompts())
    found = align(recorder.open_run(tmp_path / "trainer"), recorder.open_run(tmp_path / "engine"), step="3")
    assert found.parting is None and {one.state for one in found.weights} == {"not comparable"}


def _copied(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_a_slice_of_a_fused_parameter_that_is_stale_is_named(tmp_path: Path) -> None:
    kept: dict[int, dict[str, torch.Tensor]] = {}
    model = llama()
    _train(tmp_path / "trainer", model, 3, lambda step: kept.update({step: _copied(model)}))
    ids, mask = prompts()
    for name, stale in {"synced": {}, "stale": {"k_proj": 0}}.items():
        engine = llama()
        engine.load_state_dict(kept[2])
        for part, step in stale.items():
            path = f"model.layers.0.self_attn.{part}"
            engine.get_submodule(path).weight = nn.Parameter(kept[step][f"{path}.weight"])
        _fused(engine)
        for part in ("q_proj", "k_proj", "v_proj"):
            projection = engine.model.layers[0].self_attn.get_submodule(part)
            projection.data = projection.weight.detach()
            del projection.weight
            projection.forward = lambda x, of=projection: nn.functional.linear(x, of.data)
        write(tmp_path / name / "engine", engine, ids, mask)
        run = recorder.open_run(tmp_path / name / "engine")
        weights = {state.name: state for state in align(recorder.open_run(tmp_path / "trainer"), run, step="2").weights}
        of = {part: weights[f"model.layers.0.self_attn.{part}.weight"] for part in ("q_proj", "k_proj", "v_proj")}
        assert {state.fused for state in of.values()} == {"model.layers.0.self_attn.qkv_proj.weight"}
        assert [state.behind for state in of.values()] == ([0, 0, 0] if name == "synced" else [0, 2, 0])


def test_a_tie_that_was_lost_is_named(tmp_path: Path) -> None:
    _train(tmp_path / "trainer", llama(tie_word_embeddings=True), 1)  # which updates the tied parameter once, as one
    trainer = recorder.open_run(tmp_path / "trainer")
    write(tmp_path / "tied", llama(tie_word_embeddings=True), *prompts())
    tied = align(trainer, recorder.open_run(tmp_path / "tied"))
    assert tied.parting is None and {state.state for state in tied.weights} == {"equal"}
    engine = llama(tie_word_embeddings=True)
    engine.lm_head.weight = nn.Parameter(engine.lm_head.weight.detach() * 1.01)
    write(tmp_path / "lost", engine, *prompts())
    found = align(trainer, recorder.open_run(tmp_path / "lost")).parting
    assert found is not None and found.value.text == "'lm_head' output" and found.reason == "weights"
    assert "lm_head.weight is in the engine alone (a tie that was lost?)" in found.text


def test_an_adapter_that_was_not_merged_is_named(tmp_path: Path) -> None:
    class Adapted(nn.Module):
        def __init__(self, inner: nn.Linear) -> None:
            super().__init__()
            self.weight = inner.weight
            self.lora_A = nn.Parameter(torch.randn(2, inner.in_features) / 8)
            self.lora_B = nn.Parameter(torch.randn(inner.out_features, 2) / 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.weight) + x @ self.lora_A.T @ self.lora_B.T

    ids, mask = prompts()
    sequences = write(tmp_path / "engine", llama(), ids, mask)
    trainer = llama()
    trainer.model.layers[1].self_attn.v_proj = Adapted(trainer.model.layers[1].self_attn.v_proj)
    score(tmp_path / "trainer", trainer, sequences, whole_mask(mask))
    found = aligned(tmp_path).parting
    assert found is not None and found.value.text == "'model.layers.1.self_attn.v_proj' output"
    assert "v_proj.lora_A is in the trainer alone (an adapter that was not merged?)" in found.text


class Adapted(nn.Module):
    """A projection with an adapter beside it, as PEFT makes it."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.base_layer = inner.requires_grad_(False)
        self.lora_A = nn.Linear(inner.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, inner.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.base_layer(x) + self.lora_B(self.lora_A(x)))


class Wrapped(nn.Module):
    """A model inside another one, of which it calls the forward alone, as PEFT does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = nn.ModuleDict({"model": model})

    def forward(self, *args: Any, **more: Any) -> Any:
        return self.base_model["model"].forward(*args, **more)


@pytest.mark.parametrize("prefix", ["", "base_model.model."])
@pytest.mark.parametrize("left_out", [None, 2])
def test_an_adapter_that_was_merged_is_no_fault_and_one_that_was_not_is_named(
    left_out: int | None, prefix: str, tmp_path: Path, cli: Cli
) -> None:
    (ids, mask), engine, trainer = prompts(), llama(num_hidden_layers=4), llama(num_hidden_layers=4)
    trainer.requires_grad_(False)
    for number in range(4):
        attention = trainer.model.layers[number].self_attn
        attention.v_proj = adapted = Adapted(attention.v_proj)
        with torch.no_grad():
            if number != left_out:
                own = engine.model.layers[number].self_attn.v_proj.weight
                own.add_(adapted.lora_B.weight @ adapted.lora_A.weight)
    leaves = "module='' site=input keep=tokens; leaf=yes site=output keep=tokens; site=param keep=fingerprint"
    sequences = write(tmp_path / "engine", engine, ids, mask, rules=leaves)
    trainer = Wrapped(trainer) if prefix else trainer
    _train(tmp_path / "trainer", trainer, 1, rules=leaves, texts=(sequences, whole_mask(mask)))
    found, printed = aligned(tmp_path), cli("align", tmp_path / "trainer", tmp_path / "engine")
    assert printed.exit_code == int(not found.is_fine)
    assert ", inside modules that the engine does not split" in printed.out and "--rename" not in printed.out
    if left_out is None:
        assert (
            found.is_fine
            and "note    weights: 0 of " in printed.out
            and "8 of the trainer alone are merged" in printed.out
        )
    else:
        assert found.parting is not None and "layers.2.self_attn.v_proj.lora_A.weight is in" in found.told, found.told
        assert f"merged are the adapters of '{prefix}model.layers.0.self_attn.v_proj'" in found.told
        assert "layers.0" not in found.told.partition("; merged")[0]
        assert f"first: {prefix}model.layers.2." in printed.out
        assert "2 of 6 comparable parameters" in printed.out and "most of the engine's" not in printed.out


def test_an_engine_inside_a_wrapper_is_paired_with_the_model(tmp_path: Path) -> None:
    (ids, mask), engine = prompts(), llama()
    with torch.no_grad():
        engine.model.layers[1].mlp.up_proj.weight.mul_(1.5)
    score(tmp_path / "engine", Wrapped(engine), ids, mask)
    score(tmp_path / "trainer", llama(), ids, mask)
    found = aligned(tmp_path)
    assert found.told.startswith("trainer and engine part at 'model.layers.1.mlp.up_proj' output"), found.told
    assert sum(state.state == "equal" for state in found.weights) == len(found.weights) - 1


def test_a_parameter_that_the_trainer_does_not_update_is_not_comparable(tmp_path: Path, cli: Cli) -> None:
    write(tmp_path / "engine", llama(), *prompts())
    trainer = llama()
    trainer.model.embed_tokens.requires_grad_(False)
    _train(tmp_path / "trainer", trainer, 1)
    states = {one.name: one.state for one in aligned(tmp_path).weights}
    assert states.pop("model.embed_tokens.weight") == "not comparable" and set(states.values()) == {"equal"}
    printed = cli("align", tmp_path / "trainer", tmp_path / "engine", "--weights")
    assert printed.exit_code == 0 and "1 are not comparable (not updated, or not recorded)" in printed.out


def test_the_command_answers_in_a_sentence_and_in_json(tmp_path: Path, cli: Cli) -> None:
    ids, mask = prompts()
    engine = llama()
    with torch.no_grad():
        engine.model.layers[1].self_attn.q_proj.weight.mul_(1.05)
    sequences = write(tmp_path / "engine", engine, ids, mask)
    score(tmp_path / "trainer", llama(), sequences, whole_mask(mask))
    printed = cli("align", tmp_path / "trainer", tmp_path / "engine")
    assert printed.exit_code == 1
    assert "trainer and engine part at 'model.layers.1.self_attn.q_proj' output (Linear), by up to 0.048" in printed.out
    assert "q_proj.weight equals the trainer's parameter at no recorded step" in printed.out
    printed = cli("align", tmp_path / "trainer", tmp_path / "engine", "--json")
    members = printed.json
    assert members["parting"]["value"]["module_path"] == "model.layers.1.self_attn.q_proj"
    assert members["parting"]["reason"] == "weights" and not members["is_fine"]


def test_the_preset_keeps_enough_to_name_a_fault_at_few_bytes(tmp_path: Path) -> None:
    ids, mask = prompts()
    engine = llama()
    with torch.no_grad():
        engine.model.layers[1].mlp.up_proj.weight.mul_(1.05)
    preset = {"rules": "", "preset": "rollout"}
    sequences = write(tmp_path / "engine", engine, ids, mask, **preset)
    score(tmp_path / "trainer", llama(), sequences, whole_mask(mask), settings=preset)
    found = aligned(tmp_path)
    assert found.parting is not None and found.parting.value.text == "'model.layers.1.mlp.up_proj' output"
    assert found.parting.reason == "weights" and found.logprobs is not None
    run = recorder.open_run(tmp_path / "engine")
    assert set(run.table(["site"]).column("site").to_pylist()) == {"param"}, "no row of a value has its tensor"
    blocks = list(token_blocks(run.writers))
    assert sum(block.numbers.nbytes for block in blocks) < found.num_tokens * 64 * 40, "a sketch has 32 bytes"
    assert all(len(block.calls) == 5 for block in blocks if block.name == "output"), "a block has many calls"


def test_modules_with_other_names_in_the_engine_are_paired_by_a_file(tmp_path: Path, cli: Cli) -> None:
    class Small(nn.Module):
        def __init__(self, first: str, second: str) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed = nn.Embedding(16, 8)
            self.names = first, second
            self.add_module(first, nn.Linear(8, 8))
            self.add_module(second, nn.Linear(8, 16))

        def forward(self, tokens: torch.Tensor) -> Any:
            first, second = (self.get_submodule(name) for name in self.names)
            return second(first(self.embed(tokens)).relu())

    engine = Small("fc1", "fc2")
    with torch.no_grad():
        engine.get_submodule("fc1").weight.mul_(1.01)  # type: ignore[operator]
    tokens = torch.randint(16, (2, 5), generator=torch.Generator().manual_seed(1))
    for side, model in (("trainer", Small("up", "down")), ("engine", engine)):
        with recorder.attach(model, enabled=True, dir=str(tmp_path / side), roots="any", rules=RULES):
            model(tokens)
    alone = cli("align", tmp_path / "trainer", tmp_path / "engine")
    assert "2 of 4 modules are in the trainer alone: 'up', 'down'; --rename pairs modules" in alone.out
    names = tmp_path / "names.txt"
    names.write_text("up = fc1\ndown = fc2\n")
    found = cli("align", tmp_path / "trainer", tmp_path / "engine", "--rename", names)
    assert "trainer and engine part at 'up' output (Linear)" in found.out
    assert "up.weight equals the trainer's parameter at no recorded" in found.out


def test_positions_that_are_none_are_left_out(tmp_path: Path) -> None:
    ids = torch.randint(3, 64, (2, 3), generator=torch.Generator().manual_seed(1))
    _named(tmp_path / "engine", llama(), ["a", "b"], ids, torch.tensor([[0, 1, 2], [-1, 1 << 60, 2]]))
    _named(tmp_path / "trainer", llama(), ["a", "b"], ids, torch.arange(3).expand(2, 3))
    found = aligned(tmp_path)
    assert found.num_tokens == 4 and found.joined_by == "names"


def test_speculated_tokens_that_are_thrown_away_are_no_difference(tmp_path: Path) -> None:
    ids = torch.randint(3, 64, (1, 6), generator=torch.Generator().manual_seed(1))
    model = llama()
    attached = recorder.attach(model, enabled=True, dir=str(tmp_path / "engine"), roots="any", rules=RULES)
    with attached:
        for written, first in ((ids, 0), (torch.tensor([[9, 9]]), 6), (torch.tensor([[11]]), 6)):
            with recorder.tokens(positions=torch.arange(first, first + written.shape[1])[None]):
                model(input_ids=torch.cat([ids, written], 1)[:, :6] if first == 0 else written, use_cache=False)
    whole = torch.cat([ids, torch.tensor([[11]])], 1)
    with recorder.attach(model, enabled=True, dir=str(tmp_path / "trainer"), roots="any", rules=RULES):
        model(input_ids=whole)
    found = aligned(tmp_path)
    assert found.num_tokens == 7 and not found.tokens and found.num_samples == 1


@pytest.mark.parametrize("rules", ["site=output keep=tensor", "site=input keep=stats"])
def test_runs_without_tokens_are_refused_with_what_to_record(rules: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(9, 4))
    for side in ("trainer", "engine"):
        with recorder.attach(model, enabled=True, dir=str(tmp_path / side), rules=rules):
            model(torch.tensor([[3, 1, 4]]))
    with pytest.raises(LookupFailedError, match="the tokens were recorded of no call; record with preset=rollout"):
        aligned(tmp_path)
