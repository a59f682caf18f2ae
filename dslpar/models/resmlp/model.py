"""ResMLP (Touvron et al., arXiv 2105.03404): patches, blocks without attention and norms, mean pooling, a classifier.

    model = ResMLP(num_layers=12, hidden_size=384, image_size=224, patch_size=16, num_classes=1000, layer_scale=0.1)
    module = build_module(model, groups, seed=1234)
    loss = model.loss(groups)(module(images), classes)

It shows the form of a model over dslpar.layers: a list of layers, none of which depends on a tensor mode. The code
follows the paper's appendix.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor
from torch.nn import functional

from dslpar.distributed.groups import Groups
from dslpar.layers import MLP, Affine, Init, Layer, PatchEmbedding, Placement, TokenLinear, mean_of_tokens, normal
from dslpar.layers.parameter import ZEROS, parameter
from dslpar.models.layered import LayerSpec
from dslpar.models.resmlp import section
from dslpar.models.sequential import PlainModel


class ResMLP(section.ResMLP, PlainModel):
    """ResMLP; its fields are those of `dslpar.models.resmlp.section.ResMLP`."""

    def layers(self, groups: Groups) -> list[LayerSpec]:
        """Return patches, blocks.0 ..., norm, head: [batch, channels, height, width] to logits [batch, classes]."""
        sizes = self.image_size, self.patch_size, self.num_channels, self.hidden_size
        block = partial(ResMLPBlock, groups, self)
        spec = partial(LayerSpec, skips_init=True)
        return [
            spec(name="patches", build=partial(PatchEmbedding, groups, *sizes, init=normal(self.init_std))),
            *(
                spec(name=f"blocks.{index}", build=block, layer_idx=index, recomputable=True)
                for index in range(self.num_layers)
            ),
            spec(name="norm", build=partial(Affine, groups, self.hidden_size)),
            spec(name="head", build=partial(Classifier, groups, self)),
        ]


class ResMLPBlock(Layer):
    """ResMLP block: x + scale * tokens(affine(x)), then x + scale * mlp(affine(x))."""

    def __init__(self, groups: Groups, model: section.ResMLP) -> None:
        super().__init__(groups)
        hidden, init, scale = model.hidden_size, normal(model.init_std), Init(model.layer_scale)
        self.norm1 = Affine(groups, hidden)
        self.tokens = TokenLinear(groups, model.num_patches, init=init)
        self.scale1 = Affine(groups, hidden, bias=False, init=scale)
        self.norm2 = Affine(groups, hidden)
        self.mlp = MLP(groups, hidden, model.ffn_size, init=init, init_out=init)
        self.scale2 = Affine(groups, hidden, bias=False, init=scale)

    def forward(self, x: Tensor) -> Tensor:
        """Map the stored residual [batch/x, patches, H/z] to the same shape."""
        shared = self.share()  # one all-reduce sums the gradients of all the block's vectors
        x = x + self.scale1(self.tokens(self.norm1(x, shared), shared), shared)
        return x + self.scale2(self.mlp(self.norm2(x, shared), shared), shared)


class Classifier(Layer):
    """Classifier of the mean of a sample's tokens; every rank has the whole weight, and equal logits."""

    def __init__(self, groups: Groups, model: section.ResMLP) -> None:
        super().__init__(groups)
        shape = (model.num_classes, model.hidden_size)
        self.weight = parameter(Placement(groups.tensor, shape, ((), ())), normal(model.init_std))
        self.bias = parameter(Placement(groups.tensor, shape[:1], ((),)), ZEROS)

    def forward(self, x: Tensor) -> Tensor:
        """Map the stored residual [batch/x, patches, H/z] to logits [batch, classes]."""
        return functional.linear(mean_of_tokens(self.groups, x), self.weight, self.bias)
