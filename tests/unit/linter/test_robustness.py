"""Robustness: no config makes a rule slow, memory-hungry or crash; each case here once did."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from dslpar.cli.main import main
from dslpar.linter import check
from tests.support.lint import MODEL, PATH, codes, findings, marked

HOSTILE = [
    "parallel = dict(pipeline=dict(size=2, method='type:(.|.|.|.|.|.)*!'))",
    "parallel = dict(pipeline=dict(size=2, method='type:.*.*.*.*.*.*.*.*.*.*!'))",
    "parallel = dict(tensor=dict(size=10**18, mode='2.5d'))",
    "parallel = dict(tensor=dict(size=2**31 - 1, mode='2.5d'))",
    "parallel = dict(tensor=dict(size=2**31 - 1, mode='2.5d', depth=7))",
    "parallel = dict(tensor=dict(size=10**400, mode='3d'))",
    "parallel = dict(tensor=dict(size=2**31 - 1, mode='1d'))",
    "parallel = dict(pipeline=dict(size=2**31 - 1, stage_ids=[0] * 8))",
    "parallel = dict(pipeline=dict(size=2**31 - 1, counts=[1] * 8))",
    "train = dict(seed=10**400)",
    "optimizer = dict(lr=10**400)",
    "model.num_layers = 10**9",
    "model.hidden_size = 2**31 - 1\nparallel = dict(tensor=dict(size=4, mode='1d'))",
]


@pytest.mark.parametrize("line", HOSTILE)
def test_a_hostile_value_is_a_finding_at_once(line: str) -> None:
    began = time.process_time()
    found = codes(f"{MODEL}{line}\n")
    assert time.process_time() - began < 1
    assert any(code not in ("CFG112",) for code in found)


def test_a_huge_hostfile_is_read_at_once() -> None:
    began = time.process_time()
    text = MODEL + "parallel = dict(tensor=dict(size=2, mode='1d'))\n"
    found = codes(text, None, hostfile="a slots=999999999\nb slots=999999999\n")
    assert "PERF101" in found
    assert codes(MODEL, None, hostfile="a slots=99999999999999\n") == ["HST101"], "nothing is clamped"
    assert time.process_time() - began < 1


def test_a_deep_model_is_cut_at_once() -> None:
    began = time.process_time()
    text = MODEL.replace("num_layers=8", "num_layers=10_000") + "parallel = dict(pipeline=1000)\n"
    assert sum(check.resolve(check.load_text(text, PATH), 1000).stages.counts or ()) == 10_000
    assert time.process_time() - began < 1


def test_an_absolute_import_of_a_section_is_reported() -> None:
    text = MODEL + "from base import train, parallel\n"
    found = findings(text)
    assert [(finding.code, marked(text, finding)) for finding in found] == [("CFG102", "train"), ("CFG102", "parallel")]
    assert "from .common.train import train" in found[0].help
    assert codes("import base as model\n") == ["CFG102"]


def test_overrides_of_a_loaded_config_are_not_ignored() -> None:
    config = check.load_text(MODEL, PATH)
    for function in (check.lint, check.resolve):
        with pytest.raises(TypeError, match=r"overrides go to dslpar\.load"):
            function(config, 8, ["parallel.pipeline=3"])  # type: ignore[operator]


def test_paths_may_be_paths(tmp_path: Path) -> None:
    path = tmp_path / "cfg.py"
    path.write_text(MODEL)
    assert check.load(path).path == os.fspath(path)
    assert check.lint(path, 8) == []
    assert check.resolve(path, 8).mesh.data == 8


@pytest.mark.parametrize("line", ["train = dict(save_interval=None)", "checkpoint = None", "schedule = None"])
def test_none_counts_as_left_out_for_every_key(line: str) -> None:
    assert codes(f"{MODEL}{line}\n") == []


def test_a_run_goes_on_where_its_config_yaml_stands() -> None:
    assert check.resolve(check.load_text(MODEL, "outputs/gpt/cfg.py"), 1).output_dir == "outputs/cfg"
    text = '{"model": {"type": "GPT", "num_layers": 2, "hidden_size": 8, "num_heads": 2, "vocab_size": 256,'
    config = check.load_text(text + ' "max_seq_len": 8}}', "outputs/gpt/config.yaml")
    assert check.resolve(config, 1).output_dir == "outputs/gpt"


def test_the_excerpt_is_python_s_line() -> None:
    text = "# a form feed \x0c and a line separator \u2028\n" + MODEL + "zero = 9\n"
    (found,) = findings(text)
    from dslpar.linter.report.text import block

    assert "    3 | zero = 9" in block(found, {PATH: text})


def test_no_line_is_shown_where_there_is_none() -> None:
    from dslpar.linter.report.text import block

    (found,) = findings("")
    assert block(found, {PATH: ""}).splitlines()[1].startswith("help: ")
    assert block(findings(MODEL, None)[0], {PATH: MODEL}).splitlines()[1].startswith("help: ")


@pytest.mark.parametrize("text", ["# nobody\n", "a slots=3\nb 3\n"])
def test_a_broken_hostfile_has_no_other_findings(text: str) -> None:
    found = codes(MODEL + "parallel = dict(pipeline=2)\n", None, hostfile=text)
    assert len(found) == 1
    assert found[0].startswith("HST")


def test_findings_of_the_world_are_printed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text(MODEL)
    main(["lint", str(tmp_path / "a.py"), str(tmp_path / "b.py"), "--format", "concise"])
    assert capsys.readouterr().out.count("CFG112") == 1


def test_a_tensor_size_of_one_needs_no_options() -> None:
    assert codes(MODEL + "parallel = dict(tensor=dict(size=1, mode='cuboid'))\n") == []
    assert codes(MODEL + "parallel = dict(tensor=dict(size=1, depth=2))\n") == ["TEN108"]
