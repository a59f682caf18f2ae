"""Rules never compute with an invalid value: where one stands, a section raises UnknownValueError."""

from __future__ import annotations

import pytest

from dslpar.layout.resolve import seq_len_of
from dslpar.linter.check import check, load_text
from dslpar.linter.problem import UnknownValueError, require
from dslpar.models.gpt.section import GPT
from dslpar.schema.datasets import BlendData, type_name
from dslpar.schema.families import family_module
from dslpar.schema.sections import SGD, AdamW, Spec

MODEL = "model = dict(type='GPT', num_layers=8, hidden_size=256, num_heads=8, vocab_size=256, max_seq_len=128)\n"
BLEND = """\
data = dict(type='blend', parts=[
    dict(type='text', files=['a.txt'], weight=1),
    dict(type='mlm', mask_share=7, weight='a lot'),
])
"""


def spec_of(text: str) -> Spec:
    return check(load_text(text, "config.py")).context.spec


def test_a_valid_config_is_read_as_it_is() -> None:
    checked = check(load_text(MODEL, "config.py"))
    assert checked.context.spec is checked.reading.spec


def test_only_the_invalid_value_is_unknown() -> None:
    model = require(spec_of(MODEL.replace("num_heads=8", "num_heads='many'")).model, GPT)
    assert (model.hidden_size, model.num_layers) == (256, 8)
    with pytest.raises(UnknownValueError, match=r"^model\.num_heads$"):
        _ = model.num_heads


def test_a_property_of_an_invalid_value_is_unknown() -> None:
    model = require(spec_of(MODEL.replace("hidden_size=256", "hidden_size=-1")).model, GPT)
    with pytest.raises(UnknownValueError, match=r"^model\.hidden_size$"):
        _ = model.ffn_size


def test_an_invalid_section_is_unknown() -> None:
    spec = spec_of(MODEL + "train = 7\nbatch = dict(micro_size=2)\n")
    assert spec.batch.micro_size == 2
    with pytest.raises(UnknownValueError, match=r"^train$"):
        _ = spec.train


def test_a_section_with_an_unknown_value_keeps_its_class() -> None:
    spec = spec_of(MODEL.replace("num_heads=8", "num_heads='many'") + "data = dict(type='mlm', mask_share=7)\n")
    assert isinstance(spec.model, GPT)
    assert isinstance(spec.model, type(spec.model))
    assert type(spec.model).__name__ == "GPT"
    assert family_module(spec.model, "layout").__name__ == "dslpar.models.gpt.layout"
    assert type_name(spec.data) == "mlm"


def test_a_section_with_an_unknown_value_can_be_a_key_of_a_cache() -> None:
    text = MODEL + "parallel = dict(tensor=dict(size=4, mode='2d', comm_overlap='often'))\n"
    one, other = spec_of(text).parallel.tensor, spec_of(text).parallel.tensor
    assert {one: 1}[one] == 1
    assert one != other


def test_values_of_parts_of_a_blend_are_unknown_each() -> None:
    data = require(spec_of(MODEL + BLEND).data, BlendData)
    assert data.parts[0].weight == 1
    assert data.parts[0].dataset.files == ("a.txt",)
    with pytest.raises(UnknownValueError, match=r"^data\.parts\.1\.weight$"):
        _ = data.parts[1].weight
    assert type_name(data.parts[1].dataset) == "mlm"


def test_a_finding_is_not_computed_from_a_placeholder() -> None:
    text = MODEL.replace("max_seq_len=128", "max_seq_len='long'") + "train = dict(loss_chunks=4)\n"
    checked = check(load_text(text, "config.py"), world_size=8)
    with pytest.raises(UnknownValueError, match=r"^model\.max_seq_len$"):
        seq_len_of(checked.context.spec)
    assert [finding.code for finding in checked.findings] == ["CFG102"]


def test_require() -> None:
    assert require(AdamW(lr=1.0), AdamW).lr == 1.0
    with pytest.raises(UnknownValueError, match=r"^SGD$"):
        require(AdamW(), SGD)


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ("num_layers=0, ffn_hidden_size=33", "TEN203"),
        ("num_layers=2, ffn_hidden_size=33, experts=dict(num=0, every=2)", "TEN203"),
        ("num_layers=2, num_heads=3, experts=dict(num='many')", "TEN201"),
        ("num_layers=2, experts=8", "CFG102"),
        ("num_layers=2, experts=dict()", "CFG104"),
    ],
)
def test_rules_about_other_sizes_see_through_wrong_experts(more: str, code: str) -> None:
    heads = "" if "num_heads" in more else ", num_heads=4"
    text = f"model = dict(type='GPT', hidden_size=24{heads}, vocab_size=256, max_seq_len=64, {more})\n"
    checked = check(load_text(text + "parallel = dict(tensor=dict(size=2, mode='1d'))\n", "config.py"), 2)
    assert code in [each.code for each in checked.findings]
