"""Run the tests with other versions of Python and torch than the pinned ones, and write docs/versions.md.

make versions                    # every row of ROWS, each in an environment of its own below .nox/
make versions ROW=3.11-oldest    # one row

A row with the oldest torch uses the lower bound in setup.cfg for every runtime dependency except DeepSpeed, whose keys
and behaviour belong to one version. A row with the newest torch uses today's torch, and the versions of constraints.txt
for the rest. ruff, mypy and the import contracts do not run again: they read the source, as for Python 3.11. A row
whose Python is not on PATH fails, so nothing is skipped silently.

nox creates the environments and finds the interpreters.
"""

from __future__ import annotations

import os
import re
import xml.etree.ElementTree as ET
from configparser import ConfigParser
from pathlib import Path

import nox

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "versions.md"
ROWS = [("3.11", "oldest"), ("3.11", "newest"), ("3.13", "newest"), ("3.14", "newest")]
UNPINNED = {"torch": "", "sympy": ""}
"""Packages without a constraint: each torch needs its own sympy."""
SHOWN = ("torch", "deepspeed", "numpy")
"""Packages whose versions the page shows."""

nox.options.error_on_missing_interpreters = True
nox.options.envdir = str(ROOT / ".nox")


def bounds() -> dict[str, str]:
    """Return the lower bound of each runtime dependency of setup.cfg."""
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = [*setup["options"]["install_requires"].split("\n"), *setup["options.extras_require"]["train"].split("\n")]
    return dict(re.match(r"([\w.-]+)>=([\w.]+)", line).groups() for line in lines if line)  # type: ignore[union-attr, misc]


def pins(torch: str) -> list[str]:
    """Return the constraints of a row: constraints.txt without the row's own choices."""
    chosen = UNPINNED if torch == "newest" else {**UNPINNED, **bounds()}
    chosen = {name: bound for name, bound in chosen.items() if name != "deepspeed"}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    kept = [line for line in lines if line.partition("==")[0] not in chosen]
    return kept + [f"{name}=={bound}" for name, bound in chosen.items() if bound]


@nox.session
@nox.parametrize("python,torch", [nox.param(*row, id="-".join(row)) for row in ROWS])
def tests(session: nox.Session, torch: str) -> None:
    """Run the tests with the oldest or the newest torch, and write the row's line of docs/versions.md."""
    constraints = Path(session.create_tmp()).parent / "constraints.txt"
    constraints.write_text("\n".join(pins(torch)) + "\n")
    session.install("--constraint", str(constraints), "torch", "setuptools", "wheel")
    session.install(
        *("--constraint", str(constraints), "--no-build-isolation", "--config-settings", "editable_mode=compat"),
        *("--editable", f"{ROOT}[train,mpi,test]"),
    )
    report = Path(session.virtualenv.location) / "report.xml"
    report.unlink(missing_ok=True)
    environment = {
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": None,
        "TMPDIR": None,  # nox's folder is inside the repository, whose configs and pyproject.toml tests would find
        "TORCH_EXTENSIONS_DIR": str(Path(session.virtualenv.location) / "torch_extensions"),
    }
    session.chdir(ROOT)
    options = session.posargs or os.environ.get("PYTEST", "-q -n auto --dist worksteal").split()
    session.run("pytest", *options, f"--junitxml={report}", env=environment)
    if report.exists() and not session.posargs:  # not after --install-only or a part of the tests
        _write(session, report, "-".join((str(session.python), torch)))


def _write(session: nox.Session, report: Path, row: str) -> None:
    """Write the line of a successful row into the page's table."""
    suite = ET.parse(report).getroot().find("testsuite")
    assert suite is not None
    skipped = int(suite.get("skipped", 0))
    passed = int(suite.get("tests", 0)) - skipped
    listed = str(session.run("python", "-m", "pip", "list", "--format=freeze", silent=True))
    versions = dict(line.split("==", 1) for line in listed.splitlines() if "==" in line)
    code = "import platform; print(platform.python_version(), end='')"
    python = str(session.run("python", "-c", code, silent=True))
    cells = [row, python, *(versions[name] for name in SHOWN), str(passed), str(skipped)]
    PAGE.write_text(updated(PAGE.read_text(), cells))


def updated(page: str, cells: list[str]) -> str:
    """Return the page with a row's line in its table: replaced, or added at the end."""
    line = f"| {' | '.join(cells)} |"
    text, found = re.subn(rf"^\| {re.escape(cells[0])} \|.*$", line, page, flags=re.MULTILINE)
    return text if found else text.rstrip("\n") + f"\n{line}\n"
