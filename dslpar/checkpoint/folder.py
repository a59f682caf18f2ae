"""The folder of a checkpoint: names, what is there, whether it is intact, how it is written and published. No torch.

    checkpoints/step_000005/checkpoint.json              the manifest; written last: with it the folder is a checkpoint
                            index.json                   which piece of which tensor lies where
                            tensors/00003.safetensors    what rank 3 has written of them
                            ranks/00003.pt               what belongs to that rank only
                            state.pt                     counters, LR scheduler, loss scaler
    checkpoints/step_000010.part/                        one that is being written, or never was finished
    checkpoints/step_000020.aside/                       one that was there when the run was resumed from before it

A folder is written under its `.part` name and renamed when all of it is on disk: the rename is the moment at which the
checkpoint exists. A `.part` folder belongs to nobody, is never read, and is removed by the next save. What cannot be
removed (on a network file system, a file that someone has open) is logged, and ends no run.

Each file is hashed while it is written, and the manifest holds every size and digest, and a digest of its own bytes. So
`verify` finds a changed byte anywhere before anything is read from the files. (torch's distributed checkpoints and
DeepSpeed's have no digests; the rename is what torch does to its metadata, here it is done to the whole folder.)
"""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

log = logging.getLogger("dslpar")

MANIFEST, RANKS, TENSORS, STATE, PART = "checkpoint.json", "ranks", "tensors", "state.pt", ".part"
_OLD, _ASIDE = ".old", ".aside"
FORMAT = 2
"""Format of the manifest and of the files beside it; this dslpar reads no other one."""

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
        return int(self.manifest["step"])


class FileDigest(NamedTuple):
    """Size and digest of a file, as the manifest lists them."""

    bytes: int
    xxh3_128: str


class ManifestError(ValueError):
    """A manifest that cannot be read; the text says why: "missing", "altered", "no JSON", ..."""


class Corruption(NamedTuple):
    """What is wrong with one file of a checkpoint."""

    path: str
    """Its path in the folder."""
    problem: str
    """"missing", "N bytes of M", "altered", "not of this checkpoint", or "unreadable: ..."."""

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}"


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
    try:
        text = (folder / MANIFEST).read_bytes()
        manifest = json.loads(text)
    except OSError as error:
        raise ManifestError("missing" if isinstance(error, FileNotFoundError) else str(error)) from error
    except ValueError as error:
        raise ManifestError("no JSON") from error
    if not isinstance(manifest, dict) or not {"format", "step", "fixed", "files"} <= manifest.keys():
        raise ManifestError("no manifest")
    # Format 1 had no digest: the caller refuses it by its number, which says more than "altered".
    if (manifest["format"] != 1 or "digest" in manifest) and not _digest_matches(text, manifest.get("digest")):
        raise ManifestError("altered")
    if step_of(folder) not in (None, manifest["step"]):
        raise ManifestError(f"of step {manifest['step']}, in {folder.name}")
    return Checkpoint(str(folder), manifest)


def _digest_matches(text: bytes, digest: object) -> bool:
    """Whether these are the bytes that `_serialize` made."""
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
    """Hash all bytes of a file, as `write_file` does. Raises: OSError."""
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


# ---- writing ----


def begin_save(root: Path, step: int) -> Path:
    """Remove what earlier saves left unfinished, and make the folder to write to."""
    root.mkdir(parents=True, exist_ok=True)
    fsync(root.parent)  # `root` may be new itself: else a power cut could lose it, with checkpoints that are on disk
    # A list first: what is removed must not change what is being listed.
    for unfinished in list(root.glob(f"step_*{PART}")):
        remove(unfinished)
    part = part_path(root, step)
    for name in (RANKS, TENSORS):
        (part / name).mkdir(parents=True)
    return part


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> FileDigest:
    """Write these bytes to a new file, hashed on the way; they are on disk when this returns. Raises: OSError."""
    # xxh3 is against flipped bits and lost ends, not against people, and many times faster than SHA-256.
    hashed, num_bytes = xxhash.xxh3_128(), 0
    # Unbuffered: chunks are large, and each goes to the system without a copy.
    with path.open("wb", buffering=0) as opened:
        for chunk in chunks:
            hashed.update(chunk)
            with memoryview(chunk) as data:  # released, since one that lives on would keep the tensor that it is of
                done = 0
                while done < len(data):  # the system may write less than it is given
                    done += os.write(opened.fileno(), data[done:])
                num_bytes += done
        os.fsync(opened.fileno())
    return FileDigest(num_bytes, hashed.hexdigest())


