"""Flags of the field: underscores, and the names that other tools give them."""

from __future__ import annotations

import pytest

from dslpar.core.argument_parser import ArgumentParser


def parser() -> ArgumentParser:
    made = ArgumentParser(prog="x")
    made.add_argument("--max-tokens", type=int)
    made.add_argument("--local_rank", type=int)
    made.add_argument("--format")
    made.add_argument("--stop")
    made.add_argument("words", nargs="*")
    return made


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--max_tokens", "3"], {"max_tokens": 3}),
        (["--max_tokens=3", "a_b=1"], {"max_tokens": 3, "words": ["a_b=1"]}),
        (["--local_rank", "3"], {"local_rank": 3}),
        (["--stop=--max_tokens"], {"stop": "--max_tokens"}),
        (["--", "--max_tokens"], {"words": ["--max_tokens"]}),
    ],
)
def test_underscores_are_dashes(words: list[str], found: dict[str, object]) -> None:
    assert vars(parser().parse_args(words)).items() >= found.items()


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("--n-predict=3", "; here that is --max-tokens"),
        ("--max_gen_len", "; here that is --max-tokens"),
        ("--max-token", "; did you mean '--max-tokens'?"),
        ("--json", "; here that is --format json"),
        ("--nproc-per-node", "unrecognized arguments: --nproc-per-node\n"),
        ("--quite-another", "unrecognized arguments: --quite-another\n"),
    ],
)
def test_an_unknown_flag_names_ours(flag: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parser().parse_args([flag])
    assert ended.value.code == 2
    assert hint in capsys.readouterr().err
