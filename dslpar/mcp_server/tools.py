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


class RefusedError(Exception):
    """An argument that the server refuses."""


class ToolSpec(NamedTuple):
    """One tool."""

    help: str
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
        result = {"type": "array", "items": {"type": "object"}} if self.is_list else {"type": ["object", "null"]}
        return {
            "type": "object",
            "properties": {
                "exit_status": {"type": "integer", "description": "of the command: 0 good, 1 see the findings"},
                "result": {**result, "description": "the command's --format json"},
                "messages": {"type": "string", "description": "what the command printed to stderr"},
                "note": {"type": "string", "description": "what was cut; empty if nothing was"},
            },
            "required": ["exit_status", "result", "messages", "note"],
        }


TOOLS: Mapping[str, ToolSpec] = {
    "lint": ToolSpec("Check a config, or all configs below a folder; list the findings.", _CONFIG, is_list=True),
    "explain": ToolSpec(
        "Explain a rule: what it finds, why, an example, and what to use instead.",
        {"code": {"type": "string", "description": "a code, name or family: TEN103, not-a-cube, PERF"}},
        ("code",),
        ("code",),
        is_list=True,
    ),
    "show": ToolSpec("Show sizes, rank groups, stages and DeepSpeed's config.", _CONFIG, ("path",)),
    "plan": ToolSpec(
        "Forecast memory and step time on a device; suggest layouts that fit and are faster.",
        {**_CONFIG, "device": {"type": "string", "description": "such as h100-80g"}},
        ("path",),
    ),
    "prove": ToolSpec(
        "Compare the layout with one process in miniature on CPU ranks. Takes minutes; needs --allow-prove.",
        {**_CONFIG, "ranks": {"type": "integer", "minimum": 1}, "steps": {"type": "integer", "minimum": 1}},
        ("path",),
    ),
    "diff": ToolSpec(
        "List the differences of two configs, and their consequences.",
        {**_CONFIG, "other": {"type": "string", "description": "the second config file"}},
        ("path", "other"),
        ("path", "other"),
    ),
    "import": ToolSpec(
        "Convert another framework's config; report on every key.",
        {"path": _PATH, "model": _PATH, "world_size": _WORLD},
        ("path",),
    ),
    "runs": ToolSpec(
        "List the training runs below a folder with state, step and loss.",
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
        RefusedError: an argument is a path outside of the root, or would be read as a flag.
    """
    spec = TOOLS[name]
    for key in PATHS:
        value = given.get(key)
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
