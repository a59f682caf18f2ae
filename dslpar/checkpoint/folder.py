"""The folder of a checkpoint: names, what is there, whether it is intact. No torch.

    checkpoints/step_000005/checkpoint.json              the manifest; written last: with it the folder is a checkpoint
                            index.json                   which piece of which tensor lies where
                            tensors/00003.safetensors    what rank 3 has written of them
                            ranks/00003.pt               what belongs to that rank only
                            state.pt                     counters, LR scheduler, loss scaler
    checkpoints/step_000010.part/                        one that is being written, or never was finished
    checkpoints/step_000020.aside/                       one that was there when the run was resumed from before it

Each file is hashed while it is written, and the manifest holds every size and digest, and a digest of its own bytes. So
`verify` finds a changed byte anywhere before anything is read from the files. (torch's distributed checkpoints and
DeepSpeed's have no digests.)
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from dslpar.checkpoint import manifest_format
from dslpar.checkpoint.manifest_format import FORMAT as FORMAT
from dslpar.core import json_values
from dslpar.core.catalog import finding, raise_finding
from dslpar.core.errors import DslparError

MANIFEST, RANKS, TENSORS, STATE, PART = "checkpoint.json", "ranks", "tensors", "state.pt", ".part"
SUSPECT = "suspect"
"""Key of a manifest: why the numbers of its checkpoint cannot be trusted, though its files are intact."""
_MAX_MANIFEST_BYTES = 1 << 28

_NO_DIGEST = "0" * 32
_READ_BYTES = 1 << 22


class Checkpoint(NamedTuple):
    """A published checkpoint, whose manifest is as it was written."""

    path: str
    """Its folder."""
    manifest: Mapping[str, Any]
    """`format`, `step`, `consumed_samples`, `fixed` (see `manifest`), `versions`, `files`, `digest`."""

    @property
    def step(self) -> int:
        """Optimizer steps that were done when it was saved."""
        step: int = self.manifest["step"]
        return step

    @property
    def suspect(self) -> str:
        """Why its numbers cannot be trusted; empty: nothing is known against them."""
        return str(self.manifest.get(SUSPECT, ""))


class FileDigest(NamedTuple):
    """Size and digest of a file, as the manifest lists them."""

    bytes: int
    xxh3_128: str


class ManifestError(ValueError):
    """A manifest that cannot be read; the text says why: "missing", "altered", "no JSON", ..."""


_UNREADABLE = " is no file of a checkpoint, or is corrupted: "


def unreadable(path: Path, why: str) -> DslparError:
    """Make the error of a checkpoint's file that cannot be read as what it should be."""
    message = f"{path}{_UNREADABLE}{why}"
    hint = "`dslpar checkpoint verify` names every corrupted file; resume from another one: checkpoint.resume_from=NAME"
    return DslparError([finding("CKP216", message, hint, str(path))])


class Corruption(NamedTuple):
    """What is wrong with one file of a checkpoint."""

    path: str
    """Its path in the folder."""
    problem: str
    """"missing", "N bytes of M", "altered", "not of this checkpoint", or "unreadable: ..."."""

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}"


def corruption_of(error: DslparError, folder: Path) -> Corruption:
    """Return what `unreadable` says of a file of that folder."""
    (found,) = error.findings
    why = found.message.removeprefix(f"{found.location.path}{_UNREADABLE}")
    return Corruption(os.path.relpath(found.location.path, folder), why)


def final_path(root: Path, step: int) -> Path:
    """Return the folder of a checkpoint of that step."""
    return root / f"step_{step:06d}"


def part_path(root: Path, step: int) -> Path:
    """Return the folder that it is written to first."""
    return final_path(root, step).with_suffix(PART)


def rank_path(folder: Path, rank: int) -> Path:
    """Return the file of what belongs to a rank only."""
    return folder / RANKS / f"{rank:05d}.pt"


