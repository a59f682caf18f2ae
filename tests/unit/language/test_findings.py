"""Every message of the language, with code and location; mistakes neither hide nor multiply each other."""

from __future__ import annotations

import re

import pytest

from dslpar.language import errors
from dslpar.language.load import load_text

# The location is marked in the text: <<here>>.
CASES = {
    "unclosed": ("CFG001", "x = <<(>>1, 2", "never closed"),
    "break outside": ("CFG001", "<<break>>", "outside of a loop"),
    "continue outside": ("CFG001", "if True:\n    <<continue>>", "outside of a loop"),
    "two stars": ("CFG001", "<<*a, *b>> = [1]", "two starred"),
    "while": ("CFG002", "<<while True: pass>>", "`while`"),
    "def": ("CFG002", "<<def f(): pass>>", "`def`"),
    "async def": ("CFG002", "<<async def f(): pass>>", "`async def`"),
    "class": ("CFG002", "<<class A: pass>>", "`class`"),
    "with": ("CFG002", "<<with a: pass>>", "`with`"),
    "raise": ("CFG002", "<<raise ValueError>>", "`raise`"),
    "match": ("CFG002", "<<match 1:\n    case 1: pass>>", "`match`"),
    "try": ("CFG002", "<<try: pass\nfinally: pass>>", "`try`"),
    "global": ("CFG002", "<<global x>>", "`global`"),
    "return": ("CFG002", "<<return 1>>", "`return`"),
    "lambda": ("CFG002", "x = dict(f=<<lambda: 1>>)", "`lambda`"),
    "walrus": ("CFG002", "x = (<<y := 1>>)", "`:=`"),
    "yield": ("CFG002", "x = (<<yield 1>>)", "`yield`"),
    "await": ("CFG002", "x = <<await y>>", "`await`"),
    "async for": ("CFG002", "x = <<[v async for v in y]>>", "`async for`"),
    "bytes": ("CFG002", "x = <<b'a'>>", "bytes"),
    "complex": ("CFG002", "x = <<1j>>", "complex"),
    "ellipsis": ("CFG002", "x = <<...>>", "`...`"),
    "in a dead branch": ("CFG002", "if False:\n    <<while True: pass>>", "`while`"),
    "starred value": ("CFG002", "x = <<*y>>", "no value"),
    "starred target": ("CFG002", "<<*a>> = [1]", "cannot assign to this"),
    "builtin": ("CFG003", "x = <<open>>('a')", "'open'"),
    "a call of a reference": ("CFG003", "from a import b\nx = <<b(1)>>", "a.b()"),
    "environment": ("CFG003", "import os\nx = <<os.environ['A']>>", "cannot index os.environ"),
    "getenv": ("CFG003", "import os\nx = <<os.getenv('A')>>", "os.getenv()"),
    "no such method": ("CFG003", "x = <<'a'.encode()>>", "str.encode()"),
    "no such method of dict": ("CFG003", "x = {}\n<<x.fooo>>()", "dict.fooo()"),
    "method of int": ("CFG003", "x = <<(1).bit_length()>>", "int.bit_length()"),
    "method not called": ("CFG003", "x = dict()\ny = <<x.items>>", "not called"),
    "text method not called": ("CFG003", "y = <<'a'.upper>>", "not called"),
    "format with attribute": ("CFG003", "x = <<'{0.real}'.format(1)>>", "attribute"),
    "percent with star": ("CFG003", "x = <<'%*d' % (1, 2)>>", "`*` as a width"),
    "positional lazy": ("CFG003", "from dslpar import L\nx = <<L('a.b')(1)>>", "keyword arguments"),
    "unknown math": ("CFG003", "import math\nx = <<math.sqroot(2)>>", "math.sqroot()"),
    "division": ("CFG004", "x = 1 + (<<2 / 0>>)", "ZeroDivisionError"),
    "key": ("CFG004", "x = dict(pipeline=1)\ny = x[<<'pipline'>>]", "did you mean 'pipeline'"),
    "attribute key": ("CFG004", "x = dict(pipeline=1)\ny = x.<<pipline>>", "did you mean 'pipeline'"),
    "index": ("CFG004", "x = [1]\ny = <<x[3]>>", "IndexError"),
    "types": ("CFG004", "x = <<1 + 'a'>>", "TypeError: unsupported operand"),
    "types of ours": ("CFG004", "x = <<1 + [1]>>", "'int' and 'list'"),
    "assert": ("CFG004", "n = 3\nassert <<n % 2 == 0>>, f'{n} is odd'", "AssertionError: 3 is odd"),
    "attribute of int": ("CFG004", "x = 1\ny = <<x.real>>", "no attribute 'real'"),
    "dunder": ("CFG004", "x = <<().__class__>>", "'__class__'"),
    "dunder of reference": ("CFG004", "from a import b\nx = <<b.__class__>>", "'__class__'"),
    "attribute assigned to list": ("CFG004", "x = []\n<<x.a>> = 1", "cannot set attribute 'a' of a list"),
    "attribute assigned to reference": ("CFG004", "from configs.t import train\n<<train.steps>> = 1", "is a reference"),
    "item assigned to tuple": ("CFG004", "x = (1,)\n<<x[0]>> = 2", "item assignment"),
    "item deleted from text": ("CFG004", "x = 'a'\ndel <<x[0]>>", "item deletion"),
    "unpack": ("CFG004", "<<a, b>> = [1, 2, 3]", "expected 2 values"),
    "unpack star": ("CFG004", "<<a, b, *c>> = [1]", "expected at least 2 values"),
    "iterate": ("CFG004", "<<for x in 5: pass>>", "not iterable"),
    "call of a value": ("CFG004", "x = 5\ny = <<x()>>", "not callable"),
    "spread of a list": ("CFG004", "x = <<dict(**[1])>>", "must be a mapping"),
    "keyword twice": ("CFG004", "x = dict(a=1)\ny = <<dict(a=2, **x)>>", "multiple values"),
    "arguments": ("CFG004", "x = <<[].append()>>", "expected 1 arguments"),
    "keyword for a method": ("CFG004", "x = {}\n<<x.get(key=1)>>", "unexpected keyword"),
    "isinstance": ("CFG004", "x = <<isinstance(1, 5)>>", "the language's types"),
    "lazy of a number": ("CFG004", "from dslpar import L\nx = <<L(5)>>(a=1)", "needs a class"),
    "set order": ("CFG004", "x = <<list({'a', 'b'})>>", "order of this set"),
    "complex result": ("CFG004", "x = <<(-1) ** 0.5>>", "complex number"),
    "surrogate": ("CFG004", r"x = <<'\ud800'>>", "not text"),
    "text of an iterator": ("CFG004", "x = zip()\ny = <<str(x)>>\ndel x", "cannot format a zip"),
    "conversion": ("CFG004", "x = <<'%d' % 'a'>>", "TypeError"),
    "changed while read": ("CFG004", "x = dict(a=1)\n<<for k in x:\n    x[k + 'b'] = 1>>", "changed size"),
    "delete a missing key": ("CFG004", "x = {}\ndel <<x['a']>>", "'a'"),
    "power": ("CFG005", "x = <<10 ** 10 ** 10>>", "bits"),
    "repeat": ("CFG005", "x = <<'x' * 10 ** 9>>", "characters"),
    "repeat list": ("CFG005", "x = <<[0] * 10 ** 9>>", "items"),
    "range": ("CFG005", "x = <<list(range(10 ** 9))>>", "items"),
    "width": ("CFG005", "x = <<f'{1:>100000}'>>", "width"),
    "contains itself": ("CFG005", "x = <<[]>>\nx.append(x)", "contains itself"),
    "steps": ("CFG005", "for i in range(10 ** 9):\n    <<j = i>>", "steps"),
    "round": ("CFG005", "x = <<round(1, -10 ** 9)>>", "round()"),
    "big key": ("CFG005", "x = <<{2 ** 70: 1}>>", "as a key"),
    "no file": ("CFG006", "from <<.nothing>> import x", "no such file"),
    "no config": (
        "CFG006",
        "from dslpar import get_config\nx = <<get_config('nothing.py')>>",
        "cannot find 'nothing.py'",
    ),
    "itself": ("CFG007", "<<from .cfg import x>>", "circular import"),
    "star": ("CFG008", "<<from .base import *>>", "import *"),
    "star of a package": ("CFG008", "<<from math import *>>", "import *"),
    "outside": ("CFG009", "from dslpar import get_config\nx = <<get_config('../x.py')>>", "may read"),
    "not python": ("CFG009", "from dslpar import get_config\nx = <<get_config('x.txt')>>", "not a Python"),
    "undefined": ("CFG010", "size = 4\nx = <<siez>> * 2", "did you mean 'size'"),
    "undefined in a method": ("CFG010", "x = <<y>>.get('a')", "'y'"),
    "__file__": ("CFG010", "x = <<__file__>>", "'__file__'"),
    "deleted": ("CFG010", "x = 1\ndel x\ny = <<x>>", "'x'"),
    "delete undefined": ("CFG010", "del <<x>>", "'x'"),
    "augment undefined": ("CFG010", "<<x += 1>>", "'x'"),
    "twice": ("CFG012", "x = {'a': 1, <<'a'>>: 2}", "twice"),
    "replaced": ("CFG120", "t = dict(a=dict(b=1, c=2))\nt.update(a=<<dict(b=3)>>)", "drops its c"),
    "lazy not called": ("CFG013", "from dslpar import L\nx = <<L('a.B')>>", "L(B)" and "not called"),
    "iterator": ("CFG013", "x = <<zip([1], [2])>>", "not a value"),
    "generator": ("CFG013", "x = dict(a=<<(v for v in [])>>)", "not a value"),
    "a range": ("CFG013", "x = <<range(3)>>", "not a value"),
    "a key": ("CFG013", "x = {<<(1, 2)>>: 3}", "key"),
    "a set without order": ("CFG013", "x = <<{1, 'a'}>>", "no order"),
}


