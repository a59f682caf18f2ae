"""Random inputs of `dslpar lint`, one per seed: a config file as bytes, overrides, a hostfile, a world.

    given = sample(17)
    given.name, given.data, given.overrides, given.hostfile, given.world

Most are shipped configs, examples of rules' pages and the oracle's samples, with changed bytes, tokens or lines. The
rest is generated from a grammar of Python that is wider than the config language, or is YAML and JSON. The mix is AFL's
(flips, splices, a dictionary of tokens) with a grammar, as in atheris and fuzzingbook.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from random import Random
from typing import Any, NamedTuple

from dslpar.core.catalog import split_page
from dslpar.linter.registry import RULES
from dslpar.schema.sections_reader import SECTIONS
from tests.support.oracle.sample import sample as sample_of_oracle
from tests.support.paths import ROOT

MODEL = "model = dict(type='GPT', num_layers=8, hidden_size=96, num_heads=24, vocab_size=256, max_seq_len=96)\n"


class Input(NamedTuple):
    """The input of one run of the linter."""

    seed: int
    kind: str
    name: str
    """The file's name."""
    data: bytes
    overrides: tuple[str, ...] = ()
    hostfile: str | None = None
    world: int | None = 8


def sample(seed: int) -> Input:
    """Return the input of a seed."""
    rng = Random(f"fuzz {seed}")
    kind = rng.choices(list(_KINDS), weights=[weight for _, weight in _KINDS.values()])[0]
    given: Input = _KINDS[kind][0](rng)
    return given._replace(seed=seed, kind=kind)


# ---- the corpus ----


@cache
def corpus() -> tuple[str, ...]:
    """Return shipped configs, and both examples of each rule."""
    texts = [path.read_text() for path in sorted((ROOT / "configs").rglob("*.py")) if path.name != "__init__.py"]
    for rule in RULES:
        sections = split_page(rule.text())[1]
        texts += [MODEL + sections[name].strip() + "\n" for name in ("Example", "Use instead") if name in sections]
    return tuple(texts)


@cache
def words() -> tuple[str, ...]:
    """Return a dictionary: every word of the corpus, and dangerous words."""
    return (*sorted({word for text in corpus() for word in re.findall(r"\w+|'\w+'", text)}), *_DANGEROUS)


_TOO_MUCH = """
    while True: def f(): class A: lambda: yield await async with try: except: import from global nonlocal del assert
    raise return pass break continue := ** // << >> ~ @ -> ... * ** __import__('os').system('touch\x20CANARY')
    exec('1') eval('1') open('CANARY','w') compile('1','','exec') globals() __class__ __builtins__ getattr(1,'a')
    10**400 2**31 -1 1e309 0x7fffffffffffffff 9999999999999999999999 0.1 nan inf None True False '' b'' '\x00' '\\ud800'
    range(10**12) 'x'*10**9 [0]*10**9 10**10**10 1<<10**9 {**{}} [*[]] f'{1!r:>9}' '%s'%1 '{}'.format(1)
    LazyCall(GPT)(num_layers=2) get_config('common/train.py') DictConfig({}) OmegaConf.create({})
    math.sqrt(2) os.path.join('a','b')
    dict(type='os.system') '\u2028' '\x0c' '\u202e' '\u017f' '\u00b5' '\U0001d7d9' '\ufeff' # \\ ;
"""
_DANGEROUS = tuple(_TOO_MUCH.split())
_ODD = (
    "\ufeff",
    "\x00",
    "\x0c",
    "\r",
    "\r\n",
    "\u2028",
    "\x85",
    "\u200b",
    "é",
    "\U0001d54f",
    "\t",
    "\ud7ff",
    "\x1b[31m",
    "\\\n",
)
_NUMBERS = ("0", "-1", "1e309", "10**400", "2**31", "2**63", "9" * 30, "1.5", "True", "None", "'8'", "[]", "{}", "()")


# ---- changes of a text ----


def _base(rng: Random) -> str:
    if rng.random() < 0.25:
        return sample_of_oracle(rng.randrange(10**6)).text
    return rng.choice(corpus())


