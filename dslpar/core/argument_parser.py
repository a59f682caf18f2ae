"""Argument parser of dslpar's programs: no abbreviated flags, and escaped text in error messages.

Flags may be written with underscores, `--max_tokens`, as torchrun and vLLM accept them. The error for an unknown flag
names the flag of ours that means the same, or that is spelled alike.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from dslpar.core.suggest import did_you_mean
from dslpar.core.visible import visible

_UNKNOWN = "unrecognized arguments: "
"""Beginning of argparse's message."""
_ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(("nproc", "nproc-per-node", "num-gpus", "num-processes", "np", "n"), "world-size"),
    **dict.fromkeys(("n-predict", "num-predict", "max-gen-len", "max-length"), "max-tokens"),
    "json": "format json",
    "output-format": "format",
    **dict.fromkeys(("limit", "num-samples"), "samples"),
    **dict.fromkeys(("out", "output", "output-dir", "output-path"), "output-file"),
    "stop-sequences": "stop",
    "hosts": "hostfile",
    "resume-from-checkpoint": "resume",
}
"""Flags of other tools -> a flag of ours, and perhaps its value, both without leading dashes."""


class ArgumentParser(argparse.ArgumentParser):
    """Parser whose messages quote the command line with control characters escaped."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse flags with underscores as if they had dashes."""
        return super().parse_known_args(self._dashed(sys.argv[1:] if args is None else args), namespace)

    def _dashed(self, args: Sequence[str]) -> list[str]:
        found: list[str] = []
        flags = self._option_string_actions
        for number, word in enumerate(args):
            if word == "--":
                return [*found, *args[number:]]
            flag, equals, value = word.partition("=")
            dashed = flag.replace("_", "-")
            renames = flag.startswith("--") and flag not in flags and dashed in flags
            found.append(f"{dashed}{equals}{value}" if renames else word)
        return found

    def error(self, message: str) -> NoReturn:
        """Print the usage and the mistake, and exit with status 2."""
        if message.startswith(_UNKNOWN):
            message += self._hint(message.removeprefix(_UNKNOWN).split())
        super().error(visible(message))

    def _hint(self, words: Iterable[str]) -> str:
        """Return a hint for the first unknown flag; empty if no flag of this parser resembles it."""
        flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        for word in (word.partition("=")[0] for word in words if word.startswith("-")):
            same = f"--{_ELSEWHERE.get(word.lstrip('-').replace('_', '-'), '')}"
            if same.partition(" ")[0] in flags:
                return f"; here that is {same}"
            if alike := did_you_mean(word, flags):
                return f"; {alike}"
        return ""
