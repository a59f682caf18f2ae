"""Call in a config: arguments, their origins, and the parts of the evaluator that the called function needs.

`dslpar.language.calls` evaluates the arguments of a call expression and builds its `Call`. The functions
(functions.py), methods (methods.py) and `LazyCall` (lazy_calls.py) of the language take it, and return the result.

- The *origin* of a value is the location in a file where it was written. None means that of its container.
- The `Budget` is the number of steps that the evaluation may still take (limits.py). A function pays for its work.
- A list or dict is *tainted* if it was changed in an unknown way. A key that it lacks is then unknown, and no error.
"""

from __future__ import annotations

from collections.abc import Callable

from dslpar.core.errors import Location
from dslpar.language.limits import Budget, check_items
from dslpar.language.values import Dict, Origin, Unknown, Value, require_known

OpenConfig = Callable[[str, str, Location], Value]
"""Evaluates `get_config(name)`; takes the name, the package that get_config was imported from, the name's location."""


class Call:
    """Evaluated positional and keyword arguments, with their origins."""

    __slots__ = ("args", "budget", "keyword_origins", "kwargs", "location", "locations", "open_config", "result_origin")

    def __init__(self, location: Location, budget: Budget, open_config: OpenConfig) -> None:
        self.args: list[Value] = []
        """Positional arguments."""
        self.locations: list[Location] = []
        """Origins of the positional arguments."""
        self.kwargs: dict[str, Value] = {}
        """Keyword arguments by name."""
        self.keyword_origins: dict[str, tuple[Origin, Origin]] = {}
        """Origins of each keyword argument's value and name."""
        self.location = location
        """Where the call is written."""
        self.result_origin: Origin = None
        """The origin of the result, if it is not the call itself."""
        self.budget = budget
        self.open_config = open_config

    def add_keyword(self, name: object, value: Value, location: Origin, key_location: Origin) -> None:
        """Add a keyword argument. Raises TypeError, as Python does, if it is repeated or is not a string."""
        if not isinstance(name, str):
            raise TypeError("keywords must be strings")
        if name in self.kwargs:
            raise TypeError(f"got multiple values for keyword argument {name!r}")
        self.kwargs[name] = value
        self.keyword_origins[name] = (location, key_location)

    def positional(self, least: int, optional: int = 0, keywords: bool = False) -> list[Value]:
        """Return the positional arguments, padded with None. Raises TypeError if there are too few or too many."""
        count = len(self.args)
        if self.kwargs and not keywords:
            raise TypeError(f"got an unexpected keyword argument {next(iter(self.kwargs))!r}")
        if not least <= count <= least + optional:
            wanted = str(least) if not optional else f"{least} to {least + optional}"
            raise TypeError(f"expected {wanted} arguments, got {count}")
        return self.args + [None] * (least + optional - count)

    def require_known(self) -> None:
        """Raise UnknownError if an argument is unknown, because the result would be unknown too."""
        require_known(*self.args, *self.kwargs.values())

    def merge_into(self, target: Dict) -> None:
        """Merge the arguments of `dict(...)` or `update(...)` (a mapping or pairs, and keywords) into a dict."""
        (source,) = self.positional(0, 1, keywords=True)
        if isinstance(source, Unknown):
            target.tainted = True
        elif self.args:
            target.merge(source, self.budget, self.locations[0])
        for name, value in self.kwargs.items():
            target.put(name, value, *self.keyword_origins[name])
        check_items(len(target))

    def with_args(self, args: list[Value]) -> Call:
        """Make a call with other arguments at the same location."""
        call = Call(self.location, self.budget, self.open_config)
        call.args, call.locations = args, [self.location] * len(args)
        return call
