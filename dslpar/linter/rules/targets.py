"""CFG122: the classes and functions that a config may import and call."""

from __future__ import annotations

import os.path
from collections.abc import Iterator

from dslpar.core.errors import DslparError
from dslpar.core.project import find_project, trusted_packages
from dslpar.language.tree import Node
from dslpar.linter.context import Context
from dslpar.linter.problem import Problem
from dslpar.linter.rule import rule


@rule("CFG122", "untrusted-target")
def untrusted_target(cx: Context) -> Iterator[Problem]:
    """The config calls a class or function that is not trusted, or a section's class is from the standard library."""
    sections = (
        cx.config.root.value.get(name) for name in ("model", "data", "optimizer", "lr_scheduler", "gradient_handler")
    )
    if not any(section is not None and _may_call(section) for section in sections):
        return
    from dslpar.linter.imported_classes import targets_of  # most configs name only dslpar's and torch's classes

    for target in targets_of(cx.config.root, trusted_packages(cx.config.trusted)):
        if not target.allowed_by:
            hint = target.hint + _vouched_for_by_itself(cx, target.name)
            yield Problem(target.location, target.message, hint, target.key)


def _vouched_for_by_itself(cx: Context, name: str) -> str:
    """Return a note for the hint if the pyproject.toml of the config's folder trusts the target; else empty.

    Only the pyproject.toml of the working folder counts, so that a config cannot trust packages for itself.
    """
    from dslpar.core.trust import trusted_entry

    try:
        project = find_project(os.path.dirname(cx.config.path))
    except DslparError:  # a mistake in that pyproject.toml; this lint is about the config
        return ""
    if project is None or not trusted_entry(name, project.trusted):
        return ""
    return f" ({project.path} trusts it, but counts only if you work in its folder: a config cannot trust packages)"


def _may_call(section: Node) -> bool:
    """Return whether a section has a dotted class name, or arguments that are not plain values."""
    if section.target is not None or not section.is_mapping:
        return True
    return any(
        node.is_mapping or isinstance(node.value, (list, tuple)) or (key == "type" and "." in str(node.value))
        for key, node in section.value.items()
    )


RULES = (untrusted_target,)
