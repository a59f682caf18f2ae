"""Imports between configs: relative, evaluated anew each time, bounded, and of config files only."""

from __future__ import annotations

import os
import shutil

import pytest

from dslpar.language import finder
from dslpar.language.load import Config, load


def plain(path: str) -> dict[str, object]:
    config = load(path)
    assert not config.findings, config.findings
    return config.root.plain()


def codes(config: Config) -> list[str]:
    return [f"{item.code} {os.path.basename(item.location.path)}:{item.location.line}" for item in config.findings]


def test_what_one_importer_changes_another_does_not_see(write) -> None:
    path = write(
        base="shared = dict(n=1)\nalias = shared\n",
        one="from .base import shared\nshared.n = 2\n",
        two="from .base import shared\n",
        cfg="""\
            from .one import shared as a
            from .two import shared as b
            from .base import shared as c, alias
            c.m = 3
        """,
    )
    assert plain(path) == {"a": {"n": 2}, "b": {"n": 1}, "c": {"n": 1, "m": 3}, "alias": {"n": 1, "m": 3}}


def test_by_position(write) -> None:
    path = write(
        up="n = 1\n",
        pkg__INIT="n = 2\n",
        pkg__beside="n = 3\nm = 30\n",
        pkg__deep__below="n = 4\n",
        pkg__cfg="""\
            from ..up import n as up
            from . import n as own, beside
            from .deep import below
            from .deep.below import n as deep
            from .. import up as module
            beside_n = beside.n + beside["m"]
            below_n = below.n
            module_n = module.n
        """,
    )
    found = plain(path)
    assert found == {"up": 1, "own": 2, "deep": 4, "beside_n": 33, "below_n": 4, "module_n": 1}


def test_from_another_directory(write, monkeypatch, tmp_path) -> None:
    write(common__a="n = 1\n", cfg="from .common.a import n\n")
    monkeypatch.chdir(tmp_path / "common")
    assert plain("../cfg.py") == {"n": 1}
    monkeypatch.chdir(tmp_path)
    assert plain("cfg.py") == {"n": 1}


def test_get_config_beside_then_parents_then_shipped(write, monkeypatch, tmp_path) -> None:
    text = "from dslpar import get_config\nn = get_config('common/train.py').n\n"
    path = write(
        package__shipped_configs__common__train="n = 'shipped'\n",
        common__train="n = 'parent'\n",
        a__b__common__train="n = 'beside'\n",
        a__b__cfg=text,
    )
    monkeypatch.setattr(finder, "PACKAGE", str(tmp_path / "package"))
    assert plain(path) == {"n": "beside"}
    shutil.rmtree(tmp_path / "a" / "b" / "common")
    assert plain(path) == {"n": "parent"}
    shutil.rmtree(tmp_path / "common")
    assert plain(path) == {"n": "shipped"}
    shutil.rmtree(tmp_path / "package")
    assert codes(load(path)) == ["CFG006 cfg.py:2"]


LIBAIS = "from libai.config import get_config\ntrain = get_config('common/train.py').train\n"


def test_get_config_of_libai_reads_its_checkout_and_nothing_else(write, monkeypatch, tmp_path) -> None:
    path = write(
        ours__dslpar__shipped_configs__common__train="train = 'shipped'\n",
        configs__common__train="train = 'of the checkout'\n",
        common__train="train = 'in a parent'\n",
        projects__QQP__configs__common="train = 'a file, no folder'\n",
        projects__QQP__configs__cfg=LIBAIS,
    )
    monkeypatch.setattr(finder, "PACKAGE", str(tmp_path / "ours" / "dslpar"))
    assert plain(path) == {"train": "of the checkout"}
    (tmp_path / "configs" / "common" / "train.py").unlink()
    assert codes(load(path)) == ["CFG006 cfg.py:2"]
    assert f"in {tmp_path / 'configs'}" in load(path).findings[0].message
    shutil.rmtree(tmp_path / "configs")
    assert plain(path) == {"train": "in a parent"}
    shutil.rmtree(tmp_path / "common")
    assert codes(load(path)) == ["CFG006 cfg.py:2"]


