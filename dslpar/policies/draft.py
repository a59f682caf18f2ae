"""Draft a policy for a class that has none, from the usual names of linear layers in transformers.

    policy=dict(blocks=['model.decoder.layers'], regions={...}, outward=[...])     # `drafted` returns such a text

A draft is a text to write into a config, never a policy in use: `dslpar policy check` compares what it computes. What a
draft lacks, such as attributes that count heads under unusual names, the next finding names.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from dslpar.policies import probe
from dslpar.policies.replacement_modules import features
from dslpar.schema.policy import DECODER_INPUTS, Policy, match

INWARD = {
    *("q_proj", "k_proj", "v_proj", "query", "key", "value", "q", "k", "v", "q_lin", "k_lin", "v_lin", "in_proj"),
    *("qkv", "qkv_proj", "c_attn", "query_key_value", "Wqkv"),
    *("fc1", "up_proj", "gate_proj", "gate_up_proj", "fc_in", "wi", "wi_0", "wi_1", "w1", "w3", "lin1", "linear1"),
    *("c_fc", "dense_h_to_4h", "ffn"),
}
"""Usual names of linears that read the residual."""
OUTWARD = {
    *("o_proj", "out_proj", "o", "out_lin", "c_proj", "fc2", "down_proj", "fc_out", "wo", "w2", "lin2", "linear2"),
    *("dense_4h_to_h", "ffn_output"),
}
"""Usual names of linears that add to the residual."""
_FUSED = {"qkv": 3, "qkv_proj": 3, "c_attn": 3, "Wqkv": 3, "gate_up_proj": 2}
_COUNTS = re.compile(r"\bself\.((?:num|n)_(?:\w+_)?heads|all_head_size|embed_dim|inner_dim|split_size|hidden_size)\b")
"""Usual names of attributes that count heads, or the features of all heads."""
_OF_OTHERS = ("key_value_states", "encoder_hidden_states")
"""Arguments of an attention that reads keys and values from another stream."""
_ENCODER_DECODER = ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask")


def drafted(model: Any) -> str:
    """Return the text of a policy for a model on the meta device; "" if no usual names are found."""
    fields = draft(model)
    return f"policy=dict({', '.join(f'{name}={value!r}' for name, value in fields.items())})" if fields else ""


def draft(model: Any) -> dict[str, Any]:
    """Return the fields of the drafted policy; {} if the blocks have no linears with usual names."""
    blocks = _lists_of_blocks(model)
    regions: dict[str, list[str]] = {}
    inward: list[str] = []
    outward: list[str] = []
    fused: dict[str, int] = {}
    for pattern, linear in _linears(model, blocks):
        region, _, last = pattern.rpartition(".")
        if _is_outward(region, last):
            outward.append(pattern)
        elif _is_inward(region, last):
            if match([f"{each}.*" for each in blocks], region):
                inward.append(pattern)
            else:
                regions.setdefault(region, []).append(last)
            outputs, inputs = features(linear)
            if last in _FUSED and outputs % _FUSED[last] == 0 and (outputs == 3 * inputs or _FUSED[last] == 2):
                fused[last] = _FUSED[last]
    if not regions or not outward:
        return {}
    found = {
        "blocks": blocks,
        "regions": {region: _by_argument(model, region, names) for region, names in regions.items()},
        "outward": outward,
        "inward": inward,
        "fused": fused,
        "local": counts_of(model, regions),
        "returns": {each: ("",) for each in blocks if _takes_first(model, each)},
        **_norms(model, regions),
        **_inputs(model, blocks),
    }
    return {name: value for name, value in found.items() if value}


def _lists_of_blocks(model: Any) -> list[str]:
    """Return the outermost lists of modules with weights."""
    found: list[str] = []
    for name, module in model.named_modules():
        is_inner = any(name.startswith(f"{other}.") for other in found)
        if isinstance(module, nn.ModuleList) and any(True for _ in module.parameters()) and not is_inner:
            found.append(name)
    return found


def _linears(model: Any, blocks: list[str]) -> Iterator[tuple[str, nn.Module]]:
    """Yield (pattern of names, first module) of the linears within blocks."""
    seen: set[str] = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and any(name.startswith(f"{each}.") for each in blocks):
            pattern = _pattern(name)
            if pattern not in seen:
                seen.add(pattern)
                yield pattern, module


def _pattern(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _first(model: Any, pattern: str) -> Any:
    return next(module for name, module in model.named_modules() if match([pattern], name))


def _is_inward(region: str, last: str) -> bool:
    return last in INWARD or (last == "dense" and region.endswith("intermediate"))


def _is_outward(region: str, last: str) -> bool:
    return last in OUTWARD or (last == "dense" and not region.endswith("intermediate"))


def _by_argument(model: Any, region: str, names: list[str]) -> list[str] | dict[str, list[str]]:
    """Return the inward linears of a region by the argument that they read; a list if it is hidden_states."""
    arguments = list(inspect.signature(type(_first(model, region)).forward).parameters)[1:]
    other = next((each for each in _OF_OTHERS if each in arguments), "")
    queries = [name for name in names if name.startswith("q")]
    if other and len(queries) < len(names) and re.search(r"enc|cross", region.rpartition(".")[2], re.IGNORECASE):
        return {arguments[0]: queries, other: [name for name in names if name not in queries]}
    return names if arguments[0] == "hidden_states" else {arguments[0]: names}


def counts_of(model: Any, regions: Iterable[str]) -> dict[str, list[str]]:
    """Return the attributes by region that its code reads and that usually count heads, or features of all heads."""
    found = {}
    for region in regions:
        module = _first(model, region)
        read = dict.fromkeys(name for code in _code(type(module)) for name in _COUNTS.findall(code))
        if own := [name for name in read if isinstance(getattr(module, name, None), int)]:
            found[region] = own
    return found


def _code(cls: Any) -> Iterator[str]:
    """Yield the source of a module class's methods, without constructors."""
    for each in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        for name, method in vars(each).items():
            if inspect.isfunction(method) and name != "__init__":
                yield inspect.getsource(inspect.unwrap(method))


