"""Tensor-parallel layers. Each is written once for every tensor mode (1d, 2d, 3d, ...).

Model code names the roles of linears, inward and outward, never the mode. Layers take the process groups of a mesh,
sizes, and activations as a rank stores them. They are torch modules and functions that hold this rank's shards,
communicate with the other ranks, and leave complete gradients on each parameter. docs/architecture.md has the theory
and the tables of cuts per axis; README.md lists the layers.

    groups = Groups(Mesh(tensor=TensorMesh(y=2, mode="1d")))
    up = Linear(groups, 256, 1024, role="inward")      # residual -> inner features
    down = Linear(groups, 1024, 256, role="outward")   # inner features -> residual
    initialize(up, groups, seed=1234, prefix="up.")

Layers pass on the residual stream as a rank stores it, [batch, sequence, hidden]. Token ids and labels enter whole.
"""

if __name__ != "dslpar.layers":
    raise ImportError(
        f"import this package as dslpar.layers, not as {__name__}: a second copy of its classes would not match"
    )

from dslpar.core.requirements import explain_missing

if _MISSING := explain_missing("dslpar.layers", "torch"):
    raise ImportError(_MISSING, name="torch")

from dslpar.layers.activation_sharding import from_inner, from_residual, to_inner, to_residual
from dslpar.layers.affine import Affine
from dslpar.layers.attention import Attention
from dslpar.layers.batch_norm import BatchNorm
from dslpar.layers.block import MLP, Block, Form
from dslpar.layers.colossalai import Linear1D, Linear2D, Linear2p5D, Linear3D
from dslpar.layers.dropout import Dropout
from dslpar.layers.embedding import Embedding, Head, PositionEmbedding
from dslpar.layers.linear import Linear
from dslpar.layers.loss import IGNORE_INDEX, accuracy, cross_entropy
from dslpar.layers.mixture import Mixture, MixtureBlock
from dslpar.layers.norm import LayerNorm, RMSNorm
from dslpar.layers.parameter import Init, Layer, gather, initialize, mark_owners, normal, parameter, placement_of
from dslpar.layers.patches import PatchEmbedding
from dslpar.layers.placement import Placement
from dslpar.layers.pooling import first_token, mean_of_tokens
from dslpar.layers.rotary import Rotary
from dslpar.layers.token_linear import TokenLinear

__all__ = [
    "IGNORE_INDEX", "MLP", "Affine", "Attention", "BatchNorm", "Block", "Dropout", "Embedding", "Form", "Head", "Init",
    "Layer", "LayerNorm", "Linear", "Linear1D", "Linear2D", "Linear2p5D", "Linear3D", "Mixture", "MixtureBlock",
    "PatchEmbedding", "Placement", "PositionEmbedding", "RMSNorm", "Rotary", "TokenLinear", "accuracy", "cross_entropy",
    "first_token", "from_inner", "from_residual", "gather", "initialize", "mark_owners", "mean_of_tokens", "normal",
    "parameter", "placement_of", "to_inner", "to_residual",
]  # fmt: skip
