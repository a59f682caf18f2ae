"""CFG122 and `--targets`: what a config would import and call, in any form."""

from __future__ import annotations

from pathlib import Path

import pytest

from dslpar.language.load import load_text
from dslpar.linter.check import lint, load
from dslpar.linter.imported_classes import targets_of

HEAD = "from os import system\nfrom torch import nn\nfrom dslpar import LazyCall as L\n"
EVIL = "L(system)(command='touch PWNED')"
KNOWN = "L(nn.GELU)()"
FORMS = {
    "an argument of a model": "model = dict(type='my_pkg.Net', depth={})",
    "of a class of torch's": "model = dict(type='torch.nn.Linear', in_features={}, out_features=4)",
    "of a description": "model = L('my_pkg.Net')(depth={})",
    "of an argument": "model = L('my_pkg.Net')(act=L(nn.Softplus)(beta={}))",
    "in a list": "model = dict(type='my_pkg.Net', parts=[1, (2, {})])",
    "in a dict": "model = dict(type='my_pkg.Net', parts=dict(a=dict(b={})))",
    "below _recursive_": "model = dict(type='my_pkg.Net', part=L(nn.Softplus)(_recursive_=False, beta={}))",
    "of a layer": "model = dict(type='Sequential', layers_cfg=[dict(type='Linear', in_features={}, out_features=4)])",
    "of a list of layers of one's own": "model = dict(type='my_pkg.Net', layers_cfg=[dict(type='my_pkg.Layer', a={})])",
    "of an optimizer": "optimizer = dict(type='my_pkg.Optimizer', alpha={})",
    "of a gradient handler": "gradient_handler = dict(type='my_pkg.Handler', x={})",
    "of one of several": "gradient_handler = [dict(type='my_pkg.A'), dict(type='my_pkg.B', x={})]",
}
MODEL = "model = dict(type='my_pkg.Net')\n"


def refused(text: str, overrides: tuple[str, ...] = ()) -> list[str]:
    return [found.message for found in lint(load_text(text, "cfg.py", overrides), 1) if found.code == "CFG122"]


@pytest.mark.parametrize("form", FORMS)
def test_a_call_is_refused_wherever_it_is(form: str) -> None:
    text = HEAD + ("" if FORMS[form].startswith("model") else MODEL)
    assert refused(text + FORMS[form].format(EVIL)) == [
        "a config may not call 'os.system', which is in Python's standard library"
    ]
    assert refused(text + FORMS[form].format(KNOWN)) == []


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("model = dict(type='os.system')", "model"),
        ("from subprocess import Popen\nmodel = L(Popen)(args='x')", "model"),
        ("model = dict(type='Sequential', layers_cfg=[dict(type='builtins.eval')])", "model.layers_cfg.0"),
        (MODEL + "optimizer = dict(type='pickle.Unpickler')", "optimizer"),
        (MODEL + "gradient_handler = [dict(type='code.InteractiveConsole')]", "gradient_handler.0"),
    ],
)
def test_the_standard_library_has_no_class_of_a_section(text: str, key: str) -> None:
    (message,) = refused(HEAD + text)
    assert message.startswith(f"{key} cannot be ")


def test_a_sections_own_class_may_be_of_any_package() -> None:
    text = (
        "model = dict(type='my_data.Net', layers_cfg=[dict(type='my_data.Layer')])\n"
        "optimizer = dict(type='my_data.Optimizer')\ngradient_handler = [dict(type='my_data.Handler')]\n"
    )
    assert refused(text) == []


@pytest.mark.parametrize("override", ["model.depth={'_target_': 'os.system'}", "model.depth._target_=os.system"])
def test_of_the_command_line(override: str) -> None:
    assert len(refused("model = dict(type='my_pkg.Net', depth=dict(command='x'))", (override,))) == 1


def test_in_yaml(tmp_path: Path) -> None:
    path = tmp_path / "cfg.yaml"
    path.write_text("model: {type: my_pkg.Net, depth: {_target_: os.system, command: x}}\n")
    (found,) = [found for found in lint(path, 1) if found.code == "CFG122"]
    assert found.location[1:3] == (1, 45)


def test_of_what_no_section_holds_nothing_is_called() -> None:
    assert refused(HEAD + MODEL + f"_loader = {EVIL}\nLOADER = _loader") == []


def test_trusted_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cfg.py"
    path.write_text(
        "from dslpar import L\nmodel = dict(type='net.Net', a=L('my_pkg.make')(n=1), b=L('other.make')())\n"
    )
    monkeypatch.chdir(tmp_path)

    def messages(*trusted: str) -> list[str]:
        return [found.message for found in lint(load(path, trusted=trusted), 1) if found.code == "CFG122"]

    assert len(messages()) == 2
    assert len(messages("my_pkg")) == 1
    assert messages("my_pkg", "other.make") == []
    (tmp_path / "pyproject.toml").write_text("[tool.dslpar]\ntrusted = ['my_pkg', 'other']\n")
    assert messages() == []
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "pyproject.toml").write_text("[tool.dslpar]\n")
    monkeypatch.chdir(elsewhere)  # the config's project applies, not the caller's
    assert len(messages()) == 2
    helps = [found.help for found in lint(path, 1) if found.code == "CFG122"]
    assert all("pyproject.toml trusts it, but counts only if you work in its folder" in text for text in helps)


def test_the_help_followed_literally_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cfg.py").write_text("from dslpar import L\nmodel = dict(type='net.Net', a=L('my_pkg.make')(n=1))\n")
    monkeypatch.chdir(tmp_path)
    (found,) = [found for found in lint("cfg.py", 1) if found.code == "CFG122"]
    line = found.help.removeprefix("add ").partition(" to [tool.dslpar]")[0]
    (tmp_path / "pyproject.toml").write_text(f"[tool.dslpar]\n{line}\n")
    assert [found.code for found in lint("cfg.py", 1) if found.severity == "error"] == []


def test_every_target_is_listed_with_what_allows_it() -> None:
    text = f"""{HEAD}
model = dict(type='Sequential', layers_cfg=[
    dict(type='Linear', in_features=4, out_features=4), dict(type='my_pkg.Layer', act={KNOWN}, x=L('my_pkg.make')()),
])
optimizer = dict(type='RMSprop', lr=1e-3)
lr_scheduler = dict(type='StepLR', step_size=1)
gradient_handler = [dict(type='ZeROGradientHandler'), dict(type='my_pkg.Handler', x={EVIL})]
"""
    rows = [(found.name, found.key, found.allowed_by) for found in targets_of(load_text(text, "a").root, ("my_pkg",))]
    its_section = "its section: imported, and called only if it is "
    assert rows == [
        ("torch.nn.Sequential", "model", "known: torch.nn"),
        ("torch.nn.Linear", "model.layers_cfg.0", "known: torch.nn"),
        ("my_pkg.Layer", "model.layers_cfg.1", f"{its_section}a torch.nn.Module"),
        ("torch.nn.GELU", "model.layers_cfg.1.act", "known: torch.nn"),
        ("my_pkg.make", "model.layers_cfg.1.x", "trusted: my_pkg"),
        ("torch.optim.RMSprop", "optimizer", "known: torch.optim"),
        ("torch.optim.lr_scheduler.StepLR", "lr_scheduler", "known: torch.optim"),
        ("my_pkg.Handler", "gradient_handler.1", f"{its_section}a dslpar.BaseGradientHandler"),
        ("os.system", "gradient_handler.1.x", ""),
    ]
