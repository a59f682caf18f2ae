"""`prove --on-devices` on a job's ranks: correct layouts pass in their precision, and all ranks end alike."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dslpar.cli.main import main
from tests.distributed.parity.test_prove import leave_out_the_data_all_reduce, sum_twice_over_y
from tests.support.forked_training import start_program

CONFIG = """\
model = dict(type='GPT', num_layers=2, hidden_size=32, num_heads=4, vocab_size=256, max_seq_len=32)
optimizer = dict(type='SGD', lr=0.1)
batch = dict(global_size=8)
train = dict(steps=4, clip_grad_norm=1.0)
"""
ONE_DIM = "parallel.tensor=dict(size=2, mode='1d')"
OWN_CLASS = """\
model = dict(type='tests.support.rank_dependent.RankDependent')
data = dict(seq_len=16)
batch = dict(global_size=8)
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "cfg.py"
    path.write_text(CONFIG)
    return path


def prove_on(
    ranks: int, argv: Sequence[str], folder: Path, change: Callable[[], None] = lambda: None
) -> tuple[list[int | None], str]:
    """Run the command on forked ranks, and return their exit statuses and all output."""

    def program() -> int:
        change()
        return main(["prove", *argv, "--on-devices"])

    output = folder / "said.txt"
    with start_program(ranks, program, output) as job:
        return job.wait(), output.read_text()


# ---- correct layouts are proved ----


@pytest.mark.parametrize(
    ("overrides", "axes", "reference"),
    [
        (["parallel.pipeline=2", ONE_DIM, "zero.stage=1", "precision='bf16'"], "pipe 2, y 2", "float32"),
        ([ONE_DIM, "zero.stage=3", "precision='fp16'"], "data 2, y 2", "float32"),
        (["parallel.tensor=dict(size=4, mode='2d')", "model.dropout=0.1"], "q 2", "float64"),
    ],
)
def test_a_layout_is_proved_at_its_own_size_and_precision(
    overrides: list[str], axes: str, reference: str, config: Path, tmp_path: Path
) -> None:
    path = tmp_path / "proof.json"
    argv = [str(config), *overrides, "--format", "json", "--certificate", str(path)]
    statuses, said = prove_on(4, argv, tmp_path)
    assert statuses == [0] * 4, said
    proof = json.loads(said)  # rank 0 alone prints
    assert proof == json.loads(path.read_text())
    assert proof["verdict"] == "proved"
    assert proof["layout"]["proved_on"] == [{"ranks": 4, "axes": axes}]
    assert proof["layout"]["reference"] == f"{reference} on cpu"
    assert {each["name"] for each in proof["checks"]} == {"loss", "gradients", "norm", "copies"}
    assert all(each["worst"] <= each["bound"] < 0.1 for each in proof["checks"])
    assert proof["shrunk"] == (["model.dropout: 0.1 -> 0.0"] if "model.dropout=0.1" in overrides else [])
    assert main(["prove", str(config), *overrides, "--verify", str(path)]) == 0


def test_the_miniature_is_used_where_the_model_does_not_fit(config: Path, tmp_path: Path) -> None:
    """60 % of the free memory are 1 KiB too little for 34,688 weights and as many gradients, in float32."""

    def little_memory() -> None:
        from dslpar.parity import prove_on_devices

        prove_on_devices._free_bytes = lambda device: int((34_688 * 8 - 1024) / 0.6)

    statuses, said = prove_on(2, [str(config), "zero.stage=1", "precision='bf16'"], tmp_path, little_memory)
    assert statuses == [0, 0], said
    assert "proved on 2 ranks (data 2), bf16 against float32 on cpu" in said
    assert "model.hidden_size: 32 -> 24" in said
    assert "the model at its own size: its weights and gradients are 0.0 GiB, and cpu has 0.0 GiB free" in said


# ---- mistakes are found ----


@pytest.mark.parametrize(
    ("change", "overrides", "axis", "guess"),
    [
        (leave_out_the_data_all_reduce, [], "data", "its gradient is not averaged over data"),
        (sum_twice_over_y, [ONE_DIM, "zero.stage=1", "precision='bf16'"], "", ""),
    ],
)
def test_a_mistake_is_found_on_every_rank(
    change: Callable[[], None], overrides: list[str], axis: str, guess: str, config: Path, tmp_path: Path
) -> None:
    statuses, said = prove_on(2, [str(config), *overrides, "--format", "json"], tmp_path, change)
    assert statuses == [1, 1], said
    proof = json.loads(said)
    assert proof["verdict"] == "differs"
    (gradients,) = (each for each in proof["checks"] if each["name"] == "gradients")
    assert gradients["worst"] > gradients["bound"]
    difference = proof["first_difference"]
    assert difference["parameter"]
    assert (difference["axis"] or "") == axis, difference
    assert guess in difference["guess"]


