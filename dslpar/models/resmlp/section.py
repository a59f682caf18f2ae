"""The config section of ResMLP: its keys, their help, and their names in other frameworks."""

from __future__ import annotations

from dslpar.schema.fields import key, section
from dslpar.schema.sections import ImageModel
from dslpar.schema.types import PositiveFloat, PositiveInt


@section
class ResMLP(ImageModel):
    """Image classification by residual blocks that mix the patches of an image, then the features."""

    num_classes: PositiveInt = key(default=1000, resume="refused", synonyms="num_labels")
    """Number of image classes."""
    ffn_hidden_size: PositiveInt | None = key(default=None, resume="refused", synonyms="mlp_ratio intermediate_size")
    """Features of the MLP's hidden layer; default: 4 * hidden_size."""
    layer_scale: PositiveFloat = key(default=0.1, resume="refused", aliases="init_scale", synonyms="init_values")
    """Initial scale of each branch; the paper has 0.1 for 12 layers, 1e-5 for 24, 1e-6 for 36."""
    init_std: PositiveFloat = key(default=0.02, resume="refused")
    """Standard deviation of initial weights."""

    @property
    def ffn_size(self) -> int:
        """Features of the MLP's hidden layer."""
        return self.ffn_hidden_size or 4 * self.hidden_size
