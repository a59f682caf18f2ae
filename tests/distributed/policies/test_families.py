"""transformers' models by policy against plain transformers: logits, loss and every gradient, in float64."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import product

import pytest
import torch

from dslpar.core import mesh
from dslpar.core.errors import DslparError
from dslpar.core.mesh import Mesh
from dslpar.distributed.collectives import all_gather
from dslpar.distributed.groups import Groups
from dslpar.layers import placement
from dslpar.models.layered import build_module
from tests.support import layouts
from tests.support.ranks import RankError, on_ranks
from tests.support.sampling import sampled
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

if not HAS_TRANSFORMERS:
    pytest.skip(NO_TRANSFORMERS, allow_module_level=True)

from dslpar.policies import hf_parity
from dslpar.policies.model import HuggingFaceModel
from tests.support import hugging_face as hf

CLOSE = 1e-12
"""Sums of some hundred terms of order 1, three blocks deep, in another order: a thousand roundings of float64."""
NAMES = (
    *("1d-2", "1d-sequence-2", "2d-4", "cuboid-1-2-2-sequence-batch", "cuboid-1-2-2-replicated", "ring-2", "ulysses-2"),
    *("1d-4", "1d-sequence-4", "2.5d-8-depth-2", "3d-8", "3d-8-sequence-heads", "cuboid-2-1-2"),
    *("ring-2-zigzag", "ring-2-1d-sequence-2", "hybrid-4"),
)
LAYOUTS = layouts.LAYOUTS | {"cuboid-2-1-2": mesh.TensorMesh(q=2, z=2, mode="cuboid")}
NOT_PLAIN = {"gemma2", "t5", "t5, gated", "bloom", "gpt_oss"}
"""Families whose attention has a soft cap, a bias, sinks, or its own code."""
IMAGES = {"vit", "vit_mae", "swin", "swinv2", "resnet"}
ON_GRIDS = {"swin": "SwinFor", "swinv2": "Swinv2For"}
"""Families of images, which have no padding."""


def refusal(family: str, layout: str) -> str | None:
    """Return the pattern of the error that refuses a cell, or None if it is exact."""
    tensor = LAYOUTS[layout] if layout else mesh.TensorMesh()
    coord = Mesh(tensor=tensor).coord(0)
    cut = {placement.piece(tensor, coord, cuts(tensor).sequence)[1] for cuts in CUTS}
    if tensor.context > 1 and family in NOT_PLAIN:
        return "TEN235 .*(softcap=|position_bias|sinks|computes its scores itself)"
    if family in ON_GRIDS and cut != {1}:
        return f"TEN235 .*{ON_GRIDS[family]}ImageClassification arranges tokens on a grid, but mode .* splits sequences"
    if family == "resnet" and tensor.size > 1:
        return "TEN235 .*no layer of ResNetForImageClassification can be sharded"
    if family in ("vit", "vit_mae") and 4 in cut:
        return "TEN221 .*dim 1 of an activation has (4|10) entries, but mode .* splits it into 4"
    return None


CUTS = (placement.residual_cuts, placement.inner_cuts)


@lru_cache
def by_policy(family: str) -> HuggingFaceModel:
    """Return a family's model, built once before ranks fork, by its policy or by a derived and proven one."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # transformers computes with the default dtype
    try:
        return HuggingFaceModel(*hf.subject(hf.FAMILIES[family]))
    finally:
        torch.set_default_dtype(default)


@lru_cache
def plain(family: str, padded: bool) -> tuple[dict[str, torch.Tensor], hf_parity.Batch, hf_parity.Result]:
    model, weights = hf.plain(hf.FAMILIES[family])
    policy = by_policy(family).policy
    return weights, *hf_parity.reference(
        model, hf_parity.make_inputs(model.config, policy.inputs, padded=padded), policy
    )


def off(family: str, layout: str, padded: bool, *, exchanges_tokens: bool = False) -> dict[str, float]:
    """Return each tensor's error on the rank with the largest."""
    weights, given, reference = plain(family, padded)
    model, tensor = by_policy(family), LAYOUTS[layout] if layout else mesh.TensorMesh()
    tensor = replace(tensor, exchanges_tokens=exchanges_tokens)

    def rank() -> dict[str, float]:
        return hf_parity.worst(hf_parity.by_policy(model, weights, tensor, given), reference)

    found = on_ranks(mesh.Mesh(tensor=tensor).world_size, rank)
    return {name: max(each[name] for each in found) for name in found[0]}


def is_quick(family: str, layout: str, padded: bool) -> bool:
    """Return whether `make test` runs a cell: each family once with padding, on up to 4 ranks, without variants."""
    families = [name for name in hf.FAMILIES if "," not in name]
    if not padded or family not in families:
        return False
    in_turn = NAMES[families.index(family) % len(NAMES)]
    own = next((name for name in (in_turn, "2d-4") if _is_small(name) and refusal(family, name) is None), "")
    return layout == own


def _is_small(layout: str) -> bool:
    return LAYOUTS[layout].size <= 4


EACH_MODE = {
    *("", "1d-2", "1d-sequence-2", "2d-4", "2.5d-8-depth-2", "3d-8", "cuboid-1-2-2-sequence-batch"),
    *("ring-2", "ulysses-2"),
}
"""Layouts on which every family is compared; on the others families take turns, and Llama and GPT-2 run on all."""
ON_ALL = ("llama", "gpt2")


