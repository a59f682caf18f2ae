"""Configs that a Python function returns: torchtitan's config_registry.py and Megatron-Bridge's recipes. Never run.

    def llama3_8b() -> Trainer.Config:                  # a recipe: a function that returns a config
        config = llama3_base()                          # functions of the same file are followed
        config.training.steps = 3000                    # training.steps = 3000
        return config

A call with keywords is a mapping, with the callee's name as its target unless the name says only what the key says
(`training=TrainingConfig(...)`). What only Python knows (functions of other files, conditions) has a finding.
The values that some well-known functions of a framework return are in `Helper`s of its module.
"""

from __future__ import annotations

import ast
import operator
import os.path
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from dslpar.core.errors import Finding, Location
from dslpar.language.errors import ConfigError, finding
from dslpar.language.load import Config
from dslpar.language.load_session import parsed
from dslpar.language.tree import Node, Reference
from dslpar.migrate.unread import UNREAD

ROOTS: Mapping[str, str] = {
    "Trainer.Config": "torchtitan",
    "JobConfig": "torchtitan",
    "ConfigContainer": "megatron_bridge",
}
"""Classes of whole configs, and the framework of each."""
_SECTIONS = ("Profiling", "Metrics", "Model", "Optimizer", "LRScheduler", "Training", "Parallelism", "Checkpoint",
             "ActivationCheckpoint", "Compile", "Comm", "Validation", "Debug", "Job", "DataLoader")  # fmt: skip
"""Classes of JobConfig's sections in torchtitan 0.2."""
_DEEPEST = 12
"""Calls within calls that are followed."""
_OPERATORS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Is: operator.is_, ast.IsNot: operator.is_not,
}  # fmt: skip

Helper = Callable[[Sequence[Any], Mapping[str, Any]], Any]
"""What a well-known function returns, from its plain arguments: a value, or dicts of values. None: unknown."""


class Recipe(NamedTuple):
    """Function of a file that returns a config."""

    name: str
    framework: str
    node: ast.FunctionDef
    in_program: bool = False
    """Whether the function was made of a program's statements: what a name of another file stands for is unknown."""
    is_partial: bool = False
    """Whether the config has further keys, which the file does not set."""


class Followed(NamedTuple):
    """Config that a recipe returns."""

    config: Config
    places: dict[str, tuple[Location, Location]]
    """Two locations for each key: the key's, and its value's."""
    is_partial: bool
    """Whether the config has further keys, whose names nobody knows."""


class _UnknownError(Exception):
    """An expression has no known value."""

    def __init__(self, node: ast.AST, why: str) -> None:
        super().__init__(why)
        self.node, self.why = node, why


def recipes_in(text: str, path: str) -> list[Recipe]:
    """Return the recipes of a Python file, in its order; those whose name begins with "_" only if all do."""
    try:
        tree = parsed(path, text).tree
    except ConfigError:  # the evaluator reports it
        return []
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    found = [Recipe(name, made, node) for name, node in functions.items() if (made := _framework(node, functions))]
    return [recipe for recipe in found if not recipe.name.startswith("_")] or found


def root_of(name: str) -> str:
    """Return the framework of a class of whole configs; empty for another class. A trainer may be derived from."""
    if name.endswith("Trainer.Config"):
        return ROOTS["Trainer.Config"]
    return ROOTS.get(name, ROOTS.get(name.rpartition(".")[2], ""))


def _framework(node: ast.FunctionDef, functions: Mapping[str, ast.FunctionDef], depth: int = 0) -> str:
    """Return the framework whose config a function returns; empty if it returns none."""
    if node.returns is not None:
        name = node.returns.value if isinstance(node.returns, ast.Constant) else ast.unparse(node.returns)
        return root_of(str(name))
    for part in ast.walk(node):
        if isinstance(part, ast.Call):
            name = ast.unparse(part.func)
            if root_of(name):
                return root_of(name)
            if depth < _DEEPEST and name in functions and functions[name] is not node:
                below = _framework(functions[name], functions, depth + 1)
                if below:
                    return below
    return ""


