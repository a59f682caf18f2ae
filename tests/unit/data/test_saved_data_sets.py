"""Saved data sets of Hugging Face's `datasets`, against that library: rows, splits, columns, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dslpar.core.errors import DslparError
from dslpar.data.arrow import ArrowRows, Table
from dslpar.data.order import Samples
from dslpar.data.source import Source, find_source, make_samples
from dslpar.layers.loss import IGNORE_INDEX
from dslpar.layout.resolve import Job
from dslpar.layout.transformers_data_types import inputs_of
from dslpar.linter import check
from dslpar.schema.arrow_folders import ArrowFolder, read_arrow_folder
from tests.support.versions import HAS_TRANSFORMERS

pytestmark = pytest.mark.skipif(not HAS_TRANSFORMERS, reason="datasets needs Python 3.11")
GPT = "dict(type='GPT', num_layers=1, hidden_size=8, num_heads=2, vocab_size=256, max_seq_len=8)"
BERT = "dict(type='transformers.{}', config=dict(vocab_size=300, max_position_embeddings=8))"
T5 = "dict(type='transformers.T5ForConditionalGeneration', config=dict(vocab_size=300, decoder_start_token_id=9))"
VIT = "dict(type='transformers.ViTForImageClassification', config=dict(image_size=4, patch_size=2, num_labels=3))"
FOUR = "path='rows', seq_len=4, eval_fraction=0.0"
COUNT = 40
IDS = [[number + 1, *range(100, 100 + number % 7)] for number in range(COUNT)]
ROWS: dict[str, list[Any]] = {
    "text": [f"row {number} " * 3 if number != 5 else None for number in range(COUNT)],
    "input_ids": IDS,
    "labels": [[-100, *ids[1:]] for ids in IDS],
    "number": list(range(COUNT)),
}


def save(rows: dict[str, list[Any]], path: Path, **more: Any) -> None:
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(rows).save_to_disk(path, **more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import datasets

    found = tmp_path_factory.mktemp("saved")
    save(ROWS, found / "rows", num_shards=3)
    whole = datasets.Dataset.from_dict(ROWS)
    datasets.DatasetDict({"train": whole.select(range(30)), "test": whole.select(range(30, 40))}).save_to_disk(
        found / "dict"
    )
    return found


def start(folder: Path, model: str, data: str, more: str = "batch = dict(global_size=4)") -> tuple[Job, Source]:
    text = f"model = {model}\ndata = dict(type='huggingface', {data})\n{more}\n"
    job = check.check(check.load_text(text, str(folder / "cfg.py")), 1).job
    return job, find_source(job)


def train_samples(folder: Path, model: str, data: str) -> Samples:
    job, source = start(folder, model, data)
    return make_samples(job, source.train, inputs_of(job))


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 300), st.integers(0, 300))
def test_rows_are_held_out_evenly(number: int, held_out: int) -> None:
    held_out = min(held_out, number)
    parts = [ArrowRows(ArrowFolder(""), number, held_out, which, "") for which in (False, True)]
    rows = [[part.row(index) for index in range(part.num_rows)] for part in parts]
    assert sorted(rows[0] + rows[1]) == list(range(number))
    assert rows == [sorted(each) for each in rows]
    for stop in range(number):
        assert abs(sum(row < stop for row in rows[1]) - stop * held_out / number) <= 0.5


def test_a_table_is_the_library_s(folder: Path) -> None:
    import datasets

    job, source = start(folder, GPT, "path='rows', eval_fraction=0.0")
    assert source.train.rows is not None
    table, library = Table(job, source.train.rows), datasets.load_from_disk(str(folder / "rows"))
    assert table.num_rows == len(library) == COUNT
    assert list(table.texts("text")) == [text or "" for text in library["text"]]
    for index in (0, 17, 39):
        row = table.read(["input_ids", "labels", "number"], index)
        assert {name: value.tolist() for name, value in row.items()} == {
            name: library[index][name] for name in ("input_ids", "labels", "number")
        }
        assert {value.dtype for value in row.values()} == {np.dtype(np.int64)}


def test_a_column_of_text_is_one_text(folder: Path) -> None:
    samples = train_samples(folder, GPT, "path='dict', eval_split='test', text_column='text'")
    text = "".join(text or "" for text in ROWS["text"][:30]).encode()
    assert samples.num_samples == (len(text) - 1) // 8
    assert samples.all_counted
    ids, labels = samples.batch([2], [0])
    assert bytes(ids[0].tolist()) == text[16:24]
    assert bytes(labels[0].tolist()) == text[17:25]


@pytest.mark.parametrize("given_labels", [True, False])
def test_labels_of_a_causal_model_are_the_next_ids(folder: Path, tmp_path: Path, given_labels: bool) -> None:
    rows = {name: ROWS[name] for name in ("input_ids", *(["labels"] if given_labels else []))}
    save(rows, tmp_path / "rows")
    samples = train_samples(tmp_path, GPT, "path='rows', eval_fraction=0.0")
    ids, labels = samples.batch(range(COUNT), range(COUNT))
    for row, wanted in enumerate(IDS):
        length = len(wanted)
        assert ids[row].tolist() == [*wanted, *[0] * (8 - length)]
        assert labels[row].tolist() == [*wanted[1:], *[IGNORE_INDEX] * (9 - length)]


def test_what_a_mask_leaves_out_is_left_out(tmp_path: Path) -> None:
    save(
        {"input_ids": [[7, 1, 2, 3], [4, 5, 7, 7]] * 8, "attention_mask": [[0, 1, 1, 1], [1, 1, 0, 0]] * 8},
        tmp_path / "rows",
    )
    ids, labels = train_samples(tmp_path, GPT, "path='rows', eval_fraction=0.0").batch([0, 1], [0, 1])
    assert ids.tolist() == [[1, 2, 3, *[0] * 5], [4, 5, *[0] * 6]]
    assert labels.tolist() == [[2, 3, *[IGNORE_INDEX] * 6], [5, *[IGNORE_INDEX] * 7]]


@pytest.mark.parametrize("wrong", [-1, 256])
def test_an_id_that_the_model_does_not_know_is_refused(tmp_path: Path, wrong: int) -> None:
    save({"input_ids": [[7, wrong]] * 16}, tmp_path / "rows")
    samples = train_samples(tmp_path, GPT, "path='rows'")
    with pytest.raises(DslparError, match=f"BAT205.*token id {wrong} is outside the vocabulary of 256 tokens"):
        samples.batch([0], [0])


def test_an_encoder_is_given_masks(tmp_path: Path) -> None:
    save({"input_ids": [[5, 6, 7], [8, 9]] * 8, "labels": [[-100, 6, -100], [-100, 2]] * 8}, tmp_path / "rows")
    model = BERT.format("BertForMaskedLM")
    (ids, mask, types), labels = train_samples(tmp_path, model, FOUR).batch([0, 1], [0, 1])
    assert ids.tolist() == [[5, 6, 7, 0], [8, 9, 0, 0]]
    assert mask.tolist() == [[1, 1, 1, 0], [1, 1, 0, 0]]
    assert types.tolist() == [[0] * 4] * 2
    assert labels.tolist() == [[-100, 6, -100, -100], [-100, 2, -100, -100]]


def test_a_sequence_has_one_class(tmp_path: Path) -> None:
    save({"input_ids": [[5, 6, 7], [8, 9]] * 8, "label": [1, 0] * 8}, tmp_path / "rows")
    model = BERT.format("BertForSequenceClassification")
    _, labels = train_samples(tmp_path, model, FOUR).batch([0, 1], [0, 1])
    assert labels.tolist() == [1, 0]


def test_a_decoder_begins_as_the_model_says(tmp_path: Path) -> None:
    save({"input_ids": [[5, 6, 7], [8, 9]] * 8, "labels": [[4, 5], [-100, 2]] * 8}, tmp_path / "rows")
    (*_, decoder), labels = train_samples(tmp_path, T5, FOUR).batch([0, 1], [0, 1])
    assert decoder.tolist() == [[9, 4, 0, 0], [9, 0, 0, 0]]
    assert labels.tolist() == [[4, 5, -100, -100], [-100, 2, -100, -100]]


def test_images_are_arrays(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).random((16, 3, 4, 4)).astype(np.float32)
    save({"pixel_values": pixels.tolist(), "labels": [0, 1] * 8}, tmp_path / "rows")
    images, labels = train_samples(tmp_path, VIT, "path='rows', eval_fraction=0.0").batch([3, 0], [0, 1])
    assert images.numpy() == pytest.approx(pixels[[3, 0]])
    assert labels.tolist() == [1, 0]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:300])


@pytest.mark.parametrize(
    ("data", "damage", "message"),
    [
        ("path='gone'", None, "BAT201.*no such file or folder"),
        ("path='dict', split='tran'", None, "CFG|BAT123.*it has the splits train, test, but no 'tran'"),
        ("path='rows', split='train'", None, "BAT123.*it has no splits"),
        ("path='rows', text_column='number'", None, "BAT123.*'number' is not a text column: its type is int64"),
        ("path='rows', text_column='txt'", None, "BAT123.*'txt' is not a text column: there is no such column"),
        ("path='rows'", ("state.json", lambda path: path.write_text("{}")), "BAT123.*has no '_data_files'"),
        ("path='rows'", ("state.json", lambda path: path.write_text("[")), "BAT123.*state.json: not valid JSON"),
        ("path='rows'", ("dataset_info.json", Path.unlink), "BAT123.*dataset_info.json: No such file"),
        ("path='rows'", ("data-00001-of-00003.arrow", Path.unlink), "BAT123.*there is no such file"),
        ("path='rows'", ("data-00001-of-00003.arrow", cut), "BAT222.*rows"),
        ("path='rows', seq_len=3", None, "BAT205.*row .* has .* input_ids, but a sample has 3 tokens"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused(
    folder: Path, tmp_path: Path, data: str, damage: tuple[str, Callable[[Path], object]] | None, message: str
) -> None:
    import shutil

    shutil.copytree(folder, tmp_path / "copy")
    if damage is not None:
        damage[1](tmp_path / "copy" / "rows" / damage[0])

    def run() -> None:
        samples = train_samples(tmp_path / "copy", GPT, data)
        samples.batch(range(samples.num_samples), range(samples.num_samples))

    with pytest.raises(DslparError, match=message):
        run()


def test_columns_that_are_missing_are_named(folder: Path) -> None:
    with pytest.raises(
        DslparError, match=r"BAT222.*there is no column 'pixel_values'; the data has these columns: text, input_ids"
    ):
        train_samples(folder, VIT, "path='rows'")


def test_other_rows_are_another_data_set(folder: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(folder / "rows", tmp_path / "rows")
    identities = [start(at, GPT, "path='rows'")[1].identity for at in (folder, tmp_path)]
    assert identities[0] == identities[1]
    (file, *_) = sorted((tmp_path / "rows").glob("*.arrow"))
    data = bytearray(file.read_bytes())
    data[data.index(b"row 1")] = ord("R")  # same length, same fingerprint
    file.write_bytes(data)
    assert start(tmp_path, GPT, "path='rows'")[1].identity != identities[0]
    assert start(folder, GPT, "path='rows', eval_fraction=0.5")[1].identity != identities[0]


def test_heads_tell_columns_and_splits(folder: Path) -> None:
    found = read_arrow_folder(str(folder / "dict"), "test")
    assert found.splits == ("train", "test")
    assert dict(found.columns) == {
        "text": "string",
        "input_ids": "list of int32",  # the library's type of a column with that name
        "labels": "list of int64",
        "number": "int64",
    }
    assert json.loads((folder / "dict" / "test" / "state.json").read_text())["_fingerprint"] == found.fingerprint
