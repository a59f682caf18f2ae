"""`dslpar data tokenize`, killed at random and run again: the bytes of an undisturbed run, no partial files."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dslpar.schema.token_folders import read_token_folder
from tests.support.paths import ROOT
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

KILLS = 10
pytestmark = pytest.mark.skipif(not HAS_TRANSFORMERS, reason=NO_TRANSFORMERS)
PROGRAM = """
import sys
from dslpar.data.tokenize import Request, tokenize
tokenize(Request([sys.argv[1]], sys.argv[2], sys.argv[3], workers=2, shard_bytes=1 << 16))
"""


def start(text: Path, output: Path, tokenizer: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", PROGRAM, str(text), str(output), str(tokenizer)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)


@pytest.mark.prove
def test_killed_and_run_again(tmp_path: Path) -> None:
    from dslpar.data.train_tokenizer import train_tokenizer

    (tmp_path / "text").mkdir()
    words = random.Random(1).choices([f"word{number}" for number in range(3000)], k=400_000)
    for number in range(40):
        (tmp_path / "text" / f"{number:02d}.txt").write_text(" ".join(words[number * 10_000 : (number + 1) * 10_000]))
    train_tokenizer([str(tmp_path / "text")], str(tmp_path / "tokenizer"), 400)
    began = time.monotonic()
    assert start(tmp_path / "text", tmp_path / "calm", tmp_path / "tokenizer").wait() == 0
    took_s, rng, kills, round_ = time.monotonic() - began, random.Random(7), 0, 0
    while kills < KILLS:
        round_ += 1
        assert round_ < 50, f"only {kills} runs were killed before their end"
        output = tmp_path / f"killed_{round_}"
        while not output.exists():
            process = start(tmp_path / "text", output, tmp_path / "tokenizer")
            try:
                process.wait(rng.uniform(0.1, 1.1) * took_s)
            except subprocess.TimeoutExpired:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
                kills += 1
                assert not output.exists() or not read_token_folder(str(output)).problem
        assert start(tmp_path / "text", output, tmp_path / "tokenizer").wait() == 0
        assert not output.with_name(output.name + ".part").exists()
        for name in ("tokens.npy", "documents.npy", "tokenizer/tokenizer.json", "tokens.json"):
            assert (output / name).read_bytes() == (tmp_path / "calm" / name).read_bytes(), name
