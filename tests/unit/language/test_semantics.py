"""Random programs inside the subset: the evaluator's values and types equal those of CPython's `exec`.

If Python raises, the evaluator has a finding at the line that raised.
"""

from __future__ import annotations

import traceback
import warnings

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dslpar.language.load import load_text

PRELUDE = """\
import math
i, j, k = 3, -7, 0
f, g = 2.5, -0.0
s, t, u = 'hello', 'a b c', ''
a, b, c = [1, 2, 3], ['x', 'y'], [[1], [2, 3]]
d, e = {'p': 1, 'q': [1, 2]}, dict(x='y', n=None)
p, q = (1, 'two', 3.0), ()
o = True
same = a
"""
INT_NAMES, TEXT_NAMES, LIST_NAMES, DICT_NAMES = ("i", "j", "k"), ("s", "t", "u"), ("a", "b", "c", "same"), ("d", "e")
ANY_NAMES = (*INT_NAMES, "f", "g", *TEXT_NAMES, *LIST_NAMES, *DICT_NAMES, "p", "q", "o")


def options(*strategies):
    return st.one_of(*[st.just(item) if isinstance(item, str) else item for item in strategies])


def form(template, *parts):
    """Fill a template with drawn parts."""
    return st.tuples(*parts).map(lambda drawn: template.format(*drawn))


NUMBERS = st.sampled_from(["0", "1", "2", "-3", "10", "True", "0.5", "1e3", "7"])
TEXTS = st.sampled_from(["''", "'ab'", "'a,b,,c'", "' x '", "'Ünï'", "'%s-%d'", "'{}:{}'", "'3'", "'aXbX'"])
INDEX = st.sampled_from(["0", "1", "-1", "2", "5", "-4", "i", "k"])
SLICE = st.sampled_from([":", "1:", ":2", "::-1", "::2", "-2:", "1:-1", "5:1:-2", "0:0", "k:i"])
ATOMS = options(NUMBERS, TEXTS, st.sampled_from(ANY_NAMES), st.sampled_from(["None", "[]", "()", "{}", "math.pi"]))
BINARY = st.sampled_from(["+", "-", "*", "/", "//", "%", "&", "|", "^", "<<", ">>"])
COMPARE = st.sampled_from(["==", "!=", "<", "<=", ">", ">=", "in", "not in"])
TEXT_METHODS = st.sampled_from(
    [
        "upper()",
        "lower()",
        "title()",
        "split()",
        "split(',')",
        "strip()",
        "strip('x')",
        "replace('a','bc')",
        "find('b')",
        "count('a')",
        "zfill(6)",
        "center(9,'*')",
        "ljust(5)",
        "rjust(7,'-')",
        "startswith('a')",
        "endswith(('c','o'))",
        "partition('b')",
        "rpartition(',')",
        "isdigit()",
        "splitlines()",
        "swapcase()",
        "casefold()",
        "capitalize()",
        "index('l')",
        "rsplit(None,1)",
        "removeprefix('h')",
        "isalpha()",
        "join('xyz')",
        "expandtabs(3)",
        "format(1,2)",
        "removesuffix('o')",
        "rfind('l')",
        "istitle()",
        "join(['1','2'])",
        "translate({97:'Z'})",
    ]
)
METHODS = st.sampled_from(
    ["copy()", "count(1)", "index(2)", "get('p')", "get('zz',4)", "get('q',[])", "pop()", "pop(0)"]
)
FUNCTIONS = st.sampled_from(
    [
        "len",
        "list",
        "tuple",
        "sorted",
        "sum",
        "min",
        "max",
        "bool",
        "str",
        "int",
        "float",
        "abs",
        "set",
        "any",
        "all",
        "dict",
        "round",
        "math.floor",
        "math.sqrt",
        "math.gcd",
        "math.isnan",
        "math.ceil",
    ]
)
SPECS = st.sampled_from(
    ["", ":>8", ":<5", ":^7", ":03", ":.2f", ":,", ":x", ":b", ":e", "!r", "!s:>6", "!a", ":+", ":{i}"]
)


