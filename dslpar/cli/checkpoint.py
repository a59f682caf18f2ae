"""`dslpar checkpoint list | show | verify | reshard | export`: use checkpoints without the ranks that wrote them.

These actions need one process, and no GPU or cluster. `list` and `show` do not need torch either. Output has a
temporary name until all of it is on disk, and nothing is ever overwritten.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from dslpar.checkpoint import folder, index, manifest
from dslpar.checkpoint.folder import Checkpoint
from dslpar.cli import arguments
from dslpar.cli.action import Action, import_with_torch
from dslpar.core.catalog import finding, raise_finding
from dslpar.core.errors import DslparError, Finding
from dslpar.core.visible import visible
from dslpar.language import yaml_io
from dslpar.linter import check
from dslpar.linter.report import text as report_text
from dslpar.reporting import run_dir

_SOURCE = "a checkpoint, or a run's output_dir for its newest checkpoint"


# ---- the checkpoint to use ----


def _source(path: str, parser: argparse.ArgumentParser) -> Checkpoint:
    """Read the manifest of a checkpoint, or of a run's newest checkpoint.

    Raises:
        DslparError: the manifest is corrupted, or of another format.
    """
    found = _folders(Path(path), parser)
    if not found:
        parser.error(f"no checkpoint in {path}")
    stored = _read(found[-1])
    if problem := _other_format(stored):
        code = "CKP220" if stored.manifest["format"] < folder.FORMAT else "CKP204"
        raise_finding(code, f"{stored.path} has {problem}", "use the dslpar that wrote it", stored.path)
    return stored


def _trusted_source(path: str, parser: argparse.ArgumentParser) -> Checkpoint:
    """Return a checkpoint whose contents will be written elsewhere.

    A suspect checkpoint (CKP232: its numbers may be wrong) is accepted only if `path` is the checkpoint itself, and a
    note is printed.

    Raises:
        DslparError: an error of `_source`; or `path` is a run, and its newest checkpoint is suspect.
    """
    stored, found = _source(path, parser), _folders(Path(path), parser)
    if note := folder.note_of_suspect(stored, was_named=found == [Path(path)], others=found):
        print(visible(note), file=sys.stderr)
    return stored


def _read(path: Path) -> Checkpoint:
    try:
        return folder.open_checkpoint(path)
    except folder.ManifestError as error:
        raise DslparError([_corrupted(path, [f"{folder.MANIFEST}: {error}"])]) from error


def _other_format(stored: Checkpoint) -> str:
    """Describe a format that this dslpar cannot read; empty if it can."""
    number = stored.manifest["format"]
    return "" if number == folder.FORMAT else f"format {number}, but this dslpar reads format {folder.FORMAT}"


def _folders(path: Path, parser: argparse.ArgumentParser) -> list[Path]:
    """Return `path` if it is a checkpoint; otherwise all checkpoints of the run at `path`, oldest first."""
    if not path.is_dir():
        parser.error(f"{path} is not a folder")
    try:
        if folder.is_checkpoint(path):
            return [path]
        return folder.list_folders(path / run_dir.CHECKPOINTS) or folder.list_folders(path)
    except OSError as error:
        parser.error(str(error))


def _require_intact(stored: Checkpoint) -> None:
    """Raise DslparError with every corrupted file, unless the checkpoint is intact."""
    if damages := import_with_torch("dslpar.checkpoint.contents").corruptions(stored):
        raise DslparError([_corrupted(Path(stored.path), damages)])


def _corrupted(path: Path, damages: Sequence[str]) -> Finding:
    hint = "restore these files, or use another checkpoint: resume with checkpoint.resume_from=NAME"
    return finding("CKP215", f"{path.name} is corrupted:", hint, str(path), details=damages)


def _suspect(path: Path, reason: str) -> Finding:
    hint = "resume from one before it: checkpoint.resume_from=NAME"
    return finding("CKP232", f"{path.name} is suspect: {reason}", hint, str(path))


# ---- list ----


def _add_list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Checks only the lengths of files; verify reads every byte.\n\nexit status: 0, 2 wrong usage"
    parser.add_argument("path", metavar="OUTPUT_DIR", help="a run's output_dir")
    arguments.add_format(parser)


def _list(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    rows = _marked([_row(path) for path in _folders(Path(args.path), parser)])
    if args.format == "json":
        arguments.print_json(rows)
    elif not rows:
        print(visible(f"no checkpoints in {args.path}"))
    else:
        _print_table(rows)
    return 0


Row = dict[str, str | int | float | None]
"""Values of one checkpoint, by column of `dslpar checkpoint list`."""


def _marked(rows: Sequence[Row]) -> list[Row]:
    """Return the rows, each with whether it is the intact checkpoint with the lowest held-out loss."""
    measured = [(row["eval_loss"], number) for number, row in enumerate(rows) if row["state"] == "intact"]
    best = min(((loss, number) for loss, number in measured if isinstance(loss, int | float)), default=(None, None))[1]
    return [{**row, "best": number == best} for number, row in enumerate(rows)]


def _row(path: Path) -> Row:
    """Return a checkpoint's row of the table. If its manifest cannot be read, only the name and the state are known."""
    try:
        stored = folder.open_checkpoint(path)
    except folder.ManifestError as error:
        state = f"corrupted: {folder.MANIFEST}: {error}"
        return {"name": path.name, "samples": None, "eval_loss": None, "bytes": None, "state": state, "layout": None}
    layout, state = None, f"format {stored.manifest['format']}"
    if not _other_format(stored):
        layout = manifest.describe_layout(stored.manifest["layout"])
        damaged = folder.mismatched_files(stored)
        state = f"corrupted: {damaged[0]}" if damaged else f"suspect: {stored.suspect}" if stored.suspect else "intact"
    samples, num_bytes = stored.manifest.get("consumed_samples"), sum(folder.file_sizes(path).values())
    loss = stored.manifest.get("eval_loss")
    row: Row = {"name": path.name, "samples": samples, "eval_loss": loss}
    return row | {"bytes": num_bytes, "state": state, "layout": layout}


