"""27 and 64 forked gloo ranks: logits, loss and every gradient equal those of one process, in float64.

Each rank has a sample, a head or a few features: sizes are the smallest that divide. So many ranks take turns on few
cores, so each layout runs once, with two blocks.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dslpar.core import mesh
from dslpar.core.mesh import Mesh
from dslpar.distributed.groups import Groups
from dslpar.layers import gather
from dslpar.layout.modes import cuboid_of
from dslpar.models import GPT, build_module
from dslpar.schema.sections import TensorParallel
from tests.support.ranks import on_ranks
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

if not HAS_TRANSFORMERS:
    pytest.skip(NO_TRANSFORMERS, allow_module_level=True)

from dslpar.policies import hf_parity
from dslpar.policies.model import HuggingFaceModel
from tests.support import hugging_face as hf

CLOSE = 1e-12
"""Sums of some hundred terms of order 1, two blocks deep, in another order: a thousand roundings of float64."""
LAYOUTS = {
    "3d, 3 x 3 x 3": TensorParallel(size=27, mode="3d"),
    "2.5d, 3 x 3, depth 3": TensorParallel(size=27, mode="2.5d", depth=3),
    "3d, 4 x 4 x 4": TensorParallel(size=64, mode="3d"),
    "2d, 8 x 8": TensorParallel(size=64, mode="2d"),
    "2.5d, 4 x 4, depth 4": TensorParallel(size=64, mode="2.5d", depth=4),
}

FAMILIES = ("llama", "gpt2")
SIZES = {
    27: {"batch": 9, "hidden": 54, "heads": 9, "kv_heads": 3, "ffn": 81},
    64: {"batch": 16, "hidden": 128, "heads": 16, "kv_heads": 8, "ffn": 192},
}
"""Sizes by number of ranks."""


def _family(name: str, world: int) -> hf.Family:
    sizes = SIZES[world]
    if name == "gpt2":
        more = {"n_embd": sizes["hidden"], "n_head": sizes["heads"], "n_inner": sizes["ffn"], "n_layer": 2}
    else:
        more = {
            "hidden_size": sizes["hidden"],
            "num_attention_heads": sizes["heads"],
            "num_key_value_heads": sizes["kv_heads"],
            "intermediate_size": sizes["ffn"],
            "num_hidden_layers": 2,
        }
    return hf.FAMILIES[name]._replace(sizes={**hf.FAMILIES[name].sizes, **more})


@pytest.mark.prove
@pytest.mark.minutes(8)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_policy_does_not_change_the_maths_on_many_ranks(layout: str, family: str) -> None:
    tensor = cuboid_of(LAYOUTS[layout])
    of = _family(family, tensor.size)
    plain, weights = hf.plain(of)
    inputs = hf_parity.make_inputs(plain.config, batch=SIZES[tensor.size]["batch"])
    given, reference = hf_parity.reference(plain, inputs)
    model = HuggingFaceModel(*hf.subject(of))  # once, before ranks fork

    def rank() -> dict[str, float]:
        return hf_parity.worst(hf_parity.by_policy(model, weights, tensor, given), reference)

    found = on_ranks(tensor.size, rank)
    assert len(found[0]) > 20
    worst = {name: max(each[name] for each in found) for name in found[0]}
    assert {name: value for name, value in worst.items() if not value <= CLOSE} == {}


OWN = {
    "llama": {"norm": "rmsnorm", "activation": "swiglu", "positions": "rotary", "bias": False, "tie_embeddings": False},
    "gpt2": {},
}
"""The fields that turn dslpar's GPT into a transformers model."""


def _own(form: str, world: int, tensor: mesh.TensorMesh) -> tuple[Tensor, dict[str, Tensor]]:
    """Return full loss and gradients of dslpar's GPT, whose initial weights depend on no layout."""
    torch.set_default_dtype(torch.float64)
    sizes, groups = SIZES[world], Groups(Mesh(tensor=tensor))
    model = GPT(
        num_layers=2,
        hidden_size=sizes["hidden"],
        num_heads=sizes["heads"],
        num_kv_heads=sizes["kv_heads"],
        ffn_hidden_size=sizes["ffn"],
        vocab_size=70,
        max_seq_len=12,
        init_std=0.2,
        **OWN[form],  # type: ignore[arg-type]
    )
    module = build_module(model, groups, seed=1)
    ids = torch.randint(70, (sizes["batch"], 13), generator=torch.Generator().manual_seed(1))
    loss = model.loss(groups)(module(ids[:, :-1]), ids[:, 1:])
    loss.backward()
    gradients = {name: gather(p.grad, p.placement, groups) for name, p in module.named_parameters()}
    return loss.detach(), gradients


@pytest.mark.prove
@pytest.mark.minutes(8)
@pytest.mark.parametrize("form", OWN)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_own_gpt_on_many_ranks_has_the_gradients_of_one(layout: str, form: str) -> None:
    tensor = cuboid_of(LAYOUTS[layout])
    ((loss, gradients),) = on_ranks(1, _own, form, tensor.size, mesh.TensorMesh())

    def rank() -> dict[str, float]:
        own_loss, own = _own(form, tensor.size, tensor)
        assert own.keys() == gradients.keys()
        off = {name: float((own[name] - each).abs().max() / each.abs().max()) for name, each in gradients.items()}
        return off | {"loss": float((own_loss - loss).abs() / loss)}

    found = on_ranks(tensor.size, rank)
    assert len(found[0]) > 10
    assert {name for each in found for name, value in each.items() if not value <= CLOSE} == set()
