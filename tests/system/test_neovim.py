"""The language server in a real editor: Debian's Neovim with its own client."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from dslpar.cli.main import main
from dslpar.linter import check
from tests.support import neovim_session
from tests.support.neovim import LACKS, NVIM, neovim
from tests.support.paths import ROOT

pytestmark = [
    pytest.mark.skipif(NVIM is None, reason=LACKS),
    pytest.mark.skipif(find_spec("pygls") is None, reason="pygls is not installed (extra lsp)"),
]
TEXT = """\
# dslpar: world-size=8
parallel = dict(pipeline=2, tensor=dict(size=2, mode='1d'))
model = dict(type='GPT', num_layers=4, hidden_size=48, num_heads=4, vocab_size=256, max_seq_len=64)
batch = dict(global_size=16, micro_size=2)
"""


def test_findings_fixes_and_completion(tmp_path: Path) -> None:
    path = tmp_path / "cfg.py"
    path.write_text(TEXT.replace("hidden_size", "hiden_size"))
    with neovim(tmp_path, "cfg.py") as editor:
        editor.wait(editor.diagnostics, "findings")
        assert editor.diagnostics() == [("CFG101", 3)]
        editor.type("3G41|")
        assert editor.act("did you mean") == [
            "did you mean 'hidden_size'? (CFG101)",
            "dslpar: explain CFG101",
            "dslpar: fix all (1)",
        ]
        editor.wait(lambda: not editor.diagnostics(), "no findings")
        editor.type("Gozero = dict(")
        editor.complete("stage=")
        editor.type("1)<Esc>:w<CR>")
        editor.wait(lambda: path.read_text() == editor.text, "saved file")
    assert path.read_text() == TEXT + "zero = dict(stage=1)\n"
    assert check.lint(check.load(str(path)), 8) == []


def test_an_empty_file_becomes_a_legal_config_of_64_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sections, keys and values are completed; the author types numbers alone, and the rest are fixes."""
    path = tmp_path / "cfg.py"
    path.write_text("")
    with neovim(tmp_path, "cfg.py", more=neovim_session.LINES) as editor:
        neovim_session.write_config(editor)
        editor.wait(lambda: path.read_text() == editor.text, "saved file")
    assert path.read_text() == neovim_session.TEXT
    assert main(["lint", str(path), "--world-size", "64", "--select", "CFG,PAR,TEN,PIP,BAT,FIT"]) == 0


def test_the_number_of_ranks_is_set_by_a_command(tmp_path: Path) -> None:
    path = tmp_path / "cfg.py"
    path.write_text(TEXT)
    with neovim(tmp_path, "cfg.py") as editor:
        editor.type("<Esc>:DslparWorld 8,12<CR>")
        editor.wait(lambda: "(with 12 ranks)" in str(editor.lua("vim.diagnostic.get(0)")), "finding for 12 ranks")
        assert editor.text == TEXT.replace("world-size=8", "world-size=8,12")
        editor.type("gg")
        assert "dslpar: lint for 16 ranks" in editor.act("dslpar: lint for 16 ranks")
        assert editor.text == TEXT.replace("world-size=8", "world-size=16")


def test_the_first_five_minutes_of_the_page(tmp_path: Path) -> None:
    """Write what docs/editors.md asks a newcomer to write; the editor shows what the page says."""
    page = (ROOT / "docs" / "editors.md").read_text(encoding="utf-8")
    steps = page.partition("## The first five minutes")[2].partition("\n## ")[0]
    comment, parallel, model, batch = (
        next(code for code in re.findall(r"`([^`]+)`", steps) if code.startswith(begin))
        for begin in ("# dslpar", "parallel = ", "model = ", "batch = ")
    )
    path = tmp_path / "cfg.py"
    with neovim(tmp_path, "cfg.py") as editor:
        editor.type(f"i{comment}<Esc>")
        editor.wait(lambda: ("CFG107", 1) in editor.diagnostics(), "finding that there is no model")
        editor.type(f"o<Esc>S{parallel}")
        editor.complete("4")
        editor.type(f"))<Esc>o{model}<Esc>")
        editor.wait(lambda: ("TEN201", 3) in editor.diagnostics(), "finding about 30 heads")
        assert [code for code, _ in editor.diagnostics()].count("CFG104") == 3, "missing keys"
        editor.type("/num_heads<CR>")
        titles = editor.act("num_heads=32 (TEN201)")
        assert titles[:2] == ["num_heads=16 (TEN201)", "num_heads=32 (TEN201)"]
        editor.type("$i")
        for key, number in (("num_layers=", 32), ("max_seq_len=", 4096), ("vocab_size=", 32000)):
            editor.type(", ")
            editor.complete(key)
            editor.type(str(number))
        editor.type(f"<Esc>o{batch}<Esc>:w<CR>")
        editor.wait(lambda: "a step" in str(editor.lua("vim.lsp.codelens.get(0)")), "layout above parallel")
    assert check.lint(check.load(str(path)), 64) == []
