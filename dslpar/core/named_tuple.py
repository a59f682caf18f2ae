"""`NamedTuple`: the same as `typing.NamedTuple`, defined in a third of the time.

typing compiles every annotation to check that it is a type, which takes twice as long as all its other work. mypy
already checks the annotations, and sees typing's class here. `dslpar lint` defines two dozen such classes per start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import NamedTuple as NamedTuple
else:
    from collections import namedtuple

    class _NamedTupleType(type):
        def __new__(mcs, name, bases, body):
            if not bases:  # NamedTuple itself
                return super().__new__(mcs, name, bases, body)
            fields = body.get("__annotations__", {})
            defaults = [body.pop(field) for field in fields if field in body]
            made = namedtuple(name, fields, defaults=defaults, module=body.pop("__module__"))
            for attribute, value in body.items():
                setattr(made, attribute, value)
            return made

    class NamedTuple(metaclass=_NamedTupleType):
        """Base of classes whose annotated names become the fields of a tuple."""
