"""The extension for Visual Studio Code: it typechecks, the package holds what it must, and a real VS Code runs it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from dslpar.linter import check
from tests.support.paths import ROOT
from tests.support.vscode import VSCode, lacks

FOLDER = ROOT / "editors" / "vscode"
MOST_BYTES = 200_000
COMMENT = "# dslpar: world-size=64 device=h100-80g\n"
PARALLEL = "parallel = dict(pipeline=2, tensor=dict(size=4, mode='1d'))\n"
MODEL = """\
model = dict(
    type='GPT',
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    vocab_size=32000,
    max_seq_len=4096,
)
"""
BATCH = "batch = dict(global_size=512, micro_size=1)\n"
TEXT = COMMENT + PARALLEL + MODEL + BATCH
in_vscode = [
    pytest.mark.prove,
    pytest.mark.skipif(bool(lacks()), reason=lacks()),
    pytest.mark.skipif(find_spec("pygls") is None, reason="pygls is not installed (extra lsp)"),
]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the extension, built from the sources."""
    if shutil.which("npm") is None:
        pytest.skip("no npm on PATH")
    folder = tmp_path_factory.mktemp("package")
    copy = folder / "editors" / "vscode"
    shutil.copytree(FOLDER, copy, ignore=shutil.ignore_patterns("node_modules", "dist"))
    (folder / "build").mkdir()
    for command in (["ci", "--no-audit", "--no-fund", "--ignore-scripts"], ["run", "package"]):
        ran = subprocess.run(["npm", *command], cwd=copy, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout + ran.stderr
    (made,) = (folder / "build").glob("*.vsix")
    return made


@pytest.mark.prove
def test_the_package_is_small_and_complete(package: Path) -> None:
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
    # It starts for the languages that it sends to the server, and for no others.
    assert [event.removeprefix("onLanguage:") for event in manifest["activationEvents"]] == ["python", "yaml"]
    assert 'const LANGUAGES = ["python", "yaml"]' in source
    assert (FOLDER / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_all_packages_are_pinned() -> None:
    manifest, lock = (json.loads((FOLDER / name).read_text()) for name in ("package.json", "package-lock.json"))
    assert all(version[0].isdigit() for version in manifest["devDependencies"].values())
    assert lock["packages"][""]["devDependencies"] == manifest["devDependencies"]
    assert [name for name, entry in lock["packages"].items() if name and "integrity" not in entry] == []


# ---- in VS Code ----


@pytest.fixture(scope="module")
def editor(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VSCode]:
    """Return an editor with the extension and an empty folder; the server is the `dslpar` on PATH."""
    folder = tmp_path_factory.mktemp("project")
    with VSCode(folder, tmp_path_factory.mktemp("home"), package) as made:
        yield made


def write(editor: VSCode, **texts: str) -> None:
    for name, text in texts.items():
        (editor.folder / f"{name}.py").write_text(text)


class TestInVSCode:
    pytestmark = in_vscode

    def test_findings_and_quick_fixes(self, editor: VSCode) -> None:
        write(editor, cfg=TEXT.replace("hidden_size", "hiden_size").replace("num_heads=32", "num_heads=30"))
        editor.open("cfg.py")
        editor.command("Problems: Focus on Problems View")
        editor.wait(editor.problems, "findings")
        assert editor.problems() == ["unknown key 'hiden_size' in model\ndslpar\nCFG101\n[Ln 6, Col 5]"]
        editor.at(6, 6)
        editor.act("did you mean 'hidden_size'?")
        editor.becomes("cfg.py", TEXT.replace("num_heads=32", "num_heads=30"))
        editor.wait(lambda: len(editor.problems()) == 2, "findings about the heads")
        editor.at(7, 16)
        assert editor.actions() == ["num_heads=16 (TEN201)", "num_heads=32 (TEN201)", "dslpar: explain TEN201"]
        editor.press("Escape")
        editor.act("num_heads=32")
        editor.becomes("cfg.py", TEXT)
        editor.wait(lambda: not editor.problems(), "end of the findings")
        assert editor.notifications() == []

    def test_lens_hints_hover_layouts_and_symbols(self, editor: VSCode) -> None:
        write(editor, cfg=TEXT)
        editor.open("cfg.py")
        editor.wait(lambda: editor.shown(".codelens-decoration"), "lens")
        (lens,) = editor.shown(".codelens-decoration")
        assert lens.startswith("64 ranks: pipe 2 x data 8 x tensor 4 · ")
        editor.wait(lambda: "layers 16 16" in "".join(editor.shown(".view-line")), "hints")
        lines = "\n".join(editor.shown(".view-line"))
        assert "data 8" in lines
        assert "1 x 64 x 8" in lines
        editor.at(2, 32)
        editor.command("Show or Focus Hover")
        editor.wait(lambda: editor.shown(".monaco-hover-content"), "hover")
        assert "parallel.tensor.shape = (1, 4, 1)" in editor.shown(".monaco-hover-content")[0]
        editor.press("Escape")
        editor.at(2, 3)
        layouts = editor.actions()
        assert all("times as fast" in each for each in layouts)
        editor.press("Escape")
        editor.press("Ctrl+Shift+O")
        editor.wait(lambda: len(editor.shown(".quick-input-widget .monaco-list-row")) > 9, "symbols")
        assert editor.notifications() == []

    def test_completion_from_section_to_value(self, editor: VSCode) -> None:
        write(editor, new=COMMENT)
        editor.open("new.py")
        editor.wait(lambda: editor.shown(".squiggly-error"), "finding: there is no model yet")
        editor.at(2, 1)
        editor.type("para")
        editor.complete("parallel")
        editor.complete("pipeline")  # a key follows its section, and a value its key, without being asked for
        editor.follow("sizes")
        editor.wait(editor.suggestions, "sizes")
        assert editor.suggestions() == ["1", "2", "4", "8", "16", "32", "64", "dict()"]
        editor.complete("2")
        editor.type(", tensor=")
        editor.complete("dict()")
        editor.complete("mode")
        editor.follow("modes")
        editor.wait(editor.suggestions, "modes")
        assert editor.suggestions() == ["1d", "2d", "2.5d", "3d", "sequence", "cuboid"]
        editor.complete("1d")
        editor.type(", size=")
        editor.follow("sizes")
        editor.wait(editor.suggestions, "sizes")
        assert editor.suggestions() == ["1", "2", "4", "8", "16", "32"]
        editor.complete("4")
        editor.becomes("new.py", COMMENT + "parallel = dict(pipeline=2, tensor=dict(mode='1d', size=4))")
        assert editor.notifications() == []

    def test_fix_all(self, editor: VSCode) -> None:
        wrong = TEXT.replace("hidden_size", "hiden_size").replace("global_size", "globl_size")
        write(editor, many=wrong)
        editor.open("many.py")
        editor.wait(lambda: len(editor.shown(".squiggly-error")) == 2, "findings")
        editor.at(2, 1)
        editor.command("Fix All")
        editor.becomes("many.py", TEXT)
        # On saving, by the setting that README.md gives, and in the files of this extension alone.
        (setting,) = [line for line in (FOLDER / "README.md").read_text().splitlines() if "source.fixAll" in line]
        editor.settings({"[python]": json.loads(f"{{{setting}}}"), "files.autoSave": "off"})
        write(editor, saved=wrong)
        editor.open("saved.py")
        editor.wait(lambda: len(editor.shown(".squiggly-error")) == 2, "findings")
        editor.press("Ctrl+S")
        editor.becomes("saved.py", TEXT)
        editor.settings({})
        assert editor.notifications() == []

    def test_rename_and_symbols_of_values_that_a_variable_holds(self, editor: VSCode) -> None:
        text = COMMENT + "heads = 32\n" + TEXT.removeprefix(COMMENT).replace("num_heads=32", "num_heads=heads")
        write(editor, named=text, other="from .named import heads\nmodel = dict(num_heads=heads)\n")
        editor.open("named.py")
        editor.wait(lambda: editor.shown(".codelens-decoration"), "lens")
        editor.press("Ctrl+Shift+O")
        editor.wait(lambda: "num_heads" in "".join(editor.shown(".quick-input-widget .monaco-list-row")), "symbols")
        editor.press("Escape")
        editor.at(2, 2)
        editor.press("F2")
        editor.wait(lambda: "rename-input" in editor.focused(), "prompt for a name")
        editor.press("Ctrl+A")
        editor.type("count")
        editor.press("Enter")
        editor.becomes("named.py", text.replace("=heads", "=count").replace("heads = 32", "count = 32"))
        editor.becomes("other.py", "from .named import count\nmodel = dict(num_heads=count)\n")
        assert editor.notifications() == []

    def test_explain_opens_the_page_of_the_rule(self, editor: VSCode) -> None:
        write(editor, cfg=TEXT.replace("hidden_size", "hiden_size"))
        editor.open("cfg.py")
        editor.wait(lambda: editor.shown(".squiggly-error"), "finding")
        editor.at(6, 6)
        editor.act("explain CFG101")
        editor.wait(lambda: "CFG101.md" in editor.shown(".tab .label-name"), "page")
        editor.wait(lambda: "What it does:" in "".join(editor.shown(".view-line")), "text of the page")

    def test_the_command_for_the_number_of_ranks(self, editor: VSCode) -> None:
        write(editor, cfg="#!/usr/bin/env python\n# coding: utf-8\n" + PARALLEL)
        editor.open("cfg.py")

        def ask(size: str) -> None:
            editor.command("dslpar: Set the number of ranks")
            editor.wait(lambda: "Number of ranks" in "".join(editor.shown(".quick-input-widget")), "prompt")
            editor.type(size)
            editor.press("Enter")

        ask("8")
        comment = "# dslpar: world-size=8\n"
        editor.becomes("cfg.py", f"#!/usr/bin/env python\n# coding: utf-8\n{comment}{PARALLEL}")
        ask("8,64")
        editor.becomes("cfg.py", f"#!/usr/bin/env python\n# coding: utf-8\n{comment.replace('8', '8,64')}{PARALLEL}")
        assert editor.notifications() == []

    def test_an_ordinary_program_gets_nothing_and_yaml_gets_findings(self, editor: VSCode) -> None:
        write(editor, plain="import os\nparallel = os.getcwd()\nprint(parallel)\n")
        (editor.folder / "cfg.yaml").write_text("# dslpar: world-size=8\nparallel: {pipelin: 2}\n")
        editor.open("cfg.yaml")
        editor.command("Problems: Focus on Problems View")
        editor.wait(editor.problems, "findings")
        assert "CFG101" in [each.splitlines()[2] for each in editor.problems()]
        editor.open("plain.py")
        editor.at(2, 1)
        assert editor.shown(".codelens-decoration, .squiggly-error, .squiggly-warning") == []
        editor.type("par")
        editor.press("Ctrl+ ")
        editor.follow("completion of words")
        assert "pipeline" not in editor.suggestions()

    def test_a_missing_server_a_setting_and_a_restart(self, editor: VSCode) -> None:
        """Also modules of the folder with names of the standard library: the server must not import them."""
        lacking = editor.home / "bare" / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(editor.home / "bare")], check=True)
        for name in ("yaml", "types", "pygls"):
            write(editor, **{name: f"raise SystemExit('{name}.py of the folder was run')\n"})
        write(editor, cfg=TEXT.replace("hidden_size", "hiden_size"))
        editor.settings({"dslpar.command": [str(lacking), "-m", "dslpar", "lsp"]})
        editor.open("cfg.py")
        editor.wait(editor.notifications, "message")
        (message,) = editor.notifications()
        assert f"Install it: {lacking} -m pip install 'dslpar[lsp]'" in message
        assert "was run" not in message
        editor.command("Notifications: Clear All Notifications")
        editor.settings({"dslpar.command": [sys.executable, "-m", "dslpar", "lsp"]})
        editor.wait(lambda: editor.shown(".squiggly-error"), "finding")
        editor.command("dslpar: Restart the server")
        editor.at(6, 6)
        editor.act("did you mean")
        editor.becomes("cfg.py", TEXT)
        assert editor.notifications() == []


def test_the_text_of_these_tests_is_a_legal_config(tmp_path: Path) -> None:
    (tmp_path / "cfg.py").write_text(TEXT)
    assert [each for each in check.lint(check.load(str(tmp_path / "cfg.py")), 64) if each.severity == "error"] == []