def grow(inner):
    """Build expressions from smaller ones."""
    return options(
        form("({} {} {})", inner, BINARY, inner),
        form("({} {} {})", inner, COMPARE, inner),
        form("({} < {} <= {})", inner, inner, inner),
        form("({} {} {})", inner, st.sampled_from(["and", "or"]), inner),
        form("({} if {} else {})", inner, inner, inner),
        form("({} {})", st.sampled_from(["-", "not", "+", "~"]), inner),
        form("({} ** {})", inner, st.sampled_from(["0", "1", "2", "3", "-1", "0.5"])),
        form("[{}, {}]", inner, inner),
        form("[*{}, {}]", inner, inner),
        form("({}, {})", inner, inner),
        form("{{'k': {}, 'l': {}}}", inner, inner),
        form("{{**{}, 'm': {}}}", st.sampled_from(["d", "e", "{}", "a"]), inner),
        form("dict(v={}, w={})", inner, inner),
        form("dict({}, z={})", st.sampled_from(["d", "e", "[('r', 1)]"]), inner),
        form("({})[{}]", inner, INDEX),
        form("({})[{}]", inner, SLICE),
        form("({})['{}']", inner, st.sampled_from("pqxn")),
        form("({}).{}", inner, TEXT_METHODS),
        form("({}).{}", inner, METHODS),
        form("list(({}).{}())", inner, st.sampled_from(["keys", "values", "items"])),
        form("{}({})", FUNCTIONS, inner),
        form("max({}, {})", inner, inner),
        form("divmod({}, {})", inner, inner),
        form("round({}, {})", inner, NUMBERS),
        form("list(zip({}, {}))", inner, inner),
        form("list(enumerate({}, {}))", inner, NUMBERS),
        form("list(reversed({}))", inner),
        form("list(range({}))", NUMBERS),
        form("sorted({}, key={}, reverse={})", inner, st.sampled_from(["str", "len", "abs", "None"]), inner),
        form("isinstance({}, {})", inner, st.sampled_from(["int", "(str, list)", "dict", "bool", "tuple"])),
        form("[{} for v in {}]", inner.map(lambda text: text.replace("i", "v", 1) if text == "i" else text), inner),
        form("[v for v in {} if {}]", inner, inner),
        form("[(v, w) for v in {} for w in {} if v != w]", inner, inner),
        form("{{v: {} for v in {}}}", inner, inner),
        form("sum(v for v in {})", inner),
        form("any(v == {} for v in {})", inner, inner),
        form("tuple(v for v in {})", inner),
        form("len({{v for v in {}}})", inner),
        form("f'<{{{}{}}}>'", inner.filter(lambda text: not set("'\\{}") & set(text)), SPECS),
        form("'%s|%5s' % ({}, {})", inner, inner),
        form("'{{0}}-{{1!r:>4}}'.format({}, {})", inner, inner),
        form("', '.join({})", inner),
    )


EXPRESSIONS = st.recursive(ATOMS, grow, max_leaves=6)
NAMES = st.sampled_from(ANY_NAMES)


def indented(block):
    return "\n".join("    " + line for line in block.split("\n"))


SIMPLE = options(
    form("{} = {}", NAMES, EXPRESSIONS),
    form("r{} = {}", st.sampled_from("012"), EXPRESSIONS),
    form("{} {}= {}", NAMES, BINARY, EXPRESSIONS),
    form("{}[{}] = {}", st.sampled_from(LIST_NAMES), INDEX, EXPRESSIONS),
    form("{}[{}] = {}", st.sampled_from(LIST_NAMES), SLICE, EXPRESSIONS),
    form("{}['{}'] = {}", st.sampled_from(DICT_NAMES), st.sampled_from("pqxz"), EXPRESSIONS),
    form("{}['{}'] {}= {}", st.sampled_from(DICT_NAMES), st.sampled_from("pq"), BINARY, EXPRESSIONS),
    form("{}[{}] += {}", st.sampled_from(LIST_NAMES), INDEX, EXPRESSIONS),
    form("r0, *r1 = {}", EXPRESSIONS),
    form("(r0, [r1, r2]), *r3 = {}", EXPRESSIONS),
    form("*r0, r1 = r2 = {}", EXPRESSIONS),
    form("{}.append({})", st.sampled_from(LIST_NAMES), EXPRESSIONS),
    form("{}.extend({})", st.sampled_from(LIST_NAMES), EXPRESSIONS),
    form("{}.insert({}, {})", st.sampled_from(LIST_NAMES), INDEX, EXPRESSIONS),
    form("{}.remove({})", st.sampled_from(LIST_NAMES), EXPRESSIONS),
    form("{}.sort(reverse={})", st.sampled_from(LIST_NAMES), st.sampled_from(["True", "False"])),
    form("{}.reverse()", st.sampled_from(LIST_NAMES)),
    form("r0 = {}.pop({})", st.sampled_from(LIST_NAMES), INDEX),
    form("{}.update({})", st.sampled_from(DICT_NAMES), EXPRESSIONS),
    form("{}.update(m={})", st.sampled_from(DICT_NAMES), EXPRESSIONS),
    form("r1 = {}.setdefault('n', {})", st.sampled_from(DICT_NAMES), EXPRESSIONS),
    form("r2 = {}.pop('p', {})", st.sampled_from(DICT_NAMES), EXPRESSIONS),
    form("del {}[{}]", st.sampled_from(LIST_NAMES), options(INDEX, SLICE)),
    form("del {}['{}']", st.sampled_from(DICT_NAMES), st.sampled_from("pqx")),
    form("del {}", NAMES),
    form("assert {}, 'no'", EXPRESSIONS),
)


