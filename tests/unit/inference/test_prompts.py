"""Prompts: text to ids and back, as the run's data of any type define it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dslpar.core.errors import DslparError
from dslpar.data.tokenize import Request, tokenize
from dslpar.data.train_tokenizer import train_tokenizer
from dslpar.inference.prompts import codec_of, read_prompts
from dslpar.layout.resolve import Job
from dslpar.linter import check
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

MODEL = "model = dict(type='GPT', num_layers=1, hidden_size=8, num_heads=2, vocab_size=400, max_seq_len=8)\n"
OWN = "dict(type='my.Data')"


def job_of(folder: Path, data: str) -> Job:
    return check.check(check.load_text(f"{MODEL}data = {data}\n", str(folder / "cfg.py")), 1).job


def test_a_blend_has_the_vocabulary_of_the_first_part_that_says_one(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ab " * 400)
    tokenize(Request([str(tmp_path / "a.txt")], str(tmp_path / "tokens")))
    for part in ("dict(type='tokens', path='tokens')", "dict(files=['a.txt'])"):
        codec = codec_of(job_of(tmp_path, f"dict(type='blend', parts=[{OWN}, {part}])"))
        assert codec.encode("ab") == [97, 98]
        assert codec.decode([97, 98]) == "ab"


@pytest.mark.parametrize("data", [OWN, "dict(type='huggingface', path='.')", f"dict(type='blend', parts=[{OWN}] * 2)"])
def test_ids_of_nobody_s_tokenizer_need_one(tmp_path: Path, data: str) -> None:
    (tmp_path / "state.json").write_text('{"_data_files": [], "_fingerprint": "a"}')
    (tmp_path / "dataset_info.json").write_text('{"features": {}}')
    with pytest.raises(DslparError, match=r"BAT212.*the tokenizer that made .* is unknown") as caught:
        codec_of(job_of(tmp_path, data))
    assert "--tokenizer" in caught.value.findings[0].help


@pytest.mark.skipif(not HAS_TRANSFORMERS, reason=NO_TRANSFORMERS)
@pytest.mark.parametrize("model", ["bpe", "unigram", "wordpiece"])
def test_what_follows_a_prompt_is_written_as_in_one_text(tmp_path: Path, model: str) -> None:
    """Decoded alone, the ids of " world" have no blank in two of the three models."""
    (tmp_path / "text.txt").write_text("hello world this is some text\n" * 200)
    train_tokenizer([str(tmp_path / "text.txt")], str(tmp_path / "own"), 120 if model == "unigram" else 330, model)
    codec = codec_of(job_of(tmp_path, "dict(files=['text.txt'], tokenizer='own')"))
    whole, prompt = codec.encode("hello world this"), codec.encode("hello")
    assert whole[: len(prompt)] == prompt
    assert codec.decode_after(prompt, whole[len(prompt) :]) == " world this"
    assert codec.decode_after([], whole).strip() == "hello world this"


def test_a_file_s_prompts_are_its_lines_and_nothing_else_breaks_them(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("one\x0ctwo\n\nthree\u2028four\n")
    assert read_prompts(str(tmp_path / "prompts.txt")) == ["one\x0ctwo", "three\u2028four"]
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a\u2028b"}\n{"prompt": "\\ud83d"}\n')
    found = read_prompts(str(tmp_path / "prompts.jsonl"))
    assert found[0] == "a\u2028b"
    (tmp_path / "a.txt").write_text("ab " * 400)
    assert codec_of(job_of(tmp_path, "dict(files=['a.txt'])")).encode(found[1]) == [ord("?")]