def _print_table(rows: Sequence[Row]) -> None:
    left_out = {"best", *(["eval_loss"] if all(row["eval_loss"] is None for row in rows) else [])}
    columns = [key for key in rows[0] if key not in left_out]
    lines = [{key: key for key in columns}]
    lines += [{key: _cell(row, key) for key in columns} for row in rows]
    widths = {key: max(len(line[key]) for line in lines) for key in columns}
    for line in lines:
        print("  ".join(line[key].ljust(widths[key]) for key in widths).rstrip())


def _cell(row: Row, column: str) -> str:
    value = row[column]
    if isinstance(value, str) or value is None:
        return visible(value or "-")
    if column == "eval_loss":
        return f"{value:.4f}{' best' if row['best'] else ''}"
    return f"{value:,}"


# ---- show ----


def _add_show_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = """\
--format json prints the manifest, without its list of files.

exit status: 0, 1 not readable, 2 wrong usage"""
    parser.add_argument("path", metavar="SRC", help=_SOURCE)
    arguments.add_format(parser)


def _show(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    stored = _source(args.path, parser)
    if args.format == "json":
        arguments.print_json({key: value for key, value in stored.manifest.items() if key not in ("files", "digest")})
    else:
        sys.stdout.write(_description(stored))
    return 0


def _description(stored: Checkpoint) -> str:
    entries = index.load_index(Path(stored.path)).parameters.values()
    elements = sum(math.prod(entry.shape) for entry in entries)
    num_bytes = sum(file["bytes"] for file in stored.manifest["files"].values())
    versions = ", ".join(f"{name} {version}" for name, version in stored.manifest["versions"].items())
    offline = ", resharded by `dslpar checkpoint reshard`" if stored.manifest["layout"].get(manifest.OFFLINE) else ""
    lines = [
        stored.path,
        f"step {stored.step:,}, {stored.manifest['consumed_samples']:,} samples{_measured(stored)}",
        manifest.describe_layout(stored.manifest["layout"]) + offline,
        f"{len(entries):,} parameters of {elements:,} elements; {num_bytes:,} bytes",
        f"written by {versions}",
        *([f"suspect: {stored.suspect}"] if stored.suspect else []),
    ]
    return "".join(visible(line) + "\n" for line in lines) + "\n" + yaml_io.dump_plain(stored.manifest["config"])


def _measured(stored: Checkpoint) -> str:
    return "" if stored.eval_loss is None else f", held-out loss {stored.eval_loss:.4f}"


# ---- verify ----


def _add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = """\
Reads every byte of every file and compares it with its digest. Then reads every file as a resume
does, so that an intact checkpoint can be loaded. A suspect checkpoint is intact, but --resume uses
it only if it is named.

exit status: 0 all are intact, 1 one is corrupted or suspect, 2 wrong usage"""
    parser.add_argument(
        "paths", nargs="+", metavar="PATH", help="a checkpoint, or a run's output_dir for all its checkpoints"
    )
    arguments.add_format(parser)


def _verify(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    paths = [found for path in args.paths for found in _folders(Path(path), parser)]
    if not paths:
        parser.error(f"no checkpoint in {', '.join(args.paths)}")
    damages = {path: list(_damages(path)) for path in paths}
    suspects = {path: "" if each else folder.open_checkpoint(path).suspect for path, each in damages.items()}
    if args.format == "json":
        arguments.print_json(
            [
                {"path": str(path), "whole": not each, "damaged": each, "suspect": suspects[path]}
                for path, each in damages.items()
            ]
        )
    else:
        for path, each in damages.items():
            if each:
                print(report_text.block(_corrupted(path, each), {}))
            elif suspects[path]:
                print(report_text.block(_suspect(path, suspects[path]), {}))
            else:
                print(visible(f"{path}: intact"))
    return int(any(damages.values()) or any(suspects.values()))


def _damages(path: Path) -> Iterator[str]:
    """Yield the errors of a checkpoint, file by file."""
    try:
        stored = folder.open_checkpoint(path)
    except folder.ManifestError as error:
        yield f"{folder.MANIFEST}: {error}"
        return
    if problem := _other_format(stored):
        yield f"{folder.MANIFEST}: {problem}"
        return
    yield from import_with_torch("dslpar.checkpoint.contents").corruptions(stored)


# ---- reshard ----


def _add_reshard_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = """\
dslpar checkpoint reshard outputs/gpt_3d --config wider.py --world-size 16 --output outputs/wider
train.py --config wider.py --resume train.output_dir=outputs/wider

A run resumes on any layout without this command. Use it for a checkpoint that will be moved, or
that many runs will read. The largest tensor bounds the memory. Weights and optimizer state stay the
same to the bit. Random states belong to ranks, and are left out.

exit status: 0 written, 1 cannot be written, 2 wrong usage"""
    parser.add_argument("path", metavar="SRC", help=_SOURCE)
    parser.add_argument("operands", nargs="*", metavar="key=value", help="overrides of the config's keys")
    parser.add_argument("--config", required=True, metavar="CFG", help="the config of the run that will resume")
    arguments.add_world(parser)
    parser.add_argument("-o", "--output", required=True, metavar="OUT", help="a new output_dir, without checkpoints")


def _reshard(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    sources: dict[str, str] = {}
    cluster = arguments.load_cluster(args, parser, sources)
    world_size = arguments.world_size(args, cluster, parser, lambda: check.load(args.config))
    if world_size is None:
        return 1
    if others := [operand for operand in args.operands if not arguments.is_override(operand)]:
        parser.error(f"reshard takes one checkpoint, and overrides, not {others[0]!r}")
    stored = _trusted_source(args.path, parser)
    job = arguments.resolve_or_print(check.load(args.config, args.operands), world_size, cluster, sources)
    if job is None:
        return 1
    _require_intact(stored)
    written = import_with_torch("dslpar.checkpoint.reshard").reshard(stored, job, Path(args.output))
    before, after = (manifest.describe_layout(each.manifest["layout"]) for each in (stored, _read(written)))
    print(visible(f"{stored.path} ({before})"), visible(f"  -> {written} ({after})"), sep="\n")
    return 0


# ---- export ----

_DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}
"""torch's and transformers' names of dtypes."""
_UNITS = {
    "": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)},
    **{f"{prefix}IB": 1024**power for power, prefix in enumerate("KMGT", 1)},
}


