"""Hostile text through every input: it controls no terminal, forges no line, and commands no CI system.

The texts appear wherever text is read: names of files and folders, keys and values of configs and of other frameworks'
files, messages of asserts, arguments, hosts, tracebacks, manifests of checkpoints. `make test` sends several hundred
through every input, and `make prove` 10,000.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import random
import re
import shutil
import subprocess
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dslpar.checkpoint import writer
from dslpar.cli.main import main
from dslpar.cluster.command import Command
from dslpar.core.argument_parser import ArgumentParser
from dslpar.core.errors import DslparError, Finding, Fix, Location
from dslpar.core.visible import json_text, visible, visible_lines
from dslpar.language import yaml_io
from dslpar.linter.report import text as report_text
from dslpar.linter.report.github import github
from dslpar.linter.report.sarif import sarif
from dslpar.reporting import logging as run_logging
from dslpar.watchdog import failure_reports, guard, job_watch, rank_monitor
from dslpar.watchdog.marks import Rank, Report, Verdict
from tests.support.lint import MODEL

FORGED = "FORGED"
"""The beginning of a line that a text tries to add."""
PIECES = (
    *("\x1b[2J", "\x1b]0;title\x07", "\x1b[31m", "\x9b2J", "\r", "\x08", "\0", "\x7f", "\x0b", "\x0c", "\x85"),
    *("\u2028", "\u2029", "\u200b", "\u200e", "\u202e", "\u2066", "\u2069", "\ufeff", "\u061c", "\u3164", "\u00ad"),
    *("\udc80", "\udcff", "\ud800", "\U000e0041", "\ufff9"),
    *(f"\n{FORGED}", f"\r\n{FORGED}", f"\n::error file=a.py::{FORGED}", f"\n  ::warning::{FORGED}", "::error::x", "::"),
    *("##[error]x", "\n##[group]x", "##vso[task.setvariable]x", "##teamcity[x]", "#", "["),
    *("a", "é", "漢字", "it's", '"', "\\", "\\x1b", "%0A", "%s", "{0}", " ", "\t", "$(x)", "`", "🙂", ":", ",", "->"),
)


def hostile_texts(count: int, seed: int = 0) -> Iterator[str]:
    rng = random.Random(seed)
    yield from PIECES[:count]
    for _ in range(count - len(PIECES)):
        yield "".join(rng.choices(PIECES, k=rng.randint(1, 6)))


_COMMAND = re.compile(r"^\s*::[A-Za-z]|##\w*\[", re.MULTILINE)


def assert_harmless(printed: str, *, of_lines: bool = False) -> None:
    """Check that nothing commands a terminal, a log reader or a CI system. `of_lines`: line breaks are allowed."""
    for char in set(printed) - set("\n\t"):
        assert char.isprintable(), f"{char!r} in {printed!r}"
        assert unicodedata.category(char) != "Cf"
    assert "\u3164" not in printed
    assert not _COMMAND.search(printed), printed
    assert of_lines or not [line for line in printed.split("\n") if line.strip().startswith(FORGED)], printed


def some(few: int, many: int) -> Any:
    return pytest.mark.parametrize("count", [few, pytest.param(many, marks=pytest.mark.prove)])


@pytest.mark.parametrize("hostile", ["\x1b[2J", "\u202e", f"x\n{FORGED}", " ::error::x", "##[x]", "\u3164", "\ud800"])
def test_the_check_can_fail(hostile: str) -> None:
    with pytest.raises(AssertionError):
        assert_harmless(hostile)


# ---- the function ----


def test_visible_shows_what_repr_shows() -> None:
    for text in PIECES:
        commands = text.strip().startswith("::") or "##" in text or "\u3164" in text
        if "\\" not in text and "'" not in text and not commands:
            assert visible(text) == repr(text)[1:-1]


@pytest.mark.parametrize("text", ["é", "漢字", "🙂", "a b", "::1", "fe80::1", "C:\\new", "50 %", "# [x]", "a::b", ""])
def test_what_is_printable_stays(text: str) -> None:
    assert visible(text) == visible_lines(text) == text


@some(1000, 10_000)
def test_visible(count: int) -> None:
    for text in hostile_texts(count):
        line, lines = visible(text), visible_lines(text)
        assert_harmless(line)
        assert "\n" not in line
        assert "\t" not in line
        assert visible(line) == line
        assert lines.count("\n") == text.count("\n")
        assert visible_lines(lines) == lines
        assert_harmless(lines, of_lines=True)


@some(1000, 10_000)
def test_json_is_ascii_and_any_parser_reads_it(count: int) -> None:
    for text in hostile_texts(count):
        printed = json_text({"a": [text], text: text})
        assert printed.isascii()
        assert_harmless(printed)
        assert json.loads(printed)["a"][0] == without_lone_surrogates(text)


def without_lone_surrogates(text: str) -> str:
    """Return the text as JSON for strict parsers has it."""
    joined = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    return joined.encode("utf-8", "backslashreplace").decode()


# ---- findings ----


@some(60, 10_000)
def test_findings_in_every_format(count: int) -> None:
    for text in hostile_texts(count):
        path = f"{file_name(text)}.py"
        place = Location(path, 1, 1, 1, 3)
        found = Finding("CFG101", "unknown-key", "error", text, text, place, text, Fix(place, text), (text, text))
        sources = {path: f"{text} = 1"}
        plain = report_text.text([found], sources)
        colored = report_text.text([found], sources, color=True)
        assert re.sub("\x1b\\[[0-9;]*m", "", colored) == plain
        assert plain.count("\n") == len(["head", "detail", "detail", "source", "caret", "help", "count"])
        concise = report_text.concise([found], sources)
        assert concise.count("\n") == 1
        command = github([found], {})
        assert command.count("\n") == 1
        assert command.startswith("::error file=")
        structured = [report_text.as_json([found], sources), sarif([found], sources, [path], 1, {})]
        assert json.loads(structured[0])[0]["key"] == without_lone_surrogates(text)
        for form in (plain, concise, command.removeprefix("::"), str(DslparError([found])), *structured):
            assert_harmless(form)


def file_name(text: str) -> str:
    """Return the text as a file name: `os.fsdecode` of bytes that may be invalid UTF-8."""
    name = re.sub("[/\0\ud800-\udc7f\udd00-\udfff]", "", text)
    return os.fsdecode(os.fsencode(name)[:150]) or "empty"


# ---- messages of ranks, guards and `dslpar launch` ----


def said(capfd: pytest.CaptureFixture[str], write: Callable[[str], None], text: str) -> str:
    write(text)
    return capfd.readouterr().err


@some(100, 10_000)
def test_stories(count: int, capfd: pytest.CaptureFixture[str]) -> None:
    for text in hostile_texts(count):
        who = Rank(1, 4, text, 7)
        report = Report(who, "cause", 0.0, text, "Traceback", text)
        lost = report._replace(kind="consequence")
        verdict = Verdict(who, 0.0, text, "", text)
        for write in (guard._write, rank_monitor._write):
            for told in (report, lost, verdict):
                assert_harmless(said(capfd, write, told.message()))
        failure = job_watch.Failure(who, 0.0, text, text, f"Traceback:\n{text}", 0, text)
        first, *rest = failure.describe(text).splitlines()
        assert_harmless(first)
        assert_harmless("\n".join(rest), of_lines=True)
        assert all(line.startswith("  ") for line in rest if line.strip()), (
            "a line of a traceback looks like dslpar's own"
        )
        by_torchrun = json.loads(failure_reports.elastic(report._replace(text=text)))["message"]["message"]
        assert_harmless(by_torchrun, of_lines=True)


def test_command_lines_are_visible_and_mean_the_same() -> None:
    words = list(map(file_name, hostile_texts(150)))
    command = Command({"VALUE": words[0]}, ("printf", "%s\\0", *words))
    assert_harmless(command.shell())
    done = subprocess.run(["bash", "-c", command.shell()], capture_output=True, check=True)
    assert done.stdout.split(b"\0")[:-1] == [os.fsencode(word) for word in words]


# ---- logs ----


@pytest.fixture
def restored_loggers() -> Iterator[None]:
    """Restore the loggers: ranks that are forked later must not inherit a run's handlers."""
    loggers = [logging.getLogger(name) for name in ("dslpar", "DeepSpeed", "py.warnings")]
    before = [(logger.handlers[:], logger.propagate, logger.level) for logger in loggers]
    yield
    logging.captureWarnings(False)
    for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


