"""Metrics of the code's shape: `python -m tests.support.shape` prints them beside those of other codebases.

They are signs, not goals: a function that is split in five to count as short is harder to read than before. The last
column is the range over picotron, torchtitan, nanoGPT, litgpt and equinox, or "-" if it was not counted there.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support.paths import ROOT

Function = ast.FunctionDef | ast.AsyncFunctionDef
TABLES = re.compile(
    r"dslpar/(schema/data|migrate/(colossalai|libai|deepspeed)\.py|schema/(deepspeed_keys|sections)\.py)"
)
"""Files that are mostly data, which are not counted among the long ones."""
MODELS = {
    "lines of a function: p50": "6-10",
    "p90": "24-31",
    "p99": "-",
    "deepest nesting (p99)": "3-4",
    "files over 300 lines, tables apart": "-",
    "private helpers of 3 lines or fewer, used once": "-",
    "comment lines, % of code": "9-12",
    "signatures with Any, %": "-",
    "lines": "-",
}


class Module(NamedTuple):
    """A parsed file."""

    path: str
    text: str
    tree: ast.Module


def library() -> list[Module]:
    """Return every module of dslpar and of dslpar.layers."""
    found = []
    for folder in ("dslpar", "layers"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "dslpar/layers" not in path.as_posix().removeprefix(str(ROOT)):
                text = path.read_text(encoding="utf-8")
                found.append(Module(path.relative_to(ROOT).as_posix(), text, ast.parse(text)))
    return found


def functions(modules: Iterable[Module]) -> Iterator[tuple[Module, Function]]:
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, Function):
                yield module, node


def length(node: Function) -> int:
    """Return the number of lines from `def` to the end."""
    return (node.end_lineno or 0) - node.lineno + 1


def nesting(node: ast.AST) -> int:
    """Return the depth of nested blocks."""
    blocks = (ast.If, ast.For, ast.While, ast.With, ast.Try)
    return max((isinstance(child, blocks) + nesting(child) for child in ast.iter_child_nodes(node)), default=0)


def comments(modules: Iterable[Module]) -> tuple[int, int]:
    """Return (lines with a comment, lines of code); docstrings and blank lines are neither."""
    commented, code = 0, set()
    for module in modules:
        strings = {
            line
            for node in ast.walk(module.tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
            for line in range(node.lineno, (node.end_lineno or 0) + 1)
        }
        skipped = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
        for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
            if token.type == tokenize.COMMENT:
                commented += 1
            elif token.type not in skipped:
                code |= {(module.path, line) for line in range(token.start[0], token.end[0] + 1) if line not in strings}
    return commented, len(code)


def one_use_helpers(modules: list[Module]) -> list[str]:
    """Return private functions of three lines or fewer that their module uses once."""
    found = []
    for module, node in functions(modules):
        body = node.body[1:] if ast.get_docstring(node) else node.body
        lines = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
        if node.name.startswith("_") and not node.name.startswith("__") and lines <= 3:
            uses = len(re.findall(rf"\b{node.name}\b", module.text))
            if uses == 2:
                found.append(f"{module.path}:{node.lineno} {node.name}")
    return found


def names_any(node: Function) -> bool:
    annotations = [argument.annotation for argument in (*node.args.args, *node.args.kwonlyargs, *node.args.posonlyargs)]
    annotations += [node.returns, node.args.vararg and node.args.vararg.annotation]
    annotations += [node.args.kwarg and node.args.kwarg.annotation]
    return any(isinstance(part, ast.Name) and part.id == "Any" for one in annotations if one for part in ast.walk(one))


def percentile(values: list[int], share: float) -> int:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def figures() -> dict[str, str]:
    modules = library()
    lengths = [length(node) for _, node in functions(modules)]
    depths = [nesting(node) for _, node in functions(modules)]
    long = [one.path for one in modules if one.text.count("\n") > 300 and not TABLES.match(one.path)]
    commented, code = comments(modules)
    signatures = [names_any(node) for _, node in functions(modules)]
    values = [
        percentile(lengths, 0.5), percentile(lengths, 0.9), percentile(lengths, 0.99), percentile(depths, 0.99),
        len(long), len(one_use_helpers(modules)), f"{100 * commented / code:.1f}",
        f"{100 * sum(signatures) / len(signatures):.0f}", sum(one.text.count("\n") for one in modules),
    ]  # fmt: skip
    return dict(zip(MODELS, map(str, values), strict=True))


def packages() -> Counter[str]:
    """Return lines by package."""
    counted: Counter[str] = Counter()
    for one in library():
        parts = Path(one.path).parts
        counted[parts[0] if parts[0] == "layers" else "/".join(parts[:2])] += one.text.count("\n")
    return counted


def main() -> None:
    """Print the table, then the files over 300 lines."""
    print(f"{'':50}{'dslpar':>8}{'models':>8}")
    for name, value in figures().items():
        print(f"{name:50}{value:>8}{MODELS[name]:>8}")
    print("\nlines by package: " + ", ".join(f"{name} {lines}" for name, lines in packages().most_common()))
    print("\nfiles over 300 lines:")
    for one in sorted(library(), key=lambda module: -module.text.count("\n")):
        if one.text.count("\n") > 300:
            print(f"  {one.text.count(chr(10)):5} {one.path}{' (tables)' if TABLES.match(one.path) else ''}")


if __name__ == "__main__":
    main()
