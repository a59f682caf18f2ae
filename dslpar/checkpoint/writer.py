"""Write the folder of a checkpoint and publish it atomically. No torch.

A folder is written under the name `step_000005.part`, and renamed to `step_000005` when all its files are on disk. The
rename publishes the checkpoint. A `.part` folder is never read, and the next save removes it. If an old folder cannot
be removed (on a network file system, while someone has a file open), this is logged, and the run goes on. (torch's
distributed checkpoints rename their metadata file in this way. Here the whole folder is renamed.)
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
    """Remove the unfinished folders of earlier saves; make the folder to write to, and return it."""
    root.mkdir(parents=True, exist_ok=True)
    fsync(root.parent)  # if `root` is new, a power cut could lose it with all checkpoints in it
    # Listed before any removal, which would change a running listing.
    for unfinished in list(root.glob(f"step_*{PART}")):
        remove(unfinished)
    part = folder.part_path(root, step)
    for name in (RANKS, TENSORS):
        (part / name).mkdir(parents=True)
    return part


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> FileDigest:
    """Write and hash these bytes to a new file; they are on disk when this returns. Raises: OSError."""
    # xxh3 detects flipped bits and truncated files, but not manipulation. It is many times faster than SHA-256.
    hashed, num_bytes = xxhash.xxh3_128(), 0
    # The file is unbuffered: chunks are large, and each goes to the system without a copy.
    with path.open("wb", buffering=0) as opened:
        for chunk in chunks:
            hashed.update(chunk)
            with memoryview(chunk) as data:  # closed at the end, since an open view would keep its tensor alive
                done = 0
                while done < len(data):  # the system may write only a part
                    done += os.write(opened.fileno(), data[done:])
                num_bytes += done
        os.fsync(opened.fileno())
    return FileDigest(num_bytes, hashed.hexdigest())


def publish(root: Path, manifest: Mapping[str, Any], written: Mapping[str, FileDigest]) -> Path:
    """Write the manifest beside the checkpoint's files, and publish the folder. Return the published folder.

    `written`: results of `write_file` from all ranks, by path in the folder. No file is read again.

    Raises:
        OSError: the folder cannot be written, or a file is missing, unexpected, or has another length than written.
    """
    part, final = folder.part_path(root, manifest["step"]), folder.final_path(root, manifest["step"])
    _check_written(part, written)
    listed = {name: written[name]._asdict() for name in sorted(written)}
    write_file(part / MANIFEST, [folder.serialize({**manifest, "files": listed})])
    # Ranks have synced their files, but not the folders, which hold the file names: they are synced before the rename.
    # The rename itself survives a power cut only after the sync of `root`.
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
            raise OSError(f"{part / name}: {expected} bytes were written, but {found.get(name, 'no')} are there")


def prune(
    root: Path, keep: int | None, step: int, confirmed_step: int | None = None, *, keep_best: bool = False
) -> None:
    """Keep the newest `keep` complete checkpoints up to `step`, which was just saved; remove older checkpoints.

    keep: None keeps all. Incomplete and suspect checkpoints do not count, nor do checkpoints of later steps, left from
    before the run was resumed at an earlier step. A checkpoint is complete if all files have their full length: reading
    every byte of all checkpoints would take longer than the save.

    confirmed_step: last step at which data-parallel replicas are known to have been equal. The newest checkpoint up to
    this step is kept too, since all later ones may turn out to be suspect. None: replicas are not compared.

    keep_best: the complete checkpoint with the lowest held-out loss is kept too.
    """
    if keep is None:
        return
    candidates = [checkpoint for checkpoint in folder.scan(root).checkpoints if checkpoint.step <= step]
    complete = [each for each in candidates if folder.is_complete(each) and not each.suspect]
    good = [each.step for each in complete]
    spared = [each for each in good if confirmed_step is not None and each <= confirmed_step][-1:]
    best = folder.best_of(complete) if keep_best else None
    spared += [best.step] if best is not None else []
    for checkpoint in candidates:
        if good and checkpoint.step < good[-keep:][0] and checkpoint.step not in spared:
            remove(Path(checkpoint.path))


def set_aside(root: Path, step: int) -> None:
    """Rename checkpoints of `step` or later, left from before the run was resumed at an earlier step, to `.aside`.

    Otherwise the next resume would take one of these as the newest. (For this reason Megatron-LM and DeepSpeed store
    the name of the checkpoint written last in a separate file.) Raises: OSError.
    """
    for path in folder.list_folders(root):
        if (folder.step_of(path) or 0) >= step:
            # They are renamed, not removed: the user may want to return to the run as it was before the resume.
            aside = path.rename(_unused_name(path, _ASIDE))
            log.warning(
                "%s is left over from before the run was resumed at an earlier step: renamed to %s", path, aside.name
            )


def mark_suspect(path: Path, reason: str) -> None:
    """Record in a published checkpoint's manifest why its numbers cannot be trusted, though its files are intact.

    OSError is logged, not raised: the run ends for another reason, which it must not hide.
    """
    try:
        stored = folder.open_checkpoint(path)
        # The new manifest is written beside the folder, under a name that the next save removes if the run is killed.
        # It is then renamed over the old manifest, so that the checkpoint always has one of the two.
        part = path.with_suffix(f".suspect{PART}")
        values = {key: value for key, value in stored.manifest.items() if key != "digest"}
        write_file(part, [folder.serialize({**values, folder.SUSPECT: reason})])
        part.replace(path / MANIFEST)
        fsync(path)
    except (OSError, folder.ManifestError) as error:
        log.warning("%s cannot be marked as suspect: %s", path, error)


def remove(path: Path) -> None:
    """Remove a checkpoint's folder, or a link to it, if it exists.

    The folder is renamed first, so that a half-removed checkpoint is never visible. A failure is logged, and the next
    save tries again.
    """
    try:
        if os.path.lexists(path):
            # A rename is atomic, rmtree is not. If the run is killed in rmtree, the next save removes what remains.
            hidden = path if _OLD in path.suffixes else _hide(path)
            if hidden.is_dir() and not hidden.is_symlink():
                shutil.rmtree(hidden)
            else:
                hidden.unlink()
    except OSError as error:
        log.warning("the old folder %s cannot be removed: %s", path, error)


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
        message, hint = f"{output} already exists", "name a folder that does not exist: nothing is overwritten"
        raise_finding("CKP221", message, hint, str(output))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        # The temporary folder is beside the output, since a rename cannot cross file systems.
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