def load_recipe(
    text: str, path: str, recipe: Recipe, others: Sequence[Recipe], helpers: Mapping[str, Helper]
) -> Followed:
    """Follow a recipe.

    Each of the other recipes has a finding, which says how to choose it.
    """
    follower = _Follower(text, path, helpers)
    root = follower.run(recipe)
    follower.findings += [
        finding(
            "CFG010",
            follower.source.location(other.node),
            f"{other.name} is another config of this file, which is not in the result: choose one with --recipe",
            f"--recipe {other.name}",
        )
        for other in others
    ]
    unknown: list[str] = []
    places: dict[str, tuple[Location, Location]] = {}
    made = _known(root, "", unknown, places)
    config = Config(path, made, tuple(follower.findings), {path: text}, unknown=frozenset(unknown))
    return Followed(config, places, recipe.is_partial or follower.is_partial)


def _known(node: Node, path: str, unknown: list[str], places: dict[str, tuple[Location, Location]]) -> Node:
    """Return a tree without unknown values, whose paths are added to `unknown`."""
    if not node.is_mapping:
        return node
    children: dict[object, Node] = {}
    for name, child in node.value.items():
        below = f"{path}.{name}".lstrip(".")
        places[below] = (child.key_location or child.location, child.location)
        if child.value is UNREAD:
            unknown.append(below)
        else:
            children[name] = _known(child, below, unknown, places)
    return node._replace(value=children)


