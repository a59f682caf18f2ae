"""Drafted policies, and policies of other classes that fit: the helps for a class without a policy."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

if not HAS_TRANSFORMERS:
    pytest.skip(NO_TRANSFORMERS, allow_module_level=True)

import transformers

from dslpar.core.errors import DslparError
from dslpar.policies import check
from dslpar.policies.draft import draft, missing_counts
from dslpar.policies.fitting import fitting
from dslpar.policies.model import HuggingFaceModel
from dslpar.schema.policy import as_policy

LAYER = "model.layers.*"
OF_STABLELM = {
    "blocks": ["model.layers"],
    "regions": {
        f"{LAYER}.self_attn": ["q_proj", "k_proj", "v_proj"],
        f"{LAYER}.mlp": {"x": ["gate_proj", "up_proj"]},
    },
    "outward": [f"{LAYER}.self_attn.o_proj", f"{LAYER}.mlp.down_proj"],
}
"""Without the counts of heads."""
COUNTS = {f"{LAYER}.self_attn": ["num_heads", "num_key_value_heads"]}


def on_meta(name: str) -> Any:
    cls, config, _ = check.miniature_of(getattr(transformers, name))
    with torch.device("meta"):
        return cls._from_config(copy.deepcopy(config), attn_implementation="dslpar")


@pytest.mark.parametrize(
    ("name", "fits"),
    [
        ("XLMRobertaForMaskedLM", "RobertaForMaskedLM"),
        ("BertLMHeadModel", "BertForMaskedLM"),
        ("MT5ForConditionalGeneration", "T5ForConditionalGeneration"),
        ("BartForCausalLM", ""),  # its decoder has a second attention, which OPT's policy does not name
        ("GPTBigCodeForCausalLM", ""),  # its c_attn is not three linears of equal size, as GPT-2's is
        ("StableLmForCausalLM", ""),
    ],
)
def test_a_policy_fits_a_class_with_the_same_modules(name: str, fits: str) -> None:
    assert fitting(on_meta(name)) == fits


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("StableLmForCausalLM", {**OF_STABLELM, "local": COUNTS}),
        (
            "BioGptForCausalLM",
            {
                "blocks": ["biogpt.layers"],
                "regions": {"biogpt.layers.*.self_attn": ["k_proj", "v_proj", "q_proj"]},
                "outward": ["biogpt.layers.*.self_attn.out_proj", "biogpt.layers.*.fc2"],
                "inward": ["biogpt.layers.*.fc1"],
            },
        ),
        ("CTRLLMHeadModel", {}),
    ],
)
def test_a_draft_has_the_linears_with_usual_names(name: str, expected: dict[str, Any]) -> None:
    assert draft(on_meta(name)) == expected


@pytest.mark.parametrize("name", ["BitNetForCausalLM", "PersimmonForCausalLM", "RobertaForCausalLM"])
def test_a_draft_has_norms_of_heads_and_positions(name: str) -> None:
    """BitNet has norms over all heads, Persimmon norms of heads and fused q, k and v, RoBERTa positions of its own."""
    subject = check.miniature_of(getattr(transformers, name), policy=draft(on_meta(name)))
    (row,) = check.check(subject, {"1d 2": check.MODES["1d 2"]})
    assert (row.outcome, row.dropout) == ("exact", ""), row


def test_the_help_of_a_shard_that_fails_names_the_counts_of_heads() -> None:
    subject = check.miniature_of(transformers.StableLmForCausalLM, policy=OF_STABLELM)
    (row,) = check.check(subject, {"1d 2": check.MODES["1d 2"]})
    assert (row.outcome, row.help.partition(" in its policy")[0]) == ("refused", f"local={COUNTS}")
    policy = as_policy({**OF_STABLELM, "local": COUNTS}, {})
    assert missing_counts(on_meta("StableLmForCausalLM"), policy) == ""
    (row,) = check.check(subject._replace(policy=policy), {"1d 2": check.MODES["1d 2"]})
    assert row.outcome == "exact"


def test_positions_of_a_decoder_that_begin_elsewhere_are_refused() -> None:
    """A policy with a decoder's inputs would hand in 0, 1, ..., and RoBERTa's positions begin after its padding id."""
    policy = {**draft(on_meta("RobertaForCausalLM")), "inputs": ["input_ids", "attention_mask"]}
    with pytest.raises(DslparError, match=r"its positions are not 0, 1, .*\nhelp: inputs=\['input_ids'"):
        HuggingFaceModel(*check.miniature_of(transformers.RobertaForCausalLM, policy=policy))
