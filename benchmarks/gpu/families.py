"""transformers' models by policy on one device, each in a run of train.py: half precision against float32.

Unlike dslpar's own models, they have buffers, and code that makes tensors as it runs. A run fails if one of these is
not on the device, at any ZeRO stage.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.gpu import processes
from benchmarks.gpu.processes import Ended
from benchmarks.gpu.rows import Row, holds
from benchmarks.gpu.runs import how_it_ended, losses_of, write_text

LIMIT_S = 120.0
"""Time limit of one run, with AT_ONCE runs in parallel."""
AT_ONCE = 6
CONFIG = """
model = dict({model})
data = dict(files=['text.txt'], seq_len=64, {data})
optimizer = dict(type='AdamW', lr=1e-3)
batch = dict(micro_size=4, accumulation=2)
train = dict(steps=12, save_interval=0, clip_grad_norm=1.0)
{kind}
"""
_BLOCKS = "hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256, vocab_size=288"
MODELS: Mapping[str, tuple[str, str]] = {
    "Llama": (f"type='transformers.LlamaForCausalLM', config=dict({_BLOCKS}, max_position_embeddings=64)", ""),
    "BERT": (
        f"type='transformers.BertForMaskedLM', config=dict({_BLOCKS}, max_position_embeddings=64, "
        "hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)",
        "type='mlm'",
    ),
    "T5": (
        "type='transformers.T5ForConditionalGeneration', config=dict(d_model=128, d_kv=32, d_ff=256, num_layers=2, "
        "num_decoder_layers=2, num_heads=4, vocab_size=288, dropout_rate=0.0)",
        "type='span'",
    ),
}
"""By name: the model, and the conversion of text to its samples."""
KINDS: Mapping[str, str] = {
    "fp32": "zero = 0\n",
    "bf16, ZeRO 1": "precision = 'bf16'\nzero = 1\n",
    "bf16, ZeRO 2, recomputed": "precision = 'bf16'\nzero = 2\nactivation_checkpoint = 1\n",
    "fp16, ZeRO 3": "precision = dict(dtype='fp16', initial_scale_power=12)\nzero = 3\n",
}
ON_CPU = ("fp32", "bf16, ZeRO 1")
"""Kinds of one model, when the check itself is tested."""
CLOSE = 0.05
"""Relative difference of the last loss in half precision and float32, as for dslpar's own models."""


def config_of(model: str, kind: str) -> str:
    """Return the text of a run's config."""
    arguments, data = MODELS[model]
    return CONFIG.format(model=arguments, data=data, kind=KINDS[kind])


def learn(device: torch.device) -> Iterator[Row]:
    """Check the first and the last loss of each run. Several run at once, since most of the time is imports."""
    if find_spec("transformers") is None:
        yield Row("models of transformers", "not run", "transformers")
        return
    names = list(MODELS) if device.type == "cuda" else list(MODELS)[:1]
    kinds = list(KINDS) if device.type == "cuda" else ON_CPU
    pairs = [(model, kind) for model in names for kind in kinds]
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(AT_ONCE) as pool:
        folder = Path(name)
        write_text(folder)
        ended = dict(zip(pairs, pool.map(lambda pair: _run(folder, pair[0], pair[1], device), pairs), strict=True))
        losses = {pair: losses_of(folder / _name(*pair)) for pair, end in ended.items() if end.status == 0}
    for (model, kind), end in ended.items():
        what = f"{model} of transformers, {kind}: loss"
        if (model, kind) not in losses:
            yield holds(what, how_it_ended(end), "a run", held=False)
            continue
        first, *_, last = losses[model, kind]
        reference = losses[model, "fp32"][-1] if (model, "fp32") in losses else float("nan")
        close = abs(last - reference) <= CLOSE * reference and last < first
        yield holds(what, f"{first:.3f} -> {last:.3f}", f"within {CLOSE:.0%} of {reference:.3f}", close)


def _name(model: str, kind: str) -> str:
    return f"{model}-{kind}".replace(", ", "-").replace(" ", "-")


def _run(folder: Path, model: str, kind: str, device: torch.device) -> Ended:
    config = folder / f"{_name(model, kind)}.py"
    config.write_text(config_of(model, kind))
    output = folder / _name(model, kind)
    command = [sys.executable, "train.py", "--config", str(config), f"train.output_dir={output}"]
    return processes.run(command, LIMIT_S, os.environ | {"DS_ACCELERATOR": device.type})
