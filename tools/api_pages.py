"""Pages of docs/api: the public names of each module from signatures and docstrings, as Markdown.

The pages read the same on a git host and on the site, so no build is needed. Signatures are as written in the code. A
name that several modules export is described once: on the page of dslpar, or else on the first page that has it.
Docstrings are written for editors. `markdown` converts what is not Markdown: examples below a sentence,
`name: what it is`, and the sections of Google's style.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from enum import Enum
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

from dslpar.provenance.reference_formats import escaped

MODULES = {
    "dslpar": "dslpar",
    "dslpar.layers": "layers",
    "dslpar.models": "models",
    "dslpar.checkpoint": "checkpoint",
    "dslpar.config": "config",
    "dslpar.compat.colossalai": "colossalai",
}
"""Modules with their pages, in the order in which a page may describe a shared name."""
WIDTH = 100
"""Columns up to which a signature stays on one line."""


class Entry(NamedTuple):
    """A public name of a module."""

    module: str
    name: str
    value: Any

    @property
    def kind(self) -> str:
        """Kind of the value: class, function, module or value."""
        if inspect.isclass(self.value):
            return "class"
        if inspect.ismodule(self.value):
            return "module"
        return "function" if inspect.isroutine(self.value) else "value"


Described = dict[int, str]
"""The module whose page describes a value, by the value's identity."""


def pages() -> dict[str, str]:
    """Return the Markdown of each page by its path below docs/, without the line that it is generated."""
    described: Described = {}
    return {f"api/{page}.md": _page(name, described) for name, page in MODULES.items()}


def _page(name: str, described: Described) -> str:
    """Return a module's page, and add the values that it describes."""
    module = import_module(name)
    entries = [Entry(name, each, getattr(module, each)) for each in sorted(module.__all__, key=str.lower)]
    elsewhere = [entry for entry in entries if id(entry.value) in described]
    here = [entry for entry in entries if entry not in elsewhere]
    # equal numbers may be one object
    described |= {id(entry.value): name for entry in here if not isinstance(entry.value, (int, str))}
    lines = [f"# {name}", "", *markdown(inspect.getdoc(module) or ""), ""]
    for title, kind in (("Classes", "class"), ("Functions", "function"), ("Values", "value")):
        lines += _list(title, [_link(entry.name, name, name) for entry in here if entry.kind == kind])
    lines += _list("Also here", [_link(entry.name, described[id(entry.value)], name) for entry in elsewhere])
    for entry in (each for each in here if each.kind == "module"):
        lines += [_module(entry), ""]
    for kind, describe in _DESCRIBED.items():
        for entry in (each for each in here if each.kind == kind):
            lines += [f"## {entry.name}", "", *describe(entry, described), ""]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip("\n") + "\n"


def _module(entry: Entry) -> str:
    """Return a link to a module's page or, if it has none, its public names."""
    name = entry.value.__name__
    if name in MODULES:
        return f"`{entry.name}` is [{name}]({MODULES[name]}.md)."
    names = ", ".join(f"`{each}`" for each in sorted(entry.value.__all__, key=str.lower))
    return "\n".join(textwrap.wrap(f"`{entry.name}` has {names}.", 120, break_on_hyphens=False))


def _list(title: str, links: Sequence[str]) -> list[str]:
    if not links:
        return []
    return [*textwrap.wrap(f"{title}: {', '.join(links)}.", 120, break_on_hyphens=False), ""]


def _link(name: str, module: str, from_module: str) -> str:
    """Return a link to a name's heading from a module's page; GitHub's anchors are in lower case."""
    page = "" if module == from_module else f"{MODULES[module]}.md"
    return f"[{name}]({page}#{name.lower()})"


# ---- kinds of names ----


def _class(entry: Entry, described: Described) -> Iterator[str]:
    """Yield a class: its signature, docstring, documented attributes and own methods."""
    cls = entry.value
    if cls.__name__ != entry.name:
        yield f"Another name of {_link(cls.__name__, described[id(cls)], entry.module)}."
        return
    yield from _code(f"class {entry.name}", _constructor(cls))
    shown = [base for base in cls.__bases__ if id(base) in described]
    if bases := [_link(base.__name__, described[id(base)], entry.module) for base in shown]:
        yield from (f"Extends {', '.join(bases)}.", "")
    yield from (*markdown(inspect.getdoc(cls) or ""), "")
    if issubclass(cls, Enum):
        yield from (f"Members: {', '.join(f'`{member.name}`' for member in cls)}.", "")
    for declaration, text in _attributes(cls):
        first, *rest = markdown(text)
        yield f"- `{declaration}`: {first}"
        yield from (f"  {line}".rstrip() for line in rest)
    yield ""
    for name, method in vars(cls).items():
        function = getattr(method, "__func__", method)
        if not name.startswith("_") and inspect.isfunction(function):
            kind = f"@{type(method).__name__}\n" if function is not method else ""
            yield from (f"### {entry.name}.{name}", "")
            bound = () if isinstance(method, staticmethod) else ("self", "cls")
            yield from _code(f"{kind}def {name}", inspect.signature(function), bound)
            yield from (*markdown(inspect.getdoc(getattr(cls, name)) or ""), "")


