"""Trust: which classes and functions dslpar may import and call for a config.

- A section's own class (`model`, a layer, `optimizer`, `gradient_handler`) may come from any package except the
  standard library, which has none of these: naming the class is the section's purpose. It is imported, but must be a
  class of the section's kind before it or its arguments are called. So `my_data.py` next to a config works by its name.
- A call within arguments, `LazyCall(X)(...)` or `_target_`, must be a class of a known package (`known_package`) or be
  in a trusted package, even if X belongs to the author's own project: nothing else shows that the call is intended.
- A package is trusted by `trusted = ['my_pkg']` in `[tool.dslpar]` of the pyproject.toml that applies in the *working*
  folder, by `--trust my_pkg`, or by `dslpar.load(path, trusted=["my_pkg"])`, but never by a file that came with the
  config. A program trusts the classes that it has registered, and the calls that it describes with `LazyCall` itself.

The rules for calls are checked in two phases:

1. Before an import, `why_name_refused` checks the name, in lint and again in a run.
2. After the import, `why_object_refused` checks the object, in a run. An object of a known package must be a class that
   is defined there. An object in a trusted package must be defined there or be a class of a known package, unless
   `trusted` has its full name.

A config that can name any callable and its arguments can do anything: configs with a `_target_` could run `os.system`
in Hydra and NeMo. A list of forbidden names is never complete, and one object has many names, such as
`logging.os.system`. So Hydra moves to a list of allowed names. It is checked against the imported object, and the user
supplies it, since a config must not vouch for itself. `torch.load(weights_only=True)` with its safe globals and Hugging
Face's `trust_remote_code` work in the same way.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import ModuleType

_KNOWN_PACKAGES = ("torch.nn", "torch.optim", "dslpar.layers", "dslpar.models", "transformers")
"""Packages of layers, optimizers and models; the last one, transformers, only for the models' configs."""
_KNOWN_CLASSES = "classes of torch.nn, torch.optim, dslpar.layers and dslpar.models, and transformers' configs"
_CONFIG_BASES = {"PretrainedConfig", "PreTrainedConfig"}  # transformers 4 and 5


def known_package(name: str) -> str:
    """Return the known package that a class belongs to, judged by its full name; empty if there is none."""
    *modules, last = name.split(".")
    package = next((package for package in _KNOWN_PACKAGES if name.startswith(f"{package}.")), "")
    is_class = last[:1].isupper() and not any(module[:1].isupper() for module in modules)
    if package == "transformers":
        is_class = is_class and last.endswith("Config")
    return package if is_class and not _passes_through_another_package(name) else ""


def _passes_through_another_package(name: str) -> bool:
    """Return whether a name leads through another imported package, as `torch.nn.functional.os.system` does."""
    root, *parts = name.split(".")
    return any(part == root or part in sys.stdlib_module_names for part in parts)


def trusted_entry(name: str, trusted: Iterable[str]) -> str:
    """Return the entry of `trusted` that covers a full name; empty if there is none."""
    return next((entry for entry in trusted if name == entry or name.startswith(f"{entry}.")), "")


def is_standard_library(name: str) -> bool:
    """Return whether a full name is in Python's standard library, which has no model, layer or optimizer."""
    return name.partition(".")[0] in sys.stdlib_module_names | {"__main__"}


def why_name_refused(name: str, trusted: Iterable[str]) -> tuple[str, str] | None:
    """Return why a call that a config describes is refused before its target is imported; None if it is not.

    The result is a message and a hint.
    """
    if known_package(name) or trusted_entry(name, trusted):
        return None
    is_known = any(package.partition(".")[0] == name.partition(".")[0] for package in _KNOWN_PACKAGES)
    if is_standard_library(name) or (is_known and _passes_through_another_package(name)):
        hint = "write the value itself; or choose a module of your own to make it, and trust that: trusted = ['my_pkg']"
        of_whom = (
            ", which is in Python's standard library"
            if is_standard_library(name)
            else ": the name leads to another package"
        )
        return f"a config may not call {name!r}{of_whom}", hint
    # Trusting a whole known package would be too much: torch.hub.load runs code from the network.
    entry = name if is_known else name.partition(".")[0]
    hint = f"add trusted = [{entry!r}] to [tool.dslpar] of your pyproject.toml, or --trust {entry}"
    return f"a config may not call {name!r}: {entry!r} is not trusted", f"{hint}; else call {_KNOWN_CLASSES}"


def why_object_refused(found: object, name: str, trusted: Iterable[str], owners: Iterable[object]) -> str:
    """Return why an imported object may not be called; empty if it may.

    `owners` are the modules and classes that lead to the object, in the order of the parts of `name`.
    """
    entries = tuple(trusted)
    module = str(getattr(found, "__module__", None) or "")
    package, entry = known_package(name), trusted_entry(name, entries)
    if entry == name:
        return ""
    if entry:
        modules = [module, *(owner.__name__ for owner in owners if isinstance(owner, ModuleType))]
        own = [each for each in modules if not each or trusted_entry(each, entries) or entry.startswith(f"{each}.")]
        of_others = [each for each in modules if each not in own]
        is_known = isinstance(found, type) and known_package(f"{module}.{found.__qualname__}")
        return f"it belongs to {of_others[-1]}, which is not trusted" if of_others and not is_known else ""
    if not isinstance(found, type) or not (module == package or module.startswith(f"{package}.")):
        return f"it is not a class of {package}"
    if package == "transformers" and not {base.__name__ for base in found.__mro__} & _CONFIG_BASES:
        return "it is not the config class of a transformers model"
    return ""
