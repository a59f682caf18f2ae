"""`dslpar lint --fix` and `--diff`: certain fixes are written, and every other byte stays."""

from __future__ import annotations

import io
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dslpar.cli.main import main
from dslpar.core.errors import Fix, Location
from dslpar.linter.check import lint
from dslpar.linter.fixes import apply
from tests.support.lint import MODEL
from tests.support.paths import ROOT

CONFIGS = ROOT / "configs"
NAMES = re.compile(r"(?<![\w.'])(?:parallel|model|batch|optimizer|train|zero|precision)(?= = )|(?<=[( ])\w+(?==[^=])")
LETTERS = "abcdefghijklmnopqrstuvwxyz_"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def misspelt(name: str, chance: random.Random) -> str:
    """Return a name with one letter missing, doubled, swapped or wrong."""
    at = chance.randrange(1, len(name))
    return chance.choice(
        [
            name[:at] + name[at + 1 :],
            name[:at] + name[at] + name[at:],
            name[: at - 1] + name[at] + name[at - 1] + name[at + 1 :],
            name[:at] + chance.choice(LETTERS) + name[at + 1 :],
        ]
    )


def test_misspelt_names_in_the_shipped_configs_are_restored(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is restored byte for byte or not changed, and never becomes something else."""
    shutil.copytree(CONFIGS, here / "configs")
    chance = random.Random(5)
    files = sorted(path for path in (here / "configs").rglob("*.py") if "common" not in path.parts)
    given_back = tried = 0
    for path in chance.choices(files, k=100):
        text = path.read_bytes().decode()
        match = chance.choice(list(NAMES.finditer(text)))
        changed = text[: match.start()] + misspelt(match[0], chance) + text[match.end() :]
        path.write_text(changed)
        if changed != text and any(item.fix for item in lint(path, 8)):
            tried += 1
            main(["lint", str(path), "--world-size", "8", "--fix"])
            assert path.read_bytes().decode() in (text, changed)
            given_back += path.read_bytes().decode() == text
        path.write_bytes(text.encode())
    assert tried >= 70
    assert given_back >= 0.95 * tried
    capsys.readouterr()


def test_several_mistakes_are_fixed_in_one_pass(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A fix causes no new error, and a second pass changes nothing."""
    chance = random.Random(7)
    path = here / "cfg.py"
    changes = 0
    for _ in range(25):
        text = (CONFIGS / chance.choice(["gpt_3d.py", "gpt_zero3.py", "llama_2d.py"])).read_text()
        for match in reversed(chance.sample(list(NAMES.finditer(text)), 4)):
            comment = chance.choice(["", "", "  # dslpar: ignore[CFG106, XX]", "  # dslpar: ignore"])
            end = text.find("\n", match.end())
            text = text[: match.start()] + misspelt(match[0], chance) + text[match.end() : end] + comment + text[end:]
        path.write_text(text)
        before = {(item.code, item.key) for item in lint(path, 8) if item.severity == "error"}
        main(["lint", "cfg.py", "--world-size", "8", "--fix"])
        after = path.read_text()
        assert {(item.code, item.key) for item in lint(path, 8) if item.severity == "error"} <= before
        main(["lint", "cfg.py", "--world-size", "8", "--fix"])
        assert path.read_text() == after
        changes += after != text
    assert changes >= 15
    capsys.readouterr()


# Bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("last", [True, False])
def test_every_other_byte_stays(here: Path, mark: bytes, end: str, last: bool) -> None:
    lines = [MODEL.strip(), "é = '\t😀'; parallel = dict(pipeline=1, tensor=dict(size=2, mode='1d'))  ", ""]
    right = mark + end.join(lines if last else lines[:-1]).encode()
    wrong = right.replace(b"'1d'", b"'1D'").replace(b"num_layers", b"num_layer")
    (here / "cfg.py").write_bytes(wrong)
    assert main(["lint", "cfg.py", "--world-size", "8", "--fix", "--ignore", "PERF"]) == 0
    assert (here / "cfg.py").read_bytes() == right


def test_file_mode_and_link_stay(here: Path) -> None:
    (here / "real.py").write_text(MODEL.replace("num_heads", "num_head"))
    (here / "real.py").chmod(0o640)
    (here / "cfg.py").symlink_to("real.py")
    assert main(["lint", "cfg.py", "--fix"]) == 0
    assert (here / "real.py").read_text() == MODEL
    assert (here / "real.py").stat().st_mode & 0o777 == 0o640
    assert (here / "cfg.py").is_symlink()
    assert sorted(os.listdir(here)) == ["cfg.py", "real.py"]


def test_a_read_only_file_stays(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = MODEL.replace("num_heads", "num_head")
    (here / "cfg.py").write_text(wrong)
    (here / "cfg.py").chmod(0o444)
    assert main(["lint", "cfg.py", "--fix"]) == 1
    assert (here / "cfg.py").read_text() == wrong
    captured = capsys.readouterr()
    assert captured.err == "cfg.py is not changed: it is read-only\n"
    assert "CFG101" in captured.out


def test_the_file_owner_stays(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "chown", lambda name, user, group: given.append((user, group)))
    (here / "cfg.py").write_text(MODEL.replace("num_heads", "num_head"))
    was = (here / "cfg.py").stat()
    assert main(["lint", "cfg.py", "--fix"]) == 0
    assert given == [(was.st_uid, was.st_gid)]


def test_a_file_that_cannot_be_written_is_reported(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from dslpar.linter import fixes

    (here / "cfg.py").write_text(MODEL)
    with pytest.raises(OSError, match="meanwhile"):
        fixes.write("cfg.py", b"something else", "text")
    assert (here / "cfg.py").read_text() == MODEL


# What is fixed ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("parallel = dict(pipline=1)", "parallel = dict(pipeline=1)"),
        ("parallel = {'pipline': 1}", "parallel = {'pipeline': 1}"),
        ('parallel = {"pipline": 1}', 'parallel = {"pipeline": 1}'),
        ("parallel = dict()\nparallel.pipline = 1", "parallel = dict()\nparallel.pipeline = 1"),
        ("parallel = dict()\nparallel['pipline'] = 1", "parallel = dict()\nparallel['pipeline'] = 1"),
        ("paralel = dict(pipline=1)", "parallel = dict(pipeline=1)"),
        ("deepspeed = dict(steps_per_pirnt=10)", "deepspeed = dict(steps_per_print=10)"),
        ("optimizer = dict(type='adamw')", "optimizer = dict(type='AdamW')"),
        ("model.positions = 'Rotary'", "model.positions = 'rotary'"),
        ("train = dict(steps=1)  # dslpar: ignore[CFG106]", "train = dict(steps=1)"),
        ("train = dict(stesp=1, sede=2)", "train = dict(steps=1, seed=2)"),
    ],
)
def test_certain_fixes_are_written(here: Path, wrong: str, right: str) -> None:
    config = here / "cfg.py"
    config.write_text(MODEL + wrong)
    assert main(["lint", "cfg.py", "--fix", "--world-size", "1"]) == 0
    assert config.read_text() == MODEL + right
    assert main(["lint", "cfg.py", "--fix", "--world-size", "1"]) == 0
    assert config.read_text() == MODEL + right


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("parallel = dict(pipline=3)", "it would cause PAR101 world-not-a-multiple"),
        ("parallel = dict(pipline='two')", "it would cause CFG102 wrong-type"),
        ("paralel = dict(tensor=1)\nparalel.pipeline = 1", "it would cause CFG010 undefined-name"),
        ("parallel = dict(pipeline=1, pipline=2)", ""),
        ("parallel = dict(xyzzy=2)", ""),
        ("parallel = dict(tensor=dict(size=2, mode='1d '))", ""),
        ("key = 'pip' + 'line'\nparallel = {key: 1}\nparallel[key + 's'] = 1", ""),
    ],
)
def test_uncertain_fixes_are_not_written(here: Path, capsys: pytest.CaptureFixture[str], text: str, said: str) -> None:
    config = here / "cfg.py"
    config.write_text(MODEL + text)
    assert main(["lint", "cfg.py", "--fix", "--world-size", "8"]) == 1
    captured = capsys.readouterr()
    assert config.read_text() == MODEL + text
    assert (f"is not fixed: {said}" in captured.err) if said else captured.err == ""


