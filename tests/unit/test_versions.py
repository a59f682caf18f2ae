"""tools/noxfile.py: what each row of `make versions` installs, and its line of docs/versions.md."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from configparser import ConfigParser
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def noxfile() -> ModuleType:
    made = importlib.util.spec_from_file_location("noxfile", ROOT / "tools" / "noxfile.py")
    assert made is not None
    assert made.loader is not None
    module = importlib.util.module_from_spec(made)
    made.loader.exec_module(module)
    return module


def test_the_oldest_row_has_every_lower_bound_of_setup_cfg(noxfile: ModuleType) -> None:
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert noxfile.ROWS[0] == (setup["options"]["python_requires"].removeprefix(">="), "oldest")
    required = setup["options"]["install_requires"] + setup["options.extras_require"]["train"]
    lines = [line for line in required.split("\n") if line]
    assert len(noxfile.bounds()) == len(lines)
    pins = noxfile.pins("oldest")
    assert {line.partition(";")[0].replace(">=", "==").strip() for line in lines if "deepspeed" not in line} <= set(
        pins
    )
    names = [line.partition("==")[0] for line in pins if "==" in line]
    assert sorted(set(names)) == sorted(names), "no package is pinned twice"
    assert [line for line in pins if line.startswith("deepspeed==")]


def test_the_metadata_names_the_pythons_from_the_oldest_row_to_the_newest(noxfile: ModuleType) -> None:
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    named = re.findall(r"Python :: 3\.(\d+)", setup["metadata"]["classifiers"])
    minors = [int(python.removeprefix("3.")) for python, _ in noxfile.ROWS]
    assert [int(minor) for minor in named] == list(range(min(minors), max(minors) + 1))


def test_the_newest_row_frees_torch_and_what_it_pins_itself(noxfile: ModuleType) -> None:
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    free = set(pinned) - set(noxfile.pins("newest"))
    assert {line.partition("==")[0] for line in free} == {"torch", "sympy"}


def test_the_page_has_lines_of_rows_alone(noxfile: ModuleType) -> None:
    named = re.findall(r"^\| (\d\S+) \|", noxfile.PAGE.read_text(), re.MULTILINE)
    assert set(named) <= {"-".join(row) for row in noxfile.ROWS}
    assert len(set(named)) == len(named)


def test_a_row_has_one_line(noxfile: ModuleType) -> None:
    once = noxfile.updated("| row | passed |\n|---|---|\n", ["3.11-oldest", "5"])
    both = noxfile.updated(once, ["3.13-newest", "6"])
    assert noxfile.updated(both, ["3.11-oldest", "7"]) == (
        "| row | passed |\n|---|---|\n| 3.11-oldest | 7 |\n| 3.13-newest | 6 |\n"
    )


def test_the_oldest_python_can_install_every_pin() -> None:
    """It uses the metadata of the installed packages: otherwise the rows of that Python fail before any test runs."""
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    oldest = setup["options"]["python_requires"].removeprefix(">=")
    pins = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if line[:1].isalpha()]
    installed = {canonicalize_name(each.name): each for each in importlib.metadata.distributions()}
    looked_at = 0
    for pin in pins:
        found = installed.get(canonicalize_name(pin.name))
        if found is None or found.version not in pin.specifier:
            continue  # of another row
        looked_at += 1
        assert oldest in SpecifierSet(found.metadata.get("Requires-Python", "")), f"{pin}: Python {oldest} cannot"
    assert looked_at > len(pins) / 2
