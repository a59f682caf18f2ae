"""Model families: a toy family of one folder and one line is read, linted, partitioned, shown and built."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dslpar.layout.family_interface import layout_of
from dslpar.linter.registry import RULES
from dslpar.models.gpt import section
from dslpar.schema.families import FAMILIES
from tests.support.paths import ROOT

TOY = ROOT / "tests" / "support" / "mlp_family"
MODULES = {"__init__.py", "section.py", "layout.py", "costs.py", "rules.py", "model.py"}
LINE = "from dslpar.schema.families import FAMILIES; FAMILIES['ResidualMLP'] = 'toy_family'; "
COMMAND = LINE + "import sys; from dslpar.cli.main import main; sys.exit(main(sys.argv[1:]))"
CONFIG = """
model = dict(type='ResidualMLP', num_layers=6, width=48, vocab_size=300, max_seq_len=16)
parallel = dict(pipeline=2, tensor=dict(size=4, mode='2d'))
batch = dict(micro_size=2, accumulation=4)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a family outside of the repository, with a config."""
    shutil.copytree(TOY, tmp_path / "toy_family", ignore=shutil.ignore_patterns("__pycache__"))
    for path in (tmp_path / "toy_family").glob("*.py"):
        path.write_text(path.read_text().replace("tests.support.mlp_family", "toy_family"))
    (tmp_path / "cfg.py").write_text(CONFIG)
    return tmp_path


def run(folder: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = dict(os.environ, PYTHONPATH=os.pathsep.join((str(ROOT), str(folder))))
    argv = [sys.executable, "-c", code, *arguments]
    return subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True)


def command(folder: Path, *arguments: str) -> str:
    ended = run(folder, COMMAND, *arguments)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_a_family_s_config_is_linted_by_its_section_and_its_rules(folder: Path) -> None:
    ignored = "--ignore=PERF"
    command(folder, "lint", "cfg.py", "--world-size", "8", ignored)
    wrong = ("model.width=50", "model.activaton=gelu", "model.vocab_size=0")
    ended = run(folder, COMMAND, "lint", "cfg.py", "--world-size", "8", "--format=json", ignored, *wrong)
    found = {finding["code"]: finding["message"] for finding in json.loads(ended.stdout)}
    assert ended.returncode == 1
    assert set(found) == {"TEN290", "CFG101", "CFG103"}
    assert found["TEN290"] == "width 50 is not divisible by y * q = 4"


def test_a_family_s_job_is_shown_with_its_divisors_its_cut_and_its_traffic(folder: Path) -> None:
    shown = json.loads(command(folder, "show", "cfg.py", "--world-size", "8", "--format=json"))
    assert shown["stages"]["counts"] == [5, 1]  # a head of 300 * 48 weighs three MLPs of 2 * 48 * 48
    assert {each["key"] for each in shown["divisors"]} == {"batch.micro_size", "model.width", "model.vocab_size"}
    assert sum(shown["traffic"]["model"].values()) > 6 * sum(shown["traffic"]["layer"].values()) > 0


def test_a_family_s_keys_and_rules_are_in_the_reference(folder: Path) -> None:
    assert "TEN290" in command(folder, "explain", "TEN290")
    reference = command(folder, "config", "--reference")
    assert re.search(r"model\.width\b", reference)
    assert "Features of the residual stream, and of each MLP's hidden layer." in " ".join(reference.split())
    assert "model.width" in command(folder, "config", "cfg.py", "--world-size", "8", "--explain", "model.width")


def test_a_family_s_model_is_built_and_learns(folder: Path) -> None:
    code = (
        LINE
        + """
import torch, dslpar
from dslpar.core.mesh import Mesh
from dslpar.distributed.groups import Groups
from dslpar.models import build_module
from dslpar.engine.model import model_from_job
job = dslpar.resolve("cfg.py", world_size=1, overrides=["parallel.pipeline=1", "parallel.tensor=1"])
groups, model = Groups(Mesh()), model_from_job(job)
module, loss = build_module(model, groups, seed=1), model.loss(groups)
ids = torch.randint(300, (2, 16))
loss(module(ids), ids).backward()
print(type(model).__name__, all(p.grad is not None for p in module.parameters()))
"""
    )
    ended = run(folder, code)
    assert ended.stdout.split() == ["ResidualMLP", "True"], ended.stderr


def test_what_a_family_needs() -> None:
    """It needs its folder, and the line in FAMILIES. Elsewhere, only the conversion of other configs names one."""
    assert {path.name for path in TOY.glob("*.py")} == MODULES
    own = {"hugging_face.py"}  # of a family that equals a transformers model
    assert {path.name for path in (ROOT / "dslpar" / "models" / "gpt").glob("*.py")} == MODULES | own
    importing = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "dslpar").rglob("*.py")
        if path.parent.name != "gpt" and re.search(r"^\s*(from|import) dslpar\.models\.gpt", path.read_text(), re.M)
    }
    assert importing == {"dslpar/models/__init__.py"}  # for type checkers


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_read_and_linted_without_torch(name: str) -> None:
    modules = [f"{FAMILIES[name]}.{module}" for module in ("section", "layout", "costs", "rules")]
    code = f"import sys, {', '.join(modules)}; print('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ended.stdout == "False\n", ended.stderr


def test_every_condition_of_a_family_has_a_rule_that_reports_it() -> None:
    from dslpar.core.mesh import TensorMesh

    cuboid = TensorMesh(q=2, y=2, z=2, residual="batch", inner="batch", mode="3d")
    model = section.GPT(
        num_layers=1, hidden_size=8, num_heads=2, num_kv_heads=2, vocab_size=8, max_seq_len=8, positions="rotary"
    )
    reported = {rule.code for rule in RULES}
    assert {each.code for each in layout_of(model).conditions(model, cuboid, 8)} <= reported
