"""Hostile bytes that a stranger or a broken peer may write to a socket: they end, freeze or deceive parsers."""

from __future__ import annotations

import contextlib
import json
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dslpar.watchdog import connections, guard_messages
from dslpar.watchdog.authentication import Key
from dslpar.watchdog.connections import Connection

MEMORY_BYTES = 100_000_000
"""Memory limit of the attacked process."""

FIXED = (
    b"[" * 200_000,
    b'{"at":' * 50_000,
    b'{"a":' + b"9" * 5_000 + b"}",
    b'{"at": ["", "", 1e999]}',
    b'{"at": NaN}',
    b'"\\ud800"',
    b"\xff\xfe{\x00}\x00",
    b"\x00" * 4096,
    b"",
    b"null",
    b"{}",
    b"{}\n" * 2_000,
    b"\n" * 5_000,
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"SSH-2.0-OpenSSH_9.6\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
    b"dslpar " + b"0" * 32,
    b"1 " + b"0" * 32 + b" " + b"0" * 64,
    b"999999999999 " + b"0" * 32 + b" " + b"0" * 64,
    b'{"who": "\\u001b]0;owned\\u0007", "host": "host0", "at": ["", "", 0]}',
    b'{"mark": "../../etc/passwd", "text": "x"}',
    b'{"mark": "0.error", "text": "[[0, 2, \\"h\\", 1], \\"cause\\", 1.0, \\"\\", \\"\\", \\"\\"]]"}',
    b'{"mark": "1.verdict", "text": "[[1, 2, \\"h\\", 1], 0.5, \\"hangs\\", \\"\\", \\"\\", -9, false]"}',
)
_FIELDS = ("who", "host", "at", "failed", "stuck", "stacks", "bye", "end", "host_lost", "show", "mark", "text", "stop")
_VALUES: tuple[Any, ...] = (
    *(None, -1, 10**30, 1e308, "", "\x1b[2J", "x" * 100_000, [], {}, [1], ["", "", "7"], ["", "", True]),
    *([[[]]], ["", 0, 0], {"at": 1}, "0.born", "0.board", "٣.born", -9, 2**63, "\ud800"),
)
"""No value is valid for any of these fields, except harmless texts in `stacks`, `text`, `who` and `host`."""


def hostile_lines(count: int, seed: int = 0) -> Iterator[bytes]:
    """Yield byte strings, most of which end with a line break. No string is a valid order to a guard."""
    draw = random.Random(seed)
    for number in range(count):
        if number < len(FIXED):
            yield FIXED[number] + b"\n"
            continue
        kind = draw.randrange(4)
        if kind == 0:
            yield draw.randbytes(draw.choice((1, 7, 60, 1023, 1024, 1025, 3000)))
        elif kind == 1:
            yield _message(draw) + b"\n"
        elif kind == 2:  # flip a bit, or replace a byte
            text = bytearray(draw.choice(FIXED)[:2000] or b"{}")
            for _ in range(draw.randrange(1, 4)):
                text[draw.randrange(len(text))] = draw.randrange(256)
            yield bytes(text) + b"\n"
        else:
            text = _message(draw)
            yield text[: draw.randrange(len(text))] + draw.choice((b"\n", b"", b"\n\n", b"\x00\n"))


def _message(draw: random.Random) -> bytes:
    wrong = {draw.choice(_FIELDS): draw.choice(_VALUES) for _ in range(draw.randrange(1, 4))}
    wrong.pop("stuck", None)  # a text there would be a valid order
    return json.dumps(wrong, ensure_ascii=draw.random() < 0.5).encode("utf-8", "surrogatepass")


def dial(port: int, number: int = 0, address: str = "127.0.0.1") -> socket.socket:
    """Connect, on this host from one of many addresses, so that ports do not run out. Closing leaves no connection
    behind.
    """
    source = f"127.{1 + number // 60_000 % 250}.{number // 250 % 240}.{1 + number % 250}"
    here = (source, 0) if address == "127.0.0.1" else None
    stranger = socket.create_connection((address, port), 5, source_address=here)
    stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    return stranger


def join(
    port: int, key: Key, rank: int, fields: guard_messages.Fields = guard_messages.FROM_HUB, address: str = "127.0.0.1"
) -> Connection:
    """Connect as the guard of a rank."""
    # A guard beside training ranks answers when it is scheduled: on few cores with a browser beside, not within 5 s.
    connection = connections.connect(address, port, key, rank=rank, fields=fields, timeout_s=30)
    assert connection is not None
    return connection


def attack(port: int, count: int, key: Key | None, rank: int = 1, address: str = "127.0.0.1") -> None:
    """Send each string on its own connection, with a key as the guard of that rank."""
    for number, line in enumerate(hostile_lines(count, seed=count)):
        with contextlib.suppress(OSError):  # the peer closes it in the middle
            if key is None:
                with dial(port, number, address) as stranger:
                    stranger.sendall(line)
            else:
                guard = join(port, key, rank, address=address)
                guard.socket.settimeout(5)
                guard.socket.sendall(line)
                guard.close()


def peak_bytes(pid: int) -> int:
    """Return the peak memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024