def test_our_own_configs_are_no_checkout_of_libai(write, monkeypatch, tmp_path) -> None:
    path = write(configs__common__train="train = 'shipped'\n", user__cfg=LIBAIS)
    monkeypatch.setattr(finder, "PACKAGE", str(tmp_path / "dslpar"))
    assert codes(load(path)) == ["CFG006 cfg.py:2"]


def test_absolute_imports_of_configs_are_modules_that_all_share(write) -> None:
    path = write(
        configs__common__train="train = dict(n=1)\n",
        configs__models__gpt="from ..common.train import train\ntrain.layers = 4\ncfg = dict(size=2)\n",
        projects__A__configs__base="from configs.common.train import train\ntrain.n = 2\nown = dict(m=1)\n",
        projects__A__configs__cfg="""\
            from configs.common.train import train
            from configs.models import gpt
            from configs.models.gpt import cfg as c
            from projects.A.configs.base import own
            from projects.A.modeling import Model
            from .base import own as copy
            copy.m = 2
            m = own.m
            layers = train.layers
            gpt.cfg.size = 3
        """,
    )
    assert plain(path) == {
        "train": {"n": 2, "layers": 4}, "c": {"size": 3}, "own": {"m": 1}, "copy": {"m": 2}, "m": 1, "layers": 4,
    }  # fmt: skip


def test_a_module_of_the_checkout_that_is_missing(write) -> None:
    path = write(configs__common__a="x = 1\n", b__cfg="from configs.common.c import x\nfrom torch.configs.d import y\n")
    assert codes(load(path)) == ["CFG006 cfg.py:1"]


def test_a_cycle(write) -> None:
    path = write(a="from .b import x\n", b="from .cfg import x\n", cfg="from .a import x\ny = x.z\n")
    config = load(path)
    assert codes(config) == ["CFG007 b.py:1"]
    assert "cfg.py -> a.py -> b.py -> cfg.py" in config.findings[0].message
    assert config.unknown == {"x", "y"}


def test_a_cycle_by_link(write, tmp_path) -> None:
    path = write(cfg="from .other import x\n")
    (tmp_path / "other.py").symlink_to(path)
    assert codes(load(path)) == ["CFG007 cfg.py:1"]


def test_missing_file_and_name(write) -> None:
    path = write(
        base="train = 1\n",
        cfg="from .base import trian\nfrom .bsae import train\nfrom . import nothing\nfrom .base import train as t\n",
    )
    config = load(path)
    assert codes(config) == ["CFG006 cfg.py:1", "CFG006 cfg.py:2", "CFG006 cfg.py:3"]
    assert "did you mean 'train'" in config.findings[0].help
    assert [item.location.column for item in config.findings] == [19, 6, 15]
    assert config.root.plain() == {"t": 1}


def test_findings_of_imported_files_come_once_and_in_order(write) -> None:
    path = write(base="n = 1 / 0\nm = 2\n", cfg="from .base import n\nfrom .base import m\nx = oops\n")
    config = load(path)
    assert codes(config) == ["CFG010 cfg.py:3", "CFG004 base.py:1"]
    assert config.root.plain() == {"m": 2}


def test_syntax_error_in_an_import(write) -> None:
    path = write(base="n = (\n", cfg="from .base import n\nx = n + 1\ny = 2\n")
    config = load(path)
    assert codes(config) == ["CFG001 base.py:1"]
    assert config.root.plain() == {"y": 2}
    assert config.unknown == {"n", "x"}
    assert config.complete


@pytest.mark.parametrize("kind", ["folder", "fifo", "device", "bytes", "loop", "unreadable size"])
def test_odd_targets(kind: str, write, tmp_path) -> None:
    path = write(cfg="from .odd import x\n")
    odd = tmp_path / "odd.py"
    if kind == "folder":
        odd.mkdir()
    elif kind == "fifo":
        os.mkfifo(odd)
    elif kind == "device":
        odd.symlink_to("/dev/zero")
    elif kind == "bytes":
        odd.write_bytes(b"x = 1\ny = '\xff'\n")
    elif kind == "loop":
        odd.symlink_to(odd)
    else:
        odd.write_bytes(b"#" * 300_000)
    config = load(path)
    assert [item.code for item in config.findings] == ["CFG005" if kind == "unreadable size" else "CFG009"]
    assert config.findings[0].help


