"""train.py on each data type: one process's losses on many ranks, and after a resume on another layout."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dslpar.training import main as training_main
from tests.support.digits import load_digits
from tests.support.ranks import on_ranks
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

if not HAS_TRANSFORMERS:
    pytest.skip(NO_TRANSFORMERS, allow_module_level=True)

ENCODER = "hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64"
VIT = f"{ENCODER}, image_size=8, patch_size=2, num_channels=1"
WITHOUT_DROPOUT = "hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0"
CONFIGS = {
    "BERT": (
        f"BertForPreTraining', config=dict({ENCODER}, {WITHOUT_DROPOUT}, vocab_size=260, max_position_embeddings=32)",
        "type='mlm', files=['text']",
    ),
    "RoBERTa": (
        f"RobertaForMaskedLM', config=dict({ENCODER}, {WITHOUT_DROPOUT}, vocab_size=260, max_position_embeddings=34)",
        "type='mlm', files=['text'], whole_words=True",
    ),
    "T5": (
        "T5ForConditionalGeneration', config=dict(d_model=32, d_kv=8, d_ff=64, num_layers=1, num_decoder_layers=1, "
        "num_heads=4, vocab_size=300, dropout_rate=0.0)",
        "type='span', files=['text'], seq_len=32",
    ),
    "ViT": (f"ViTForImageClassification', config=dict({VIT}, num_labels=10)", "type='images', path='digits.npz'"),
    "ViTMAE": (
        f"ViTMAEForPreTraining', config=dict({VIT}, decoder_num_hidden_layers=1, decoder_hidden_size=32, "
        "decoder_num_attention_heads=4, decoder_intermediate_size=64)",
        "type='images', path='digits.npz', flip=True",
    ),
}
"""Model and data. An epoch is 60 samples, which are 4 1/2 steps."""


def written(folder: Path, name: str) -> str:
    model, data = CONFIGS[name]
    (folder / "text").mkdir()
    words = np.random.default_rng(3).integers(97, 123, 40 * 60, dtype=np.uint8).tobytes()
    for number in range(4):
        (folder / "text" / f"{number}.txt").write_bytes(words[number * 600 : (number + 1) * 600])
    digits = load_digits()
    np.savez(folder / "digits.npz", images=(digits.images[:64] / 16).astype(np.float32), labels=digits.target[:64])
    path = folder / "cfg.py"
    path.write_text(f"""
model = dict(type='transformers.{model})
data = dict({data}, eval_fraction=0.05)
optimizer = dict(type='SGD', lr=1e-2)
batch = dict(global_size=12, micro_size=6)
train = dict(steps=8, eval_interval=8, eval_steps=1)
""")
    return str(path)


def run(config: str, folder: Path, world: int, *words: str) -> list[float]:
    """Return the loss of each step in metrics.jsonl, and the evaluation's."""
    arguments = ["--config", config, f"train.output_dir={folder}", *words]
    assert on_ranks(world, training_main.main, arguments, init=None) == [0] * world
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [*(record["loss"] for record in records), records[-1]["eval_loss"]]


PIPELINE_AND_1D = "parallel={'pipeline': 2, 'tensor': {'size': 2, 'mode': '1d'}}"


@pytest.mark.prove
@pytest.mark.parametrize("name", CONFIGS)
def test_losses_are_those_of_one_process_also_after_a_resume_elsewhere(tmp_path: Path, name: str) -> None:
    config = written(tmp_path, name)
    alone = run(config, tmp_path / "alone", 1)
    assert len(alone) == 9
    spread = run(config, tmp_path / "spread", 4, PIPELINE_AND_1D)
    assert spread == pytest.approx(alone, rel=1e-5)
    # in the middle of the second epoch, from replicas to a pipeline of tensor ranks
    half = run(config, tmp_path / "half", 2, "train.steps=6", "train.eval_interval=6")
    resumed = run(config, tmp_path / "half", 4, "--resume", PIPELINE_AND_1D)
    assert half[:6] == pytest.approx(alone[:6], rel=1e-5)
    assert resumed == pytest.approx(alone, rel=1e-5)


def test_masked_text_over_stages(tmp_path: Path) -> None:
    config = written(tmp_path, "BERT")
    steps = ("train.steps=2", "train.eval_interval=2", "train.save_interval=0")
    alone = run(config, tmp_path / "alone", 1, *steps)
    assert run(config, tmp_path / "spread", 2, "parallel.pipeline=2", *steps) == pytest.approx(alone, rel=1e-5)
