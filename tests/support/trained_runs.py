"""Trained runs for tests, and the layouts on which they are used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.support.digits import load_digits
from tests.support.forked_training import train_alone

TEXT = "".join(f"line {i} says {i * i}, and the one after it {i * i + 2 * i + 1}\n" for i in range(2000))
_SIZES = "num_hidden_layers=2, num_attention_heads=8, hidden_size=32, max_position_embeddings=32, initializer_range=0.2"
MODELS = {
    "gpt": "dict(type='GPT', num_layers=2, hidden_size=32, num_heads=8, vocab_size=259, max_seq_len=32,"
    " activation='gelu_tanh', init_std=0.5)",
    "gpt, rotary": "dict(type='GPT', num_layers=2, hidden_size=32, num_heads=8, num_kv_heads=4, vocab_size=259,"
    " max_seq_len=32, positions='rotary', norm='rmsnorm', activation='swiglu', bias=False, tie_embeddings=False,"
    " init_std=0.5)",
    "llama": "dict(type='transformers.LlamaForCausalLM', config=dict(num_key_value_heads=4, intermediate_size=48,"
    f" vocab_size=259, {_SIZES}))",
    "gpt2": "dict(type='transformers.GPT2LMHeadModel', config=dict(n_embd=32, n_layer=2, n_head=8, n_positions=32,"
    " vocab_size=259, initializer_range=0.5, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))",
    "mistral": "dict(type='transformers.MistralForCausalLM', config=dict(num_key_value_heads=4, intermediate_size=48,"
    f" vocab_size=259, sliding_window=5, {_SIZES}))",
    "bloom": "dict(type='transformers.BloomForCausalLM', config=dict(hidden_size=32, n_layer=2, n_head=8,"
    " vocab_size=259, initializer_range=0.2, hidden_dropout=0.0, attention_dropout=0.0))",
    "mixtral": "dict(type='transformers.MixtralForCausalLM', config=dict(num_key_value_heads=4, intermediate_size=48,"
    f" vocab_size=259, num_local_experts=4, {_SIZES}))",
    "t5": "dict(type='transformers.T5ForConditionalGeneration', config=dict(d_model=32, d_kv=4, d_ff=48, num_layers=2,"
    " num_decoder_layers=2, num_heads=8, vocab_size=280, dropout_rate=0.0, initializer_factor=3.0,"
    " relative_attention_num_buckets=8, relative_attention_max_distance=16))",
    "bert": "dict(type='transformers.BertForMaskedLM', config=dict(num_hidden_layers=2, num_attention_heads=4,"
    " hidden_size=32, intermediate_size=48, vocab_size=260, max_position_embeddings=32))",
    "vit": "dict(type='transformers.ViTForImageClassification', config=dict(num_hidden_layers=2, num_attention_heads=4,"
    " hidden_size=32, intermediate_size=48, image_size=8, patch_size=2, num_channels=1, num_labels=10,"
    " hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))",
}
_TEXT = "seq_len=32, files=['text.txt']"
DATA = {
    "t5": "type='span', seq_len=24, files=['text.txt']",
    "bert": f"type='mlm', {_TEXT}",
    "vit": "type='images', path='digits.npz', eval_fraction=0.2",
}


def train(folder: Path, name: str, *overrides: str) -> Path:
    """Train a model of MODELS for a few steps, in one process; return the run's folder."""
    (folder / "text.txt").write_text(TEXT)
    digits = load_digits()
    np.savez(folder / "digits.npz", images=(digits.images[:200] / 16).astype(np.float32), labels=digits.target[:200])
    config = folder / "cfg.py"
    config.write_text(
        f"model = {MODELS[name]}\n"
        f"data = dict({DATA.get(name, _TEXT)})\n"
        "optimizer = dict(type='AdamW', lr=1e-3)\n"
        "batch = dict(global_size=4)\n"
        f"train = dict(steps=3, eval_interval=3, eval_steps=2, output_dir={str(folder / 'out')!r})\n"
    )
    done = train_alone("--config", str(config), *overrides)
    assert done.status == 0, done.output
    return folder / "out"


def _parallel(size: int, **sections: Any) -> tuple[int, str]:
    return size, f"parallel={sections!r}"


def _tensor(size: int, mode: str, **more: Any) -> dict[str, Any]:
    return {"tensor": {"size": size, "mode": mode, **more}}


LAYOUTS: dict[str, tuple[int, str]] = {
    "1d-2": _parallel(2, **_tensor(2, "1d")),
    "1d-4": _parallel(4, **_tensor(4, "1d")),
    "1d-8": _parallel(8, **_tensor(8, "1d")),
    "1d-2-sequence": _parallel(2, **_tensor(2, "1d", sequence=True)),
    "1d-4-sequence": _parallel(4, **_tensor(4, "1d", sequence=True)),
    "2d-4": _parallel(4, **_tensor(4, "2d")),
    "2.5d-2": _parallel(2, **_tensor(2, "2.5d", depth=2)),
    "2.5d-8": _parallel(8, **_tensor(8, "2.5d", depth=2)),
    "3d-8": _parallel(8, **_tensor(8, "3d")),
    "cuboid-1-2-2": _parallel(4, tensor={"size": 4, "mode": "cuboid", "shape": (1, 2, 2)}),
    "cuboid-2-1-2": _parallel(4, tensor={"size": 4, "mode": "cuboid", "shape": (2, 1, 2)}),
    "ring-2": _parallel(2, **_tensor(2, "sequence")),
    "ring-4": _parallel(4, **_tensor(4, "sequence")),
    "ulysses-2": _parallel(2, **_tensor(2, "sequence", impl="ulysses")),
    "pipe-2": _parallel(2, pipeline=2),
    "pipe-2-1d-2": _parallel(4, pipeline=2, **_tensor(2, "1d")),
    "pipe-2-1d-4": _parallel(8, pipeline=2, **_tensor(4, "1d")),
    "pipe-2-2d-4": _parallel(8, pipeline=2, **_tensor(4, "2d")),
    "pipe-2-ring-2": _parallel(4, pipeline=2, **_tensor(2, "sequence")),
    "pipe-2-ulysses-2": _parallel(4, pipeline=2, **_tensor(2, "sequence", impl="ulysses")),
    "data-2-pipe-2-1d-2": _parallel(8, pipeline=2, **_tensor(2, "1d")),
    "data-3": _parallel(3, pipeline=1),
}
"""Number of ranks, and the override that lays the model out on them; remaining ranks are replicas."""
