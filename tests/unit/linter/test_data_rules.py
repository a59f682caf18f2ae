"""Lint of `data`: its type against the model, its tokenizer against the vocabulary; nothing is imported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dslpar.core.errors import Finding
from dslpar.linter import check
from tests.support.lint import MODEL, findings, marked

SIZES = "vocab_size=300, max_position_embeddings=64"


def of_class(name: str, data: str) -> str:
    return f"model = dict(type='transformers.{name}', config=dict({SIZES}))\ndata = {data}\n"


@pytest.mark.parametrize(
    ("name", "right"),
    [
        *(("BertForPreTraining", "mlm"), ("BertForMaskedLM", "mlm"), ("RobertaForMaskedLM", "mlm")),
        *(("T5ForConditionalGeneration", "span"), ("LlamaForCausalLM", "text"), ("GPT2LMHeadModel", "text")),
        *(("ViTForImageClassification", "images"), ("ViTMAEForPreTraining", "images")),
        ("BertForSequenceClassification", None),
    ],
)
def test_a_class_learns_from_its_own_type_alone(name: str, right: str | None) -> None:
    for kind in ("text", "mlm", "span", "images"):
        more = "path='.'" if kind == "images" else "files=['.'], seq_len=32"
        text = of_class(name, f"dict(type='{kind}', {more})")
        found = [item for item in findings(text) if item.code == "BAT113"]
        assert (not found) == (kind == right), kind
        for item in found:
            assert marked(text, item).startswith("dict(type=")
            assert (f"data=dict(type={right!r})" in item.help) == (right is not None)
            assert "dslpar.initialize" in item.help


def test_a_length_alone_is_a_program_s_too() -> None:
    assert not [item for item in findings(of_class("BertForMaskedLM", "dict(seq_len=32)")) if item.code == "BAT113"]


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("BertForMaskedLM", True, "BertForMaskedLM does not predict whether a second piece of text follows the first"),
        ("BertForMaskedLM", False, ""),
        ("BertForPreTraining", True, ""),
        ("BertForPreTraining", False, "BertForPreTraining predicts whether a second piece of text follows the first"),
    ],
)
def test_pairs_of_texts_are_told_by_some_classes(name: str, given: bool, said: str) -> None:
    found = findings(of_class(name, f"dict(type='mlm', next_sentence={given})"))
    assert "".join(item.message for item in found if item.code == "BAT113") == said


def test_pairs_are_of_the_class() -> None:
    text = of_class("BertForMaskedLM", "dict(type='mlm', next_sentence=True)")
    (found,) = [item for item in findings(text) if item.code == "BAT113"]
    assert marked(text, found) == "True"
    assert found.help == "next_sentence=False, or leave it out"


def test_gpt_does_not_tell_masks() -> None:
    (found,) = [item for item in findings(MODEL + "data = dict(type='mlm')\n") if item.code == "BAT113"]
    assert "GPT takes input_ids" in found.message


def tokenizer(folder: Path, size: int, *special: str) -> None:
    vocabulary = {f"t{number}": number for number in range(size - len(special))}
    added = [{"id": len(vocabulary) + index, "content": text, "special": True} for index, text in enumerate(special)]
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": added}))


def linted(folder: Path, text: str) -> list[str]:
    path = folder / "cfg.py"
    path.write_text(text)
    return [item.concise() for item in check.lint(str(path), 1) if not item.code.startswith("PERF")]


def test_the_tokenizer_s_ids_need_a_vocabulary(tmp_path: Path) -> None:
    text = of_class("BertForMaskedLM", "dict(type='mlm', tokenizer='tokenizer.json', files=['.'])")
    tokenizer(tmp_path, 300, "[CLS]", "[SEP]", "[MASK]", "[PAD]")
    assert linted(tmp_path, text) == []
    tokenizer(tmp_path, 301, "[CLS]", "[SEP]", "[MASK]", "[PAD]")
    (found,) = linted(tmp_path, text)
    assert "cfg.py:1:74: BAT104" in found
    assert "vocab_size is 300, and the tokenizer has 301 tokens" in found
    tokenizer(tmp_path, 299, "[CLS]", "[SEP]", "[PAD]")
    (found,) = linted(tmp_path, text)
    assert "cfg.py:2:35: BAT112" in found
    assert "needs a token 'mask'" in found
    (tmp_path / "tokenizer.json").unlink()
    (found,) = linted(tmp_path, text)
    assert "BAT111" in found


def test_bytes_need_their_special_tokens() -> None:
    text = of_class("BertForMaskedLM", "dict(type='mlm')").replace("300", "259")
    (found,) = [item for item in findings(text) if item.code == "BAT104"]
    assert "vocab_size is 259, and bytes and special tokens are 260" in found.message
    text = of_class("T5ForConditionalGeneration", "dict(type='span', seq_len=512)").replace("300", "286")
    (found,) = [item for item in findings(text) if item.code == "BAT104"]
    assert "are 287" in found.message, "28 sentinels"


@pytest.mark.parametrize("norm", ["BatchNorm1d", "torch.nn.BatchNorm2d"])
def test_batch_norms_and_no_micro_size(norm: str) -> None:
    """Following the help satisfies lint; for another world it has another size."""
    model = "model = dict(type='Sequential', layers_cfg=[dict(type='Linear', in_features=4, out_features=4), {}])\n"
    text = (
        model.replace("{}", f"dict(type='{norm}', num_features=4)") + "batch = dict(global_size=64, accumulation=2)\n"
    )
    for world, size in ((1, 32), (4, 8)):
        (found,) = [item for item in findings(text, world) if item.code == "BAT116"]
        assert (found.help, found.severity) == (f"add micro_size={size} to batch", "warning")
        written = text.replace("accumulation=2", f"accumulation=2, micro_size={size}")
        assert "BAT116" not in [item.code for item in findings(written, world)]


OWN = "type='GPT', num_layers=2, hidden_size=32, num_heads=4, vocab_size=256, max_seq_len=64"


@pytest.mark.parametrize(
    ("model", "on", "off"),
    [
        ("type='transformers.MixtralForCausalLM', config=dict(output_router_logits=True)", "True", "False"),
        (f"{OWN}, experts=dict(num=4, balance=0.1)", "0.1", "0"),
    ],
)
def test_a_load_balancing_loss_and_no_accumulation(model: str, on: str, off: str) -> None:
    """Following the help satisfies lint; for another world it has another number."""
    text = f"model = dict({model})\n" + "batch = dict(global_size=64, micro_size=4)\n"
    for world, count in ((1, 16), (4, 4)):
        (found,) = [item for item in findings(text, world) if item.code == "BAT116"]
        assert (found.help, found.severity) == (f"replace micro_size by accumulation={count}", "warning")
        written = text.replace("micro_size=4", f"accumulation={count}")
        assert "BAT116" not in [item.code for item in findings(written, world)]
    assert "BAT116" not in [item.code for item in findings(text, 32)], "BAT101 says that there is no accumulation"
    for fine in (text.replace(on, off), text.replace("global_size=64, ", "")):
        assert "BAT116" not in [item.code for item in findings(fine, 4)]


def test_norms_of_a_sample_do_not_see_micro_batches() -> None:
    text = "model = dict(type='Sequential', layers_cfg=[dict(type='InstanceNorm1d', num_features=4)])\n"
    assert "BAT116" not in [item.code for item in findings(text, 4)]


# ---- conversations ----

SAID = '{"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]}'


def of_chat(folder: Path, text: str) -> list[Finding]:
    """Return lint's findings for a config in a folder, without those about speed."""
    (folder / "cfg.py").write_text(text)
    found = check.lint(str(folder / "cfg.py"), 1)
    return [item for item in found if item.code.startswith("BAT")]


