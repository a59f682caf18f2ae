"""LazyCall in programs: describe, change, build; failed imports are reported at their location."""

from __future__ import annotations

import logging
from fractions import Fraction
from types import SimpleNamespace

import pytest

from dslpar.core.errors import DslparError, Location
from dslpar.language.lazy import L, LazyCall, Settings, get_config, instantiate, locate
from dslpar.language.load import load_text
from dslpar.language.tree import Reference


def test_describe_change_build() -> None:
    model = L(SimpleNamespace)(
        cfg=dict(layers=2, parts=[dict(a=1)]), child=LazyCall(Fraction)(numerator=3, denominator=4)
    )
    model.cfg.layers = 4
    model["cfg"]["parts"][0].a = 5
    model.child.denominator = 5
    built = instantiate(model, extra=7)
    assert built.cfg.layers == 4
    assert built.cfg.parts[0].a == 5
    assert built.child == Fraction(3, 5)
    assert built.extra == 7


def test_attributes() -> None:
    made = L("a.B")(x=1)
    assert made._target_ == Reference("a.B")
    del made.x
    with pytest.raises(AttributeError, match="no key 'x'"):
        made.x  # noqa: B018
    with pytest.raises(AttributeError):
        del made.x


def test_containers_are_copied() -> None:
    cfg = dict(n=1)
    made = L("a.B")(cfg=cfg)
    made.cfg.n = 2
    assert cfg == {"n": 1}


def test_a_description_spread_into_another() -> None:
    text = "from dslpar import L\nx = L('a.B')(n=1)\ny = L('c.D')(**x, m=2)\n"
    node = load_text(text, "cfg.py").root.get("y")
    assert str(node.target) == "c.D"  # type: ignore[union-attr]
    assert list(node.value) == ["n", "m"]  # type: ignore[union-attr]


def test_only_what_a_module_holds_can_be_described() -> None:
    for target in (lambda: 1, 5):
        with pytest.raises(TypeError, match="a class or function that a module holds"):
            L(target)  # type: ignore[arg-type]


def test_a_config_is_built() -> None:
    text = """\
from dslpar import L
from fractions import Fraction
from types import SimpleNamespace as Space
model = L(Space)(half=L(Fraction)(numerator=1, denominator=2), items=[L('fractions.Fraction')(numerator=3)], t=(1, 2))
kept = L(Space)(_recursive_=False, inner=L(Fraction)(numerator=1))
"""
    config = load_text(text, "cfg.py")
    model = config.root.get("model")
    for source in (model, model.plain()):  # type: ignore[union-attr]
        built = instantiate(source, _trusted_=["types", "fractions"])
        assert (built.half, built.items, built.t) == (Fraction(1, 2), [Fraction(3)], (1, 2))
    kept = instantiate(config.root.get("kept"), _trusted_=["types", "fractions"])
    assert kept.inner == {"_target_": Reference("fractions.Fraction"), "numerator": 1}
    assert instantiate(config.root, ["types", "fractions"]).model.half == Fraction(1, 2)
    assert instantiate(5) == 5


MISSING = {
    "no package": ("nothing_here.x.Y", "no package 'nothing_here'"),
    "no module": ("dslpar.config.deep.Y", "'dslpar.config' has no 'deep'"),
    "no attribute": ("dslpar.config.LazyCal", "'dslpar.config' has no 'LazyCal'"),
    "no dots": ("Fraction", "not the full name"),
    "dunder": ("dslpar.__loader__.x", "not the full name"),
    "not a name": ("a b.c", "not the full name"),
    "empty": ("", "not the full name"),
}


@pytest.mark.parametrize("case", MISSING)
def test_missing(case: str) -> None:
    name, words = MISSING[case]
    location = Location("cfg.py", 3, 5, 3, 9)
    with pytest.raises(DslparError) as caught:
        locate(Reference(name), location)
    (item,) = caught.value.findings
    assert item.code == "CFG006"
    assert words in item.message
    assert item.location == location
    assert item.help


