"""The keys that a section accepts, and the one pass that reads them."""

from __future__ import annotations

from dslpar.linter.check import load_text
from dslpar.models.gpt.section import GPT
from dslpar.schema import sections
from dslpar.schema.known_keys import KnownKeys, arguments, entries_of, known_keys
from dslpar.schema.reader import Reader
from dslpar.schema.types import TYPES


def values_of(text: str, known: KnownKeys) -> tuple[dict[str, object], Reader]:
    """Read the section `zero` of a config."""
    reader = Reader(load_text(text, "config.py"))
    return reader.values(known, entries_of(reader.config.root.value["zero"], "zero"), "zero"), reader


def test_an_alias_stands_for_its_key() -> None:
    known = known_keys(GPT)
    assert (known.names["hidden_layers"], known.names["num_layers"]) == ("num_layers", "num_layers")
    assert known.type_of("num_layers") is TYPES["LayerCount"]


def test_a_section_below_has_its_class_as_type() -> None:
    assert known_keys(sections.Parallel).type_of("pipeline") is sections.PipelineParallel
    assert known_keys(sections.PipelineParallel).shorthand == "size"


def test_a_bare_value_is_that_of_the_shorthand() -> None:
    known = arguments({"offload_optimizer": "OffloadOptimizer"})
    found, reader = values_of("zero = dict(offload_optimizer='cpu')\n", known)
    assert found == {"offload_optimizer": {"device": "cpu"}}
    assert reader.written == {"zero.offload_optimizer": "zero.offload_optimizer"}
    assert not reader.misreads


def test_each_key_of_a_mapping_is_read_with_its_origin() -> None:
    known = arguments({"offload_optimizer": "OffloadOptimizer", "reduce_scatter": "bool", "loss_scale": "AtLeastOne"})
    text = "zero = dict(offload_optimizer=dict(device='cpu', pin_memory=3), reduce_scatter=None, loss_scale='8')\n"
    found, reader = values_of(text, known)
    assert found == {"offload_optimizer": {"device": "cpu"}, "loss_scale": 8.0}
    assert set(reader.written) == {
        *("zero.offload_optimizer", "zero.offload_optimizer.device", "zero.offload_optimizer.pin_memory"),
        "zero.loss_scale",
    }
    assert reader.invalid == {"zero.offload_optimizer.pin_memory"}  # loss_scale can mean only 8
    assert [(found.code, found.key) for found in reader.misreads] == [
        ("CFG102", "zero.offload_optimizer.pin_memory"),
        ("CFG102", "zero.loss_scale"),
    ]


def test_a_table_may_have_a_rule_of_its_own_for_wrong_values() -> None:
    _, reader = values_of("zero = dict(stage='two')\n", arguments({"stage": "ZeroStage"})._replace(code="DSC105"))
    assert [found.code for found in reader.misreads] == ["DSC105"]
