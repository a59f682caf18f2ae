"""Names and files of checkpoints; one place decides them. No torch.

    checkpoints/step_000005/checkpoint.json      the manifest; written last, so with it the checkpoint is visible
                            global_step5/...     DeepSpeed's files, and `latest`, which names that folder
                            ranks/00003.pt       what DeepSpeed does not keep, of each rank
    checkpoints/step_000010.part/                one that is being written, or never was finished

A folder is written under its `.part` name and renamed when all of it is on disk: the rename is the moment at which the
checkpoint exists. Whatever ends in `.part` is nobody's, is never read, and goes at the next save.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

MANIFEST, RANKS, PART = "checkpoint.json", "ranks", ".part"
FORMAT = 1
"""Of the manifest and of what stands beside it; a later one is not read by an earlier dslpar."""


class Stored(NamedTuple):
    """A visible checkpoint."""

    path: str
    """Its folder."""
    manifest: Mapping[str, Any]
    """`format`, `step`, `consumed_samples`, `fixed` (see `manifest`), `versions`, `files` (sizes in bytes)."""

    @property
    def step(self) -> int:
        """Optimizer steps that were done when it was saved."""
        return int(self.manifest["step"])

    @property
    def tag(self) -> str:
        """DeepSpeed's folder in it."""
        return tag_of(self.step)


def tag_of(step: int) -> str:
    """The name that DeepSpeed's own tools expect."""
    return f"global_step{step}"


def final_path(root: Path, step: int) -> Path:
    """The folder of a checkpoint of that step."""
    return root / f"step_{step:06d}"


def part_path(root: Path, step: int) -> Path:
    """The folder that it is written to first."""
    return final_path(root, step).with_suffix(PART)


def rank_path(folder: Path, rank: int) -> Path:
    """What a rank keeps by itself."""
    return folder / RANKS / f"{rank:05d}.pt"


def visible(root: Path) -> list[Stored]:
    """All checkpoints that are there, whole or damaged, oldest first; a folder without a manifest is none."""
    found = []
    for path in root.glob("step_*"):
        if path.suffix != PART:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, ValueError):  # the last: it is no JSON
                manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
                found += [Stored(str(path), manifest)] if _is_manifest(manifest) else []
    return sorted(found, key=lambda stored: stored.step)


def unreadable(root: Path) -> list[Path]:
    """Folders that were visible checkpoints once, and whose manifest is gone or is none."""
    known = {stored.path for stored in visible(root)}
    named = (path for path in sorted(root.glob("step_*")) if path.name.removeprefix("step_").isdecimal())
    return [path for path in named if path.is_dir() and str(path) not in known]


def _is_manifest(manifest: Any) -> bool:
    return isinstance(manifest, dict) and {"format", "step", "fixed", "files"} <= manifest.keys()


def is_whole(stored: Stored) -> bool:
    """Whether every file is there in its full length; of a later format nobody here can say."""
    return stored.manifest["format"] > FORMAT or not damaged_files(stored)


def damaged_files(stored: Stored) -> list[str]:
    """Files that are missing, too many, or of another length, by their paths in the folder."""
    wanted, found = stored.manifest["files"], sizes(Path(stored.path))
    return sorted(name for name in {*wanted, *found} if wanted.get(name) != found.get(name))


def sizes(folder: Path) -> dict[str, int]:
    """Bytes of each file but the manifest, by its path in the folder."""
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files(folder) if path.name != MANIFEST}


def files(folder: Path) -> Iterator[Path]:
    """Every file below, in the order of their names."""
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def begin(root: Path, step: int) -> Path:
    """Removes what earlier saves left unfinished, and makes the folder to write to."""
    root.mkdir(parents=True, exist_ok=True)
    for left in root.glob(f"step_*{PART}"):
        shutil.rmtree(left)
    part = part_path(root, step)
    (part / RANKS).mkdir(parents=True)
    return part


def publish(root: Path, manifest: Mapping[str, Any]) -> Path:
    """Makes the checkpoint of that manifest visible, all files of which are on disk. Returns its folder."""
    part, final = part_path(root, manifest["step"]), final_path(root, manifest["step"])
    written = part / MANIFEST
    written.write_text(json.dumps({**manifest, "files": sizes(part)}, indent=1) + "\n", encoding="utf-8")
    flush(written, *(path for path in (part, *part.rglob("*")) if path.is_dir()))
    if final.exists():  # damaged, and so passed over when the run was resumed from an earlier one
        _remove(final)
    part.rename(final)
    flush(root)
    return final


def prune(root: Path, keep: int | None, step: int) -> None:
    """Leaves the newest `keep` whole ones up to `step`, the one just saved, and removes what is older; None: nothing.

    A damaged one is no copy to count on, one of a later step (the run was resumed from before it) least of all.
    """
    if keep is not None:
        before = [stored for stored in visible(root) if stored.step <= step]
        oldest = [stored.step for stored in before if is_whole(stored)][-keep:][0]
        for stored in before:
            if stored.step < oldest:
                _remove(Path(stored.path))


def flush(*paths: Path) -> None:
    """What was written to these files and folders is on disk when this returns."""
    for path in paths:
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def _remove(folder: Path) -> None:
    """At once invisible, then gone: half a checkpoint must not be seen."""
    shutil.rmtree(folder.rename(folder.with_suffix(".old" + PART)))
