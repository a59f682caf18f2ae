"""Detection of configs in a folder: no program counts, though it may assign to the name of a section."""

from __future__ import annotations

import pytest

from dslpar.language.load import Config
from dslpar.linter.check import load_text
from dslpar.linter.config_files import is_config, skipped


def config(text: str, path: str = "cfg.py") -> Config:
    return load_text(text, path)


@pytest.mark.parametrize(
    "text",
    [
        "model = dict(type='GPT')\n",
        "parallel = dict(pipeline=2)\n",
        "parallel = dict()\n",
        "zero = dict(stage=2)\nprecision = 'bf16'\n",
        "trian = dict(steps=2)\nprecision = 'bf16'\n",
        "model = 'gpt2'\nparallel = dict(pipeline=2)\n",
    ],
)
def test_configs(text: str) -> None:
    assert is_config(config(text))


@pytest.mark.parametrize(
    "text",
    [
        "model = 'gpt2'\nparallel = True\nprint(model)\n",
        "model = 'gpt2'\n",
        "parallel = 8\n",
        "data = 'x'\ntrain = True\n",
        "zero = 0\nprecision = 'high'\nbatch = 16\n",
        "data = ['a']\ntrain = len(data)\n",
        "model = ['a', 'b']\n",
        "import torch\nmodel = torch.nn.Linear(3, 4)\n",
    ],
)
def test_programs(text: str) -> None:
    assert not is_config(config(text))


def test_yaml_files_of_other_programs() -> None:
    assert not is_config(config("model: gpt-4\ntemperature: 0\n", "chat.yaml"))
    assert not is_config(config("train: ../train\nval: ../val\nmodel: x\n", "data.yaml"))


def test_folder_lint_says_why_a_program_is_skipped() -> None:
    reasons = skipped([config("model = dict(type='GPT')\n", "a.py"), config("model = 'gpt2'\n", "b.py")])
    assert reasons == {"b.py": "it defines no section model or parallel"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model = dict(type='GPT')\n", True),
        ("parallel: Parallel = {'pipeline': 2}\n", True),
        ("model = LazyCall(GPT)(num_layers=2)\n", True),
        ("from .common import model\n", True),
        ("model = Model(\n    a=1)\n", False),
        ("model = load('gpt2')\nmodel.train()\nmodel['a'] = 1\n", False),
        ("parallel = 8\n", False),
    ],
)
def test_files_that_are_not_evaluated_to_their_end(text: str, expected: bool) -> None:
    unread = config(f"{text}a = (\n")
    assert not unread.complete
    assert is_config(unread) is expected
