"""transformers' models learn on eight ranks as in one process, from configs that differ in `parallel` alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dslpar
from tests.support.plain_models import written
from tests.support.ranks import on_ranks
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

if not HAS_TRANSFORMERS:
    pytest.skip(NO_TRANSFORMERS, allow_module_level=True)

import transformers

from tests.support import learning

pytestmark = [pytest.mark.prove, pytest.mark.minutes(10)]

ENCODER = "hidden_size=64, num_hidden_layers=4, num_attention_heads=8, intermediate_size=128, hidden_dropout_prob=0.0"
MODELS = {
    "Llama": (
        "type='transformers.LlamaForCausalLM', config=dict(hidden_size=64, num_hidden_layers=4, num_attention_heads=8, "
        "num_key_value_heads=4, intermediate_size=128, vocab_size=260, max_position_embeddings=32)",
        learning.NextByte,
    ),
    "BERT": (
        f"type='transformers.BertForPreTraining', config=dict({ENCODER}, attention_probs_dropout_prob=0.0, "
        "vocab_size=260, max_position_embeddings=32, initializer_range=0.1)",
        learning.Masked,
    ),
    "T5": (
        "type='transformers.T5ForConditionalGeneration', config=dict(d_model=64, d_kv=8, d_ff=128, num_layers=2, "
        "num_decoder_layers=2, num_heads=8, vocab_size=260, dropout_rate=0.0)",
        learning.Denoised,
    ),
    "ViT": (
        f"type='transformers.ViTForImageClassification', config=dict({ENCODER}, attention_probs_dropout_prob=0.0, "
        "image_size=8, patch_size=2, num_channels=1, num_labels=10, initializer_range=0.15)",
        lambda: learning.digits().train,
    ),
    "ViTMAE": ("type='transformers.ViTMAEForPreTraining', pretrained='folder'", learning.Hidden),
}
ON_EIGHT = "parallel = dict(pipeline=2, tensor=dict(size=2, mode='1d'))\n"
"""Eight ranks: two stages, two replicas, two tensor ranks."""


def config(model: str, steps: int, parallel: str = "") -> str:
    return f"""
model = dict({MODELS[model][0]})
optimizer = dict(type='AdamW', lr=1e-3)
lr_scheduler = dict(type='cosine', warmup_steps=10)
batch = dict(global_size=32, accumulation=2)
train = dict(steps={steps}, clip_grad_norm=1.0)
{parallel}"""


def folder_of_mae(tmp_path: Path) -> None:
    """Save a ViTMAE with positions, which transformers initializes with zeros and does not train."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 128}
    decoder = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 8, "intermediate_size": 64}
    of_images = {"image_size": 8, "patch_size": 2, "num_channels": 1, "mask_ratio": 0.5, "initializer_range": 0.1}
    torch.manual_seed(0)
    model = transformers.ViTMAEForPreTraining(
        transformers.ViTMAEConfig(**sizes, **{f"decoder_{name}": size for name, size in decoder.items()}, **of_images)
    )
    embeddings = model.vit.embeddings
    embeddings.patch_embeddings.projection._is_hf_initialized = False  # else it takes all as done
    embeddings.initialize_weights()
    model.decoder.initialize_weights(embeddings.patch_embeddings.num_patches)
    assert embeddings.position_embeddings.any()
    model.save_pretrained(tmp_path / "folder")


def steps_of(model: str, path: str, steps: int) -> tuple[Any, Iterator[float]]:
    """Return the engine, and the loss of each step as it is taken."""
    given = dslpar.initialize(path, train_data=MODELS[model][1]())
    engine = given.engine

    def losses() -> Iterator[float]:
        batches: list[Any] = []
        while engine.steps_done < steps:
            for batch in given.train_data:
                batches.append(batch)
                if len(batches) == engine.job.batch.accumulation:
                    yield engine.train_batch(batches)
                    batches = []
                if engine.steps_done == steps:
                    return

    return engine, losses()


def _curve(model: str, path: str) -> list[float]:
    return list(steps_of(model, path, 30)[1])


@pytest.mark.parametrize("model", MODELS)
def test_the_curve_is_that_of_one_process(tmp_path: Path, model: str) -> None:
    folder_of_mae(tmp_path)
    (alone,) = on_ranks(1, _curve, model, written(tmp_path, config(model, 30)), init="deepspeed")
    on_eight = on_ranks(8, _curve, model, written(tmp_path, config(model, 30, ON_EIGHT)), init="deepspeed")
    assert len(alone) == 30
    assert all(losses == pytest.approx(alone, rel=1e-5) for losses in on_eight)
    assert alone[-1] < alone[0]


def _first_and_last(model: str, path: str, steps: int) -> tuple[float, float]:
    losses = list(steps_of(model, path, steps)[1])
    return sum(losses[:3]) / 3, sum(losses[-10:]) / 10


@pytest.mark.parametrize("model", ["BERT", "T5"])
def test_a_language_model_learns_by_a_nat(tmp_path: Path, model: str) -> None:
    path = written(tmp_path, config(model, 150, ON_EIGHT))
    first, last = on_ranks(8, _first_and_last, model, path, 150, init="deepspeed")[0]
    assert last < first - 1


def test_a_masked_autoencoder_halves_its_loss(tmp_path: Path) -> None:
    """Pixels have variance 1: the initial output is as far off as zeros, or farther."""
    folder_of_mae(tmp_path)
    path = written(tmp_path, config("ViTMAE", 200, ON_EIGHT))
    first, last = on_ranks(8, _first_and_last, "ViTMAE", path, 200, init="deepspeed")[0]
    assert last < first / 2


def _accuracy(path: str, steps: int) -> float:
    engine, losses = steps_of("ViT", path, steps)
    for _ in losses:
        pass
    return learning.accuracy(engine)


def test_a_vision_transformer_tells_digits(tmp_path: Path) -> None:
    path = written(tmp_path, config("ViT", 400, ON_EIGHT))
    found = on_ranks(8, _accuracy, path, 400, init="deepspeed")
    assert max(found) >= 0.95
