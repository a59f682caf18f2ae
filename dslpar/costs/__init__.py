"""Costs of a model's layers on one rank in closed form: memory, traffic and compute. The package does not import torch.

Modules share the letters of docs/architecture.md, "The cuboid": ranks of a tensor group form a grid with axes d, q, y
and z. d and q split tokens, y splits inner features (heads, the MLP's hidden layer, the vocabulary), and z splits the
features of the residual stream. `x` is d * q. An *inward* linear maps the residual stream to inner features, and an
*outward* linear maps them back. A *panel* is the part of a matrix that a rank multiplies, after it was gathered from
the pieces that ranks store.
"""