class _Follower:
    """Follows functions of one file."""

    def __init__(self, text: str, path: str, helpers: Mapping[str, Helper]) -> None:
        self.helpers = helpers
        self.source, self.tree, *_ = parsed(path, text)
        self.functions = {node.name: node for node in self.tree.body if isinstance(node, ast.FunctionDef)}
        self.findings: list[Finding] = []
        self.in_program = self.is_partial = False
        self.constants: dict[str, Node] = {}
        for node in self.tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign):
                self.constant(node)
            else:
                for name in map(root_name, changed_by(node)):
                    self.constants.pop(name, None)

    def constant(self, node: ast.Assign | ast.AnnAssign) -> None:
        """Bind a name of the module, if its value is known."""
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if len(targets) == 1 and isinstance(targets[0], ast.Name) and node.value is not None:
            try:
                self.constants[targets[0].id] = self.value(node.value, self.constants, 0)
            except _UnknownError:  # an expression that uses the name says so
                self.constants.pop(targets[0].id, None)

    def run(self, recipe: Recipe) -> Node:
        """Return the config that a recipe returns: a mapping, empty if it is unknown."""
        if recipe.in_program:  # the function has the module's statements, too
            self.in_program, self.is_partial, self.findings = True, False, []
            self.constants["__file__"] = Node(os.path.abspath(self.source.path), self.source.location(recipe.node))
        try:
            made = self.call(recipe.node, [], {}, 0)
        except _UnknownError as error:
            self.note(error)
            made = None
        whole = self.source.location(recipe.node)
        return made._replace(target=None) if made is not None and made.is_mapping else Node({}, whole)

    def note(self, error: _UnknownError) -> None:
        """Record a finding at an expression."""
        place = self.source.location(error.node)
        self.findings.append(finding("CFG010", place, f"{error.why}: write the value here", "write the value here"))

    def unread(self, node: ast.AST, error: _UnknownError | None = None) -> Node:
        """Return an unknown value, with its finding."""
        if error is not None:
            self.note(error)
        return Node(UNREAD, self.source.location(node))

    # Functions and statements --------------------------------------------------------------------------------

    def call(self, function: ast.FunctionDef, args: list[Node], words: Mapping[str, Node], depth: int) -> Node | None:
        """Follow a function of the file, and return what it returns."""
        if depth > _DEEPEST:
            raise _UnknownError(function, "calls are nested too deeply")
        names = [arg.arg for arg in (*function.args.posonlyargs, *function.args.args)]
        env = dict(self.constants)
        pairs = [
            *zip(names[len(names) - len(function.args.defaults) :], function.args.defaults, strict=True),
            *(
                (arg.arg, default)
                for arg, default in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
            ),
        ]
        for name, default in pairs:
            if default is not None:
                try:
                    env[name] = self.value(default, env, depth)
                except _UnknownError:  # an expression that uses the name says so
                    env.pop(name, None)
        env |= dict(zip(names, args, strict=False)) | dict(words)
        return self.block(function.body, env, depth)

    def block(self, body: Sequence[ast.stmt], env: dict[str, Node], depth: int) -> Node | None:
        """Follow statements; return the value of the first `return`."""
        for statement in body:
            if isinstance(statement, ast.Return):
                return None if statement.value is None else self.value(statement.value, env, depth)
            if isinstance(statement, ast.If):
                made = self.branch(statement, env, depth)
                if made is not None:
                    return made
            else:
                self.statement(statement, env, depth)
        return None

    def branch(self, statement: ast.If, env: dict[str, Node], depth: int) -> Node | None:
        """Follow the branch of a known condition; what both branches of an unknown one set is unknown."""
        try:
            test = self.value(statement.test, env, depth)
        except _UnknownError as error:
            parts = (*statement.body, *statement.orelse)
            if depth and any(isinstance(part, ast.Return) for each in parts for part in ast.walk(each)):
                raise _UnknownError(statement.test, f"the condition of a return is not known ({error.why})") from None
            for part in parts:
                self.forget(part, env, f"this is set under a condition that is not known ({error.why})")
            return None
        return self.block(statement.body if test.plain() else statement.orelse, env, depth)

    def forget(self, statement: ast.stmt, env: dict[str, Node], why: str) -> None:
        """Record that what a statement changes is unknown."""
        for target in changed_by(statement):
            self.assign(target, self.unread(target, _UnknownError(target, why)), env)

    def statement(self, statement: ast.stmt, env: dict[str, Node], depth: int) -> None:
        """Follow a statement that returns nothing."""
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            if statement.value is None:
                return
            try:
                made = self.value(statement.value, env, depth)
            except _UnknownError as error:
                made = self.unread(statement.value, error)
            for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
                self.assign(target, made, env)
        elif isinstance(statement, ast.AugAssign):
            try:
                left = ast.copy_location(_loaded(statement.target), statement.target)
                whole = ast.copy_location(ast.BinOp(left, statement.op, statement.value), statement)
                made = self.value(whole, env, depth)
            except _UnknownError as error:
                made = self.unread(statement.value, error)
            self.assign(statement.target, made, env)
        elif isinstance(statement, ast.Expr) and any(root_name(each) in env for each in changed_by(statement)):
            self.changed(statement, env, depth)
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            self.effect(statement.value, env, depth)
        elif isinstance(statement, ast.For | ast.While | ast.With | ast.Try | ast.Match | ast.Delete):
            why = "what this statement sets is not in the result"
            self.findings.append(
                finding("CFG010", self.source.location(statement), f"{why}: write it out", "write it out")
            )
            self.forget(statement, env, "this is set in a loop or a block, which is not followed")
        # Others bind nothing: docstrings, imports, `assert`, `pass`, `raise`.

    def changed(self, statement: ast.Expr, env: dict[str, Node], depth: int) -> None:
        """Follow a call that changes a name's value: `NAME.update(...)` adds keys, and others make it unknown."""
        call = statement.value
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "update":
            first = call.func.value
            if isinstance(first, ast.Name) and env[first.id].is_mapping:
                words = ast.Call(ast.copy_location(ast.Name("dict"), call), [], call.keywords)
                parts = [first, *call.args, ast.copy_location(words, call)]
                whole = ast.copy_location(ast.Dict([None] * len(parts), parts), call)
                try:
                    env[first.id] = self.literal(whole, env, depth, self.source.location(call))
                    return
                except _UnknownError as error:
                    self.note(error)
        self.forget(statement, env, "what this call changes is not known")

    def effect(self, call: ast.Call, env: dict[str, Node], depth: int) -> None:
        """Follow a call for what it changes: a function of the file may set keys of a config that it is given."""
        name = ast.unparse(call.func)
        if name in self.functions:
            try:
                self.value(call, env, depth)
            except _UnknownError as error:
                self.note(error)
        elif any(isinstance(arg, ast.Name) and arg.id in env and env[arg.id].is_mapping for arg in call.args):
            why = f"what {name}() sets is not in the result"
            self.findings.append(finding("CFG010", self.source.location(call), f"{why}: write it out", "write it out"))

    def assign(self, target: ast.expr, made: Node, env: dict[str, Node]) -> None:
        """Bind a name, or set a key below one."""
        if isinstance(target, ast.Name):
            env[target.id] = made
            return
        if isinstance(target, ast.Tuple):
            items = made.value if isinstance(made.value, list | tuple) else []
            for index, item in enumerate(target.elts):
                self.assign(item, items[index] if index < len(items) else self.unread(item), env)
            return
        chain = _chain(target)
        if not chain or chain[0] not in env:
            error = _UnknownError(target, f"what {ast.unparse(target)} is part of is not known")
            self.note(error)
            if self.in_program and root_name(target) in env:  # an item whose key nobody knows
                env[root_name(target)] = self.unread(target)
            return
        level = env[chain[0]]
        if self.in_program and level.value is UNREAD:
            return  # it has further keys, whose names nobody knows
        location = self.source.location(target)
        if not level.is_mapping:
            level = env[chain[0]] = Node({}, location)
        for part in chain[1:-1]:
            below = level.value.get(part)
            if below is None or not below.is_mapping:
                below = level.value[part] = Node({}, location, location)
            level = below
        level.value[chain[-1]] = made._replace(key_location=location)

    # Expressions ---------------------------------------------------------------------------------------------

    def value(self, node: ast.expr, env: Mapping[str, Node], depth: int) -> Node:
        """Return the value of an expression. Raises _UnknownError."""
        place = self.source.location(node)
        if isinstance(node, ast.Constant):
            return Node(
                node.value if isinstance(node.value, bool | int | float | str | None) else str(node.value), place
            )
        if isinstance(node, ast.Name):
            if node.id in env:
                found = env[node.id]
                if found.value is UNREAD:
                    raise _UnknownError(node, f"{node.id} is not known")
                return found if found.is_mapping else found._replace(location=place)
            if node.id[:1].isupper() and not node.id.isupper():
                return Node(node.id, place)  # a class
            raise _UnknownError(node, f"{node.id} is not set in this file")
        if isinstance(node, ast.List | ast.Tuple):
            return Node([self.value(item, env, depth) for item in node.elts], place)
        if isinstance(node, ast.Dict):
            return self.literal(node, env, depth, place)
        if isinstance(node, ast.Attribute):
            return self.attribute(node, env, place)
        if isinstance(node, ast.Call):
            return self.called(node, env, depth, place)
        return _tree(self.computed(node, env, depth), place)  # lists may be joined, or repeated

    def literal(self, node: ast.Dict, env: Mapping[str, Node], depth: int, place: Location) -> Node:
        """Return the mapping of a dict's display; `**NAME` adds a known mapping."""
        made: dict[object, Node] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                more = self.value(value, env, depth)
                made |= more.value if more.is_mapping else {}
            elif isinstance(key, ast.Constant):
                made[str(key.value)] = self.item(value, env, depth)._replace(key_location=self.source.location(key))
            else:
                raise _UnknownError(key, "this key is not known")
        return Node(made, place)

    def item(self, value: ast.expr, env: Mapping[str, Node], depth: int) -> Node:
        """Return the value of a key, which may be unknown."""
        try:
            return self.value(value, env, depth)
        except _UnknownError as error:
            return self.unread(value, error)

    def computed(self, node: ast.expr, env: Mapping[str, Node], depth: int) -> Any:
        """Compute an expression of operators."""

        def plain(part: ast.expr) -> Any:
            return self.value(part, env, depth).plain()

        try:
            if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
                return _OPERATORS[type(node.op)](plain(node.left), plain(node.right))
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
                left, right = plain(node.left), plain(node.right)
                if abs(right) <= 64 and abs(left) <= 1024:
                    return left**right
            if isinstance(node, ast.UnaryOp):
                item = plain(node.operand)
                return not item if isinstance(node.op, ast.Not) else -item if isinstance(node.op, ast.USub) else +item
            if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _OPERATORS:
                return _OPERATORS[type(node.ops[0])](plain(node.left), plain(node.comparators[0]))
            if isinstance(node, ast.BoolOp):
                made = plain(node.values[0])
                for other in node.values[1:]:
                    made = (made and plain(other)) if isinstance(node.op, ast.And) else (made or plain(other))
                return made
            if isinstance(node, ast.IfExp):
                return plain(node.body if plain(node.test) else node.orelse)
        except (TypeError, ArithmeticError, ValueError, MemoryError):
            raise _UnknownError(node, "this expression has no value") from None
        raise _UnknownError(node, "this expression is not evaluated")

    def attribute(self, node: ast.Attribute, env: Mapping[str, Node], place: Location) -> Node:
        """Return a key's value, or the name of something imported: `torch.bfloat16`."""
        chain = _chain(node)
        if chain and chain[0] in env:
            found = env[chain[0]].get(".".join(map(str, chain[1:])))
            if found is None or found.value is UNREAD:
                raise _UnknownError(node, f"{ast.unparse(node)} is not set in this file")
            return found if found.is_mapping else found._replace(location=place)
        if chain and not self.in_program:
            return Node(".".join(map(str, chain)), place)
        raise _UnknownError(node, f"{ast.unparse(node)} is not evaluated")

    def called(self, node: ast.Call, env: Mapping[str, Node], depth: int, place: Location) -> Node:
        """Return what a call makes."""
        name = ast.unparse(node.func)
        last = name.rpartition(".")[2]
        if name in self.functions:
            args = [self.value(arg, env, depth) for arg in node.args]
            words = {word.arg: self.item(word.value, env, depth) for word in node.keywords if word.arg}
            made = self.call(self.functions[name], args, words, depth + 1)
            if made is None:
                raise _UnknownError(node, f"{name}() returns nothing that is known")
            return made
        helper = self.helpers.get(last)
        if helper is not None:
            return self.helped(node, helper, env, depth, place)
        if self.in_program and not (name == "dict" or name.endswith(("Arguments", "Config"))):
            raise _UnknownError(node, f"{name}() is not in this file")
        if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Call):
            return self.value(node.func.value, env, depth)._replace(location=place)  # Bridge.from_hf(...).to_provider()
        if last == "replace" and node.args:
            return self.replaced(node, env, depth)
        if last[:1].isupper() or last in ("dict",):
            return self.made(node, name, env, depth, place)
        raise _UnknownError(node, f"{name}() is not in this file")

    def replaced(self, node: ast.Call, env: Mapping[str, Node], depth: int) -> Node:
        """Return a copy of a config with other values: dataclasses.replace."""
        first = self.value(node.args[0], env, depth)
        if not first.is_mapping:
            raise _UnknownError(node, "this is no config")
        words = self.words(node, env, depth)
        return first._replace(value={**first.value, **words})

    def words(self, node: ast.Call, env: Mapping[str, Node], depth: int) -> dict[object, Node]:
        """Return the keyword arguments of a call; `**NAME` adds those of a known mapping."""
        made: dict[object, Node] = {}
        for word in node.keywords:
            if word.arg:
                made[word.arg] = self.item(word.value, env, depth)._replace(key_location=self.source.location(word))
                continue
            try:
                more = self.value(word.value, env, depth)
            except _UnknownError as error:
                self.note(error)
                self.is_partial = True
                continue
            made |= more.value if more.is_mapping else {}
        return made

    def made(self, node: ast.Call, name: str, env: Mapping[str, Node], depth: int, place: Location) -> Node:
        """Return the mapping of a class's keyword arguments."""
        for arg in node.args:
            why = f"an argument of {name} without its name is not in the result"
            self.findings.append(
                finding("CFG010", self.source.location(arg), f"{why}: write its name", "write its name")
            )
        owner = name.removesuffix(".Config")
        section = (
            bool(root_of(name)) or name == "dict" or (owner == name and name.endswith("Config")) or name in _SECTIONS
        )
        target = None if section else Reference(owner)
        return Node(self.words(node, env, depth), place, target=target, target_location=self.source.location(node.func))

    def helped(self, node: ast.Call, helper: Helper, env: Mapping[str, Node], depth: int, place: Location) -> Node:
        """Return what a well-known function returns, at the place of its call."""
        words = self.words(node, env, depth)
        try:
            args = [self.value(arg, env, depth).plain() for arg in node.args]
            plain = {str(key): _plain(item, key) for key, item in words.items()}
        except _UnknownError as error:
            raise _UnknownError(node, error.why) from None
        made = helper(args, plain)
        if made is None:
            raise _UnknownError(node, f"what {ast.unparse(node.func)}() returns is not known")
        return _tree(made, place)


