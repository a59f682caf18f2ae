"""Check the values of `checkpoint.json` (the manifest): types, ranges, and sizes that must agree. No torch.

`folder.open_checkpoint` calls `check`, so all other code may rely on these properties.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dslpar.core.json_values import count, items, mapping, plain, text
from dslpar.core.mesh import ORDERS, TENSOR_AXES

FORMAT = 2
"""Format number of checkpoints; this version of dslpar reads no other format."""
MAX_RANKS = 1 << 20
"""Maximum `world_size`: reading a checkpoint looks for one file per rank."""
_DIGEST = re.compile(r"[0-9a-f]{32}")


def check(values: Mapping[str, Any]) -> None:
    """Check a manifest. In a later format, unknown to this dslpar, only format number and step are checked.

    Raises:
        ValueError: the manifest is invalid; the text names the first wrong value.
    """
    number = count(values["format"], "format", least=1)
    count(values["step"], "step")
    if number <= FORMAT:
        _check_files(values["files"], number)
    if number == FORMAT:
        mapping(values, "the manifest", "consumed_samples", "layout", "config", "versions")
        count(values["consumed_samples"], "consumed_samples")
        text(mapping(plain(values["fixed"], "fixed"), "fixed", "data.text")["data.text"], "fixed.data.text")
        config = mapping(plain(values["config"], "config"), "config", "lr_scheduler")
        scheduler = mapping(config["lr_scheduler"], "config.lr_scheduler", "type")
        text(scheduler["type"], "config.lr_scheduler.type")
        for name, version in mapping(values["versions"], "versions").items():
            text(version, f"versions.{name}")
        text(values.get("suspect", ""), "suspect")
        if type(values.get("eval_loss", 0.0)) not in (int, float):
            raise ValueError(f"eval_loss is {values['eval_loss']!r}")
        _check_layout(mapping(plain(values["layout"], "layout"), "layout"))


def _check_files(value: object, number: int) -> None:
    for name, file in mapping(value, "files").items():
        if name.startswith("/") or {"", ".", ".."} & {*name.split("/")} or "\0" in name:
            raise ValueError(f"files has {name!r}, which is not a path within the folder")
        if number == 1:  # format 1 listed sizes only
            count(file, f"files[{name!r}]")
            continue
        if mapping(file, f"files[{name!r}]", "bytes", "xxh3_128").keys() != {"bytes", "xxh3_128"}:
            raise ValueError(f"files[{name!r}] has keys other than bytes and xxh3_128")
        count(file["bytes"], f"files[{name!r}].bytes")
        if not _DIGEST.fullmatch(text(file["xxh3_128"], f"files[{name!r}].xxh3_128")):
            raise ValueError(f"files[{name!r}].xxh3_128 is not a digest")


def _check_layout(layout: Mapping[str, Any]) -> None:
    mapping(layout, "layout", "world_size", "pipe", "data", "tensor", "order", "counts", "zero_stage", "offload")
    ranks = 1
    for axis in ("pipe", "data"):
        ranks *= count(layout[axis], f"layout.{axis}", least=1, most=MAX_RANKS)
    tensor = mapping(layout["tensor"], "layout.tensor", "mode", *TENSOR_AXES)
    for axis in TENSOR_AXES:
        ranks *= count(tensor[axis], f"layout.tensor.{axis}", least=1, most=MAX_RANKS)
    if tensor["mode"] is not None:
        text(tensor["mode"], "layout.tensor.mode")
    if count(layout["world_size"], "layout.world_size", least=1, most=MAX_RANKS) != ranks:
        raise ValueError(f"layout.world_size is {layout['world_size']}, but its axes have {ranks} ranks")
    if tuple(items(layout["order"], "layout.order")) not in ORDERS:
        raise ValueError(f"layout.order is {layout['order']!r}")
    # Before this key was introduced, each pipeline rank had one stage.
    num_chunks = count(layout.get("num_chunks", 1), "layout.num_chunks", least=1, most=MAX_RANKS)
    if layout["counts"] is not None:
        for number, layers in enumerate(items(layout["counts"], "layout.counts", length=layout["pipe"] * num_chunks)):
            count(layers, f"layout.counts[{number}]")
    count(layout["zero_stage"], "layout.zero_stage", most=3)
    mapping(layout["offload"], "layout.offload")