def publish(root: Path, manifest: Mapping[str, Any], written: Mapping[str, FileDigest]) -> Path:
    """Make the checkpoint of that manifest visible, all files of which are on disk. Return its folder.

    `written`: what `write_file` returned, by paths in the folder, of all ranks; nothing is read again.

    Raises:
        OSError: also where a file is missing, or has another length than was written.
    """
    part, final = part_path(root, manifest["step"]), final_path(root, manifest["step"])
    _check_written(part, written)
    listed = {name: written[name]._asdict() for name in sorted(written)}
    write_file(part / MANIFEST, [_serialize({**manifest, "files": listed})])
    # Ranks have synced their files; a file's name is in its folder, which needs a sync of its own. Only then may the
    # rename make it visible, and only the sync of `root` makes that last.
    fsync(*(path for path in (part, *part.rglob("*")) if path.is_dir()))
    replaced = _hide(final) if os.path.lexists(final) else None  # of this step: the run was resumed from before it
    part.rename(final)
    fsync(root)
    if replaced is not None:
        remove(replaced)
    return final


def _check_written(part: Path, written: Mapping[str, FileDigest]) -> None:
    """Raise OSError, unless these files are there, in their lengths, and no others."""
    found = file_sizes(part)
    for name in sorted({*written, *found}):
        expected = written[name].bytes if name in written else "no"
        if found.get(name, "no") != expected:
            raise OSError(f"{part / name}: {found.get(name, 'no')} bytes are there, and {expected} were written")


def _serialize(manifest: Mapping[str, Any]) -> bytes:
    """Return the manifest's bytes, with their own digest as last value: of all of them, with zeros in its place."""
    text = json.dumps({**manifest, "digest": _NO_DIGEST}, indent=1).encode() + b"\n"
    before, _, behind = text.rpartition(_NO_DIGEST.encode())
    return before + xxhash.xxh3_128_hexdigest(text).encode() + behind


def prune(root: Path, keep: int | None, step: int) -> None:
    """Keep the newest `keep` complete ones up to `step`, the one just saved, and remove older ones; None: keep all.

    An incomplete one is no copy to count on, one of a later step (the run was resumed from before it) least of all.
    Only lengths are compared: to read every byte of every checkpoint at each save would cost more than the save.
    """
    if keep is not None:
        candidates = [checkpoint for checkpoint in scan(root).checkpoints if checkpoint.step <= step]
        oldest_kept = [checkpoint.step for checkpoint in candidates if is_complete(checkpoint)][-keep:][0]
        for checkpoint in candidates:
            if checkpoint.step < oldest_kept:
                remove(Path(checkpoint.path))


def set_aside(root: Path, step: int) -> None:
    """Rename checkpoints of this step or a later one: the run was resumed from before it, and goes another way.

    The latest of them would be the newest, and the next resume would take it. (Megatron-LM and DeepSpeed name the last
    one written in a file of its own, for this reason.) Raises: OSError.
    """
    for path in list_folders(root):
        if (step_of(path) or 0) >= step:
            # Renamed, not removed: the earlier course of the run may be the one that somebody wants back.
            aside = path.rename(_unused_name(path, _ASIDE))
            log.warning("%s is not of this run, which was resumed from before it: it is %s now", path, aside.name)


def remove(folder: Path) -> None:
    """Remove a folder, or a link to one, if it is there: hidden first, since half a checkpoint must not be seen.

    What cannot be removed is logged; the next save tries again.
    """
    try:
        if os.path.lexists(folder):
            # A rename is atomic, rmtree is not: a kill between them leaves a hidden folder for the next save to remove.
            hidden = folder if _OLD in folder.suffixes else _hide(folder)
            if hidden.is_dir() and not hidden.is_symlink():
                shutil.rmtree(hidden)
            else:
                hidden.unlink()
    except OSError as error:
        log.warning("%s is not needed any more, and cannot be removed: %s", folder, error)


def _hide(folder: Path) -> Path:
    return folder.rename(_unused_name(folder.with_suffix(""), _OLD + PART))


def _unused_name(folder: Path, suffix: str) -> Path:
    """Return a name that nothing has yet: step_000020.old.part, step_000020.1.old.part, ..."""
    numbers = itertools.chain([""], map(".{}".format, itertools.count(1)))
    names = (folder.with_name(f"{folder.name}{number}{suffix}") for number in numbers)
    return next(path for path in names if not os.path.lexists(path))


def fsync(*paths: Path) -> None:
    """Bring what was written to these files and folders to the disk.

    A file system that cannot sync a folder (EINVAL) has nothing to bring there.
    """
    for path in paths:
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        except OSError as error:
            if error.errno != errno.EINVAL or not path.is_dir():
                raise
        finally:
            os.close(opened)
