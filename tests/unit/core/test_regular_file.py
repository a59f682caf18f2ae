"""Reading files that a config names: regular files only, up to a size limit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dslpar.core.regular_file import read_bounded
from dslpar.schema.chat_templates import template_of
from dslpar.schema.datasets import ChatData
from dslpar.schema.tokenizer_file import read_tokenizer
from dslpar.schema.transformers_configs import read_config_json


def test_a_file_is_read_up_to_a_bound(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    assert read_bounded(str(path), 10) == b"0123456789"
    assert read_bounded("/proc/self/status", 1 << 20), "of size 0, says the system"
    assert 4 < len(read_bounded(str(path), 4)) < 10, "it tells that there is more"


@pytest.mark.parametrize("kind", ["fifo", "device", "folder"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "tokenizer.json"
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "folder":
            path.mkdir()
    with pytest.raises(OSError, match="it is not a regular file"):
        read_bounded(str(path), 100)
    if kind != "folder":
        assert read_tokenizer(str(path)).problem == "it is not a regular file"
    for name in ("config.json", "chat_template.jinja", "tokenizer_config.json"):
        path.rename(tmp_path / name)
        path = tmp_path / name
        if name == "config.json":
            assert read_config_json(str(tmp_path)).problem == "it is not a regular file"
        else:
            data = ChatData(files=("a.jsonl",), tokenizer=str(tmp_path))
            assert template_of(data, "cfg.py").problem
