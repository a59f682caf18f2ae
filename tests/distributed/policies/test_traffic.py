"""Traffic of a model by policy, call by call: equal to that of dslpar's own GPT of the same shape."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import pytest
import torch

from dslpar.core.mesh import Mesh, TensorMesh
from dslpar.distributed.groups import Groups
from dslpar.models import GPT
from dslpar.models.layered import LayeredModel, build_module
from tests.support.layouts import LAYOUTS
from tests.support.ranks import on_ranks
from tests.support.traffic_counter import counting
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

if not HAS_TRANSFORMERS:
    pytest.skip(NO_TRANSFORMERS, allow_module_level=True)

from dslpar.policies.model import HuggingFaceModel
from tests.support import hugging_face as hf

LLAMA = {"num_kv_heads": 4, "norm": "rmsnorm", "activation": "swiglu", "positions": "rotary", "bias": False}
FORMS: Mapping[str, dict[str, Any]] = {
    "llama": LLAMA | {"tie_embeddings": False},
    "llama, tied": LLAMA,
    "gpt2": {"activation": "gelu_tanh"},
}
"""The fields that turn dslpar's GPT into the model of that name."""
NAMES = (
    *("1d-2", "1d-sequence-2", "2d-4", "cuboid-1-2-2-sequence-batch", "cuboid-1-2-2-replicated", "3d-8"),
    *("2.5d-8-depth-2", "ring-2", "ulysses-2"),
)
Sent = dict[tuple[str, str, str], tuple[Fraction, int]]
"""Elements and calls, by (forward or backward, collective, axis)."""


def _own(form: str) -> GPT:
    sizes = dict(num_layers=3, hidden_size=32, num_heads=8, ffn_hidden_size=48, vocab_size=70, max_seq_len=32)
    return GPT(**sizes, **FORMS[form])  # type: ignore[arg-type]


def _sent(model: LayeredModel, groups: Groups) -> Sent:
    """Return this rank's traffic in a micro-batch."""
    module, loss = build_module(model, groups, seed=1), model.loss(groups)
    ids = torch.randint(70, (4, 12), generator=torch.Generator().manual_seed(1))
    with counting(groups) as forward:
        found = loss(module(ids), ids)
    with counting(groups) as backward:
        found.backward()
    passes = {"forward": forward, "backward": backward}
    return {(name, *key): (n, sent.calls[key]) for name, sent in passes.items() for key, n in sent.elements.items()}


def _both(tensor: TensorMesh, forms: tuple[str, ...]) -> dict[str, tuple[Sent, Sent]]:
    groups = Groups(Mesh(tensor=tensor))
    return {
        form: (_sent(HuggingFaceModel(*hf.subject(hf.FAMILIES[form])), groups), _sent(_own(form), groups))
        for form in forms
    }


@pytest.mark.parametrize(
    ("layout", "forms"),
    [
        pytest.param("1d-2", ("llama",)),
        *(pytest.param(layout, tuple(FORMS), marks=pytest.mark.prove) for layout in NAMES),
    ],
)
def test_a_model_by_policy_sends_what_the_own_gpt_sends(layout: str, forms: tuple[str, ...]) -> None:
    found = on_ranks(LAYOUTS[layout].size, _both, LAYOUTS[layout], forms)
    for rank in found:
        for form, (by_policy, own) in rank.items():
            assert by_policy == own, form
            assert sum(calls for _, calls in own.values()) > 10
