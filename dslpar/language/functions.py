"""Functions of the language, in one table by full name: builtins, math, os.path.join, copy, OmegaConf and LazyCall.

A name bound by an absolute import is a *reference* until it is called. A call is looked up by the reference's full
name, so `import math`, `from math import pi` and `import os.path as osp` need no separate handling.
"""

from __future__ import annotations

import math
import os.path
from collections.abc import Callable

from dslpar.core.suggest import nearest
from dslpar.core.trust import is_standard_library, known_package
from dslpar.language.call import Call
from dslpar.language.errors import WRITE_VALUE, ConfigError, UnknownError
from dslpar.language.formatting import to_text
from dslpar.language.lazy_calls import copying_dict, get_config, lazy_call
from dslpar.language.limits import (
    CONTAINERS,
    MAX_BITS,
    check_bits,
    check_items,
    check_size,
    in_fixed_order,
    limit_error,
)
from dslpar.language.tree import Reference
from dslpar.language.values import (
    Dict,
    List,
    Value,
    adopt,
    deep_copy,
    make_tuple,
    origins_of,
    require_known,
    require_readable,
)

Function = Callable[[Call], Value]


def call_function(target: Reference, call: Call) -> Value:
    """Call a function of the language. Raises ConfigError for any other function."""
    function = FUNCTIONS.get(target.name)
    if function is None:
        raise _not_callable(target.name, call)
    if target.name not in KEEP_UNKNOWN:
        call.require_known()
    return check_size(adopt(function(call)))


def key_function(call: Call) -> Callable[[Value], Value] | None:
    """Remove the `key=` of sorted, min, max or list.sort from a call; it must be a function of the language."""
    key = call.kwargs.pop("key", None)
    if key is None:
        return None
    require_known(key)
    if not isinstance(key, Reference):
        raise TypeError(f"{type(key).__name__!r} object is not callable")
    return lambda item: call_function(key, call.with_args([item]))


def _not_callable(name: str, call: Call) -> ConfigError:
    hint = _equivalent(name, call) or WRITE_VALUE
    return ConfigError("CFG003", f"cannot call {name.removeprefix('builtins.')}() in a config", hint)


def _equivalent(name: str, call: Call) -> str:
    """Return the language's equivalent of a Python or numpy function or of a class, as a hint; empty if it has none."""
    owner, _, last = name.rpartition(".")
    package = name.partition(".")[0]
    if owner in ("math", "os.path", "builtins"):
        close = nearest(name, FUNCTIONS)
        return f"write `{close.removeprefix('builtins.')}(...)`" if close else ""
    if owner == "numpy" and last in ("array", "asarray"):
        return "write `list(...)`"
    if owner == "numpy" and f"math.{last}" in FUNCTIONS:
        return f"write `math.{last}(...)`, and `import math` above"
    if owner == "numpy" and last in BUILTINS:
        return f"write `{last}(...)`"
    if name == "functools.partial" and call.args and isinstance(call.args[0], Reference):
        return _lazily(call.args[0].name, len(call.args) > 1)
    # A run can build a class later. The result of a function is known only to the author.
    is_class = last[:1].isupper() and package != "numpy" and not is_standard_library(name)
    trust = "" if known_package(name) else f" (within a section, if {package} is trusted: dslpar explain CFG122)"
    return _lazily(name, bool(call.args)) + trust if is_class else ""


def _lazily(name: str, by_position: bool) -> str:
    arguments = "NAME=..." if by_position else "..."
    by_name = ", each argument by its name" if by_position else ""
    built = f"write `L({name.rpartition('.')[2]})({arguments})`{by_name}"
    return f"{built}, and `from dslpar import LazyCall as L` above: it is called at build"


def _dict(call: Call) -> Dict:
    made = Dict()
    call.merge_into(made)
    return made


def _fromkeys(call: Call) -> Dict:
    keys, value = call.positional(1, 1)
    made = Dict()
    for key in readable(keys, call):
        call.budget.weigh_keys(key)
        made.put(key, value, call.locations[-1], call.locations[0])
    return made


