"""Time of the language server from a key stroke to the findings, to completions, and to a hover, over stdio.

The config has 300 lines and six files that it imports. A client sends 1,000 random edits, most of which do not parse.
The lines are the 95th percentile as a share of 50 ms, with its 95 % interval from order statistics, and the server's
memory after 20,000 edits over that after 1,000. They need pip install 'dslpar[lsp]'.

    python -m benchmarks lsp_speed
    python -m benchmarks.lsp_speed --edits 1000         # the percentiles in milliseconds
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.measure import Ratio
from benchmarks.random_edits import edited

MOST_MS = 50.0
EDITS, MORE_EDITS = 1_000, 20_000
LINES, IMPORTS = 300, 6
MOST_GROWTH = 1.1


class Times(NamedTuple):
    """Milliseconds of each edit, and the server's memory."""

    diagnostics: list[float]
    completion: list[float]
    hover: list[float]
    rss: list[int]
    """Bytes after the first edits and after all."""


def config(folder: Path) -> str:
    """Write the imported files; return the text of a legal config of 300 lines."""
    for number in range(IMPORTS):
        (folder / f"part{number}.py").write_text(f"steps{number} = {number + 1} * 1000\nlr{number} = 1e-{number + 2}\n")
    lines = [
        "# dslpar: world-size=64 device=h100-80g",
        *(f"from .part{number} import lr{number}, steps{number}" for number in range(IMPORTS)),
        "parallel = dict(pipeline=2, tensor=dict(size=4, mode='1d'))",
        "model = dict(type='GPT', num_layers=32, hidden_size=4096, num_heads=32, vocab_size=32000, max_seq_len=4096)",
        "batch = dict(global_size=512, micro_size=2)",
        "train = dict(steps=steps0 + steps1)",
        "optimizer = dict(type='AdamW', lr=lr2)",
    ]
    lines += [f"_value{number} = {number} * steps{number % IMPORTS}" for number in range(LINES - len(lines))]
    return "\n".join(lines) + "\n"


async def times(edits: int, more: int = 0) -> Times:
    """Drive a server with `edits` measured edits, and `more` that are not."""
    from lsprotocol import types
    from pygls.lsp.client import LanguageClient

    client, arrived = LanguageClient("benchmark", "1"), asyncio.Event()
    version = 0

    def publish(params: types.PublishDiagnosticsParams) -> None:
        if params.version == version:
            arrived.set()

    client.feature(types.TEXT_DOCUMENT_PUBLISH_DIAGNOSTICS)(publish)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path, text = folder / "cfg.py", config(folder)
        uri, document = path.as_uri(), types.TextDocumentIdentifier(path.as_uri())
        await client.start_io(sys.executable, "-m", "dslpar", "lsp")
        server = psutil.Process(_of(client).pid)
        shows = types.PublishDiagnosticsClientCapabilities(related_information=True)  # as Neovim and VS Code say
        able = types.ClientCapabilities(text_document=types.TextDocumentClientCapabilities(publish_diagnostics=shows))
        await client.initialize_async(types.InitializeParams(capabilities=able))
        client.initialized(types.InitializedParams())
        client.text_document_did_open(types.DidOpenTextDocumentParams(types.TextDocumentItem(uri, "python", 0, text)))
        await arrived.wait()

        async def change(to: str) -> None:
            nonlocal version
            version += 1
            arrived.clear()
            of = types.VersionedTextDocumentIdentifier(version=version, uri=uri)
            whole = types.TextDocumentContentChangeWholeDocument(to)
            client.text_document_did_change(types.DidChangeTextDocumentParams(of, [whole]))
            await arrived.wait()

        made, rng = Times([], [], [], []), random.Random(1)
        texts = edited(text, rng)
        for each in islice(texts, edits):
            line = rng.randrange(each.count("\n") + 1)
            place = types.Position(line, rng.randrange(len(each.split("\n")[line]) + 1))
            began = time.perf_counter()
            await change(each)
            seen = time.perf_counter()
            await client.text_document_completion_async(types.CompletionParams(document, place))
            completed = time.perf_counter()
            await client.text_document_hover_async(types.HoverParams(document, place))
            ended = time.perf_counter()
            for kind, ms in zip(made[:3], (seen - began, completed - seen, ended - completed), strict=True):
                kind.append(1e3 * ms)
        made.rss.append(server.memory_info().rss)
        for each in islice(texts, more):
            await change(each)
        made.rss.append(server.memory_info().rss)
        await client.shutdown_async(None)
        client.exit(None)
        await client.stop()
    return made


def _of(client: Any) -> Any:
    return client._server


def percentile(values: Sequence[float], share: float) -> tuple[float, float, float]:
    """Return a percentile with its 95 % interval: the order statistics that the binomial distribution gives."""
    ordered, n = sorted(values), len(values)
    at, half = share * (n - 1), 1.96 * math.sqrt(n * share * (1 - share))
    low, middle, high = (ordered[min(max(round(place), 0), n - 1)] for place in (at - half, at, at + half))
    return middle, low, high


def ratios() -> Iterator[Ratio]:
    """Yield the 95th percentiles as shares of 50 ms, and the growth of memory."""
    made = asyncio.run(times(EDITS, MORE_EDITS - EDITS))
    for name, values in zip(("findings", "completion", "hover"), made[:3], strict=True):
        middle, low, high = (each / MOST_MS for each in percentile(values, 0.95))
        yield Ratio(f"lsp: {name} after an edit, p95 / {MOST_MS:.0f} ms", middle, low, high, 1.0)
    growth = made.rss[1] / made.rss[0]
    yield Ratio(f"lsp: memory after {MORE_EDITS:,} edits / after {EDITS:,}", growth, growth, growth, MOST_GROWTH)


def main() -> int:
    """Print the percentiles in milliseconds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lsp_speed", description=__doc__)
    parser.add_argument("--edits", type=int, default=EDITS, help="number of edits")
    made = asyncio.run(times(parser.parse_args().edits))
    show: Callable[[float], str] = "{:8.1f}".format
    print(f"{'ms':12}{'p50':>8}{'p95':>8}")
    for name, values in zip(("findings", "completion", "hover"), made[:3], strict=True):
        print(f"{name:12}{show(percentile(values, 0.5)[0])}{show(percentile(values, 0.95)[0])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