@some(200, 10_000)
@pytest.mark.usefixtures("restored_loggers")
def test_log_lines(count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with run_logging.log_to_run_folder(tmp_path, 0):
        for text in hostile_texts(count):
            run_logging.log.info("%s is loaded: %d", text, 3)
            run_logging.log.info("%s", Path(file_name(text)))
            logging.getLogger("DeepSpeed").info("theirs: " + text.replace("%", ""))
        with run_logging.prints_to_log(tmp_path):
            print("[printed]", text.replace("\n", ""))
    assert_harmless(capsys.readouterr().out)
    log = (tmp_path / "log.txt").read_text(encoding="utf-8")
    assert_harmless(log, of_lines=True)
    assert all(re.match(r"\d{4}-|  |\[printed\]", line) for line in log.splitlines()), "a line looks like a record"


# ---- commands ----

Argv = list[str]


def write_config(root: Path, text: str, content: str) -> str:
    """Write a config into a folder and a file with hostile names."""
    below = root / file_name(text)
    below.mkdir(exist_ok=True)
    path = below / f"{file_name(text)}.py"
    path.write_bytes(content.encode("utf-8", "surrogatepass"))
    return str(path)


def written(content: Callable[[str], str], *argv: str) -> Callable[[Path, str], Argv]:
    """Return a command on a config, which replaces CFG."""

    def command(root: Path, text: str) -> Argv:
        path = write_config(root, text, content(text))
        return [path if word == "CFG" else word.replace("TEXT", text) for word in argv]

    return command


def asserts(text: str) -> str:
    return MODEL + f"assert False, {text!r}\n"


def has_keys(text: str) -> str:
    return MODEL + f"deepspeed = {{{text!r}: 1}}\ntrain = {{{text!r}: {text!r}}}\nparallel = dict(pipeline={text!r})\n"


def has_values(text: str) -> str:
    safe = text.encode("utf-8", "ignore").decode()
    return MODEL + f"train = dict(output_dir={safe!r})\nnote = dict(a={safe!r})\n_x = dict(b={safe!r})\n"


def has_source(text: str) -> str:
    return f"# {text}\n{MODEL}idle = dict(a='{text}')  # {text}\nparallel = dict(pipline=1, tensor={text})\n"


def calls(text: str) -> str:
    return f"from dslpar import L\nmodel = L({text!r})(a={text!r})\noptimizer = dict(type={text!r})\n"


def has_settings(root: Path, text: str) -> Argv:
    path = write_config(root, text, has_keys(text))
    safe = json.dumps(text.encode("utf-8", "ignore").decode())
    content = f"[tool.dslpar]\n{safe} = 1\nselect = [{safe}]\nper-file-ignores = {{{safe} = [{safe}]}}\n"
    Path(os.path.dirname(path), "pyproject.toml").write_text(content, encoding="utf-8")
    return ["lint", path]


def imported(root: Path, text: str) -> Argv:
    path = root / f"{file_name(text)}.json"
    text = text.encode("utf-8", "ignore").decode()
    value = {text: text, "train_batch_size": text, "optimizer": {"type": text, "params": {text: 1}}, "fp16": {text: 1}}
    path.write_text(json.dumps(value))
    return ["import", str(path), "--from", "deepspeed"]


def other_config(root: Path, text: str) -> Argv:
    left, right = write_config(root, text, MODEL), write_config(root, "b" + text, has_values(text))
    return ["diff", left, right, "--world-size", "4"]


def stored(*argv: str) -> Callable[[Path, str], Argv]:
    """Return a command on a run's folder with a hostile checkpoint manifest and valid digests."""

    def command(root: Path, text: str) -> Argv:
        checkpoints = root / file_name(text) / "checkpoints"
        part = writer.begin_save(checkpoints, 3)
        tensor = {"mode": text, "d": 1, "q": 1, "y": 1, "z": 1}
        layout = {"world_size": 1, "pipe": 1, "data": 1, "tensor": tensor, "order": [text], "counts": None}
        manifest = {
            "format": 2,
            "step": 3,
            "consumed_samples": 6,
            "fixed": {text: text},
            "config": {text: {text: text}},
            "versions": {text: text},
            "layout": layout | {"zero_stage": 0, "offload": {}},
        }
        name = file_name(text)
        index = json.dumps({"parameters": {text: {"shape": [text]}}, "copies": {}, "groups": []}).encode()
        files = {key: writer.write_file(part / key, [index]) for key in ("index.json", name)}
        writer.publish(checkpoints, manifest, files)
        return [word.replace("RUN", str(checkpoints.parent)) for word in argv]

    return command


COMMANDS: dict[str, Callable[[Path, str], Argv]] = {
    "lint, assert": written(asserts, "lint", "CFG"),
    "lint, keys": written(has_keys, "lint", "CFG", "--world-size", "4"),
    "lint, source": written(has_source, "lint", "CFG", "--statistics"),
    "lint, concise": written(has_keys, "lint", "CFG", "--format", "concise"),
    "lint, json": written(has_source, "lint", "CFG", "--format", "json"),
    "lint, sarif": written(asserts, "lint", "CFG", "--format", "sarif"),
    "lint, overrides": written(has_values, "lint", "CFG", "model.TEXT=1", "train.TEXT=TEXT", "~TEXT"),
    "lint, verbose": lambda root, text: ["lint", os.path.dirname(write_config(root, text, "x = 1")), "--verbose"],
    "lint, files": lambda root, text: ["lint", "--show-files", os.path.dirname(write_config(root, text, MODEL))],
    "lint, targets": written(calls, "lint", "CFG", "--targets"),
    "lint, targets as json": written(calls, "lint", "CFG", "--targets", "--format", "json"),
    "lint, settings": has_settings,
    "lint, diff": written(has_source, "lint", "CFG", "--diff"),
    "lint, unknown flag": written(has_values, "lint", "CFG", "--TEXT"),
    "lint, no such file": lambda root, text: ["lint", str(root / file_name("no" + text))],
    "lint, hostfile": lambda root, text: ["lint", str(root), "--hostfile", write_config(root, text, text)],
    "show": written(has_values, "show", "CFG", "--world-size", "4"),
    "show, json": written(has_values, "show", "CFG", "--world-size", "4", "--format", "json"),
    "config": written(has_values, "config", "CFG", "train.output_dir=TEXT"),
    "config, keys": written(has_keys, "config", "CFG"),
    "config, explain": written(has_values, "config", "CFG", "--explain", "train", "train.output_dir=TEXT"),
    "config, explain text": written(has_values, "config", "CFG", "--explain", "TEXT"),
    "config, json": written(has_values, "config", "CFG", "--format", "json"),
    "config, yaml": written(has_values, "config", "CFG", "--format", "yaml"),
    "diff": other_config,
    "explain": lambda root, text: ["explain", text],
    "unknown command": lambda root, text: [text.replace("-", "")],
    "import": imported,
    "import, to json": lambda root, text: [*imported(root, text), "-o", str(root / "out.py"), "--format", "json"],
    "import, not a config": written(has_source, "import", "CFG"),
    "launch, refused": written(has_keys, "launch", "CFG", "--world-size", "2", "--print"),
    "checkpoint list": stored("checkpoint", "list", "RUN"),
    "checkpoint list, json": stored("checkpoint", "list", "RUN", "--format", "json"),
    "checkpoint show": stored("checkpoint", "show", "RUN"),
    "checkpoint show, json": stored("checkpoint", "show", "RUN", "--format", "json"),
    "checkpoint verify": stored("checkpoint", "verify", "RUN"),
    "checkpoint verify, json": stored("checkpoint", "verify", "RUN", "--format", "json"),
}


def output_of(argv: Argv) -> tuple[str, str]:
    """Return what a command prints to stdout and stderr."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.suppress(SystemExit):
        main(argv)
    texts = [stream.buffer.getvalue().decode() for stream in (out, err)]  # type: ignore[attr-defined]
    return texts[0], texts[1]


@some(3 * len(COMMANDS), 10_000)
def test_commands(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "1")
    texts = list(hostile_texts(count + len(PIECES), seed=1))[len(PIECES) :]
    names = list(COMMANDS)
    for number, text in enumerate(texts):
        root = tmp_path / str(number)
        root.mkdir()
        name = names[number % len(names)]
        out, err = output_of(COMMANDS[name](root, text))
        assert out + err, name
        assert_harmless(out, of_lines=name == "lint, diff")
        assert_harmless(err)
        if out and name.endswith("json"):
            json.loads(out)
        shutil.rmtree(root)


def test_a_file_name_adds_no_line_to_what_is_imported(tmp_path: Path) -> None:
    """The converted file names its source in a comment, and is a config itself."""
    path = tmp_path / "a\nmodel = dict(type='forged')\n.json"
    path.write_text('{"train_batch_size": 8}')
    out, _ = output_of(["import", str(path)])
    assert "\nmodel = dict(type='forged')" not in out


def test_a_diff_names_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`patch` reads it: a line break in a file's name could make it change another file."""
    monkeypatch.delenv("CI", raising=False)
    path = tmp_path / "a\n--- b\n+++ b\n@@ -1 +1 @@\n-x\n+y\n.py"
    path.write_text(MODEL + "parallel = dict(pipline=1)\n")
    diff, _ = output_of(["lint", "--diff", str(path)])
    assert "+parallel = dict(pipeline=1)" in diff
    assert diff.count("\n--- ") + diff.startswith("--- ") == 1


def test_yaml_reads_back_equal() -> None:
    for text in hostile_texts(500):
        safe = text.encode("utf-8", "ignore").decode()
        printed = yaml_io.dump_plain({"a": safe, f"k{safe}": [safe, {"b": safe}]})
        assert_harmless(printed)
        assert yaml.safe_load(printed) == {"a": safe, f"k{safe}": [safe, {"b": safe}]}


def test_mistakes_on_the_command_line_of_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    for text in hostile_texts(100):
        with pytest.raises(SystemExit):
            ArgumentParser(prog="train.py").parse_args([f"--x{text}"])
        assert_harmless(capsys.readouterr().err)
