"""Check the prose of docs, help texts and docstrings: `make lint` runs it.

python tools/prose.py            # exits with 1 and prints path:line: message, if there is anything to report

proselint looks for clichés, redundancy, hedging and the like. A short list of this project's own habits comes on top
(`HABITS`). Code, tables of code and quotations in backquotes are not prose. Generated pages are checked at their
sources.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from proselint.checks import __register__
from proselint.config import DEFAULT
from proselint.registry import CheckRegistry
from proselint.tools import LintFile

ROOT = Path(__file__).parents[1]
FOLDERS = ("dslpar", "layers", "benchmarks", "tools", "tests")
GENERATED = ("docs/config.md", "docs/plans.md", "docs/rules/", "docs/api/", "docs/import.md", "docs/CHANGELOG.md")
"""Pages that are generated, or a record of what was."""
LEFT_OUT = (
    "typography",
    "spelling",
    "lexical_illusions",
    "annotations",
    "dates_times",
    "currency",
    "misc.capitalization",
)
"""Checks of proselint that are about typesetting, or that read code as words."""
_LIBRARY = r"(?:transformers|DeepSpeed|torch|ColossalAI|LiBai|Hugging Face|Megatron-LM|PyTorch|NCCL|Python)"
_COUNTED = r"(?:one|two|lines?|modules?|pages?|files?|bytes|elements|messages?|kernels?|copy|copies|groups?)"
_UNIT = (
    r"(?:rank|stage|step|family|layer|file|command|host|node|axis|token|parameter|direction|micro-batch|line|second)"
)
HABITS = {
    rf"\bof {_LIBRARY}(?:'s|')(?!\w)(?! \w)": 'a possessive without a noun: write "in {library}" or "{library}\'s ..."',
    r"\bthat (?:is|are) none\b": 'write "invalid", or what it is',
    r"\b(?:is|are|was|were) told\b(?! to)": 'write "is reported", "receives" or "knows"',
    rf"\b{_COUNTED} an? {_UNIT}\b": 'write "per" for "X a Y"',
    r"\bof one's own\b": 'write "your own"',
    r"\b3-D\b|\b3D parallel": 'write "mode `3d`", or "data, tensor and pipeline parallelism"',
}
"""Patterns of this project's own habits, with what to do."""
HELP = ("help", "description", "epilog")
"""Arguments of argparse that are printed."""
OPENING = re.compile(r"(?:What|Where|Whether|Which|Who|How|When|That)\b")
"""Words that open no docstring: it begins with a verb, or names the thing."""


class Page(NamedTuple):
    """A file's text to be read by people, with a blank for each line of code."""

    path: str
    text: str
    docstrings: tuple[tuple[int, str], ...] = ()
    """The line of each docstring, with its text."""


def pages() -> Iterator[Page]:
    """Yield the prose of all pages and modules."""
    written = [path for folder in ("docs", "dslpar") for path in sorted((ROOT / folder).rglob("*.md"))]
    for path in [ROOT / "README.md", *written]:
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(GENERATED):
            yield Page(name, without_code(path.read_text(encoding="utf-8")))
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not any(parent.is_symlink() for parent in path.parents):
                yield of_module(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))


def of_module(path: str, source: str) -> Page:
    """Return the docstrings of a module, and the strings below its fields."""
    nodes = list(ast.walk(ast.parse(source)))
    with_docstring = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    first = {id(node.body[0]) for node in nodes if isinstance(node, with_docstring) and node.body}
    lines, docstrings = [""] * (source.count("\n") + 1), []
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            text = without_code(node.value.value)
            for number, line in enumerate(text.splitlines(), node.lineno - 1):
                lines[number] = line
            if id(node) in first:
                docstrings.append((node.lineno, text))
        elif isinstance(node, ast.Call):
            for text in (each.value for each in node.keywords if each.arg in HELP and _is_text(each.value)):
                assert isinstance(text, ast.Constant)
                lines[text.lineno - 1] = without_code(text.value.replace("\n", " "))
    return Page(path, "\n".join(lines), tuple(docstrings))


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def without_code(text: str) -> str:
    """Blank out code, so that lines keep their numbers."""
    text = re.sub(r"```.*?```", lambda found: "\n" * found[0].count("\n"), text, flags=re.DOTALL)
    text = re.sub(r"(?m)^(?: {4,}(?![a-z].*\.$)|\s*>>> |\s*\.\.\. ).*$", "", text)
    return re.sub(r"`[^`\n]*`|\]\([^)\n]*\)|https?://\S+|[\w.]+\.(?:py|md|json|txt)\b", "X", text)


def problems(page: Page) -> Iterator[tuple[int, str]]:
    """Yield lines and messages."""
    for line, text in page.docstrings:
        if OPENING.match(text):
            yield line, "a docstring begins with a verb, or names the thing"
    for pattern, message in HABITS.items():
        for found in re.finditer(pattern, page.text):
            yield page.text.count("\n", 0, found.start()) + 1, f"{' '.join(found[0].split())!r}: {message}"
    for result in LintFile(page.path, page.text).lint(DEFAULT) if page.text.strip() else ():
        if not result.check_result.check_path.startswith(LEFT_OUT):
            yield result.pos[0], f"{result.check_result.check_path}: {result.check_result.message}"


def register() -> None:
    """Register proselint's checks, once per process."""
    if not CheckRegistry().checks:
        CheckRegistry().register_many(__register__)


def main() -> int:
    """Print all problems; return the exit status."""
    register()
    found = [f"{page.path}:{line}: {message}" for page in pages() for line, message in sorted(problems(page))]
    for line in found:
        print(line)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
