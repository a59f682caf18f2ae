"""Trust: which classes and functions dslpar may import and call for a config.

A config that can name any callable and its arguments can do anything: configs with a `_target_` could run `os.system`
in Hydra and NeMo. A list of forbidden names is never complete, and one object has many names, such as
`logging.os.system`. So Hydra moves to a list of allowed names. It is checked against the imported object, and the user
supplies it, since a config must not vouch for itself. `torch.load(weights_only=True)` with its safe globals and Hugging
Face's `trust_remote_code` work in the same way. In dslpar:

- A section's own class (`model`, a layer, `optimizer`, `gradient_handler`) may come from any package except the
  standard library, which has none of these: naming the class is the section's purpose. It is imported, and must be a
  class of the section's kind before it or its arguments are called. So `my_data.py` next to a config works by its name.
- A call within arguments, `LazyCall(X)(...)` or `_target_`, must be of a known kind (below) or in a trusted package,
  even if X belongs to the author's own project: nothing else shows that the call is intended.
- A package is trusted by `trusted = ['my_pkg']` in `[tool.dslpar]` of the pyproject.toml that applies in the *working*
  folder, by `--trust my_pkg`, or by `dslpar.load(path, trusted=["my_pkg"])`, but never by a file that came with the
  config. A program trusts the classes that it has registered, and the calls that it describes with `LazyCall` itself.

Lint checks names. A run checks them again before it imports, and then checks the object: an object of a known kind must
be a class of that kind. An object in a trusted package must be defined there, unless `trusted` has its full name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import ModuleType

_KNOWN = ("torch.nn", "torch.optim", "dslpar.layers", "dslpar.models", "transformers")
"""Packages of layers, optimizers and models; the last one, transformers, only for the models' configs."""
KNOWN_KINDS = "classes of torch.nn, torch.optim, dslpar.layers and dslpar.models, and transformers' configs"
_CONFIG_BASES = {"PretrainedConfig", "PreTrainedConfig"}  # transformers 4 and 5


def known_kind(name: str) -> str:
    """Return the package in `_KNOWN` that a class belongs to, judged by its full name; empty if there is none."""
    *modules, last = name.split(".")
    kind = next((kind for kind in _KNOWN if name.startswith(f"{kind}.")), "")
    is_class = last[:1].isupper() and not any(module[:1].isupper() for module in modules)
    if kind == "transformers":
        is_class = is_class and last.endswith("Config")
    return kind if is_class and not _passes_through_another_package(name) else ""


def _passes_through_another_package(name: str) -> bool:
    """Return whether a name leads through another imported package, as `torch.nn.functional.os.system` does."""
    root, *parts = name.split(".")
    return any(part == root or part in sys.stdlib_module_names for part in parts)


def trusting(name: str, trusted: Iterable[str]) -> str:
    """Return the entry of `trusted` that covers a full name; empty if there is none."""
    return next((entry for entry in trusted if name == entry or name.startswith(f"{entry}.")), "")


def is_standard_library(name: str) -> bool:
    """Return whether a full name is in Python's standard library, which has no model, layer or optimizer."""
    return name.partition(".")[0] in sys.stdlib_module_names | {"__main__"}


def refusal(name: str, trusted: Iterable[str]) -> tuple[str, str] | None:
    """Return why a call that a config describes is refused, and what to do; None if it may be made."""
    if known_kind(name) or trusting(name, trusted):
        return None
    is_known = any(kind.partition(".")[0] == name.partition(".")[0] for kind in _KNOWN)
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
    return f"a config may not call {name!r}: {entry!r} is not trusted", f"{hint}; else call {KNOWN_KINDS}"


def why_not(found: object, name: str, trusted: Iterable[str], owners: Iterable[object]) -> str:
    """Return why an imported object may not be called; empty if it may.

    `owners` are the modules and classes that lead to the object, in the order of the parts of `name`.
    """
    entries = tuple(trusted)
    module = str(getattr(found, "__module__", None) or "")
    kind, entry = known_kind(name), trusting(name, entries)
    if entry == name:
        return ""
    if entry:
        modules = [module, *(owner.__name__ for owner in owners if isinstance(owner, ModuleType))]
        own = [each for each in modules if not each or trusting(each, entries) or entry.startswith(f"{each}.")]
        of_others = [each for each in modules if each not in own]
        is_known = isinstance(found, type) and known_kind(f"{module}.{found.__qualname__}")
        return f"it belongs to {of_others[-1]}, which is not trusted" if of_others and not is_known else ""
    if not isinstance(found, type) or not (module == kind or module.startswith(f"{kind}.")):
        return f"it is not a class of {kind}"
    if kind == "transformers" and not {base.__name__ for base in found.__mro__} & _CONFIG_BASES:
        return "it is not the config class of a transformers model"
    return ""
