"""Names and files of checkpoints; one place decides them. No torch.

    checkpoints/step_000005/checkpoint.json              the manifest; written last: with it the folder is a checkpoint
                            index.json                   which piece of which tensor lies where
                            tensors/00003.safetensors    what rank 3 has written of them
                            ranks/00003.pt               what is of that rank alone
                            state.pt                     counters, schedule, loss scaler
    checkpoints/step_000010.part/                        one that is being written, or never was finished
    checkpoints/step_000020.aside/                       one that was there when the run came from before it

A folder is written under its `.part` name and renamed when all of it is on disk: the rename is the moment at which the
checkpoint exists. Whatever ends in `.part` is nobody's, is never read, and goes at the next save. What cannot be
removed (on a network file system, a file that someone has open) is told, and ends no run.

Each file is hashed while it is written, and the manifest holds every size and digest, and a digest of its own bytes. So
a changed byte anywhere is found, by `verify`, before anything is read from the files. (torch's distributed checkpoints
and DeepSpeed's have no digests; the rename is what torch does to its metadata, here it is done to the whole.)
"""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

log = logging.getLogger("dslpar")

MANIFEST, RANKS, TENSORS, STATE, PART = "checkpoint.json", "ranks", "tensors", "state.pt", ".part"
_OLD, _ASIDE = ".old", ".aside"
FORMAT = 2
"""Of the manifest and of what stands beside it; another one is not read by this dslpar."""

_NO_DIGEST = "0" * 32
_READ_BYTES = 1 << 22


class Stored(NamedTuple):
    """A visible checkpoint, whose manifest is as it was written."""

    path: str
    """Its folder."""
    manifest: Mapping[str, Any]
    """`format`, `step`, `consumed_samples`, `fixed` (see `manifest`), `versions`, `files`, `digest`."""

    @property
    def step(self) -> int:
        """Optimizer steps that were done when it was saved."""
        return int(self.manifest["step"])


class Written(NamedTuple):
    """A file on disk."""

    bytes: int
    xxh3_128: str


class Damage(NamedTuple):
    """What is wrong with one file of a checkpoint."""

    path: str
    """In its folder."""
    what: str
    """"missing", "N bytes of M", "altered", "not of this checkpoint", or "unreadable: ..."."""

    def __str__(self) -> str:
        return f"{self.path}: {self.what}"


def final_path(root: Path, step: int) -> Path:
    """The folder of a checkpoint of that step."""
    return root / f"step_{step:06d}"


def part_path(root: Path, step: int) -> Path:
    """The folder that it is written to first."""
    return final_path(root, step).with_suffix(PART)


def rank_path(folder: Path, rank: int) -> Path:
    """What a rank keeps by itself."""
    return folder / RANKS / f"{rank:05d}.pt"


def step_of(folder: Path) -> int | None:
    """The step that a folder's name tells; None: it is named otherwise, as is one that is unready, or aside."""
    before, prefix, step = folder.name.partition("step_")
    return int(step) if prefix and not before and step.isdecimal() else None


# ---- what is there ----


def is_one(path: Path) -> bool:
    """Whether it is a checkpoint, or what is left of one, and not the folder of a run."""
    return (path / MANIFEST).exists() or (path.is_dir() and step_of(path) is not None)


def numbered(root: Path) -> list[Path]:
    """Folders named as visible checkpoints, oldest first; none, where there is no `root`.

    Raises:
        OSError: it cannot be read. (`Path.glob` finds nothing in a folder that it may not list, and a run would start
            anew.)
    """
    steps = {path: step_of(path) for path in (root.iterdir() if root.is_dir() else ()) if path.is_dir()}
    return [path for _, path in sorted((step, path) for path, step in steps.items() if step is not None)]


def visible(root: Path) -> list[Stored]:
    """All checkpoints that are there, oldest first, their files whole or damaged; see `unreadable` for the others."""
    return _folders(root)[0]


def unreadable(root: Path) -> dict[Path, str]:
    """Folders named as visible checkpoints, whose manifest is gone, damaged or another's: why, by the folder."""
    return _folders(root)[1]


def _folders(root: Path) -> tuple[list[Stored], dict[Path, str]]:
    found, damaged = [], {}
    for path in numbered(root):
        try:
            found.append(read(path))
        except (OSError, ValueError) as error:
            damaged[path] = f"{MANIFEST}: {why(error)}"
    return found, damaged


