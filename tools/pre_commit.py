#!/usr/bin/env python3
"""Run `dslpar` from this checkout for .pre-commit-hooks.yaml: `rev` selects the linter, and nothing is installed.

Linting needs only Python 3.11, and PyYAML for configs in YAML. pre-commit's own environment would install torch and
DeepSpeed, gigabytes that lint never imports.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> int:
    """Run `dslpar`, which exits with its own status. Return 2 if this Python cannot run it."""
    if sys.version_info < (3, 11):  # noqa: UP036 - this is whatever python3 the machine has
        return _refuse("needs Python 3.11 or newer")
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from dslpar.cli import main as cli_main

    try:
        cli_main.run()
    except ModuleNotFoundError as missing:
        if missing.name != "yaml":
            raise
        return _refuse("needs PyYAML for configs in YAML")


def _refuse(why: str) -> int:
    sys.stderr.write(f"dslpar's hook {why}; it runs on {sys.executable}, Python {sys.version.partition(' ')[0]}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
