"""CFG101 and following: keys, types and values of the sections; `dslpar.schema.sections_reader` finds the mistakes."""

from __future__ import annotations

from collections.abc import Iterator

from dslpar.core.errors import WORLD, Location
from dslpar.linter.context import Context
from dslpar.linter.problem import Problem
from dslpar.linter.rule import rule


@rule("CFG101", "unknown-key")
def unknown_key(cx: Context) -> Iterator[Problem]:
    """An unknown key."""
    yield from cx.misreads("CFG101")


@rule("CFG102", "wrong-type")
def wrong_type(cx: Context) -> Iterator[Problem]:
    """A value of the wrong type."""
    yield from cx.misreads("CFG102")


@rule("CFG103", "out-of-range")
def out_of_range(cx: Context) -> Iterator[Problem]:
    """A value is outside of its key's range."""
    yield from cx.misreads("CFG103")


@rule("CFG104", "missing-key")
def missing_key(cx: Context) -> Iterator[Problem]:
    """A section lacks a required key."""
    yield from cx.misreads("CFG104")


@rule("CFG105", "misspelt-section")
def misspelt_section(cx: Context) -> Iterator[Problem]:
    """An unused top-level name resembles the name of a section."""
    yield from cx.misreads("CFG105")


@rule("CFG106", "unused-dict", "warning")
def unused_dict(cx: Context) -> Iterator[Problem]:
    """A top-level dict is neither used nor a section."""
    yield from cx.misreads("CFG106")


@rule("CFG107", "no-model")
def no_model(cx: Context) -> Iterator[Problem]:
    """The config has no model."""
    yield from cx.misreads("CFG107")


@rule("CFG108", "unknown-choice")
def unknown_choice(cx: Context) -> Iterator[Problem]:
    """An unknown type or choice."""
    yield from cx.misreads("CFG108")


# CFG109 reported keys that were not supported yet. Codes are never reused.


@rule("CFG110", "said-twice")
def said_twice(cx: Context) -> Iterator[Problem]:
    """A value is set twice, under two keys."""
    yield from cx.misreads("CFG110")


@rule("CFG111", "unknown-model", "info")
def unknown_model(cx: Context) -> Iterator[Problem]:
    """The model's layers are unknown to lint, so the rules about layers are skipped."""
    if cx.model.unlisted:
        skipped = "rules about layers and sizes are skipped"
        if not cx.model.by_program and cx.model.other.is_of_transformers:
            skipped = "rules about layers are skipped, and sizes are checked only if model.config has them"
        message = f"the layers of {cx.model.unlisted} are not known: {skipped}"
        yield cx.problem("model", message, "")


@rule("CFG112", "no-world-size", "info")
def no_world_size(cx: Context) -> Iterator[Problem]:
    """No world size is given, so the rules that need it are skipped."""
    if cx.world.size_if_given is None and cx.world.cluster is None:
        message = "no world size is given: rules that need it are skipped"
        yield Problem(Location(WORLD), message, "--world-size N, or --hostfile FILE")


@rule("CFG121", "key-of-another-framework")
def key_of_another_framework(cx: Context) -> Iterator[Problem]:
    """An unused top-level name is a key of another framework."""
    yield from cx.misreads("CFG121")


RULES = (
    unknown_key,
    wrong_type,
    out_of_range,
    missing_key,
    misspelt_section,
    unused_dict,
    no_model,
    unknown_choice,
    said_twice,
    unknown_model,
    no_world_size,
    key_of_another_framework,
)
