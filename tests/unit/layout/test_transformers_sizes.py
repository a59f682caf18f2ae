"""Lint's arithmetic of a transformers model's sizes, against the layers that are built."""

from __future__ import annotations

from itertools import product

import pytest

from dslpar.core.errors import DslparError
from dslpar.core.mesh import Mesh
from dslpar.distributed.groups import Groups
from dslpar.layout import divisors
from dslpar.layout.transformers_sizes import Size, conditions, sizes_of
from dslpar.models.layered import LayerSpec
from dslpar.schema.sections import OtherModel
from tests.support.layouts import LAYOUTS
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

QUICK = ("1d-4", "2d-4", "2.5d-8-depth-2", "3d-8", "cuboid-2-3-2", "cuboid-1-2-2-sequence-batch")
NAMES = [
    pytest.param(name, marks=[] if name in QUICK else [pytest.mark.prove])
    for name in LAYOUTS
    if not name.startswith("ulysses")  # which shares heads out when it attends, not when layers are built
]


@pytest.mark.skipif(not HAS_TRANSFORMERS, reason=NO_TRANSFORMERS)
@pytest.mark.parametrize("layout", NAMES)
def test_what_lint_refuses_cannot_be_built_and_what_it_passes_can(layout: str) -> None:
    import transformers

    from dslpar.policies.model import HuggingFaceModel

    groups, seen = Groups.without_processes(Mesh(tensor=LAYOUTS[layout])), set()
    for heads, kv_heads, hidden, ffn in product((4, 6, 12), (2, 4, 6), (48, 72), (36, 48)):
        if heads % kv_heads or (hidden // heads) % 2:
            continue
        config = {
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "intermediate_size": ffn,
            "num_hidden_layers": 1,
            "vocab_size": 70,
        }
        sizes = sizes_of(OtherModel(target="transformers.LlamaForCausalLM", args={"config": config}))
        passes = all(each.holds for each in conditions(sizes, groups.tensor))
        model = HuggingFaceModel(transformers.LlamaForCausalLM, config)
        ranks = divisors.head_ranks(groups.tensor)
        whole = heads % ranks == kv_heads % ranks == 0  # of activations: a weight may be cut within a head
        assert passes == (whole and _is_built(model.layers(groups)[:2])), config
        seen.add(passes)
    assert True in seen


def _is_built(layers: list[LayerSpec]) -> bool:
    """Whether the table and the first block are built; what else fails than a size is an error."""
    try:
        for layer in layers:
            layer.build()
    except DslparError as error:
        if {finding.code for finding in error.findings} != {"TEN227"}:
            raise
        return False
    return True


def test_names_of_several_families() -> None:
    given = {"n_embd": 8, "n_head": 2, "n_layer": 3, "n_inner": None, "use_cache": True}
    model = OtherModel(target="transformers.GPT2LMHeadModel", args={"config": given})
    assert sizes_of(model) == {"hidden": Size("n_embd", 8), "heads": Size("n_head", 2)}
    assert sizes_of(OtherModel(target="my.Model", args={"config": given})) == {}
    assert sizes_of(OtherModel(target="transformers.GPT2LMHeadModel", args={"pretrained": "folder"})) == {}
