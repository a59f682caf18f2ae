"""`dslpar diff`: no difference in form counts, every other one is listed, from either side."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from dslpar.cli import main as cli_main
from dslpar.layout.deepspeed_config import ds_config
from dslpar.linter import check
from dslpar.provenance.deepspeed import flat
from dslpar.provenance.differences import Difference, compare, of_what_runs
from dslpar.provenance.subject import Subject
from tests.support.sampling import sampled
from tests.unit.provenance.test_values import CONFIGS, MODEL, ROOT, world_of

WORLDS = {path: world_of(path) for path in CONFIGS}
PAIRS = [pair for pair in combinations(CONFIGS, 2) if WORLDS[pair[0]] == WORLDS[pair[1]]]


def each_of(quick: list[tuple[str, str]]) -> list[Any]:
    """Return all pairs; `make test` runs those of `quick`."""
    return sampled([(pair,) for pair in PAIRS], lambda row: row[0] in quick, named=lambda row: " ".join(row[0]))


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def texts(left: str, right: str, world: int | None = 8) -> list[Difference]:
    return compare(*(Subject(check.load_text(text, "cfg.py"), world) for text in (left, right)))


def groups(found: list[Difference]) -> dict[str, set[str]]:
    return {group: {each.key for each in found if each.group == group} for group in ("written", "follows", "form")}


@pytest.mark.parametrize("path", CONFIGS)
def test_of_a_config_with_itself_there_is_none(path: str) -> None:
    assert compare(Subject(check.load(path), WORLDS[path]), Subject(check.load(path), WORLDS[path])) == []


@pytest.mark.parametrize("pair", each_of(PAIRS[::16]))
def test_from_either_side_it_is_the_same(pair: tuple[str, str]) -> None:
    left, right = (Subject(check.load(path), WORLDS[path]) for path in pair)
    swapped = [Difference(each.key, each.group, each.right, each.left) for each in compare(right, left)]
    assert compare(left, right) == swapped


@pytest.mark.parametrize("pair", each_of(PAIRS[::8]))
def test_what_differs_in_the_job_is_told(pair: tuple[str, str]) -> None:
    """Mesh, batch, stages and all of DeepSpeed's dict are computed independently of the values."""
    found = {each.key for each in of_what_runs(compare(*(Subject(check.load(path), WORLDS[path]) for path in pair)))}
    left, right = (check.resolve(path, WORLDS[path]) for path in pair)
    one, other = (dict(flat(ds_config(job))) for job in (left, right))
    names = ("output_path", "job_name", "project")
    theirs = {
        f"deepspeed.{key}"
        for key in {*one, *other}
        if (key in one, one.get(key)) != (key in other, other.get(key)) and not key.endswith(names)
    }
    assert {key for key in found if key.startswith("deepspeed.")} == theirs
    assert ("parallel.data.size" in found) == (left.mesh.data != right.mesh.data)
    assert ("parallel.pipeline.size" in found) == (left.mesh.pipe != right.mesh.pipe)
    assert ("parallel.tensor.size" in found) == (left.mesh.tensor.beside_context != right.mesh.tensor.beside_context)
    for size in ("global_size", "micro_size", "accumulation"):
        assert (f"batch.{size}" in found) == (getattr(left.batch, size) != getattr(right.batch, size))


LIBAI = "train = dict(dist=dict(tensor_parallel_size=2, pipeline_parallel_size=2))\n"
SAME = {
    "LiBai's form": (LIBAI, "parallel = dict(pipeline=dict(size=2, method='libai'), tensor=dict(size=2, mode='1d'))\n"),
    "the cut by another method": (
        "parallel = dict(pipeline=dict(size=2, method='uniform'))\n",
        "parallel = dict(pipeline=dict(size=2, stage_ids=[0, 0, 1, 1]))\n",
    ),
    "shorthands": (
        "zero = 1\nparallel = dict(pipeline=2)\n",
        "zero = dict(stage=1)\nparallel = dict(pipeline=dict(size=2))\n",
    ),
    "two sizes of three": (
        "batch = dict(global_size=32, micro_size=2)\n",
        "batch = dict(micro_size=2, accumulation=2)\n",
    ),
    "ColossalAI's micro-batches": (
        "parallel = dict(pipeline=2)\nschedule = dict(num_microbatches=4)\n",
        "parallel = dict(pipeline=2)\nbatch = dict(accumulation=4)\n",
    ),
    "a default that is written": ("", "train = dict(seed=1234)\nprecision = 'fp32'\n"),
    "an inferred size that is written": ("", "parallel = dict(data=8)\n"),
    "sequence of one rank": ("", "parallel = dict(tensor=dict(size=1, mode='1d'))\n"),
    "a monitor that is off": ("", "monitor = dict(csv=False)\n"),
    "names": ("", "_n = 2\nmodel.dropout = 0.0 * _n\n"),
}


