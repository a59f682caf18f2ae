"""CFG122: what a config may have imported and called."""

from __future__ import annotations

import os.path
from collections.abc import Iterator

from dslpar.core.errors import DslparError
from dslpar.core.project import find_project
from dslpar.language.tree import Node
from dslpar.linter.context import Context
from dslpar.linter.problem import Problem
from dslpar.linter.rule import rule


@rule("CFG122", "untrusted-target")
def untrusted_target(cx: Context) -> Iterator[Problem]:
    """A call of what is neither of a known kind nor of a trusted package; or a section's class that can be none."""
    sections = (
        cx.config.root.value.get(name) for name in ("model", "data", "optimizer", "lr_scheduler", "gradient_handler")
    )
    if not any(section is not None and _may_call(section) for section in sections):
        return
    from dslpar.linter.targets import targets_of  # most configs name none but dslpar's and torch's

    for target in targets_of(cx.config.root, cx.trusted):
        if not target.allowed_by:
            hint = target.hint + _vouched_for_by_itself(cx, target.name)
            yield Problem(target.location, target.message, hint, target.key)


def _vouched_for_by_itself(cx: Context, name: str) -> str:
    """Say that a pyproject.toml which came with the config trusts a target, and why that does not count."""
    from dslpar.core.trust import trusting

    try:
        project = find_project(os.path.dirname(cx.config.path))
    except DslparError:  # of somebody else's folder, which is not what is linted here
        return ""
    if project is None or not trusting(name, project.trusted):
        return ""
    return f" (the trusted of {project.path} counts where you work in its folder: no config vouches for itself)"


def _may_call(section: Node) -> bool:
    """Whether a section names a class in full, or has arguments that are no plain values."""
    if section.target is not None or not section.is_mapping:
        return True
    return any(
        node.is_mapping or isinstance(node.value, (list, tuple)) or (key == "type" and "." in str(node.value))
        for key, node in section.value.items()
    )


RULES = (untrusted_target,)