def _bytes(rng: Random) -> Input:
    """Flip, insert, remove and double bytes."""
    data = bytearray(_base(rng).encode())
    for _ in range(rng.choice((1, 1, 2, 5, 30))):
        at = rng.randrange(len(data) + 1)
        change = rng.randrange(5)
        if change == 0 and at < len(data):
            data[at] = rng.randrange(256)
        elif change == 1:
            data[at:at] = rng.choice((bytes([rng.randrange(256)]), rng.choice(_ODD).encode()))
        elif change == 2:
            del data[at : at + rng.choice((1, 2, 20))]
        elif change == 3:
            data[at:at] = data[at : at + rng.choice((1, 10, 200))]
        elif at < len(data):
            data[at] ^= 1 << rng.randrange(8)
    return _file(rng, bytes(data))


_TOKEN = re.compile(r"\w+|'[^'\n]*'|\s+|.", re.DOTALL)


def _tokens(rng: Random) -> Input:
    """Swap words and signs, or replace them."""
    tokens = _TOKEN.findall(_base(rng))
    for _ in range(rng.choice((1, 1, 1, 2, 4, 12))):
        at = rng.randrange(len(tokens))
        change = rng.randrange(5)
        if change == 0:
            tokens[at] = rng.choice(words())
        elif change == 1:
            tokens[at] = ""
        elif change == 2:
            other = rng.randrange(len(tokens))
            tokens[at], tokens[other] = tokens[other], tokens[at]
        elif change == 3:
            tokens.insert(at, rng.choice((*"()[]{}=,.:", rng.choice(words()))))
        else:
            tokens[at : at + 3] = tokens[at : at + 3] * rng.choice((2, 3))
    return _file(rng, "".join(tokens).encode("utf-8", "surrogatepass"))


def _numbers(rng: Random) -> Input:
    """Change values, which the rules look at."""
    text = _base(rng)
    places = [*re.finditer(r"(?<![\w.])\d[\d.e-]*(?![\w.])|'\w+'|True|False", text)]
    for place in sorted(rng.sample(places, min(len(places), rng.choice((1, 1, 2, 3)))), key=re.Match.start)[::-1]:
        value = rng.choice((*_NUMBERS, str(rng.randrange(100)), repr(rng.choice(words()))))
        text = text[: place.start()] + value + text[place.end() :]
    return _file(rng, text.encode("utf-8", "surrogatepass"))


def _spliced(rng: Random) -> Input:
    """Splice lines of two files, some of them doubled or indented."""
    lines = _base(rng).splitlines() + _base(rng).splitlines()
    rng.shuffle(lines)
    kept = [rng.choice(("", "", "", "  ", "\t")) + line for line in lines[: rng.randint(1, 30)]]
    return _file(rng, rng.choice(("\n", "\n", "\r\n", "\r")).join(kept).encode())


def _encoded(rng: Random) -> Input:
    """Use another encoding, or a declaration of one."""
    text = _base(rng)
    if rng.random() < 0.5:
        return _file(rng, f"# -*- coding: {rng.choice(('latin-1', 'utf-7', 'rot13', 'utf-16'))} -*-\n{text}".encode())
    return _file(rng, text.encode(rng.choice(("utf-16", "utf-32-be", "utf-8-sig", "cp500"))))


# ---- a grammar ----


def _grown(rng: Random) -> Input:
    """Generate Python that is partly inside the language."""
    lines = [_statement(rng, 0) for _ in range(rng.randint(1, 8))]
    text = (MODEL if rng.random() < 0.5 else "") + "\n".join(lines) + "\n"
    return _file(rng, text.encode("utf-8", "surrogatepass"))


def _statement(rng: Random, depth: int) -> str:
    pad, name = "    " * depth, rng.choice((*SECTIONS, "x", "y", "BATCH"))
    if depth > 3 or rng.random() < 0.75:
        return pad + _filled(rng.choice(_SIMPLE), rng, 0, name)
    head = _filled(rng.choice(_HEADS), rng, 0, name)
    return pad + head + "\n" + "\n".join(_statement(rng, depth + 1) for _ in range(rng.randint(1, 2)))


@cache
def words_of_keys() -> tuple[str, ...]:
    """Return names that may be keys."""
    return tuple(word for word in words() if word.isidentifier())


def _keywords(rng: Random, depth: int) -> str:
    return ", ".join(
        f"{rng.choice(words_of_keys())}={_expression(rng, depth + 1)}" for _ in range(rng.choice((0, 1, 2, 4)))
    )


def _expression(rng: Random, depth: int) -> str:
    if depth > 4 or rng.random() < 0.3:
        return rng.choice((rng.choice(words()), rng.choice(_NUMBERS), rng.choice(SECTIONS), str(rng.randrange(20))))
    return _filled(rng.choice(_COMPOUND), rng, depth + 1)


