"""Write the folder of a checkpoint, and publish it: all of it, or nothing. No torch.

A folder is written under its `.part` name and renamed when all of it is on disk: the rename is the moment at which the
checkpoint exists. A `.part` folder belongs to nobody, is never read, and is removed by the next save. What cannot be
removed (on a network file system, a file that someone has open) is logged, and ends no run. (The rename is what
torch's distributed checkpoints do to their metadata; here it is done to the whole folder.)
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
    fsync(root.parent)  # `root` may be new itself: else a power cut could lose it, with checkpoints that are on disk
    # A list first: what is removed must not change what is being listed.
    for unfinished in list(root.glob(f"step_*{PART}")):
        remove(unfinished)
    part = folder.part_path(root, step)
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
    part, final = folder.part_path(root, manifest["step"]), folder.final_path(root, manifest["step"])
    _check_written(part, written)
    listed = {name: written[name]._asdict() for name in sorted(written)}
    write_file(part / MANIFEST, [folder.serialize({**manifest, "files": listed})])
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
    found = folder.file_sizes(part)
    for name in sorted({*written, *found}):
        expected = written[name].bytes if name in written else "no"
        if found.get(name, "no") != expected:
            raise OSError(f"{part / name}: {found.get(name, 'no')} bytes are there, and {expected} were written")


def prune(root: Path, keep: int | None, step: int, confirmed_step: int | None = None) -> None:
    """Keep the newest `keep` complete ones up to `step`, the one just saved, and remove older ones; None: keep all.

    An incomplete or suspect one is no copy to count on, one of a later step (the run was resumed from before it) least
    of all. Only lengths are compared: to read every byte of all checkpoints at each save would cost more than the save.

    confirmed_step: the step up to which replicas are known to have been equal; the newest checkpoint up to it is kept
    too, for all later ones may turn out to be suspect. None: nobody compares them.
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
    """Rename checkpoints of this step or a later one: the run was resumed from before it, and goes another way.

    The latest of them would be the newest, and the next resume would take it. (Megatron-LM and DeepSpeed name the last
    one written in a file of its own, for this reason.) Raises: OSError.
    """
    for path in folder.list_folders(root):
        if (folder.step_of(path) or 0) >= step:
            # Renamed, not removed: the earlier course of the run may be the one that somebody wants back.
            aside = path.rename(_unused_name(path, _ASIDE))
            log.warning("%s is not of this run, which was resumed from before it: it is %s now", path, aside.name)


def mark_suspect(path: Path, reason: str) -> None:
    """Note in a published checkpoint's manifest why its numbers cannot be trusted, though its files are intact.

    What cannot be marked is logged: it must not hide why the run ends.
    """
    try:
        stored = folder.open_checkpoint(path)
        # Beside the folder, and under a name that the next save removes if a kill leaves it; then renamed over the
        # manifest: the checkpoint has the old one or the new one.
        part = path.with_suffix(f".suspect{PART}")
        values = {key: value for key, value in stored.manifest.items() if key != "digest"}
        write_file(part, [folder.serialize({**values, folder.SUSPECT: reason})])
        part.replace(path / MANIFEST)
        fsync(path)
    except (OSError, folder.ManifestError) as error:
        log.warning("%s cannot be marked as suspect: %s", path, error)


def remove(path: Path) -> None:
    """Remove a folder, or a link to one, if it is there: hidden first, since half a checkpoint must not be seen.

    What cannot be removed is logged; the next save tries again.
    """
    try:
        if os.path.lexists(path):
            # A rename is atomic, rmtree is not: a kill between them leaves a hidden folder for the next save to remove.
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
    """Return a name that nothing has yet: step_000020.old.part, step_000020.1.old.part, ..."""
    numbers = itertools.chain([""], map(".{}".format, itertools.count(1)))
    names = (path.with_name(f"{path.name}{number}{suffix}") for number in numbers)
    return next(name for name in names if not os.path.lexists(name))


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Give a folder to write to, which is then renamed to `output`; it is removed if anything fails before.

    Raises:
        DslparError: there is something at `output`, or it cannot be written.
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
    """Return the text of a JSON file."""
    return json.dumps(values, indent=1).encode() + b"\n"
