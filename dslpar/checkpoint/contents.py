"""Check that a load can read all of a checkpoint's files, for `dslpar checkpoint verify` and `--resume`.

The check has two steps:

1. Compare every file with its digest (`folder.verify`). A digest shows that a file is unchanged, not that it was
   written correctly.
2. Read every file as a load does. The index must list each tensor element exactly once, and the tensor files must hold
   what it lists. The training state must have valid counters, and each rank's random states must be valid.

No model is built, and no tensor is copied.
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
"""Function that joins the problems found by all readers into one list, which every reader gets."""


def corruptions(
    checkpoint: Checkpoint, part: int = 0, parts: int = 1, gather: Gather = lambda found: found
) -> list[str]:
    """Return the problems of a checkpoint, file by file; [] if a load can read all of it.

    `parts` readers (ranks) share the files; this one is number `part`. `gather` joins their lists. All readers must
    call this together.
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
        # Only if all tensor files exist: a corrupted index could list many more pieces to compare with each other.
        if all(tensor_path(path, number).exists() for number in expected):
            yield from (Corruption(INDEX, f"{name} is not there exactly once") for name in index.incomplete())
        yield from _tried(path, partial(state_files.read_train_state, checkpoint))
    for number in sorted(expected)[part::parts]:
        yield from _tried(path, partial(_check_tensors, tensor_path(path, number), expected[number]))
    for rank in range(part, layout["world_size"], parts):
        file = folder.rank_path(path, rank)
        if not file.exists() and not layout.get(OFFLINE):
            yield Corruption(file.relative_to(path).as_posix(), f"missing, of a world of {layout['world_size']}")
            return  # higher ranks may be missing as well, and are many if world_size is wrong
        yield from _tried(path, partial(state_files.read_rank_state, checkpoint, rank))


def _tried(path: Path, read: Callable[[], object]) -> Iterator[Corruption]:
    try:
        read()
    except DslparError as error:
        yield folder.corruption_of(error, path)


Expected = dict[str, tuple[str, int]]
"""Key of a tensor in its file -> (dtype, number of elements)."""


def _expected_tensors(index: Index) -> Mapping[int, Expected]:
    """Return the tensors that the index lists in each tensor file, by file number."""
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
