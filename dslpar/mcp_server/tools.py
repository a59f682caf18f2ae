"""The tools: what an agent may ask, as the arguments of a command, and the form of the answer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from dslpar.mcp_server.confinement import is_below

_PATH = {"type": "string", "description": "a config file, relative to the server's folder"}
_SET = {"type": "array", "items": {"type": "string"}, "description": "overrides, such as zero.stage=2"}
_WORLD = {"type": "integer", "minimum": 1, "description": "number of ranks"}
_HOSTS = {"type": "string", "description": "a hostfile, instead of a number of ranks"}
_CONFIG = {"path": _PATH, "overrides": _SET, "world_size": _WORLD, "hostfile": _HOSTS}
PATHS = ("path", "other", "hostfile", "folder", "model")
"""Arguments that are paths."""


_TYPES: Mapping[str, dict[str, Any]] = {
    "int": {"type": "integer"},
    "float": {"type": "number"},
    "str": {"type": "string"},
    "dict": {"type": "object"},
    "list": {"type": "array"},
    "dicts": {"type": "array", "items": {"type": "object"}},
    "strs": {"type": "array", "items": {"type": "string"}},
}
"""JSON Schemas by the short names that the tables below use; a `?` after the name allows null."""


class RefusedError(Exception):
    """A call that the server refuses."""


def _object(keys: str) -> dict[str, Any]:
    """Return the JSON Schema of an object from its `name:type` pairs; keys may be cut, so none is required."""
    made: dict[str, Any] = {}
    for pair in keys.split():
        name, _, form = pair.partition(":")
        schema = _TYPES[form.rstrip("?")]
        made[name] = {**schema, "type": [schema["type"], "null"]} if form.endswith("?") else schema
    return {"type": "object", "properties": made}


class ToolSpec(NamedTuple):
    """One tool."""

    help: str
    result: str
    """Keys and types of the command's JSON, or of each of its entries."""
    arguments: Mapping[str, Any]
    required: tuple[str, ...] = ()
    operands: tuple[str, ...] = ("path",)
    """Arguments that the command takes without a flag, in order."""
    is_list: bool = False
    """Whether the command's JSON is a list."""

    @property
    def input_schema(self) -> dict[str, Any]:
        """The JSON Schema of the arguments."""
        required = list(self.required)
        return {
            "type": "object",
            "properties": dict(self.arguments),
            "required": required,
            "additionalProperties": False,
        }

    @property
    def output_schema(self) -> dict[str, Any]:
        """The JSON Schema of the answer."""
        record = _object(self.result)
        if self.is_list:
            record = {"type": "array", "items": {**record, "required": list(record["properties"])}}
        return {
            "type": "object",
            "properties": {
                "exit_status": {"type": "integer", "description": "of the command: 0 good, 1 see the findings"},
                "result": {**record, "description": "the command's --format json"},
                "messages": {"type": "string", "description": "what the command printed to stderr"},
                "note": {"type": "string", "description": "what was cut; empty if nothing was"},
            },
            "required": ["exit_status", "result", "messages", "note"],
        }


TOOLS: Mapping[str, ToolSpec] = {
    "lint": ToolSpec(
        "Check a config, or all configs below a folder; list the findings. Imports and executes none of their code.",
        "code:str name:str severity:str message:str help:str path:str line:int column:int end_line:int end_column:int "
        "key:str fix:list related:list url:str",
        _CONFIG,
        is_list=True,
    ),
    "explain": ToolSpec(
        "Explain a rule: what it finds, why, an example, and what to use instead.",
        "code:str name:str severity:str page:str",
        {"code": {"type": "string", "description": "a code, name or family: TEN103, not-a-cube, PERF"}},
        ("code",),
        ("code",),
        is_list=True,
    ),
    "show": ToolSpec(
        "Show sizes, rank groups, stages and DeepSpeed's config.",
        "world_size:int parallel:dict groups:dict stages:dict? batch:dict deepspeed:dict divisors:dicts traffic:dict? "
        "schedule:dict? memory:dict?",
        _CONFIG,
        ("path",),
    ),
    "plan": ToolSpec(
        "Forecast memory and step time on a device; suggest layouts that fit and are faster.",
        "verdict:str binding:dict memory:dicts step_s:float tokens_per_s_gpu:float mfu_causal:float bubble:float "
        "repairs:dicts layouts:dicts remedies:dicts device:str device_bytes:int error:dict num_legal:int "
        "host_bytes:int uneven_experts:dict?",
        {**_CONFIG, "device": {"type": "string", "description": "such as h100-80g"}},
        ("path",),
    ),
    "prove": ToolSpec(
        "Compare the layout with one process in miniature on CPU ranks. Takes minutes. Runs the classes that the "
        "config names. Refused unless the server was started with --allow-prove.",
        "verdict:str layout:dict shrunk:strs not_proven:strs checks:dicts first_difference:dict? versions:dict "
        "config_sha256:str findings:list request:dict",
        {**_CONFIG, "ranks": {"type": "integer", "minimum": 1}, "steps": {"type": "integer", "minimum": 1}},
        ("path",),
    ),
    "diff": ToolSpec(
        "List the differences of two configs, and their consequences.",
        "left:str right:str world_size:int? differences:dicts",
        {**_CONFIG, "other": {"type": "string", "description": "the second config file"}},
        ("path", "other"),
        ("path", "other"),
    ),
    "import": ToolSpec(
        "Convert another framework's config; report on every key. Writes no file: the config is in the result.",
        "source:str from:str out:str? entries:dicts findings:dicts config:str",
        {"path": _PATH, "model": _PATH, "world_size": _WORLD},
        ("path",),
    ),
    "runs": ToolSpec(
        "List the training runs below a folder with state, step and loss.",
        "name:str path:str state:str reason:str? step:int? steps:int? loss:float? eval_loss:float? eval_step:int? "
        "layout:str? world_size:int? checkpoint:str? updated_s:float? problems:strs",
        {"folder": {"type": "string", "description": "default: outputs"}},
        (),
        ("folder",),
        is_list=True,
    ),
}
"""Tools by name, which is the command's."""


def command_line(name: str, given: Mapping[str, Any], root: str) -> list[str]:
    """Return the arguments of `dslpar` for a call of a tool.

    Raises:
        RefusedError: an argument is a path outside of the root or has a NUL, or would be read as a flag.
    """
    spec = TOOLS[name]
    for key in PATHS:
        value = given.get(key)
        if value is not None and "\0" in value:
            raise RefusedError(f"{key} {value!r} has a NUL character, which no path has")
        if value is not None and not is_below(os.path.join(root, value), root):
            raise RefusedError(f"{key} {value!r} is outside of {root}, the folder that this server may read")
    operands = [given[key] for key in spec.operands if key in given] + list(given.get("overrides", ()))
    for word in operands:
        if word.startswith("-"):
            raise RefusedError(f"{word!r} would be read as a flag; write ./{word} for such a file")
    line = [name, *operands, "--format=json"]
    line[1:1] = ["list"] if name == "runs" else []
    flags = [key for key in given if key not in (*spec.operands, "overrides")]
    return line + [f"--{key.replace('_', '-')}={given[key]}" for key in flags]
