"""Authentication of guards: both sides of a connection prove that they know the job's secret, without sending it.

    server    dslpar NONCE                      as soon as a client has connected
    client    RANK NONCE PROOF                  within STRANGER_S
    server    PROOF                             or it closes the connection; messages follow (connections.py)

The client is a guard. The server is the hub (rank 0's guard) or `dslpar launch`. RANK is the rank of the client.

This is a challenge-response as in `multiprocessing.connection`, on raw bytes. From a client that is not authenticated,
the server reads at most STRANGER_BYTES and parses no JSON. A proof is an HMAC-SHA256 over both sides' nonces, the
client's rank, the requested service, and the side that sends the proof. An attacker who overhears a proof can therefore
use it neither on another connection, nor for another rank or service, nor against the side that sent it. Later messages
are neither encrypted nor signed, like all torch.distributed traffic. This does not keep out an attacker who can change
packets between the hosts.
"""

from __future__ import annotations

import hmac
import os
import re
from pathlib import Path
from typing import NamedTuple

STRANGER_BYTES = 1024
"""The most bytes that are read from a peer before it is authenticated."""
STRANGER_S = 2.0
"""Time for a peer to authenticate."""
_GREETING = re.compile(rb"dslpar ([0-9a-f]{32})")
_ANSWER = re.compile(rb"(\d{1,9}) ([0-9a-f]{32}) ([0-9a-f]{64})")


class Key(NamedTuple):
    """A job's secret, and the service that it is used for."""

    secret: str
    service: str
    """"hub" (rank 0's guard) or "launch" (`dslpar launch`)."""

    def proof(self, speaker: str, server_nonce: str, client_nonce: str, rank: int) -> str:
        """Return the proof that `speaker`, which is "client" or "server", knows the secret."""
        text = f"{self.service} {speaker} {server_nonce} {client_nonce} {rank}"
        return hmac.new(self.secret.encode(), text.encode(), "sha256").hexdigest()


class Answer(NamedTuple):
    """A client's answer to a server's greeting."""

    line: bytes
    """The line to send."""
    proof: bytes
    """The proof that the server must send after this line."""


def new_secret() -> str:
    """Return a new secret for a job. The module `secrets` would load five times as much into each guard."""
    return os.urandom(16).hex()


def greeting(nonce: str) -> bytes:
    """Return the line with which a server greets each client."""
    return b"dslpar %s\n" % nonce.encode()


def answer(key: Key, rank: int, line: bytes) -> Answer | None:
    """Return a client's answer to a server's greeting; None if the greeting is invalid, or if `key` has no secret."""
    if not key.secret or not (match := _GREETING.fullmatch(line)):
        return None
    server_nonce, nonce = match[1].decode(), new_secret()
    proof = key.proof("client", server_nonce, nonce, rank)
    return Answer(f"{rank} {nonce} {proof}\n".encode(), key.proof("server", server_nonce, nonce, rank).encode())


def verify(key: Key, nonce: str, line: bytes) -> tuple[int, bytes] | None:
    """Check `line`, a client's answer to the greeting with `nonce`.

    Return the client's rank, and the line with the server's proof; None if the client's proof is invalid.
    """
    if not key.secret or not (match := _ANSWER.fullmatch(line)):
        return None
    rank, client_nonce = int(match[1]), match[2].decode()
    expected = key.proof("client", nonce, client_nonce, rank)
    if not hmac.compare_digest(expected.encode(), match[3]):
        return None
    return rank, f"{key.proof('server', nonce, client_nonce, rank)}\n".encode()


# ---- the secret, from host to host ----


def write_secret(path: Path, secret: str) -> None:
    """Write a secret to a new file that only its owner may read. Every user of a host could see it in a command line.

    Raises:
        OSError: the file exists, or cannot be written.
    """
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write(secret)


def read_secret(path: str) -> str:
    """Return the secret in a file; empty if it cannot be read."""
    try:
        return Path(path).read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""
