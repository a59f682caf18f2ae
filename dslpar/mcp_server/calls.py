"""Run a command for a tool, and shape its output into the answer: the command's JSON, within a bound."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from dslpar.core.errors import DslparError
from dslpar.language.errors import ConfigError

MAX_CHARACTERS = 100_000
"""Bound of a result's JSON: about 25 thousand tokens of a language model."""
Command = Callable[[Sequence[str]], int]
"""Runs `dslpar` with arguments, and returns its exit status."""


class Output(NamedTuple):
    """Output of a command."""

    status: int
    out: str
    err: str


class CallError(Exception):
    """A call has no result; the text gives the reason: what the command printed."""


def run(command: Command, line: Sequence[str]) -> Output:
    """Run a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = command(line)
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 2
        except OSError as error:  # a refusal where the command expects none
            status = 2
            err.write(f"{error.filename}: {error.strerror}\n" if error.filename else f"{error}\n")
        except (DslparError, ConfigError, ValueError) as error:
            # Findings that a command does not print, and names that Python refuses: the text, without a traceback.
            status = 2
            err.write(f"{error}\n")
    return Output(status, out.getvalue(), err.getvalue())


def answer(name: str, output: Output) -> dict[str, Any]:
    """Return the structured result of a tool.

    Raises:
        CallError: the command printed no JSON, as after wrong usage or where lint errors stop it.
    """
    text, messages, config = output.out, output.err, ""
    if name == "import" and "{" in messages:  # without -o, the config is on stdout and the report on stderr
        begin = messages.index("{")
        config, text, messages = text, messages[begin:], messages[:begin]
    try:
        made = json.loads(text)
    except json.JSONDecodeError:
        raise CallError((messages or text).strip() or f"{name} ended with status {output.status}") from None
    if name == "import":
        made["config"] = config
    made, note = cut(made)
    return {"exit_status": output.status, "result": made, "messages": messages[:MAX_CHARACTERS], "note": note}


def cut(made: Any) -> tuple[Any, str]:
    """Cut a result to MAX_CHARACTERS of JSON; return it, and a note of what is missing."""
    if len(json.dumps(made)) <= MAX_CHARACTERS:
        return made, ""
    if isinstance(made, list):
        kept: list[Any] = []
        left = MAX_CHARACTERS
        for item in made:
            left -= len(json.dumps(item)) + 2
            if left < 0:
                break
            kept.append(item)
        return kept, f"cut: the first {len(kept)} of {len(made)} entries; ask for less"
    kept_keys, dropped = dict(made), []
    for key in sorted(made, key=lambda key: len(json.dumps(made[key])), reverse=True):
        if len(json.dumps(kept_keys)) <= MAX_CHARACTERS:
            break
        dropped.append(str(key))
        del kept_keys[key]
    return kept_keys, f"cut: without {', '.join(dropped)}: too long"
