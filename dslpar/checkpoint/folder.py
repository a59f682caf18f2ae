"""Folder of a checkpoint: file names, listing, and verification. No torch.

    checkpoints/step_000005/checkpoint.json              manifest, written last
                            index.json                   index: the file of each piece of each tensor
                            tensors/00003.safetensors    pieces of tensors that rank 3 has written
                            ranks/00003.pt               rank 3's random states and buffers
                            state.pt                     training state: counters, LR scheduler, loss scaler
    checkpoints/step_000010.part/                        unfinished checkpoint: being written, or a save was killed
    checkpoints/step_000020.aside/                       checkpoint left from before a resume at an earlier step

Each file is hashed while it is written. The manifest has the size and digest of every other file, and a digest of its
own bytes. So `verify` finds any changed byte before a load uses the files. (Checkpoints of torch.distributed and
DeepSpeed have no digests.)
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dslpar.checkpoint import manifest_format
from dslpar.checkpoint.manifest_format import FORMAT as FORMAT
from dslpar.core import json_values
from dslpar.core.catalog import finding, raise_finding
from dslpar.core.errors import DslparError
from dslpar.reporting.resume_hint import checkpoint_step

BEST = "best"
"""Name that means the checkpoint with the lowest held-out loss."""
MANIFEST, RANKS, TENSORS, STATE, PART = "checkpoint.json", "ranks", "tensors", "state.pt", ".part"
SUSPECT = "suspect"
"""Manifest key of a suspect checkpoint: why its numbers cannot be trusted, though its files are intact."""
_MAX_MANIFEST_BYTES = 1 << 28

_NO_DIGEST = "0" * 32
_READ_BYTES = 1 << 22


class Checkpoint(NamedTuple):
    """A published checkpoint, with its manifest."""

    path: str
    """Folder of the checkpoint."""
    manifest: Mapping[str, Any]
    """Values of `checkpoint.json`: `format`, `step`, `layout`, `fixed`, `config`, `files`, ... (see `manifest`)."""

    @property
    def step(self) -> int:
        """Optimizer steps done when it was saved."""
        step: int = self.manifest["step"]
        return step

    @property
    def suspect(self) -> str:
        """Reason not to trust its numbers; empty: no reason is known."""
        return str(self.manifest.get(SUSPECT, ""))

    @property
    def eval_loss(self) -> float | None:
        """Held-out loss after its step; None: it was not measured."""
        found: float | None = self.manifest.get("eval_loss")
        return found


class FileDigest(NamedTuple):
    """Size and digest of a file, as listed in the manifest."""

    bytes: int
    xxh3_128: str


class ManifestError(ValueError):
    """A manifest that cannot be read. The text is the reason: "missing", "altered", "not valid JSON", ..."""


_UNREADABLE = " is not a checkpoint file, or is corrupted: "


def unreadable(path: Path, why: str) -> DslparError:
    """Make the error CKP216 of a file that is missing or malformed."""
    message = f"{path}{_UNREADABLE}{why}"
    hint = "`dslpar checkpoint verify` names every corrupted file; resume from another one: checkpoint.resume_from=NAME"
    return DslparError([finding("CKP216", message, hint, str(path))])


class Corruption(NamedTuple):
    """Problem of one file of a checkpoint."""

    path: str
    """Path of the file in the folder."""
    problem: str
    """"missing", "N bytes of M", "altered", "not of this checkpoint", or "unreadable: ..."."""

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}"


def corruption_of(error: DslparError, folder: Path) -> Corruption:
    """Convert an error of `unreadable` to a corruption of a file in `folder`."""
    (found,) = error.findings
    why = found.message.removeprefix(f"{found.location.path}{_UNREADABLE}")
    return Corruption(os.path.relpath(found.location.path, folder), why)


def final_path(root: Path, step: int) -> Path:
    """Return the folder of the published checkpoint of a step."""
    return root / f"step_{step:06d}"


def part_path(root: Path, step: int) -> Path:
    """Return the folder that the checkpoint of a step is written to before it is published."""
    return final_path(root, step).with_suffix(PART)


def rank_path(folder: Path, rank: int) -> Path:
    """Return the file with the state of one rank."""
    return folder / RANKS / f"{rank:05d}.pt"


def step_of(folder: Path) -> int | None:
    """Return the step in a folder's name; None: no such name, as for unfinished folders and those set aside."""
    return checkpoint_step(folder.name)