def _constructor(cls: type) -> inspect.Signature | None:
    """Return the signature of a class; None if dslpar does not define it, since it may vary with Python or torch."""
    own = [base for base in cls.__mro__ if base.__module__.partition(".")[0] == "dslpar"]
    defined = any(name in vars(base) for base in own for name in ("__init__", "__new__"))
    if not defined or issubclass(cls, Enum):
        return None
    return inspect.signature(cls).replace(return_annotation=inspect.Signature.empty)


def _attributes(cls: type) -> Iterator[tuple[str, str]]:
    """Yield `name: type` and docstring of the class's documented fields and properties, in their order."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    for statement, following in zip(definition.body, [*definition.body[1:], ast.Pass()], strict=True):
        if isinstance(statement, ast.AnnAssign):
            name, annotation = ast.unparse(statement.target), ast.unparse(statement.annotation)
            text = _string(following)
        elif isinstance(statement, ast.FunctionDef) and _is_property(vars(cls).get(statement.name)):
            name, annotation = statement.name, ast.unparse(statement.returns) if statement.returns else "Any"
            text = ast.get_docstring(statement)
        else:
            continue
        if text and not name.startswith("_"):
            yield f"{name}: {annotation}", inspect.cleandoc(text)


def _is_property(value: object) -> bool:
    return isinstance(value, (property, functools.cached_property))


def _string(statement: ast.stmt) -> str | None:
    """Return the value of a statement that is only a string: the docstring of what stands before it."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return statement.value.value if isinstance(statement.value.value, str) else None
    return None


def _function(entry: Entry, described: Described) -> Iterator[str]:
    yield from _code(f"def {entry.name}", inspect.signature(entry.value))
    yield from markdown(inspect.getdoc(entry.value) or "")


def _value(entry: Entry, described: Described) -> Iterator[str]:
    """Yield a value: a number as written, and for other values their class's docstring, below the value's own."""
    if isinstance(entry.value, (int, str)):
        yield from ("```python", f"{entry.name} = {entry.value!r}", "```", "")
    yield from (*markdown(_docstring_of_value(import_module(entry.module), entry.name)), "")
    if type(entry.value).__module__.startswith("dslpar"):
        yield from markdown(inspect.getdoc(type(entry.value)) or "")


def _docstring_of_value(module: ModuleType, name: str) -> str:
    """Return the string below a value's assignment, in the module that assigns it."""
    body = ast.parse(inspect.getsource(module)).body
    for statement, following in zip(body, [*body[1:], ast.Pass()], strict=True):
        if isinstance(statement, ast.Assign) and name in map(ast.unparse, statement.targets):
            return inspect.cleandoc(_string(following) or "")
    for node in ast.walk(ast.Module(body, [])):
        if isinstance(node, ast.ImportFrom) and {name, "*"} & {alias.name for alias in node.names}:
            other = import_module(str(node.module))
            if hasattr(other, name):
                return _docstring_of_value(other, name)
    raise LookupError(f"{module.__name__} neither assigns nor imports {name}")


_DESCRIBED = {"class": _class, "function": _function, "value": _value}


# ---- signatures ----

_POSITIONAL_ONLY, _KEYWORD_ONLY = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.KEYWORD_ONLY
_VAR_POSITIONAL, _VAR_KEYWORD = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
_STARS: dict[object, str] = {_VAR_POSITIONAL: "*", _VAR_KEYWORD: "**"}


def _code(head: str, signature: inspect.Signature | None, bound: Sequence[str] = ()) -> Iterator[str]:
    """Yield a block with a signature. `bound`: names that a first parameter has if a call does not pass it."""
    if signature is None:
        yield from ("```python", head, "```", "")
        return
    parameters = list(signature.parameters.values())
    if parameters and parameters[0].name in bound:
        del parameters[0]
    words = list(_parameters(parameters))
    returned = signature.return_annotation
    end = f") -> {_annotation(returned)}" if returned is not inspect.Signature.empty else ")"
    line = f"{head}({', '.join(words)}{end}"
    folded = [f"{head}(", *(f"    {word}," for word in words), end]
    short = len(line.splitlines()[-1]) <= WIDTH
    yield from ("```python", *([line] if short else folded), "```", "")


