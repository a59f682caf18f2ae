"""Patch embedding of images as in ViT: one linear of each patch's pixels, with or without a class token.

Letters: S patches per image, P pixels per patch (over all channels), H residual features. The images are whole on every
rank. Their pixels are treated as inner activations, so the matrix (H, P) belongs to an outward linear. Its work is cut
like that of any other product, and the result is the residual as the mode stores it. It equals torch's Conv2d whose
kernel size and stride are the patch size, with the weight `conv.weight.flatten(1)`. (ViT: Dosovitskiy et al., arXiv
2010.11929.)
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from dslpar.core.catalog import raise_finding
from dslpar.distributed.groups import Groups
from dslpar.layers import placement
from dslpar.layers.activation_sharding import to_inner
from dslpar.layers.linear import Linear
from dslpar.layers.parameter import GPT2, Init, Layer, Shared, parameter


class PatchEmbedding(Layer):
    """Embed the patches of square images; with `class_token`, prepend a learned token to each image.

    Raises:
        DslparError: the image size is not divisible by the patch size.
    """

    def __init__(
        self,
        groups: Groups,
        image_size: int,
        patch_size: int,
        num_channels: int,
        hidden_size: int,
        *,
        bias: bool = True,
        class_token: bool = False,
        init: Init = GPT2,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__(groups, layer_idx)
        if image_size % patch_size:
            message = f"image_size {image_size} is not divisible by patch_size {patch_size}"
            raise_finding("TEN226", message, f"patch_size={_nearest(image_size, patch_size)}", key="model.patch_size")
        self.shape, self.patch_size = (num_channels, image_size, image_size), patch_size
        pixels = num_channels * patch_size**2
        self.projection = Linear(groups, pixels, hidden_size, role="outward", bias=bias, init=init)
        vector = placement.residual_vector(groups.tensor, hidden_size)
        self.class_token = parameter(vector, init) if class_token else None

    def forward(self, images: Tensor, shared: Shared | None = None) -> Tensor:
        """Map whole images [batch, channels, height, width], of any dtype, to the stored residual.

        Raises:
            DslparError: the images have the wrong shape; batch, patches or pixels do not divide as the mode cuts them.
        """
        if tuple(images.shape[1:]) != self.shape:
            message = f"images have shape {tuple(images.shape[1:])}, but the model takes {self.shape}"
            raise_finding(
                "TEN226", message, "images of [channels, height, width], as the model's sizes say", key="data"
            )
        shared = self.share() if shared is None else shared
        images = images.to(self.projection.weight.dtype)
        patches = functional.unfold(images, self.patch_size, stride=self.patch_size).transpose(1, 2)
        if self.class_token is None:
            return self.projection(to_inner(self.groups, patches), shared)
        # A patch of zeros makes room for the token. torch.where discards its projection (the bias) and its gradient.
        x = self.projection(to_inner(self.groups, functional.pad(patches, (0, 0, 1, 0))), shared)
        return torch.where(self._first(x), cast("Tensor", self.stand_in(self.class_token, shared)), x)

    def _first(self, x: Tensor) -> Tensor:
        """Return bool [sequence/n, 1]: True for the first token of the whole sequence."""
        cuts = placement.residual_cuts(self.groups.tensor)
        index, _ = placement.piece(self.groups.tensor, self.groups.coord, cuts.sequence)
        position = torch.arange(x.shape[1], device=x.device) + index * x.shape[1]
        return (position == 0).unsqueeze(1)


def _nearest(image_size: int, patch_size: int) -> int:
    """Return the patch size nearest to `patch_size` that divides the image size."""
    sizes = [size for size in range(1, image_size + 1) if image_size % size == 0]
    return min(sizes, key=lambda size: abs(size - patch_size))