def test_missing_says_where_in_the_config() -> None:
    config = load_text("from dslpar import L\nfrom nothing_here import A\nmodel = L(A)(x=1)\n", "cfg.py")
    with pytest.raises(DslparError, match="no package 'nothing_here'") as caught:
        instantiate(config.root.get("model"), _trusted_=["nothing_here"])
    assert caught.value.findings[0].location[:3] == ("cfg.py", 3, 9)


def test_a_package_that_needs_another(tmp_path, monkeypatch) -> None:
    (tmp_path / "needy_package.py").write_text("import nothing_here\n")
    (tmp_path / "broken_package.py").write_text("from os import nothing_here\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DslparError, match="needs the package 'nothing_here'"):
        locate("needy_package.A")
    with pytest.raises(DslparError, match="importing 'broken_package' failed"):
        locate("broken_package.A")


def test_imports_are_logged(caplog) -> None:
    with caplog.at_level(logging.INFO, "dslpar"):
        assert locate("dslpar.config.LazyCall") is LazyCall
    assert "imported package dslpar" in caplog.text


def written(folder, name: str, text: str) -> None:
    (folder / name).write_text(text)


def test_what_a_config_describes_is_called_only_if_it_is_trusted(tmp_path, monkeypatch) -> None:
    """All calls are judged before anything is imported: here the first one would be legal, and leave a trace."""
    text = "import os\nos.mkdir('imported')\nfrom os import mkdir\ndef make(n): mkdir('called')\n"
    written(tmp_path, "mine_to_trust.py", text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    text = "from dslpar import L\nx = [L('mine_to_trust.make')(n=1), L('os.mkdir')(path='made')]\n"
    described = load_text(text, "cfg.py").root.get("x")
    for source in (described, described.plain(), [{"_target_": "os.mkdir", "path": "made"}]):  # type: ignore[union-attr]
        with pytest.raises(DslparError) as caught:
            instantiate(source, _trusted_=["mine_to_trust"])
        assert [found.code for found in caught.value.findings] == ["CFG122"]
    assert {path.name for path in tmp_path.iterdir()} == {"mine_to_trust.py"}
    by_another_name = {"_target_": Reference("mine_to_trust.mkdir"), "path": "made"}
    with pytest.raises(DslparError, match="it belongs to posix, which is not trusted"):
        instantiate(by_another_name, _trusted_=["mine_to_trust"])
    assert not (tmp_path / "made").exists()
    written(tmp_path, "pyproject.toml", "[tool.dslpar]\ntrusted = ['mine_to_trust', 'os.mkdir']\n")
    instantiate(described)
    assert {"called", "made"} < {path.name for path in tmp_path.iterdir()}


def test_a_program_calls_what_it_describes_itself() -> None:
    assert instantiate(L("fractions.Fraction")(numerator=1, denominator=2)) == Fraction(1, 2)
    assert instantiate(dict(part=L(Fraction)(numerator=3))).part == 3


def test_a_section_has_no_class_of_the_standard_library() -> None:
    with pytest.raises(DslparError, match=r"CFG122 .*'antigravity\.fly' is in Python's standard library"):
        locate("antigravity.fly")


def test_get_config_of_a_program(tmp_path, monkeypatch) -> None:
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "train.py").write_text("train = dict(steps=[dict(n=1)])\n")
    (tmp_path / "common" / "bad.py").write_text("train = oops\n")
    monkeypatch.chdir(tmp_path)
    train = get_config("common/train.py").train
    train.steps[0].n += 1
    assert isinstance(train, Settings)
    assert train == {"steps": [{"n": 2}]}
    with pytest.raises(DslparError, match="oops"):
        get_config("common/bad.py")
    with pytest.raises(DslparError, match=r"cannot find 'common/none\.py'"):
        get_config("common/none.py")
