"""docs/upstream/: each case still shows its fault in the installed DeepSpeed."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from dslpar.engine.deepspeed_patch_table import PATCHES
from tests.support.paths import ROOT
from tests.support.runs import start

CASES = sorted((ROOT / "docs/upstream").glob("m*.py"))
COMPILE = {"m01_shm_op.py", "m19_build_lock.py", "m20_cpu_adam_resume.py"}


@pytest.mark.prove
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)
def test_the_fault_is_still_there(case: Path, tmp_path: Path) -> None:
    if case.name in COMPILE and not (shutil.which("g++") and shutil.which("ninja")):
        pytest.skip("g++ and ninja compile the op")
    found = start([sys.executable, str(case)], idle_s=120, DS_ACCELERATOR="cpu", TMPDIR=str(tmp_path))
    last = found.output.rstrip().rpartition("\n")[2]
    assert not (found.status == 1 and "fixed" in last), f"patch M{int(case.name[1:3])} can go: {last}"
    assert found.status == 0, f"the case fails:\n{found.output}"
    assert "reproduced" in last


def test_the_table_of_patches_names_the_cases() -> None:
    """M1 has an issue already."""
    named = {patch.number: re.findall(r"docs/upstream/(\S+\.py)", patch.issue) for patch in PATCHES}
    assert {name for names in named.values() for name in names} == {case.name for case in CASES} - {"m01_shm_op.py"}
    assert all(name.startswith(f"m{number:02d}_") for number, names in named.items() for name in names)
    page = (ROOT / "docs/upstream/README.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| \[(\S+)\]\(\1\) \|", page, re.MULTILINE) == [case.name for case in CASES]


def test_cases_are_short_and_need_no_dslpar() -> None:
    texts = {case.name: case.read_text(encoding="utf-8") for case in CASES}
    assert len(texts) > 10
    for name, text in texts.items():
        assert text.count("\n") < 60, name
        assert "dslpar" not in text, name
        assert f"Run: python {name}" in text