def test_conversations_are_looked_at(tmp_path: Path) -> None:
    lines = [SAID, SAID, '{"messages": 3}']
    (tmp_path / "right.jsonl").write_text(SAID + "\n")
    (tmp_path / "wrong.jsonl").write_text("\n".join(lines))
    text = of_class("LlamaForCausalLM", "dict(type='chat', files=['right.jsonl', 'wrong.jsonl'], seq_len=32)")
    (found,) = of_chat(tmp_path, text)
    assert found.code == "BAT118"
    assert marked(text, found) == "'wrong.jsonl'"
    assert f"{tmp_path / 'wrong.jsonl'}:3: its messages are a int" in found.message
    assert of_chat(tmp_path, text.replace(", 'wrong.jsonl'", "")) == []
    (found,) = of_chat(tmp_path, text.replace("'wrong.jsonl']", "'gone.jsonl']"))
    assert found.code == "BAT111"
    both = text.replace(", 'wrong.jsonl']", "], eval_fraction=0.5, eval_path='right.jsonl'")
    assert [item.message for item in of_chat(tmp_path, both)] == [
        "eval_fraction has no effect with eval_path, which is the held-out data"
    ]


def test_lint_reads_little_of_conversations(tmp_path: Path) -> None:
    (tmp_path / "chat.jsonl").write_text(f"{SAID}\n" * 2000 + "no JSON\n")
    assert of_chat(tmp_path, of_class("LlamaForCausalLM", "dict(type='chat', files=['chat.jsonl'], seq_len=32)")) == []


