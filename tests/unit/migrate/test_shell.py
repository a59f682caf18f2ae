"""Arguments of a Python program in a shell script, found without running a shell."""

from __future__ import annotations

import random
import subprocess

import pytest

from dslpar.language.yaml_io import scalar
from dslpar.migrate.shell.arguments import load_arguments
from tests.support.paths import ROOT

SCRIPT = ROOT / "tests/support/foreign_configs/megatron/pretrain_gpt.sh"


@pytest.mark.parametrize(
    ("script", "values", "unknown"),
    [
        ("python a.py --x 1 --y=two --flag", {"--x": 1, "--y": "two", "--flag": True}, set()),
        ("A=1\nB=$A\npython a.py --x ${B} --y ${C:-3} --z ${C-'4'}", {"--x": 1, "--y": 3, "--z": "'4'"}, set()),
        ("A='--x 1'\nA+=' --y 2'\npython a.py $A", {"--x": 1, "--y": 2}, set()),
        ("A=(--x 1)\nA+=(--y 'a b')\npython a.py ${A[@]}", {"--x": 1, "--y": ["a", "b"]}, set()),
        ("A=(--x 1)\nA+=(--y 'a b')\npython a.py \"${A[@]}\"", {"--x": 1, "--y": "a b"}, set()),
        ("N=4\npython a.py --x $((N * 2 + 10 / 3)) --y $(( $N % 3 ))", {"--x": 11, "--y": 1}, set()),
        ("python a.py --x 1 2 3 --y -1", {"--x": [1, 2, 3], "--y": -1}, set()),
        ("python a.py --x \\\n  1 # --y 2\n", {"--x": 1}, set()),
        ("cat <<EOF > f\npython b.py --z 1 --q 2 --r 3\nEOF\npython a.py --x 1 --y 2", {"--x": 1, "--y": 2}, set()),
        ("cmd=\"python a.py --x 1\"\neval $cmd", {"--x": 1}, set()),
        ("python a.py --x $1 --y $(hostname) --z `pwd` --w $((1 / 0))", {}, {"--x", "--y", "--z", "--w"}),
        ("if true; then\nA=2\nfi\npython a.py --x $A --y 3", {"--y": 3}, {"--x"}),
        ("python a.py --x 1 --x 2", {"--x": 2}, set()),
    ],
)  # fmt: skip
def test_what_a_script_hands_over(script: str, values: dict[str, object], unknown: set[str]) -> None:
    config, _ = load_arguments(script, "run.sh")
    assert (config.root.plain(), config.unknown) == (values, unknown)


def test_what_a_branch_adds_is_a_finding_at_its_place() -> None:
    config, _ = load_arguments("if a; then\nB='--fp16'\nfi\npython a.py --x 1 $B", "run.sh")
    assert config.root.plain() == {"--x": 1}
    assert [(item.code, item.location.line) for item in config.findings] == [("CFG010", 2)]


def test_the_words_are_those_that_bash_hands_over() -> None:
    script = SCRIPT.read_text()
    printed = script.replace("torchrun", "printf '%s\\n'").replace("2>&1 | tee train.log", "")
    ended = subprocess.run(["bash", "-c", printed, "run.sh", "c", "d"], capture_output=True, text=True, check=True)
    words = ended.stdout.split()
    theirs = [scalar(word) for word in words[words.index("pretrain_gpt.py") + 1 :]]
    config, _ = load_arguments(script.replace("=$1", "=c").replace("=$2", "=d"), "run.sh")
    ours = [item for key, value in config.root.plain().items() for item in ((key,) if value is True else (key, value))]
    assert ours == theirs


ADDS = "A+=(${A[@]})\n"


@pytest.mark.parametrize("text", ["A=xx\n" + "A=$A$A\n" * 60 + "python a.py --x $A", "A=(1 2)\n" + ADDS * 40])
def test_expansion_is_bounded(text: str) -> None:
    config, _ = load_arguments(text, "run.sh")
    assert [item.code for item in config.findings] == ["CFG005"]


@pytest.mark.parametrize("text", ["", "(((", "'", '"$(', "${", "A=(", "cat <<E\n", "make all", "python a.py"])
def test_no_arguments_are_a_finding(text: str) -> None:
    config, _ = load_arguments(text, "run.sh")
    assert not config.complete
    assert config.findings[0].help


def test_any_text_is_read_or_refused() -> None:
    pieces = [
        "$",
        "(",
        ")",
        "{",
        "}",
        "'",
        '"',
        "\\",
        "\n",
        " ",
        "A=",
        "--x ",
        "python a.py ",
        "${A}",
        "$((",
        "`",
        "<<E",
        "#",
    ]
    for seed in range(500):
        chosen = random.Random(seed)
        load_arguments("".join(chosen.choice(pieces) for _ in range(50)), "run.sh")
