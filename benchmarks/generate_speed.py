"""`dslpar generate` against transformers' own `generate` on the same weights, both with a KV cache.

A Llama of four layers is trained for a step and exported. Then 8 prompts of one length are continued greedily, in one
process and on one thread. The tokens must be equal. Only generation is timed.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import Costs, Ratio, in_turns, ratio
from dslpar.checkpoint.export_transformers import export_transformers
from dslpar.distributed.groups import Groups
from dslpar.inference.generation import Options, generate
from dslpar.inference.model import InferenceModel
from dslpar.inference.trained import find_checkpoint, open_run
from tests.support.forked_training import train_alone

TARGET = 1.5
MAX_TOKENS = 64
PROMPTS = [[number * 31 % 256 for number in range(begin, begin + 16)] for begin in range(8)]
_CONFIG = """
model = dict(type='transformers.LlamaForCausalLM', config=dict(hidden_size=256, intermediate_size=704, vocab_size=259,
             num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=128))
data = dict(files=['text.txt'], seq_len=64)
optimizer = dict(type='AdamW', lr=1e-3)
batch = dict(global_size=4)
train = dict(steps=1, output_dir='out')
"""


def ratios() -> Iterator[Ratio]:
    """Yield the ratio of CPU time."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text.txt").write_text("what is learned does not matter here\n" * 500)
        (folder / "cfg.py").write_text(_CONFIG)
        done = train_alone("--config", str(folder / "cfg.py"), f"train.output_dir={str(folder / 'out')!r}")
        assert done.status == 0, done.output
        export_transformers(find_checkpoint(folder / "out"), folder / "hf")
        trained = open_run(str(folder / "out"), 1)
        model = InferenceModel(trained, Groups(trained.job.mesh), torch.device("cpu"))
        (costs,) = zip(*in_turns(_ours(model), _transformers(folder / "hf"), pairs=15), strict=True)
    yield ratio("dslpar generate / transformers' generate, CPU time", costs, TARGET)


def _ours(model: InferenceModel) -> Any:
    def run() -> Costs:
        began = time.process_time()
        _seen(generate(model, PROMPTS, Options(max_tokens=MAX_TOKENS)))
        return (time.process_time() - began,)

    return run


def _transformers(folder: Path) -> Any:
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.tensor(PROMPTS)
    settings = {"do_sample": False, "max_new_tokens": MAX_TOKENS, "pad_token_id": 0, "eos_token_id": None}

    def run() -> Costs:
        began = time.process_time()
        _seen(model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[:, ids.shape[1] :].tolist())
        return (time.process_time() - began,)

    return run


_KNOWN: list[list[list[int]]] = []


def _seen(tokens: list[list[int]]) -> None:
    """Fail unless both sides generate the same tokens."""
    _KNOWN.append(tokens)
    assert _KNOWN[0] == tokens
