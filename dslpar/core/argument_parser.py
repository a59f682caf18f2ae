"""Argument parser of dslpar's programs: no abbreviated flags, and escaped text in error messages."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from dslpar.core.visible import visible


class ArgumentParser(argparse.ArgumentParser):
    """Parser whose messages quote the command line with control characters escaped."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Print the usage and the mistake, and exit with status 2."""
        super().error(visible(message))