def read(folder: Path) -> Stored:
    """The checkpoint in a folder, once its manifest is known to be as it was written; its files: see `verify`.

    Raises:
        FileNotFoundError: it has no manifest.
        ValueError: what stands there is none, was altered, or is of another step than the folder's name says.
    """
    text = (folder / MANIFEST).read_bytes()
    manifest = json.loads(text)
    if not isinstance(manifest, dict) or not {"format", "step", "fixed", "files"} <= manifest.keys():
        raise ValueError("no manifest")
    if (manifest["format"] != 1 or "digest" in manifest) and not _is_as_written(text, manifest.get("digest")):
        raise ValueError("altered")
    if step_of(folder) not in (None, manifest["step"]):
        raise ValueError(f"of step {manifest['step']}, in {folder.name}")
    return Stored(str(folder), manifest)


def _is_as_written(text: bytes, digest: Any) -> bool:
    """Whether these are the bytes that `_signed` made."""
    if not isinstance(digest, str) or len(digest) != len(_NO_DIGEST):
        return False
    before, found, behind = text.rpartition(digest.encode())
    return bool(found) and xxhash.xxh3_128_hexdigest(before + _NO_DIGEST.encode() + behind) == digest


def why(error: Exception) -> str:
    """Why `read` has failed, in a few words."""
    if isinstance(error, FileNotFoundError):
        return "missing"
    return str(error) if isinstance(error, OSError) or type(error) is ValueError else "no JSON"


def is_whole(stored: Stored) -> bool:
    """Whether every file is there in its full length: quick, and blind to altered bytes, which `verify` finds.

    Of a later format nobody here can say.
    """
    return stored.manifest["format"] > FORMAT or not damaged_files(stored)


def damaged_files(stored: Stored) -> list[str]:
    """Files that are missing, too many, or of another length, by their paths in the folder."""
    wanted, found = _wanted(stored), sizes(Path(stored.path))
    return sorted(name for name in {*wanted, *found} if name not in wanted or wanted[name].bytes != found.get(name))


def verify(stored: Stored, part: int = 0, parts: int = 1) -> list[Damage]:
    """What is wrong with the files of a checkpoint, all bytes of which are read; [] if nothing is.

    Of `parts` readers each looks at its share: together they name every damaged file.
    """
    wanted, found = _wanted(stored), sizes(Path(stored.path))
    mine = sorted({*wanted, *found})[part::parts]
    told = [(name, _damage(Path(stored.path, name), wanted.get(name), found.get(name))) for name in mine]
    manifest = _damage_of_manifest(stored) if part == 0 else ""
    return [Damage(name, what) for name, what in ((MANIFEST, manifest), *told) if what]


def _wanted(stored: Stored) -> dict[str, Written]:
    """Format 1 had sizes alone."""
    files = stored.manifest["files"]
    return {name: Written(told, "") if isinstance(told, int) else Written(**told) for name, told in files.items()}


def _damage(path: Path, wanted: Written | None, num_bytes: int | None) -> str:
    if wanted is None:
        return "not of this checkpoint"
    if num_bytes is None:
        return "missing"
    if num_bytes != wanted.bytes:
        return f"{num_bytes} bytes of {wanted.bytes}"
    try:
        return "altered" if digest(path) != wanted.xxh3_128 else ""
    except OSError as error:
        return f"unreadable: {error.strerror}"


def _damage_of_manifest(stored: Stored) -> str:
    try:
        return "" if read(Path(stored.path)).manifest == stored.manifest else "altered"
    except (OSError, ValueError) as error:
        return why(error)


def digest(path: Path) -> str:
    """Of all bytes of a file, as `Written` has it. Raises: OSError."""
    hashed, buffer = xxhash.xxh3_128(), memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as opened:
        while count := opened.readinto(buffer):
            hashed.update(buffer[:count])
    return hashed.hexdigest()


def sizes(folder: Path) -> dict[str, int]:
    """Bytes of each file but the manifest, by its path in the folder."""
    found = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files(folder)}
    return {name: num_bytes for name, num_bytes in found.items() if name != MANIFEST}


def files(folder: Path) -> Iterator[Path]:
    """Every file below, in the order of their names."""
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


# ---- writing ----


def begin(root: Path, step: int) -> Path:
    """Removes what earlier saves left unfinished, and makes the folder to write to."""
    root.mkdir(parents=True, exist_ok=True)
    flush(root.parent)
    for left in list(root.glob(f"step_*{PART}")):
        remove(left)
    part = part_path(root, step)
    for name in (RANKS, TENSORS):
        (part / name).mkdir(parents=True)
    return part


