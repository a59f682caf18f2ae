"""Configs that a program completes: `--program` in lint and show, and a dict in place of a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import dslpar
from dslpar.cli import main as cli_main
from dslpar.language.source_text import config_text
from dslpar.language.tree import Reference
from dslpar.linter import check
from tests.support.paths import ROOT

PROGRAM_S = """\
BATCH_SIZE = 16
NUM_EPOCHS = 3
parallel = dict(pipeline=2, tensor=dict(size=4, mode='2d'))
batch = dict(micro_size=2, accumulation=4)
"""


def lint(path: Path, *flags: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[dict[str, object]]]:
    status = cli_main.main(["lint", str(path), "--world-size", "8", "--format", "json", *flags])
    return status, json.loads(capsys.readouterr().out)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.py"
    path.write_text(PROGRAM_S)
    return path


def test_without_the_flag_a_model_is_missing_and_the_help_names_it(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(PROGRAM_S.replace("NUM_EPOCHS", "_NUM_EPOCHS"))
    status, found = lint(config, capsys=capsys)
    assert status == 1
    (missing,) = (item for item in found if item["code"] == "CFG107")
    assert str(missing["help"]).endswith("or --program (if a program passes the model to dslpar.initialize)")


def test_a_config_with_colossalais_names_is_judged_where_it_stands(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = lint(config, capsys=capsys)
    assert (status, [item for item in found if item["severity"] == "error"]) == (0, [])
    (named,) = (item for item in check.lint(config, 8) if item.code == "CFG123")
    assert named.help.endswith("or --program (if a program passes the model to dslpar.initialize)")


def test_with_it_one_note_says_what_is_skipped(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, (found,) = lint(config, "--program", "--strict", capsys=capsys)
    assert (status, found["code"], found["severity"], found["key"]) == (0, "CFG111", "info", "model")
    assert "the layers of the program's model are not known: rules about layers and sizes are skipped" in str(found)


def test_what_needs_no_model_is_checked_as_ever(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(PROGRAM_S.replace("size=4", "size=6").replace("accumulation=4", "accumulation=1, foo=1"))
    status, found = lint(config, "--program", capsys=capsys)
    assert status == 1
    assert {"CFG101", "CFG111", "TEN104"} <= {str(item["code"]) for item in found}
    config.write_text(PROGRAM_S.replace("accumulation=4", "accumulation=1"))
    status, found = lint(config, "--program", capsys=capsys)
    assert [item["code"] for item in found] == ["CFG111", "PERF105"], "the bubble does not depend on the layers"


def test_a_config_with_a_model_is_linted_as_without_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT / "configs" / "gpt_3d.py"
    assert lint(path, "--program", capsys=capsys) == lint(path, capsys=capsys) == (0, [])
    assert lint(path, "--program", "model.num_heads=7", capsys=capsys)[0] == 1


def test_a_model_that_cannot_be_evaluated_is_none_of_a_program(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text("model = dict(type='GPT', num_layers=8)['key']\n")
    status, found = lint(config, "--program", capsys=capsys)
    assert (status, "CFG111" in {item["code"] for item in found}) == (1, False)


def test_show_shows_its_layout(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["show", str(config), "--world-size", "8", "--format", "json"]
    assert cli_main.main(words) == 1
    capsys.readouterr()
    assert cli_main.main([*words, "--program"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["groups"]["pipe"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert shown["batch"] == {"global_size": 8, "micro_size": 2, "accumulation": 4}


# ---- a dict as config ----

MODEL = {"type": "GPT", "num_layers": 2, "hidden_size": 48, "num_heads": 4, "vocab_size": 256, "max_seq_len": 64}


def test_a_dict_is_a_config() -> None:
    job = dslpar.resolve({"model": MODEL, "parallel": {"pipeline": 2}, "MINE": 3}, 4, ["batch.accumulation=8"])
    assert (job.mesh.pipe, job.mesh.data, job.batch.accumulation) == (2, 2, 8)
    (found,) = dslpar.lint({"model": MODEL, "parallel": dict(tensor=dict(size=6, mode="3d"))}, 8)
    assert found.concise().startswith("<program>.py:2:34: TEN103 not-a-cube")


def test_a_dict_becomes_the_text_that_a_file_would_have() -> None:
    sections = {
        "parallel": {"tensor": {"size": 8, "shape": (2, 2, 2)}, "order": ["data"], "one": (1,)},
        "optimizer": {"type": Path, "lr": float("inf"), "of": Reference("torch.optim.SGD"), "flag": None, "a-b": True},
    }
    assert config_text(sections) == (
        "parallel = dict(tensor=dict(size=8, shape=(2, 2, 2)), order=['data'], one=(1,))\n"
        "optimizer = {'type': 'pathlib.Path', 'lr': float('inf'), 'of': 'torch.optim.SGD', 'flag': None, 'a-b': True}\n"
    )


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"data": {"files": object()}}, "a config holds numbers, text, lists, dicts and classes, not the object <obj"),
        ({"a b": 1}, "the sections of a config are names, such as 'parallel', not 'a b'"),
        ({"data": {"f": lambda: 0}}, "LazyCall needs a class or function that a module holds"),
    ],
)
def test_what_no_config_holds_is_a_type_error(sections: dict[str, object], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        dslpar.load(sections)
