"""`dslpar checkpoint list | show | verify | reshard | export`: checkpoints, without the ranks that wrote them.

One process, no GPU, no cluster; to list, show and verify, no torch. What is written stands under a temporary name until
all of it is on disk, and nothing is ever written over.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dslpar.cli import arguments as cli_arguments
from dslpar.core.catalog import finding, raise_finding
from dslpar.core.errors import DslparError, Finding
from dslpar.linter.report import text as report_text
from dslpar.reporting import run_dir

if TYPE_CHECKING:
    from dslpar.checkpoint.folder import Stored

_SOURCE = "a checkpoint, or the folder of a run: its newest one"


class Action(NamedTuple):
    """What follows `dslpar checkpoint`."""

    help: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, argparse.ArgumentParser], int]


def _format_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default: %(default)s")


# ---- which ----


def _source(path: str, parser: argparse.ArgumentParser) -> Stored:
    """The checkpoint that a path means.

    Raises:
        DslparError: its manifest, which says what it is, is damaged, or of another format.
    """
    from dslpar.checkpoint import folder

    found = _folders(Path(path), parser)
    if not found:
        parser.error(f"there is no checkpoint in {path}")
    stored = _read(found[-1])
    if stored.manifest["format"] != folder.FORMAT:
        message = f"{stored.path} has format {stored.manifest['format']}, and this dslpar reads format {folder.FORMAT}"
        code = "CKP220" if stored.manifest["format"] < folder.FORMAT else "CKP204"
        raise_finding(code, message, "use the dslpar that wrote it", stored.path)
    return stored


def _read(place: Path) -> Stored:
    from dslpar.checkpoint import folder

    try:
        return folder.read(place)
    except (OSError, ValueError) as error:
        raise DslparError([_damaged(place, [f"{folder.MANIFEST}: {folder.why(error)}"])]) from error


def _folders(path: Path, parser: argparse.ArgumentParser) -> list[Path]:
    """A checkpoint itself, or those that a resume of a run's folder would choose from, oldest first, damaged or not."""
    from dslpar.checkpoint import folder

    if not path.is_dir():
        parser.error(f"{path} is no folder")
    try:
        return [path] if folder.is_one(path) else folder.numbered(path / run_dir.CHECKPOINTS) or folder.numbered(path)
    except OSError as error:
        parser.error(str(error))


def _demand_whole(stored: Stored) -> None:
    """Raises: DslparError, with every damaged file."""
    from dslpar.checkpoint import folder

    damages = folder.verify(stored)
    if damages:
        raise DslparError([_damaged(Path(stored.path), list(map(str, damages)))])


def _damaged(place: Path, damages: Sequence[str]) -> Finding:
    message = f"{place.name} is damaged:" + "".join(f"\n    {damage}" for damage in damages)
    hint = "bring these files back, or use another checkpoint: resume with checkpoint.resume_from=NAME"
    return finding("CKP215", message, hint, str(place))


