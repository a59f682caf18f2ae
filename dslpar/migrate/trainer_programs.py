"""The TrainingArguments of a Python program, and the recipe of Megatron-Bridge that it changes: read and never run.

    training_args = SFTConfig(output_dir="out", bf16=True, deepspeed="ds.json")     # keys: bf16, deepspeed, output_dir
    training_args.max_steps = 100                                                   # and max_steps
    trainer = SFTTrainer(model="Qwen/Qwen2.5-0.5B", args=training_args)

    cfg = llama3_8b_pretrain_config()        # a function of Megatron-Bridge: its values are unknown here
    cfg.model.tensor_model_parallel_size = 4 # an override, as in a YAML file

Most people write Trainer's settings as keyword arguments and have no config file. Of the program only the statements
count that change what the config reads, before its call and after it. A value that only the run knows (`args.lr`,
`os.environ`, a parameter, what a loop or a condition sets) is unknown. transformers' `HfArgumentParser` reads such
settings from a command line or a file: then there is no such call.
"""

from __future__ import annotations

import ast
import copy
import os.path
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from dslpar.language.errors import ConfigError
from dslpar.language.load_session import parsed
from dslpar.migrate.recipes import Helper, Recipe, changed_by, root_name
from dslpar.schema.python_programs import CLASSES_OF_ARGUMENTS

FRAMEWORK, _BRIDGE = "training_arguments", "megatron_bridge"
_PACKAGES = ("transformers", "trl")
_RECIPES = "megatron.bridge.recipes"
_VARIABLE = "_config_"
"""The name that replaces an attribute such as `self.args`."""
_Made = TypeVar("_Made", bound=ast.AST)


def helpers(tree: ast.Module, path: str) -> Mapping[str, Helper]:
    """Return what Python's functions of paths return: os.path.join(os.path.dirname(__file__), "ds.json")."""

    def joined(args: Sequence[Any], words: Mapping[str, Any]) -> Any:
        # With one argument it may be str.join.
        return os.path.join(*args) if len(args) > 1 and all(isinstance(arg, str) for arg in args) else None

    def of_one(function: Callable[[str], str]) -> Helper:
        return lambda args, words: function(args[0]) if len(args) == 1 and isinstance(args[0], str) else None

    one: dict[str, Callable[[str], str]] = {
        "dirname": os.path.dirname,
        "abspath": os.path.normpath,
        "realpath": os.path.normpath,
    }
    made: dict[str, Helper] = {name: of_one(function) for name, function in one.items()}
    return made | {"join": joined}


class _Site(NamedTuple):
    """A statement, and those that run before and after it."""

    statement: ast.stmt
    before: list[ast.stmt]
    after: list[ast.stmt]


def arguments_in(text: str, path: str) -> list[Recipe]:
    """Return a recipe for each call that makes TrainingArguments from keyword arguments; named after its variable."""
    if not any(name in text for name in CLASSES_OF_ARGUMENTS):
        return []  # before parsing: almost all files
    tree = _tree(text, path)
    classes = {
        name: owner
        for name, package, owner in _imported(tree)
        if package.partition(".")[0] in _PACKAGES and owner in ("", *CLASSES_OF_ARGUMENTS)
    }
    names = {f"{name}.{owner}" for name, of in classes.items() if not of for owner in CLASSES_OF_ARGUMENTS}
    names |= {name for name, owner in classes.items() if owner}
    found = [_recipe(call, site, FRAMEWORK) for site in _sites(tree.body) for call in _calls(site.statement, names)]
    return _named(found)


def changed_recipes_in(text: str, path: str) -> list[Recipe]:
    """Return a recipe for each variable that a function of Megatron-Bridge sets and the program changes."""
    if _RECIPES not in text:
        return []
    tree = _tree(text, path)
    names = {name for name, package, owner in _imported(tree) if f"{package}.{owner}.".startswith(f"{_RECIPES}.")}
    found = [
        _recipe(site.statement.value, site, _BRIDGE)
        for site in _sites(tree.body)
        if isinstance(site.statement, ast.Assign | ast.AnnAssign)
        and isinstance(site.statement.value, ast.Call)
        and _is_of(site.statement.value.func, names)
    ]
    return _named(found)