def test_a_template_is_needed(tmp_path: Path) -> None:
    (tmp_path / "chat.jsonl").write_text(SAID)
    tokenizer(tmp_path, 200)
    text = of_class("LlamaForCausalLM", "dict(type='chat', files=['chat.jsonl'], seq_len=32, tokenizer='.')")
    (found,) = of_chat(tmp_path, text)
    assert (found.code, marked(text, found)) == ("BAT118", "'.'")
    assert "has no chat template" in found.message
    assert of_chat(tmp_path, text.replace("tokenizer='.'", "tokenizer='.', chat_template='chatml'")) == []
    text = text.replace("tokenizer='.'", "template='gone.jinja'")
    (found,) = of_chat(tmp_path, text)
    assert marked(text, found) == "'gone.jinja'"


ROTARY = MODEL.replace("max_seq_len=96", "max_seq_len=96, positions='rotary'")
PACKED = "data = dict(type='chat', files=['chat.jsonl'], seq_len=32, packing=True)\n"
LLAMA = "model = dict(type='transformers.LlamaForCausalLM', config=dict(vocab_size=300, rope_parameters={}))\n"
LONG = dict(rope_type="longrope", original_max_position_embeddings=16)


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (MODEL, "GPT uses a token's position in the row"),
        (ROTARY, ""),
        (LLAMA.format("{}"), ""),
        (LLAMA.format({**LONG, "original_max_position_embeddings": 32}), ""),
        (LLAMA.format(LONG), "type 'longrope' depend on the row's length"),
        (LLAMA.format({"full_attention": {"rope_type": "dynamic"}}), "type 'dynamic' depend on"),
        (of_class("GPT2LMHeadModel", "{}"), "GPT2LMHeadModel uses a token's position"),
        (of_class("OPTForCausalLM", "{}"), "OPTForCausalLM uses a token's position"),
        (of_class("BloomForCausalLM", "{}"), "BloomForCausalLM uses a token's position"),
        (of_class("BeamForCausalLM", "{}"), "BeamForCausalLM uses a token's position"),
        (of_class("MambaForCausalLM", "{}"), "dslpar does not know whether MambaForCausalLM keeps"),
        ("model = dict(type='my_package.MyModel')\n", ""),
    ],
)
def test_packing_is_exact_or_refused(tmp_path: Path, model: str, problem: str) -> None:
    (tmp_path / "chat.jsonl").write_text(SAID)
    text = model.replace("data = {}\n", "") + PACKED
    found = [item for item in of_chat(tmp_path, text) if item.code == "BAT119"]
    assert len(found) == bool(problem)
    for item in found:
        assert problem in item.message
        assert marked(text, item) == "True"
        assert item.help == "packing=False"
    assert "BAT119" not in [item.code for item in of_chat(tmp_path, text.replace("packing=True", "packing=False"))]


def test_a_capacity_of_experts_is_not_packed(tmp_path: Path) -> None:
    """Conversations of a row would compete for the places of an expert."""
    (tmp_path / "chat.jsonl").write_text(SAID)
    text = ROTARY.replace("data = {}\n", "") + PACKED
    text = text.replace("type='GPT',", "type='GPT', experts=dict(num=4, capacity_factor=1.25),")
    (item,) = [item for item in of_chat(tmp_path, text) if item.code == "BAT119"]
    assert "selects among all tokens of a row" in item.message
    assert item.help == "packing=False; or leave model.experts.capacity_factor out"