def _telling(act: Callable[[argparse.Namespace, argparse.ArgumentParser], int]) -> Callable[..., int]:
    """`act`, whose errors are told; the exit status is then 1."""

    def told(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
        try:
            return act(args, parser)
        except DslparError as error:
            sys.stderr.write(report_text.text(error.findings, {}))
            return 1

    return told


# ---- list ----


def _list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Compares the lengths of files; verify reads every byte.\n\nexit status: 0, 2 usage"
    parser.add_argument("path", metavar="OUTPUT_DIR", help="the folder of a run")
    _format_argument(parser)


def _list(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    rows = [_row(place) for place in _folders(Path(args.path), parser)]
    if args.format == "json":
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
    elif not rows:
        sys.stdout.write(f"no checkpoints in {args.path}\n")
    else:
        sys.stdout.write(_table([{key: _cell(value) for key, value in row.items()} for row in rows]))
    return 0


def _row(place: Path) -> dict[str, Any]:
    """A line of the list; of what has no readable manifest, that."""
    from dslpar.checkpoint import folder, manifest

    try:
        stored = folder.read(place)
    except (OSError, ValueError) as error:
        state = f"damaged: {folder.MANIFEST}: {folder.why(error)}"
        return {"name": place.name, "samples": None, "bytes": None, "state": state, "layout": None}
    known = stored.manifest["format"] == folder.FORMAT
    return {
        "name": place.name,
        "samples": stored.manifest.get("consumed_samples"),
        "bytes": sum(folder.sizes(place).values()),
        "state": _state(stored) if known else f"format {stored.manifest['format']}",
        "layout": manifest.words_of(stored.manifest["layout"]) if known else None,
    }


def _state(stored: Stored) -> str:
    from dslpar.checkpoint import folder

    damaged = folder.damaged_files(stored)
    return f"damaged: {damaged[0]}" if damaged else "whole"


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _table(rows: Sequence[Mapping[str, str]]) -> str:
    """Columns as wide as their widest cell."""
    lines = [{key: key for key in rows[0]}, *rows]
    widths = {key: max(len(line[key]) for line in lines) for key in rows[0]}
    return "".join("  ".join(line[key].ljust(widths[key]) for key in widths).rstrip() + "\n" for line in lines)


# ---- show ----


def _show_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "json is the manifest, without its list of files.\n\nexit status: 0, 1 it cannot be read, 2 usage"
    parser.add_argument("path", metavar="SRC", help=_SOURCE)
    _format_argument(parser)


def _show(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    stored = _source(args.path, parser)
    told = {key: value for key, value in stored.manifest.items() if key not in ("files", "digest")}
    shown = json.dumps(told, indent=2) + "\n" if args.format == "json" else _shown(stored)
    sys.stdout.write(shown)
    return 0


def _shown(stored: Stored) -> str:
    from dslpar.checkpoint import index, manifest
    from dslpar.language import yaml_io

    entries = index.load_index(Path(stored.path)).parameters.values()
    elements = sum(_product(entry.shape) for entry in entries)
    num_bytes = sum(file["bytes"] for file in stored.manifest["files"].values())
    versions = ", ".join(f"{name} {version}" for name, version in stored.manifest["versions"].items())
    offline = ", cut by `dslpar checkpoint reshard`" if stored.manifest["layout"].get(manifest.OFFLINE) else ""
    lines = [
        stored.path,
        f"step {stored.step:,}, {stored.manifest['consumed_samples']:,} samples",
        manifest.words_of(stored.manifest["layout"]) + offline,
        f"{len(entries):,} parameters of {elements:,} elements; {num_bytes:,} bytes",
        f"written by {versions}",
    ]
    return "\n".join(lines) + "\n\n" + yaml_io.dump_plain(stored.manifest["config"])


def _product(shape: Sequence[int]) -> int:
    product = 1
    for length in shape:
        product *= length
    return product


# ---- verify ----


def _verify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = """\
Reads every byte of every file, and compares with what was written; then that each element of each
tensor is there once.

exit status: 0 all are whole, 1 one is damaged, 2 usage"""
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a checkpoint, or the folder of a run: all of its")
    _format_argument(parser)


def _verify(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    places = [place for path in args.paths for place in _folders(Path(path), parser)]
    if not places:
        parser.error(f"there is no checkpoint in {', '.join(args.paths)}")
    found = {str(place): list(_damages(place)) for place in places}
    if args.format == "json":
        rows = [{"path": path, "whole": not damages, "damaged": damages} for path, damages in found.items()]
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
    else:
        sys.stdout.write("".join(_verdict(Path(path), damages) for path, damages in found.items()))
    return int(any(found.values()))


def _damages(place: Path) -> Iterator[str]:
    """What is wrong with a checkpoint, file by file."""
    from dslpar.checkpoint import folder, index

    try:
        stored = folder.read(place)
    except (OSError, ValueError) as error:
        yield f"{folder.MANIFEST}: {folder.why(error)}"
        return
    if stored.manifest["format"] != folder.FORMAT:
        yield f"{folder.MANIFEST}: format {stored.manifest['format']}, and this dslpar reads format {folder.FORMAT}"
        return
    damages = folder.verify(stored)
    yield from map(str, damages)
    if not damages:
        yield from (f"{index.INDEX}: {name} is not there once" for name in index.load_index(place).incomplete())


def _verdict(place: Path, damages: Sequence[str]) -> str:
    return report_text.block(_damaged(place, damages), {}) + "\n" if damages else f"{place}: whole\n"


# ---- reshard ----


def _offline() -> Any:
    """What needs torch; DeepSpeed has something to say when it is imported, which belongs to no output of ours."""
    with contextlib.redirect_stdout(sys.stderr):
        return importlib.import_module("dslpar.checkpoint.offline")


def _reshard_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = """\
dslpar checkpoint reshard outputs/gpt_3d --config wider.py --world-size 16 --output outputs/wider
train.py --config wider.py --resume train.output_dir=outputs/wider

A run resumes on any layout without this; it is for a checkpoint that is to be moved, or that many
runs will read. It goes tensor by tensor: the largest bounds the memory. Weights and the optimizer's
state are the same to the bit; random states, which belong to ranks, are left out.

exit status: 0 written, 1 it cannot be, 2 usage"""
    parser.add_argument("path", metavar="SRC", help=_SOURCE)
    parser.add_argument("words", nargs="*", metavar="key=value", help="overrides of the config's keys")
    parser.add_argument("--config", required=True, metavar="CFG", help="the config of the run that is to resume")
    cli_arguments.world_arguments(parser)
    parser.add_argument("--output", required=True, metavar="OUT", help="the output_dir to write to; has no checkpoints")


def _reshard(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from dslpar.linter import check

    sources: dict[str, str] = {}
    cluster = cli_arguments.cluster(args, parser, sources)
    world_size = args.world_size or (cluster.world_size if cluster else None)
    if not world_size:
        parser.error("reshard needs the number of ranks: --world-size N or --hostfile FILE")
    if strangers := [word for word in args.words if not cli_arguments.is_override(word)]:
        parser.error(f"reshard takes one checkpoint, and overrides; not {strangers[0]!r}")
    stored = _source(args.path, parser)
    job = cli_arguments.job_or_findings(check.load(args.config, args.words), world_size, cluster, sources)
    if job is None:
        return 1
    _demand_whole(stored)
    from dslpar.checkpoint import manifest

    offline = _offline()
    written = offline.reshard(stored, job, Path(args.output))
    layouts = manifest.words_of(stored.manifest["layout"]), manifest.words_of(_read(written).manifest["layout"])
    sys.stdout.write(f"{stored.path} ({layouts[0]})\n  -> {written} ({layouts[1]})\n")
    return 0


# ---- export ----

_DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = """\
Whole, unpadded weights under global names, as dslpar.checkpoint.load_full_state takes them; a tied
weight once. Buffers and the optimizer's state are left out. Beside them stand
model.safetensors.index.json, which says where each lies, and the run's config.yaml.

exit status: 0 written, 1 it cannot be, 2 usage"""
    parser.add_argument("path", metavar="SRC", help=_SOURCE)
    parser.add_argument("--output", required=True, metavar="DIR", help="a folder that is not there yet")
    parser.add_argument("--dtype", choices=tuple(_DTYPES), help="left out: as stored, which of half precision is fp32")
    parser.add_argument(
        "--max-shard-size",
        type=_num_bytes,
        default="5GB",
        metavar="SIZE",
        help="of the tensors in a file; default: %(default)s",
    )


def _num_bytes(text: str) -> int:
    """`5GB`, `500MB`, or a number of bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]B)?", text.strip(), re.IGNORECASE)
    size = int(float(found[1]) * _UNITS[(found[2] or "").upper()]) if found else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size, such as 5GB or 500MB")
    return size


def _export(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    stored = _source(args.path, parser)
    _demand_whole(stored)
    for path in _offline().export(stored, Path(args.output), _DTYPES.get(args.dtype), args.max_shard_size):
        sys.stdout.write(f"{path}  {path.stat().st_size:,} bytes\n")
    return 0


ACTIONS: Mapping[str, Action] = {
    "list": Action("the checkpoints of a run: samples, size, layout", _list_arguments, _list),
    "show": Action("what a checkpoint says of itself: step, layout, config", _show_arguments, _telling(_show)),
    "verify": Action("every byte of checkpoints against what was written", _verify_arguments, _telling(_verify)),
    "reshard": Action("a checkpoint as another layout holds it", _reshard_arguments, _telling(_reshard)),
    "export": Action("whole weights to safetensors files", _export_arguments, _telling(_export)),
}
