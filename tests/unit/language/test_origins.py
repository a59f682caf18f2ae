"""Origins: the location of every value, through names, containers, imports and overrides."""

from __future__ import annotations

import pytest

from dslpar.core.errors import COMMAND_LINE, Location
from dslpar.language.load import Config, load, load_text


def marked(config: Config, location: Location) -> str:
    """Return the text at a location, after the file's name if it is not the config's."""
    line = config.sources[location.path].split("\n")[location.line - 1]
    assert location.line == location.end_line
    text = line[location.column - 1 : location.end_column - 1]
    return text if location.path == config.path else f"{location.path.rpartition('/')[2]}: {text}"


def value_of(text: str, path: str, overrides: tuple[str, ...] = (), shorthands: dict[str, str] | None = None) -> str:
    config = load_text(text, "cfg.py", overrides, shorthands or {})
    assert not config.findings, config.findings
    return marked(config, config.at(path))


VALUES = {
    "a literal": ("x = 4", "x", "4"),
    "a computed value": ("n = 4\nx = n * 2", "x", "n * 2"),
    "a name passes on": ("n = 40 + 2\nx = n", "x", "40 + 2"),
    "a name in a dict": ("n = 41\nx = dict(a=dict(b=n))", "x.a.b", "41"),
    "a dict": ("x = dict(a=1)", "x", "dict(a=1)"),
    "an item of a list": ("x = [10, 20, [30]]", "x.2.0", "30"),
    "an item of a tuple": ("x = (10, 20)", "x.1", "20"),
    "a display": ("x = {'a': 5}", "x.a", "5"),
    "an attribute": ("x = dict()\nx.a = 7", "x.a", "7"),
    "an item": ("x = {}\nx['a'] = 7", "x.a", "7"),
    "read from a dict": ("x = dict(a=7)\ny = x.a", "y", "7"),
    "read by item": ("x = dict(a=[7])\ny = x['a'][0]", "y", "7"),
    "read by get": ("x = dict(a=7)\ny = x.get('a', 1)", "y", "7"),
    "a default": ("x = dict(a=7)\ny = x.get('b', 1)", "y", "1"),
    "popped": ("x = dict(a=7)\ny = x.pop('a')", "y", "7"),
    "popped from a list": ("x = [7, 8]\ny = x.pop(0)", "y", "7"),
    "set by default": ("x = {}\ny = x.setdefault('a', 9)", "y", "9"),
    "conditional": ("x = 1 if [] else 22", "x", "22"),
    "or": ("x = None or 5", "x", "5"),
    "unpacked": ("a, (b, *c) = 1, [2, 3, 4]", "c.1", "4"),
    "starred": ("a = [1, 2]\nx = [0, *a]", "x.2", "2"),
    "keywords": ("a = dict(k=1)\nx = dict(**a, l=2)", "x.k", "1"),
    "merged": ("a = dict(k=1)\nx = a | dict(l=2)", "x.l", "2"),
    "spread": ("a = dict(k=1)\nx = {**a, 'l': 2}", "x.k", "1"),
    "added lists": ("x = [1] + [22]", "x.1", "22"),
    "repeated": ("x = [11] * 3", "x.2", "11"),
    "sliced": ("a = [1, 2, 3]\nx = a[1:]", "x.1", "3"),
    "appended": ("x = []\nx.append(33)", "x.0", "33"),
    "extended": ("x = [1]\nx.extend([2, 33])", "x.2", "33"),
    "inserted": ("x = [1]\nx.insert(0, 33)", "x.0", "33"),
    "removed": ("x = [1, 2, 33]\nx.remove(1)", "x.1", "33"),
    "sorted in place": ("x = [30, 10, 20]\nx.sort()", "x.2", "30"),
    "reversed in place": ("x = [30, 10]\nx.reverse()", "x.0", "10"),
    "updated": ("x = dict(a=1)\nx.update(dict(a=2), b=3)", "x.a", "2"),
    "augmented": ("x = 1\nx += 41", "x", "41"),
    "augmented list": ("x = [1]\nx += [41]", "x.1", "41"),
    "copied": ("a = [1, 22]\nx = list(a)", "x.1", "22"),
    "a tuple of a list": ("a = [1, 22]\nx = tuple(a)", "x.1", "22"),
    "copied dict": ("a = dict(b=22)\nx = dict(a)\ny = a.copy()", "y.b", "22"),
    "loop variable": ("for x in [1, 22]: pass", "x", "22"),
    "over items": ("a = dict(b=1, c=22)\nx = {}\nfor k, v in a.items():\n    x[k] = v", "x.c", "22"),
    "over values": ("a = dict(b=1, c=22)\nx = [v for v in a.values()]", "x.1", "22"),
    "comprehension": ("a = [1, 22]\nx = [v for v in a]", "x.1", "22"),
    "dict comprehension": ("a = [1, 22]\nx = {str(v): v for v in a}", "x.22", "22"),
    "omegaconf": ("from omegaconf import DictConfig\na = dict(b=dict(c=22))\nx = DictConfig(a)", "x.b.c", "22"),
    "lazy": ("from dslpar import LazyCall as L\nx = L('a.B')(c=dict(d=22))", "x.c.d", "22"),
    "no such key": ("x = dict(a=dict(b=1))", "x.a.c.d", "dict(b=1)"),
    "no such name": ("x = 1", "y", ""),
    "wide characters": ("größe = 'ä'; x = ['日本', 'b']", "x.1", "'b'"),
    "in brackets": ("x = (\n    4\n)", "x", "4"),
    "f-string": ("n = 1\nx = f'a{n}'", "x", "f'a{n}'"),
    "negative": ("x = -1", "x", "-1"),
    "annotated": ("x: int = 11", "x", "11"),
    "dotted int key": ("x = {1: 22}", "x.1", "22"),
}


