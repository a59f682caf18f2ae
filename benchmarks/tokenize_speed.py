"""`dslpar data tokenize` against Hugging Face's tokenizers called directly on the same files, on all cores.

The reference reads the standard library's source, encodes it with `encode_batch` on the library's own threads, and
takes the ids, without writing. dslpar's time includes all but the start of Python: reading, encoding, writing, digests,
fsync.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measure import Costs, Ratio, in_turns, ratio
from dslpar.data.corpus import walk
from dslpar.data.tokenize import Request, tokenize
from dslpar.data.train_tokenizer import train_tokenizer

TARGET = 1 / 0.9
_REFERENCE = """
import sys, time
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[1])
began = time.perf_counter()
texts = [open(path, "rb").read().decode("utf-8", "replace") for path in sys.argv[2:]]
ids = [encoded.ids for encoded in tokenizer.encode_batch(texts, add_special_tokens=False)]
print(time.perf_counter() - began)
"""


def ratios() -> Iterator[Ratio]:
    """Yield wall time."""
    files = [file.path for file in walk(sysconfig.get_path("stdlib")) if file.name.endswith(".py")][:400]
    with tempfile.TemporaryDirectory() as folder:
        train_tokenizer(files[:40], f"{folder}/tokenizer", 8000)
        tokenizer = str(Path(folder, "tokenizer", "tokenizer.json"))
        count = iter(range(1_000_000))

        def ours() -> Costs:
            began = time.perf_counter()
            tokenize(Request(files, f"{folder}/{next(count)}", tokenizer, workers=len(os.sched_getaffinity(0))))
            return (time.perf_counter() - began,)

        def reference() -> Costs:
            # in a separate process: this process could not fork after its threads have started
            command = [sys.executable, "-c", _REFERENCE, tokenizer, *files]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            return (float(done.stdout),)

        (walls,) = zip(*in_turns(ours, reference, pairs=15), strict=True)
    yield ratio("dslpar data tokenize / tokenizers called directly, wall time", walls, TARGET)