def step_of(folder: Path) -> int | None:
    """Return the step in a folder's name; None: it has another name, as unfinished ones and those set aside have."""
    before, prefix, step = folder.name.partition("step_")
    return int(step) if prefix and not before and step.isdecimal() else None


# ---- what is there ----


def is_checkpoint(path: Path) -> bool:
    """Whether it is a checkpoint, or what is left of one, and not the folder of a run."""
    return (path / MANIFEST).exists() or (path.is_dir() and step_of(path) is not None)


def list_folders(root: Path) -> list[Path]:
    """Return the folders named as published checkpoints, oldest first; none, where there is no `root`.

    Raises:
        OSError: it cannot be read. (`Path.glob` finds nothing in a folder that it may not list, and a run would start
            anew.)
    """
    steps = {path: step_of(path) for path in (root.iterdir() if root.is_dir() else ()) if path.is_dir()}
    return [path for _, path in sorted((step, path) for path, step in steps.items() if step is not None)]


class Scan(NamedTuple):
    """The published checkpoints of a run."""

    checkpoints: list[Checkpoint]
    """Oldest first; their files may be intact or corrupted."""
    unreadable: dict[Path, str]
    """Folders whose manifest is missing, corrupted, or of another step; and why."""


def scan(root: Path) -> Scan:
    """Open every published checkpoint of a run. Raises: OSError: `root` cannot be read."""
    found = Scan([], {})
    for path in list_folders(root):
        try:
            found.checkpoints.append(open_checkpoint(path))
        except ManifestError as error:
            found.unreadable[path] = f"{MANIFEST}: {error}"
    return found


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint's manifest, and check that it is as it was written; for its files see `verify`.

    Raises:
        ManifestError: there is no manifest, it was altered, or is of another step than the folder's name says.
    """
    path = folder / MANIFEST
    try:
        if path.exists() and not path.is_file():  # to read a pipe would wait for ever
            raise ManifestError("no file")
        if path.stat().st_size > _MAX_MANIFEST_BYTES:
            raise ManifestError(f"more than {_MAX_MANIFEST_BYTES} bytes")
        text = path.read_bytes()
        manifest = json_values.parse(text)
        if not isinstance(manifest, dict) or not {"format", "step", "fixed", "files"} <= manifest.keys():
            raise ManifestError("no manifest")
        # Format 1 had no digest: the caller refuses it by its number, which says more than "altered".
        if (manifest["format"] != 1 or "digest" in manifest) and not _digest_matches(text, manifest.get("digest")):
            raise ManifestError("altered")
        manifest_format.check(manifest)  # who writes nonsense can sign it too
    except OSError as error:
        raise ManifestError("missing" if isinstance(error, FileNotFoundError) else str(error)) from error
    except ManifestError:
        raise
    except ValueError as error:
        raise ManifestError(str(error)) from error
    if step_of(folder) not in (None, manifest["step"]):
        raise ManifestError(f"of step {manifest['step']}, in {folder.name}")
    return Checkpoint(str(folder), manifest)


def serialize(manifest: Mapping[str, Any]) -> bytes:
    """Return the manifest's bytes, with their own digest as last value: of all of them, with zeros in its place."""
    text = json.dumps({**manifest, "digest": _NO_DIGEST}, indent=1).encode() + b"\n"
    before, _, behind = text.rpartition(_NO_DIGEST.encode())
    return before + xxhash.xxh3_128_hexdigest(text).encode() + behind


def _digest_matches(text: bytes, digest: object) -> bool:
    """Whether these are the bytes that `serialize` made."""
    if not isinstance(digest, str) or len(digest) != len(_NO_DIGEST):
        return False
    before, found, behind = text.rpartition(digest.encode())
    return bool(found) and xxhash.xxh3_128_hexdigest(before + _NO_DIGEST.encode() + behind) == digest


# ---- whether it is intact ----


def is_complete(checkpoint: Checkpoint) -> bool:
    """Whether every file is there in its full length: quick, and blind to altered bytes, which `verify` finds.

    A checkpoint of a later format counts as complete: this dslpar cannot know its files.
    """
    return checkpoint.manifest["format"] > FORMAT or not mismatched_files(checkpoint)