def _is_of(func: ast.expr, names: Collection[str]) -> bool:
    """Return whether a function is imported by one of these names, or is of a module that is; classes are none."""
    name = ast.unparse(func)
    return name[name.rfind(".") + 1].islower() and any(f"{name}.".startswith(f"{each}.") for each in names)


def _tree(text: str, path: str) -> ast.Module:
    try:
        return parsed(path, text).tree
    except ConfigError:  # the evaluator reports it
        return ast.Module([], [])


def _imported(tree: ast.Module) -> Iterator[tuple[str, str, str]]:
    """Yield each name that is imported, its package, and its name there: empty if it is the package itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                names = CLASSES_OF_ARGUMENTS if alias.name == "*" else [alias.name]
                yield from ((alias.asname or name, node.module, name) for name in names)
        elif isinstance(node, ast.Import):
            yield from ((alias.asname or alias.name, alias.name, "") for alias in node.names)


def _named(recipes: Sequence[Recipe]) -> list[Recipe]:
    """Return recipes with a name each: those of one name have their line, too."""
    names = [recipe.name for recipe in recipes]
    return [
        recipe if names.count(recipe.name) == 1 else recipe._replace(name=f"{recipe.name}:{recipe.node.lineno}")
        for recipe in recipes
    ]


def _sites(
    body: Sequence[ast.stmt], before: Sequence[ast.stmt] = (), after: Sequence[ast.stmt] = (), is_module: bool = True
) -> Iterator[_Site]:
    """Yield each statement, also those within others, with what runs before and after it.

    A function runs when the whole module has run, and its parameters are unknown. What stands in another branch than
    the statement, or in the function's callers, is left out.
    """
    for index, statement in enumerate(body):
        above, below = [*before, *body[:index]], [*body[index + 1 :], *after]
        yield _Site(statement, above, below)
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            above += body[index + 1 :] if is_module else []
            args = [each.arg for each in ast.walk(statement.args) if isinstance(each, ast.arg)]
            yield from _sites(statement.body, [*above, *_forgotten(args, statement)], (), False)
        elif isinstance(statement, ast.ClassDef):
            for each in statement.body:  # its own names are not those of its methods
                yield from _sites([each], [*above, *(body[index + 1 :] if is_module else [])], (), False)
        else:
            yield from _inside(statement, above, below)


def _inside(statement: ast.stmt, before: list[ast.stmt], after: list[ast.stmt]) -> Iterator[_Site]:
    """Yield the statements within a block; the names that its head binds are unknown."""
    parts = [statement, *getattr(statement, "handlers", []), *getattr(statement, "cases", [])]
    is_loop = isinstance(statement, ast.For | ast.AsyncFor | ast.While)
    for part in parts:
        for field in ("body", "orelse", "finalbody"):
            inner = getattr(part, field, None)
            if isinstance(inner, list) and inner:
                children = list(ast.iter_child_nodes(part))
                heads: list[ast.AST] = [ast.Expr(child) for child in children if isinstance(child, ast.expr)]
                heads += [child for child in children if isinstance(child, ast.withitem)]
                names = [root_name(each) for head in heads for each in changed_by(head)]
                # What a loop's body changes, an earlier round may have changed.
                names += [root_name(each) for item in (inner if is_loop else ()) for each in changed_by(item)]
                yield from _sites(inner, [*before, *_forgotten(names, statement)], after, False)


def _forgotten(names: Collection[str], place: ast.AST) -> Iterator[ast.stmt]:
    """Yield statements that make names unknown."""
    for name in dict.fromkeys(filter(None, names)):
        yield _placed(ast.Assign([ast.Name(name, ast.Store())], ast.Yield(None)), place)


def _placed(made: _Made, place: ast.AST) -> _Made:
    """Return a node that is all at another's place."""
    for part in ast.walk(made):
        ast.copy_location(part, place)
    return made


