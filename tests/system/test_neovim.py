"""The language server in a real editor: Debian's Neovim with its own client."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from dslpar.cli.main import main
from dslpar.linter import check
from tests.support import neovim_session
from tests.support.neovim import LACKS, NVIM, neovim

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