def test_a_mistake_of_a_class_of_one_s_own_is_found(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(OWN_CLASS)
    statuses, said = prove_on(2, [str(path), "zero.stage=1", "precision='bf16'"], tmp_path)
    assert statuses == [1, 1], said
    assert f"{path}, 2 ranks: differs on 2 ranks (data 2), bf16 against float32 on cpu" in said
    assert said.count("DIFFERS") >= 2
    (line,) = (line for line in said.splitlines() if line.startswith("first difference: "))
    assert "shift.weight" in line
    assert "has a gradient only under the layout" in said


def test_a_class_of_one_s_own_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    """There is no miniature of a user's class."""
    path = tmp_path / "own.py"
    path.write_text(OWN_CLASS)

    def no_memory() -> None:
        from dslpar.parity import prove_on_devices

        prove_on_devices._free_bytes = lambda device: 0

    statuses, said = prove_on(2, [str(path)], tmp_path, no_memory)
    assert statuses == [2, 2], said
    assert said.count("HST235") == 1


# ---- all ranks end together ----


def on_rank_1(act: Callable[[], None]) -> Callable[[], None]:
    return lambda: act() if os.environ["RANK"] == "1" else None


def without_data() -> None:
    """Make this rank find no data once the engine has been built."""
    from dslpar.core.catalog import raise_finding
    from dslpar.parity import prove_on_devices

    def missing(job: Any, part: Any, inputs: Any) -> Any:
        raise_finding("BAT202", "the text is gone on this rank alone", "bring it back", job.path, "data")

    prove_on_devices.make_samples = missing


def with_another_seed() -> None:
    """Make this rank read another config than rank 0."""
    from dslpar.linter import check

    load = check.load
    check.load = lambda source, overrides=(), **others: load(source, [*overrides, "train.seed=5"], **others)


@pytest.mark.parametrize(
    ("change", "code"), [(without_data, "BAT202"), (with_another_seed, "HST203")], ids=["its data", "its config"]
)
def test_a_finding_of_one_rank_ends_all(change: Callable[[], None], code: str, config: Path, tmp_path: Path) -> None:
    statuses, said = prove_on(2, [str(config)], tmp_path, on_rank_1(change))
    assert statuses == [2, 2], said
    assert said.count(code) == 1
    assert f"{config}, 2 ranks: refused" in said


def test_a_rank_that_is_alone_with_a_finding_ends_all(config: Path, tmp_path: Path) -> None:
    """Rank 0 waits in a collective of the engine's build, which rank 1 does not join."""

    def refuse() -> None:
        from dslpar.core.catalog import raise_finding
        from dslpar.parity import prove_on_devices

        def refused(job: Any, groups: Any, **others: Any) -> Any:
            raise_finding("PRE201", "this rank's device has no fp32", "another host", job.path, "precision")

        prove_on_devices.build_engine = refused
        prove_on_devices.ALONE_S = 1.0

    statuses, said = prove_on(2, [str(config)], tmp_path, on_rank_1(refuse))
    assert 0 not in statuses, said
    assert "PRE201" in said
    assert said.count("PRE201") >= 1
    assert "rank 1 of 2" in said


def test_what_lint_refuses_is_refused(config: Path, tmp_path: Path) -> None:
    statuses, said = prove_on(1, [str(config), "parallel.tensor=3"], tmp_path)
    assert statuses == [2]
    assert "TEN101" in said


def test_flags_of_the_other_form_are_refused(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags, word in ((["--on-devices", "--ranks", "4"], "--ranks"), (["--small", "--world-size", "2"], "--small")):
        with pytest.raises(SystemExit) as ended:
            main(["prove", str(config), *flags])
        assert ended.value.code == 2
        assert word in capsys.readouterr().err


def test_half_a_place_is_refused(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Status 2, not 1: nothing was compared."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert main(["prove", str(config), "--on-devices"]) == 2
    assert "HST201" in capsys.readouterr().err
