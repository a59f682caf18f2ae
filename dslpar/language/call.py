"""One call in a config: its arguments, where each was written, and what the called function needs of the evaluator."""

from __future__ import annotations

from collections.abc import Callable

from dslpar.core.errors import Location
from dslpar.language.limits import Budget, check_items
from dslpar.language.values import Dict, Origin, Unknown, Value, require_known

OpenConfig = Callable[[str, str, Location], Value]
"""Evaluates `get_config(name)`: from the name, the package that get_config is of, and where the name stands."""


class Call:
    """Arguments by position and by keyword, evaluated, with their origins."""

    __slots__ = ("args", "budget", "keyword_origins", "kwargs", "location", "locations", "open_config", "result_origin")

    def __init__(self, location: Location, budget: Budget, open_config: OpenConfig) -> None:
        self.args: list[Value] = []
        self.locations: list[Location] = []
        """Of the arguments by position."""
        self.kwargs: dict[str, Value] = {}
        self.keyword_origins: dict[str, tuple[Origin, Origin]] = {}
        """Of each keyword argument, its value's and its name's."""
        self.location = location
        self.result_origin: Origin = None
        """The origin of the result, where it is not the call itself."""
        self.budget = budget
        self.open_config = open_config

    def add_keyword(self, name: object, value: Value, location: Origin, key_location: Origin) -> None:
        """Add a keyword argument. Raises TypeError as Python does where it comes twice or is no string."""
        if not isinstance(name, str):
            raise TypeError("keywords must be strings")
        if name in self.kwargs:
            raise TypeError(f"got multiple values for keyword argument {name!r}")
        self.kwargs[name] = value
        self.keyword_origins[name] = (location, key_location)

    def positional(self, least: int, optional: int = 0, keywords: bool = False) -> list[Value]:
        """Return the positional arguments, filled up with None. Raises TypeError if there are too few or too many."""
        count = len(self.args)
        if self.kwargs and not keywords:
            raise TypeError(f"got an unexpected keyword argument {next(iter(self.kwargs))!r}")
        if not least <= count <= least + optional:
            wanted = str(least) if not optional else f"{least} to {least + optional}"
            raise TypeError(f"expected {wanted} arguments, got {count}")
        return self.args + [None] * (least + optional - count)

    def require_known(self) -> None:
        """Raise UnknownError if an argument is unknown: so is what depends on it."""
        require_known(*self.args, *self.kwargs.values())

    def merge_into(self, target: Dict) -> None:
        """Put into a dict what `dict(...)` and `update(...)` take: a mapping or pairs, and keyword arguments."""
        (source,) = self.positional(0, 1, keywords=True)
        if isinstance(source, Unknown):
            target.tainted = True
        elif self.args:
            target.merge(source, self.budget, self.locations[0])
        for name, value in self.kwargs.items():
            target.put(name, value, *self.keyword_origins[name])
        check_items(len(target))

    def with_args(self, args: list[Value]) -> Call:
        """Make another call at the same location."""
        call = Call(self.location, self.budget, self.open_config)
        call.args, call.locations = args, [self.location] * len(args)
        return call