def test_one_refused_fix_does_not_prevent_others(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = here / "cfg.py"
    config.write_text(MODEL + "parallel = dict(pipline=3)\ntrain = dict(stesp=1)\n")
    assert main(["lint", "cfg.py", "--fix", "--world-size", "8", "--format", "concise"]) == 1
    assert config.read_text() == MODEL + "parallel = dict(pipline=3)\ntrain = dict(steps=1)\n"
    captured = capsys.readouterr()
    assert "CFG101 is not fixed" in captured.err
    assert captured.out.count("\n") == 1  # what is left


def test_only_selected_codes_are_fixed(here: Path) -> None:
    config = here / "cfg.py"
    text = MODEL + "parallel = dict(pipline=1, tensor=dict(size=2, mode='1D'))\n"
    config.write_text(text)
    main(["lint", "cfg.py", "--fix", "--world-size", "8", "--ignore", "CFG101"])
    assert config.read_text() == text.replace("1D", "1d")


def test_yaml_is_fixed_too(here: Path) -> None:
    rows = ["model:", "  type: GPT", "  num_layers: 8", "  hidden_size: 96", '  "num_head": 24', "  vocab_size: 256"]
    (here / "cfg.yaml").write_text("\n".join([*rows, "  max_seq_len: 96", "paralel: {pipline: 1}  # why"]))
    assert main(["lint", "cfg.yaml", "--fix", "--world-size", "8"]) == 0
    text = (here / "cfg.yaml").read_text()
    assert '  "num_heads": 24\n' in text
    assert text.endswith("\nparallel: {pipeline: 1}  # why")


# Which files ------------------------------------------------------------------------------------------------------


def parts(here: Path) -> tuple[Path, Path]:
    (here / "a").mkdir()
    config, part = here / "a" / "cfg.py", here / "part.py"
    config.write_text("from ..part import train\n" + MODEL)
    part.write_text("train = dict(stesp=1)\n")
    return config, part


def test_an_imported_file_is_changed_only_where_it_was_named(here: Path) -> None:
    config, part = parts(here)
    assert main(["lint", str(config), "--fix"]) == 1
    assert part.read_text() == "train = dict(stesp=1)\n"
    assert main(["lint", "a", "--fix"]) == 1
    assert part.read_text() == "train = dict(stesp=1)\n"
    assert main(["lint", ".", "--fix"]) == 0
    assert part.read_text() == "train = dict(steps=1)\n"


def test_a_file_imported_by_several_configs_is_changed_once(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, part = parts(here)
    part.write_text("train = dict(stesp=1, sede=2, log_intervall='x')\n")
    (here / "other.py").write_text("from .part import train\n" + MODEL)
    assert main(["lint", ".", "--fix"]) == 1
    assert part.read_text() == "train = dict(steps=1, seed=2, log_intervall='x')\n"
    lines = capsys.readouterr().err.splitlines()
    assert sorted(line.partition(": ")[2][:22] for line in lines) == ["2 fixed", "CFG101 is not fixed: i"]


def test_an_imported_file_is_changed_if_its_configs_agree(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, part = parts(here)
    (here / "other.py").write_text("from .part import train\nassert train.stesp == 1\n" + MODEL)
    assert main(["lint", ".", "--fix"]) == 1
    assert part.read_text() == "train = dict(stesp=1)\n"
    assert "it would cause CFG004 evaluation-error" in capsys.readouterr().err


# --diff and stdin -------------------------------------------------------------------------------------------------


def test_patch_applies_the_diff(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = here / "cfg.py"
    wrong = MODEL + "x = 1\r\nparallel = dict(pipline=1)"
    config.write_bytes(wrong.encode())
    assert main(["lint", "cfg.py", "--diff", "--world-size", "1"]) == 1
    captured = capsys.readouterr()
    assert config.read_bytes() == wrong.encode()
    assert captured.out.splitlines()[:2] == ["--- cfg.py", "+++ cfg.py"]
    assert "-parallel = dict(pipline=1)\n\\ No newline at end of file\n" in captured.out
    assert captured.err == "no findings\n"  # with the change
    if shutil.which("patch"):
        subprocess.run(["patch", "--binary", "-p0"], input=captured.out.encode(), check=True, capture_output=True)
        assert config.read_bytes() == wrong.replace("pipline", "pipeline").encode()
    config.write_text(MODEL)
    assert main(["lint", "cfg.py", "--diff", "--world-size", "1"]) == 0
    assert capsys.readouterr().out == ""


def test_stdin_is_fixed_to_stdout(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "part.py").write_text("train = dict(steps=1)\n")
    text = "from .part import train\n" + MODEL + "parallel = dict(pipline=1)"
    for flag, out in (("--fix", text.replace("pipline", "pipeline")), ("--strict", None)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        words = ["lint", "-", "--stdin-filename", "cfg.py", "--world-size", "1", flag]
        assert main(words) == (out is None)
        printed = capsys.readouterr().out
        assert printed == out if out else "cfg.py:3:17: CFG101 unknown-key" in printed
    assert not (here / "cfg.py").exists()


# The pieces -------------------------------------------------------------------------------------------------------


@given(st.text("ab\r\n\f", max_size=12), st.lists(st.tuples(st.integers(0, 12), st.integers(0, 4)), max_size=4))
def test_applied_replaces_characters_and_nothing_else(text: str, spans: list[tuple[int, int]]) -> None:
    """Compared with slices of the text; locations count lines as the evaluator does, with any line ending."""
    lines = re.split("\r\n|\r|\n", text)
    starts = [0, *(match.end() for match in re.finditer("\r\n|\r|\n", text))]
    expected, fixes, end = text, [], len(text) + 1
    for at, length in sorted(spans, reverse=True):
        line = max(number for number, start in enumerate(starts) if start <= min(at, len(text)))
        column = min(min(at, len(text)) - starts[line], len(lines[line]))
        last = min(column + length, len(lines[line]))
        if starts[line] + last >= end:
            continue
        end = starts[line] + column
        fixes.append(Fix(Location("f", line + 1, column + 1, line + 1, last + 1), "X"))
        expected = expected[:end] + "X" + expected[starts[line] + last :]
    assert apply(text, fixes) == expected
