"""The paths that a config names: which of them a run reads, which are missing, and what a missing one may mean.

    missing(job.spec, job.path)      # findings, one for each path that is not on this machine

Lint warns of a missing path only if its parent folder is here, since a disk of the job's hosts may not be mounted. Where
a run starts, each missing path is an error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from dslpar.core.catalog import finding
from dslpar.core.errors import DslparError, Finding
from dslpar.core.suggest import nearest
from dslpar.schema.datasets import Data, HuggingFaceData, TokensData, parts_by_key
from dslpar.schema.sections import OtherModel, Spec

_OF_DATA = ("tokenizer", "path", "labels", "eval_path")
"""Keys of a data set that name one path each; `files` names several. (BAT118 reads a chat's `template`.)"""
_OF_MEGATRON = (".idx", ".bin")
"""Suffixes that the path of Megatron-LM's token files may lack."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_MOST_NAMES = 1000
"""Limit for the names of a folder that are compared with a missing one."""


class NamedPath(NamedTuple):
    """A path that a config names."""

    key: str
    """Dotted key, without the index of an item."""
    index: int | None
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
        close = nearest(parts[known], _names_in(folder), cutoff=0.7)
        found = None if close is None else os.path.join(folder, close, *parts[known + 1 :])
        if found is None or not os.path.exists(found):
            return ""
        return found if os.path.isabs(self.written) else os.path.relpath(found, self.base)


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


def paths_of_data(spec: Spec, config_path: str) -> Iterator[NamedPath]:
    """Yield the paths of the section `data`."""
    base = _base(config_path)
    for section, data in parts_by_key(spec.data):
        for index, name in enumerate(data.files or ()):
            yield _named(f"{section}.files", index, name, base)
        for key in _OF_DATA:
            if (name := getattr(data, key, None)) is not None:
                yield _named(f"{section}.{key}", None, name, base)._replace(**_kind(key, data))


def _base(config_path: str) -> str:
    return os.path.dirname(os.path.abspath(config_path))


def _named(key: str, index: int | None, written: str, base: str) -> NamedPath:
    return NamedPath(key, index, written, os.path.normpath(os.path.join(base, written)), base)


def _kind(key: str, data: Data) -> dict[str, Any]:
    if key == "tokenizer" or (key == "path" and isinstance(data, HuggingFaceData)):
        return {"of_hub": True}
    return {"suffixes": _OF_MEGATRON} if isinstance(data, TokensData) else {}


def pretrained_of(spec: Spec) -> str | None:
    """Return the absolute path of the folder with the model's initial weights; None if they are random."""
    model = spec.model
    folder = model.args.get("pretrained") if isinstance(model, OtherModel) else getattr(model, "pretrained", None)
    return folder if isinstance(folder, str) and (not isinstance(model, OtherModel) or model.is_of_transformers) else None


def missing(spec: Spec, config_path: str) -> list[Finding]:
    """Return an error for each path that is not on this machine, for a run that starts on it."""
    found = []
    for each in named_paths(spec, config_path):
        if each.is_missing:
            code, otherwise = _OF_MODEL if each.key == "model.pretrained" else _OF_OTHERS
            hint = each.hint(otherwise)
            key = each.key if each.index is None else f"{each.key}.{each.index}"
            found.append(finding(code, each.message, hint, config_path, key))
    return found


def check(spec: Spec, config_path: str) -> None:
    """Raise an error for all paths that are not on this machine. Raises: DslparError."""
    if found := missing(spec, config_path):
        raise DslparError(found)


_OF_MODEL = "CKP205", "name a folder that transformers' save_pretrained wrote, by its path from the config's folder"
_OF_OTHERS = "BAT201", "name a path from the config's folder"
"""Code and help of a missing path."""


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
