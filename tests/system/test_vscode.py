"""The extension for Visual Studio Code: it typechecks, and the package holds what it must. It is not run."""

from __future__ import annotations

import json
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from tests.support.paths import ROOT

FOLDER = ROOT / "editors" / "vscode"
MOST_BYTES = 200_000


@pytest.mark.prove
@pytest.mark.skipif(shutil.which("npm") is None, reason="no npm on PATH")
def test_the_package_is_small_and_complete(tmp_path: Path) -> None:
    copy = tmp_path / "editors" / "vscode"
    shutil.copytree(FOLDER, copy, ignore=shutil.ignore_patterns("node_modules", "dist"))
    (tmp_path / "build").mkdir()
    for command in (["ci", "--no-audit", "--no-fund", "--ignore-scripts"], ["run", "package"]):
        ran = subprocess.run(["npm", *command], cwd=copy, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout + ran.stderr
    (package,) = (tmp_path / "build").glob("*.vsix")
    assert package.stat().st_size < MOST_BYTES
    archive = zipfile.ZipFile(package)
    names = {name.removeprefix("extension/") for name in archive.namelist() if name.startswith("extension/")}
    assert names == {"LICENSE.txt", "dist/extension.js", "package.json", "readme.md"}
    assert b"sourceMappingURL" not in archive.read("extension/dist/extension.js")


def test_commands_and_settings_are_those_of_the_source() -> None:
    manifest, source = json.loads((FOLDER / "package.json").read_text()), (FOLDER / "src" / "extension.ts").read_text()
    offered = manifest["contributes"]
    for command in offered["commands"]:
        assert f'registerCommand("{command["command"]}"' in source
    assert list(offered["configuration"]["properties"]) == ["dslpar.command"]
    assert "pip install 'dslpar[lsp]'" in source
    assert (FOLDER / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_all_packages_are_pinned() -> None:
    manifest, lock = (json.loads((FOLDER / name).read_text()) for name in ("package.json", "package-lock.json"))
    assert all(version[0].isdigit() for version in manifest["devDependencies"].values())
    assert lock["packages"][""]["devDependencies"] == manifest["devDependencies"]
    assert [name for name, entry in lock["packages"].items() if name and "integrity" not in entry] == []