def _calls(statement: ast.stmt, names: Collection[str]) -> Iterator[ast.Call]:
    """Yield the calls of these names that a statement itself makes."""
    if isinstance(statement, ast.Assign | ast.AnnAssign | ast.Expr | ast.Return) and statement.value is not None:
        for node in ast.walk(statement.value):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in names:
                yield node


def _recipe(call: ast.Call, site: _Site, framework: str) -> Recipe:
    """Return a function that makes the changes which a call reads, and those of what it makes, and returns this."""
    statement, is_partial = site.statement, framework == _BRIDGE
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    first = targets[0] if getattr(statement, "value", None) is call else None
    name = first.id if isinstance(first, ast.Name) else ""
    owner = ast.unparse(call.func).rpartition(".")[2]
    owner = owner if owner in CLASSES_OF_ARGUMENTS else CLASSES_OF_ARGUMENTS[0]  # it may have another name here
    func, args, words = (ast.Name("dict"), [], []) if is_partial else (ast.Name(owner), call.args, call.keywords)
    made = ast.copy_location(ast.Call(ast.copy_location(func, call.func), args, words), call)
    variable = name or _VARIABLE
    target = "" if first is None else ast.unparse(first)
    bound = ast.copy_location(ast.Assign([ast.copy_location(ast.Name(variable, ast.Store()), call)], made), call)
    own = [part for part in ast.walk(statement) if isinstance(part, ast.comprehension | ast.Lambda)]
    local = [each.id for part in own for each in ast.walk(getattr(part, "target", part)) if isinstance(each, ast.Name)]
    before = [*site.before, *_forgotten([] if not own else local, call)]
    changes = list(_changes(site.after, target, variable)) if target else []
    wanted = {variable}
    changes = list(_wanted(changes, wanted))
    wanted = (wanted - {variable}) | _names(made)
    node = ast.FunctionDef(
        name or owner,
        ast.arguments([], [], None, [], [], None, []),
        [*_wanted(before, wanted), bound, *changes, _placed(ast.Return(ast.Name(variable, ast.Load())), call)],
        [], None, None,
    )  # fmt: skip
    return Recipe(node.name, framework, ast.copy_location(node, call), in_program=True, is_partial=is_partial)


def _changes(after: Sequence[ast.stmt], target: str, variable: str) -> Iterator[ast.stmt]:
    """Yield the statements after a call until its variable is bound again; `variable` replaces its attribute."""
    for statement in after:
        if any(ast.unparse(each) == target for each in changed_by(statement)):
            return
        made: ast.stmt = copy.deepcopy(statement)
        yield statement if target == variable else _Renamed(target, variable).visit(made)  # type: ignore[misc]


class _Renamed(ast.NodeTransformer):
    """Replaces an expression by a name."""

    def __init__(self, target: str, variable: str) -> None:
        self.target, self.variable = target, variable

    def visit(self, node: ast.AST) -> ast.AST:
        """Return the name for the expression, and any other node with what is below it replaced."""
        if isinstance(node, ast.Attribute | ast.Subscript) and ast.unparse(node) == self.target:
            return ast.copy_location(ast.Name(self.variable, ast.Load()), node)
        return self.generic_visit(node)


def _wanted(statements: Sequence[ast.stmt], wanted: set[str]) -> list[ast.stmt]:
    """Return the statements that change wanted names; the names that these read are wanted, too."""
    kept: list[ast.stmt] = []
    for statement in reversed(statements):
        if wanted.isdisjoint(map(root_name, changed_by(statement))):
            continue
        wanted |= _names(statement)
        if any(isinstance(part, ast.Return) for part in ast.walk(statement)):  # its values are unknown
            statement = ast.copy_location(ast.Try([statement], [], [], []), statement)
        kept.insert(0, statement)
    return kept


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