def missing_counts(model: Any, policy: Policy) -> str:
    """Return the text of a policy's `local` with the attributes that it lacks; "" if it lacks none."""
    present = [each for each in policy.regions if any(match([each], name) for name, _ in model.named_modules())]
    found = counts_of(model, present)
    if all({*names} <= {*policy.local.get(region, ())} for region, names in found.items()):
        return ""
    whole = {region: [*dict.fromkeys([*policy.local.get(region, ()), *names])] for region, names in found.items()}
    return f"local={whole!r}"


def _norms(model: Any, regions: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Return the norms within regions: over the features of one head, and over those of all heads."""
    heads: list[str] = []
    inner: list[str] = []
    for region, linears in regions.items():
        around = _first(model, region)
        lengths = {features(around.get_submodule(last))[0] for last in linears if hasattr(around, last)}
        for name, module in around.named_modules():
            sizes = {p.shape[0] for p in module.parameters(recurse=False) if p.dim() == 1}
            if len(sizes) == 1 and not isinstance(module, nn.Linear | Conv1D) and probe.norm_of(module, *sizes):
                (inner if sizes <= lengths else heads).append(f"{region}.{name}")
    return {"per_head": heads, "inner_norms": inner}


def _takes_first(model: Any, blocks: str) -> bool:
    """Return whether the code around a list of blocks takes the first of several values that a block returns."""
    around = model.get_submodule(blocks.rpartition(".")[0]) if "." in blocks else model
    return re.search(r"\b\w*outputs?\[0\]", inspect.getsource(type(around).forward)) is not None


def _inputs(model: Any, blocks: list[str]) -> dict[str, Any]:
    """Return the fields about the model's inputs, and the parts around its blocks."""
    taken = inspect.signature(type(model).forward).parameters
    if "pixel_values" in taken:
        return {"inputs": ["pixel_values"], "whole": ["front", "between", "back"][:: 1 if len(blocks) > 1 else 2]}
    if "decoder_input_ids" in taken:
        return {"inputs": list(_ENCODER_DECODER)}
    back = {"whole": ["back"]} if _has_linears_after(model, blocks) else {}
    if type(model).__name__.endswith(("CausalLM", "LMHeadModel", "Decoder")) and not _has_own_positions(model):
        return back
    return {"inputs": [name for name in (*DECODER_INPUTS, "token_type_ids") if name in taken], **back}


def _has_own_positions(model: Any) -> bool:
    """Return whether the class's code computes positions from ids, as RoBERTa's does."""
    return "create_position_ids_from_input_ids" in inspect.getsource(sys.modules[type(model).__module__])


def _has_linears_after(model: Any, blocks: list[str]) -> bool:
    """Return whether the model has linears outside its blocks besides the head, such as BERT's transform."""
    head = model.get_output_embeddings()
    return any(
        isinstance(module, nn.Linear) and module is not head and not any(name.startswith(f"{each}.") for each in blocks)
        for name, module in model.named_modules()
    )
