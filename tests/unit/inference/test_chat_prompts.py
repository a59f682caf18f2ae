"""Chat prompts: the user's text in the template of the run or tokenizer, and the end of an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dslpar.core.errors import DslparError
from dslpar.layout.resolve import Job, resolve
from dslpar.models.gpt import section
from dslpar.schema import sections
from dslpar.schema.datasets import ChatData, TextData
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

if not HAS_TRANSFORMERS:
    pytest.skip(NO_TRANSFORMERS, allow_module_level=True)

from dslpar.inference.chat_prompts import chat_prompts_of

GPT = section.GPT(num_layers=1, hidden_size=8, num_heads=2, vocab_size=400, max_seq_len=64)
OWN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}\n{% endfor %}"
OWN += "{% if add_generation_prompt %}[assistant]{% endif %}"


def job(folder: Path, data: Any) -> Job:
    return resolve(sections.Spec(model=GPT, data=data), 1, str(folder / "cfg.py"))


def tokenizer(folder: Path, **values: Any) -> str:
    """Write a tokenizer's folder, of which only the template's files are read."""
    folder.mkdir()
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return str(folder)


def test_bytes_are_asked_by_chatml(tmp_path: Path) -> None:
    asked = chat_prompts_of(job(tmp_path, ChatData(files=("chat.jsonl",))))
    assert asked.write("yes?") == "<|im_start|>user\nyes?<|im_end|>\n<|im_start|>assistant\n"
    assert asked.answer_ends == "<|im_end|>"


@pytest.mark.parametrize("data", [ChatData(files=("chat.jsonl",), tokenizer="own"), TextData(tokenizer="own")])
def test_a_tokenizer_s_own_template_is_taken(tmp_path: Path, data: Any) -> None:
    tokenizer(tmp_path / "own", chat_template=OWN, eos_token="</s>")
    asked = chat_prompts_of(job(tmp_path, data))
    assert asked.write("2 + 2?") == "[user]2 + 2?</s>\n[assistant]"
    assert asked.answer_ends == "</s>"


def test_the_run_s_template_goes_before_the_tokenizer_s_and_another_tokenizer_before_both(tmp_path: Path) -> None:
    tokenizer(tmp_path / "own", chat_template=OWN, eos_token="</s>")
    plain = "{% for m in messages %}{{ m.content }}|{% endfor %}"
    asked = chat_prompts_of(job(tmp_path, ChatData(files=("c.jsonl",), tokenizer="own", template=plain)))
    assert (asked.write("a"), asked.answer_ends) == ("a|", "|")
    other = tokenizer(tmp_path / "other", chat_template=OWN.replace("[", "<"), eos_token="<end>")
    assert chat_prompts_of(job(tmp_path, ChatData(files=("c.jsonl",))), other).answer_ends == "<end>"


@pytest.mark.parametrize(
    ("template", "code", "said"),
    [
        (None, "BAT218", "has no chat template"),
        ("{% for %}", "BAT219", "line 1 of the template"),
        ("{{ raise_exception('a system message first') }}", "BAT219", "a system message first"),
    ],
)
def test_what_cannot_be_asked_is_refused(tmp_path: Path, template: str | None, code: str, said: str) -> None:
    tokenizer(tmp_path / "own", **({} if template is None else {"chat_template": template}))
    with pytest.raises(DslparError) as caught:
        chat_prompts_of(job(tmp_path, ChatData(files=("c.jsonl",), tokenizer="own")))
    (found,) = caught.value.findings
    assert (found.code, found.key) == (code, "data.template")
    assert said in found.message