def write(path: Path, chunks: Iterable[bytes | memoryview]) -> Written:
    """Writes these bytes to a new file, hashed on the way; they are on disk when this returns. Raises: OSError."""
    hashed, num_bytes = xxhash.xxh3_128(), 0
    with path.open("wb", buffering=0) as opened:
        for chunk in chunks:
            hashed.update(chunk)
            num_bytes += _write_all(opened.fileno(), memoryview(chunk))
        os.fsync(opened.fileno())
    return Written(num_bytes, hashed.hexdigest())


def _write_all(file: int, data: memoryview) -> int:
    """The system may write less than it is given."""
    done = 0
    while done < len(data):
        done += os.write(file, data[done:])
    return done


def publish(root: Path, manifest: Mapping[str, Any], written: Mapping[str, Written]) -> Path:
    """Makes the checkpoint of that manifest visible, all files of which are on disk. Returns its folder.

    `written`: what `write` returned, by paths in the folder, of all ranks; nothing is read again.

    Raises:
        OSError: also where a file is missing, or has another length than was written.
    """
    part, final = part_path(root, manifest["step"]), final_path(root, manifest["step"])
    _demand_written(part, written)
    listed = {name: written[name]._asdict() for name in sorted(written)}
    write(part / MANIFEST, [_signed({**manifest, "files": listed})])
    flush(*(path for path in (part, *part.rglob("*")) if path.is_dir()))
    before = _hidden(final) if os.path.lexists(final) else None  # the run was resumed from before it
    part.rename(final)
    flush(root)
    if before is not None:
        remove(before)
    return final


def _demand_written(part: Path, written: Mapping[str, Written]) -> None:
    """Raises OSError, unless these files are there, in their lengths, and no others."""
    found = sizes(part)
    for name in sorted({*written, *found}):
        expected = written[name].bytes if name in written else "no"
        if found.get(name, "no") != expected:
            raise OSError(f"{part / name}: {found.get(name, 'no')} bytes are there, and {expected} were written")


def _signed(manifest: Mapping[str, Any]) -> bytes:
    """Its bytes, with their own digest as the last value: of all of them, zeros in its place."""
    text = json.dumps({**manifest, "digest": _NO_DIGEST}, indent=1).encode() + b"\n"
    before, _, behind = text.rpartition(_NO_DIGEST.encode())
    return before + xxhash.xxh3_128_hexdigest(text).encode() + behind


def prune(root: Path, keep: int | None, step: int) -> None:
    """Leaves the newest `keep` whole ones up to `step`, the one just saved, and removes what is older; None: nothing.

    A damaged one is no copy to count on, one of a later step (the run was resumed from before it) least of all. Whole
    is what has its full length: to read every byte of every checkpoint at each save would cost more than the save.
    """
    if keep is not None:
        before = [stored for stored in visible(root) if stored.step <= step]
        oldest = [stored.step for stored in before if is_whole(stored)][-keep:][0]
        for stored in before:
            if stored.step < oldest:
                remove(Path(stored.path))


def set_aside(root: Path, step: int) -> None:
    """Renames what is of this step or a later one: the run was resumed from before it, and goes another way.

    The latest would be the newest, and the next resume would take it. Megatron-LM and DeepSpeed name the last that was
    written in a file of its own, for this reason. Raises: OSError.
    """
    for path in numbered(root):
        if (step_of(path) or 0) >= step:
            aside = path.rename(_free(path, _ASIDE))
            log.warning("%s is not of this run, which was resumed from before it: it is %s now", path, aside.name)


def remove(folder: Path) -> None:
    """Removes a folder, or a link to one, if it is there: at once invisible, since half a checkpoint must not be seen.

    What cannot be removed is told; the next save tries again.
    """
    try:
        if os.path.lexists(folder):
            _unlink(folder if _OLD in folder.suffixes else _hidden(folder))
    except OSError as error:
        log.warning("%s is not needed any more, and cannot be removed: %s", folder, error)


def _unlink(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _hidden(folder: Path) -> Path:
    return folder.rename(_free(folder.with_suffix(""), _OLD + PART))


def _free(folder: Path, end: str) -> Path:
    """A name that nothing has yet: step_000020.old.part, step_000020.1.old.part, ..."""
    numbers = itertools.chain([""], map(".{}".format, itertools.count(1)))
    named = (folder.with_name(f"{folder.name}{number}{end}") for number in numbers)
    return next(path for path in named if not os.path.lexists(path))


def flush(*paths: Path) -> None:
    """What was written to these files and folders is on disk when this returns.

    A file system that knows no such thing of a folder (EINVAL) has nothing to bring there.
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
