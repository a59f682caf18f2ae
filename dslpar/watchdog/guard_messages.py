"""Guards' messages: their fields, and the checks of their values. Anything else is an invalid message.

    guard to hub        who, host, at, aborted | at | failed | aborted | stuck (reason) | stacks, at | bye
    hub to guard        who, host, at, aborted | at | end, host_lost, first | aborted | show | bye
    guard to launch     at | mark (name), text
    launch to guard     stop (signal)

In this table `|` separates the kinds of messages, and each kind is listed by its fields. A message is one line of JSON.
"launch" is `dslpar launch` on another host.

    who, host           the rank's name and host, in a guard's first message and in the hub's answer
    at                  the beat: location, phase and step of the sender's rank
    failed, aborted     a rank has failed, or has aborted
    stuck               why the rank counts as stuck
    show, stacks        the hub asks for the stacks of the guard's rank, and the guard sends them
    end, host_lost      the guard must end its rank; whether the cause is a lost host
    first               the rank that failed first, in the order in which the hub learned of failures
    mark, text          a mark's file name and its contents (marks.py)
    stop                a signal that the guard must send to its rank
    bye                 the sender leaves in order

The sender has proved that it belongs to the job (authentication.py). The reader checks every message all the same, so
that no line can crash it.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Mapping
from typing import Any

Message = Mapping[str, Any]
Check = Callable[[object], bool]
Fields = Mapping[str, Check]
"""The fields that a message may have, each with the check of its value."""

MAX_TEXT = 1 << 16
"""The most characters of a traceback or of stacks. In a mark (JSON within JSON) a character takes at most 14 bytes."""
MAX_BYTES = 1 << 20
"""The longest message: a mark with a text of MAX_TEXT characters fits."""
LEFT_OUT = "\n(the rest is left out)\n"
_MAX_NAME = 1024
_MAX_STEP = 1 << 62
_MARK = re.compile(r"\d{1,9}\.(born|error|ended|result|stopped|verdict)")


def cut(text: str) -> str:
    """Cut the end off a text that is longer than MAX_TEXT."""
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - len(LEFT_OUT)] + LEFT_OUT


def is_text(value: object) -> bool:
    """Return whether a value is a text of any number of lines."""
    return isinstance(value, str) and len(value) <= MAX_TEXT


def is_name(value: object) -> bool:
    """Return whether a value is a short text of one line, without control characters."""
    return isinstance(value, str) and len(value) <= _MAX_NAME and value.isprintable()


def is_flag(value: object) -> bool:
    """Return whether a value is a bool."""
    return isinstance(value, bool)


def is_step(value: object) -> bool:
    """Return whether a value is a step number."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_STEP


def _is_beat(value: object) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(map(is_name, value[:2])) and is_step(value[2])


def _is_any_text(value: object) -> bool:
    return isinstance(value, str)


def _is_mark(value: object) -> bool:
    return isinstance(value, str) and _MARK.fullmatch(value) is not None


def _is_stop(value: object) -> bool:
    return not isinstance(value, bool) and value in (signal.SIGTERM, signal.SIGUSR1)


_BEAT: Fields = {"at": _is_beat, "bye": is_flag}
_NAMES: Fields = {"who": is_name, "host": is_name}
TO_HUB: Fields = {**_BEAT, **_NAMES, "failed": is_flag, "aborted": is_flag, "stuck": is_name, "stacks": is_text}
FROM_HUB: Fields = {
    **_BEAT,
    **_NAMES,
    "end": is_flag,
    "host_lost": is_flag,
    "first": is_step,
    "aborted": is_flag,
    "show": is_flag,
}
TO_LAUNCH: Fields = {**_BEAT, "mark": _is_mark, "text": _is_any_text}
FROM_LAUNCH: Fields = {"stop": _is_stop}


def encode(message: Message) -> bytes:
    """Encode a message as one line. Lone surrogates, as in file names, become JSON's own escapes."""
    return json.dumps(message, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


def decode(line: bytes, fields: Fields) -> Message | None:
    """Return the message that a line holds; None if the line is invalid."""
    try:
        message = json.loads(line.decode())
    except (ValueError, RecursionError, MemoryError):
        return None
    if not isinstance(message, dict):
        return None
    valid = all(name in fields and fields[name](value) for name, value in message.items())
    return message if valid else None
