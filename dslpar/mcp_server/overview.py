"""`llms.txt`: dslpar in short for language models. The server has it as a resource, and docs/llms.txt is its copy.

Keys, types and modes are the ones that lint reads. The form is llmstxt.org's: a title, a quote, sections of lists.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from dslpar.layout.modes import MODES
from dslpar.provenance import reference
from dslpar.schema.sections import TensorParallel

MAX_SIZE = 64
"""Largest tensor size that the list of modes shows."""
_DEPTH = 2
_COMMON = ("GPT", "AdamW", "text", "constant")
"""Section types whose keys are listed; of the others the names are."""
_SHORT = (
    (r"a whole number, at least (\d+).*", r"int>=\1"),
    (r"a whole number from (\d+) to (\d+)", r"int \1..\2"),
    (r"True or False", "bool"),
    (r"a string", "str"),
    (r"a path", "path"),
    (r"a number above (\S+)", r"float>\1"),
    (r"a number, at least (\S+)", r"float>=\1"),
    (r"a number, at least 0 and below 1", "0<=float<1"),
    (r"a list of strings", "list of str"),
    (r"a list of whole numbers.*", "list of int"),
    (r"a dict", "dict"),
    (r"a dict, or its (\w+)", r"dict or \1"),
)


def text(commands: Mapping[str, str]) -> str:
    """Return the text: workflow, commands, exit statuses, JSON, modes, keys. `commands` are help texts by name."""
    listed = "".join(f"- dslpar {name}: {help}\n" for name, help in commands.items())
    return f"""# dslpar

> One Python config file says how a model is spread over a cluster. dslpar checks, plans and runs it on DeepSpeed.

A config is Python data that is never executed: literals, dict(...), arithmetic, `if`, `for`, imports of other configs.

    model = dict(type='GPT', num_layers=8, hidden_size=96, num_heads=8, vocab_size=256, max_seq_len=96)
    parallel = dict(pipeline=2, tensor=dict(size=4, mode='1d'))
    batch = dict(global_size=16, micro_size=2)

Workflow: init, lint, show, plan, prove, launch. Correct every error of lint before the next step. `key=value` after
the config's path overrides a key: `dslpar lint cfg.py zero.stage=2 --world-size 8`.

## Findings

`path:line:column: CODE name: message`, then `help:` with a fix. Severity: error, warning, info. Lines and columns
count from 1. `dslpar explain CODE` prints the rule's page. Errors cannot be silenced.

## Exit statuses

0 no errors; 1 errors found, or it does not fit, or it differs; 2 wrong usage; 130 Ctrl-C.

## JSON

`--format json` of lint is a list of findings: code, name, severity, message, help, path, line, column, end_line,
end_column, key, fix, related (other places: where a value that the message names was written), url. That of explain and
runs is a list; that of show, plan, prove and diff is an object.

## Commands

{listed}
## Modes of tensor parallelism

`parallel.tensor = dict(size=, mode=)`; sizes up to {MAX_SIZE}. The number of ranks is a multiple of pipeline.size *
tensor.size * context.size. `dslpar show` lists what the sizes of the model must divide by.

{_modes()}
## Keys: type = default

`!` required, no `=`: chosen by dslpar or off. `dslpar config --reference KEY` prints the help.

{_keys()}
Sections `zero`, `precision` and `deepspeed` also take DeepSpeed's own keys.
"""


def _modes() -> str:
    """Return the list of modes, with the sizes that each takes."""
    lines = []
    for name, mode in MODES.items():
        depth = _DEPTH if "depth" in mode.options else None
        tried = [TensorParallel(size=size, mode=name, depth=depth) for size in range(2, MAX_SIZE + 1)]
        sizes = [tensor.size for tensor in tried if mode.axes(tensor)]
        which = "any size" if len(sizes) == len(tried) else f"size {', '.join(map(str, sizes))}"
        if "shape" in mode.options:
            which = "size x*y*z, with shape=(x, y, z)"
        elif depth:
            which = f"size depth*q*q, with depth; for depth={_DEPTH}: {', '.join(map(str, sizes))}"
        options = ", ".join(mode.options)
        lines.append(f"- {name}: {which}" + (f"; takes {options}" if options else "") + "\n")
    return "".join(lines)


def _keys() -> str:
    """Return the keys of each section on a line."""
    keys: dict[str, dict[str, str]] = {}
    types: dict[str, dict[str, None]] = {"lr_scheduler": {}}
    for row in reference.rows():
        section, _, key = row.key.partition(".")
        names = keys.setdefault(section, {})
        if (not row.field and key != "type") or key.endswith("*") or key.startswith("dist"):
            continue  # a key of torch or DeepSpeed, any name, or LiBai's name of a key
        if key == "type" and row.type[:1] == "'":
            types.setdefault(section, {})[row.type] = None
        elif section in types and key == "type":
            values = short(row.type).split("|")
            types[section] |= dict.fromkeys(values if values[0][:1] == "'" else ())
        elif key and (not row.of or any(f"'{name}'" in row.of for name in _COMMON)):
            names.setdefault(key, f"{key}: {short(row.type)}{_default(row.default)}")
    lines = []
    for section, names in keys.items():
        listed = [f"type: {'|'.join(types[section])}, or a class's path"] if section in types else []
        lines.append(f"- {section}: {'; '.join([*listed, *names.values()])}\n")
    return "".join(line for line in lines if not line.endswith(": \n"))


def short(type: str) -> str:
    """Return a short form of a type's description: `int>=1` for 'a whole number, at least 1'."""
    if type.startswith("one of "):
        return type.removeprefix("one of ").replace(", ", "|")
    for pattern, form in _SHORT:
        if found := re.fullmatch(pattern, type):
            return found.expand(form)
    return type


def _default(text: str) -> str:
    if text in ("", "None", "dict()", "{}"):
        return ""
    return "!" if text == "required" else f" = {text}"
