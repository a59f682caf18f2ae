"""Every argument of Megatron-LM and Megatron-DeepSpeed has a verdict of `dslpar import`."""

from __future__ import annotations

import re
import shlex

import pytest

from dslpar.migrate.convert import convert
from dslpar.migrate.known_arguments import SWITCH, known_arguments
from dslpar.migrate.registry import TABLES
from dslpar.migrate.sources import read_text

RUN = "torchrun pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 256"
ACTION = re.compile(r"\b(leave (it|one of the two) out|choose|write)\b")
"""What a message says to do: a machine can leave an argument out, and the author has to choose."""


def of(name: str, value: str) -> str:
    """Return a script that passes an argument, of which it takes a value unless it is a switch."""
    return f"{RUN} {name} {shlex.quote(value)}" if known_arguments()[name].values != SWITCH else f"{RUN} {name}"


def test_the_list_is_that_of_both_programs() -> None:
    known = known_arguments()
    assert len(known) > 950
    assert {known[name].values for name in ("--fp16", "--sequence-parallel", "--no-bias-gelu-fusion")} == {SWITCH}
    assert (known["--lr"].values, known["--data-path"].values) == ("1", "*")
    assert all(re.fullmatch(r"Megatron-(LM|DeepSpeed) \S+\.py(:\d+| .*)", fact.place) for fact in known.values())


def test_every_argument_has_a_row() -> None:
    rows = [row.pattern for row in TABLES["megatron"].rows]
    assert not any(row.endswith("**") for row in rows), "a typing error would have a verdict"
    assert {name[2:].replace("-", "_") for name in known_arguments()} <= set(rows)
    assert len(rows) == len(set(rows)), "the second row of an argument never applies"


@pytest.mark.parametrize("value", ["7", "odd"])
def test_every_verdict_that_needs_the_author_says_what_to_do(value: str) -> None:
    silent = []
    for name in known_arguments():
        made = convert(read_text(of(name, value), "a.sh", "megatron"))
        (entry, *_) = [entry for entry in reversed(made.entries) if entry.key == name]
        if entry.fate == "needed" and not ACTION.search(entry.why):
            silent.append(f"{name}: {entry.why}")
        assert entry.fate in ("kept", "renamed") or entry.why, name
    assert silent == []


def test_a_default_that_is_written_out_needs_nobody() -> None:
    needed = []
    for name, (values, default, _) in known_arguments().items():
        if values != "1" or default in ("", "None", "''") or name in ("--rampup-batch-size", "--num-layers"):
            continue
        made = convert(read_text(of(name, default.strip("'")), "a.sh", "megatron"))
        needed += [name for entry in made.entries if entry.key == name and entry.fate == "needed"]
    assert needed == []


def test_what_is_left_out_as_its_message_says_is_gone() -> None:
    plain = [entry.why for entry in convert(read_text(RUN, "a.sh", "megatron")).entries if entry.fate == "needed"]
    for name in known_arguments():
        made = convert(read_text(of(name, "7"), "a.sh", "megatron"))
        left = [entry for entry in made.entries if entry.fate == "needed" and "leave it out" in entry.why]
        if left and {entry.key for entry in left} == {name}:
            others = [entry.why for entry in made.entries if entry.fate == "needed" and entry.key != name]
            assert others == plain, name
