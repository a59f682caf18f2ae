"""Certificates: the result of a proof as JSON, and a check that it still applies to a config. Imports no torch.

certificate.verdict, certificate.as_dict()
outdated(read(path), config, world_size)       # reasons why it does not speak of this config any more
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from dslpar.core.version import VERSION
from dslpar.language.load import Config

PROVED, DIFFERS, REFUSED = "proved", "differs", "refused"
STATUS: Mapping[str, int] = {PROVED: 0, DIFFERS: 1, REFUSED: 2}
"""Exit status of each verdict."""
_KEYS = ("verdict", "layout", "checks", "versions", "config_sha256")


_TYPES: Mapping[str, type] = {"verdict": str, "layout": dict, "checks": list, "versions": dict, "config_sha256": str}


class Certificate(NamedTuple):
    """The result of a proof, with the layout, the checks and the versions."""

    verdict: str
    layout: Mapping[str, Any]
    """World size and axes of the layout, and the small worlds in which it ran."""
    shrunk: tuple[str, ...]
    """Values that are smaller than in the config, or otherwise different."""
    not_proven: tuple[str, ...]
    """Parts of the config that the comparison does not cover."""
    checks: tuple[Mapping[str, Any], ...]
    first_difference: Mapping[str, Any] | None
    versions: Mapping[str, str]
    config_sha256: str
    """`digest` of the config and the world size."""
    findings: tuple[str, ...] = ()
    """Why the layout was refused."""
    request: Mapping[str, Any] = {}
    """Further options of the request: ranks, steps, full, resume_on."""

    def as_dict(self) -> dict[str, Any]:
        """Return the certificate as JSON values."""
        return {
            "verdict": self.verdict,
            "layout": dict(self.layout),
            "shrunk": list(self.shrunk),
            "not_proven": list(self.not_proven),
            "checks": [dict(each) for each in self.checks],
            "first_difference": None if self.first_difference is None else dict(self.first_difference),
            "versions": dict(self.versions),
            "config_sha256": self.config_sha256,
            **({"findings": list(self.findings)} if self.findings else {}),
            **({"request": dict(self.request)} if self.request else {}),
        }


class CertificateError(ValueError):
    """A file is not a certificate; the text gives the reason."""


def read(path: str | Path) -> dict[str, Any]:
    """Read a certificate. Raises CertificateError: the file cannot be read, or is not a certificate."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise CertificateError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        raise CertificateError(f"{path} is not valid JSON") from None
    missing = [key for key in _KEYS if not isinstance(value, dict) or key not in value]
    if missing:
        raise CertificateError(f"{path} is not a certificate of dslpar prove: it has no {', '.join(missing)}")
    wrong = [key for key, kind in _TYPES.items() if not isinstance(value[key], kind)]
    if wrong or not isinstance(value["layout"].get("world_size"), int):
        raise CertificateError(
            f"{path} is not a certificate of dslpar prove: {', '.join(wrong) or 'world_size'} has the wrong type"
        )
    return value  # type: ignore[no-any-return]


def digest(config: Config, world_size: int) -> str:
    """Return the SHA-256 of a config's content, after imports and overrides, and of the world size."""
    said = json.dumps([config.root.plain(), world_size], sort_keys=True, default=str)
    return hashlib.sha256(said.encode()).hexdigest()


def versions(transformers: bool = False) -> dict[str, str]:
    """Return the versions that a proof depends on."""
    found = {"dslpar": VERSION, "python": platform.python_version()}
    for name in ("torch", "deepspeed", *(("transformers",) if transformers else ())):
        found[name] = metadata.version(name)
    return found


def outdated(certificate: Mapping[str, Any], config: Config, world_size: int | None) -> list[str]:
    """Return why a certificate does not apply to this config, world size and versions; empty: it applies."""
    reasons = []
    if certificate["verdict"] != PROVED:
        reasons.append(f"its verdict is {certificate['verdict']!r}")
    if not certificate["checks"]:
        reasons.append("it has no check")
    world = certificate["layout"]["world_size"]
    if world_size is not None and world != world_size:
        reasons.append(f"it is for a world size of {world}, not {world_size}")
    if digest(config, world) != certificate["config_sha256"]:
        reasons.append(f"{config.path}, or one of its imports or overrides, has changed since")
    stored = certificate["versions"]
    own = versions(transformers="transformers" in stored)
    reasons += [
        f"it was made with {name} {stored.get(name)}, but {own[name]} is installed"
        for name in own
        if stored.get(name) != own[name]
    ]
    return reasons
