"""Arguments of Megatron-LM and Megatron-DeepSpeed: how many values each takes, its default, and its place there.

They were read from the programs' own parsers (data/megatron_arguments.tsv), which know what is a switch.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import NamedTuple

SWITCH = "0"
ANY_NUMBER = ("*", "+")


class Known(NamedTuple):
    """Argument of a Megatron program."""

    values: str
    """Number of its values: "0" for a switch, "1", "?", "*" or "+"."""
    default: str
    """Source text of its default; empty if it has none that can be written."""
    place: str
    """File and line of the source that defines it."""


@cache
def known_arguments() -> Mapping[str, Known]:
    """Return the known arguments by name, such as `--num-layers`."""
    text = resources.files("dslpar.migrate").joinpath("data/megatron_arguments.tsv").read_text(encoding="utf-8")
    rows = (line.split("\t") for line in text.splitlines() if line.startswith("--"))
    return {name: Known(*facts) for name, *facts in rows}
