"""One call in a config: its arguments, where each was written, and what calls need of the evaluator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dslpar.core.errors import Location
from dslpar.language.codes import UnknownError
from dslpar.language.limits import Budget
from dslpar.language.tree import Reference
from dslpar.language.values import Dict, Place, Unknown


class Call:
    """Arguments by position and by keyword, evaluated, with their places."""

    __slots__ = ("args", "budget", "keyword_places", "kwargs", "open_config", "passed_on", "place", "places")

    def __init__(self, place: Location, budget: Budget, open_config: Callable[[str, Location], Any]) -> None:
        self.args: list[Any] = []
        self.places: list[Location] = []
        self.kwargs: dict[str, Any] = {}
        self.keyword_places: dict[str, tuple[Place, Place]] = {}
        self.place = place
        self.passed_on: Place = None
        """The origin of the result, where it is not the call itself."""
        self.budget = budget
        self.open_config = open_config

    def add_keyword(self, name: Any, value: Any, place: Place, key_place: Place) -> None:
        """Raises TypeError as Python does where a keyword comes twice or is no string."""
        if not isinstance(name, str):
            raise TypeError("keywords must be strings")
        if name in self.kwargs:
            raise TypeError(f"got multiple values for keyword argument {name!r}")
        self.kwargs[name] = value
        self.keyword_places[name] = (place, key_place)

    def positional(self, least: int, optional: int = 0, keywords: bool = False) -> list[Any]:
        """The positional arguments, filled up with None. Raises TypeError if there are too few or too many."""
        count = len(self.args)
        if self.kwargs and not keywords:
            raise TypeError(f"got an unexpected keyword argument {next(iter(self.kwargs))!r}")
        if not least <= count <= least + optional:
            wanted = str(least) if not optional else f"{least} to {least + optional}"
            raise TypeError(f"expected {wanted} arguments, got {count}")
        return self.args + [None] * (least + optional - count)

    def refuse_unknown(self) -> None:
        """What depends on an unknown argument is unknown."""
        if any(isinstance(value, Unknown) for value in (*self.args, *self.kwargs.values())):
            raise UnknownError

    def put_keywords(self, target: Dict) -> None:
        """The keyword arguments as items."""
        for name, value in self.kwargs.items():
            target.put(name, value, *self.keyword_places[name])

    def key_function(self) -> Callable[[Any], Any] | None:
        """The `key=` of sorted, min and max: one of the language's own functions."""
        key = self.kwargs.pop("key", None)
        if key is None:
            return None
        if isinstance(key, Unknown):
            raise UnknownError
        from dslpar.language.functions import call_function

        if not isinstance(key, Reference):
            raise TypeError(f"{type(key).__name__!r} object is not callable")
        return lambda item: call_function(key, self.derived([item]))

    def derived(self, args: list[Any]) -> Call:
        """Another call at the same place."""
        call = Call(self.place, self.budget, self.open_config)
        call.args, call.places = args, [self.place] * len(args)
        return call
