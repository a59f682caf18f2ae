"""Every data type: a mid-epoch resume on another layout continues with the same samples.

A new type of data is one more row of CASES.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dslpar.data.order import micro_batches
from dslpar.data.source import find_source, make_samples
from dslpar.data.tokenize import Request, tokenize
from dslpar.layout.transformers_data_types import check_data, inputs_of
from dslpar.linter import check
from tests.support.versions import HAS_TRANSFORMERS

GPT = "dict(type='GPT', num_layers=1, hidden_size=16, num_heads=2, vocab_size=256, max_seq_len=16)"
BERT = "dict(type='transformers.BertForPreTraining', config=dict(vocab_size=300, max_position_embeddings=32))"
T5 = "dict(type='transformers.T5ForConditionalGeneration', config=dict(vocab_size=300, num_layers=1))"
VIT = "dict(type='transformers.ViTForImageClassification', config=dict(image_size=8, patch_size=4, num_labels=3))"
TEXT, TOKENS = "dict(type='text', files=['text'])", "dict(type='tokens', path='tokens')"
HUGGING_FACE = "dict(type='huggingface', path='saved', text_column='text')"
OWN = "dict(type='tests.unit.data.own_classes.Rows', count=53)"
BLEND = "dict(type='blend', parts=[dict(type='tokens', path='tokens', weight=0.7), dict(files=['text'], weight=0.3)])"
ROTARY = GPT.replace("max_seq_len=16", "max_seq_len=160, positions='rotary'")
CHAT = "dict(type='chat', files=['chat.jsonl'], packing=True)"
CASES = {
    "text": (GPT, TEXT),
    "tokens": (GPT, TOKENS),
    "mlm": (BERT, "dict(type='mlm', files=['text'], seq_len=32)"),
    "span": (T5, "dict(type='span', files=['text'], seq_len=32)"),
    "images": (VIT, "dict(type='images', path='images.npy', labels='labels.npy', flip=True)"),
    "blend": (GPT, BLEND),
    "blend_by_size": (GPT, f"dict(type='blend', temperature=2.0, parts=[{TOKENS}, {TEXT}])"),
    "blend_of_masks": (
        BERT,
        "dict(type='blend', seq_len=32, parts=[dict(type='mlm', files=['text'], weight=1.0)] * 2)",
    ),
    "chat": (ROTARY, CHAT.replace("True", "False")),
    "chat_packed": (ROTARY, CHAT),
    "blend_of_chats": (ROTARY, f"dict(type='blend', parts=[{CHAT}, {CHAT}])"),
    "huggingface": (GPT, HUGGING_FACE),
    "huggingface_columns": (GPT, "dict(type='huggingface', path='saved')"),
    "text, with replacement": (GPT, TEXT.replace(")", ", replacement=True)")),
    "images, with replacement": (
        VIT,
        "dict(type='images', path='images.npy', labels='labels.npy', flip=True, replacement=True)",
    ),
    "chats, with replacement": (ROTARY, CHAT.replace(")", ", replacement=True)")),
    "blend, one part with replacement": (GPT, BLEND.replace("weight=0.3", "weight=0.3, replacement=True")),
    "own": (GPT, OWN),
    "own_mappings": (GPT, "dict(type='tests.unit.data.own_classes.Mappings', count=53)"),
}
"""Name -> (model, data)."""
LAYOUTS = {
    1: "parallel = None\nbatch = dict(global_size=12, micro_size=2)",
    2: "parallel = dict(data=2)\nbatch = dict(global_size=12, micro_size=6)",
    4: "parallel = dict(data=2, tensor=dict(size=2, mode='1d'))\nbatch = dict(global_size=12, micro_size=3)",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("data")
    (found / "text").mkdir()
    words = np.array(["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs"])
    texts = [" ".join(np.random.default_rng(number).choice(words, 40)) for number in range(8)]
    for number, text in enumerate(texts):
        (found / "text" / f"{number}.txt").write_text(text)
    tokenize(Request([str(found / "text")], str(found / "tokens")))
    random = np.random.default_rng(0)
    np.save(found / "images.npy", random.integers(0, 256, (40, 8, 8, 3), dtype=np.uint8))
    np.save(found / "labels.npy", random.integers(0, 3, 40))
    said = [
        [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "yes" * (n % 7 + 1)}] for n in range(70)
    ]
    (found / "chat.jsonl").write_text("\n".join(json.dumps({"messages": each}) for each in said))
    if HAS_TRANSFORMERS:
        import datasets

        ids = [random.integers(0, 256, 1 + number % 16).tolist() for number in range(60)]
        rows = {"text": [texts[number % 8] for number in range(60)], "input_ids": ids}
        datasets.Dataset.from_dict(rows).save_to_disk(found / "saved")
    return found


def steps(folder: Path, case: str, world_size: int, first: int, last: int) -> Iterator[list[Any]]:
    """Yield the samples of these steps in the run's order, as a fresh start on that layout reads them."""
    model, data = CASES[case]
    text = f"model = {model}\ndata = {data}\n{LAYOUTS[world_size]}\ntrain = dict(seed=7, steps=20)\n"
    checked = check.check(check.load_text(text, str(folder / "cfg.py")), world_size)
    assert not checked.has_errors, [item.text() for item in checked.findings]
    job = checked.job
    check_data(job)
    size = job.mesh.data
    for step in range(first, last):
        ranks = []
        for rank in range(size):
            samples = make_samples(job, find_source(job).train, inputs_of(job))  # each rank reads its own
            ranks.append(list(micro_batches(samples, job.batch, job.spec.train.seed, step * 12, size, rank)))
        batches = [each for turn in zip(*ranks, strict=True) for each in turn]
        yield [row for batch in batches for row in rows_of(batch)]


def rows_of(value: Any) -> list[Any]:
    """Return the rows of a batch in their nesting."""
    if isinstance(value, tuple):
        return [list(row) for row in zip(*map(rows_of, value), strict=True)]
    assert isinstance(value, torch.Tensor)
    rows: list[Any] = value.tolist()
    return rows


@pytest.mark.parametrize("case", CASES)
def test_a_run_goes_on_with_the_same_samples_on_another_layout(folder: Path, case: str) -> None:
    if ("huggingface" in case or "chat" in case) and not HAS_TRANSFORMERS:
        pytest.skip("datasets and transformers need Python 3.11")
    whole = list(steps(folder, case, 1, 2, 6))
    for world_size in (2, 4):
        assert list(steps(folder, case, world_size, 3, 6)) == whole[1:]
    assert len({str(row) for step in whole for row in step}) > 12  # the data are not constant
