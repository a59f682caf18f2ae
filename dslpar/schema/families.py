"""Model families: which package owns the model that a config names by its `type`.

A family is one package. `section` has a class of the family's name, the section of a config; `layout` says what must
divide by what and what a pipeline weighs, `costs` what the model sends, holds and computes; `rules` are its lint rules;
`model` has its layers, in a class of the same name; a family that is the same as a model of transformers' says so in
`hugging_face`. A new family is its package, one line here and one in
setup.cfg. The modules are imported by name, when a config uses them, so that nothing below dslpar.models depends on it.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

from dslpar.schema.sections import Model

FAMILIES: dict[str, str] = {
    "GPT": "dslpar.models.gpt",
    "ResMLP": "dslpar.models.resmlp",
    "MoCo": "dslpar.models.moco",
}
"""The `type` of a config -> the family's package."""


def class_of(name: str, module: str) -> Any:
    """Return the class of the family `name` in its module "section" or "model"."""
    return getattr(import_module(f"{FAMILIES[name]}.{module}"), name)


def known_as(name: str) -> tuple[str, str]:
    """Return the family that another's name stands for, such as LlamaForCausalLM, and the fields that make it so.

    Both are empty where there is none.
    """
    import re  # only an unknown model needs it

    letters = re.sub(r"[-_. ]", "", name.lower())
    for family, section in sections().items():
        for pattern, fields in getattr(section, "KNOWN_AS", {}).items():
            if re.fullmatch(rf"{pattern}(model|lmheadmodel|forcausallm|forpretraining)?", letters):
                return family, fields
    return "", ""


def sections() -> dict[str, type[Model]]:
    """Return the sections of all families, by name."""
    return {name: class_of(name, "section") for name in FAMILIES}


def family_module(model: Model, name: str) -> ModuleType:
    """Import a module of the family of `model`, by its name."""
    # Not type(model): lint rules see a section through a guard, which has the section's __class__.
    return import_module(f"{model.__class__.__module__.rpartition('.')[0]}.{name}")
