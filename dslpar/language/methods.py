"""Methods of str, list, tuple and dict, in one table per type; a method in no table is not part of the language.

List and dict methods are reimplemented because they move the items' origins along with the items. String methods are
Python's own, with a guard if their result can be much longer than their arguments.
"""

from __future__ import annotations

from collections.abc import Callable

from dslpar.core.suggest import did_you_mean
from dslpar.language.call import Call
from dslpar.language.errors import ConfigError, UnknownError
from dslpar.language.formatting import format_method
from dslpar.language.functions import FUNCTIONS, key_function
from dslpar.language.limits import check_items, check_length, check_size
from dslpar.language.values import UNKNOWN, Dict, List, Value, adopt, require_known

Method = Callable[[Value, Call], Value]


def call_method(owner: Value, name: str, call: Call) -> Value:
    """Call `owner.name(...)`. Raises ConfigError if the language has no such method."""
    method = find_method(owner, name)
    if method is None:
        kind = type(owner).__name__.lower()
        known = METHODS.get(_kind(owner), {})
        message = f"{kind}.{name}() is not part of the config language{did_you_mean(name, known, '; ')}"
        raise ConfigError("CFG003", message, f"choose one of {', '.join(sorted(known))}" if known else "")
    if isinstance(owner, (str, tuple)):  # lists and dicts may hold unknown items
        call.require_known()
    return check_size(adopt(method(owner, call)))


def find_method(owner: Value, name: str) -> Method | None:
    """Return the method of a str, list, tuple or dict by its name; None if the language has none."""
    return METHODS.get(_kind(owner), {}).get(name)


def _kind(owner: Value) -> type:
    return next((kind for kind in METHODS if isinstance(owner, kind)), object)


def _text_method(name: str) -> Method:
    method = getattr(str, name)

    def run(owner: str, call: Call) -> Value:
        _check_text(name, owner, call)
        return method(owner, *call.args, **call.kwargs)

    return run