# ---- listing ----


def is_checkpoint(path: Path) -> bool:
    """Return whether `path` is a folder of a checkpoint, even a corrupted one, and not the folder of a run."""
    return (path / MANIFEST).exists() or (path.is_dir() and step_of(path) is not None)


def list_folders(root: Path) -> list[Path]:
    """Return the folders with names of published checkpoints, oldest first; [] if `root` does not exist.

    Raises:
        OSError: `root` cannot be read. (`Path.glob` would find nothing in a folder that it may not list, and a run
            would start anew.)
    """
    steps = {path: step_of(path) for path in (root.iterdir() if root.is_dir() else ()) if path.is_dir()}
    return [path for _, path in sorted((step, path) for path, step in steps.items() if step is not None)]


class Scan(NamedTuple):
    """The published checkpoints of a run."""

    checkpoints: list[Checkpoint]
    """Checkpoints with a valid manifest, oldest first; their files may be intact or corrupted."""
    unreadable: dict[Path, str]
    """Reasons by folder, for manifests that are missing, corrupted, or of another step."""


def scan(root: Path) -> Scan:
    """Open every published checkpoint of a run. Raises: OSError: `root` cannot be read."""
    found = Scan([], {})
    for path in list_folders(root):
        try:
            found.checkpoints.append(open_checkpoint(path))
        except ManifestError as error:
            found.unreadable[path] = f"{MANIFEST}: {error}"
    return found


def best_of(checkpoints: Iterable[Checkpoint]) -> Checkpoint | None:
    """Return the checkpoint with the lowest held-out loss, of equal ones the first; None: no loss was measured.

    A suspect checkpoint is never the best, since its numbers may be wrong.
    """
    measured = [
        (each.eval_loss, each.step, each) for each in checkpoints if not each.suspect and each.eval_loss is not None
    ]
    return min(measured, default=(None, None, None), key=lambda found: found[:2])[-1]


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint's manifest, and check that it is unchanged; `verify` checks the other files.

    Raises:
        ManifestError: the manifest is missing, altered or malformed, or its step is not the one in the folder's name.
    """
    path = folder / MANIFEST
    try:
        if path.exists() and not path.is_file():  # reading a pipe would wait forever
            raise ManifestError("no file")
        if path.stat().st_size > _MAX_MANIFEST_BYTES:
            raise ManifestError(f"more than {_MAX_MANIFEST_BYTES} bytes")
        text = path.read_bytes()
        manifest = json_values.parse(text)
        if not isinstance(manifest, dict) or not {"format", "step", "fixed", "files"} <= manifest.keys():
            raise ManifestError("no manifest")
        # Format 1 had no digest. The caller refuses it as an old format, which is clearer than "altered".
        if (manifest["format"] != 1 or "digest" in manifest) and not _digest_matches(text, manifest.get("digest")):
            raise ManifestError("altered")
        manifest_format.check(manifest)  # an invalid manifest may have a valid digest
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
    """Return the manifest's bytes. Its last value is the digest of these bytes, computed with zeros in its place."""
    import xxhash  # here and below: `dslpar runs` imports this module where xxhash may not be installed

    text = json.dumps({**manifest, "digest": _NO_DIGEST}, indent=1).encode() + b"\n"
    before, _, behind = text.rpartition(_NO_DIGEST.encode())
    return before + xxhash.xxh3_128_hexdigest(text).encode() + behind


