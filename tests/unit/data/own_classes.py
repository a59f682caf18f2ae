"""Data classes that the tests' configs name."""

from __future__ import annotations

import torch
from torch import Tensor


class Rows:
    """Pairs of ids and next ids."""

    fingerprint = "v1"

    def __init__(self, count: int, seq_len: int = 16) -> None:
        self.ids = torch.randint(256, (count, seq_len + 1), generator=torch.Generator().manual_seed(count))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.ids[index, :-1], self.ids[index, 1:]


class Mappings(Rows):
    """Ids and labels by name, as in transformers."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:  # type: ignore[override]
        ids = self.ids[index, : 8 + index % 8]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


class Strings:
    """Items that are no pairs."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> str:
        return "text"
