"""Models that other people wrote, as small as their constructors allow, with random weights: nothing is downloaded.

Each is trained as its users train it: the model's own loss where it has one. Must never change a model's code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from tests.rigs.kernels import vision

SEED = 20_260_101
NUM_STEPS = 2


class Case(NamedTuple):
    """A model and its loss on a batch that depends on the step alone."""

    model: nn.Module
    loss: Callable[[int], torch.Tensor]


class Trained(NamedTuple):
    """All that training leaves behind, and the gradients of its last step."""

    losses: list[torch.Tensor]
    params: dict[str, torch.Tensor]
    grads: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    random_state: torch.Tensor


def train(make: Callable[[], Case]) -> Trained:
    """Two steps of a fresh model; any number of times in one process, to the same bits."""
    torch.manual_seed(SEED)
    model, loss_of = make()
    torch.manual_seed(SEED + 1)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    losses = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = loss_of(step)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
    return Trained(
        losses=losses,
        params={name: value.detach() for name, value in model.named_parameters()},
        grads={name: value.grad for name, value in model.named_parameters() if value.grad is not None},
        buffers=dict(model.named_buffers()),
        random_state=torch.get_rng_state(),
    )


def _generator(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(SEED + 100 + step)


def resnet18() -> Case:
    model = vision().models.resnet18(weights=None, num_classes=5)

    def loss(step: int) -> torch.Tensor:
        own = _generator(step)
        images, labels = torch.rand(2, 3, 32, 32, generator=own), torch.randint(0, 5, (2,), generator=own)
        return nn.functional.cross_entropy(model(images), labels)

    return Case(model, loss)


def deeplabv3() -> Case:
    """Its output is a dict, and an auxiliary head has a loss of its own."""
    make = vision().models.segmentation.deeplabv3_mobilenet_v3_large
    model = make(weights=None, weights_backbone=None, num_classes=3, aux_loss=True)

    def loss(step: int) -> torch.Tensor:
        own = _generator(step)
        images, classes = torch.rand(2, 3, 32, 32, generator=own), torch.randint(0, 3, (2, 32, 32), generator=own)
        found = model(images)
        of = nn.functional.cross_entropy
        return of(found["out"], classes) + 0.4 * of(found["aux"], classes)

    return Case(model, loss)


def maskrcnn() -> Case:
    """It takes a list of images and a list of dicts, and gives its losses as a dict."""
    detection = vision().models.detection
    backbone = detection.backbone_utils.resnet_fpn_backbone(
        backbone_name="resnet18", weights=None, trainable_layers=5, norm_layer=nn.BatchNorm2d
    )
    few = {"rpn_batch_size_per_image": 16, "box_batch_size_per_image": 4}
    few |= {"rpn_pre_nms_top_n_train": 32, "rpn_post_nms_top_n_train": 8}
    model = detection.MaskRCNN(backbone, num_classes=3, min_size=64, max_size=64, **few)

    def loss(step: int) -> torch.Tensor:
        own = _generator(step)
        images = [torch.rand(3, 64, 48, generator=own), torch.rand(3, 48, 64, generator=own)]
        targets = []
        for image in images:
            mask = torch.zeros(1, *image.shape[1:], dtype=torch.uint8)
            mask[:, 8:40, 8:40] = 1
            box = torch.tensor([[8.0, 8.0, 40.0, 40.0]])
            targets.append({"boxes": box, "labels": torch.tensor([1 + step % 2]), "masks": mask})
        losses: dict[str, torch.Tensor] = model(images, targets)
        return torch.stack(list(losses.values())).sum()

    return Case(model, loss)


_SMALL: Mapping[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


def _tokens(step: int, length: int = 8) -> torch.Tensor:
    return torch.randint(1, 64, (2, length), generator=_generator(step))


def llama() -> Case:
    """A decoder: tied weights, a cache of keys and values among arguments and outputs."""
    vision()  # which transformers imports where it is installed
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**_SMALL, tie_word_embeddings=True))
    return Case(model, lambda step: model(input_ids=_tokens(step), labels=_tokens(step)).loss)


def t5() -> Case:
    """Encoder and decoder, with one embedding that is used four times."""
    vision()
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))
    return Case(model, lambda step: model(input_ids=_tokens(step), labels=_tokens(step + 9, 5)).loss)


def mixtral() -> Case:
    """A mixture of experts: fused parameters, and a router that leaves some experts without a token."""
    vision()
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**_SMALL, num_local_experts=16, num_experts_per_tok=1, output_router_logits=True)
    model = MixtralForCausalLM(config)
    return Case(model, lambda step: model(input_ids=_tokens(step)[:1], labels=_tokens(step)[:1]).loss)


CASES: Mapping[str, Callable[[], Case]] = {
    make.__name__: make for make in (resnet18, deeplabv3, maskrcnn, llama, t5, mixtral)
}
