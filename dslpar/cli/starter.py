"""Starter configs: small, commented, and lint-clean for the requested number of ranks.

    starter = make_starter(Choices(model="llama", gpus=8, nodes=2), "mine.py")
    starter.text, starter.world_size

The layout follows Megatron-LM's advice (arXiv 2104.04473) with small sizes: tensor ranks within a node, pipeline stages
over nodes, and data ranks for the rest. Layouts are tried in order of preference. The first one for which the linter
finds neither errors nor warnings is used, since the linter knows which sizes divide.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from dslpar.cli.starter_models import Model, StarterError, find_model
from dslpar.core.errors import Finding
from dslpar.core.visible import visible
from dslpar.language.source_text import source_text
from dslpar.linter import check
from dslpar.schema.token_folders import read_token_folder

WIDTH = 100
MICRO_SIZE = 2
_TEXT = ("text", "mlm", "span")
_NEEDS_PATH = ("images", "tokens")


class Choices(NamedTuple):
    """The choices of the config's author. None means that the rules in the module's docstring decide."""

    model: str = "gpt"
    gpus: int = 1
    """Ranks per node."""
    nodes: int = 1
    data: str | None = None
    """A type of the section `data`."""
    data_path: str | None = None
    """The data's files or folder, relative to the working directory."""
    tensor: int | None = None
    pipeline: int | None = None


class Starter(NamedTuple):
    """A config for `world_size` ranks, with its findings."""

    text: str
    world_size: int
    findings: Sequence[Finding]
    """Empty, unless the author chose a layout that does not fit, or data that do not exist."""


class Layout(NamedTuple):
    """Sizes of the three axes: pipeline stages, data ranks and tensor ranks."""

    pipe: int
    data: int
    tensor: int


def make_starter(choices: Choices, path: str) -> Starter:
    """Make the config to be written to `path`.

    Raises:
        StarterError: the model is unknown, its data need a choice, or the ranks do not divide into the chosen sizes.
    """
    folder = os.path.dirname(path) or "."
    model = find_model(choices.model, folder)
    data = _data_section(choices, model, folder)
    if data.get("type") == "images" and (count := _num_classes(str(choices.data_path))):
        model = model.with_classes(count)
    if data.get("type") == "tokens":
        model = model.with_vocabulary(read_token_folder(str(choices.data_path)).vocab_size or 0)
    world_size = choices.gpus * choices.nodes
    tried: list[Starter] = []
    for layout in layouts(choices):
        text = _text(choices, layout, model, data, path)
        found = check.lint(check.load_text(text, path), world_size)
        findings = [each for each in found if each.severity != "info"]
        tried.append(Starter(text, world_size, findings))
        if not findings:
            break
    if not tried:
        asked = {"tensor": choices.tensor, "pipeline": choices.pipeline}
        product = " * ".join(f"{name} {size}" for name, size in asked.items() if size is not None)
        raise StarterError(f"{world_size} ranks are not a multiple of {product}")
    return min(tried, key=lambda starter: _weight(starter.findings))  # the first with the fewest errors and findings


