"""The language server in a real editor: Debian's Neovim with its own client."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from dslpar.linter import check
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


def test_an_empty_file_becomes_a_legal_config_of_64_gpus(tmp_path: Path) -> None:
    """Sections, keys and values are completed; the author types numbers alone, and the rest are fixes."""
    path = tmp_path / "cfg.py"
    path.write_text("# dslpar: world-size=64 device=h100-80g\n")
    with neovim(tmp_path, "cfg.py") as editor:
        editor.type("Go<Esc>0Di")  # without the `#` with which Neovim goes on
        editor.complete("model = ")
        editor.type("<Left>")
        for key, value in [
            ("num_layers=", "32"),
            ("hidden_size=", "4096"),
            ("num_heads=", "4"),
            ("vocab_size=", "32000"),
            ("max_seq_len=", "4096"),
        ]:
            editor.complete(key)
            editor.type(f"{value}, ")
        editor.complete("type=")
        editor.complete("'GPT'")
        editor.type("<Esc>o")
        editor.complete("parallel = ")
        editor.type("<Left>")
        editor.complete("pipeline=")
        editor.complete("2")
        editor.type(", ")
        editor.complete("tensor=")
        editor.complete("dict()")
        editor.type("<Left>")
        editor.complete("size=")
        editor.type("8")  # not offered: the model has four heads, which a fix changes below
        editor.type(", ")
        editor.complete("mode=")
        editor.complete("'1d'")
        editor.type("<Esc>")
        editor.wait(lambda: "TEN201" in [code for code, _ in editor.diagnostics()], "finding about 4 heads")
        editor.type("/num_heads=<CR>")
        editor.act("num_heads=8")
        editor.type("<Esc>:w<CR>")
        editor.wait(lambda: path.read_text() == editor.text, "saved file")
        editor.wait(lambda: "GiB" in str(editor.lua("vim.lsp.codelens.get(0)")), "layout above parallel")
    assert (
        path.read_text()
        == """\
# dslpar: world-size=64 device=h100-80g
model = dict(num_layers=32, hidden_size=4096, num_heads=8, vocab_size=32000, max_seq_len=4096, type='GPT')
parallel = dict(pipeline=2, tensor=dict(size=8, mode='1d'))
"""
    )
    config = check.load(str(path))
    assert [item for item in check.lint(config, 64) if item.severity == "error"] == []
