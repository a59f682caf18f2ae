"""dslpar ships its types: `mypy --strict` accepts a program that uses the public names, and finds a wrong use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import torch
from torch import nn

import dslpar
import dslpar.checkpoint
import dslpar.layers

config = dslpar.load("cfg.py", ["train.steps=2"])
for finding in dslpar.lint(config, 8):
    print(finding.code, finding.message, finding.location.line)
args = dslpar.arguments()
run = dslpar.start(args.config, args.overrides)
linear = dslpar.layers.Linear(run.groups, 16, 32, role="inward")
model = dslpar.Stage(nn.Sequential(nn.Linear(4, 4)))
engine, train_data, eval_data, scheduler = dslpar.initialize(run, model=model, criterion=nn.MSELoss())
for batch in train_data or ():
    loss: float = engine.train_batch(iter([batch]))
record = dslpar.fit(run, engine, train_data, eval_data, resume=True)
proof = dslpar.prove("cfg.py", world_size=4, steps=2)
print(proof.verdict, record["loss"], linear(torch.zeros(1, 16)))
"""


@pytest.mark.prove
def test_a_strictly_typed_program(tmp_path: Path) -> None:
    accepted, refused = tmp_path / "program.py", tmp_path / "wrong.py"
    accepted.write_text(PROGRAM)
    refused.write_text("import dslpar\n\ndslpar.prove('cfg.py', world_size='4')\ndslpar.load(3)\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", f"--cache-dir={tmp_path / 'cache'}"]
    checked = subprocess.run([*command, str(accepted), str(refused)], capture_output=True, text=True, cwd=tmp_path)
    lines = checked.stdout.splitlines()
    assert [line for line in lines if line.startswith("program.py") and ": error" in line] == [], checked.stdout
    assert sum(line.startswith("wrong.py") and ": error" in line for line in lines) == 2, (
        checked.stdout + checked.stderr
    )
