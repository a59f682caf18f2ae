"""Python outside the config language: the help, followed to the letter, fixes each case.

A case is a config, the config that its author writes after reading the help, and the help's text. `...` in a help's
code stands for the author's own code. All its other code must be in the fixed config.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from dslpar.core.errors import Finding
from dslpar.linter.check import lint, load_text
from tests.support.lint import MODEL, PATH, TOO_SMALL

LAZY = "from dslpar import LazyCall as L\n"
SHARED = "lr, ids = 3e-4, [0] * 4 + [1] * 4\noptimizer = dict(type='AdamW')\n"
"""A config beside the linted one."""


class Case(NamedTuple):
    """A config that lint refuses, and its author's correction."""

    before: str
    after: str
    code: str = "CFG003"


STEPS = "train = dict(steps={})\n"
OPTIMIZER = "optimizer = dict(type='AdamW', lr={})\n"
CASES = {
    # calls of unknown names
    "np.array": Case(
        "import numpy as np\nparallel = dict(pipeline=dict(size=2, counts=np.array([4, 4])))\n",
        "parallel = dict(pipeline=dict(size=2, counts=list([4, 4])))\n",
    ),
    "np.sqrt": Case(
        "import numpy as np\n" + OPTIMIZER.format("np.sqrt(0.01)"),
        "import math\n" + OPTIMIZER.format("math.sqrt(0.01)"),
    ),
    "np.max": Case("import numpy as np\n" + STEPS.format("np.max([1, 2])"), STEPS.format("max([1, 2])")),
    "np.linspace": Case("import numpy as np\n" + OPTIMIZER.format("np.linspace(0, 1, 3)[1]"), OPTIMIZER.format("0.5")),
    "np.pi": Case("import numpy as np\n" + OPTIMIZER.format("np.pi / 1000"), OPTIMIZER.format("3.14 / 1000")),
    "Path": Case(
        "from pathlib import Path\ntrain = dict(output_dir=Path('outputs'))\n", "train = dict(output_dir='outputs')\n"
    ),
    "Path /": Case(
        "from pathlib import Path\ntrain = dict(output_dir=Path('a') / 'b')\n", "train = dict(output_dir='a/b')\n"
    ),
    "partial": Case(
        "from functools import partial\nfrom torch.optim import AdamW\noptimizer = partial(AdamW, lr=3e-4)\n",
        LAZY + "from torch.optim import AdamW\noptimizer = L(AdamW)(lr=3e-4)\n",
    ),
    "partial by position": Case(
        "from functools import partial\nfrom torch.optim import RMSprop\noptimizer = partial(RMSprop, 3e-4)\n",
        LAZY + "from torch.optim import RMSprop\noptimizer = L(RMSprop)(lr=3e-4)\n",
    ),
    "datetime.now": Case(
        "from datetime import datetime\ntrain = dict(output_dir=datetime.now().strftime('%Y'))\n",
        "train = dict(output_dir='2026')\n",
    ),
    "time": Case("import time\ntrain = dict(seed=int(time.time()))\n", "train = dict(seed=1)\n"),
    "device_count": Case(
        "import torch\nparallel = dict(data=torch.cuda.device_count())\n", "parallel = dict(data=8)\n"
    ),
    "is_available": Case(
        "import torch\nif torch.cuda.is_available():\n    precision = 'bf16'\n", "precision = 'fp32'\n"
    ),
    "os.environ.get": Case("import os\n" + STEPS.format("os.environ.get('STEPS', 10)"), STEPS.format("10")),
    "os.environ[]": Case("import os\n" + STEPS.format("int(os.environ['STEPS'])"), STEPS.format("10")),
    "os.getenv": Case("import os\n" + STEPS.format("os.getenv('STEPS')"), STEPS.format("10")),
    "os.cpu_count": Case("import os\n" + STEPS.format("os.cpu_count()"), STEPS.format("10")),
    "os.path.dirname": Case(
        "import os\ntrain = dict(output_dir=os.path.dirname('a/b'))\n", "train = dict(output_dir='a')\n"
    ),
    "math.sqr": Case(
        "import math\n" + OPTIMIZER.format("math.sqr(0.01)"), "import math\n" + OPTIMIZER.format("math.sqrt(0.01)")
    ),
    "sys.argv": Case("import sys\n" + STEPS.format("int(sys.argv[1])"), STEPS.format("10")),
    "open": Case(STEPS.format("int(open('steps').read())"), STEPS.format("10")),
    "json.load": Case("import json\noptimizer = json.loads('{}')\n", "optimizer = dict(type='AdamW')\n"),
    "random": Case("import random\ntrain = dict(seed=random.randint(0, 9))\n", "train = dict(seed=4)\n"),
    "uuid": Case("import uuid\ntrain = dict(output_dir=str(uuid.uuid4()))\n", "train = dict(output_dir='a')\n"),
    "subprocess": Case(
        "import subprocess\ntrain = dict(output_dir=subprocess.check_output(['git', 'log']))\n",
        "train = dict(output_dir='a')\n",
    ),
    "a class": Case(
        "from torch.optim import AdamW\noptimizer = AdamW(lr=1e-4)\n",
        LAZY + "from torch.optim import AdamW\noptimizer = L(AdamW)(lr=1e-4)\n",
    ),
    "a class by position": Case(
        "from torch.optim import RMSprop\noptimizer = RMSprop(1e-4)\n",
        LAZY + "from torch.optim import RMSprop\noptimizer = L(RMSprop)(lr=1e-4)\n",
    ),
    "LazyCall by position": Case(
        LAZY + "from torch.optim import RMSprop\noptimizer = L(RMSprop)(1e-4)\n",
        LAZY + "from torch.optim import RMSprop\noptimizer = L(RMSprop)(lr=1e-4)\n",
    ),
    "LazyCall of a name": Case(
        LAZY + "optimizer = L('RMSprop')(lr=1e-4)\n",
        LAZY + "from torch.optim import RMSprop\noptimizer = L(RMSprop)(lr=1e-4)\n",
        "CFG004",
    ),
    "a function": Case("from my_pkg import rate\n" + OPTIMIZER.format("rate(2)"), OPTIMIZER.format("2e-4")),
    # Builtins.
    "print": Case("print('hello')\n" + STEPS.format(1), STEPS.format(1)),
    "map": Case("a, b = map(int, '12')\n" + STEPS.format("b"), "a, b = [int(x) for x in '12']\n" + STEPS.format("b")),
    "filter": Case(
        "a = list(filter(int, '10'))\n" + STEPS.format("len(a)"),
        "a = [x for x in '10' if int(x)]\n" + STEPS.format("len(a)"),
    ),
    "pow": Case(STEPS.format("pow(2, 3)"), STEPS.format("2 ** 3")),
    "eval": Case(STEPS.format("eval('2')"), STEPS.format("2")),
    "getattr": Case(
        "a = dict(b=2)\n" + STEPS.format("getattr(a, 'b', 1)"), "a = dict(b=2)\n" + STEPS.format("a.get('b', 1)")
    ),
    "hasattr": Case(
        "a = dict(b=2)\n" + STEPS.format("5 if hasattr(a, 'b') else 1"),
        "a = dict(b=2)\n" + STEPS.format("5 if 'b' in a else 1"),
    ),
    "setattr": Case(
        "a = dict(b=2)\nsetattr(a, 'b', 1)\n" + STEPS.format("a.b"), "a = dict(b=2)\na['b'] = 1\n" + STEPS.format("a.b")
    ),
    "frozenset": Case(STEPS.format("len(frozenset([1]))"), STEPS.format("len(set([1]))")),
    "type": Case(STEPS.format("2 if type(2) is int else 3"), STEPS.format("2 if isinstance(2, int) else 3")),
    "input": Case(STEPS.format("int(input())"), STEPS.format("2")),
    "__import__": Case(
        "math = __import__('math')\n" + STEPS.format("math.floor(2.0)"),
        "import math\n" + STEPS.format("math.floor(2.0)"),
    ),
    "__file__": Case("train = dict(output_dir=__file__ + '.out')\n", "train = dict(output_dir='cfg.out')\n", "CFG010"),
    "__name__": Case("if __name__ == '__main__':\n    steps = 2\n", ""),
    "math": Case(OPTIMIZER.format("math.sqrt(0.01)"), "import math\n" + OPTIMIZER.format("math.sqrt(0.01)"), "CFG010"),
    "misspelt": Case("steps = 2\n" + STEPS.format("stpes"), "steps = 2\n" + STEPS.format("steps"), "CFG010"),
    "a misspelt key": Case(
        "a = dict(steps=2)\n" + STEPS.format("a.stpes"), "a = dict(steps=2)\n" + STEPS.format("a.steps"), "CFG004"
    ),
    "a misspelt item": Case(
        "a = dict(steps=2)\n" + STEPS.format("a['stpes']"), "a = dict(steps=2)\n" + STEPS.format("a['steps']"), "CFG004"
    ),
    "a missing key": Case(
        "a = dict(steps=2)\n" + STEPS.format("a.b"), "a = dict(steps=2)\n" + STEPS.format("a.steps"), "CFG004"
    ),
    "a method of text": Case("train = dict(output_dir='a'.encode())\n", "train = dict(output_dir='a')\n"),
    "a method of a set": Case(STEPS.format("len({1}.union({2}))"), STEPS.format("2")),
    # Syntax.
    "lambda": Case("double = lambda x: 2 * x\n" + STEPS.format("double(3)"), STEPS.format("6"), "CFG002"),
    "lambda as a key": Case(
        STEPS.format("max([[1, 2], [2, 1]], key=lambda pair: pair[1])[0]"), STEPS.format("1"), "CFG002"
    ),
    "def": Case("def double(x):\n    return 2 * x\n" + STEPS.format("double(3)"), STEPS.format("6"), "CFG002"),
    "class of constants": Case(
        "class Cfg:\n    '''Mine.'''\n    steps = 2\n    lr: float = 1e-4\n" + STEPS.format("Cfg.steps"),
        "Cfg = dict(steps=2, lr=1e-4)\n" + STEPS.format("Cfg.steps"),
        "CFG002",
    ),
    "class": Case(
        LAZY + "class Mine:\n    def __init__(self, lr):\n        pass\noptimizer = L(Mine)(lr=1e-4)\n",
        LAZY + "from my_module import Mine\noptimizer = L(Mine)(lr=1e-4)\n",
        "CFG002",
    ),
    "while": Case(
        "steps = 1\nwhile steps < 100:\n    steps *= 2\n" + STEPS.format("steps"),
        "steps = 1\nfor step in range(9):\n    if steps >= 100:\n        break\n    steps *= 2\n"
        + STEPS.format("steps"),
        "CFG002",
    ),
    "try": Case(
        "try:\n    steps = 3\nexcept ImportError:\n    steps = 2\n" + STEPS.format("steps"),
        "steps = 3\n" + STEPS.format("steps"),
        "CFG002",
    ),
    "with": Case(
        "with open('a') as file:\n    steps = int(file.read())\n" + STEPS.format("steps"),
        "steps = 2\n" + STEPS.format("steps"),
        "CFG002",
    ),
    "raise": Case(
        "steps = 2\nif steps > 3:\n    raise ValueError('too many')\n" + STEPS.format("steps"),
        "steps = 2\nif steps > 3:\n    assert False, 'too many'\n" + STEPS.format("steps"),
        "CFG002",
    ),
    "match": Case(
        "a = 2\nmatch a:\n    case 2:\n        steps = 3\n    case _:\n        steps = 4\n" + STEPS.format("steps"),
        "a = 2\nif a == 2:\n    steps = 3\nelif a != 2:\n    steps = 4\n" + STEPS.format("steps"),
        "CFG002",
    ),
    "walrus": Case(STEPS.format("(n := 3) + n"), "n = 3\n" + STEPS.format("n + n"), "CFG002"),
    "bytes": Case("train = dict(output_dir=b'out')\n", "train = dict(output_dir='out')\n", "CFG002"),
    "complex": Case(
        "optimizer = dict(type='AdamW', betas=0.9j)\n", "optimizer = dict(type='AdamW', betas=(0.0, 0.9))\n", "CFG002"
    ),
    "Ellipsis": Case(STEPS.format("..."), STEPS.format("2"), "CFG002"),
    "global": Case(
        "steps = 2\nglobal steps\n" + STEPS.format("steps"), "steps = 2\n" + STEPS.format("steps"), "CFG002"
    ),
    "syntax": Case(STEPS.format("2").replace(")", ""), STEPS.format("2"), "CFG001"),
    # values of other packages that Python would accept
    "f-string": Case(
        "import torch\ntrain = dict(output_dir=f'out-{torch.version}')\n", "train = dict(output_dir='out-2')\n"
    ),
    "f-string of a dunder": Case(
        "import torch\ntrain = dict(output_dir=f'out-{torch.__version__}')\n",
        "train = dict(output_dir='out-2')\n",
        "CFG004",
    ),
    "comprehension": Case(
        "from my_pkg import ids\nparallel = dict(pipeline=dict(size=2, stage_ids=[i for i in ids]))\n",
        "parallel = dict(pipeline=dict(size=2, stage_ids=[0] * 4 + [1] * 4))\n",
    ),
    "arithmetic": Case("from my_pkg import n\n" + STEPS.format("2 * n"), STEPS.format("2 * 3")),
    "comparison": Case("from my_pkg import n\n" + STEPS.format("3 if n > 2 else 4"), STEPS.format("3")),
    "conversion": Case("from my_pkg import n\n" + STEPS.format("int(n)"), STEPS.format("3")),
    "len": Case("from my_pkg import ids\n" + STEPS.format("len(ids)"), STEPS.format("3")),
    "iterator": Case(
        "parallel = dict(pipeline=dict(size=2, stage_ids=zip([0], [1])))\n",
        "parallel = dict(pipeline=dict(size=2, counts=list((4, 4))))\n",
        "CFG013",
    ),
    "dtype": Case("import torch\nprecision = torch.float32\n", "precision = 'fp32'\n", "CFG102"),
    "dtype of another key": Case("import torch\n" + STEPS.format("torch.float32"), STEPS.format("3"), "CFG102"),
    # Imports.
    "an absolute import of a section": Case(
        "from shared import optimizer\n", "from .shared import optimizer\n", "CFG102"
    ),
    "an absolute import of a value": Case(
        "from shared import lr\n" + OPTIMIZER.format("lr"),
        "from .shared import lr\n" + OPTIMIZER.format("lr"),
        "CFG102",
    ),
    "a change of an absolute import": Case(
        "from shared import optimizer\noptimizer.lr = 1\n",
        "from .shared import optimizer\noptimizer.lr = 1\n",
        "CFG004",
    ),
    "a config as a section": Case(
        "from . import optimizer\n", "from . import optimizer\noptimizer = optimizer.optimizer\n", "CFG102"
    ),
    "items of an absolute import": Case(
        "from shared import ids\nparallel = dict(pipeline=dict(size=2, stage_ids=[i for i in ids]))\n",
        "from .shared import ids\nparallel = dict(pipeline=dict(size=2, stage_ids=[i for i in ids]))\n",
    ),
    "a star": Case("from .shared import *\n", "from .shared import lr, optimizer\n", "CFG008"),
    "a misspelt import": Case("from .shared import optimiser\n", "from .shared import optimizer\n", "CFG006"),
    # Strings instead of dicts.
    "optimizer as a string": Case("optimizer = 'RMSprop'\n", "optimizer = dict(type='RMSprop')\n", "CFG102"),
    "a dict as a string": Case(
        "optimizer = 'dict(type=\"RMSprop\")'\n", 'optimizer = dict(type="RMSprop")\n', "CFG102"
    ),
    "Llama": Case(
        MODEL.replace("GPT", "Llama"),
        MODEL.replace(
            "type='GPT'",
            "type='GPT', norm='rmsnorm', activation='swiglu', positions='rotary', bias=False, tie_embeddings=False",
        ),
        "CFG108",
    ),
    "GPT-2": Case(MODEL.replace("GPT", "GPT2LMHeadModel"), MODEL, "CFG108"),
}


