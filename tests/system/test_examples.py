"""examples/: each program runs as its docstring says, and learns; one resumes on another layout."""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
from pathlib import Path

import pytest

from dslpar.cli.main import main
from tests.support import warm
from tests.support.forked_training import start_program
from tests.support.paths import ROOT

CONFIG, TEXT, TUNING = (f"examples/configs/{name}.py" for name in ("points", "text", "fine_tuning"))


def run(tmp_path: Path, ranks: int, name: str, *argv: str) -> str:
    """Run an example on that many ranks, and return the output."""
    words = [f"examples/{name}.py", *argv, f"train.output_dir={tmp_path / 'out'}"]

    def program() -> None:
        sys.argv = words
        runpy.run_path(str(ROOT / words[0]), run_name="__main__")

    said = tmp_path / "said.txt"
    said.unlink(missing_ok=True)
    with start_program(ranks, program, said) as job:
        statuses = job.wait(120)
    text = said.read_text(encoding="utf-8")
    assert statuses == [0] * ranks, text
    assert "Traceback" not in text
    return text


def losses(tmp_path: Path) -> list[float]:
    lines = (tmp_path / "out/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [*range(1, len(lines) + 1)]
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.prove
def test_own_dataset(tmp_path: Path) -> None:
    said = run(tmp_path, 2, "own_dataset", "--config", CONFIG)
    assert "after 40 steps the held-out loss is 0." in said
    assert said.count("held-out loss before") == 2, "rank 0 alone speaks: before training, and after"
    assert losses(tmp_path)[-1] < 0.4 < losses(tmp_path)[0]
    run(tmp_path, 2, "own_dataset", "--config", CONFIG, "--resume", "train.steps=44", "parallel.pipeline=2")
    assert len(losses(tmp_path)) == 44
    said = run(tmp_path, 1, "own_dataset", "--config", CONFIG, "--eval-only")
    assert "held-out loss at step 44: 0." in said


@pytest.mark.prove
@pytest.mark.parametrize(("ranks", "layout"), [(4, []), (8, ["parallel.tensor.size=8", "parallel.tensor.mode=3d"])])
def test_own_model(tmp_path: Path, ranks: int, layout: list[str]) -> None:
    run(tmp_path, ranks, "own_model", "--config", TEXT, "train.steps=8", "train.eval_interval=8", *layout)
    assert losses(tmp_path)[-1] < losses(tmp_path)[0] - 0.5
    assert losses(tmp_path)[0] == pytest.approx(5.5, abs=0.2), "near log(256), in every layout"


def test_own_stages(tmp_path: Path) -> None:
    run(tmp_path, 2, "own_stages", "--config", CONFIG, "parallel.pipeline=2")
    assert losses(tmp_path)[-1] < 0.5 < losses(tmp_path)[0]


@pytest.mark.prove
@pytest.mark.parametrize("more", [["--lora"], []])
def test_fine_tune(tmp_path: Path, more: list[str]) -> None:
    warm.import_transformers("LlamaForCausalLM")
    folder = tmp_path / "tiny"
    run(tmp_path, 1, "fine_tune", "--config", TUNING, "--make", "--folder", str(folder))
    assert (folder / "config.json").is_file()
    words = ["--config", TUNING, f"model.pretrained={folder}", "train.steps=20", "optimizer.lr=1e-2", *more]
    said = run(tmp_path, 2, "fine_tune", *words)
    trained = re.search(r"(\d+) tensors of rank 0 were trained, in 20 steps", said)
    assert trained is not None
    assert (trained[1] == "8") == bool(more), "two adapters of two matrices in each of two layers; or all weights"
    assert losses(tmp_path)[-1] < losses(tmp_path)[0] - (0.02 if more else 0.5)


@pytest.mark.prove
def test_colossalai_trainer(tmp_path: Path) -> None:
    said = run(tmp_path, 2, "colossalai_trainer", "--config", CONFIG)
    epochs = [line for line in said.splitlines() if line.startswith("epoch ")]
    first, second = (float(line.split("loss ")[1].split(",")[0]) for line in epochs)
    assert second < first
    assert os.listdir(tmp_path / "out/checkpoints")
    assert "epoch" not in run(tmp_path, 2, "colossalai_trainer", "--config", CONFIG, "--resume"), "it is complete"


def test_each_example_says_its_command() -> None:
    programs = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "examples").glob("*.py")}
    programs = {name: text for name, text in programs.items() if "def main" in text}
    assert len(programs) == 5
    assert all(f"examples/{name}.py --config examples/" in text for name, text in programs.items())


@pytest.mark.prove
def test_eval_and_generate_build_the_model_of_a_program(tmp_path: Path) -> None:
    run(tmp_path, 1, "own_model", "--config", TEXT, "parallel=None", *SHORT)
    last = json.loads((tmp_path / "out/metrics.jsonl").read_text().splitlines()[-1])
    alone = ("eval", "out", "--samples", "32")
    assert dslpar(tmp_path, 1, *alone) == (
        1,
        "CFG233 program-model: out/checkpoints/step_000002 was saved by a program that passed the model, a"
        " torch.nn.modules.container.Sequential; its config cannot build it",
    )
    status, said = dslpar(tmp_path, 1, "generate", "out", "--prompt", "def ")
    assert (status, said.split()[0]) == (1, "CFG233")
    name = "examples.own_model.language_model"
    status, said = dslpar(tmp_path, 1, *alone, "--model", name, "--format", "json")
    assert status == 0, said
    assert json.loads(said)["loss"] == pytest.approx(last["eval_loss"], rel=1e-6)
    words = ("generate", "out", "--prompt", "def ", "--max-tokens", "3", "--format", "json", "--model", name)
    found = [dslpar(tmp_path, 1, *words), dslpar(tmp_path, 2, *words, "parallel.pipeline=2")]
    assert found[0] == found[1]
    assert len(json.loads(found[0][1])[0]["tokens"]) == 3
    status, said = dslpar(tmp_path, 1, *alone, "--model", "torch.nn.Identity")
    assert (status, said.split()[0]) == (1, "CKP208")
    assert "the model has no '0.weight'" in said


SHORT = ("train.steps=2", "train.eval_interval=2")


def dslpar(folder: Path, ranks: int, *words: str) -> tuple[int | None, str]:
    """Return the status of a command run in `folder`, and its JSON, or its first finding."""
    output = folder / "said.txt"
    output.unlink(missing_ok=True)

    def program() -> int:
        os.chdir(folder)
        sys.path.insert(0, str(ROOT))
        return main([*words])

    with start_program(ranks, program, output) as job:
        statuses = job.wait(120)
    text = output.read_text(encoding="utf-8")
    assert "Traceback" not in text
    return statuses[0], text.split(":1:1: ")[-1].split("\nhelp:")[0].removesuffix("\n1 error\n")
