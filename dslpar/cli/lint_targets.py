"""`dslpar lint --targets`: list every class and function that a run of a config would import or call (its targets)."""

from __future__ import annotations

from collections.abc import Iterable

from dslpar.core.project import trusted_packages
from dslpar.core.visible import json_text, visible
from dslpar.language.load import Config
from dslpar.linter.imported_classes import targets_of


def listing(configs: Iterable[Config], form: str) -> tuple[str, bool]:
    """Return all configs' targets as text or JSON, and whether one of them is refused."""
    targets = [target for config in configs for target in targets_of(config.root, trusted_packages(config.trusted))]
    refused = any(not target.allowed_by for target in targets)
    if form == "json":
        records = [
            {"target": target.name, "key": target.key, "purpose": target.purpose}
            | {"allowed_by": target.allowed_by or None, "message": target.message, "help": target.hint}
            | target.location._asdict()
            for target in targets
        ]
        return json_text(records), refused
    lines = [
        f"{target.location}: {target.name} for {target.key}: {target.allowed_by or f'refused: {target.message}'}"
        for target in dict.fromkeys(targets)
    ]
    text = "".join(visible(line) + "\n" for line in lines)
    return text or "no targets: nothing of other packages is imported\n", refused