def _filled(form: str, rng: Random, depth: int, name: str = "") -> str:
    """Fill each <place> of a form. Unneeded parts are never made."""
    return re.sub(
        "<([a-z]+)>", lambda place: name or "x" if place[1] == "name" else _PLACES[place[1]](rng, depth), form
    )


_SIMPLE = (
    "<name> = <value>", "<name> = dict(<keywords>)", "<name>.<word> = <value>", "<name>[<index>] = <value>",
    "<name> += <value>", "<name>, y = <value>", "del <name>", "assert <value>", "from .<file> import <name>",
    "import <name>", "<name>: int = <value>", "<name> = <name> = <value>", "<value>",
    "from <package> import <name> as y", "pass",
)  # fmt: skip
_HEADS = (
    "if <value>:", "for x in <value>:", "while x:", "def f(x):", "class A:", "try:", "with <value>:", "else:",
)  # fmt: skip
_COMPOUND = (
    "(<value> <operator> <value>)", "[<value>, <value>]", "(<value>,)", "{<value>: <value>}", "{<value>, <value>}",
    "dict(<keywords>)", "<value>.<word>", "<value>[<value>]", "<value>[<value>:<value>]", "<call>(<value>, <value>)",
    "<call>(<value>)", "[x for x in <value> if <value>]", "{x: <value> for x in <value>}",
    "(<value> if <value> else x)", "-<value>", "not <value>", "f'{x}{y!r:><width>}'", "'%<letter>' % <value>",
    "<value>.<method>(<value>)", "L(<value>)(<keywords>)", "*<value>", "lambda: <value>",
)  # fmt: skip
_OPERATORS = ("+", "-", "*", "/", "//", "%", "**", "<<", "|", "&", "and", "or", "==", "<", "in", "is", "not in", "@")
_BUILTINS = """
dict list tuple set len min max sum range sorted reversed enumerate zip int float str bool abs round divmod any all
isinstance open eval exec print type vars math.sqrt math.comb os.path.join get_config DictConfig x
"""
_CALLS = tuple(_BUILTINS.split())
_OF_VALUES = "append extend update get pop items keys join split format replace sort index upper zfill __class__"
_METHODS = tuple(_OF_VALUES.split())

_PLACES: Mapping[str, Callable[[Random, int], str]] = {
    "value": _expression,
    "index": lambda rng, depth: _expression(rng, depth + 2),
    "keywords": _keywords,
    "word": lambda rng, _: rng.choice(words_of_keys()),
    "operator": lambda rng, _: rng.choice(_OPERATORS),
    "call": lambda rng, _: rng.choice(_CALLS),
    "method": lambda rng, _: rng.choice(_METHODS),
    "letter": lambda rng, _: rng.choice("sdrxf"),
    "width": lambda rng, _: rng.choice(("3", "99999999")),
    "file": lambda rng, _: rng.choice(("common", "x", "")),
    "package": lambda rng, _: rng.choice(("torch", "dslpar", "os.path")),
}


# ---- YAML and JSON ----


def _yaml(rng: Random) -> Input:
    """Generate changed sections as YAML or JSON."""
    data = {rng.choice((*SECTIONS, "resolved", "x")): _value(rng, 0) for _ in range(rng.randint(0, 6))}
    text = json.dumps(data, indent=rng.choice((None, 1, 4)), allow_nan=True)
    for _ in range(rng.choice((0, 1, 3))):
        at = rng.randrange(len(text) + 1)
        odd = (
            "&a ",
            "*a",
            "!!python/object:os.system ",
            "<<: ",
            "\n- ",
            "\n---\n",
            "{",
            "]",
            '"',
            "'",
            "\t",
            ": ",
            "#",
            "|\n",
            "? ",
            "1_0",
            "0o7",
            ".inf",
            "2001-01-01",
            "~",
        )
        text = text[:at] + rng.choice(odd) + text[at + rng.choice((0, 0, 1, 5)) :]
    name = f"cfg.{rng.choice(('yaml', 'yml', 'json'))}"
    return Input(0, "", name, text.encode(), *_around(rng))


def _value(rng: Random, depth: int) -> Any:
    if depth > 3 or rng.random() < 0.4:
        return rng.choice((0, 1, 2, 8, -1, 1e400, 2**70, 0.5, "", "x", "1d", "GPT", None, True, "10**9", "1e-4"))
    if rng.random() < 0.3:
        return [_value(rng, depth + 1) for _ in range(rng.randint(0, 4))]
    return {rng.choice(words_of_keys()): _value(rng, depth + 1) for _ in range(rng.randint(0, 5))}


