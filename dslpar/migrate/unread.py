"""The value of a key that exists in a source, but could not be evaluated: what is unknown stays unknown."""

from __future__ import annotations


class Unread:
    """Value of a key that exists but could not be evaluated."""

    def __repr__(self) -> str:
        return "(not evaluated)"


UNREAD = Unread()


class UnreadError(Exception):
    """A conversion asked for the value of another key that could not be evaluated: what is unknown stays unknown."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key
