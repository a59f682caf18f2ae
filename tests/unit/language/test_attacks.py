"""Hostile config files: each ends in findings within 1 s of CPU and 100 MB, and none of it runs.

Every case is loaded in its own forked child, which reports its CPU time and its peak memory beyond the parent's.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import time

import pytest

from dslpar.language import syntax
from dslpar.language.load import load, load_text
from tests.support.sampling import sampled

MAX_CPU_S = 3.0
"""Half a second on an idle machine; a virtual machine also counts its waits for the host."""
MAX_GROWTH_BYTES = 100 * 2**20
LONG = 60_000

RUNS = {
    "open": "open('CANARY', 'w').write('x')",
    "import os system": "import os\nos.system('touch CANARY')",
    "dunder import": "__import__('os').system('touch CANARY')",
    "exec": "exec(\"open('CANARY', 'w')\")",
    "eval": "x = eval(\"open('CANARY', 'w')\")",
    "compile": "exec(compile('open(\"CANARY\", \"w\")', '', 'exec'))",
    "subprocess": "import subprocess\nsubprocess.run(['touch', 'CANARY'])",
    "pathlib": "from pathlib import Path\nPath('CANARY').touch()",
    "lambda": "f = lambda: open('CANARY', 'w')\nf()",
    "def": "def f():\n    open('CANARY', 'w')\nf()",
    "decorator": "@open\ndef CANARY(): pass",
    "class body": "class A:\n    open('CANARY', 'w')",
    "class walk": "x = ().__class__.__base__.__subclasses__()",
    "class of reference": "from torch import nn\nx = nn.__class__.__mro__",
    "builtins": "x = __builtins__['open']('CANARY', 'w')",
    "globals": "globals()['__builtins__'].open('CANARY', 'w')",
    "getattr": "getattr(os, 'system')('touch CANARY')",
    "format walk": "x = '{0.__class__.__base__}'.format(1)",
    "format index walk": "x = '{0[a].__class__}'.format(dict(a=1))",
    "format_map walk": "x = '{a.__class__}'.format_map(dict(a=1))",
    "metaclass": "class A(metaclass=open): pass",
    "with": "with open('CANARY', 'w') as f:\n    f.write('x')",
    "try": "try:\n    open('CANARY', 'w')\nexcept OSError:\n    pass",
    "comprehension": "[open('CANARY', 'w') for _ in range(3)]",
    "sorted key": "sorted(['CANARY'], key=open)",
    "max key": "max(['CANARY', 'b'], key=print)",
    "fstring": "x = f\"{open('CANARY', 'w')}\"",
    "default": "x = dict(a=1).get(open('CANARY', 'w'))",
    "assert message": "assert False, open('CANARY', 'w')",
    "annotation": "x: open('CANARY', 'w') = y",
    "lazy called at once": "from dslpar import LazyCall as L\nx = L(open)(file='CANARY', mode='w')",
    "environment": "import os\nx = os.environ['HOME']",
    "walrus": "(o := open)('CANARY', 'w')",
    "star import": "from os import *\nsystem('touch CANARY')",
    "dict of functions": "x = dict(f=open)\nx.f('CANARY', 'w')",
    "isinstance hook": "from m import M\nx = isinstance(1, M)",
    "sum start": "x = sum([1], start=open('CANARY', 'w'))",
    "get_config outside": "from dslpar import get_config\nx = get_config('../../etc/passwd.py')",
    "get_config absolute": "from dslpar import get_config\nx = get_config('/etc/passwd')",
    "relative to nowhere": "from ........... import x",
}

GROWS = {
    "while": "while True: pass",
    "for over growing list": "x = [1]\nfor i in x: x.append(i)",
    "nested loops": "for a in range(10**9):\n for b in range(10**9):\n  c = a * b",
    "nested comprehension": "x = [1 for a in range(10**6) for b in range(10**6)]",
    "generator": "x = sum(1 for a in range(10**9) for b in range(10**9))",
    "huge range list": "x = list(range(10**12))",
    "huge range sum": "x = sum(range(10**12))",
    "huge range sorted": "x = sorted(range(10**12))",
    "huge range max": "x = max(range(10**12))",
    "huge range any": "x = any(0 for i in range(10**12))",
    "huge range in": "x = 1.5 in range(10**12)",
    "huge range set": "x = set(range(10**12))",
    "huge range tuple": "x = tuple(range(10**12))",
    "huge range unpack": "a, *b = range(10**12)",
    "huge range unpack few": "a, b = range(10**12)",
    "huge range star": "x = [*range(10**12)]",
    "huge range star args": "x = max(*range(10**12))",
    "huge range zip": "x = list(zip(range(10**12), range(10**12)))",
    "huge range enumerate": "x = dict(enumerate(range(10**12)))",
    "huge range join": "x = ','.join(str(i) for i in range(10**12))",
    "huge range fromkeys": "x = dict.fromkeys(range(10**12))",
    "huge range extend": "x = []\nx.extend(range(10**12))",
    "huge range iadd": "x = []\nx += range(10**12)",
    "huge range slice": "x = [1]\nx[:] = range(10**12)",
    "huge range fsum": "import math\nx = math.fsum(range(10**12))",
    "huge range prod": "import math\nx = math.prod(range(1, 10**12))",
    "huge range update": "x = {}\nx.update(zip(range(10**12), range(10**12)))",
    "repeat string": "x = 'x' * 10**10",
    "repeat list": "x = [0] * 10**10",
    "repeat tuple": "x = 10**10 * (0,)",
    "repeat in place": "x = [0]\nx *= 10**10",
    "repeat in loop": "x = 'xx'\nfor i in range(100): x *= 2",
    "double a list": "x = [0]\nfor i in range(100): x += x",
    "double a list by slices": "x = [0]\nfor i in range(100): x[:0] = x",
    "power tower": "x = 10**10**10",
    "power loop": "x = 3\nfor i in range(100): x = x * x",
    "power in place": "x = 9\nfor i in range(100): x **= 9",
    "shift": "x = 1 << 10**10",
    "shift in place": "x = 1\nfor i in range(1000): x <<= 10**6",
    "round": "x = round(5, -10**10)",
    "factorial": "import math\nx = math.factorial(10**7)",
    "comb": "import math\nx = math.comb(10**7, 5 * 10**6)",
    "perm": "import math\nx = math.perm(10**7)",
    "lcm": "import math\nx = math.lcm(*range(1, 40000))",
    "hex int": f"x = 0x{'f' * 200_000}",
    "int of text": f"x = int('{'f' * 200_000}', 16)",
    "int of long decimal": f"x = int('{'9' * 90_000}')",
    "long decimal literal": f"x = {'9' * 200_000}",
    "fstring width": "x = f'{1:>1000000000}'",
    "fstring precision": "x = f'{1.0:.1000000000f}'",
    "fstring nested width": "x = f'{1:{10**9}}'",
    "percent width": "x = '%1000000000d' % 1",
    "percent star": "x = '%*d' % (10**9, 1)",
    "percent precision": "x = '%.1000000000f' % 1",
    "percent keyed width": "x = '%(a(b))1000000000d' % {'a(b)': 1}",
    "percent many": "x = ('%(a)s' * 10000) % {'a': 'x' * 90000}",
    "format width": "x = '{:>1000000000}'.format(1)",
    "format nested": "x = '{:{}}'.format(1, 10**9)",
    "format many": "x = ('{0}' * 30000).format('x' * 90000)",
    "zfill": "x = '1'.zfill(10**10)",
    "center": "x = 'a'.center(10**10)",
    "ljust": "x = 'a'.ljust(10**10)",
    "expandtabs": "x = ('\\t' * 1000).expandtabs(10**9)",
    "replace": "x = ('a' * 90000).replace('a', 'b' * 90000)",
    "replace empty": "x = ('a' * 90000).replace('', 'b' * 90000)",
    "join": "x = ('a' * 90000).join('b' * 90000)",
    "translate": "x = ('a' * 90000).translate({97: 'b' * 90000})",
    "laughs in lists": "a = ['ha'] * 10\n" + "\n".join("a = [a] * 10" for _ in range(20)),
    "laughs printed": "a = ['ha'] * 10\n" + "\n".join("a = [a] * 10" for _ in range(20)) + "\nx = str(a)",
    "laughs compared": "a, b = [0], [0]\nfor i in range(45):\n a, b = [a, a], [b, b]\nx = a == b",
    "laughs hashed": "a = (0,)\nfor i in range(45): a = (a, a)\nx = {a: 1}",
    "laughs in sets": "a = (0,)\nfor i in range(45): a = (a, a)\nx = {a}",
    "laughs searched": "a, b = [0], [0]\nfor i in range(45):\n a, b = [a, a], [b, b]\nx = [a].index(b)",
    "laughs sorted": "a, b = [0], [0]\nfor i in range(45):\n a, b = [a, a], [b, b]\nx = sorted([a, b])",
    "laughs counted": "a, b = [0], [0]\nfor i in range(45):\n a, b = [a, a], [b, b]\nx = max(a, b)",
    "laughs in dicts": "a = {}\nfor i in range(45): a = dict(a=a, b=a)",
    "laughs copied": "from dslpar import L\na = {}\nfor i in range(45): a = dict(a=a, b=a)\nx = L('a.b')(a=a)",
    "laughs as keys": "a = (0,)\nfor i in range(45): a = (a, a)\nx = dict(b=1).get(a)",
    "laughs in isinstance": "a = (int,)\nfor i in range(45): a = (a, a)\nx = isinstance(1, a)",
    "laughs in startswith": "x = 'a'\nfor i in range(45): x = (x, x)\ny = 'b'.startswith(x)",
    "laughs by update": "a = {}\nfor i in range(45):\n b = {}\n b.update(x=a, y=a)\n a = b\ny = f'{a}'",
    "list in itself": "x = []\nx.append(x)",
    "list in itself compared": "x = []\nx.append(x)\ny = []\ny.append(y)\nz = x == y",
    "list in itself printed": "x = []\nx.append(x)\ny = f'{x}'",
    "dict in itself": "x = {}\nx['x'] = x\nx.y = x",
    "dict in itself copied": "from omegaconf import DictConfig\nx = {}\nx['x'] = x\ny = DictConfig(x)",
    "deep value": "x = []\nfor i in range(30000): x = [x]",
    "deep tuple": "x = ()\nfor i in range(30000): x = (x,)\ny = {x}",
    "deep dict": "x = {}\nfor i in range(20000): x = dict(x=x)\ny = x == {}",
    "wide findings": "\n".join(f"x{i} = open({i})" for i in range(8000)),
    "repeated findings": "for i in range(10**6): x = undefined",
    "all different findings": "for i in range(10**6): assert False, str(i)",
    "long strings in a list": "x = []\nfor i in range(40000): x.append('x' * 90000)",
    "growing strings": "x = ''\ny = []\nfor i in range(40000):\n x += 'abc'\n y.append(x)",
    "quadratic strings": "x = 'a' * 90000\nfor i in range(50000): y = x.upper()",
    "quadratic count": "x = 'a' * 90000\nfor i in range(50000): y = x.count('ab')",
    "quadratic find": "x = 'a' * 90000 + 'b'\nfor i in range(50000): y = x.find('a' * 40000 + 'c')",
    "quadratic find from the right": "x = 'a' * 90000\ny = x.rfind('b' + 'a' * 40000)\nz = undefined",
    "quadratic finds from the right": "x = 'a' * 90000\nfor i in range(9999): y = x.rfind('b' + 'a' * 40000)",
    "quadratic split from the right": "x = 'a' * 90000\nfor i in range(9999): y = x.rsplit('b' + 'a' * 40000)",
    "quadratic strip": "x = 'a' * 90000\nb = 'b' * 90000 + 'a'\nfor i in range(9999): y = x.strip(b)",
    "quadratic text compare": "x = '\U0001f600' * 99999\ny = x[:-1] + 'b'\nfor i in range(99999): z = x == y",
    "quadratic text key": "x = '\U0001f600' * 99999\ny = {x[:-1]: 1}\nx = x[:-1]\nfor i in range(99999): z = y[x]",
    "quadratic text keys": "x = '\U0001f600' * 99999\ny = {x[:-1]: 1}\nx = x[:-1]\nfor i in range(99999): y[x] = 1",
    "quadratic literal": f"for i in range(99999): y = '{'é' * 90000}'",
    "quadratic fields": "x = '{0}' * 30000\nfor i in range(9999): y = x.format('')",
    "quadratic conversions": "x = '%s' * 30000\ny = ('',) * 30000\nfor i in range(9999): z = x % y",
    "quadratic percent signs": "x = '%%' * 40000\nfor i in range(9999): z = x % ()",
    "long names": f"x = {'a' * 200_000}\ny = dict({'b' * 20_000}=1).{'b' * 30_000}",
    "long keys": f"x = dict({', '.join(f'{chr(97 + i) * 9999}=1' for i in range(20))})\ny = [x.abc, x.{'a' * 99}]",
    "deep comprehensions": f"x = {'[' * 100}1{' for a in [1]]' * 100}\ny = undefined",
    "quadratic split": "x = 'a ' * 40000\nfor i in range(50000): y = x.split()",
    "quadratic in": "x = list(range(40000))\nfor i in range(50000): y = -1 in x",
    "quadratic index": "x = list(range(40000))\nfor i in range(50000): y = x.count(1)",
    "quadratic insert": "x = []\nfor i in range(50000): x.insert(0, i)",
    "quadratic pop": "x = list(range(40000))\nfor i in range(40000): x.pop(0)",
    "quadratic del": "x = list(range(40000))\nfor i in range(40000): del x[0]",
    "quadratic slice": "x = list(range(40000))\nfor i in range(50000): y = x[1:]",
    "quadratic slice of text": "x = 'a' * 90000\nfor i in range(50000): y = x[1:]",
    "quadratic copy": "x = list(range(40000))\nfor i in range(50000): y = x.copy()",
    "quadratic reverse": "x = list(range(40000))\nfor i in range(50000): x.reverse()",
    "quadratic add": "x = list(range(40000))\nfor i in range(50000): y = x + [1]",
    "quadratic compare": "x = list(range(40000))\ny = x[:]\nfor i in range(50000): z = x == y",
    "quadratic sort": "x = list(range(40000))\nfor i in range(50000): x.sort()",
    "quadratic dict": "x = dict.fromkeys(range(40000))\nfor i in range(50000): y = dict(x)",
    "quadratic sum of lists": "x = sum([[0] * 1000 for i in range(1000)], [])",
    "quadratic sum of tuples": "x = sum([(0,) * 40 for i in range(1000)] * 40, ())",
    "quadratic kwargs": "x = {str(i): i for i in range(20000)}\nfor i in range(50000): y = dict(**x)",
    "quadratic format": "x = list(range(30000))\nfor i in range(50000): y = f'{x}'",
    "quadratic set order": "x = set(range(40000))\nfor i in range(50000): y = x | x",
    "quadratic min": "x = list(range(40000))\nfor i in range(50000): y = min(x)",
    "quadratic len of tuple": "x = list(range(40000))\nfor i in range(50000): y = tuple(x)",
    "quadratic reversed": "x = list(range(40000))\nfor i in range(50000): y = [*reversed(x)]",
    "hash collisions": "x = {i * (2**61 - 1): 0 for i in range(20000)}",
    "hash collisions in a set": "x = set(i * (2**61 - 1) for i in range(20000))",
    "hash collisions by zip": "x = dict(zip((i * (2**61 - 1) for i in range(20000)), range(20000)))",
    "view and range": "x = {}.keys() | range(10**12)",
    "range and view": "x = range(10**12) | {1: 2}.items()",
    "view minus generator": "x = {}.keys() - (i for i in range(10**12))",
    "set order of strings": "x = {'a', 'b'}\nfor i in x: pass\ny = [*range(10**9)]",
    "many ints": "x = [i * 10**900 for i in range(49000)]\ny = [j * 10**901 for j in range(49000)]",
    "many tuples": "x = [(i, (i, (i, (i,)))) for i in range(49000)]",
    "many dicts": "x = [dict(a=i, b=dict(c=i)) for i in range(49000)]",
    "long import name": f"from {'.'.join(['a'] * 20000)} import b\nb()",
    "long attributes": "import a\nfor i in range(20000): a = a.bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb",
    "self import": "from .attack import x",
    "self get_config": "from dslpar import get_config\nx = get_config('attack.py')",
    "deep brackets": f"x = {'[' * LONG}",
    "balanced brackets": f"x = {'[' * 190}{']' * 190}",
    "deep minus": f"x = {'-' * LONG}1",
    "deep not": f"x = {'not ' * 30000}1",
    "deep plus": f"x = {'1 + ' * 30000}1",
    "plus": f"x = {'1+' * 15000}1",
    "deep attributes": f"x = a{'.b' * 19000}",
    "deep calls": f"x = f{'()' * 19000}",
    "deep subscripts": f"x = f{'[0]' * 13000}",
    "deep conditions": f"x = {'1 if a else ' * 9000}1",
    "deep elif": "if 0:\n pass\n" + "elif 0:\n pass\n" * 9000 + "x = [*range(10**9)]",
    "deep indentation": "".join(" " * i + "if 1:\n" for i in range(99)) + " " * 99 + "x = open('a')",
    "long chain": f"{'x = ' * 19000}open",
    "long comparison": f"x = {'0 <= ' * 9000}open",
    "many fields": f"x = f'{'{a}' * 12000}'",
    "many semicolons": "x;" * 130_000,
    "many constants": f"x = [{'0,' * 130_000}]",
    "many lines": "x=1\n" * 65_000,
    "deep fstring": 'x = f\'{f"{f"""{1}"""}"}{\'',
    "NUL bytes": "x = 1\0\nopen('CANARY', 'w')",
    "surrogate": r"x = '\ud800'",
    "surrogate by format": "x = f'{0xd800:c}'",
    "surrogate by percent": "x = '%c' % 0xd800",
    "huge file": "# " + "x" * (300 * 1024),
    "decreasing indentation": "if 1:\n    x = 1\n  y = 2",
    "yaml tag in python": "x: !!python/object/apply:os.system ['touch CANARY']",
}

YAMLS = {
    "tag": "x: !!python/object/apply:os.system ['touch CANARY']",
    "alias bomb": "a: &a [1,1,1,1,1,1,1,1,1]\n"
    + "\n".join(f"{y}: &{y} [{', '.join(['*' + x] * 9)}]" for x, y in zip("abcdefgh", "bcdefghi", strict=True)),
    "alias in itself": "a: &a [*a]",
    "deep flow": "a: " + "[" * 20_000,
    "deep maps": "a: " + "{a: " * 10_000,
    "deep block": "\n".join(" " * i + "a:" for i in range(300)),
    "deep dashes": "- " * 20_000,
    "many": "a: [" + "1," * 130_000 + "]",
    "wide": "\n".join(f"a{i}: [1" for i in range(9_000)),
    "long int": "a: " + "9" * 200_000,
    "octal": "a: 0x" + "f" * 200_000,
    "long key": "? " + "a" * 200_000,
    "merge": "a: &a {b: 1}\nc:\n  <<: *a",
    "NUL": "a: \0",
    "not a mapping": "- 1",
    "two documents": "a: 1\n---\nb: 2",
    "tabs": "a:\n\t- 1",
    "float regex": "a: " + "1" * 100_000 + "x",
    "huge": "a: '" + "x" * 300_000 + "'",
}


def measured(path: str) -> dict[str, float | list[str]]:
    """Load a file in a forked child, and return its findings, CPU seconds and memory growth."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.write(writing, json.dumps(load_and_measure(path)).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child ended with status {status}"
    return json.loads(data)


