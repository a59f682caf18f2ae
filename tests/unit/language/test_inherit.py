"""`_base_`: inheriting, merging, replacing and refusing by mmengine's rules."""

from __future__ import annotations

import pytest

from dslpar.language.load import load
from tests.unit.language.conftest import Write
from tests.unit.language.test_imports import codes, plain

MODEL = "model = dict(type='GPT', num_layers=4, attention=dict(heads=8, dropout=0.1), tags=[1, 2])\nseed = 1\n"


def test_what_the_file_sets_is_merged_into_what_it_inherits(write: Write) -> None:
    path = write(
        _base__model=MODEL,
        _base__train="train = dict(steps=10)\n",
        cfg="""\
            _base_ = ['_base/model.py', './_base/train.py']
            model = dict(num_layers=8, attention=dict(dropout=0.0), tags=[3])
            train = dict(steps=20, log_interval=5)
        """,
    )
    assert plain(path) == {
        "model": {"type": "GPT", "num_layers": 8, "attention": {"heads": 8, "dropout": 0.0}, "tags": [3]},
        "seed": 1,
        "train": {"steps": 20, "log_interval": 5},
    }


def test_one_base_by_its_path_and_bases_of_bases(write: Write) -> None:
    path = write(
        root="a = dict(x=1, y=1, z=1)\n",
        middle="_base_ = 'root.py'\na = dict(y=2, z=2)\n",
        deep__cfg="_base_ = '../middle.py'\na = dict(z=3)\n",
    )
    assert plain(path) == {"a": {"x": 1, "y": 2, "z": 3}}


def test_delete_replaces_a_dict(write: Write) -> None:
    path = write(
        base=MODEL,
        cfg="""\
            _base_ = ['base.py']
            model = dict(_delete_=True, type='MLP', attention=dict(_delete_=False))
            new = dict(_delete_=True, a=1)
        """,
    )
    found = plain(path)
    assert found == {"model": {"type": "MLP", "attention": {}}, "seed": 1, "new": {"a": 1}}


def test_values_of_the_base_in_expressions(write: Write) -> None:
    path = write(
        base=MODEL,
        cfg="_base_ = ['base.py']\nmodel = dict(num_layers=2 * _base_.model.num_layers)\n",
    )
    assert plain(path)["model"]["num_layers"] == 8  # type: ignore[index]


def test_an_item_of_a_base_has_its_own_location(write: Write) -> None:
    config = load(write(base=MODEL, cfg="_base_ = ['base.py']\nmodel = dict(num_layers=5)\n"))
    assert config.at("model.num_layers").path.endswith("cfg.py")
    assert config.at("model.type").path.endswith("base.py")
    assert config.at("seed").line == 2


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"cfg": "_base_ = ['missing.py']\nmodel = dict(a=1)\n"}, "CFG006 cfg.py:1"),
        ({"cfg": "_base_ = 3\n"}, "CFG004 cfg.py:1"),
        ({"cfg": "_base_ = []\n"}, "CFG004 cfg.py:1"),
        ({"cfg": "_base_ = ['/etc/passwd']\n"}, "CFG009 cfg.py:1"),
        ({"base": MODEL, "two": MODEL, "cfg": "_base_ = ['base.py', 'two.py']\n"}, "CFG004 cfg.py:1"),
        ({"base": "model = 'GPT'\n", "cfg": "_base_ = ['base.py']\nmodel = dict(a=1)\n"}, "CFG004 cfg.py:2"),
        ({"base": "_base_ = 'cfg.py'\n", "cfg": "_base_ = ['base.py']\n"}, "CFG007 base.py:1"),
    ],
)
def test_what_is_refused(files: dict[str, str], found: str, write: Write) -> None:
    config = load(write(**files))
    assert codes(config) == [found]
    assert config.findings[0].help