@pytest.mark.parametrize("target", ["missing.py", ".", "bad\0name.py"])
def test_the_config_itself_cannot_be_read(target: str) -> None:
    config = load(target)
    assert [item.code for item in config.findings] == ["CFG009"]
    assert not config.complete
    assert config.findings[0].location.line == 1


def test_exponential_imports_end(write) -> None:
    files = {f"f{i}": f"from .f{i + 1} import x\nfrom .f{i + 1} import x as y\n" for i in range(15)}
    config = load(write(f15="x = 1\n", **files, cfg="from .f0 import x\n"))
    assert {item.code for item in config.findings} == {"CFG005"}


def test_deep_imports_end(write) -> None:
    files = {f"f{i}": f"from .f{i + 1} import x\n" for i in range(40)}
    config = load(write(f40="x = 1\n", **files, cfg="from .f0 import x\n"))
    assert [item.code for item in config.findings] == ["CFG005"]


def test_like_libai(write) -> None:
    """A small project with the import forms of LiBai's configs."""
    path = write(
        common__models__gpt="""\
            from libai.config import LazyCall
            from libai.models import GPTModel, GPTForPreTraining

            cfg = dict(hidden_layers=6, hidden_size=384, amp=False)
            gpt_model = LazyCall(GPTModel)(cfg=cfg)
            pretrain_model = LazyCall(GPTForPreTraining)(cfg=cfg)
        """,
        common__train="""\
            from omegaconf import DictConfig
            from libai.config import LazyCall
            from libai.scheduler import Warmup

            train = dict(
                dist=dict(data_parallel_size=1, tensor_parallel_size=1, pipeline_parallel_size=1),
                scheduler=LazyCall(Warmup)(alpha=0.01),
                betas=(0.9, 0.999),
            )
            train = DictConfig(train)
        """,
        common__data="""\
            from omegaconf import OmegaConf
            from libai.config import LazyCall
            from libai.data import Dataset

            dataloader = OmegaConf.create()
            dataloader.train = LazyCall(Dataset)(dataset=[LazyCall(Dataset)(seed=1), LazyCall(Dataset)(seed=2)])
        """,
        cfg="""\
            import oneflow as flow
            from libai.config import LazyCall, get_config
            from .common.models.gpt import pretrain_model as model, gpt_model
            from .common.train import train
            from .common.data import dataloader

            optim = LazyCall(flow.optim.AdamW)(lr=1e-4)
            model.cfg.hidden_layers = 8
            train.dist.pipeline_num_layers = model.cfg.hidden_layers
            for ds in dataloader.train.dataset:
                ds.max_seq_length = 64 * len(dataloader.train.dataset)
            train.scheduler = LazyCall(flow.optim.Cosine)()
            del dataloader.train.dataset[0]
            if "amp" not in train:
                train.amp = dict(enabled=True)
            train.update(dict(steps=10))
        """,
    )
    found = plain(path)
    assert found["model"]["cfg"]["hidden_layers"] == 8
    assert found["gpt_model"]["cfg"]["hidden_layers"] == 6  # as in OmegaConf: LazyCall copies its arguments
    assert found["train"]["dist"]["pipeline_num_layers"] == 8
    assert found["train"]["amp"] == {"enabled": True}
    assert found["optim"]["_target_"].name == "oneflow.optim.AdamW"
    assert [item["max_seq_length"] for item in found["dataloader"]["train"]["dataset"]] == [128]
    config = load(path)
    assert config.root.get("model").target.name == "libai.models.GPTForPreTraining"
    assert config.imported == {"model", "gpt_model", "train", "dataloader"}