def _digest_matches(text: bytes, digest: object) -> bool:
    """Return whether `serialize` made these bytes."""
    if not isinstance(digest, str) or len(digest) != len(_NO_DIGEST):
        return False
    import xxhash

    before, found, behind = text.rpartition(digest.encode())
    return bool(found) and xxhash.xxh3_128_hexdigest(before + _NO_DIGEST.encode() + behind) == digest


# ---- verification ----


def is_complete(checkpoint: Checkpoint) -> bool:
    """Return whether every file exists with its full length. This is fast, but only `verify` finds altered bytes.

    A checkpoint of a later format counts as complete, since this version of dslpar does not know its files.
    """
    return checkpoint.manifest["format"] > FORMAT or not mismatched_files(checkpoint)


def mismatched_files(checkpoint: Checkpoint) -> list[str]:
    """Return the files that are missing, unexpected, or of another length, by path in the checkpoint's folder."""
    recorded, found = _recorded_files(checkpoint), file_sizes(Path(checkpoint.path))
    names = sorted({*recorded, *found})
    return [name for name in names if name not in recorded or recorded[name].bytes != found.get(name)]


def verify(checkpoint: Checkpoint, part: int = 0, parts: int = 1) -> list[Corruption]:
    """Read every byte of a checkpoint's files, and return their problems; [] if it is intact.

    `parts` readers (ranks) share the files, and this one is number `part`. Together they name every corrupted file.
    """
    recorded, found = _recorded_files(checkpoint), file_sizes(Path(checkpoint.path))
    corruptions = [Corruption(MANIFEST, _manifest_problem(checkpoint))] if part == 0 else []
    # Every `parts`-th file, not a block of files: neighbours in this order are about equally large, so readers get
    # about as many bytes each.
    for name in sorted({*recorded, *found})[part::parts]:
        path = Path(checkpoint.path, name)
        corruptions.append(Corruption(name, _file_problem(path, recorded.get(name), found.get(name))))
    return [corruption for corruption in corruptions if corruption.problem]


def _recorded_files(checkpoint: Checkpoint) -> dict[str, FileDigest]:
    """Return the files that the manifest lists; format 1 listed sizes only."""
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
    import xxhash

    hashed, buffer = xxhash.xxh3_128(), memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as opened:
        while count := opened.readinto(buffer):
            hashed.update(buffer[:count])
    return hashed.hexdigest()


def file_sizes(folder: Path) -> dict[str, int]:
    """Return the size in bytes of each file except the manifest, by path in the folder."""
    found = {path.relative_to(folder).as_posix(): path.stat().st_size for path in list_files(folder)}
    return {name: num_bytes for name, num_bytes in found.items() if name != MANIFEST}


def list_files(folder: Path) -> list[Path]:
    """Return every file below `folder`, sorted by name."""
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


# ---- suspect checkpoints ----


def note_of_suspect(stored: Checkpoint, *, was_named: bool, others: Sequence[Path] = ()) -> str:
    """Return the note to print if a suspect checkpoint is used because the user named it; "" if it is not suspect.

    `others`: all checkpoint folders of the run, oldest first; the error's hint names the newest good one.

    Raises:
        DslparError: CKP232: the checkpoint is suspect, and was not named by the user but taken as the run's newest.
    """
    name = Path(stored.path).name
    if not stored.suspect:
        return ""
    if not was_named:
        good = next((path for path in reversed(others) if _is_trusted(path)), None)
        hint = f"take the one before it, {good}; or name this one" if good else "name it to use it anyway"
        raise_finding("CKP232", f"{name} is suspect: {stored.suspect}", hint, stored.path)
    return f"{name} is suspect, and is used because it was named: {stored.suspect}"


def _is_trusted(path: Path) -> bool:
    try:
        return not open_checkpoint(path).suspect
    except ManifestError:
        return False
