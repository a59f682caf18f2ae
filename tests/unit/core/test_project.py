"""`[tool.dslpar]` of pyproject.toml: which file applies, the meaning of its keys, and their errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dslpar.core.errors import DslparError
from dslpar.core.project import find_project, matches, parse_packages, trusted_packages

WHOLE = """\
[project]
name = "mine"

[tool.dslpar]
select = ["CFG", "TEN103"]
ignore = ["PERF104"]
exclude = ["experiments/old", "scratch_*.py"]
world-size = {"configs/big/*" = 64, "*" = 8}
device = "h100"
trusted = ["my_pkg", "other.layers"]

[tool.dslpar.per-file-ignores]
"configs/debug_*.py" = ["PERF"]
"debug_a.py" = ["DEAD"]
"""


def written(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "pyproject.toml"
    path.write_text(text)
    return path


def test_every_key_is_read(tmp_path: Path) -> None:
    written(tmp_path, WHOLE)
    project = find_project(str(tmp_path / "configs" / "big"))  # the folder need not exist
    assert project is not None
    assert (project.select, project.ignore) == (("CFG", "TEN103"), ("PERF104",))
    assert (project.device, project.trusted) == ("h100", ("my_pkg", "other.layers"))
    sizes = {name: project.world_size_of(str(tmp_path / name)) for name in ("configs/big/a.py", "configs/a.py")}
    assert sizes == {"configs/big/a.py": 64, "configs/a.py": 8}
    assert [project.excludes(str(tmp_path / name)) for name in ("experiments/old/a.py", "a/scratch_1.py", "old/a.py")]
    assert project.ignored_in(str(tmp_path / "configs" / "debug_a.py")) == ["PERF", "DEAD"]
    assert project.ignored_in(str(tmp_path / "configs" / "a.py")) == []


def test_patterns_of_configs(tmp_path: Path) -> None:
    written(tmp_path, "[tool.dslpar]\nconfigs = ['configs/*.py']\n")
    project = find_project(str(tmp_path))
    assert project is not None
    claimed = [project.claims(str(tmp_path / name)) for name in ("configs/a.py", "a.py", "configs/a.yaml")]
    assert claimed == [True, False, False]


def test_one_world_size_for_all(tmp_path: Path) -> None:
    written(tmp_path, "[tool.dslpar]\nworld-size = 16\n")
    project = find_project(str(tmp_path))
    assert project is not None
    assert project.world_size_of(str(tmp_path / "a" / "b.py")) == 16


def test_the_nearest_table_holds_alone(tmp_path: Path) -> None:
    written(tmp_path, "[tool.dslpar]\nignore = ['A']\nselect = ['B']\n")
    written(tmp_path / "a", "[tool.ruff]\nline-length = 99  # tool.dslpar is not here\n")
    written(tmp_path / "a" / "b", "[tool]\ndslpar.ignore = ['C']\n")
    assert [
        (found.ignore, found.select) if (found := find_project(str(tmp_path / name))) else None
        for name in ("", "a", "a/b", "a/b/c")
    ] == [(("A",), ("B",)), (("A",), ("B",)), (("C",), ()), (("C",), ())]


@pytest.mark.parametrize(
    ("pattern", "path", "fits"),
    [
        ("old", "old/a.py", True),
        ("old", "x/old/a.py", True),
        ("old", "x/older/a.py", False),
        ("x/old", "x/old/deep/a.py", True),
        ("x/old/", "x/old/a.py", True),
        ("./x", "x/a.py", True),
        ("x/*.py", "x/y/a.py", True),  # as in ruff, a star crosses folders
        ("*.yaml", "x/a.py", False),
        ("a.py", "x/a.py", True),
        ("y/a.py", "x/y/a.py", False),
    ],
)
def test_patterns(tmp_path: Path, pattern: str, path: str, fits: bool) -> None:
    assert matches(str(tmp_path / path), (pattern,), str(tmp_path / "pyproject.toml")) is fits


@pytest.mark.parametrize(
    ("text", "line", "message", "hint"),
    [
        ("[tool.dslpar]\n\nselct = ['CFG']\n", 3, "unknown key 'selct' in [tool.dslpar]", "did you mean 'select'?"),
        ("[tool.dslpar]\nworld_size = 8\n", 2, "unknown key 'world_size'", "did you mean 'world-size'?"),
        ("[tool]\ndslpar = {colour = 1}\n", 2, "unknown key 'colour'", "the keys are select, ignore, per-file-ignores"),
        ("[tool.dslpar.per-file-ignore]\na = ['CFG']\n", 1, "unknown key", "did you mean 'per-file-ignores'?"),
        ("[tool.dslpar]\nselect = 'CFG'\n", 2, "select is 'CFG'", "a list of codes"),
        ("[tool.dslpar]\nworld-size = 0\n", 2, "world-size is 0", "a number of ranks"),
        ("[tool.dslpar]\nworld-size = true\n", 2, "world-size is True", "a number of ranks"),
        ("[tool.dslpar]\ntrusted = ['my-pkg']\n", 2, "trusted is ['my-pkg']", "a list of packages"),
        ("[tool.dslpar]\nper-file-ignores = {a = 'CFG'}\n", 2, "per-file-ignores is", "a table of patterns"),
        ("[tool.dslpar]\nignore = ['CFG'\n", 1, "cannot parse this as TOML", "correct the file"),
        ("[tool]\ndslpar = 1\n", 2, "tool.dslpar is not a table", "write [tool.dslpar]"),
    ],
)
def test_mistakes(tmp_path: Path, text: str, line: int, message: str, hint: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(DslparError) as caught:
        find_project(str(tmp_path))
    (found,) = caught.value.findings
    assert (found.code, found.location.line) == ("CFG230", line)
    assert Path(found.location.path).resolve() == path
    assert message in found.message
    assert hint in found.help


def test_all_mistakes_at_once(tmp_path: Path) -> None:
    written(tmp_path, "[tool.dslpar]\nselct = []\nignore = 5\n")
    with pytest.raises(DslparError) as caught:
        find_project(str(tmp_path))
    assert [found.location[1:3] for found in caught.value.findings] == [(2, 1), (3, 1)]


def test_a_file_without_the_table_is_not_parsed(tmp_path: Path) -> None:
    written(tmp_path, "this is no TOML\n")
    program = f"""
import sys
from dslpar.core.project import find_project
assert find_project({str(tmp_path)!r}) is None
assert "tomllib" not in sys.modules
open({str(tmp_path / "pyproject.toml")!r}, "w").write("[tool.dslpar]")
assert find_project({str(tmp_path)!r}).ignore == ()
assert "tomllib" in sys.modules
"""
    subprocess.run([sys.executable, "-S", "-c", program], check=True)


def test_what_lies_beside_a_config_does_not_vouch_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    written(mine, "[tool.dslpar]\ntrusted = ['my_pkg']\n")
    written(theirs, "[tool.dslpar]\ntrusted = ['os']\n")
    monkeypatch.chdir(mine)
    assert trusted_packages(("given",)) == ("given", "my_pkg")


def test_packages_of_the_flag() -> None:
    assert parse_packages("my_pkg, other.layers") == ["my_pkg", "other.layers"]
    for wrong in ("", "my-pkg", "a,,b", "a/b"):
        with pytest.raises(Exception, match="is not the name of a package"):
            parse_packages(wrong)