def _add_export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = """\
dslpar checkpoint export outputs/gpt -o weights --dtype bf16
dslpar checkpoint export outputs/llama -o llama --format hf

Writes full, unpadded weights under global names, as dslpar.checkpoint.load_full_state reads them. A
tied weight is written once. Buffers and optimizer state are left out. Also writes
model.safetensors.index.json, which has the file of each weight, and the run's config.yaml.

--format hf writes the same bytes as transformers' save_pretrained would for these weights:
config.json, model.safetensors (several files and an index if it is larger than SIZE), and
generation_config.json. Tokenizer files come from the folder that the run started from, else from
the tokenizer of its text or token files. A GPT is written as a GPT2LMHeadModel or as a
LlamaForCausalLM, whichever it is. It needs transformers.

--format peft writes the adapters of a run with model.lora: adapter_config.json and
adapter_model.safetensors. --format hf --merge-lora adds them to the weights instead.

exit status: 0 written, 1 cannot be written, 2 wrong usage"""
    parser.add_argument("path", metavar="SRC", help=_SOURCE)
    parser.add_argument("-o", "--output", required=True, metavar="DIR", help="the folder to create; it must not exist")
    help = "dslpar: weights under global names; hf: a transformers folder; peft: a PEFT folder; default: %(default)s"
    parser.add_argument("--format", choices=("dslpar", "hf", "peft"), default="dslpar", help=help)
    parser.add_argument(
        "--dtype",
        type=lambda text: _NAMES.get(text, text),
        choices=tuple(_DTYPES),
        help="dtype of the written weights; default: as stored, fp32 for runs in half precision",
    )
    help = "maximum size of the tensors in one file; default: %(default)s"
    parser.add_argument("--max-shard-size", type=_num_bytes, default="5GB", metavar="SIZE", help=help)
    parser.add_argument("--merge-lora", action="store_true", help="with --format hf: add the adapters to the weights")
    help = "with --format hf or peft: new path of the folder that the run started from; default: model.pretrained"
    parser.add_argument("--pretrained", metavar="DIR", help=help)


