"""`dslpar plan --apply N`: write a suggestion's overrides into the config's file.

Each key is set where the author wrote it or its section (`dslpar.language.source_edits`). What the file computes or
imports is not changed: such keys are added at the end of the file.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import TypeGuard

from dslpar.core.visible import visible
from dslpar.forecast.candidate import candidate_of
from dslpar.language import source_edits
from dslpar.language.load import YAML_ENDINGS, Config
from dslpar.linter import check, fixes
from dslpar.planner.planning import Plan, Question, Suggestion, job_of
from dslpar.schema.keys import shorthands


def write(question: Question, plan: Plan, suggestion: Suggestion) -> int:
    """Write the command line's overrides and the suggestion's overrides into the file; return the exit status.

    The changed text is linted first. If it does not give the layout that was forecast, nothing is written.
    """
    given = [*question.words, *suggestion.overrides]
    words = list({word.partition("=")[0]: word for word in given}.values())  # the last of each key
    path = question.path
    if not words:
        print(visible(f"{path} already has this layout: nothing is changed"))
        return 0
    if path.endswith(YAML_ENDINGS) or any(word.startswith("~") for word in words):
        sys.stderr.write(visible(f"{path} is not changed: set {shlex.join(words)} in it") + "\n")
        return 1
    with open(path, "rb") as file:
        data = file.read()
    config = check.load(path, trusted=question.trusted)
    for text in _texts(question, config, fixes.decode(data), words):
        if _makes(question, plan, suggestion, text):
            return _written(path, data, text, words)
    sys.stderr.write(
        visible(f"{path} is not changed, because it computes these values: set {' '.join(words)} in it") + "\n"
    )
    return 1


def _texts(question: Question, config: Config, text: str, words: Sequence[str]) -> Iterator[str]:
    """Yield candidates for the file's new text, the preferred one first.

    1. Keys are set in their sections, and those that the file computes are added at the end.
    2. All overrides are added at the end.
    3. All are added at the end, as new sections. This suits a file whose sections come from a base config.
    """
    yield _in_place(question, config, text, words)
    yield _with_lines(config, text, words)
    yield _with_lines(config._replace(root=config.root._replace(value={})), text, words)  # sections of a base config


def _in_place(question: Question, config: Config, text: str, words: Sequence[str]) -> str:
    left = []
    for word in words:
        key, _, value = word.partition("=")
        edit = source_edits.set_key(config, text, key, _python(value), shorthands())
        if edit is None:
            left.append(word)
            continue
        text = fixes.apply(text, [edit])
        config = check.load(question.path, texts={os.path.realpath(question.path): text}, trusted=question.trusted)
    return _with_lines(config, text, left)


def _with_lines(config: Config, text: str, words: Sequence[str]) -> str:
    """Return the text with one line per override added at its end."""
    if not words:
        return text
    names = {str(name) for name in config.root.value}
    lines = []
    for word in words:
        key, _, value = word.partition("=")
        section, _, rest = key.partition(".")
        written = config.root.child(section)
        if not rest or (section in names and (written is None or isinstance(written.value, dict))):
            lines.append(f"{key} = {_python(value)}")
        else:
            first, *inner = reversed(rest.split("."))
            made = f"dict({first}={_python(value)})"
            for name in inner:
                made = f"dict({name}={made})"
            lines.append(f"{section} = {made}")
            names.add(section)
    end = "" if text.endswith("\n") or not text else "\n"
    return f"{text}{end}# As `dslpar plan` suggests:\n" + "".join(line + "\n" for line in lines)


def _python(value: str) -> str:
    """Return an override's value as Python source. Literals, and dict(...) of literals, stay; all else is a string."""
    with contextlib.suppress(ValueError, SyntaxError):
        call = ast.parse(value, mode="eval").body
        literals = [each.value for each in call.keywords] if _is_dict(call) else [value]
        for each in literals:
            ast.literal_eval(each)
        return value
    return repr(value)


def _is_dict(node: ast.expr) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict" and not node.args


def _makes(question: Question, plan: Plan, suggestion: Suggestion, text: str) -> bool:
    """Return whether the file would give the suggested layout, and the values of the overrides, with this text."""
    texts = {os.path.realpath(question.path): text}
    config = check.load(question.path, texts=texts, trusted=question.trusted)
    overridden = check.load(question.path, [*question.words, *suggestion.overrides], trusted=question.trusted)
    if config.root.plain() != overridden.root.plain():
        return False  # the file computes another value from a changed one
    world_size = plan.job.mesh.world_size
    job = job_of(check.check(config, world_size, by_program=question.by_program, forecasts=False))
    if job is None:
        return False
    return candidate_of(job) == suggestion.option.candidate and job.batch.global_size == plan.job.batch.global_size


def _written(path: str, data: bytes, text: str, words: Sequence[str]) -> int:
    if b"\r\n" in data:  # the file's own line ends
        text = re.sub(r"\r?\n", "\r\n", text)
    try:
        fixes.write(path, data, text)
    except OSError as error:
        sys.stderr.write(visible(f"{path} is not changed: {error.strerror or error}") + "\n")
        return 1
    print(visible(f"{path}: {shlex.join(words)}"))
    return 0