def layouts(choices: Choices) -> Iterator[Layout]:
    """Yield the layouts whose sizes divide the number of ranks, the preferred one first."""
    gpus, nodes = choices.gpus, choices.nodes
    world = gpus * nodes
    tensors = (2, 1) if choices.tensor is None else (choices.tensor,)
    most = nodes if nodes > 1 else 2 if world >= 8 else 1
    pipes = range(most, 0, -1) if choices.pipeline is None else (choices.pipeline,)
    for tensor in tensors:
        if choices.tensor is None and gpus % tensor:
            continue  # a tensor group across nodes communicates over the network in every layer
        yield from (Layout(pipe, world // (tensor * pipe), tensor) for pipe in pipes if world % (tensor * pipe) == 0)


def _weight(findings: Sequence[Finding]) -> tuple[int, int]:
    """Return the number of errors and the number of findings, to compare starters that all have findings."""
    return sum(each.severity == "error" for each in findings), len(findings)


def _data_section(choices: Choices, model: Model, folder: str) -> dict[str, object]:
    """Return the section `data`; empty for the default, which is text.

    Raises:
        StarterError: the data need a path, or a program must pass them.
    """
    kind = choices.data or next(iter(model.data), None)
    if kind is None:
        name = str(model.section["type"]).rpartition(".")[2]
        raise StarterError(f"only a program can pass data for {name} (dslpar.initialize): choose another class")
    path = choices.data_path
    if path is not None and not os.path.isabs(path):
        path = os.path.relpath(path, folder)
    if path is None and kind in _NEEDS_PATH:
        what = "a folder with a folder of images for each class, or an .npz file" if kind == "images" else "a folder"
        raise StarterError(f"data of type {kind!r} need --data-path: {what}")
    section: dict[str, object] = {"type": kind}
    if path is not None:
        section |= {"files": [path]} if kind in _TEXT else {"path": path}
    if kind in _TEXT and model.tokenizer:
        section["tokenizer"] = model.tokenizer
    if kind in _TEXT and model.seq_len:
        section["seq_len"] = model.seq_len
    return {} if section == {"type": "text"} else section


def _num_classes(path: str) -> int:
    """Count the classes of an image folder, which are its subfolders; 0 if it cannot be read."""
    try:
        return sum(entry.is_dir() and not entry.name.startswith(".") for entry in os.scandir(path))
    except OSError:
        return 0


# ---- the text of the file ----

_DEFAULT_DATA = """\
# data: the source of Python's standard library, byte by byte. Yours: data = dict(type='text', files=['FOLDER'])"""
_TRAINING = """\
optimizer = dict(type='AdamW', lr=1e-3, weight_decay=0.01)
lr_scheduler = dict(type='cosine', warmup_steps=10, min_lr=1e-4)"""
_FINE_TUNING = """\
optimizer = dict(type='AdamW', lr=2e-5, weight_decay=0.01)  # a small lr: the weights are trained
lr_scheduler = dict(type='cosine', warmup_steps=10, min_lr=2e-6)"""
_TRAIN = """\
# precision = 'bf16'  # on GPUs; it needs zero.stage=1 or more
train = dict(steps=100, clip_grad_norm=1.0, log_interval=10, eval_interval=50, save_interval=50)"""


def _text(choices: Choices, layout: Layout, model: Model, data: Mapping[str, object], path: str) -> str:
    pipe, replicas, tensor = layout
    world, accumulation = pipe * replicas * tensor, 4 * pipe if pipe > 1 else 1
    global_size, name = MICRO_SIZE * accumulation * replicas, visible(path)
    where = f"--world-size {world}" if choices.nodes == 1 else "--hostfile HOSTS"
    lines = [
        f"# dslpar lint {name} --world-size {world}",
        f"# dslpar launch {name} {where}",
        "#",
        f"# {_ranks(layout)}",
        f"# A step is {global_size} samples = micro {MICRO_SIZE} * accumulation {accumulation} * data {replicas}.",
        "# All keys: dslpar config --reference",
    ]
    if parallel := _parallel(layout):
        lines.append(f"parallel = {source_text(parallel)}  # the data size follows from the ranks")
    lines.append(_assigned("model", model.section))
    lines.append(_assigned("data", data) if data else _DEFAULT_DATA)
    lines.append(_FINE_TUNING if "pretrained" in model.section else _TRAINING)
    if replicas > 1:
        lines.append("zero = dict(stage=1)  # each data rank keeps a part of the optimizer's state")
    lines.append(f"batch = dict(global_size={global_size}, micro_size={MICRO_SIZE})")
    return "\n".join([*lines, _TRAIN]) + "\n"


def _ranks(layout: Layout) -> str:
    pipe, replicas, tensor = layout
    world = pipe * replicas * tensor
    sizes = [f"pipeline {pipe}"] * (pipe > 1) + [f"data {replicas}"] + [f"tensor {tensor}"] * (tensor > 1)
    if len(sizes) == 1:
        return "1 rank." if world == 1 else f"{world} ranks, each with the whole model."
    return f"{world} ranks = {' * '.join(sizes)}: tensor ranks within a node, stages over nodes, data for the rest."


def _parallel(layout: Layout) -> dict[str, object]:
    found: dict[str, object] = {}
    if layout.pipe > 1:
        found["pipeline"] = layout.pipe
    if layout.tensor > 1:
        found["tensor"] = {"size": layout.tensor, "mode": "1d"}
    return found


def _assigned(name: str, section: Mapping[str, object]) -> str:
    """Format a section on one line if it fits, else with one line per key."""
    line = f"{name} = {source_text(section)}"
    if len(line) <= WIDTH:
        return line
    return f"{name} = {_spread(section, '')}"


def _spread(section: Mapping[str, object], indent: str) -> str:
    inner = indent + "    "
    lines = []
    for key, value in section.items():
        text = source_text(value)
        if isinstance(value, Mapping) and len(inner + key + text) + 2 > WIDTH:
            text = _spread(value, inner)
        lines.append(f"{inner}{key}={text},\n")
    return f"dict(\n{''.join(lines)}{indent})"