def is_compared(family: str, layout: str, padded: bool) -> bool:
    """Return whether a cell is in the table; runs without padding check less, and come once per family."""
    in_turn = NAMES[list(hf.FAMILIES).index(family) % len(NAMES)] == layout
    if not padded:
        return in_turn and family not in IMAGES
    return layout in EACH_MODE or in_turn or family in ON_ALL or is_quick(family, layout, padded)


CELLS = sampled(
    (cell for cell in product(hf.FAMILIES, ("", *NAMES), (True, False)) if is_compared(*cell)),
    lambda cell: is_quick(*cell),
)


@pytest.mark.parametrize(("family", "layout", "padded"), CELLS)
def test_a_policy_does_not_change_the_maths(family: str, layout: str, padded: bool) -> None:
    if expected := refusal(family, layout):
        with pytest.raises((RankError, DslparError), match=expected):
            off(family, layout, padded)
        return
    found = off(family, layout, padded)
    assert len(found) > 20
    assert {name: value for name, value in found.items() if not value <= CLOSE} == {}


OF_EXPERTS = (
    *("mixtral", "mixtral, 5 experts", "qwen3_moe", "qwen2_moe", "olmoe"),
    *("deepseek_v3", "deepseek_v2", "glm4_moe", "gpt_oss"),
)
SENT = sampled(
    (cell for cell in product(OF_EXPERTS, ("1d-2", "1d-sequence-4", "2d-4", "3d-8", "ring-2")) if not refusal(*cell)),
    {("deepseek_v3", "2d-4"), ("gpt_oss", "1d-2"), ("qwen2_moe", "1d-sequence-4")},
)


@pytest.mark.parametrize(("family", "layout"), SENT)
def test_tokens_that_are_sent_to_their_experts_do_not_change_the_maths(family: str, layout: str) -> None:
    """As with `parallel.expert`, here over the ranks of one tensor group."""
    found = off(family, layout, True, exchanges_tokens=True)
    assert {name: value for name, value in found.items() if not value <= CLOSE} == {}


def test_a_weight_that_is_another_is_seen() -> None:
    """The comparison can fail: one number changed by a hundred-millionth."""
    weights, given, reference = plain("llama", True)
    weights = {name: value.clone() for name, value in weights.items()}
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] += 1e-8
    model, tensor = by_policy("llama"), mesh.TensorMesh()

    def rank() -> dict[str, float]:
        return hf_parity.worst(hf_parity.by_policy(model, weights, tensor, given), reference)

    (found,) = on_ranks(1, rank)
    assert found["logits"] > CLOSE


DROPS = {
    "gpt2": dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.2),
    "opt": dict.fromkeys(("dropout", "attention_dropout"), 0.2),
    "bloom": dict.fromkeys(("hidden_dropout", "attention_dropout"), 0.2),
    "mixtral": {"attention_dropout": 0.2},
    "bert": dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.2),
    "t5": {"dropout_rate": 0.2},
    "swin": {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2, "drop_path_rate": 0.4},
    "swinv2": {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2, "drop_path_rate": 0.4},
    "vit_mae": dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.2),
}


def _copies(name: str, layout: str) -> dict[str, list[torch.Tensor]]:
    """Return gradients with dropout by name, of all ranks with the same piece, and pieces of the full residual."""
    groups = Groups(mesh.Mesh(tensor=LAYOUTS[layout]))
    family = hf.FAMILIES[name]
    model = HuggingFaceModel(family.classes()[0], family.config(**DROPS[name]))
    module = build_module(model, groups, seed=1).train()
    torch.manual_seed(11)
    inputs = hf_parity.make_inputs(family.config(), model.policy.inputs)
    inputs = {name: x.float() if x.is_floating_point() else x for name, x in inputs.items()}
    labels = inputs.get("input_ids", inputs[model.policy.loss] if model.policy.loss else torch.arange(4))
    x = tuple(inputs.values())
    model.loss(groups)(module(x if len(x) > 1 else x[0]), labels).backward()
    found = {}
    for name, p in module.named_parameters():
        if not p.requires_grad:
            continue
        pieces = all_gather(p.grad[None], groups.axis("tensor"))
        held: dict[tuple[tuple[int, ...], ...], torch.Tensor] = {}
        own = Mesh(tensor=LAYOUTS[layout])
        for rank, piece in enumerate(pieces):
            coord = own.coord(rank)
            cut = tuple(tuple(coord[letter] for letter in letters) for letters in p.placement.cuts)
            assert torch.equal(held.setdefault(cut, piece), piece), f"{name}: copies differ"
        found[name] = list(held.values())
    return found


DROPPING = ("1d-2", "1d-sequence-2", "2d-4", "cuboid-1-2-2-sequence-batch", "ulysses-2")
QUICK = {("gpt2", "1d-2"), ("gpt2", "2d-4"), ("opt", "1d-sequence-2")}


@pytest.mark.parametrize(
    ("family", "layout"),
    sampled((cell for cell in product(DROPS, DROPPING) if not (cell[1] and refusal(*cell))), QUICK),
)
def test_copies_have_equal_gradients_with_dropout_on(family: str, layout: str) -> None:
    """They are bitwise equal. GPT-2's dropout after attention is inside a region, and acts on the residual; OPT's is a
    function.
    """
    found = on_ranks(mesh.Mesh(tensor=LAYOUTS[layout]).world_size, _copies, family, layout)
    assert len(found[0]) > 20
