#!/usr/bin/env python3
"""`dslpar` out of this checkout, for .pre-commit-hooks.yaml: nothing is installed, and `rev` says which linter it is.

Linting takes a bare Python 3.10, and PyYAML for configs in YAML; an environment made by pre-commit would hold torch and
DeepSpeed, gigabytes that no lint imports.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> int:
    """Runs `dslpar`, which ends with its exit status; 2 where this Python is not enough."""
    if sys.version_info < (3, 10):  # noqa: UP036 - whatever python3 the machine has
        return _refuse("needs Python 3.10 or newer")
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from dslpar.cli import main as cli_main

    try:
        cli_main.run()
    except ModuleNotFoundError as missing:
        if missing.name != "yaml":
            raise
        return _refuse("needs PyYAML for configs in YAML")


def _refuse(why: str) -> int:
    sys.stderr.write(f"dslpar's hook {why}; it runs by {sys.executable}, Python {sys.version.partition(' ')[0]}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
