"""Blends as samples: each from its part, in the part's own order; errors name the part."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dslpar.core.errors import DslparError
from dslpar.data.blend import BlendSamples
from dslpar.data.blend_order import exact_weight
from dslpar.data.order import sample_index, sample_indices
from dslpar.data.source import Source, find_source, make_samples
from dslpar.data.text import TextSamples
from dslpar.layout.resolve import Job
from dslpar.layout.transformers_data_types import inputs_of
from dslpar.linter import check

MODEL = "model = dict(type='GPT', num_layers=1, hidden_size=8, num_heads=2, vocab_size=256, max_seq_len=8)\n"
SEED = 5


def job_of(folder: Path, data: str, more: str = "") -> Job:
    config = check.load_text(f"{MODEL}data = {data}\nbatch = dict(global_size=8)\n{more}\n", str(folder / "cfg.py"))
    return check.check(config, 1).job


def source_of(folder: Path, data: str, more: str = "") -> tuple[Job, Source]:
    job = job_of(folder, data, more)
    return job, find_source(job)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, size in (("a", 400), ("b", 90), ("c", 55)):
        (tmp_path / f"{name}.txt").write_bytes(bytes((index * 7 + ord(name)) % 256 for index in range(size)))
    return tmp_path


def test_a_sample_is_its_part_s_next_one() -> None:
    parts = [TextSamples(bytearray([number]) * (8 * size + 1), 8) for number, size in enumerate((40, 5, 11))]
    weights = [exact_weight(weight) for weight in (0.5, 0.3, 0.2)]
    blend = BlendSamples(parts, weights, SEED, [0, 1, 2])
    assert blend.num_samples == 56
    assert blend.all_counted
    numbers = range(1000, 1200)
    indices = sample_indices(blend, numbers, SEED)
    ids, labels = blend.batch(indices, numbers)
    for row, number in enumerate(numbers):
        part, own = blend.order.locate(number)
        assert indices[row] == blend.offsets[part] + sample_index(own, parts[part].num_samples, SEED)
        assert set(ids[row].tolist()) == set(labels[row].tolist()) == {part}


def test_a_blend_of_one_part_is_that_part(folder: Path) -> None:
    runs = []
    for data in ("dict(files=['a.txt'])", "dict(type='blend', parts=[dict(files=['a.txt'])])"):
        job, source = source_of(folder, data)
        samples = make_samples(job, source.train, inputs_of(job))
        numbers = range(100)
        runs.append(samples.batch(sample_indices(samples, numbers, job.spec.train.seed), numbers)[0].tolist())
    assert runs[0] == runs[1]


def test_an_epoch_of_each_part_has_each_sample_once(folder: Path) -> None:
    job, source = source_of(folder, "dict(type='blend', parts=[dict(files=['a.txt']), dict(files=['b.txt'])])")
    samples = make_samples(job, source.train, inputs_of(job))
    assert isinstance(samples, BlendSamples)
    # weighted by size, an epoch of each part is exactly an epoch of the whole
    found = sample_indices(samples, range(samples.num_samples), SEED)
    assert len(set(found)) >= samples.num_samples - 2


def test_held_out_samples_are_of_the_parts_that_hold_some_out(folder: Path) -> None:
    parts = "[dict(files=['a.txt'], eval_fraction=0.0), dict(files=['b.txt'], eval_fraction=0.4)]"
    job, source = source_of(folder, f"dict(type='blend', parts={parts})", "train = dict(eval_interval=2)")
    samples = make_samples(job, source.held_out, inputs_of(job))
    assert isinstance(samples, BlendSamples)
    assert samples.names == [1]
    assert samples.num_samples == (36 - 1) // 8
    none = parts.replace("0.4", "0.0")
    with pytest.raises(DslparError, match=r"BAT203.*no part of the blend is held out"):
        source_of(folder, f"dict(type='blend', parts={none})", "train = dict(eval_interval=2)")


@pytest.mark.parametrize(
    ("part", "code", "key"),
    [
        ("dict(files=['gone.txt'])", "BAT201", "data.parts.1.files.0"),
        ("dict(type='tokens', path='gone')", "BAT201", "data.parts.1.path"),
        ("dict(type='huggingface', path='gone')", "BAT201", "data.parts.1.path"),
        ("dict(type='collections_of_nobody.Data')", "CFG006", "data.parts.1.type"),
        ("dict(type='tests.unit.data.own_classes.Rows', count=9, size=3)", "CFG223", "data.parts.1"),
        (
            "dict(type='tests.unit.data.own_classes.Rows', count=9, eval=dict(type='dslpar.data.nowhere.Held'))",
            "CFG006",
            "data.parts.1.eval.type",
        ),
    ],
)
def test_what_is_wrong_with_a_part_is_told_at_the_part(folder: Path, part: str, code: str, key: str) -> None:
    with pytest.raises(DslparError, match=code) as caught:
        source_of(folder, f"dict(type='blend', parts=[dict(files=['a.txt']), {part}])")
    assert caught.value.findings[0].key == key


def test_a_part_gives_no_sample_twice_in_a_step(folder: Path) -> None:
    small = "dict(files=['c.txt'], eval_fraction=0.0, weight={})"  # 6 samples
    data = f"dict(type='blend', parts=[dict(files=['a.txt'], weight=1), {small}])"
    source_of(folder, data.format(3))
    with pytest.raises(DslparError, match=r"BAT210.*takes 7 samples, but the text has 6") as caught:
        source_of(folder, data.format(7))
    assert caught.value.findings[0].key == "data.parts.1"


def test_parts_of_other_forms_are_refused(folder: Path) -> None:
    own = "dict(type='tests.unit.data.own_classes.Rows', count=9)"
    job, source = source_of(folder, f"dict(type='blend', parts=[dict(files=['a.txt']), {own}])")
    with pytest.raises(DslparError, match=r"BAT224.*int64 \[16\].*and part 0 of .*int64 \[8\]") as caught:
        make_samples(job, source.train, inputs_of(job))
    assert caught.value.findings[0].key == "data.parts.1"


def test_what_a_resume_must_not_change(folder: Path) -> None:
    data = "dict(type='blend', parts=[dict(files=['a.txt'], weight=0.7), dict(files=['b.txt'], weight=0.3)])"
    (folder / "moved").mkdir()
    (folder / "moved" / "a.txt").write_bytes((folder / "a.txt").read_bytes())
    same = [data, data.replace("a.txt", "moved/a.txt")]
    others = [data.replace("0.7", "0.71"), data.replace("b.txt", "c.txt"), data.replace("weight=0.7", "weight=7")]
    identities = [source_of(folder, each)[1].identity for each in (*same, *others)]
    assert identities[0] == identities[1]
    assert len(set(identities)) == 4
    masked = "dict(type='blend', seq_len=8, parts=[dict(type='mlm', files=['a.txt'], mask_prob={})])"
    bert = "model = dict(type='transformers.BertForMaskedLM', config=dict(vocab_size=300))"
    assert len({source_of(folder, masked.format(share), bert)[1].identity for share in (0.15, 0.2)}) == 2


def test_the_log_says_how_often_a_part_is_seen(folder: Path) -> None:
    data = "dict(type='blend', parts=[dict(files=['a.txt'], weight=0.75), dict(files=['b.txt'], weight=0.25)])"
    job, source = source_of(folder, data, "train = dict(steps=20)")
    samples = make_samples(job, source.train, inputs_of(job))
    assert isinstance(samples, BlendSamples)
    assert list(samples.describe(job)) == [
        "text: 75.0% of the run, 2.55 epochs of 47 samples",
        "text: 25.0% of the run, 4.00 epochs of 10 samples",
    ]


def test_masks_are_drawn_by_the_number_in_the_run(folder: Path) -> None:
    parts = "[dict(type='mlm', files=['a.txt']), dict(type='mlm', files=['a.txt'])]"
    bert = "model = dict(type='transformers.BertForMaskedLM', config=dict(vocab_size=300))"
    job, source = source_of(folder, f"dict(type='blend', seq_len=32, parts={parts})", bert)
    samples = make_samples(job, source.train, inputs_of(job))
    assert not samples.all_counted
    ids, _ = samples.batch([0, 0], [0, 1])
    again, _ = samples.batch([0], [1])
    assert not torch.equal(ids[0], ids[1])
    assert torch.equal(ids[1], again[0])