def mismatched_files(checkpoint: Checkpoint) -> list[str]:
    """Return the files that are missing, too many, or of another length, by their paths in the folder."""
    recorded, found = _recorded_files(checkpoint), file_sizes(Path(checkpoint.path))
    names = sorted({*recorded, *found})
    return [name for name in names if name not in recorded or recorded[name].bytes != found.get(name)]


def verify(checkpoint: Checkpoint, part: int = 0, parts: int = 1) -> list[Corruption]:
    """Read every byte of a checkpoint's files, and return what is wrong with them; [] if it is intact.

    Of `parts` readers each reads its share: together they name every corrupted file.
    """
    recorded, found = _recorded_files(checkpoint), file_sizes(Path(checkpoint.path))
    corruptions = [Corruption(MANIFEST, _manifest_problem(checkpoint))] if part == 0 else []
    # Dealt out, not in blocks: files of one kind follow each other, and are about equally large.
    for name in sorted({*recorded, *found})[part::parts]:
        path = Path(checkpoint.path, name)
        corruptions.append(Corruption(name, _file_problem(path, recorded.get(name), found.get(name))))
    return [corruption for corruption in corruptions if corruption.problem]


def _recorded_files(checkpoint: Checkpoint) -> dict[str, FileDigest]:
    """Return what the manifest lists; format 1 listed sizes only."""
    files = checkpoint.manifest["files"]
    return {name: FileDigest(file, "") if isinstance(file, int) else FileDigest(**file) for name, file in files.items()}


def _file_problem(path: Path, recorded: FileDigest | None, num_bytes: int | None) -> str:
    if recorded is None:
        return "not of this checkpoint"
    if num_bytes is None:
        return "missing"
    if num_bytes != recorded.bytes:
        return f"{num_bytes} bytes of {recorded.bytes}"
    try:
        return "altered" if file_digest(path) != recorded.xxh3_128 else ""
    except OSError as error:
        return f"unreadable: {error.strerror}"


def _manifest_problem(checkpoint: Checkpoint) -> str:
    try:
        return "" if open_checkpoint(Path(checkpoint.path)).manifest == checkpoint.manifest else "altered"
    except ManifestError as error:
        return str(error)


def file_digest(path: Path) -> str:
    """Hash all bytes of a file, as `writer.write_file` does. Raises: OSError."""
    hashed, buffer = xxhash.xxh3_128(), memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as opened:
        while count := opened.readinto(buffer):
            hashed.update(buffer[:count])
    return hashed.hexdigest()


def file_sizes(folder: Path) -> dict[str, int]:
    """Return the bytes of each file but the manifest, by its path in the folder."""
    found = {path.relative_to(folder).as_posix(): path.stat().st_size for path in list_files(folder)}
    return {name: num_bytes for name, num_bytes in found.items() if name != MANIFEST}


def list_files(folder: Path) -> list[Path]:
    """Return every file below, in the order of their names."""
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


# ---- whose numbers cannot be trusted ----


def note_of_suspect(stored: Checkpoint, *, was_named: bool, others: Sequence[Path] = ()) -> str:
    """Return what to say of a suspect checkpoint that somebody has named; of any other, nothing.

    Raises:
        DslparError: CKP232: it is suspect, and was chosen as the newest of a run, which has the `others`, too.
    """
    name = Path(stored.path).name
    if not stored.suspect:
        return ""
    if not was_named:
        good = next((path for path in reversed(others) if _is_trusted(path)), None)
        hint = f"take the one before it, {good}; or name this one" if good else "name it to take it all the same"
        raise_finding("CKP232", f"{name} is suspect: {stored.suspect}", hint, stored.path)
    return f"{name} is suspect, and is taken since it was named: {stored.suspect}"


def _is_trusted(path: Path) -> bool:
    try:
        return not open_checkpoint(path).suspect
    except ManifestError:
        return False
