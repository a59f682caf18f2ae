"""Write the folder of a checkpoint and publish it atomically. No torch.

A folder is written under its `.part` name and renamed when all of it is on disk: the checkpoint exists from the rename
on. A `.part` folder is never read, and the next save removes it. A folder that cannot be removed (on a network file
system, because someone has a file open) is logged, and does not end the run. (torch's distributed checkpoints rename
their metadata in this way. Here the whole folder is renamed.)
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

from dslpar.checkpoint import folder
from dslpar.checkpoint.folder import MANIFEST, PART, RANKS, TENSORS, FileDigest
from dslpar.core.catalog import finding, raise_finding
from dslpar.core.errors import DslparError
from dslpar.core.fsync import fsync as fsync

log = logging.getLogger("dslpar")

_OLD, _ASIDE = ".old", ".aside"


def begin_save(root: Path, step: int) -> Path:
    """Remove what earlier saves left unfinished, and make the folder to write to."""
    root.mkdir(parents=True, exist_ok=True)
    fsync(root.parent)  # `root` may be new itself: a power cut could lose it, with checkpoints that are on disk
    # A list first: removals must not change the listing.
    for unfinished in list(root.glob(f"step_*{PART}")):
        remove(unfinished)
    part = folder.part_path(root, step)
    for name in (RANKS, TENSORS):
        (part / name).mkdir(parents=True)
    return part


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> FileDigest:
    """Write and hash these bytes to a new file; they are on disk when this returns. Raises: OSError."""
    # xxh3 protects against flipped bits and lost ends, not against people. It is many times faster than SHA-256.
    hashed, num_bytes = xxhash.xxh3_128(), 0
    # Unbuffered: chunks are large, and each goes to the system without a copy.
    with path.open("wb", buffering=0) as opened:
        for chunk in chunks:
            hashed.update(chunk)
            with memoryview(chunk) as data:  # released, since a living view would keep its tensor alive
                done = 0
                while done < len(data):  # the system may write only a part
                    done += os.write(opened.fileno(), data[done:])
                num_bytes += done
        os.fsync(opened.fileno())
    return FileDigest(num_bytes, hashed.hexdigest())


def publish(root: Path, manifest: Mapping[str, Any], written: Mapping[str, FileDigest]) -> Path:
    """Publish the checkpoint of `manifest`, whose files are all on disk. Return its folder.

    `written`: results of `write_file` from all ranks, by path in the folder. No file is read again.

    Raises:
        OSError: also if a file is missing, unexpected, or not of the length that was written.
    """
    part, final = folder.part_path(root, manifest["step"]), folder.final_path(root, manifest["step"])
    _check_written(part, written)
    listed = {name: written[name]._asdict() for name in sorted(written)}
    write_file(part / MANIFEST, [folder.serialize({**manifest, "files": listed})])
    # Ranks have synced their files. File names are in the folders, which need their own sync before the rename. The
    # rename itself lasts only after the sync of `root`.
    fsync(*(path for path in (part, *part.rglob("*")) if path.is_dir()))
    replaced = _hide(final) if os.path.lexists(final) else None  # the run was resumed from before this step
    part.rename(final)
    fsync(root)
    if replaced is not None:
        remove(replaced)
    return final


def _check_written(part: Path, written: Mapping[str, FileDigest]) -> None:
    """Raise OSError unless the folder has exactly these files in these lengths."""
    found = folder.file_sizes(part)
    for name in sorted({*written, *found}):
        expected = written[name].bytes if name in written else "no"
        if found.get(name, "no") != expected:
            raise OSError(f"{part / name}: {found.get(name, 'no')} bytes are there, and {expected} were written")


def prune(root: Path, keep: int | None, step: int, confirmed_step: int | None = None) -> None:
    """Keep the newest `keep` complete checkpoints up to `step`, which was just saved; remove older ones.

    keep: None keeps all. Incomplete and suspect checkpoints do not count as kept, nor do those of a later step (the run
    was resumed from before it). Only lengths are compared, since reading every byte of all checkpoints would cost more
    than the save.

    confirmed_step: last step up to which replicas are known to have been equal. The newest checkpoint up to it is kept
    too, since all later ones may turn out to be suspect. None: replicas are not compared.
    """
    if keep is None:
        return
    candidates = [checkpoint for checkpoint in folder.scan(root).checkpoints if checkpoint.step <= step]
    good = [each.step for each in candidates if folder.is_complete(each) and not each.suspect]
    confirmed = [each for each in good if confirmed_step is not None and each <= confirmed_step][-1:]
    for checkpoint in candidates:
        if good and checkpoint.step < good[-keep:][0] and checkpoint.step not in confirmed:
            remove(Path(checkpoint.path))


def set_aside(root: Path, step: int) -> None:
    """Rename checkpoints of `step` or later, left from before the run was resumed at an earlier step.

    Otherwise the next resume would take one of them as the newest. (For this reason Megatron-LM and DeepSpeed name the
    checkpoint written last in a separate file.) Raises: OSError.
    """
    for path in folder.list_folders(root):
        if (folder.step_of(path) or 0) >= step:
            # Renamed, not removed: somebody may want the earlier course of the run back.
            aside = path.rename(_unused_name(path, _ASIDE))
            log.warning("%s is not of this run, which was resumed from before it: it is %s now", path, aside.name)


def mark_suspect(path: Path, reason: str) -> None:
    """Record in a published checkpoint's manifest why its numbers cannot be trusted, though its files are intact.

    A failure to mark it is logged, not raised: it must not hide why the run ends.
    """
    try:
        stored = folder.open_checkpoint(path)
        # Written beside the folder, under a name that the next save removes if a kill leaves it. Then renamed over the
        # manifest, so that the checkpoint has either the old or the new manifest.
        part = path.with_suffix(f".suspect{PART}")
        values = {key: value for key, value in stored.manifest.items() if key != "digest"}
        write_file(part, [folder.serialize({**values, folder.SUSPECT: reason})])
        part.replace(path / MANIFEST)
        fsync(path)
    except (OSError, folder.ManifestError) as error:
        log.warning("%s cannot be marked as suspect: %s", path, error)


def remove(path: Path) -> None:
    """Remove a folder or a link to one, if it exists. It is hidden first, since half a checkpoint must not be visible.

    A failure is logged; the next save tries again.
    """
    try:
        if os.path.lexists(path):
            # A rename is atomic, rmtree is not. A kill between them leaves a hidden folder for the next save to remove.
            hidden = path if _OLD in path.suffixes else _hide(path)
            if hidden.is_dir() and not hidden.is_symlink():
                shutil.rmtree(hidden)
            else:
                hidden.unlink()
    except OSError as error:
        log.warning("%s is not needed any more, and cannot be removed: %s", path, error)


def _hide(path: Path) -> Path:
    return path.rename(_unused_name(path.with_suffix(""), _OLD + PART))


def _unused_name(path: Path, suffix: str) -> Path:
    """Return the first unused name: step_000020.old.part, step_000020.1.old.part, ..."""
    numbers = itertools.chain([""], map(".{}".format, itertools.count(1)))
    names = (path.with_name(f"{path.name}{number}{suffix}") for number in numbers)
    return next(name for name in names if not os.path.lexists(name))


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Yield a folder to write to, and rename it to `output` afterwards; remove it if anything fails.

    Raises:
        DslparError: `output` exists and is not an empty folder, or it cannot be written.
    """
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        message, hint = f"{output} is there already", "name a folder that is not there: nothing is overwritten"
        raise_finding("CKP221", message, hint, str(output))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        # Beside the output: a rename cannot cross file systems.
        with tempfile.TemporaryDirectory(prefix=output.name, suffix=PART, dir=output.parent) as temporary:
            unfinished = Path(temporary, output.name)
            unfinished.mkdir()
            yield unfinished
            fsync(unfinished)
            unfinished.rename(output)
            fsync(output.parent)
    except OSError as error:
        hint = "make room there, or name another folder"
        raise DslparError([finding("CKP205", f"cannot write to {output}: {error}", hint, str(output))]) from error


def json_bytes(values: object) -> bytes:
    """Return the bytes of a JSON file."""
    return json.dumps(values, indent=1).encode() + b"\n"
