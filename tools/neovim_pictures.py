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
from tests.support.neovim_session import LINES, MOMENTS, write_config  # noqa: E402
from tests.support.terminal import Terminal  # noqa: E402

FOLDER = ROOT / "docs" / "pictures" / "neovim"
ROWS, COLUMNS = 18, 96
COLOURS = "vim.cmd('hi Pmenu ctermfg=15 ctermbg=8 | hi PmenuSel ctermfg=0 ctermbg=12 | hi Search ctermfg=0 ctermbg=11')\n"
"""Highlights of menus that read well on light paper too."""


def pictures() -> dict[str, str]:
    """Return the pictures of the session by name."""
    made: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "cfg.py").touch()
        terminal = Terminal(ROWS, COLUMNS)

        def moment(name: str) -> None:
            terminal.wait(MOMENTS[name].on_screen)
            made[f"{name}.svg"] = svg(terminal.screen, f"Neovim: {name}", MOMENTS[name].description)

        with neovim(Path(folder), "cfg.py", terminal, LINES + COLOURS) as editor:
            editor.moment = moment
            write_config(editor)
    return made


def main() -> int:
    """Write the pictures, or compare them; return the exit status."""
    parser = argparse.ArgumentParser(description="Record a session in Neovim as pictures for docs/editors.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a picture differs")
    is_check = parser.parse_args().check
    status = 0
    for name, text in pictures().items():
        path = FOLDER / name
        if is_check and (not path.exists() or path.read_text(encoding="utf-8") != text):
            print(f"{path.relative_to(ROOT)} differs: run python tools/neovim_pictures.py")
            status = 1
        elif not is_check:
            FOLDER.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