def _num_bytes(text: str) -> int:
    """Parse `5GB`, `5GiB`, `500MB`, or a number of bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]I?B)?", text.strip(), re.IGNORECASE)
    size = int(float(found[1]) * _UNITS[(found[2] or "").upper()]) if found else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 5GB or 500MB")
    return size


def _export(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if args.pretrained is not None and args.format == "dslpar":
        parser.error("--pretrained is for --format hf and peft")
    if args.merge_lora and args.format != "hf":
        parser.error("--merge-lora is for --format hf")
    stored = _trusted_source(args.path, parser)
    _require_intact(stored)
    output, dtype, max_bytes = Path(args.output), _DTYPES.get(args.dtype), args.max_shard_size
    pretrained = args.pretrained and Path(args.pretrained)
    if args.format == "peft":
        written = import_with_torch("dslpar.checkpoint.export_peft").export_peft(stored, output, dtype, pretrained)
    elif args.format == "hf":
        export = import_with_torch("dslpar.checkpoint.export_transformers").export_transformers
        written = export(stored, output, dtype, max_bytes, pretrained, merges_lora=args.merge_lora)
    else:
        written = import_with_torch("dslpar.checkpoint.export").export(stored, output, dtype, max_bytes)
    for path in written:
        print(visible(f"{path}  {path.stat().st_size:,} bytes"))
    return 0


ACTIONS: Mapping[str, Action] = {
    "list": Action("list a run's checkpoints with samples, size, state and layout", _add_list_arguments, _list),
    "show": Action("print a checkpoint's step, layout and config", _add_show_arguments, _show),
    "verify": Action("verify every byte of checkpoints, and that they can be loaded", _add_verify_arguments, _verify),
    "reshard": Action("write a checkpoint in another layout", _add_reshard_arguments, _reshard),
    "export": Action(
        "write full weights to safetensors files, or to a transformers or PEFT folder", _add_export_arguments, _export
    ),
}
"""Actions of `dslpar checkpoint`."""
