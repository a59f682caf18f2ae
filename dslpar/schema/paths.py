"""The paths that a config names: which of them a run reads, which are missing, and what a missing one may mean.

    check(named_paths(job.spec, job.path), job.path)     # raises an error for each path that is not on this machine

Lint warns of a missing path only if its parent folder is here, since a disk of the job's hosts may not be mounted. At
the start of a run, each missing path is an error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from dslpar.core.catalog import finding
from dslpar.core.errors import DslparError, Finding
from dslpar.core.suggest import nearest_first
from dslpar.schema.datasets import Data, HuggingFaceData, TokensData, parts_by_key
from dslpar.schema.sections import OtherModel, Spec

_KEYS_OF_DATA = ("tokenizer", "path", "labels", "eval_path")
"""Keys of a data set that name one path each; `files` names several. (BAT118 reads a chat's `template`.)"""
_OF_MEGATRON = (".idx", ".bin")
"""Suffixes that the path of Megatron-LM's token files may lack."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_MOST_TRIED = 5
"""Limit for the names in place of a missing one that are tried."""
_MOST_NAMES = 1000
"""Limit for the names of a folder that are compared with a missing one."""


class NamedPath(NamedTuple):
    """A path that a config names."""

    key: str
    """Dotted key, without the index of an item."""
    item: int | None
    """Index in the list at `key`; None: the key has a single path."""
    written: str
    """The path as the author wrote it."""
    path: str
    """The absolute path."""
    base: str
    """The config's folder."""
    of_hub: bool = False
    """Whether people also write the name of something on a hub here."""
    suffixes: tuple[str, ...] = ()
    """Suffixes that the path may lack."""

    @property
    def is_missing(self) -> bool:
        """Return whether nothing has the path on this machine."""
        return not any(os.path.exists(self.path + suffix) for suffix in ("", *self.suffixes))

    @property
    def on_hosts(self) -> str:
        """The path for which other hosts look; empty if it is missing here and may lack a suffix."""
        found = (self.path + suffix for suffix in ("", *self.suffixes) if os.path.exists(self.path + suffix))
        return next(found, "" if self.suffixes else self.path)

    @property
    def is_mistaken(self) -> bool:
        """Return whether the path cannot be right on another machine either, if it is missing on this one.

        A disk of the job's hosts may not be mounted here, so a missing parent folder proves nothing by itself.
        """
        return os.path.isdir(os.path.dirname(self.path)) or self.is_hub_id or bool(self.near)

    @property
    def message(self) -> str:
        """Say that the path is missing."""
        hub = ", and hub ids are not read" if self.is_hub_id else ""
        return f"no such file or folder {visible_path(self.path)!r}{hub}"

    @property
    def is_hub_id(self) -> bool:
        """Return whether the path looks like a name on Hugging Face's hub: 'organisation/model'."""
        return self.of_hub and _HUB_ID.fullmatch(self.written) is not None

    def hint(self, otherwise: str) -> str:
        """Return the help for a missing path: the path that it must mean, or how to get what it names."""
        if self.near:
            return f"did you mean {self.near!r}?"
        if self.is_hub_id:
            return f"download it (hf download {self.written} --local-dir FOLDER) and name the folder"
        return otherwise

    @property
    def near(self) -> str:
        """Return what the author may have meant to write; empty if nothing is near."""
        if not os.path.isabs(self.written) and os.path.exists(self.written):  # relative to the working folder
            return os.path.relpath(self.written, self.base)
        parts = os.path.normpath(self.path).split(os.sep)
        known = next(end for end in range(len(parts), 0, -1) if os.path.isdir(os.sep.join(parts[:end]) or os.sep))
        folder = os.sep.join(parts[:known]) or os.sep
        if known == len(parts):
            return ""
        # If the rest of the path exists below it, a folder may be less similar.
        cutoff = 0.7 if known == len(parts) - 1 else 0.5
        close = nearest_first(parts[known], _names_in(folder), _MOST_TRIED, cutoff)
        made = (os.path.join(folder, name, *parts[known + 1 :]) for name in close)
        found = next((path for path in made if os.path.exists(path)), "")
        return found if not found or os.path.isabs(self.written) else os.path.relpath(found, self.base)


def named_paths(spec: Spec, config_path: str) -> Iterator[NamedPath]:
    """Yield the paths that a run of `spec` reads, in the order of the sections."""
    if (folder := pretrained_folder(spec, config_path)) is not None:
        yield folder
    yield from paths_of_data(spec, config_path)


def pretrained_folder(spec: Spec, config_path: str) -> NamedPath | None:
    """Return the folder with the model's initial weights; None if they are random."""
    folder, base = pretrained_of(spec), _base(config_path)
    if folder is None:
        return None
    relative = os.path.relpath(folder, base)
    written = folder if relative.startswith(os.pardir) else relative
    return NamedPath("model.pretrained", None, written, folder, base, of_hub=True)


def resumed_checkpoint(spec: Spec) -> NamedPath | None:
    """Return the checkpoint that `checkpoint.resume_from` names by its path, from the working folder; else None."""
    written = spec.checkpoint.resume_from
    if "/" not in written:
        return None
    return NamedPath("checkpoint.resume_from", None, written, os.path.abspath(written), os.getcwd())


def paths_of_data(spec: Spec, config_path: str) -> Iterator[NamedPath]:
    """Yield the paths of the section `data`."""
    base = _base(config_path)
    for section, data in parts_by_key(spec.data):
        for number, name in enumerate(data.files or ()):
            yield _named(f"{section}.files", number, name, base)
        for key in _KEYS_OF_DATA:
            if (path := getattr(data, key, None)) is not None:
                yield _named(f"{section}.{key}", None, path, base)._replace(**_kind(key, data))


def _base(config_path: str) -> str:
    return os.path.dirname(os.path.abspath(config_path))


def _named(key: str, item: int | None, written: str, base: str) -> NamedPath:
    return NamedPath(key, item, written, os.path.normpath(os.path.join(base, written)), base)


def _kind(key: str, data: Data) -> dict[str, Any]:
    if key == "tokenizer" or (key == "path" and isinstance(data, HuggingFaceData)):
        return {"of_hub": True}
    return {"suffixes": _OF_MEGATRON} if isinstance(data, TokensData) else {}


def pretrained_of(spec: Spec) -> str | None:
    """Return the absolute path of the folder with the model's initial weights; None if they are random."""
    model = spec.model
    folder = model.args.get("pretrained") if isinstance(model, OtherModel) else getattr(model, "pretrained", None)
    return (
        folder if isinstance(folder, str) and (not isinstance(model, OtherModel) or model.is_of_transformers) else None
    )


def check(named: Iterable[NamedPath], config_path: str) -> None:
    """Check that these paths are on this machine, where a run starts. Raises: DslparError: with all that are not."""
    if found := [_missing(each, config_path) for each in named if each.is_missing]:
        raise DslparError(found)


def _missing(named: NamedPath, config_path: str) -> Finding:
    code, otherwise = _FINDINGS.get(named.key, _OF_DATA)
    key = named.key if named.item is None else f"{named.key}.{named.item}"
    return finding(code, named.message, named.hint(otherwise), config_path, key)


_OF_DATA = "BAT201", "name a path from the config's folder"
_FINDINGS = {
    "model.pretrained": (
        "CKP205",
        "name a folder that transformers' save_pretrained wrote, by its path from the config's folder",
    ),
    "checkpoint.resume_from": ("CKP209", "name a checkpoint that exists, by its path from this folder"),
}
"""Key -> code and help of a missing path; `_OF_DATA` for the keys of data."""


def _names_in(folder: str) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for _, entry in zip(range(_MOST_NAMES), entries, strict=False)]
    except OSError:
        return []


def visible_path(path: str) -> str:
    """Return a path for a message: relative if it is below the working folder."""
    relative = os.path.relpath(path)
    return path if relative.startswith(os.pardir) else relative
