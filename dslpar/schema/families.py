"""Model families: the package of each model that a config names by its `type`.

A family is one package with these modules. `section` has the config section, a class with the family's name. `layout`
has the divisors of its sizes and the weights for the pipeline partition. `costs` counts what the model sends, holds and
computes. `rules` has its lint rules. `model` has its layers, in a class with the same name. `hugging_face`, if present,
maps the family to an equal transformers model. To add a family, write the package and add one line here and one in
setup.cfg. The modules are imported by name when a config uses them, so that no package below dslpar.models depends on
it.
"""

from __future__ import annotations

import re
from importlib import import_module
from types import ModuleType
from typing import Any

from dslpar.schema.sections import Model

FAMILIES: dict[str, str] = {
    "GPT": "dslpar.models.gpt",
    "ResMLP": "dslpar.models.resmlp",
    "MoCo": "dslpar.models.moco",
}
"""`type` of a model -> the family's package."""


def class_of(name: str, module: str) -> Any:
    """Return the class of family `name` from its module "section" or "model"."""
    return getattr(import_module(f"{FAMILIES[name]}.{module}"), name)


def known_as(name: str) -> tuple[str, str]:
    """Return the family that can build another model, such as LlamaForCausalLM, and the config fields for that model.

    Both are empty if no family can build it.
    """
    letters = re.sub(r"[-_. ]", "", name.lower())
    for family, section in sections().items():
        for pattern, fields in getattr(section, "KNOWN_AS", {}).items():
            if re.fullmatch(rf"{pattern}(model|lmheadmodel|forcausallm|forpretraining)?", letters):
                return family, fields
    return "", ""


def sections() -> dict[str, type[Model]]:
    """Return family name -> section class."""
    return {name: class_of(name, "section") for name in FAMILIES}


def family_module(model: Model, name: str) -> ModuleType:
    """Import a module of the model's family, by the module's name."""
    return import_module(f"{type(model).__module__.rpartition('.')[0]}.{name}")
