"""`dslpar mcp`: start the server through which agents lint, plan and prove configs."""

from __future__ import annotations

import argparse
import os

from dslpar.cli import arguments
from dslpar.core.requirements import explain_missing
from dslpar.mcp_server.confinement import drop_imports_below

EPILOG = """\
The server needs pip install 'dslpar[mcp]'. An agent's client starts it and talks over stdin and
stdout; docs/agents.md has the lines for each client. It reads below DIR and in installed packages.
It writes nothing, and starts nothing but prove, with --allow-prove. A proof runs the classes that
the config names: allow it if you trust the code in DIR.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.epilog = EPILOG
    parser.add_argument("--root", default=".", metavar="DIR", help="the folder to read; default: this folder")
    parser.add_argument("--allow-prove", action="store_true", help="let agents run prove, which starts processes")
    help = "end a prove after this many seconds; default: %(default)s"
    parser.add_argument("--timeout", type=arguments.whole_number, default=600, metavar="S", help=help)


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Serve until the client ends."""
    if not os.path.isdir(args.root):
        parser.error(f"{args.root} is not a folder")
    drop_imports_below(os.path.realpath(args.root))  # before the server's imports
    missing = explain_missing("dslpar mcp", "mcp", "jsonschema")
    if missing:
        parser.error(missing)
    from dslpar.cli.main import COMMANDS, main
    from dslpar.mcp_server.server import start

    start(main, COMMANDS, args.root, args.allow_prove, args.timeout)
    return 0
