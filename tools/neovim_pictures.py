"""Record a session in Neovim as pictures for docs/editors.md: its real screen, at the moments that matter.

python tools/neovim_pictures.py            # writes docs/pictures/neovim/*.svg; some ten seconds
python tools/neovim_pictures.py --check    # writes nothing; names the pictures that differ, and exits with 1 if any do

It needs `nvim` on PATH and pyte (extra docs). The pictures are of Debian's Neovim 0.7, which draws the same screens
each time; the session is tests/support/neovim_session.py. Inlay hints need Neovim 0.10, so with an older one their
picture is left as it is; a newer one writes that picture alone.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from terminal_svg import svg  # noqa: E402

from tests.support.neovim import neovim, version  # noqa: E402
from tests.support.neovim_session import LINES, MOMENTS, TEXT, write_config  # noqa: E402
from tests.support.terminal import Terminal  # noqa: E402

FOLDER = ROOT / "docs" / "pictures" / "neovim"
ROWS, COLUMNS = 18, 104
COLOURS = """
vim.cmd('hi Pmenu ctermfg=15 ctermbg=8 | hi PmenuSel ctermfg=0 ctermbg=12 | hi SignColumn ctermbg=NONE')
vim.cmd('hi LspCodeLens ctermfg=6 | hi LspInlayHint ctermfg=6')
vim.o.hlsearch = false
vim.opt.shortmess:append('c')
"""
"""Highlights that read well on light paper too, and apart from the config what is not in its text."""
HINTS = (0, 10)
"""The first version of Neovim that shows inlay hints."""
BATCH = "batch = dict(micro_size=1, accumulation=8)\n"


def pictures() -> dict[str, str]:
    """Return the pictures by name: those of the session, or with a newer Neovim that of hints."""
    with tempfile.TemporaryDirectory() as folder:
        return _hints(Path(folder)) if version() >= HINTS else _session(Path(folder))


def _session(folder: Path) -> dict[str, str]:
    (folder / "cfg.py").touch()
    terminal, made = Terminal(ROWS, COLUMNS), dict[str, str]()

    def moment(name: str) -> None:
        terminal.wait(MOMENTS[name].on_screen)
        made[f"{name}.svg"] = svg(terminal.screen, f"Neovim: {name}", MOMENTS[name].description)

    with neovim(folder, "cfg.py", terminal, LINES + COLOURS) as editor:
        editor.moment = moment
        write_config(editor)
    return made


def _hints(folder: Path) -> dict[str, str]:
    (folder / "cfg.py").write_text(TEXT + BATCH, encoding="utf-8")
    terminal = Terminal(ROWS, COLUMNS)
    with neovim(folder, "cfg.py", terminal, LINES + COLOURS):
        terminal.wait("1 x 8 x 4")
        made = svg(terminal.screen, "Neovim: hints", "Values that follow from the config, behind those that it has")
    return {"hints.svg": made}


def stale(made: dict[str, str], folder: Path = FOLDER) -> list[str]:
    """Return the names of the pictures that a folder lacks or has otherwise."""
    there = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.svg")}
    return [name for name, text in made.items() if there.get(name) != text]


def main() -> int:
    """Write the pictures, or compare them; return the exit status."""
    parser = argparse.ArgumentParser(description="Record a session in Neovim as pictures for docs/editors.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a picture differs")
    is_check = parser.parse_args().check
    made = pictures()
    names = stale(made)
    for name in names:
        path = FOLDER / name
        if is_check:
            print(f"{path.relative_to(ROOT)} differs: run python tools/neovim_pictures.py")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(made[name], encoding="utf-8")
    return int(is_check and bool(names))


if __name__ == "__main__":
    sys.exit(main())