def _parameters(parameters: Sequence[inspect.Parameter]) -> Iterator[str]:
    """Yield each parameter as written, with `/` and `*` where they stand."""
    kinds = [parameter.kind for parameter in parameters]
    for index, parameter in enumerate(parameters):
        if parameter.kind is _KEYWORD_ONLY and not {_KEYWORD_ONLY, _VAR_POSITIONAL} & set(kinds[:index]):
            yield "*"
        annotation = "" if parameter.annotation is parameter.empty else f": {_annotation(parameter.annotation)}"
        equals = " = " if annotation else "="
        default = "" if parameter.default is parameter.empty else f"{equals}{_default(parameter.default)}"
        yield f"{_STARS.get(parameter.kind, '')}{parameter.name}{annotation}{default}"
        if parameter.kind is _POSITIONAL_ONLY and _POSITIONAL_ONLY not in kinds[index + 1 :]:
            yield "/"


def _annotation(annotation: Any) -> str:
    """Return an annotation as written; a NamedTuple has made forward references of its fields' annotations."""
    written = getattr(annotation, "__forward_arg__", annotation)
    return written if isinstance(written, str) else inspect.formatannotation(written)


def _default(value: object) -> str:
    """Return a default's text; `...` for a value whose text would hold an address."""
    return "..." if " at 0x" in repr(value) else repr(value)


# ---- docstrings ----

_SECTION = re.compile(r"(Args|Returns|Raises|Yields):$")
_ITEM = re.compile(r"([A-Za-z_]\w*(?:, [A-Za-z_]\w*)*): (?=\S)")
_TITLES = {"Args": "Arguments:", "Returns": "Returns:", "Raises": "Raises:", "Yields": "Yields:"}


def markdown(docstring: str) -> Iterator[str]:
    """Yield the lines of a docstring as Markdown.

    >>> print("\\n".join(markdown("Does it.\\n\\nx: [T, H],\\n    whole\\n\\nRaises:\\n    ValueError: x * y < 0")))
    Does it.
    <BLANKLINE>
    - `x`: [T, H],
      whole
    <BLANKLINE>
    Raises:
    <BLANKLINE>
    - `ValueError`: x \\* y \\< 0
    >>> print("\\n".join(markdown("Does it:\\n\\n    run(x * y)\\n\\n    end()")))
    Does it:
    <BLANKLINE>
    ```python
    run(x * y)
    <BLANKLINE>
    end()
    ```
    """
    paragraphs = _paragraphs(docstring.splitlines())
    for index, lines in enumerate(paragraphs):
        if index:
            yield ""
        if found := _SECTION.match(lines[0]):
            yield from _section(found[1], lines[1:])
        elif lines[0].startswith(">>> "):
            yield from ("```pycon", *lines, "```")
        elif lines[0].startswith("    "):
            yield from ("```python", *textwrap.dedent("\n".join(lines)).split("\n"), "```")
        elif index and _ITEM.match(lines[0]) and _are_items(lines):
            yield from _items(lines)
        elif lines[0].startswith("|"):
            yield from lines
        else:
            yield from escaped("\n".join(lines)).split("\n")


def _paragraphs(lines: Sequence[str]) -> list[list[str]]:
    """Return the paragraphs of a docstring; code with blank lines in it is one."""
    found: list[list[str]] = []
    blank = 0
    for line in lines:
        if not line.strip():
            blank += 1
        elif found and (not blank or (line.startswith("    ") and found[-1][0].startswith("    "))):
            found[-1] += [*[""] * blank, line]
            blank = 0
        else:
            found.append([line])
            blank = 0
    return found


def _section(title: str, lines: Sequence[str]) -> Iterator[str]:
    body = textwrap.dedent("\n".join(lines)).split("\n")
    yield _TITLES[title]
    yield ""
    if title in ("Args", "Raises"):
        yield from _items(body)
    else:
        yield from escaped("\n".join(body)).split("\n")


def _are_items(lines: Sequence[str]) -> bool:
    """Return whether each line begins an item or continues one."""
    return all(line.startswith("    ") or _ITEM.match(line) for line in lines)


def _items(lines: Sequence[str]) -> Iterator[str]:
    for line in escaped("\n".join(lines)).split("\n"):
        found = _ITEM.match(line)
        if found and not line.startswith(" "):
            names = ", ".join(f"`{name}`" for name in found[1].split(", "))
            yield f"- {names}: {line[found.end() :]}"
        else:
            yield f"  {line.strip()}"