def unmarked(text: str) -> tuple[str, tuple[int, int, int, int]]:
    """Return the text without its marks, and the location between them."""
    start, end = text.index("<<"), text.index(">>") - 2
    plain = text.replace("<<", "").replace(">>", "", 1)

    def line_and_column(at: int) -> tuple[int, int]:
        return plain.count("\n", 0, at) + 1, at - (plain.rfind("\n", 0, at) + 1) + 1

    return plain, (*line_and_column(start), *line_and_column(end))


@pytest.mark.parametrize("case", CASES)
def test_message(case: str) -> None:
    code, marked, words = CASES[case]
    text, location = unmarked(marked)
    config = load_text(text, "cfg.py")
    assert [item.code for item in config.findings] == [code], config.findings
    (item,) = config.findings
    assert words in f"{item.message}; {item.help}"
    assert item.location[1:] == location
    assert item.help
    assert item.name == errors.CODES[code].name


def test_every_code_is_shown() -> None:
    elsewhere = {"CFG011", "CFG122"}  # overrides: test_overrides.py; calls: test_lazy.py
    assert {code for code, _, _ in CASES.values()} | elsewhere == set(errors.CODES)


def test_names_are_kebab_case_and_help_is_there() -> None:
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", row.name) and row.hint for row in errors.CODES.values())


