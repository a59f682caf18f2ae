"""The model of dslpar.models.GPT without dslpar: torch layers and DeepSpeed alone.

It is the reference of benchmarks.overhead, with the same sizes, optimizer and groups, batch, and partition into stages.
Its parameters are in dslpar's order, so that weights can be copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import Tensor, nn
from torch.nn import functional

MicroBatch = tuple[Tensor, Tensor]


class Sizes(NamedTuple):
    """Sizes of the model and of a step."""

    layers: int = 4
    hidden: int = 256
    heads: int = 8
    vocab: int = 256
    sequence: int = 128
    micro: int = 4
    accumulation: int = 4


class Tokens(nn.Module):
    """The token table."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(sizes.vocab, sizes.hidden).normal_(std=0.02))

    def forward(self, ids: Tensor) -> Tensor:
        """[batch, sequence] to [batch, sequence, hidden]."""
        return functional.embedding(ids, self.weight)


def head(tokens: Tokens, x: Tensor) -> Tensor:
    """Logits by the token table."""
    return functional.linear(x, tokens.weight)


class Positions(nn.Module):
    """Adds the position table."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(sizes.sequence, sizes.hidden).normal_(std=0.02))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] to the same."""
        return x + self.weight[: x.shape[1]]


class Block(nn.Module):
    """A pre-norm block."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        hidden = sizes.hidden
        self.heads = sizes.heads
        self.norm1 = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.norm2 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] to the same."""
        batch, sequence, hidden = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, sequence, 3, self.heads, hidden // self.heads)
        q, k, v = qkv.transpose(1, 3).unbind(2)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, sequence, hidden))
        up: Tensor = self.up(self.norm2(x))
        return torch.add(x, self.down(functional.gelu(up)))


class GPT(nn.Module):
    """The whole model."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = Tokens(sizes)
        self.positions = Positions(sizes)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.hidden)

    def forward(self, ids: Tensor) -> Tensor:
        """[batch, sequence] to logits."""
        x = self.positions(self.tokens(ids))
        for block in self.blocks:
            x = block(x)
        return head(self.tokens, self.norm(x))


def stages(sizes: Sizes, count: int) -> PipelineModule:
    """Return the same model as a pipeline; `uniform` partitions it as dslpar's config does."""
    specs = [
        TiedLayerSpec("tokens", Tokens, sizes, tied_weight_attr=["weight"]),
        LayerSpec(Positions, sizes),
        *(LayerSpec(Block, sizes) for _ in range(sizes.layers)),
        LayerSpec(nn.LayerNorm, sizes.hidden),
        TiedLayerSpec("tokens", Tokens, sizes, forward_fn=head, tied_weight_attr=["weight"]),
    ]
    with torch.no_grad():
        return PipelineModule(specs, num_stages=count, loss_fn=loss, partition_method="uniform")


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss over tokens."""
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def build(sizes: Sizes, world: int) -> Any:
    """Return DeepSpeed's engine; with more than one rank, each is a stage."""
    module = GPT(sizes) if world == 1 else stages(sizes, world)
    config = {
        "train_batch_size": sizes.micro * sizes.accumulation,
        "train_micro_batch_size_per_gpu": sizes.micro,
        "gradient_accumulation_steps": sizes.accumulation,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.01, "torch_adam": True}},
    }
    groups = [
        {"params": [p for p in module.parameters() if p.dim() >= 2]},
        {"params": [p for p in module.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    engine, *_ = deepspeed.initialize(model=module, model_parameters=groups, config=config, dist_init_required=False)
    return engine


def train_batch(engine: Any, batches: Sequence[MicroBatch]) -> float:
    """Take one step, and return its loss."""
    if isinstance(engine.module, PipelineModule):
        return float(engine.train_batch(iter(batches)))
    losses = []
    for ids, labels in batches:
        value = loss(engine(ids), labels)
        engine.backward(value)
        engine.step()
        losses.append(value.detach())
    return float(torch.stack(losses).mean())


def copy_weights(module: GPT, weights: Iterator[Tensor]) -> None:
    """Copy dslpar's weights in order. Only shapes may differ: q, k, v have one dim more."""
    with torch.no_grad():
        for mine, theirs in zip(module.parameters(), weights, strict=True):
            mine.copy_(theirs.view_as(mine))
