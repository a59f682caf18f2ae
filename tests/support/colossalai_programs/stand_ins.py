"""Small data sets, models and losses, for what the programs take from torchvision, timm, titans and their own files."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

CLASSES, VOCAB, LENGTH = 4, 32, 8


class Images(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Pictures whose brightest channel-quarter is their class."""

    def __init__(self, num: int = 32, train: bool = True) -> None:
        generator = torch.Generator().manual_seed(int(train))
        self.labels = torch.randint(CLASSES, (num,), generator=generator)
        self.pictures = 0.1 * torch.randn(num, 3, 8, 8, generator=generator)
        for picture, label in zip(self.pictures, self.labels.tolist(), strict=True):
            picture[:, 2 * label : 2 * label + 2] += 1

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.pictures[index], self.labels[index]


class Texts(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Token ids that count up, as ({"input_ids", "attention_mask"}, labels)."""

    def __init__(self, num: int = 32, seq_len: int = LENGTH) -> None:
        self.num, self.seq_len = num, seq_len

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> Any:
        ids = (torch.arange(self.seq_len) + index) % VOCAB
        return {"input_ids": ids, "attention_mask": torch.ones(self.seq_len)}, ids


def small_resnet(num_classes: int = CLASSES) -> nn.Module:
    return SmallResNet(num_classes)


class SmallResNet(nn.Module):
    """The parts of torchvision's ResNet that the programs name."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv1, self.relu = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()
        self.layer1 = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d((4, 1)), nn.Linear(32, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer1(self.relu(self.conv1(x)))
        return self.fc(self.avgpool(x).flatten(1))


class Mixer(nn.Sequential):
    """A model whose children run one after the other."""

    def __init__(self, width: int = 16) -> None:
        super().__init__(
            nn.Flatten(), nn.Linear(192, width), nn.GELU(), nn.Linear(width, width), nn.Linear(width, CLASSES)
        )


def mixer() -> nn.Sequential:
    return nn.Sequential(*Mixer())


class SmallGPT(nn.Module):
    """A causal language model of `embed`, `blocks`, `norm` and `head`."""

    def __init__(self, hidden_size: int = 16, depth: int = 2, checkpoint: bool = False, num_chunks: int = 1) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, hidden_size)
        self.blocks = nn.ModuleList([Mean(hidden_size) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(hidden_size), nn.Linear(hidden_size, VOCAB)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids)
        x = x if attention_mask is None else x * attention_mask.unsqueeze(-1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Mean(nn.Module):
    """A block that mixes each token with those before it."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        counts = torch.arange(1, x.shape[1] + 1, device=x.device).unsqueeze(-1)
        return x + functional.gelu(self.linear(x.cumsum(1) / counts))


class GPTLMLoss(nn.Module):
    """Cross-entropy of the next token."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class MixupLoss(nn.Module):
    """Loss between two labels per sample, as with mixup."""

    def __init__(self, loss_fn_cls: type[nn.Module]) -> None:
        super().__init__()
        self.loss_fn = loss_fn_cls()

    def forward(self, outputs: Tensor, targets_a: Tensor, targets_b: Tensor, lam: Tensor) -> Tensor:
        share = lam.mean()
        return share * self.loss_fn(outputs, targets_a) + (1 - share) * self.loss_fn(outputs, targets_b)
