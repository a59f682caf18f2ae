"""The TrainingArguments of a Python program, read and never run.

    training_args = SFTConfig(output_dir="out", bf16=True, deepspeed="ds.json")     # keys: bf16, deepspeed, output_dir
    trainer = SFTTrainer(model="Qwen/Qwen2.5-0.5B", args=training_args)

Most people write Trainer's settings as keyword arguments and have no config file. Of the program only the assignments
count that these arguments read; a value that another one sets (`args.lr`, `os.environ`) is unknown. transformers'
`HfArgumentParser` reads such settings from a command line or a file: then there is no such call.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from dslpar.language.errors import ConfigError
from dslpar.language.load_session import parsed
from dslpar.migrate.recipes import Recipe
from dslpar.schema.frameworks import imported_packages
from dslpar.schema.python_programs import TRAINING_ARGUMENTS

FRAMEWORK = "training_arguments"
_PACKAGES = ("transformers", "trl")


def arguments_in(text: str, path: str) -> list[Recipe]:
    """Return a recipe for each call that makes TrainingArguments from keyword arguments; named after its variable."""
    if not any(name in text for name in TRAINING_ARGUMENTS):
        return []  # before parsing: almost all files
    try:
        tree = parsed(path, text).tree
    except ConfigError:  # the evaluator reports it
        return []
    if set(imported_packages(text, path)).isdisjoint(_PACKAGES):
        return []
    return [
        _recipe(call, name, [*above, *body[: body.index(statement)]])
        for above, body in _bodies(tree.body, [])
        for statement in body
        for call, name in _calls(statement)
    ]


def _bodies(body: Sequence[ast.stmt], above: list[ast.stmt]) -> Iterator[tuple[list[ast.stmt], Sequence[ast.stmt]]]:
    """Yield each list of statements with the assignments that stand above it in functions and blocks around it."""
    yield above, body
    for index, statement in enumerate(body):
        before = [*above, *body[:index]]
        for name in ("body", "orelse", "finalbody"):
            inner = getattr(statement, name, None)
            if isinstance(inner, list):
                yield from _bodies(inner, before)


def _calls(statement: ast.stmt) -> Iterator[tuple[ast.Call, str]]:
    """Yield the calls that a statement itself makes, each with the name of the variable, or of the class."""
    if not isinstance(statement, ast.Assign | ast.AnnAssign | ast.Expr | ast.Return) or statement.value is None:
        return
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    variable = targets[0].id if isinstance(targets[0], ast.Name) else ""
    for node in ast.walk(statement.value):
        if isinstance(node, ast.Call) and (name := ast.unparse(node.func)) in TRAINING_ARGUMENTS:
            yield node, (variable if node is statement.value else "") or name.rpartition(".")[2]


def _recipe(call: ast.Call, name: str, before: Sequence[ast.stmt]) -> Recipe:
    """Return a function that makes the assignments which a call reads, and returns what the call makes."""
    wanted, kept = _names(call), list[ast.stmt]()
    for statement in reversed(before):
        target = statement.targets[0] if isinstance(statement, ast.Assign) and len(statement.targets) == 1 else None
        while isinstance(target, ast.Attribute | ast.Subscript):
            target = target.value
        if isinstance(target, ast.Name) and target.id in wanted:
            kept.insert(0, statement)
            wanted |= _names(statement)
    none = ast.arguments([], [], None, [], [], None, [])
    made = ast.Return(call, lineno=call.lineno, col_offset=call.col_offset)
    node = ast.FunctionDef(name, none, [*kept, made], [], None, None)
    return Recipe(name, FRAMEWORK, ast.copy_location(node, call))


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
