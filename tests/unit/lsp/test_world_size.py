"""The number of ranks is written into the comment of settings."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dslpar.linter.fixes import apply
from dslpar.lsp.analysis import analysed
from dslpar.lsp.world_size import offered, with_world_size

CONFIG = """\
parallel = dict(pipeline=2, tensor=dict(size=8, mode='1d'))
model = dict(type='GPT', num_layers=8, hidden_size=64, num_heads=8, vocab_size=256, max_seq_len=64)
batch = dict(global_size=64, micro_size=2)
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "# dslpar: world-size=64\n"),
        (CONFIG, f"# dslpar: world-size=64\n{CONFIG}"),
        ("# dslpar: world-size=8\n", "# dslpar: world-size=64\n"),
        ("# dslpar: world-size=8,16 device=h100-80g  # two\n", "# dslpar: world-size=64 device=h100-80g  # two\n"),
        ("# dslpar: device=h100-80g\n", "# dslpar: world-size=64 device=h100-80g\n"),
        ("# mine\n\n# dslpar: device=h100-80g\n", "# mine\n\n# dslpar: world-size=64 device=h100-80g\n"),
        ("# dslpar: world-size=8\n# dslpar: world-size=16\n", "# dslpar: world-size=8\n# dslpar: world-size=64\n"),
        ("# dslpar: world-size=\n", "# dslpar: world-size=64\n"),
        ("#!/bin/sh\n# coding: utf-8\nx = 1\n", "#!/bin/sh\n# coding: utf-8\n# dslpar: world-size=64\nx = 1\n"),
        ("#!/bin/sh", "#!/bin/sh\n# dslpar: world-size=64\n"),
        ("#!/bin/sh\n# coding: latin-1", "#!/bin/sh\n# coding: latin-1\n# dslpar: world-size=64\n"),
        ("# mine\n# coding: latin-1\nx = 1\n", "# mine\n# coding: latin-1\n# dslpar: world-size=64\nx = 1\n"),
        ("\n# coding=utf-8\nx = 1\n", "\n# coding=utf-8\n# dslpar: world-size=64\nx = 1\n"),
        (
            "# mine\n# decoding: fast\n\n# coding: late\n",
            "# mine\n# decoding: fast\n# dslpar: world-size=64\n\n# coding: late\n",
        ),
        ("\ufeffx = 1\n", "\ufeff# dslpar: world-size=64\nx = 1\n"),
        ("%YAML 1.2\n---\nx: 1\n", "# dslpar: world-size=64\n%YAML 1.2\n---\nx: 1\n"),
        ("# dslpar: ignore-file[PERF101] why\n", "# dslpar: world-size=64\n# dslpar: ignore-file[PERF101] why\n"),
        ("x = 1\r\n", "# dslpar: world-size=64\r\nx = 1\r\n"),
        ("x = 1\n# dslpar: world-size=8\n", "# dslpar: world-size=64\nx = 1\n# dslpar: world-size=8\n"),
    ],
)
@pytest.mark.parametrize("name", ["cfg.py", "cfg.yaml"])
def test_the_comment_after_the_edit(name: str, before: str, after: str) -> None:
    assert apply(before, [with_world_size(name, before, "64")]) == after


def test_the_edited_comment_is_what_counts(tmp_path: Path) -> None:
    text = "# dslpar: world-size=8 device=h100-80g\n" + CONFIG
    path = str(tmp_path / "cfg.py")
    made = analysed(path, {os.path.realpath(path): apply(text, [with_world_size(path, text, "16,64")])})
    assert made.settings.worlds == (16, 64)
    assert made.settings.device == "h100-80g"


def offered_for(folder: Path, text: str) -> list[str]:
    path = str(folder / "cfg.py")
    return offered(analysed(path, {os.path.realpath(path): text}))


def test_legal_nodes_are_offered(tmp_path: Path) -> None:
    """Two stages of eight tensor ranks are 16 ranks at least; 8 ranks are an error."""
    assert offered_for(tmp_path, CONFIG) == ["16", "32", "64", "128"]
    assert offered_for(tmp_path, "# dslpar: world-size=32\n" + CONFIG) == ["16", "64", "128", "256"]


def test_the_size_of_the_project_comes_first(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.dslpar]\nworld-size = 48\n")
    assert offered_for(tmp_path, "# dslpar: world-size=16\n" + CONFIG) == ["48", "32", "64", "128"]
    assert "48" not in offered_for(tmp_path, CONFIG), "it counts already"


def test_an_empty_file_is_offered_nodes(tmp_path: Path) -> None:
    assert offered_for(tmp_path, "") == ["8", "16", "32", "64"]
