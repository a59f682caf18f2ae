"""`# dslpar: ignore[CODE]`: the findings that a comment silences, and those it cannot."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from dslpar.cli.main import main
from dslpar.core.errors import Finding
from dslpar.linter.check import lint, load_text
from dslpar.linter.fixes import apply
from dslpar.linter.suppressions import read
from tests.support.lint import MODEL, codes, findings

IDLE = "idle = dict(a=1)"


def codes_and_lines(text: str, world: int | None = 8) -> list[tuple[str, int]]:
    return [(found.code, found.location.line) for found in findings(MODEL + text, world)]


def fixed(text: str) -> str:
    """Return the text after lint's fixes."""
    whole = MODEL + text
    fixes = {found.fix for found in findings(whole) if found.fix is not None}
    return apply(whole, fixes).removeprefix(MODEL)


@pytest.mark.parametrize(
    "comment",
    [
        "# dslpar: ignore[CFG106]",
        "# dslpar: ignore[CFG106] another tool reads it",
        "#dslpar:ignore[ cfg106 ]",
        "# dslpar: ignore[unused-dict]",
        "# noqa: F841  # dslpar: ignore[CFG106]  # and more",
        "# dslpar: ignore-file[CFG106]",
    ],
)
def test_a_comment_silences_its_line(comment: str) -> None:
    assert codes_and_lines(IDLE) == [("CFG106", 2)]
    assert codes_and_lines(f"{IDLE}  {comment}") == []


@pytest.mark.parametrize(
    "text",
    [
        f"# dslpar: ignore[CFG106]\n{IDLE}",
        f"{IDLE}\n# dslpar: ignore[CFG106]",
        f"{IDLE}; text = '# dslpar: ignore[CFG106]'",
        f"{IDLE}; text = '''\n# dslpar: ignore[CFG106]\n'''",
        f"{IDLE}  # dslpar: ignored[CFG106]",
        f"{IDLE}  # dslpar: ignore-line[CFG106]",
        f"{IDLE}  # dslpar ignore[CFG106]",
    ],
)
def test_other_comments_silence_nothing(text: str) -> None:
    assert ("CFG106", text.split("\n").index(next(x for x in text.split("\n") if "idle" in x)) + 2) in codes_and_lines(
        text
    )


@pytest.mark.parametrize(("line", "silent"), [(0, True), (1, False), (2, True)])
def test_first_and_last_line_of_a_value_count(line: int, silent: bool) -> None:
    lines = [MODEL.rstrip(")\n") + ", rope_theta=max(", "    500.0, 5.0", "))"]
    assert codes("\n".join(lines)) == ["DEAD108"]
    lines[line] += "  # dslpar: ignore[DEAD108]"
    assert codes("\n".join(lines)) == ([] if silent else ["DEAD108", "CFG115"])


def test_errors_are_not_silenced() -> None:
    text = "zero = dict(stage=7)  # dslpar: ignore[CFG103]"
    assert codes_and_lines(text) == [("CFG103", 2), ("CFG116", 2)]
    assert "--ignore CFG103" in findings(MODEL + text)[1].help


def test_a_comment_without_a_code_gets_the_codes_found() -> None:
    text = f"{IDLE}  # dslpar: ignore"
    assert codes_and_lines(text) == [("CFG106", 2), ("CFG114", 2)]
    assert findings(MODEL + text)[1].help == "write `# dslpar: ignore[CFG106]`"
    assert codes_and_lines(f"{IDLE}  # dslpar: ignore[]") == [("CFG106", 2), ("CFG114", 2)]


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("train = dict(steps=1)  # dslpar: ignore[CFG106]\n", "train = dict(steps=1)\n"),
        ("train = dict(steps=1)  # dslpar: ignore[CFG106] why", "train = dict(steps=1)"),
        ("train = dict(steps=1)  # dslpar: ignore[CFG106]  # noqa\n", "train = dict(steps=1)  # noqa\n"),
        ("# dslpar: ignore[CFG106]\ntrain = dict(steps=1)\n", "train = dict(steps=1)\n"),
        ("# dslpar: ignore[CFG106]", ""),
        (f"{IDLE}  # dslpar: ignore[CFG106, DEAD108]\n", f"{IDLE}  # dslpar: ignore[CFG106]\n"),
        (f"{IDLE}  # dslpar: ignore[CFG106, XYZ1, CFG106] why\n", f"{IDLE}  # dslpar: ignore[CFG106] why\n"),
    ],
)
def test_unused_codes_are_found_and_removed(text: str, after: str) -> None:
    assert {code for code, _ in codes_and_lines(text)} <= {"CFG115", "CFG117"}
    assert codes_and_lines(text)
    assert fixed(text) == after
    assert codes_and_lines(after) == []


def test_a_misspelt_code_is_not_removed() -> None:
    (found,) = (item for item in findings(f"{MODEL}{IDLE}  # dslpar: ignore[unused-dct]") if item.code == "CFG117")
    assert (found.help, found.fix) == ("did you mean 'unused-dict'?", None)


@pytest.mark.parametrize(
    ("comment", "hint"),
    [
        ("# dslpar: ignore[CFG]", "write whole codes: CFG106"),
        ("# dslpar: ignore[cfg1] why", "write whole codes: CFG106"),
        ("# dslpar: ignore[DEAD]", "write whole codes: `dslpar explain DEAD` lists them"),
    ],
)
def test_a_family_gets_its_codes_and_is_not_removed(comment: str, hint: str) -> None:
    (found,) = (item for item in findings(f"{MODEL}{IDLE}  {comment}\n") if item.code == "CFG117")
    assert (found.help, found.fix) == (hint, None)
    assert fixed(f"{IDLE}  {comment}\n") == f"{IDLE}  {comment}\n"
    kept = comment.replace("[", "[XYZ1, ")
    assert fixed(f"{IDLE}  {kept}\n") == f"{IDLE}  {comment.partition(']')[0]}]{comment.partition(']')[2]}\n"