# ---- sizes ----


def _large(rng: Random) -> Input:
    """Generate deep, long or numerous structures."""
    n = rng.choice((30, 200, 3000))
    one = rng.choice(
        (
            "x = " + "[" * n, "x = " + "[" * n + "]" * n, "x = " + "-" * n + "1", "x = " + "1+" * n + "1",
            "x = a" + ".b" * n, "x = a" + "()" * n, f"x = '{'y' * n * 10}'", f"x = {'9' * n}", f"x = 0x{'f' * n}",
            "model = dict(" + "a=dict(" * n + ")" * n + ")", "x = 1\n" * n, "x = 1;" * n, f"{'a' * n} = 1",
            "deepspeed = dict(" + ", ".join(f"k{i}={i}" for i in range(n)) + ")",
            "zero = dict(" + ", ".join(f"k{i}={i}" for i in range(n)) + ")", "# " + "é" * n * 10,
            "parallel = dict(pipeline=dict(size=2, stage_ids=[" + "0, " * n + "]))",
            "model = dict(type='Sequential', layers_cfg=[" + "dict(type='Linear'), " * n + "])",
            "gradient_handler = [" + "dict(type='a.B'), " * n + "]", "if 1:\n" * 1 + " " * n + "x = 1",
            "train = dict(seed=" + "1 if a else " * n + "1)", f"x = f'{'{y}' * n}'",
            f"parallel = dict(order={['pipe'] * n})",
        )
    )  # fmt: skip
    return _file(rng, (MODEL + one + "\n").encode())


# ---- around a file ----


def _overridden(rng: Random) -> Input:
    """Generate a whole config, with command lines of all kinds."""
    return _file(rng, _base(rng).encode())._replace(
        overrides=tuple(_override(rng) for _ in range(rng.randint(1, 4))), world=rng.choice((None, 1, 8, 10**9))
    )


def _override(rng: Random) -> str:
    path = ".".join(rng.choice((*SECTIONS, *words_of_keys())) for _ in range(rng.randint(1, 4)))
    path += rng.choice(("", "", "", "[0]", ".0", "[-1]", "[", "[x]", ".", "[9999999999999]", " "))
    value = rng.choice((_expression(rng, 3), rng.choice(words()), rng.choice(_ODD), ""))
    return rng.choice(
        (f"{path}={value}", f"{path}={value}", f"~{path}", path, f"={value}", f"{path}=={value}", "~", "=")
    )


def _hosts(rng: Random) -> Input:
    """Generate a hostfile."""
    lines = [
        rng.choice(("a", "b", "node1", "localhost", "", "é", "#", "10.0.0.1", "x" * 999))
        + rng.choice((" ", "  ", "\t", "", "\x0c", "\u3000"))
        + rng.choice(("slots=", "slots =", "slot=", "SLOTS=", "slots=-", ""))
        + rng.choice(("1", "4", "8", "0", "99999999999", "9" * 5000, "٣", "", "4 # x", "4 4", "1e3"))
        for _ in range(rng.randint(0, 6))
    ]
    text = rng.choice(("\n", "\n", "\r\n", "\r", "\u2028")).join(lines) + rng.choice(("", "\n", "\ufeff", "\x00"))
    return _file(rng, _base(rng).encode())._replace(hostfile=text, world=rng.choice((None, None, 1, 8)))


def _around(rng: Random) -> tuple[tuple[str, ...], str | None, int | None]:
    overrides = (_override(rng),) if rng.random() < 0.1 else ()
    return overrides, None, rng.choice((8, 8, 8, 1, 2, 7, 64, None, 2**31))


def _file(rng: Random, data: bytes) -> Input:
    return Input(0, "", "cfg.py" if rng.random() < 0.97 else "cfg.yaml", data, *_around(rng))


_KINDS: dict[str, tuple[Callable[[Random], Input], float]] = {
    "bytes": (_bytes, 20),
    "tokens": (_tokens, 25),
    "numbers": (_numbers, 15),
    "lines": (_spliced, 5),
    "encodings": (_encoded, 1),
    "grammar": (_grown, 15),
    "YAML": (_yaml, 8),
    "large": (_large, 1),
    "overrides": (_overridden, 6),
    "hostfiles": (_hosts, 4),
}
KINDS: Sequence[str] = tuple(_KINDS)
