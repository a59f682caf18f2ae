"""Write the pictures of Visual Studio Code in docs/editors.md: `make vscode-check` does, with build/dslpar-*.vsix.

python tools/vscode_pictures.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.paths import ROOT
from tests.support.vscode import VSCode, lacks

PICTURES = ROOT / "docs" / "pictures"
MOST_BYTES = 100_000
CONFIG = """\
# dslpar: world-size=64 device=h100-80g
parallel = dict(pipeline=2, tensor=dict(size=4, mode='1d'))
model = dict(
    type='GPT',
    num_layers=32,
    hidden_size=4096,
    num_heads=30,
    vocab_size=32000,
    max_seq_len=4096,
)
batch = dict(global_size=512, micro_size=1)
"""


def main() -> None:
    """Drive the editor to each picture."""
    if lacking := lacks():
        raise SystemExit(lacking)
    (package,) = (ROOT / "build").glob("dslpar-*.vsix")
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder, "project")
        project.mkdir()
        config = project / "cfg.py"
        with VSCode(project, Path(folder, "home"), package, width=900, height=400) as editor:
            config.write_text(CONFIG)
            editor.open("cfg.py")
            editor.wait(lambda: len(editor.shown(".squiggly-error")) == 2, "findings")
            editor.command("View: Toggle Primary Side Bar Visibility")
            editor.command("Problems: Focus on Problems View")
            editor.wait(editor.problems, "panel of problems")
            _write(editor, "problems")
            editor.command("View: Toggle Panel Visibility")
            editor.at(7, 16)
            editor.actions()
            _write(editor, "quick_fix")
            editor.act("num_heads=32")
            editor.wait(lambda: "layers 16 16" in "".join(editor.shown(".view-line")), "hints")
            editor.at(2, 32)
            editor.command("Show or Focus Hover")
            editor.wait(lambda: editor.shown(".monaco-hover-content"), "hover")
            _write(editor, "hover")
            editor.press("Escape")
            editor.at(12, 1)
            editor.type("zero = dict(")
            editor.press("Ctrl+ ")
            editor.wait(editor.suggestions, "keys")
            editor.press("Ctrl+ ")  # with the help of the chosen one
            _write(editor, "completion")


def _write(editor: VSCode, name: str) -> None:
    path = editor.picture(PICTURES / f"vscode_{name}.png")
    assert path.stat().st_size < MOST_BYTES, path
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size // 1000} KB")


if __name__ == "__main__":
    main()