def compound(inner):
    block = st.lists(inner, min_size=1, max_size=2).map("\n".join).map(indented)
    return options(
        form("if {}:\n{}\nelse:\n{}", EXPRESSIONS, block, block),
        form("if {}:\n{}\nelif {}:\n{}", EXPRESSIONS, block, EXPRESSIONS, block),
        form("for v in {}:\n{}", EXPRESSIONS, block),
        form("for v, w in {}:\n{}\nelse:\n{}", EXPRESSIONS, block, block),
        form("for v in list({}):\n    if {}:\n        break\n{}\nelse:\n{}", EXPRESSIONS, EXPRESSIONS, block, block),
        form("for v in range(4):\n    if v % 2:\n        continue\n{}", block),
    )


STATEMENTS = st.recursive(SIMPLE, compound, max_leaves=4)
PROGRAMS = st.lists(STATEMENTS, min_size=1, max_size=5).map("\n".join)


def by_python(text):
    """Return the names that `exec` leaves, and the line that raised, if any."""
    names: dict[str, object] = {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile(text, "cfg.py", "exec"), names)
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError, NameError, AssertionError) as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "cfg.py"]
        return names, frames[0].lineno
    except (RuntimeError, MemoryError):
        return names, -1
    return names, None


HIDDEN = ("__builtins__", "__doc__", "__annotations__", "math")


def shown(value):
    """Return a text for comparing values: types, order and the sign of zero count, and sets are sorted lists."""
    if isinstance(value, set):
        try:
            return shown(sorted(value))
        except TypeError:
            return "unsorted"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({', '.join(shown(item) for item in value)})"
    if isinstance(value, dict):
        return f"dict({', '.join(f'{key!r}: {shown(item)}' for key, item in value.items())})"
    return repr(value)


def check(text):
    names, line = by_python(text)
    config = load_text(text, "cfg.py")
    errors = [item for item in config.findings if item.severity == "error"]
    outside = ("the order of this set", "set.", "the result is a complex")  # valid in Python, outside of the language
    if any(item.code in ("CFG005", "CFG013") or item.message.startswith(outside) for item in errors) or line == -1:
        return
    if line is not None:
        assert any(item.location.line <= line <= item.location.end_line for item in errors), (line, errors)
        return
    assert not errors, errors
    mine = config.root.plain()
    for name, value in names.items():
        if name not in HIDDEN:
            assert shown(mine[name]) == shown(value), name


