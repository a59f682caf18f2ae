"""argparse as dslpar's programs use it: no abbreviated flags, and mistakes shown as visible text."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from dslpar.core.visible import visible


class ArgumentParser(argparse.ArgumentParser):
    """A parser whose messages quote the command line without obeying it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Print the usage and the mistake, and exit with status 2."""
        super().error(visible(message))
