"""Probing transformers' modules: what they do, found by calling them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

if not HAS_TRANSFORMERS:
    pytest.skip(NO_TRANSFORMERS, allow_module_level=True)

from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.nanochat.modeling_nanochat import NanoChatRMSNorm
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm

from dslpar.policies import probe
from dslpar.policies.probe import Norm


class Quiet(nn.LayerNorm):
    """Half a norm, although its class name says norm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / 2


class Shifted(nn.Embedding):
    """Not a factor."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) + 1


@pytest.mark.parametrize(
    ("module", "norm"),
    [
        (nn.LayerNorm(8, eps=1e-3), Norm(centred=True, one_plus=False, eps=1e-3, bias=True)),
        (nn.LayerNorm(8, bias=False), Norm(centred=True, one_plus=False, eps=1e-5, bias=False)),
        (LlamaRMSNorm(8, eps=1e-6), Norm(centred=False, one_plus=False, eps=1e-6, bias=False)),
        (GemmaRMSNorm(8, eps=1e-6), Norm(centred=False, one_plus=True, eps=1e-6, bias=False)),
        (OlmoLayerNorm(8), Norm(centred=True, one_plus=False, eps=1e-5, bias=False, weight=False)),
        (NanoChatRMSNorm(1e-6), Norm(centred=False, one_plus=False, eps=1e-6, bias=False, weight=False)),
        (nn.Identity(), None),
        (nn.GELU(), None),
        (Quiet(8), None),
        (nn.LayerNorm(4), None),
        (nn.Linear(8, 8), None),
        (nn.Sequential(nn.LayerNorm(8)), None),
    ],
)
def test_norms(module: nn.Module, norm: Norm | None) -> None:
    assert probe.norm_of(module, 8) == norm
    assert probe.norm_of(module.to("meta"), 8) == norm


def test_an_eps_that_is_not_the_one_that_counts_is_no_norm_that_is_known() -> None:
    module = LlamaRMSNorm(8, eps=1e-6)
    module.eps = 1e-2  # read before variance_epsilon
    assert probe.norm_of(module, 8) is None


class Tiny(LlamaRMSNorm):
    """Adds another number than its attribute; with activations of order 1 nobody sees it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon / 10)


def test_an_eps_is_tried_on_activations_as_small_as_itself() -> None:
    assert probe.norm_of(Tiny(8, eps=1e-6), 8) is None


def test_factors_of_tables() -> None:
    assert probe.factor_of(nn.Embedding(10, 8)) == 1
    assert probe.factor_of(nn.Embedding(10, 8, padding_idx=9).to("meta")) == 1
    scaled = Gemma3TextScaledWordEmbedding(10, 8, 0, embed_scale=3.0)
    assert probe.factor_of(scaled) == pytest.approx(3.0)
    assert probe.factor_of(Shifted(10, 8)) is None
