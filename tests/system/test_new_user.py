"""A new user's path: docs/tutorials/your_text.md in a fresh clone, each command in its own process, timed.

The clone has the committed files. It runs in the Python environment of the tests, since the time of `make setup`
depends on pip and the network.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.runs import BIN, start
from tests.support.stopwatch import Stopwatch
from tests.support.tutorials import blocks, commands
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

PAGE = "your_text"
LIMIT_S = 8 * 60
"""On CPU ranks and two otherwise idle cores."""


def test_it_is_seven_commands() -> None:
    shown = [each.text for block in blocks(PAGE) if block.language == "console" for each in commands(block)]
    ours = [" ".join(text.split()[1:3]) for text in shown if text.startswith("dslpar ")]
    assert [text.split()[0] for text in ours] == ["data", "data", "launch", "eval", "launch", "generate", "checkpoint"]


@pytest.mark.prove
@pytest.mark.minutes(8)
@pytest.mark.skipif(not HAS_TRANSFORMERS, reason=NO_TRANSFORMERS)
def test_from_a_fresh_clone_to_the_same_logits_in_transformers(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    env = {
        "PYTHONPATH": str(clone),
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    }
    where = start([sys.executable, "-c", "import dslpar; print(dslpar.__file__)"], folder=clone, **env)
    assert where.output.startswith(str(clone)), where.output
    seconds, clock = {}, Stopwatch()
    for block in blocks(PAGE):
        if block.language != "console":
            (clone / block.name).write_text(block.text, encoding="utf-8")
            continue
        for command in commands(block):
            began = time.monotonic()
            done = start(["bash", "-c", command.text], folder=clone, **env)
            seconds[command.text] = time.monotonic() - began
            command.check(done.status, done.output, f"{PAGE}.md:{block.line}")
    alone_s = clock.alone_s()
    times = "\n".join(f"{taken:6.1f} s  {text}" for text, taken in seconds.items())
    print(f"{times}\n{alone_s:6.1f} s of this machine without others, of {LIMIT_S}")
    assert alone_s < LIMIT_S, times
