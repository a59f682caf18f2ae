"""The section of a config that describes a ResidualMLP."""

from __future__ import annotations

from dslpar.schema.fields import key, section
from dslpar.schema.sections import TokenModel
from dslpar.schema.types import Choice, LayerCount, PositiveInt


@section
class ResidualMLP(TokenModel):
    """MLPs one after the other, each token by itself."""

    num_layers: LayerCount = key(resume="refused")
    """MLPs."""
    width: PositiveInt = key(resume="refused", synonyms="mlp_width")
    """Features of the residual stream, and of each MLP's hidden layer."""
    vocab_size: PositiveInt = key(resume="refused")
    """Tokens of the vocabulary, before padding."""
    max_seq_len: PositiveInt = key(resume="refused")
    """The longest sequence, in tokens."""
    activation: Choice = key(default="gelu", resume="refused", choices=("gelu", "swiglu"))
    """Of the MLP."""
