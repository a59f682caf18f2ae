"""What is in a checkpoint's files: whether a load can read all of it. `verify` and `--resume` ask this one function.

First every byte is compared with its digest (`folder.verify`). Digests show that files are as they were written, not
that who wrote them knew how: so then each file is read as a load reads it. The index must have each element once, in
pieces that the tensor files hold; the states of the run and of each rank must be such that counters and generators take
them. Nothing is built, and no tensor is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from dslpar.checkpoint import folder, state_files
from dslpar.checkpoint.folder import Checkpoint, Corruption
from dslpar.checkpoint.index import INDEX, Index, file_key, load_index, tensor_path
from dslpar.checkpoint.manifest import OFFLINE
from dslpar.checkpoint.tensor_file import open_file
from dslpar.core.errors import DslparError

Gather = Callable[[list[str]], list[str]]
"""Brings together what all readers have found."""


def corruptions(
    checkpoint: Checkpoint, part: int = 0, parts: int = 1, gather: Gather = lambda found: found
) -> list[str]:
    """Return what is wrong with a checkpoint, file by file; [] if a load can read all of it.

    Of `parts` readers each reads its share, and `gather` makes one list of theirs: all of them must call this together.
    """
    altered = gather([str(each) for each in folder.verify(checkpoint, part, parts)])
    return altered or gather([str(each) for each in _unreadable(checkpoint, part, parts)])


def _unreadable(checkpoint: Checkpoint, part: int, parts: int) -> Iterator[Corruption]:
    path, layout = Path(checkpoint.path), checkpoint.manifest["layout"]
    try:
        index = load_index(path)
    except DslparError as error:
        yield from [folder.corruption_of(error, path)] if part == 0 else ()
        return
    expected = _expected_tensors(index)
    if part == 0:
        # Only of files that are there, so that their number bounds the pieces that are compared with each other.
        if all(tensor_path(path, number).exists() for number in expected):
            yield from (Corruption(INDEX, f"{name} is not there exactly once") for name in index.incomplete())
        yield from _tried(path, partial(state_files.read_train_state, checkpoint))
    for number in sorted(expected)[part::parts]:
        yield from _tried(path, partial(_check_tensors, tensor_path(path, number), expected[number]))
    for rank in range(part, layout["world_size"], parts):
        file = folder.rank_path(path, rank)
        if not file.exists() and not layout.get(OFFLINE):
            yield Corruption(file.relative_to(path).as_posix(), f"missing, of a world of {layout['world_size']}")
            return  # those above may be missing as well, and are many where the world is a lie
        yield from _tried(path, partial(state_files.read_rank_state, checkpoint, rank))


def _tried(path: Path, read: Callable[[], object]) -> Iterator[Corruption]:
    try:
        read()
    except DslparError as error:
        yield folder.corruption_of(error, path)


Expected = dict[str, tuple[str, int]]
"""Dtype and number of elements, by the tensor's key in its file."""


def _expected_tensors(index: Index) -> Mapping[int, Expected]:
    """Return what the index says of each tensor file, by its number."""
    found: dict[int, Expected] = {}
    for name, entry in [*index.parameters.items(), *index.copies.items()]:
        for piece in entry.pieces:
            for key in ("", *entry.states):
                size = piece.stop - piece.start
                found.setdefault(piece.file, {})[file_key(name, key)] = entry.dtype_of(key), size
        for key, state in entry.irregular.items():
            assert entry.irregular_file is not None, "as `from_json` has it"
            found.setdefault(entry.irregular_file, {})[file_key(name, key)] = state.dtype, state.num_elements
    return found


def _check_tensors(file: Path, expected: Expected) -> None:
    opened = open_file(file)
    for key, (dtype, num_elements) in expected.items():
        opened.span(key, dtype, num_elements)