@pytest.mark.parametrize("case", VALUES)
def test_value(case: str) -> None:
    text, path, expected = VALUES[case]
    assert value_of(text, path) == expected


KEYS = {
    "a name": ("abc = 1", "abc", "abc"),
    "a keyword": ("x = dict(pipeline=2)", "x.pipeline", "pipeline"),
    "a key": ("x = {'pipeline': 2}", "x.pipeline", "'pipeline'"),
    "an attribute": ("x = {}\nx.pipeline = 2", "x.pipeline", "pipeline"),
    "an item": ("x = {}\nx['pipeline'] = 2", "x.pipeline", "'pipeline'"),
    "the last one counts": ("x = dict(abc=1)\nx['abc'] = 2", "x.abc", "'abc'"),
    "of an update": ("x = {}\nx.update(pipeline=2)", "x.pipeline", "pipeline"),
    "no such": ("x = dict(pipeline=2)", "x.pipline", "x"),
    "unpacked": ("a, bcd = 1, 2", "bcd", "bcd"),
    "multi-line attribute": ("x = {}\nx.a = {}\n(x.\n  a.\n  bcd) = 1", "x.a.bcd", "bcd"),
}


@pytest.mark.parametrize("case", KEYS)
def test_key(case: str) -> None:
    text, path, expected = KEYS[case]
    config = load_text(text, "cfg.py")
    assert not config.findings, config.findings
    assert marked(config, config.key_at(path)) == expected


def test_through_imports(write) -> None:
    path = write(
        common__base="size = 2 * 8\n",
        common__train="from .base import size\ntrain = dict(dist=dict(tensor=size), steps=10)\n",
        cfg="from .common.train import train as t\nt.seed = 5\ntrain = t\n",
    )
    config = load(path)
    assert not config.findings
    assert marked(config, config.at("train.dist.tensor")) == "base.py: 2 * 8"
    assert marked(config, config.key_at("train.dist.tensor")) == "train.py: tensor"
    assert marked(config, config.at("train.seed")) == "5"
    assert config.root.get("train.dist.tensor").value == 16  # type: ignore[union-attr]
    assert config.imported == {"t"}


def test_through_get_config(write) -> None:
    path = write(
        common__optim="optim = dict(lr=1e-4)\n",
        cfg="from libai.config import get_config\noptim = get_config('common/optim.py').optim\noptim.lr = 3\n",
    )
    config = load(path)
    assert marked(config, config.at("optim")) == "optim.py: dict(lr=1e-4)"
    assert marked(config, config.at("optim.lr")) == "3"


def test_of_overrides() -> None:
    config = load_text("x = dict(a=[1, 2])", "cfg.py", ["x.b={'c': 33}", "x.a.1=44", "y=plain"])
    assert config.sources[COMMAND_LINE] == "x.b={'c': 33} x.a.1=44 y=plain"
    shown = {path: marked(config, config.at(path)) for path in ("x.b", "x.b.c", "x.a.1", "y")}
    assert shown == {
        "x.b": "<command line>: {'c': 33}",
        "x.b.c": "<command line>: 33",
        "x.a.1": "<command line>: 44",
        "y": "<command line>: plain",
    }
    assert marked(config, config.at("x.a.0")) == "1"
    assert marked(config, config.key_at("x.b")) == "<command line>: x.b"


def test_shorthand_keeps_origins() -> None:
    config = load_text("parallel = dict(tensor=4)", "cfg.py", ["parallel.tensor.mode=1d"], {"parallel.tensor": "size"})
    assert config.root.plain() == {"parallel": {"tensor": {"size": 4, "mode": "1d"}}}
    assert marked(config, config.at("parallel.tensor.size")) == "4"
    assert marked(config, config.key_at("parallel.tensor.size")) == "tensor"
    assert marked(config, config.at("parallel.tensor")) == "4"
    assert marked(config, config.at("parallel.tensor.mode")) == "<command line>: 1d"


def test_used_names() -> None:
    text = "a = 1\nb = dict(x=a)\nc = dict()\nc.x = 1\nc['y'] = [v for v in b]\nd = c.x\ne = {}\ne.f = 1\n"
    used = load_text(text, "cfg.py").names_read
    assert {"a", "b", "c"} <= used
    assert not {"d", "e"} & used


def test_modules_are_no_values() -> None:
    text = (
        "import math\nimport torch.nn as nn\nfrom torch import optim\nfrom m import GPT as model\nfrom math import pi\n"
    )
    config = load_text(text, "cfg.py")
    assert list(config.root.value) == ["model"]
    assert config.root.plain()["model"].name == "m.GPT"
