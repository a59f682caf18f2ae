"""Programs in the shape of ColossalAI's examples run by their import lines alone."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.support import ported_programs as ported
from tests.support.ported_programs import Program
from tests.support.ranks import on_ranks
from tests.support.sampling import sampled


def _some(ranks: int, each_time: bool) -> list[Program]:
    return [each for each in ported.RUNNING if each.ranks == ranks and (each.name in ported.EACH_TIME) == each_time]


JOBS = {f"{ranks}{rest}": _some(ranks, not rest) for ranks in (1, 2) for rest in ("", ", the others")}
JOBS["1, by a Trainer"] = ported.WITH_TRAINER


@pytest.mark.parametrize("job", sampled(JOBS, {"1", "2"}))
def test_programs_run_by_their_import_lines(job: str, tmp_path: Path) -> None:
    programs = JOBS[job]
    ported.prepare(programs, tmp_path)
    for result in on_ranks(programs[0].ranks, ported.run, programs, tmp_path, init="deepspeed"):
        assert list(result) == [program.name for program in programs]
        for name, losses in result.items():
            assert all(map(math.isfinite, losses)), name
            assert len(losses) == 1 or losses[-1] <= losses[0], f"{name} does not learn: {losses}"


def test_a_pipeline_whose_loader_shuffles_learns(tmp_path: Path) -> None:
    """All stages load the same samples, though each draws other numbers from torch's generator."""
    program = Program("language_deepnet", ranks=2, arguments=("--from_torch",))
    ported.prepare([program], tmp_path)
    *_, last = on_ranks(2, ported.run, [program], tmp_path, init="deepspeed")
    assert last["language_deepnet"][0] < 3.2, "the loss of random guesses is log(32) = 3.47"


@pytest.mark.parametrize(
    ("ranks", "tensor"),
    sampled([(4, "size=4, mode='2d'"), (8, "size=8, mode='2.5d', depth=2"), (8, "size=8, mode='3d'")], ()),
)
def test_a_program_cuts_its_input_by_the_groups_of_each_mode(ranks: int, tensor: str, tmp_path: Path) -> None:
    """The program's own chunks by ParallelMode are those of dslpar's layers: the output is that of 1d."""
    outputs = []
    for number, config in ((2, "size=2, mode='1d'"), (ranks, tensor)):
        folder = tmp_path / str(number)
        folder.mkdir()
        program = Program("features_tensor_parallel", number, tensor=config)
        ported.prepare([program], folder)
        results = on_ranks(number, ported.run, [program], folder, init="deepspeed")
        outputs.append({result["features_tensor_parallel"][0] for result in results}.pop())
    assert outputs[0] > 0
    assert outputs[1] == pytest.approx(outputs[0], rel=1e-5)
