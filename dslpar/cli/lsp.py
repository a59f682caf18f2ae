"""`dslpar lsp`: start the language server that editors talk to over stdin and stdout."""

from __future__ import annotations

import argparse

EPILOG = """\
The server needs pip install 'dslpar[lsp]'. Editors start it; docs/editors.md has the lines.
It treats Python and YAML files as configs if they define `model` or `parallel`, or two other
sections. The number of ranks and the device come from a comment above everything else:

    # dslpar: world-size=8,64 device=h100-80g

else from [tool.dslpar] of the nearest pyproject.toml. Nothing in a config is executed.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.epilog = EPILOG
    parser.add_argument("--stdio", action="store_true", help="talk over stdin and stdout, which is the only way")


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Serve until the editor ends the server."""
    from dslpar.lsp.server import start  # needs pygls

    start()
    return 0
