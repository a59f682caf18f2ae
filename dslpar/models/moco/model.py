"""MoCo v3 (Chen, Xie and He, arXiv 2104.02057): contrastive learning with an encoder and its momentum copy.

    model = MoCo(num_layers=12, hidden_size=384, num_heads=12, image_size=224, patch_size=16)
    module = build_module(model, groups, seed=1234)
    loss = model.loss(groups)(module((view, other_view)), labels)   # labels are not looked at
    loss.backward(); optimizer.step()
    model.after_step(module, progress=steps_done / all_steps)       # an engine does this

Queries come from the encoder and a prediction head, keys from the momentum encoder. The loss classifies each query
among the keys of all samples of all data replicas, so neither the loss nor BatchNorm's statistics depend on the layout.
Gradient accumulation would change both, so a step is one micro-batch per replica, which lint checks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from dslpar.distributed import collectives
from dslpar.distributed.groups import Groups
from dslpar.layers import Layer, from_inner
from dslpar.layers.upcast import upcast
from dslpar.models.layered import Labels, LayeredModel, LayerSpec, Loss
from dslpar.models.moco import section
from dslpar.models.moco.encoder import AsEncoder, Encoder, Predictor

Views = tuple[Tensor, Tensor]
Compared = tuple[Tensor, Tensor, Tensor, Tensor]
"""Queries of both views and keys of both views, [batch, D] each."""


class MoCo(section.MoCo, LayeredModel):
    """MoCo v3 over a vision transformer; its fields are `dslpar.models.moco.section.MoCo`'s."""

    def layers(self, groups: Groups) -> list[LayerSpec]:
        """Return the single layer, "moco": two views [batch, channels, height, width] to queries and keys."""
        return [LayerSpec(name="moco", build=partial(MomentumContrast, groups, self), layer_idx=0, skips_init=True)]

    def loss(self, groups: Groups) -> Loss:
        """Return the contrastive loss of queries and keys, a mean over the micro-batch; labels are ignored."""

        def loss(compared: Compared, labels: Labels) -> Tensor:
            query1, query2, key1, key2 = (functional.normalize(upcast(x), dim=1) for x in compared)
            return self._contrast(groups, query1, key2) + self._contrast(groups, query2, key1)

        return loss  # type: ignore[return-value]

    def _contrast(self, groups: Groups, query: Tensor, key: Tensor) -> Tensor:
        data = groups.axis("data")
        keys = collectives.all_gather(key.detach(), data, 0)
        own = torch.arange(len(query), device=query.device) + data.index * len(query)
        # Times 2 T as in the authors' code, so that the size of gradients does not depend on the temperature.
        return functional.cross_entropy(query @ keys.t() / self.temperature, own) * (2 * self.temperature)

    def after_step(self, module: nn.Module, progress: float) -> None:
        """Move the momentum encoder towards the encoder; `progress`, from 0 to 1, is the share of all steps done."""
        contrast = module.get_submodule("moco")
        assert isinstance(contrast, MomentumContrast)
        contrast.update_momentum_encoder(self.momentum_at(progress))


class MomentumContrast(Layer):
    """Encoder with its prediction head, and the momentum encoder, which gets no gradient."""

    def __init__(self, groups: Groups, model: section.MoCo) -> None:
        super().__init__(groups)
        self.encoder, self.predictor = Encoder(groups, model), Predictor(groups, model)
        self.momentum_encoder = Encoder(groups, model).requires_grad_(False)
        for module in self.momentum_encoder.modules():
            for name, p in module.named_parameters(recurse=False):
                module.set_init(name, AsEncoder(p.init))  # type: ignore[operator,attr-defined]

    def forward(self, views: Views) -> Compared:
        """Map two views [batch, channels, height, width] to the whole queries and keys of both, [batch, D] each."""
        queries = [from_inner(self.groups, self.predictor(self.encoder(view))) for view in views]
        with torch.no_grad():
            keys = [from_inner(self.groups, self.momentum_encoder(view)) for view in views]
        return queries[0], queries[1], keys[0], keys[1]

    @torch.no_grad()
    def update_momentum_encoder(self, kept: float) -> None:
        """Set each weight of the momentum encoder to `kept` times itself plus 1 - `kept` times the encoder's weight."""
        for p, own in zip(self.momentum_encoder.parameters(), self.encoder.parameters(), strict=True):
            for slow, fast in zip(_held(p), _held(own), strict=True):
                slow.mul_(kept).add_(fast.to(slow.dtype), alpha=1 - kept)


def _held(p: nn.Parameter) -> Iterator[Tensor]:
    """Yield the tensors that hold a parameter on this rank: ZeRO 3's shard, and the whole tensor if it is gathered.

    On a rank that is alone in its group, the gathered tensor shares the shard's memory, and only the shard is yielded.
    """
    shard = getattr(p, "ds_tensor", None)
    if shard is not None:
        yield shard
    is_whole = shard is None or p.numel() == p.ds_numel  # type: ignore[attr-defined]
    if is_whole and (shard is None or p.data_ptr() != shard.data_ptr()):
        yield p.data