@pytest.mark.parametrize("world", [None, 8])
def test_codes_that_depend_on_the_world_are_accepted(world: int | None) -> None:
    """PERF103 depends on the batch, PERF101 on the hosts: in another world they may have a finding."""
    text = "parallel = dict(tensor=dict(size=4, mode='2d'))  # dslpar: ignore[PERF101, PERF103, CFG112]"
    assert "CFG115" not in codes(MODEL + text, world)


def test_every_code_is_accepted_with_overrides() -> None:
    text = f"{MODEL}train = dict(steps=1)  # dslpar: ignore[CFG106]\n"
    assert codes(text) == ["CFG115"]
    assert codes(text, overrides=["train.steps=2"]) == []


def test_ignore_file_and_findings_of_no_file() -> None:
    assert codes_and_lines(IDLE, world=None) == [("CFG106", 2), ("CFG112", 1)]
    assert codes_and_lines(f"# dslpar: ignore-file[CFG112, CFG106]\n{IDLE}", world=None) == []


def test_the_comment_is_in_the_file_of_the_finding(tmp_path: Path) -> None:
    part, config = tmp_path / "part.py", tmp_path / "cfg.py"
    config.write_text("from .part import model  # dslpar: ignore[DEAD108]\n")
    text = MODEL.rstrip(")\n") + ", rope_theta=5.0)"
    part.write_text(text + "\n")
    assert [found.code for found in lint(config, 8)] == ["CFG115", "DEAD108"]
    config.write_text("from .part import model\n")
    part.write_text(text + "  # dslpar: ignore[DEAD108]\n")
    assert lint(config, 8) == []


def test_comments_of_yaml() -> None:
    rows = ["model:", "  type: GPT", "  num_layers: 8", "  hidden_size: 96", "  num_heads: 24", "  vocab_size: 256"]
    rows += ["  max_seq_len: 96", "  rope_theta: 5.0 # dslpar: ignore[DEAD108] a reason"]
    text = "\n".join(rows)

    def in_yaml(text: str) -> list[Finding]:
        return lint(load_text(text, "cfg.yaml"), 8)

    assert in_yaml(text) == []
    assert [item.code for item in in_yaml(text.replace(" # ", " '# ").replace("reason", "reason'"))] != []
    assert [item.code for item in in_yaml(text.replace(" # ", "# "))] == ["CFG001"]  # without a blank it is no comment
    assert list(read("a: '# dslpar: ignore[X]'\nb: |\n  # dslpar: ignore[X]\n", "c.yaml")) == []
    assert len(list(read("# dslpar: ignore[X]\na: 1 # dslpar: ignore[Y]\n", "c.yaml"))) == 2
    (comment,) = read("b: '\u2028 x'\na: '# dslpar: ignore[X]' # dslpar: ignore[Y]\n", "c.yaml")
    assert (comment.codes[0].text, comment.location.line, comment.location.column) == ("Y", 2, 26)


def test_a_broken_file_has_its_own_finding() -> None:
    assert codes("model = dict(  # dslpar: ignore[CFG106]\n") == ["CFG001"]
    assert [item.code for item in lint(load_text("a: [ # dslpar: ignore[CFG106]\n  }", "c.yaml"), 8)] == ["CFG001"]


def test_many_comments_take_no_long_time() -> None:
    lines = [f"x{number} = 1  # dslpar: ignore[CFG106, a{number}, DEAD108]" for number in range(2_000)]
    text = MODEL + "\n".join(lines)
    took: list[float] = []
    while len(took) < 3 and min(took, default=2) >= 2:  # the machine may be busy: the smallest of a few counts
        began = time.process_time()
        found = lint(load_text(text, "cfg.py"), 8)
        took.append(time.process_time() - began)
        assert len(found) == 6_000
    assert min(took) < 2, took  # 0.3 on an idle machine


def test_launch_and_training_respect_comments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "cfg.py"
    for comment, shown in (("", True), ("  # dslpar: ignore[CFG106]", False)):
        config.write_text(f"{MODEL}{IDLE}{comment}\n")
        assert main(["launch", str(config), "--world-size", "1", "--launcher", "torchrun", "--print"]) == 0
        assert ("CFG106" in capsys.readouterr().err) is shown
    config.write_text(f"{MODEL}zero = dict(stage=7)  # dslpar: ignore[CFG103]\n")
    assert main(["launch", str(config), "--world-size", "1", "--launcher", "torchrun", "--print"]) == 1
    assert main(["lint", str(config), "--world-size", "1", "--ignore", "CFG103"]) == 0


def test_nothing_is_imported_without_comments(tmp_path: Path) -> None:
    """Neither tokenize nor the module that needs it is imported for a config without such a comment."""
    config = tmp_path / "cfg.py"
    program = "import sys; from dslpar.linter.check import lint; lint(sys.argv[1], 8); print(*sys.modules)"
    for comment, imported in (("", False), ("  # dslpar: ignore[CFG106]", True)):
        config.write_text(f"{MODEL}{IDLE}{comment}\n")
        ran = subprocess.run([sys.executable, "-c", program, str(config)], capture_output=True, text=True, check=True)
        assert ("dslpar.linter.suppressions" in ran.stdout.split()) is imported
