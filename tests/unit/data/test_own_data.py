"""A user's data class: built by the config, read in dslpar's order, checked before it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dslpar.core.errors import DslparError
from dslpar.data.source import find_source, make_samples
from dslpar.layers.loss import IGNORE_INDEX
from dslpar.layout.resolve import Job
from dslpar.layout.transformers_data_types import inputs_of
from dslpar.linter import check
from tests.unit.data.own_classes import Rows

MODEL = "model = dict(type='GPT', num_layers=1, hidden_size=8, num_heads=2, vocab_size=256, max_seq_len=16)\n"
ROWS = "type='tests.unit.data.own_classes.Rows'"


def job_of(data: str, more: str = "", model: str = MODEL) -> Job:
    config = check.load_text(f"{model}data = {data}\nbatch = dict(global_size=4)\n{more}\n", "cfg.py")
    return check.check(config, 1).job


def refused(data: str, more: str = "", model: str = MODEL) -> Any:
    job = job_of(data, more, model)
    with pytest.raises(DslparError) as caught:
        make_samples(job, find_source(job).train, inputs_of(job))
    return caught.value.findings[0]


def test_its_arguments_are_keys_of_the_section() -> None:
    job = job_of(f"dict({ROWS}, count=9, seq_len=12, eval=dict(count=5))", "train = dict(eval_interval=1)")
    source, inputs = find_source(job), inputs_of(job)
    ids, labels = make_samples(job, source.train, inputs).batch([4, 1], [0, 1])
    wanted = Rows(9, 12)
    assert ids.tolist() == [wanted[index][0].tolist() for index in (4, 1)]
    assert labels.tolist() == [wanted[index][1].tolist() for index in (4, 1)]
    held_out = make_samples(job, source.held_out, inputs)
    assert held_out.num_samples == 5
    assert held_out.batch([0], [0])[0].tolist() == [Rows(5, 12)[0][0].tolist()]


def test_a_lazy_call_means_the_same() -> None:
    lines = "from dslpar import LazyCall\nfrom tests.unit.data.own_classes import Mappings, Rows\n"
    data = "LazyCall(Rows)(count=9, eval=LazyCall(Mappings)(count=6))"
    job = job_of(data, model=lines + MODEL)
    source = find_source(job)
    assert make_samples(job, source.train, inputs_of(job)).num_samples == 9
    assert type(source.held_out.dataset).__name__ == "Mappings"


def test_mappings_are_read_by_name() -> None:
    job = job_of("dict(type='tests.unit.data.own_classes.Mappings', count=9)")
    ids, labels = make_samples(job, find_source(job).train, inputs_of(job)).batch([2], [0])
    wanted = Rows(9).ids[2, :10].tolist()
    assert ids[0].tolist() == [*wanted, *[0] * 6]
    assert labels[0].tolist() == [*wanted[1:], *[IGNORE_INDEX] * 7]


def test_what_a_resume_must_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    def identity(data: str) -> str:
        return find_source(job_of(data)).identity

    first = identity(f"dict({ROWS}, count=9)")
    assert first == "tests.unit.data.own_classes.Rows 9 v1"
    assert identity(f"dict({ROWS}, count=10)") != first
    monkeypatch.setattr(Rows, "fingerprint", "v2")
    assert identity(f"dict({ROWS}, count=9)") != first


@pytest.mark.parametrize(
    ("data", "code", "key", "message"),
    [
        ("dict(type='tests.unit.data.own_classes.Gone')", "CFG006", "data.type", "has no 'Gone'"),
        ("dict(type='torch.nn.ReLU')", "BAT223", "data.type", "not a class with __len__"),
        ("dict(type='tests.unit.data.own_classes.torch.manual_seed', seed=3)", "BAT223", "data.type", "not a class"),
        (f"dict({ROWS}, number=9)", "CFG223", "data", "missing a required argument: 'count'"),
        (f"dict({ROWS}, count=9, eval=dict(number=3))", "CFG223", "data.eval", "number"),
        (f"dict({ROWS}, count=3)", "BAT210", "batch", "there are 3 to train on"),
        ("dict(type='tests.unit.data.own_classes.Strings')", "BAT207", "", "is not an (input, label) pair"),
    ],
)
def test_what_is_no_data_set_is_refused(data: str, code: str, key: str, message: str) -> None:
    found = refused(data)
    assert (found.code, found.key) == (code, key)
    assert message in found.message


def test_evaluation_needs_held_out_data() -> None:
    assert refused(f"dict({ROWS}, count=9)", "train = dict(eval_interval=1)").code == "BAT203"


def test_nobody_knows_what_columns_another_model_takes() -> None:
    data = "dict(type='tests.unit.data.own_classes.Mappings', count=9)"
    found = refused(data, model="model = dict(type='torch.nn.Bilinear')\n")
    assert found.code == "BAT222"
    assert "the arguments of the model's forward are unknown" in found.message
    assert "(input, label)" in found.help


def test_lint_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "has_side_effects.py").write_text("raise SystemError('imported')\n")
    findings = check.check(check.load_text(f"{MODEL}data = dict(type='has_side_effects.Data')\n", "cfg.py"), 1).findings
    assert not [item for item in findings if item.severity == "error"]
