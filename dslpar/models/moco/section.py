"""The config section of MoCo v3: its keys, their help, and their names in other frameworks."""

from __future__ import annotations

import math
from typing import ClassVar

from dslpar.schema.fields import key, section
from dslpar.schema.sections import ImageModel
from dslpar.schema.types import Fraction, PositiveFloat, PositiveInt


@section
class MoCo(ImageModel):
    """Contrastive learning: match the two views of an image among all views of a global batch."""

    DATA_TYPES: ClassVar[tuple[str, ...]] = ()  # a program makes two views of an image
    INPUTS: ClassVar[tuple[str, ...]] = ("view", "other_view")
    TOKENS_BESIDE_PATCHES: ClassVar[int] = 1  # the class token

    num_heads: PositiveInt = key(resume="refused", synonyms="n_head num_attention_heads")
    """Number of attention heads; hidden_size must be a multiple of it."""
    ffn_hidden_size: PositiveInt | None = key(default=None, resume="refused", synonyms="mlp_ratio intermediate_size")
    """Features of the MLPs' hidden layers; default: 4 * hidden_size."""
    projection_size: PositiveInt = key(default=256, resume="refused", synonyms="dim moco_dim")
    """Features of the projections that are compared."""
    projection_hidden_size: PositiveInt = key(default=4096, resume="refused", synonyms="mlp_dim moco_mlp_dim")
    """Features of the hidden layers of the projection and prediction heads."""
    temperature: PositiveFloat = key(default=0.2, resume="reported", synonyms="T moco_t")
    """Divisor of the similarities."""
    momentum: Fraction = key(default=0.99, resume="reported", synonyms="m moco_m")
    """Share of the momentum encoder that a step keeps, at the start; it rises to 1 along half a cosine."""
    layernorm_eps: PositiveFloat = key(default=1e-6, resume="refused")
    """Added to the variance before the square root."""

    def momentum_at(self, progress: float) -> float:
        """Return the share that a step keeps; `progress`, from 0 to 1, is the share of all steps that are done."""
        return 1 - (1 - self.momentum) * (1 + math.cos(math.pi * progress)) / 2

    @property
    def ffn_size(self) -> int:
        """Features of the MLPs' hidden layers."""
        return self.ffn_hidden_size or 4 * self.hidden_size
