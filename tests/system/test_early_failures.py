"""A rank that fails before the process group exists ends the others, without help from a launcher."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.forked_training import start_program
from tests.support.runs import CONFIG, write_config
from tests.support.stopwatch import Stopwatch


def start_ranks(tmp_path: Path, *failing: int) -> tuple[list[int | None], str, float]:
    """Start two ranks that take themselves to be on two hosts, some without the text. Return statuses, output, time."""
    good = write_config(tmp_path, CONFIG + f"train['output_dir'] = {str(tmp_path / 'out')!r}\n")
    bad = tmp_path / "elsewhere" / "cfg.py"
    bad.parent.mkdir()
    bad.write_text(good.read_text())

    def program() -> int:
        from dslpar.training.main import main

        os.environ["LOCAL_SIZE"] = "1"
        return main(["--config", str(bad if int(os.environ["RANK"]) in failing else good)])

    warm.import_deepspeed()
    watch = Stopwatch()
    with start_program(2, program, tmp_path / "said.txt") as job:
        statuses = job.wait(60)
    return statuses, (tmp_path / "said.txt").read_text(), watch.alone_s()


@pytest.mark.parametrize("failing", [0, pytest.param(1, marks=pytest.mark.prove)])
def test_one_rank_of_a_program_that_cannot_start_ends_the_other(tmp_path: Path, failing: int) -> None:
    """The program imports dslpar, and sets up nothing itself."""

    def program() -> int:
        import dslpar

        os.environ["LOCAL_SIZE"] = "1"
        dslpar.start({"parallel": {"pipeline": 3 if int(os.environ["RANK"]) == failing else 2}})
        return 0

    warm.import_deepspeed()
    watch = Stopwatch()
    with start_program(2, program, tmp_path / "said.txt") as job:
        statuses = job.wait(60)
    said = (tmp_path / "said.txt").read_text()
    assert 0 not in statuses, said
    assert watch.alone_s() < 30, "torch would wait for half an hour"
    assert "PAR102" in said
    assert f"rank {failing} of 2" in said
    assert "peer is gone" not in said


@pytest.mark.parametrize("failing", [0, pytest.param(1, marks=pytest.mark.prove)])
def test_one_rank_that_cannot_run_ends_the_other(tmp_path: Path, failing: int) -> None:
    statuses, said, seconds = start_ranks(tmp_path, failing)
    assert 0 not in statuses, said
    assert seconds < 30, "torch would wait for half an hour"
    assert said.count("text.txt") >= 1
    assert ("rank 1 of 2 on" in said) == (failing == 1)
    assert "Traceback" not in said
    assert "peer is gone" not in said


def test_what_keeps_all_ranks_from_running_is_said_once(tmp_path: Path) -> None:
    statuses, said, _ = start_ranks(tmp_path, 0, 1)
    assert 0 not in statuses, said  # a rank that is slow to end by itself is killed
    assert said.count("error:") <= 1
    assert "rank 1 of 2" not in said
