"""Write Python values as the text of a config, so that dicts from programs and converters are read like config files.

>>> print(config_text({"parallel": {"tensor": {"size": 4, "mode": "2d"}}, "zero": 1}), end="")
parallel = dict(tensor=dict(size=4, mode='2d'))
zero = 1
"""

from __future__ import annotations

import keyword
import math
from collections.abc import Mapping

from dslpar.core.visible import visible
from dslpar.language.lazy import as_reference
from dslpar.language.tree import Reference


def config_text(sections: Mapping[str, object]) -> str:
    """Write a config of these top-level names, one line per name.

    Raises:
        TypeError: a config cannot have such a name or value.
    """
    if not has_plain_names(sections):
        raise TypeError(f"the sections of a config are names, such as 'parallel', not {', '.join(map(repr, sections))}")
    return "".join(f"{name} = {source_text(value)}\n" for name, value in sections.items())


def source_text(value: object) -> str:
    """Write a value as the text of a config; a class or a function by its full name.

    Raises:
        TypeError: a config cannot have such a value.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    if isinstance(value, Mapping):
        if has_plain_names(value):
            return "dict(" + ", ".join(f"{key}={source_text(item)}" for key, item in value.items()) + ")"
        return "{" + ", ".join(f"{source_text(key)}: {source_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        items = ", ".join(map(source_text, value))
        ends = "[]" if isinstance(value, list) else "()"
        return ends[0] + items + ("," if isinstance(value, tuple) and len(value) == 1 else "") + ends[1]
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, Reference) or callable(value):
        return repr(as_reference(value).name)
    raise TypeError(f"a config holds numbers, text, lists, dicts and classes, not the {type(value).__name__} {value!r}")


def has_plain_names(value: Mapping[object, object] | Mapping[str, object]) -> bool:
    """Return whether all keys can be written as keywords of dict(...)."""
    names = (key for key in value if isinstance(key, str) and key.isidentifier() and visible(key) == key)
    return len(value) == sum(not keyword.iskeyword(name) for name in names)
