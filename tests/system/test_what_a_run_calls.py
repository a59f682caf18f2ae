"""Trust in train.py and in a program: trusted calls run, and an untrusted call stops the run before it starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import dslpar
from dslpar.core.errors import DslparError
from tests.support.forked_training import train_alone

PACKAGE = """\
import os
from torch import nn

class Net(nn.Module):
    def __init__(self, act, width):
        super().__init__()
        self.table, self.act = nn.Embedding(256, width), act
        self.head = nn.Linear(width, 256)

    def forward(self, ids):
        return self.head(self.act(self.table(ids)))

def double(n):
    os.mkdir(os.path.join(os.path.dirname(__file__), "called"))
    return 2 * n
"""
CONFIG = """\
from dslpar import LazyCall as L
from torch.nn import GELU
model = dict(type='net_of_a_test.Net', act=L(GELU)(), width=L('net_of_a_test.double')(n=8))
data = dict(type='text', seq_len=16)
train = dict(steps=1, eval_interval=None, save_interval=0, output_dir={out!r})
"""
EVIL = CONFIG.replace("'net_of_a_test.double')(n=8)", "'os.mkdir')(path={mark!r})")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "net_of_a_test.py").write_text(PACKAGE)
    text = EVIL.format(out=str(tmp_path / "evil"), mark=str(tmp_path / "mark"))
    (tmp_path / "evil.py").write_text(text)
    (tmp_path / "cfg.py").write_text(CONFIG.format(out=str(tmp_path / "out")))
    nested = "from dslpar import L\nmodel = dict(type='other.Net', part=L('net_of_a_test.Net')(act=None, width=4))\n"
    (tmp_path / "registered.py").write_text(nested)
    (tmp_path / "pyproject.toml").write_text("[tool.dslpar]\ntrusted = ['os', 'net_of_a_test']\n")  # in another folder
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "net_of_a_test", raising=False)
    return tmp_path


def test_a_run_refuses_what_lint_refuses(folder: Path) -> None:
    done = train_alone("--config", str(folder / "evil.py"))
    assert done.status == 1
    assert (
        "CFG122 untrusted-target: a config may not call 'os.mkdir', which is in Python's standard library"
        in done.output
    )
    untrusted = train_alone("--config", str(folder / "cfg.py"))
    assert untrusted.status == 1
    assert "or --trust net_of_a_test" in untrusted.output
    with pytest.raises(DslparError, match="CFG122"):
        dslpar.initialize(str(folder / "evil.py"))
    assert not {"mark", "called", "out", "evil"} & {path.name for path in folder.iterdir()}


def test_a_program_trusts_what_it_has_registered(folder: Path) -> None:
    from dslpar.api import _load_job

    config = dslpar.load(folder / "registered.py")
    with pytest.raises(DslparError, match="'net_of_a_test' is not trusted"):
        _load_job(config, 1, 0, by_program=False)
    import net_of_a_test  # type: ignore[import-not-found]

    dslpar.LAYERS.register_module(net_of_a_test.Net)
    try:
        job = _load_job(config, 1, 0, by_program=False)
    finally:
        dslpar.LAYERS.remove("Net")
    assert "net_of_a_test.Net" in job.trusted


def test_a_run_calls_what_is_trusted(folder: Path) -> None:
    done = train_alone("--config", str(folder / "cfg.py"), "--trust", "net_of_a_test")
    assert done.status == 0, done.output
    assert (folder / "called").is_dir()