def _check_text(name: str, owner: str, call: Call) -> None:
    """Pay for a string method before it runs, and refuse it if its result would exceed the bounds."""
    args, length = call.args, sum(len(arg) for arg in call.args if isinstance(arg, str))
    call.budget.spend((len(owner) + length) // 32)
    if name in SEARCHING:
        # Searching from the right and stripping take time proportional to the product of both lengths. Searching from
        # the left takes time proportional to their sum.
        call.budget.spend(len(owner) * length // 2_000)
    elif name in PADDING and args and isinstance(args[0], int):
        check_length(args[0])
    elif name == "expandtabs":
        size = args[0] if args else call.kwargs.get("tabsize", 8)
        if isinstance(size, int):
            check_length(len(owner) + owner.count("\t") * max(size, 0))
    elif name == "replace" and len(args) > 1 and isinstance(args[0], str) and isinstance(args[1], str):
        check_length(len(owner) + owner.count(args[0]) * max(len(args[1]) - len(args[0]), 0))
    elif name == "translate":
        (table,) = args
        check_length(len(owner) * max((len(item) for item in table.values() if isinstance(item, str)), default=1))


def _join(owner: str, call: Call) -> str:
    (items,) = call.args
    parts = call.budget.take_all(items)
    require_known(*parts)
    check_length(sum(len(part) for part in parts if isinstance(part, str)) + len(owner) * len(parts))
    return owner.join(parts, **call.kwargs)


def _list_append(owner: List, call: Call) -> None:
    (item,) = call.positional(1)
    owner.append(item)
    owner.origins.append(call.locations[0])
    check_items(len(owner))


def _list_insert(owner: List, call: Call) -> None:
    index, item = call.positional(2)
    owner.insert(index, item)
    owner.origins.insert(index, call.locations[1])
    call.budget.spend(len(owner) // 64)
    check_items(len(owner))


def _list_pop(owner: List, call: Call) -> Value:
    call.budget.spend(len(owner) // 64)
    item = owner.pop(*call.args, **call.kwargs)
    call.result_origin = owner.origins.pop(*call.args)
    return item


def _list_remove(owner: List, call: Call) -> None:
    index = _search(list.index)(owner, call)
    del owner[index]
    del owner.origins[index]


def _search(method: Callable[..., int]) -> Method:
    def run(owner: List, call: Call) -> Value:
        call.require_known()
        call.budget.weigh(owner, *call.args)
        return method(owner, *call.args, **call.kwargs)

    return run


def _list_reverse(owner: List, call: Call) -> None:
    call.positional(0)
    call.budget.spend(len(owner) // 32)
    owner.reverse()
    owner.origins.reverse()


def _list_sort(owner: List, call: Call) -> None:
    call.budget.weigh(owner)
    call.budget.spend(len(owner))
    reverse = call.kwargs.pop("reverse", False)
    key = key_function(call)
    call.positional(0)
    keys = [key(item) for item in owner] if key else owner
    order = sorted(range(len(owner)), key=keys.__getitem__, reverse=reverse)
    owner[:], owner.origins[:] = [owner[i] for i in order], [owner.origins[i] for i in order]


def _dict_get(owner: Dict, call: Call) -> Value:
    key, default = call.positional(1, 1)
    call.budget.weigh(key)
    if key in owner:
        call.result_origin = owner.origin_of(key)
        return owner[key]
    call.result_origin = call.locations[1] if len(call.locations) > 1 else None
    return UNKNOWN if owner.tainted else default


def _dict_setdefault(owner: Dict, call: Call) -> Value:
    key, default = call.positional(1, 1)
    call.budget.weigh_keys(key)
    if key not in owner:
        owner.put(key, default, call.locations[-1], call.locations[0])
    call.result_origin = owner.origin_of(key)
    return owner[key]


def _dict_pop(owner: Dict, call: Call) -> Value:
    key, default = call.positional(1, 1)
    call.budget.weigh(key)
    if key in owner:
        call.result_origin = owner.origin_of(key)
        return owner.drop(key)
    if owner.tainted:
        raise UnknownError
    if len(call.args) == 1:
        raise KeyError(key)
    call.result_origin = call.locations[1]
    return default


def _dict_popitem(owner: Dict, call: Call) -> Value:
    call.positional(0)
    pair = owner.popitem()
    owner.origins.pop(pair[0], None)
    return pair


def _clear(owner: List | Dict, call: Call) -> None:
    call.positional(0)
    owner.clear()
    owner.origins.clear()
    owner.tainted = False  # no unknown item is left


def _copy(owner: List | Dict, call: Call) -> Value:
    call.positional(0)
    kind = "list" if isinstance(owner, List) else "dict"
    return FUNCTIONS[f"builtins.{kind}"](call.with_args([owner]))


def _dict_view(name: str) -> Method:
    method = getattr(dict, name)

    def view(owner: Dict, call: Call) -> Value:
        call.positional(0)
        return method(owner)

    return view


PLAIN_TEXT = """capitalize casefold count endswith expandtabs find index isalnum isalpha isascii isdecimal isdigit
    isidentifier islower isnumeric isprintable isspace istitle isupper lower partition removeprefix removesuffix replace
    split splitlines startswith swapcase title translate upper"""
SEARCHING = ("lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip")
PADDING = ("center", "ljust", "rjust", "zfill")
METHODS: dict[type, dict[str, Method]] = {
    str: {
        **{name: _text_method(name) for name in (*PLAIN_TEXT.split(), *SEARCHING, *PADDING)},
        "format": lambda owner, call: format_method(owner, call.args, call.kwargs, call.budget),
        "format_map": lambda owner, call: format_method(owner, (), call.positional(1)[0], call.budget),
        "join": _join,
    },
    list: {
        "append": _list_append,
        "clear": _clear,
        "copy": _copy,
        "count": _search(list.count),
        "extend": lambda owner, call: owner.append_all(call.positional(1)[0], call.budget),
        "index": _search(list.index),
        "insert": _list_insert,
        "pop": _list_pop,
        "remove": _list_remove,
        "reverse": _list_reverse,
        "sort": _list_sort,
    },
    tuple: {"count": _search(tuple.count), "index": _search(tuple.index)},
    dict: {
        "clear": _clear,
        "copy": _copy,
        "get": _dict_get,
        "pop": _dict_pop,
        "popitem": _dict_popitem,
        "setdefault": _dict_setdefault,
        "update": lambda owner, call: call.merge_into(owner),
        **{name: _dict_view(name) for name in ("items", "keys", "values")},
    },
}
