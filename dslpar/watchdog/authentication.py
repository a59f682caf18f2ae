"""Authentication of guards: both sides of a connection prove that they know the job's secret, and neither sends it.

    server    dslpar NONCE                      as soon as somebody has connected
    client    RANK NONCE PROOF                  within STRANGER_S
    server    PROOF                             or it closes the connection; messages follow (protocol.py)

A challenge-response as in `multiprocessing.connection`, on raw bytes: of a stranger no JSON is parsed, and no more than
STRANGER_BYTES are read. A proof is an HMAC-SHA256 over the nonces of both sides, the client's rank, the service that it
asks for and who speaks, so that a proof which was overheard is worth nothing: at no other connection, for no other rank
or service, nor sent back to its author. What follows is neither encrypted nor signed, as all traffic of
torch.distributed is not: who can change packets between the hosts is not kept out.
"""

from __future__ import annotations

import hmac
import os
import re
from pathlib import Path
from typing import NamedTuple

STRANGER_BYTES = 1024
"""How much is read of a peer before it is authenticated."""
STRANGER_S = 2.0
"""How long it may take for that."""
_GREETING = re.compile(rb"dslpar ([0-9a-f]{32})")
_ANSWER = re.compile(rb"(\d{1,9}) ([0-9a-f]{32}) ([0-9a-f]{64})")


class Key(NamedTuple):
    """A job's secret, for one of its services."""

    secret: str
    service: str
    """`hub` or `launch`."""

    def proof(self, speaker: str, server_nonce: str, client_nonce: str, rank: int) -> str:
        """Return what shows that `speaker`, client or server, knows the secret."""
        text = f"{self.service} {speaker} {server_nonce} {client_nonce} {rank}"
        return hmac.new(self.secret.encode(), text.encode(), "sha256").hexdigest()


class Answer(NamedTuple):
    """What a client answers to a server's greeting."""

    line: bytes
    proof: bytes
    """What the server must then send to prove itself."""


def new_secret() -> str:
    """Return a secret for a job. Not by the module secrets, which loads five times as much into each guard."""
    return os.urandom(16).hex()


def greeting(nonce: str) -> bytes:
    """Return the line with which a server greets whoever connects."""
    return b"dslpar %s\n" % nonce.encode()


def answer(key: Key, rank: int, line: bytes) -> Answer | None:
    """Return a client's answer to a server's greeting; None: it is none."""
    if not key.secret or not (match := _GREETING.fullmatch(line)):
        return None
    server_nonce, nonce = match[1].decode(), new_secret()
    proof = key.proof("client", server_nonce, nonce, rank)
    return Answer(f"{rank} {nonce} {proof}\n".encode(), key.proof("server", server_nonce, nonce, rank).encode())


def verify(key: Key, nonce: str, line: bytes) -> tuple[int, bytes] | None:
    """Return the client's rank, and the line that proves the server to it; None: it does not know the secret."""
    if not key.secret or not (match := _ANSWER.fullmatch(line)):
        return None
    rank, client_nonce = int(match[1]), match[2].decode()
    expected = key.proof("client", nonce, client_nonce, rank)
    if not hmac.compare_digest(expected.encode(), match[3]):
        return None
    return rank, f"{key.proof('server', nonce, client_nonce, rank)}\n".encode()


# ---- the secret, from host to host ----


def write_secret(path: Path, secret: str) -> None:
    """Write a secret to a new file that its owner alone may read: command lines are for all users of a host to see.

    Raises:
        OSError: the file exists, or cannot be written.
    """
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write(secret)


def read_secret(path: str) -> str:
    """Return the secret in a file; empty where there is none to be read."""
    try:
        return Path(path).read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""