def test_all_at_once() -> None:
    text = "a = open('x')\nb = dict(c=1 / 0, d=[2, undefined], e=5)\nwhile True: pass\nf = b.nothing\ng = b.e\n"
    config = load_text(text, "cfg.py")
    assert [(item.code, item.location.line) for item in config.findings] == [
        ("CFG003", 1),
        ("CFG004", 2),
        ("CFG010", 2),
        ("CFG002", 3),
        ("CFG004", 4),
    ]
    assert config.root.plain() == {"b": {"e": 5}, "g": 5}
    assert {"a", "b.c", "b.d", "f"} <= config.unknown
    assert config.complete


# Each has one mistake, on its first line; dependent values add no finding.
SILENT = {
    "operators": "x = 1 / 0\ny = x + 1\nz = [x] + [y]\nw = not x or -x\nv = x < 1 < y",
    "containers": "x = [1 / 0, 2]\ny = sum(x) + len(x)\nz = sorted(x)\nw = x == [1]\nv = 5 in x",
    "text": "x = 1 / 0\ny = f'{x:>4}' + str(x)\nz = '%s' % x\nw = ','.join([x])\nv = '{}'.format(x)",
    "calls": "x = 1 / 0\ny = max(x, 1)\nz = dict(x)\nw = list(range(x))\nv = x.get('a')\nu = x()\nt = x.a.b[0]",
    "keywords": "x = 1 / 0\ny = dict(**x)\nz = max(*x)\nw = [*x]\nv = {**x}\nu = v.a",
    "keys": "x = 1 / 0\ny = {x: 1}\nz = y[x]\nw = y['a']\nv = {x}\nu = [1][x]",
    "branches": "x = 1 / 0\nif x:\n    y = 1\nelse:\n    z = 2\nw = y + z",
    "branches that change": "x = dict(a=1 / 0)\nz = dict(b=1)\nif x.a:\n    z.c = 1\ny = z.c",
    "branches that append": "x = 1 / 0\ny = []\nif x:\n    y.append(1)\nz = y[0]",
    "loops": "x = 1 / 0\nfor a in x:\n    b = a\nc = a + b\nd = [v for v in x]\ne = d[0]",
    "unpacking": "x = 1 / 0\na, (b, *c) = x\nd = a + b\ne = c[0]",
    "a failed assert": "x = 1 / 0\nassert x > 1, f'{x}'",
    "a failed statement": "x, y = 1 / 0, [1, 2]\ny[0] += x\nz = y[0]\ndel y[x]\nw = y[1]",
    "updates": "x = 1 / 0\ny = dict(a=1)\ny.update(x)\nz = y.b\nw = []\nw.extend(x)\nv = w[0]",
    "names": "x = undefined\ny = x.a\ny.b = 4\nz = y.b",
    "functions": "def f(): pass\nx = f(1)\ny = x + 1",
    "with": "with open('a') as f: x = f.read()\ny = x + 1",
    "try": "try: import a\nexcept: a = None\nb = a.x",
    "lazy": "from a import b; x = b()\nfrom dslpar import L\ny = L(x)(a=1)\nz = y.a",
    "imports": "from .nothing import x\ny = x.a\nx.b = 5\nfor v in x.c: w = v",
    "arguments": "from dslpar import L; x = 1 / 0\ny = L('a.B')(a=x, b=2)\nz = y.a + 1",
    "walrus": "x = (n := 3)\ny = n + 1",
}


@pytest.mark.parametrize("case", SILENT)
def test_one_mistake_is_one_finding(case: str) -> None:
    config = load_text(SILENT[case], "cfg.py")
    assert [item.location.line for item in config.findings] == [1], config.findings


def test_what_is_known_stays_known() -> None:
    config = load_text("from dslpar import L\nx = L('a.B')(a=1 / 0, b=dict(c=[1, 1 / 0], d=5))", "cfg.py")
    assert config.root.get("x.b").plain() == {"d": 5}  # type: ignore[union-attr]
    assert config.unknown == {"x.a", "x.b.c", "x.b.c.1"}
    assert str(config.root.get("x").target) == "a.B"  # type: ignore[union-attr]


def test_at_most_a_hundred() -> None:
    config = load_text("\n".join(f"x{i} = y{i}" for i in range(300)), "cfg.py")
    assert len(config.findings) == 101
    assert not config.complete
    assert "rest is not listed" in "".join(item.message for item in config.findings)


def test_no_warnings_are_printed_about_the_file(recwarn) -> None:
    load_text("x = '\\d'\ny = 1 is 1\nz = 1if 1else 2", "cfg.py")
    assert not recwarn.list