@pytest.mark.prove
@settings(max_examples=400, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(PROGRAMS)
def test_programs_mean_what_they_mean_in_python(program):
    check(PRELUDE + program)


@settings(max_examples=80, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(PROGRAMS)
def test_some_programs_mean_what_they_mean_in_python(program):
    check(PRELUDE + program)


@settings(max_examples=500, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(EXPRESSIONS, min_size=1, max_size=3))
def test_expressions_mean_what_they_mean_in_python(expressions):
    check(PRELUDE + "\n".join(f"r{index} = {text}" for index, text in enumerate(expressions)))


PROGRAMS_BY_HAND = {
    "aliases": "x = []\ny = x\nx += [1]\ny.append(2)\nz = x is y",
    "rebinding is no alias": "x = []\ny = x\nx = x + [1]",
    "tuples are copied by +=": "x = (1,)\ny = x\nx += (2,)",
    "shared rows": "x = [[0] * 2] * 3\nx[0][1] = 5",
    "default sharing": "x = dict.fromkeys('ab', [])\nx['a'].append(1)",
    "comprehension scope": "v = 5\nx = [v for v in range(3)]\ny = v",
    "comprehension reads outside": "n = 2\nx = [[n * v + w for w in range(n)] for v in range(n)]",
    "first iterable is outside": "x = [1, 2]\ny = [x for x in x]",
    "a generator is lazy": "x = any(1 / v for v in [1, 0])",
    "a generator is used once": "x = (v for v in [1, 2])\ny = list(x)\nz = list(x)\ndel x",
    "a zip is used once": "x = zip([1], [2])\ny = list(x)\nz = list(x)\ndel x",
    "a late generator": "n = 1\nx = (n for v in range(2))\nn = 2\ny = list(x)\ndel x",
    "views are live": "x = dict(a=1)\ny = x.keys()\nx['b'] = 2\nz = list(y)\ndel y",
    "view algebra": "x = sorted({'a': 1}.keys() | {'b': 2}.keys())\ny = sorted({'a': 1}.keys() & ['a'])",
    "short circuit": "x = 0 and 1 / 0\ny = 1 or 1 / 0\nz = 3 < 2 < 1 / 0",
    "chained": "x = 1 < 2 < 3 != 4 > 0",
    "conditional": "x = 1 if [] else 2 if () else 3",
    "floor of negatives": "x = -7 // 2\ny = -7 % 3\nz = 7 % -3\nw = divmod(-7, 2)\nv = -7.5 // 2",
    "bools are ints": "x = True + True\ny = {True: 'a', 1: 'b', 1.0: 'c'}\nz = sum([True, True])",
    "mixed numbers": "x = 2 ** -1\ny = 4 ** 0.5\nz = 7 / 2\nw = 2 ** 10\nv = 1 == 1.0",
    "rounding": "x = [round(v) for v in (0.5, 1.5, 2.5)]\ny = round(2.675, 2)\nz = round(1234, -2)",
    "slices": "x = list(range(10))\nx[2:8:2] = 'abc'\ndel x[::3]\ny = x[-3:]\nx[1:1] = [9, 9]",
    "star calls": "x = dict(*[[('a', 1)]], **dict(b=2))\ny = max(*[1, 5], 3)\nz = [*range(2), *'ab']",
    "nested unpacking": "(a, *b), c = [1, 2, 3], 'z'\n[d, [e]] = 1, [2]\nfor x, (y, z) in [(1, (2, 3))]: pass",
    "swap": "a, b = 1, 2\na, b = b, a",
    "targets in order": "i = 0\nx = [0, 0]\ni, x[i] = 1, 2",
    "for else": "x = []\nfor i in range(3):\n    for j in range(3):\n        if j == i: break\n"
    "    else:\n        x.append(i)\nelse:\n    x.append('end')",
    "loop over changing dict": "x = dict(a=1)\nfor key in list(x):\n    x[key + 'b'] = 2",
    "loop over changing list": "x = [1, 2, 3, 4]\nfor v in x:\n    x.remove(v)",
    "loop variable stays": "for i in range(3): pass\nx = i",
    "f-strings": 'w, x = 10, 3.14159\ny = f\'{x:{w}.2f}|{x!r:>12}|{{}}|{w=}|{"a" "b"!s}\'\n'
    "z = f'{[1, \"a\"]} {None} {{1: 2}}'",
    "concatenation": "x = 'a' f'{1}' 'b'",
    "percent": "x = '%05.1f|%-4s|%x|%%|%r' % (2.25, 'a', 255, 'q')\ny = '%(a)s' % dict(a=1)",
    "format": "x = '{:>4}|{0}'.format\n"
    if False
    else "x = '{:>4}|{}|{k}'.format(1, [2], k=3)\ny = '{0[1]}{1[a]}'.format([1, 2], dict(a=3))",
    "sort is stable": "x = sorted(['b', 'a', 'cc', 'aa'], key=len)\n"
    "y = sorted([3, 1, 2], reverse=True)\nx.sort(key=len, reverse=True)",
    "min and max": "x = min('b', 'a')\ny = max([], default=4)\nz = max(['a', 'bbb'], key=len)",
    "dict methods": "x = dict(a=1)\nx |= dict(b=2)\ny = x | {'a': 9}\nz = x.popitem()\nw = list(reversed(x))",
    "sets": "x = {3, 1, 2} & {1, 2}\ny = len({1, 1.0, True})\nz = {1} <= {1, 2}\n"
    "w = sorted({'a', 'b'} - {'a'})\nx |= {7}",
    "set comprehension": "x = sorted({v % 3 for v in range(10)})",
    "negative zero": "x = -0.0\ny = [0.0, -0.0]\nz = 0.0 == -0.0",
    "nan": "x = float('nan')\ny = x == x\nz = [x] == [x]",
    "is": "x = None is None\ny = [] is []\nz = not None",
    "text methods": "x = 'a-b'.split('-')\ny = '-'.join(x)\nz = 'abc'[::-1]\nw = 'a' in 'cab'\nv = 'ab' * 2",
    "strings compare": "x = 'a' < 'b' <= 'b'\ny = ('a', 1) < ('a', 2)\nz = [1, 2] < [1, 2, 0]",
    "docstring": "'''about'''\nx = 1",
    "annotated": "x: int = 1\ny: 'nothing'",
    "pass and semicolons": "x = 1; pass; y = 2",
    "elif": "x = 3\nif x == 1: y = 1\nelif x == 2: y = 2\nelif x == 3: y = 3\nelse: y = 4",
    "math": "import math\nx = math.ceil(7 / 2)\ny = math.log2(8)\nz = math.prod([2, 3])\n"
    "from math import sqrt as r, inf\nw = r(2)\nv = inf\ndel math, r, inf",
    "paths": "import os\nx = os.path.join('a', 'b', '/c', 'd')\nimport os.path as osp\n"
    "y = osp.join('a', '')\ndel os, osp",
    "from os": "from os import path\nfrom os.path import join\nx = path.join('a', join('b', 'c'))\ndel path, join",
    "from math pi": "from math import pi\nx = pi * 2\ndel pi",
    "del slices": "x = [1, 2, 3, 4]\ndel x[1:3]\ny = dict(a=1, b=2)\ndel y['a']",
    "augmented items": "x = dict(a=[1], n=1)\nx['a'] += [2]\nx['n'] *= 5\ny = [1, 2]\ny[0] -= 3",
    "tuple item changes in place": "x = ([1],)\ny = x[0]\ny += [2]",
    "isinstance": "x = [isinstance(v, (int, float)) for v in (1, True, 'a', 2.0)]\ny = isinstance({}, dict)",
    "int and float": "x = int('12') + int('ff', 16) + int(3.9) + int('-4')\ny = float('1e-3')\nz = int(True)",
    "unicode": "größe = 4\nx = 'ä' * größe\ny = f'{x}: {größe}'",
    "splitting": "x = 'a  b'.split()\ny = 'a,b'.partition(',')\nz = 'x\\ny'.splitlines()",
    "keys of all kinds": "x = {1: 'a', None: 'b', 2.5: 'c', False: 'd'}",
    "any and all": "x = all([]) and not any([])\ny = any(v > 2 for v in range(4))",
    "sum": "x = sum([0.1] * 3)\ny = sum([[1], [2]], [])\nz = sum(range(5), 10)",
    "enumerate": "x = [(n, v) for n, v in enumerate('ab', 1)]\ny = list(zip('ab', [1, 2], strict=True))",
}


@pytest.mark.parametrize("case", PROGRAMS_BY_HAND)
def test_by_hand(case):
    text = PROGRAMS_BY_HAND[case]
    names, line = by_python(text)
    assert line is None, "Python itself must accept it"
    config = load_text(text, "cfg.py")
    assert not config.findings, config.findings
    mine = config.root.plain()
    for name, value in names.items():
        if name not in HIDDEN:
            assert shown(mine[name]) == shown(value), name