def _list(call: Call) -> List:
    (source,) = call.positional(0, 1)
    if not call.args:
        return List()
    if isinstance(source, (list, tuple)):
        call.budget.spend(len(source) // 4)
        made = List(source, origins_of(source))
        made.tainted = getattr(source, "tainted", False)
        return made
    return List(readable(source, call))


def _tuple(call: Call) -> Value:
    made = _list(call)
    if made.tainted:
        raise UnknownError
    return make_tuple(made, made.origins)


def _set(call: Call) -> set[Value]:
    (source,) = call.positional(0, 1)
    if not call.args:
        return set()
    values = list(readable(source, call, any_order=True))
    call.budget.weigh_keys(*values)
    return set(values)


def readable(value: Value, call: Call, any_order: bool = False) -> Value:
    """Return an iterable that Python's own functions may read to its end. The budget pays at once, or item by item."""
    require_readable(value)
    if not any_order:
        in_fixed_order(value)
    if isinstance(value, (str, *CONTAINERS)):
        call.budget.spend(len(value) // 8)
        return value
    return call.budget.metered(value) if hasattr(value, "__iter__") and not isinstance(value, Reference) else value


def _reader(function: Value, any_order: bool = False) -> Function:
    """Wrap a function that reads all items of its arguments, and compares or adds them."""

    def run(call: Call) -> Value:
        key = key_function(call)
        call.budget.weigh(*call.args)
        args = list(call.args)
        if len(args) == 1 or function is sum:
            # With a key, which of two equal items wins depends on their order.
            args[:1] = [readable(item, call, any_order and key is None) for item in args[:1]]
        return function(*args, **call.kwargs, **({"key": key} if key else {}))

    return run


def _sum(call: Call) -> Value:
    """Evaluate `sum`. A sum of containers copies all earlier items in each addition, so the price is quadratic."""
    start = call.args[1] if len(call.args) > 1 else call.kwargs.get("start", 0)
    if not isinstance(start, CONTAINERS):
        return _reader(sum)(call)
    items = list(readable(call.args[0], call))
    length = sum(len(item) for item in items if isinstance(item, CONTAINERS))
    check_items(length)
    call.budget.spend(len(items) * length // 64)
    total: Value = start
    for item in items:
        total = total + item
    return check_size(total)


def _lazy_iterator(function: Callable[..., Value]) -> Function:
    """Wrap `zip`, `enumerate` or `reversed`: arguments are read only as the result is read."""

    def run(call: Call) -> Value:
        for value in call.args:
            require_readable(value)
            in_fixed_order(value)
        return function(*call.args, **call.kwargs)

    return run


def _simple(function: Callable[..., Value]) -> Function:
    def run(call: Call) -> Value:
        for value in call.args:
            if isinstance(value, List) and value.tainted:
                raise UnknownError
            call.budget.spend(len(value) // 64 if isinstance(value, str) else 0)
        return function(*call.args, **call.kwargs)

    return run


def _round(call: Call) -> Value:
    digits = call.args[1] if len(call.args) > 1 else call.kwargs.get("ndigits")
    if isinstance(digits, int) and abs(digits) > 1000:
        raise limit_error("round() to more than 1,000 digits")
    return _simple(round)(call)


def _isinstance(call: Call) -> bool:
    value, kinds = call.positional(2)
    call.budget.weigh(kinds)
    return isinstance(value, _types(kinds))


def _types(kinds: Value) -> tuple[type, ...]:
    if isinstance(kinds, tuple):
        return tuple(kind for item in kinds for kind in _types(item))
    kind = TYPES.get(kinds.name) if isinstance(kinds, Reference) else None
    if kind is None:
        hint = f"choose one of {', '.join(SHORT_TYPES)}"
        raise ConfigError("CFG004", "isinstance() needs one of the language's types", hint)
    return (kind,)


def _copied(call: Call, deeply: bool) -> Value:
    """Evaluate `copy.copy` and `copy.deepcopy`."""
    (value,) = call.positional(1)
    if isinstance(value, (list, dict)) and not deeply:
        return (_list if isinstance(value, list) else _dict)(call)
    call.budget.weigh(value)
    return deep_copy(value) if deeply else value


def _join_path(call: Call) -> str:
    if call.kwargs or not all(isinstance(part, str) for part in call.args):
        raise TypeError("os.path.join() takes strings")
    joined: str = os.path.join(*call.args)
    return joined


def _bounded(function: Callable[..., Value], bits: Callable[..., int]) -> Function:
    """Wrap a function of math whose integer result can be huge; `bits` returns an upper bound of the result's bits."""

    def run(call: Call) -> Value:
        if all(isinstance(value, int) for value in call.args):
            check_bits(bits(*call.args))
        return function(*call.args, **call.kwargs)

    return run


def _product(call: Call) -> Value:
    items = list(readable(call.args[0], call)) if len(call.args) == 1 else []  # otherwise math.prod raises below
    start = call.kwargs.get("start", 1)
    check_bits(sum(item.bit_length() for item in (*items, start) if isinstance(item, int)))
    if any(isinstance(item, (*CONTAINERS, str)) for item in (*items, start)):
        raise TypeError("math.prod() takes numbers")
    return math.prod(items, **call.kwargs)


SHORT_TYPES = ("dict", "list", "tuple", "set", "int", "float", "str", "bool")
TYPES: dict[str, type] = {
    **{f"builtins.{kind.__name__}": kind for kind in (dict, list, tuple, set, int, float, str, bool, range)},
    "omegaconf.DictConfig": dict,
    "omegaconf.ListConfig": list,
}
FLOAT_MATH = """acos acosh asin asinh atan atan2 atanh cbrt ceil copysign cos cosh degrees erf erfc exp exp2 expm1 fabs
    floor fmod gamma gcd hypot isclose isfinite isinf isnan isqrt ldexp lgamma log log10 log1p log2 modf nextafter pow
    radians remainder sin sinh sqrt tan tanh trunc ulp"""
# `any_order`: the results of these functions do not depend on the order in which a set yields its items.
FUNCTIONS: dict[str, Function] = {
    **{f"builtins.{f.__name__}": _reader(f, any_order=True) for f in (all, any, max, min, sorted)},
    **{f"builtins.{f.__name__}": _simple(f) for f in (abs, bool, divmod, float, int, len, range)},
    **{f"builtins.{f.__name__}": _lazy_iterator(f) for f in (enumerate, reversed, zip)},
    "builtins.dict": _dict,
    "builtins.dict.fromkeys": _fromkeys,
    "builtins.isinstance": _isinstance,
    "builtins.list": _list,
    "builtins.round": _round,
    "builtins.set": _set,
    "builtins.str": lambda call: to_text(call.positional(1)[0] if call.args or call.kwargs else "", call.budget),
    "builtins.sum": _sum,
    "builtins.tuple": _tuple,
    **{f"math.{name}": _simple(getattr(math, name)) for name in FLOAT_MATH.split() if hasattr(math, name)},
    "copy.copy": lambda call: _copied(call, deeply=False),
    "copy.deepcopy": lambda call: _copied(call, deeply=True),
    "math.comb": _bounded(math.comb, lambda n, k: min(abs(n), abs(k) * n.bit_length())),
    "math.dist": _reader(math.dist),
    "math.factorial": _bounded(math.factorial, lambda n: n * n.bit_length() if n < MAX_BITS else MAX_BITS + 1),
    "math.fsum": _reader(math.fsum),
    "math.lcm": _bounded(math.lcm, lambda *numbers: sum(number.bit_length() for number in numbers)),
    "math.perm": _bounded(math.perm, lambda n, k=None: (n if k is None else abs(k)) * n.bit_length()),
    "math.prod": _product,
    "os.path.join": _join_path,
    "omegaconf.DictConfig": copying_dict,
    "omegaconf.ListConfig": copying_dict,
    "omegaconf.OmegaConf.create": copying_dict,
}
for _home in ("dslpar", "dslpar.config", "dslpar.config.lazy", "libai.config", "libai.config.lazy"):
    FUNCTIONS |= {f"{_home}.LazyCall": lazy_call, f"{_home}.L": lazy_call}
    FUNCTIONS[f"{_home}.get_config"] = get_config(_home.partition(".")[0])
SECTION_TYPES = (
    "ActivationCheckpoint", "Adam", "AdamW", "Batch", "BlendData", "BlendPart", "ChatData", "Checkpoint",
    "Cluster", "ContextParallel", "DataParallel", "Dist", "ExpertParallel", "Experts", "FileMonitor", "GPT",
    "GradientHandler", "HuggingFaceData", "ImageData", "LRScheduler", "LoRA", "MaskedTextData", "MoCo", "Monitor",
    "Parallel", "PipelineParallel", "PipelineSchedule", "Precision", "ResMLP", "SGD", "SpanTextData",
    "TensorParallel", "TextData", "TokensData", "Train", "WandbMonitor", "Zero",
)  # fmt: skip
"""Names of the TypedDicts of dslpar.config, which are dicts at run time."""
FUNCTIONS |= {f"dslpar.config.{name}": FUNCTIONS["builtins.dict"] for name in SECTION_TYPES}
KEEP_UNKNOWN = frozenset(
    ["builtins.dict", "builtins.dict.fromkeys", "copy.copy", "copy.deepcopy"]
    + [f"dslpar.config.{name}" for name in SECTION_TYPES]
)
"""Functions whose result may contain unknown items. Any other function's result is unknown if an argument is."""
VALUES: dict[str, Value] = {
    **{f"math.{name}": getattr(math, name) for name in ("e", "inf", "nan", "pi", "tau")},
    "os.sep": "/",
    "os.path.sep": "/",
}
BUILTINS = {name.split(".")[1] for name in (*FUNCTIONS, *TYPES) if name.startswith("builtins.")}
