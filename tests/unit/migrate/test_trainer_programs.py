"""TrainingArguments in Python programs: read where they stand, with what the program sets before them; never run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dslpar.cli.main import main
from dslpar.migrate.foreign_lint import lint_text
from dslpar.migrate.sources import read_text

PROGRAM = """\
import argparse
import os
from transformers import Trainer, TrainingArguments

LR = 3e-4

def main():
    args = argparse.ArgumentParser().parse_args()
    ds = {"zero_optimization": {"stage": 2}}
    ds["gradient_clipping"] = 1.0
    common = dict(output_dir=os.path.join("out", args.name), learning_rate=LR)
    unused = compute_something()
    if args.big:
        targs = TrainingArguments(**common, per_device_train_batch_size=args.size, bf16=True, deepspeed=ds)
        Trainer(model=None, args=targs).train()

if __name__ == "__main__":
    main()
"""
SFT = """\
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

dataset = load_dataset("trl-lib/Capybara", split="train")
training_args = SFTConfig(
    output_dir="out",
    per_device_train_batch_size=4,
    learning_rat=2e-5,
    fp16=True,
    bf16=True,
    deepspeed="ds.json",
)
SFTTrainer(model="Qwen/Qwen2.5-0.5B", args=training_args, train_dataset=dataset).train()
"""


def test_arguments_have_the_values_that_the_program_sets() -> None:
    source = read_text(PROGRAM, "train.py")
    assert source.name == "training_arguments"
    assert source.config.root.plain() == {
        "learning_rate": 3e-4,
        "bf16": True,
        "deepspeed": {"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0},
    }
    # What only the run knows is unknown, and no default takes its place.
    assert source.config.unknown == {"output_dir", "per_device_train_batch_size"}
    assert source.config.at("deepspeed.zero_optimization.stage").line == 9


def test_a_file_that_the_arguments_name_is_read(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    (tmp_path / "train.py").write_text(SFT)
    source = read_text(SFT, str(tmp_path / "train.py"))
    assert source.config.root.plain()["deepspeed"] == {"zero_optimization": {"stage": 3}}
    gone = read_text(SFT, "elsewhere/train.py")
    assert [name for _, name in gone.missing] == ["ds.json"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("from transformers import TrainingArguments\nTrainingArguments = 1\n", "no call"),
        ("class TrainingArguments: ...\nargs = TrainingArguments(bf16=True)\n", "neither package"),
        ("from transformers import HfArgumentParser, TrainingArguments\np = HfArgumentParser(TrainingArguments)\n", ""),
        ("from transformers import TrainingArguments\nargs = TrainingArguments(\n", "no Python"),
    ],
)
def test_other_programs_have_no_arguments(text: str, why: str) -> None:
    assert read_text(text, "train.py").name != "training_arguments", why


def test_several_calls_are_named_and_chosen() -> None:
    text = (
        "from transformers import TrainingArguments\n"
        "first = TrainingArguments(max_steps=1)\n"
        "class Late:\n"
        "    def made(self):\n"
        "        return TrainingArguments(max_steps=2)\n"
    )
    source = read_text(text, "train.py")
    assert source.config.root.plain() == {"max_steps": 1}
    assert any("--recipe TrainingArguments" in item.help for item in source.config.findings)
    assert read_text(text, "train.py", recipe="TrainingArguments").config.root.plain() == {"max_steps": 2}


def test_findings_are_at_the_programs_lines() -> None:
    found = {(item.code, item.location.line) for item in lint_text(SFT, "train.py", 8)}
    assert {("FRN201", 9), ("FRN204", 8)} <= found


def test_commands_read_the_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, made = tmp_path / "train.py", tmp_path / "cfg.py"
    path.write_text(SFT.replace("learning_rat=", "learning_rate=").replace("    fp16=True,\n", ""))
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}))
    assert main(["lint", str(path), "--world-size", "8"]) == 0
    assert "its training_args are linted in its place" in capsys.readouterr().out
    main(["import", str(path), "-o", str(made)])
    assert "stage=3" in made.read_text()
    assert "micro_size=4" in made.read_text()
