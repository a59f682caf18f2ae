"""How a run's text becomes ids, and ids text: by what its data say, whichever type they are of."""

from __future__ import annotations

from pathlib import Path

import pytest

from dslpar.core.errors import DslparError
from dslpar.data.tokenize import Request, tokenize
from dslpar.inference.prompts import codec_of
from dslpar.layout.resolve import Job
from dslpar.linter import check

MODEL = "model = dict(type='GPT', num_layers=1, hidden_size=8, num_heads=2, vocab_size=256, max_seq_len=8)\n"
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
    with pytest.raises(DslparError, match=r"BAT212.*nothing says which tokenizer") as caught:
        codec_of(job_of(tmp_path, data))
    assert "--tokenizer" in caught.value.findings[0].help
