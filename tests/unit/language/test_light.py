"""Loading a config imports only the standard library, and little of it."""

from __future__ import annotations

import subprocess
import sys

HEAVY = {"torch", "numpy", "yaml", "deepspeed", "dataclasses", "inspect", "difflib", "json", "string", "logging"}
PROGRAM = """
import sys
before = set(sys.modules)
from dslpar.language.load import load_text
config = load_text("n = 4\\nx = dict(a=f'{n}', b=[i for i in range(n)])\\nfor k in x: n += 1\\n", "cfg.py", ["x.a=1d"])
assert not config.findings, config.findings
print(*sorted(set(sys.modules) - before))
"""


def imported(program: str) -> set[str]:
    run = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def test_loading_is_light() -> None:
    modules = imported(PROGRAM)
    assert "ast" in modules
    assert not modules & HEAVY


def test_this_test_can_fail() -> None:
    assert "json" in imported(
        PROGRAM.replace("import sys\n", "import sys\n", 1).replace("print(", "import json\nprint(")
    )