def load_and_measure(path: str) -> dict[str, float | list[str]]:
    resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
    gc.disable()  # the parent's objects are not part of this load
    before, start = peak_bytes(), time.process_time()
    gc.enable()
    gc.freeze()
    config = load(path)
    took = time.process_time() - start
    codes = [f"{item.code} {item.help}" for item in config.findings if item.severity == "error"]
    return {"cpu_s": took, "growth": peak_bytes() - before, "codes": codes[:50]}


def peak_bytes() -> int:
    """Return the peak resident set of this process so far (a fork starts anew)."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024


def attack(tmp_path, name, text, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / name
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    seen = measured(str(path))
    assert seen["codes"], "a hostile file without a finding"
    assert all(code.partition(" ")[2] for code in seen["codes"]), "an error without help"
    assert seen["cpu_s"] < MAX_CPU_S, seen
    assert seen["growth"] < MAX_GROWTH_BYTES, seen
    assert sorted(item.name for item in tmp_path.iterdir()) == [name], "something ran"


SLOW = {"many dicts", "quadratic index", "quadratic format"}
"""They take a second or two each, and resemble the other cases."""


@pytest.mark.parametrize("case", RUNS)
def test_nothing_runs(case, tmp_path, monkeypatch):
    attack(tmp_path, "attack.py", RUNS[case], monkeypatch)


@pytest.mark.parametrize("case", sampled(GROWS, lambda case: case not in SLOW))
def test_nothing_grows(case, tmp_path, monkeypatch):
    attack(tmp_path, "attack.py", GROWS[case], monkeypatch)


@pytest.mark.parametrize("case", YAMLS)
def test_no_yaml_hangs(case, tmp_path, monkeypatch):
    attack(tmp_path, "attack.yaml", YAMLS[case], monkeypatch)


def test_a_loop_looks_once_for_what_its_statements_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """The statements fail a hundred thousand times."""
    asked = []
    original = syntax._changed_targets
    monkeypatch.setattr(syntax, "_changed_targets", lambda node: asked.append(node) or original(node))
    text = "steps = 1\nfor _ in range(10**30):\n    steps *= 3\ntrain = dict(steps=steps)\n"
    loaded = load_text(text, "loop.py")
    assert {each.code for each in loaded.findings} == {"CFG005"}
    assert 1 <= len(asked) <= 3