def findings(text: str) -> list[Finding]:
    model = "" if text.startswith("model") else MODEL
    return [item for item in lint(load_text(model + text, PATH), 8) if item.code not in TOO_SMALL]


def codes_of(help: str) -> list[str]:
    """Return patterns of a help's code: text in backticks, a keyword's value, a name to write instead."""
    named = re.findall(r"did you mean '([^']*)'|^write (\w+)$|^write ([^`]+?)(?::| \(|$)", help)
    written = [part for names in named for part in names if part and "the value itself" not in part]
    code = [*re.findall(r"`([^`]*)`", help), *written]
    return [re.escape(one).replace(r"\.\.\.", ".*").replace("NAME", r"\w+").replace(r",\ ", r".*") for one in code]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shared.py").write_text(SHARED)
    (tmp_path / "optimizer.py").write_text(SHARED)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("name", CASES)
def test_followed_help_repairs(name: str) -> None:
    case = CASES[name]
    found = [item for item in findings(case.before) if item.severity == "error"]
    assert case.code in [item.code for item in found], found
    for help in {item.help for item in found}:
        for pattern in codes_of(help):
            assert re.search(pattern, case.after, re.DOTALL), f"{help!r} does not lead to {case.after!r}"
        assert codes_of(help) or re.search(r"value itself|leave it out|choose|correct", help), help
    assert [item for item in findings(case.after) if item.code != "CFG111"] == []


def test_help_that_python_would_refuse_too_says_so_of_nothing_else() -> None:
    """Python has the same error for a mistake in arithmetic. Python would know the contents of another package."""
    (wrong,) = findings(STEPS.format("1 // 0"))
    assert "Python itself would refuse it" in wrong.help
    (unknown,) = findings("from my_pkg import n\n" + STEPS.format("2 * n"))
    assert "Python" not in unknown.help
    assert "Reference" not in unknown.message


@pytest.mark.parametrize("text", ["...\n", "from dslpar import L\n...\nsteps = 2\n", "if True:\n    ...\n"])
def test_ellipsis_as_a_statement_says_nothing(text: str) -> None:
    """In LiBai's documentation, it stands for the rest of a config."""
    assert findings(text) == []


@pytest.mark.parametrize("copy", ["copy.copy", "copy.deepcopy"])
def test_copies_are_of_the_language(copy: str) -> None:
    text = f"import copy\na = dict(b=dict(steps=2))\n_c = {copy}(a)\n_c.b.steps = 3\ntrain = a.b\n"
    assert findings(text) == []
    steps = load_text(text, PATH).root.get("train.steps")
    assert steps is not None
    assert steps.value == (3 if copy == "copy.copy" else 2)
