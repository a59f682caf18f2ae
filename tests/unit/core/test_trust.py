"""Trust: what a config may call, by its name and by the object that the name resolves to."""

from __future__ import annotations

import collections
import fractions
import functools
import os

import pytest
import torch

from dslpar.core.trust import is_standard_library, known_package, trusted_entry, why_name_refused, why_object_refused

KNOWN = {
    "torch.nn.GELU": "torch.nn",
    "torch.nn.modules.linear.Linear": "torch.nn",
    "torch.optim.AdamW": "torch.optim",
    "torch.optim.lr_scheduler.StepLR": "torch.optim",
    "transformers.GPT2Config": "transformers",
    "transformers.models.gpt2.configuration_gpt2.GPT2Config": "transformers",
    "dslpar.models.GPT": "dslpar.models",
    "dslpar.layers.Linear": "dslpar.layers",
}
UNKNOWN = [
    "os.system",
    "builtins.eval",
    "torch.hub.load",
    "torch.load",
    "torch.nn.functional.torch.Generator",
    "torch.nn.modules.linear.math.Thing",
    "torch.nn.init.normal_",
    "torch.nn.Module.load_state_dict",
    "torchx.nn.GELU",
    "transformers.GPT2Config.from_pretrained",
    "transformers.AutoModel",
    "transformers.pipeline",
    "dslpar.instantiate",
    "dslpar.cli.main.run",
    "dslpar.launch.supervise.run",
    "my_pkg.Net",
    "GELU",
    "",
]


@pytest.mark.parametrize("name", [*KNOWN, *UNKNOWN])
def test_known_kinds(name: str) -> None:
    assert known_package(name) == KNOWN.get(name, "")
    assert (why_name_refused(name, ()) is None) is (name in KNOWN)


def test_trust_is_of_whole_names() -> None:
    assert trusted_entry("my_pkg.a.B", ("my_pkg",)) == "my_pkg"
    assert trusted_entry("my_pkg", ("my_pkg",)) == "my_pkg"
    assert trusted_entry("my_pkg_2.B", ("my_pkg",)) == ""
    assert trusted_entry("my_pkg.b.B", ("my_pkg.a",)) == ""
    assert why_name_refused("my_pkg.a.b", ("my_pkg.a",)) is None


def test_a_refusal_says_what_to_add() -> None:
    message, hint = why_name_refused("my_pkg.make", ()) or ("", "")
    assert message == "a config may not call 'my_pkg.make': 'my_pkg' is not trusted"
    assert hint.startswith("add trusted = ['my_pkg'] to [tool.dslpar] of your pyproject.toml, or --trust my_pkg")
    _, hint = why_name_refused("torch.hub.load", ()) or ("", "")
    assert "trusted = ['torch.hub.load']" in hint  # not all of torch
    message, hint = why_name_refused("torch.nn.functional.os.system", ()) or ("", "")
    assert message == "a config may not call 'torch.nn.functional.os.system': the name leads to another package"
    assert "os.system" not in hint
    message, hint = why_name_refused("os.system", ()) or ("", "")
    assert message == "a config may not call 'os.system', which is in Python's standard library"
    assert "trusted = ['os']" not in hint


def test_the_standard_library() -> None:
    names = ("os.system", "builtins.eval", "__main__.X", "antigravity", "torch.nn.GELU", "my_pkg.os")
    assert [is_standard_library(name) for name in names] == [True, True, True, True, False, False]


def test_of_transformers_the_configs_of_models_are_known() -> None:
    """They are recognized by their base: PretrainedConfig in transformers 4, PreTrainedConfig in 5. Auto classes have
    neither.
    """
    of_theirs = {"__module__": "transformers.models.gpt2.configuration_gpt2"}
    for base in ("PretrainedConfig", "PreTrainedConfig"):
        config = type("GPT2Config", (type(base, (), {}),), of_theirs)
        assert why_object_refused(config, "transformers.GPT2Config", (), ()) == ""
    auto = type("AutoConfig", (), of_theirs)
    why = why_object_refused(auto, "transformers.AutoConfig", (), ())
    assert why == "it is not the config class of a transformers model"


@pytest.mark.parametrize(
    ("name", "found", "owners", "trusted", "why"),
    [
        ("torch.nn.GELU", torch.nn.GELU, (), (), ""),
        ("torch.optim.lr_scheduler.StepLR", torch.optim.lr_scheduler.StepLR, (), (), ""),
        ("torch.nn.System", os.system, (), (), "it is not a class of torch.nn"),
        ("torch.nn.modules.module.OrderedDict", collections.OrderedDict, (), (), "it is not a class of torch.nn"),
        ("torch.nn.utils.Generator", torch.Generator, (), (), "it is not a class of torch.nn"),
        ("transformers.EvilConfig", torch.nn.GELU, (), (), "it is not a class of transformers"),
        ("fractions.Fraction", fractions.Fraction, (fractions,), ("fractions",), ""),
        ("fractions.Fraction.from_float", fractions.Fraction.from_float, (fractions,), ("fractions",), ""),
        ("fractions.Fraction.from_float", fractions.Fraction.from_float, (fractions,), ("fractions.Fraction",), ""),
        ("fractions.operator.add", fractions.operator.add, (fractions,), ("fractions",), "it belongs to _operator"),  # type: ignore[attr-defined]
        ("my_pkg.helpers.system", os.system, (), ("my_pkg",), "it belongs to posix, which is not trusted"),
        ("my_pkg.os.system", os.system, (os,), ("my_pkg",), "it belongs to os, which is not trusted"),
        ("my_pkg.GELU", torch.nn.GELU, (), ("my_pkg",), ""),  # trusted code may pass on known names
        ("my_pkg.make", functools.partial(print), (), ("my_pkg",), "it belongs to functools"),
        ("my_pkg.make", functools.partial(print), (), ("my_pkg.make",), ""),  # trusted by its full name, whatever it is
    ],
)
def test_the_object_is_what_its_name_stands_for(
    name: str, found: object, owners: tuple[object, ...], trusted: tuple[str, ...], why: str
) -> None:
    said = why_object_refused(found, name, trusted, owners)
    assert said.startswith(why)
    assert bool(said) is bool(why)