def _plain(item: Node, key: object) -> Any:
    if item.value is UNREAD:
        raise _UnknownError(ast.Pass(), f"{key} is not known")
    return item.plain()


def _tree(value: Any, place: Location) -> Node:
    """Return a helper's values as nodes at the place of its call."""
    if isinstance(value, dict):
        return Node({key: _tree(item, place)._replace(key_location=place) for key, item in value.items()}, place)
    if isinstance(value, list | tuple):
        return Node([_tree(item, place) for item in value], place)
    return Node(value, place)


def _chain(node: ast.AST) -> list[str]:
    """Split `a.b["c"].d` into its parts; empty for any other expression."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute | ast.Subscript):
        if isinstance(node, ast.Attribute):
            parts.append(node.attr)
        elif isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
            parts.append(node.slice.value)
        else:
            return []
        node = node.value
    return [node.id, *reversed(parts)] if isinstance(node, ast.Name) else []


_CHANGES = ("update", "setdefault", "pop", "popitem", "clear", "append", "extend", "insert", "remove")
"""Methods of dicts and lists that change them."""


def changed_by(statement: ast.AST) -> list[ast.expr]:
    """Return what a statement, and those within it, bind or change: names, attributes and items."""
    found: list[ast.expr] = []
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda | ast.comprehension):
        return found  # it runs when it is called, and its names are its own
    for part in ast.iter_child_nodes(statement):
        if isinstance(part, ast.Name | ast.Attribute | ast.Subscript) and not isinstance(part.ctx, ast.Load):
            found.append(part)
        else:
            found += changed_by(part)
    func = statement.func if isinstance(statement, ast.Call) else None
    if isinstance(func, ast.Attribute) and func.attr in _CHANGES and root_name(func.value):
        found.append(func.value)
    return found


def root_name(node: ast.AST) -> str:
    """Return the first name of `a.b["c"].d`; empty for any other expression."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _loaded(node: ast.expr) -> ast.expr:
    """Return a target as an expression that reads it."""
    copy = ast.parse(ast.unparse(node), mode="eval").body
    for part in ast.walk(copy):
        part.lineno, part.col_offset = node.lineno, node.col_offset  # type: ignore[attr-defined]
        part.end_lineno, part.end_col_offset = node.end_lineno, node.end_col_offset  # type: ignore[attr-defined]
    return copy
