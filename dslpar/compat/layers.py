"""ColossalAI's generic layers, which find their groups in the global context: `colossalai.nn.Linear(in, out)`.

    self.dense_1 = col_nn.Linear(256, 1024)          # its input is the residual stream, or whole
    self.dense_2 = col_nn.Linear(1024, 256)          # its input is the output of a Linear that did not gather

Without tensor parallelism they are torch.nn's modules. Otherwise they are those of dslpar.layers. As in ColossalAI's 1D
layers, linears alternate: after one that widens to inner features comes the one that returns to the residual stream.
Given `Groups` first, each is the layer of dslpar.layers itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dslpar import layers
from dslpar.compat.context import global_context
from dslpar.distributed.groups import Groups
from dslpar.layers.dropout import shard_rng
from dslpar.layers.placement import inner_cuts


class _State:
    """State of the alternation: the next linear takes the residual stream, or inner features."""

    inner_features: int | None = None


def begin_model() -> None:
    """Begin anew: the next linear takes the residual stream."""
    _State.inner_features = None


def _groups() -> Groups | None:
    """Return the groups of a run with tensor parallelism; None without."""
    groups = global_context.run.groups
    return groups if groups.tensor.size > 1 else None


def Linear(in_features: Any, out_features: Any, bias: Any = True, *args: Any, **kwargs: Any) -> nn.Module:  # noqa: N802
    """Return a linear: the first of two from the residual stream to inner features, the second one back.

    gather_output: all features on every rank; the next linear is then again the first of two. Initializers have no
    effect on tensor-parallel layers, which the engine draws by name.
    """
    if isinstance(in_features, Groups):
        return layers.Linear(in_features, out_features, bias, *args, **kwargs)
    groups, gathers = _groups(), bool(kwargs.get("gather_output"))
    if groups is None:
        return nn.Linear(in_features, out_features, bias)
    if _State.inner_features == in_features:
        _State.inner_features = None
        return layers.Linear(groups, in_features, out_features, role="outward", bias=bias)
    _State.inner_features = None if gathers else out_features
    return layers.Linear(groups, in_features, out_features, role="inward", bias=bias, gather_output=gathers)


def Classifier(in_features: int, num_classes: int, weight: Any = None, bias: bool = True, **_: Any) -> nn.Module:  # noqa: N802
    """Return a linear to classes, whose logits are whole on every rank."""
    groups = _groups()
    _State.inner_features = None
    if groups is None:
        layer = nn.Linear(in_features, num_classes, bias)
        layer.weight = layer.weight if weight is None else weight
        return layer
    if weight is not None:
        raise ValueError("weight: a tied head is the same module: call the Embedding with the residual stream")
    return _WholeLogits(groups, in_features, num_classes, bias)


class _WholeLogits(nn.Module):
    """A head whose logits are gathered: [batch, classes], equal on all ranks of a tensor group."""

    def __init__(self, groups: Groups, in_features: int, num_classes: int, bias: bool) -> None:
        super().__init__()
        self.groups, self.num_classes = groups, num_classes
        self.head = layers.Head(groups, in_features, num_classes, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map this rank's residual to whole logits."""
        return layers.from_inner(self.groups, self.head(x))[..., : self.num_classes]


def Embedding(num_embeddings: int, embedding_dim: int, padding_idx: int | None = None, **_: Any) -> nn.Module:  # noqa: N802
    """Return a token table; ids are whole on every rank."""
    groups = _groups()
    _State.inner_features = None
    if groups is None:
        return nn.Embedding(num_embeddings, embedding_dim, padding_idx)
    return layers.Embedding(groups, num_embeddings, embedding_dim, padding_idx=padding_idx)


def LayerNorm(normalized_shape: int, eps: float = 1e-05, bias: bool = True, **_: Any) -> nn.Module:  # noqa: N802
    """Return a layer norm of the residual stream."""
    groups = _groups()
    _State.inner_features = None
    if groups is None:
        return nn.LayerNorm(normalized_shape, eps, bias=bias)
    return layers.LayerNorm(groups, normalized_shape, eps=eps, bias=bias)


def Dropout(p: float = 0.5, inplace: bool = False) -> nn.Module:  # noqa: N802
    """Return a dropout of what the layer before it returns: the residual stream, or inner features."""
    groups = _groups()
    if groups is None:
        return nn.Dropout(p, inplace)
    return layers.Dropout(groups, p) if _State.inner_features is None else _InnerDropout(groups, p)


class _InnerDropout(layers.Dropout):
    """Dropout of stored inner features, with other masks on ranks that hold other features."""

    def forward(self, x: Tensor) -> Tensor:
        """Drop elements of this rank's piece [batch/x, sequence, F/y]."""
        if not self.training or self.p == 0:
            return x
        with shard_rng(self.groups, inner_cuts(self.groups.tensor), x.device):
            return nn.functional.dropout(x, self.p)


def PatchEmbedding(  # noqa: N802
    img_size: int, patch_size: int, in_chans: int, embed_size: int, flatten: bool = True, **_: Any
) -> nn.Module:
    """Return the patches of whole images, with a class token and learned positions, as the residual stream."""
    if not flatten:
        raise ValueError("flatten=False is not here: patches are a sequence")
    _State.inner_features = None
    return _Patches(_groups(), img_size, patch_size, in_chans, embed_size)


class _Patches(nn.Module):
    def __init__(self, groups: Groups | None, image: int, patch: int, channels: int, hidden: int) -> None:
        super().__init__()
        num_patches = (image // patch) ** 2
        self.patches: nn.Module
        self.positions: nn.Module
        if groups is None:
            self.patches = _DensePatches(image, patch, channels, hidden)
            self.positions = _DensePositions(num_patches + 1, hidden)
        else:
            self.patches = layers.PatchEmbedding(groups, image, patch, channels, hidden, class_token=True)
            self.positions = layers.PositionEmbedding(groups, num_patches + 1, hidden)

    def forward(self, images: Tensor) -> Tensor:
        """Map [batch, channels, height, width] to [batch, 1 + patches, hidden], as the mode stores it."""
        x: Tensor = self.positions(self.patches(images))
        return x


class _DensePatches(nn.Module):
    def __init__(self, image: int, patch: int, channels: int, hidden: int) -> None:
        super().__init__()
        self.projection = nn.Conv2d(channels, hidden, kernel_size=patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, hidden))

    def forward(self, images: Tensor) -> Tensor:
        x = self.projection(images).flatten(2).transpose(1, 2)
        return torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1)


class _DensePositions(nn.Module):
    def __init__(self, length: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, length, hidden))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """torch's, on the whole logits of `Classifier`; `reduction` False is 'none', as in ColossalAI."""

    def __init__(self, reduction: bool | str = True, **kwargs: Any) -> None:
        named = reduction if isinstance(reduction, str) else "mean" if reduction else "none"
        super().__init__(reduction=named, **kwargs)


def partition_batch(input_: Any) -> Any:
    """Return this rank's samples of a whole batch, or of a dict of them, as 2d, 2.5d and 3d cut the residual stream."""
    if isinstance(input_, dict):
        return {name: partition_batch(value) for name, value in input_.items()}
    groups = global_context.run.groups
    for axis in _batch_axes(groups):
        size, index = groups.axis(axis).size, groups.axis(axis).index
        input_ = input_.chunk(size)[index] if size > 1 else input_
    return input_


def _batch_axes(groups: Groups) -> tuple[str, ...]:
    return {"2d": ("q",), "2.5d": ("d", "q"), "3d": ("q", "y")}.get(str(groups.tensor.mode), ())