@pytest.mark.parametrize("case", SAME)
def test_form_is_no_difference(case: str) -> None:
    left, right = SAME[case]
    found = texts(MODEL + left, MODEL + right)
    assert of_what_runs(found) == []
    assert found


def test_written_and_what_follows() -> None:
    two = "parallel = dict(pipeline=2)\nbatch = dict(global_size=16)\n"
    found = groups(texts(MODEL + two, MODEL + two.replace("2)", "4)")))
    assert found["written"] == {"parallel.pipeline.size"}
    assert found["follows"] == {
        "parallel.data.size",
        "parallel.pipeline.stage_ids",
        "parallel.pipeline.counts",
        "batch.micro_size",
        "deepspeed.train_micro_batch_size_per_gpu",
    }
    assert found["form"] == set()


CHANGES = {
    "zero = 1": {"zero.stage"},
    "train = dict(seed=1)": {"train.seed"},
    "optimizer = dict(type='AdamW', betas=(0.9, 0.95))": {"optimizer.betas"},
    "precision = 'bf16'\nzero = 1": {"precision.dtype", "zero.stage"},
    "deepspeed = dict(wall_clock_breakdown=True)": {"deepspeed.wall_clock_breakdown"},
    "model.tie_embeddings = False": {"model.tie_embeddings"},
    "parallel = dict(order=('data', 'pipe', 'tensor'))": {"parallel.order"},
    "data = dict(files=['elsewhere'])": {"data.files"},
    "train = dict(output_dir='there')": {"train.output_dir"},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_told_as_written(change: str) -> None:
    assert groups(texts(MODEL, f"{MODEL}{change}\n"))["written"] == CHANGES[change]


def test_true_is_not_one() -> None:
    one, true = (f"{MODEL}optimizer = dict(type='my_package.MyOptimizer', flag={value})\n" for value in ("1", "True"))
    assert groups(texts(one, true))["written"] == {"optimizer.flag"}
    assert groups(texts(MODEL + "deepspeed = dict(dump_state=True)\n", MODEL))["written"] == {"deepspeed.dump_state"}


# The command ------------------------------------------------------------------------------------------------------


def write(folder: Path, **names: str) -> list[str]:
    for name, text in names.items():
        (folder / f"{name}.py").write_text(MODEL + text)
    return [str(folder / f"{name}.py") for name in names]


def test_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left, same, other, wrong = write(tmp_path, a="", b="train = dict(seed=1234)\n", c="zero = 1\n", d="zero = 9\n")
    assert cli_main.main(["diff", left, left, "--world-size", "8"]) == 0
    assert capsys.readouterr().out == "no difference\n"
    assert cli_main.main(["diff", left, same, "--world-size", "8"]) == 0
    assert "no difference in what runs" in capsys.readouterr().out
    assert cli_main.main(["diff", left, other, "--world-size", "8"]) == 1
    assert capsys.readouterr().out.splitlines()[2:6] == [
        "written differently:",
        "  zero.stage",
        "    - 0  default",
        f"    + 1  written: {other}:2:8 (zero)",
    ]
    assert cli_main.main(["diff", left, wrong, "--world-size", "8"]) == 2
    assert "CFG103" in capsys.readouterr().err
    assert cli_main.main(["diff", left, other, "--world-size", "8", "zero.stage=2"]) == 0


def test_one_config_is_no_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = write(tmp_path, a="")
    with pytest.raises(SystemExit) as ended:
        cli_main.main(["diff", path])
    assert ended.value.code == 2
    assert "diff takes 2 configs, not 1" in capsys.readouterr().err


def test_without_a_world_it_says_what_is_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left, right = write(tmp_path, a="", b="zero = 1\n")
    assert cli_main.main(["diff", left, right]) == 1
    assert "parallel.data.size" in capsys.readouterr().err


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left, right = write(tmp_path, a="", b="zero = 1\n")
    assert cli_main.main(["diff", left, right, "--world-size", "8", "--format", "json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert (shown["left"], shown["right"], shown["world_size"]) == (left, right, 8)
    (stage,) = [each for each in shown["differences"] if each["key"] == "zero.stage"]
    assert (stage["group"], stage["left"]["value"], stage["right"]["value"]) == ("written", 0, 1)
