"""LazyCall, DictConfig and get_config as config files call them; `lazy` has LazyCall and get_config for programs.

LazyCall copies the containers among its arguments, as in detectron2 and LiBai.
"""

from __future__ import annotations

from collections.abc import Callable

from dslpar.language.call import Call
from dslpar.language.errors import ConfigError
from dslpar.language.tree import TARGET, Reference
from dslpar.language.values import Dict, LazyTarget, Value, deep_copy


def lazy_call(call: Call) -> LazyTarget:
    """Evaluate the first call of `LazyCall(target)(...)`."""
    (target,) = call.positional(1)
    if isinstance(target, str) and all(part.isidentifier() for part in target.split(".")) and "." in target:
        target = Reference(target)
    if not isinstance(target, Reference):
        what = "a class or function, imported, or its full name as a string"
        raise ConfigError(
            "CFG004", f"LazyCall needs {what}", "write `L(...)(...)` of a class, and `from ... import ...` above it"
        )
    return LazyTarget(target)


def call_lazy(target: LazyTarget, call: Call) -> Dict:
    """Evaluate the second call of `LazyCall(target)(...)`."""
    if call.args:
        hint = f"write `L({target.target.name.rpartition('.')[2]})(NAME=...)`, each argument by its name"
        raise ConfigError("CFG003", "LazyCall takes keyword arguments only", hint)
    made = Dict()
    made.put(TARGET, target.target, call.location)
    call.budget.weigh(*call.kwargs.values())
    known: dict[int, Value] = {}
    for name, value in call.kwargs.items():
        if name != TARGET:  # a description spread with `**` brings its own target; the outer one counts
            made.put(name, deep_copy(value, known), *call.keyword_origins[name])
    return made


def copying_dict(call: Call) -> Value:
    """Evaluate `DictConfig(...)`, `ListConfig(...)` and `OmegaConf.create(...)`, which copy their argument."""
    (content,) = call.positional(0, 1, keywords=True)
    content = call.kwargs.pop("content", call.kwargs.pop("obj", content))
    call.budget.weigh(content)
    if content is None:
        return Dict()
    if not isinstance(content, (dict, list)):
        raise TypeError(f"expected a dict, got {type(content).__name__}")
    return deep_copy(content)


def get_config(home: str) -> Callable[[Call], Value]:
    """Return the `get_config` of package `home`: `get_config("common/train.py")` is a mapping of that file's names."""

    def run(call: Call) -> Value:
        (name,) = call.positional(1)
        if not isinstance(name, str):
            raise TypeError("get_config() takes the path of a config file as a string")
        return call.open_config(name, home, call.locations[0])

    return run
