"""Arguments that `dslpar import` reads from random launch scripts, compared with those that bash hands over."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dslpar.language.yaml_io import scalar
from dslpar.migrate.shell.arguments import load_arguments
from tests.properties.shell_scripts import OUTSIDE, Writer, bash_argv

ENVIRONMENTS = ({}, {OUTSIDE: "1"})


def handed_over(words: list[str]) -> dict[str, object]:
    """Return the arguments among the words of a program, read independently."""
    made: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--") and len(word) > 2 and " " not in word:  # as argparse decides
            name, equals, value = word.partition("=")
            made[name] = [value] if equals else []
        elif name in ("--fp16", "--bf16", "--swiglu"):
            name = ""
        elif name:
            made[name].append(word)
    single = ("--num-layers", "--lr", "--save")
    values = {key: [scalar(word) for word in words[: 1 if key in single else None]] for key, words in made.items()}
    return {key: value if len(value) > 1 else value[0] if value else True for key, value in values.items()}


def wrong(script: str, folder: Path) -> tuple[list[str], bool]:
    """Return the arguments that differ from bash's without a report, and whether all agree without any report."""
    config, _ = load_arguments(script, "run.sh")
    if not config.complete:
        runs = [run for environment in ENVIRONMENTS for run in bash_argv(script, folder, environment)]
        return [f"not read: {config.findings[0].message}"] if any(map(handed_over, runs)) else [], False
    ours = config.root.plain()
    reported = [item.message for item in config.findings]
    missing = any("may be missing" in message or "with other arguments" in message for message in reported)
    differ = []
    exact = not reported
    for environment in ENVIRONMENTS:
        runs = bash_argv(script, folder, environment)
        if not runs:
            continue  # a branch that exits
        theirs = [handed_over(run) for run in runs]
        best = max(theirs, key=lambda found: sum(found.get(key) == value for key, value in ours.items()))
        keys = {key for key in {*ours, *best} if ours.get(key) != best.get(key)} - config.unknown
        exact = exact and not keys
        if keys and not missing:
            differ += [f"{environment}: {key}: {ours.get(key)!r}, in bash {best.get(key)!r}" for key in sorted(keys)]
    return differ, exact


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is the oracle")
@pytest.mark.parametrize("count", [40, pytest.param(400, marks=pytest.mark.prove)])
def test_arguments_are_those_that_bash_hands_over(count: int, tmp_path: Path) -> None:
    exact = 0
    for seed in range(count):
        script = Writer(seed).script()
        differ, agrees = wrong(script, tmp_path)
        assert differ == [], f"seed {seed}\n{script}"
        exact += agrees
    assert exact >= count // 5, f"only {exact} of {count} scripts are read without any report"
