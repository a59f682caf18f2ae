"""Policies as data: names, fields, and the part that a config sets."""

from __future__ import annotations

import pytest

from dslpar.core.errors import DslparError
from dslpar.schema.policy import Policy, as_policy, match
from dslpar.schema.transformers_policies import POLICIES

GIVEN = {
    "blocks": ["model.layers"],
    "regions": {"model.layers.*.attn": ["qkv"], "model.layers.*.mlp": {"x": ["up"]}},
    "outward": ["model.layers.*.attn.out", "model.layers.*.mlp.down"],
    "fused": {"qkv": 3},
}


def test_a_star_is_one_part_of_a_name() -> None:
    patterns = ("model.layers.*.mlp", "model.layers.*.mlp.up")
    assert match(patterns, "model.layers.11.mlp.up") == patterns[1]
    assert match(patterns, "model.layers.11.attn.mlp") is None
    assert match(patterns, "model_layers.11.mlp") is None


def test_a_dict_is_the_policy_of_its_fields() -> None:
    made = as_policy(GIVEN, POLICIES)
    assert made == Policy(
        blocks=("model.layers",),
        regions={"model.layers.*.attn": ("qkv",), "model.layers.*.mlp": {"x": ("up",)}},
        outward=("model.layers.*.attn.out", "model.layers.*.mlp.down"),
        fused={"qkv": 3},
    )
    assert as_policy(made, POLICIES) is made
    assert as_policy("GPT2LMHeadModel", POLICIES) is POLICIES["GPT2LMHeadModel"]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("GPT2LMHeadModell", "CFG223 .*no policy is known as 'GPT2LMHeadModell'.*\n.*GPT2LMHeadModel"),
        (GIVEN | {"outwards": ()}, "CFG223 .*unknown key 'outwards'; did you mean 'outward'"),
        ({"blocks": ()}, "CFG223 .*no regions, outward"),
        (7, "CFG223 .*no blocks, regions, outward"),
    ],
)
def test_what_is_no_policy_is_told(value: object, said: str) -> None:
    with pytest.raises(DslparError, match=said):
        as_policy(value, POLICIES)
