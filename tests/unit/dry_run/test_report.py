"""The report of a dry run, as text and JSON, with and without problems; the exit status."""

from __future__ import annotations

import argparse
import contextlib
import io
import json

import pytest

from dslpar.cli import plan_dry_run
from dslpar.dry_run.dry_run import dry_run
from dslpar.dry_run.report import as_json, as_text
from dslpar.linter import check
from tests.support.dry_run_mistakes import MISTAKES
from tests.support.dry_runs import job_of
from tests.support.ranks import on_ranks

TEXT = """\
dry.py: dry run of rank 3 of 16 (pipe 0 of 4, data 1 of 2, y 1 of 2)
  stage 0 of 4: 4 layers, embedding.tokens to blocks.1
  16 actions on 8 micro-batches

26 parameters
  embedding.tokens.weight        fp32[129, 64] of [257, 64]
  embedding.positions.weight     fp32[32, 64] of [32, 64]
  blocks.0.norm1.weight          fp32[64] of [64]
  blocks.0.norm1.bias            fp32[64] of [64]
  blocks.0.attention.qkv.weight  fp32[96, 64] of [192, 64]
  blocks.0.attention.qkv.bias    fp32[96] of [192]
  blocks.0.attention.out.weight  fp32[64, 32] of [64, 64]
  blocks.0.attention.out.bias    fp32[64] of [64]
  blocks.0.norm2.weight          fp32[64] of [64]
  blocks.0.norm2.bias            fp32[64] of [64]
  blocks.0.mlp.up.weight         fp32[128, 64] of [256, 64]
  blocks.0.mlp.up.bias           fp32[128] of [256]
  and 14 more (--format json has all)

operations per step within groups, without DeepSpeed's reduction of gradients over replicas, and its optimizer's step
  over pipe         broadcast              1 calls         0 B sent
  over pipe[0, 3]   all_reduce             1 calls    33.02 kB sent
  over y            all_reduce            72 calls    4.719 MB sent

messages per step between stages, including headers
  to   pipe 1           1 x int64[64]
  to   pipe 1           8 x fp32[8, 32, 64]
  from pipe 1           1 x int64[64]
  from pipe 1           8 x fp32[8, 32, 64]
"""
CLASSES = """\
16 ranks by class, and the ranks of each that ran
  stage 0                 4 ranks: ranks 3, 0, 1
  stages 1-2              8 ranks: ranks 7, 4, 5
  stage 3                 4 ranks: ranks 15, 12, 13

no problems: shards tile all parameters (40 checked, those of equal layers once),
stages chain, and ranks agree on their collectives and on the order of messages
"""


def test_text() -> None:
    (text,) = on_ranks(1, _text, init=None)
    assert text.startswith(TEXT)
    assert text.endswith(CLASSES)
    assert "kept for the backward: " in text


def _text() -> str:
    return as_text(dry_run(job_of("1d", "1f1b"), 3))


def test_record() -> None:
    (text,) = on_ranks(1, _json, init=None)
    record = json.loads(text)
    assert {key: record[key] for key in ("rank", "world_size", "stages", "actions", "problems")} == {
        "rank": 3, "world_size": 16, "stages": [0], "actions": 16, "problems": []
    }  # fmt: skip
    assert record["coord"] == {"pipe": 0, "data": 1, "d": 0, "q": 0, "y": 1, "z": 0}
    table = {"name": "embedding.tokens.weight", "shape": [257, 64], "local_shape": [129, 64], "dtype": "fp32"}
    assert record["parameters"][0] == table | {"owner": True}
    # An all-reduce sends (n-1)/n of twice its sum.
    assert {"axis": "y", "kind": "all_reduce", "calls": 72, "bytes": 72 * 8 * 32 * 64 * 4} in record["collectives"]
    assert {"kind": "send", "peer": 1, "form": "fp32[8, 32, 64]", "count": 8} in record["messages"]
    assert record["classes"][1] == {"stages": [1, 2], "ranks": 8, "ran": [7, 4, 5]}
    assert 0 < record["saved_bytes"] <= record["peak_saved_bytes"] == 4 * record["saved_bytes"]


def _json() -> str:
    return as_json(dry_run(job_of("1d", "1f1b"), 3))


def test_problems_are_shown_and_fail_the_command() -> None:
    ((status, text),) = on_ranks(1, _failing, init=None)
    assert status == 1
    assert "  messages: pipe 2: 1 of 16 actions are missing, such as B of stage 2, micro-batch 7\n" in text
    assert "  messages: all ranks: the orders wait for each other: " in text
    assert "rank 1 cannot begin B of stage 1, micro-batch 7 before B of stage 2, micro-batch 7, " in text
    assert "which no rank has in its order\n    the step would hang there\n" in text
    assert "    every micro-batch goes through every stage, both ways\n" in text


def _failing() -> tuple[int, str]:
    mistake, *_ = MISTAKES["left out"]
    printed = io.StringIO()
    with mistake(), contextlib.redirect_stdout(printed):
        status = plan_dry_run.run(job_of("1d", "1f1b"), 2, "text", argparse.ArgumentParser())
    return status, printed.getvalue()


def test_status_without_problems() -> None:
    assert on_ranks(1, _passing, init=None) == [0]


def _passing() -> int:
    return plan_dry_run.run(job_of("1d"), None, "json", argparse.ArgumentParser())


GPT = "model = dict(type='GPT', num_layers=1, hidden_size=8, num_heads=1, vocab_size=256, max_seq_len=8)"
LAYERS = "model = dict(type='Sequential', layers_cfg=[dict(type='torch.nn.Linear', in_features=4, out_features=4)])"


@pytest.mark.parametrize(("rank", "text", "message"), [(9, GPT, "no rank 9"), (0, LAYERS, "a dry run supports GPT")])
def test_wrong_usage(rank: int, text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    job = check.resolve(check.load_text(f"{text}\nbatch = dict(micro_size=1)\ntrain = dict(steps=1)", "dry.py"), 1)
    with pytest.raises(SystemExit) as exit_:
        plan_dry_run.run(job, rank, "text", argparse.ArgumentParser())
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err
