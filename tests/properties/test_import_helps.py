"""Follow by machine what a report of `dslpar import` tells its author to do: then the report no longer asks for it.

A help that names a dslpar key, a source's key, an option or an expression is followed to the letter. Others are for the
author alone: a number that only the data or the program determines.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from dslpar.language.load import load_text
from dslpar.linter import check
from dslpar.migrate.convert import Entry, Import, convert
from dslpar.migrate.sources import read_text
from dslpar.migrate.table import Epoch
from dslpar.schema.sections_reader import SECTIONS
from tests.properties import test_foreign_keys as foreign

MODEL = "model = dict(type='GPT', num_layers=2, hidden_size=64, num_heads=4, vocab_size=256, max_seq_len=32)\n"
VALUES = (1, 8, 0.5, 2.0, True, "cosine", "fp16", "cpu", "gelu", "rotary", "rmsnorm", "uniform", "1d", "AdamW",
          "1f1b", "ulysses", "WarmupLR", (0.9, 0.95))  # fmt: skip
SNIPPET = re.compile(r"(?:^|write |: )((?:\w+)(?:\.\w+)* ?= ?(?:dict\([^;]*\)|'[^']*'))")
BESIDE = {"precision": "dtype='fp16', ", "zero": "stage=3, ", "schedule": "type='interleaved', "}
"""Keys without which others of their section have no effect."""
IN_TEST, ALL = 5, 120
MISSPELT = {
    "colossalai": "clip_grad_nrom",
    "deepspeed": "gradient_cliping",
    "gpt_neox": "hidden_sizes",
    "libai": "train.sead",
}


def follow(name: str, flat: Mapping[str, Any], entry: Entry) -> str:
    """Do what an entry says; return how, and fail if the report still asks for it."""
    meant = re.search(r"did you mean '([^']+)'\?", entry.why)
    if meant and entry.key in flat:
        again = foreign.made_of(name, {meant[1] if key == entry.key else key: value for key, value in flat.items()})
        assert not any("no such key" in item.why for item in again.entries if item.key == meant[1]), entry
        return "the key that was meant"
    if "leave it out" in entry.why and entry.key in flat:
        again = foreign.made_of(name, {key: value for key, value in flat.items() if key != entry.key})
        assert not [item for item in again.entries if item.key == entry.key], entry
        return "left out"
    if "give --num-samples N" in entry.why:
        again = _with_epoch(name, flat)
        assert not [item for item in again.entries if item.key == entry.key and "--num-samples" in item.why], entry
        return "--num-samples"
    for snippet in SNIPPET.findall(entry.why):
        assert _accepted(snippet.replace("...", "8")), (entry.why, snippet)
        return "an expression"
    if entry.to:
        assert _has_key(entry.to), entry
        return "a key of dslpar"
    return "for the author"


def _with_epoch(name: str, flat: Mapping[str, Any]) -> Import:
    source = foreign.made_of(name, flat).source
    return convert(source, epoch=Epoch(6400, 64))


def _accepted(snippet: str) -> bool:
    """Return whether a config takes an expression such as `precision = 'bf16'` or `model.activation='swiglu'`."""
    key, _, value = (part.strip() for part in snippet.partition("="))
    section, *below = key.split(".")
    for part in reversed(below):
        value = f"dict({part}={value})"
    base = MODEL if section != "model" or below else ""
    text = base + (f"model.update({value})\n" if section == "model" and below else f"{section} = {value}\n")
    config = load_text(text, "made.py")
    errors = [item.code for item in (*config.findings, *check.lint(config)) if item.severity == "error"]
    return not any(code.startswith(("CFG", "DSC")) for code in errors)


def _has_key(to: str) -> bool:
    """Return whether dslpar has a key, so that it accepts one of some values there."""
    section, *below = to.split(".")
    if not below or section in ("model", "optimizer", "lr_scheduler"):
        return section in SECTIONS  # the keys of a class that the author chooses
    for value in VALUES:
        text = repr(value)
        for part in reversed(below):
            text = f"dict({BESIDE.get(section, '') if part == below[0] != 'dtype' else ''}{part}={text})"
        findings = check.lint(load_text(f"{MODEL}{section} = {text}\n", "made.py"))
        if not any(item.code.startswith(("CFG", "DSC")) for item in findings if item.location.line == 2):
            return True
    return False


def outcomes(name: str, seeds: range) -> Counter[str]:
    """Follow each kind of help once: those that differ only in numbers and names are one kind."""
    seen: Counter[str] = Counter()
    kinds = set()
    for seed in seeds:
        flat = foreign.config_of(name, seed) | {MISSPELT[name]: 1}
        for entry in foreign.made_of(name, flat).entries:
            kind = entry.to, re.sub(r"'[^']*'|[\d.]+", "_", entry.why)
            if entry.fate == "needed" and kind not in kinds:
                kinds.add(kind)
                seen[follow(name, flat, entry)] += 1
    return seen


def check_outcomes(name: str, seeds: range, at_least: int) -> None:
    seen = outcomes(name, seeds)
    print(name, dict(seen))
    assert seen.total() >= at_least
    assert seen["the key that was meant"], "the misspelt key"


@pytest.mark.parametrize("name", foreign.SOURCES)
def test_helps_of_imports_are_right(name: str) -> None:
    check_outcomes(name, range(foreign.ALL, foreign.ALL + IN_TEST), 3)


@pytest.mark.prove
@pytest.mark.minutes(3)
@pytest.mark.parametrize("name", foreign.SOURCES)
def test_helps_of_many_imports_are_right(name: str) -> None:
    check_outcomes(name, range(ALL), 8)


def test_a_key_that_dslpar_does_not_have_would_be_seen() -> None:
    assert [_has_key(key) for key in ("train.steps", "model.dropout", "train.stpes", "stpes.x")] == [True] * 2 + [
        False
    ] * 2
    assert _accepted("precision = 'bf16'")
    assert not _accepted("precison = 'bf16'")


def test_a_script_of_megatron_lm() -> None:
    text = "python p.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --train-samples 1000"
    made = convert(read_text(text, "a.sh"))
    for entry in made.entries:
        if entry.fate == "needed" and entry.to:
            assert _has_key(entry.to), entry
