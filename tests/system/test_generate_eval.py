"""`dslpar generate` and `dslpar eval` as commands: alone, under launchers, and what they refuse."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dslpar.cli.main import main
from tests.support.forked_training import start_program
from tests.support.runs import deepspeed, mpirun, start
from tests.support.sampling import sampled
from tests.support.trained_runs import LAYOUTS, train
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a GPT that was trained on bytes."""
    return train(tmp_path_factory.mktemp("run"), "gpt")


def said(folder: Path, ranks: int, *words: object) -> tuple[list[int | None], str]:
    """Return the statuses and the output of ranks that run the command."""
    output = folder / "said.txt"
    output.unlink(missing_ok=True)

    with start_program(ranks, lambda: main([*map(str, words)]), output) as job:
        return job.wait(120), output.read_text()


def parsed(folder: Path, ranks: int, *words: object) -> Any:
    statuses, output = said(folder, ranks, *words, "--format", "json")
    assert statuses == [0] * ranks, output
    return json.loads(output)


GENERATE = ("--prompt", "line 1", "--prompt", "says", "--max-tokens", "6")


def test_generated_text_is_that_of_its_tokens(run: Path, tmp_path: Path) -> None:
    found = parsed(tmp_path, 1, "generate", run, *GENERATE)
    assert [sorted(each) for each in found] == [["text", "tokens"]] * 2
    for each in found:
        assert len(each["tokens"]) == 6
        assert each["text"] == bytes(id for id in each["tokens"] if id < 256).decode("utf-8", "replace")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "line 1"}\n\n{"prompt": "says"}\n')
    assert parsed(tmp_path, 1, "generate", run, "--prompts", prompts, "--max-tokens", "6") == found
    statuses, output = said(tmp_path, 1, "generate", run, *GENERATE)
    assert statuses == [0]
    assert output.startswith("line 1")


def test_ranks_give_what_one_process_gives(run: Path, tmp_path: Path) -> None:
    ranks, override = LAYOUTS["pipe-2-1d-2"]
    words = ("generate", run, *GENERATE)
    assert parsed(tmp_path, ranks, *words, override) == parsed(tmp_path, 1, *words)
    words = ("eval", run, "--samples", "16")
    alone, together = parsed(tmp_path, 1, *words), parsed(tmp_path, ranks, *words, override)
    assert alone.pop("checkpoint") == together.pop("checkpoint")
    assert together == pytest.approx(alone, rel=1e-6)


def test_a_text_ends_before_what_stops_it(run: Path, tmp_path: Path) -> None:
    words = ("generate", run, "--prompt", "line 1", "--max-tokens", 8)
    (whole,) = parsed(tmp_path, 1, *words)
    at = len(whole["text"]) // 2
    (found,) = parsed(tmp_path, 1, *words, "--stop", whole["text"][at : at + 2])
    assert found["text"] == whole["text"][: whole["text"].index(whole["text"][at : at + 2])]
    assert found["tokens"] == whole["tokens"][: len(found["tokens"])]


def test_other_data_are_measured_whole(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("line 7 says 49\n" * 60)
    found = parsed(tmp_path, 1, "eval", run, "--data", f"data.files=['{other}']", "--metrics", "perplexity,accuracy@3")
    assert list(found) == ["perplexity", "accuracy@3", "checkpoint", "step", "samples", "tokens"]
    assert found["samples"] == (15 * 60 - 1) // 32
    assert found["tokens"] == found["samples"] * 32


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("eval", "RUN", "--metrics", "f1"), "CFG232"),
        (("generate", "RUN", "--prompt", ""), "BAT217"),
        (("generate", "RUN", "--prompt", "a", "--checkpoint", "step_7"), "CKP209"),
        (("generate", "RUN", "--prompt", "a", "parallel.tensor.size=2"), "TEN101"),
        (("generate", "RUN", "--prompt", "a", "model.num_heads=4"), "CKP208"),
        (("generate", "RUN/nowhere", "--prompt", "a"), "CKP209"),
        (("generate", "RUN", "--prompts", "RUN/nowhere"), "BAT217"),
    ],
)
def test_what_cannot_run_is_said(run: Path, tmp_path: Path, words: tuple[str, ...], code: str) -> None:
    statuses, output = said(tmp_path, 1, *(word.replace("RUN", str(run)) for word in words))
    assert statuses == [1]
    assert f" {code} " in output
    assert "help: " in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("generate", "RUN"), "no prompt"),
        (("generate", "RUN", "--prompt", "a", "--top-k", "3"), "--top-k has no effect without --temperature"),
        (("generate", "RUN", "--prompt", "a", "--top-p", "1.5"), "'1.5' is not a number above 0, and at most 1"),
        (("generate", "RUN", "OTHER", "--prompt", "a"), "one run is needed, not 2"),
        (("eval", "RUN", "--data", "files=x"), "--data takes keys of data"),
    ],
)
def test_wrong_usage(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*words])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(not HAS_TRANSFORMERS, reason=NO_TRANSFORMERS)
@pytest.mark.prove
def test_a_model_that_generates_nothing_is_named(tmp_path: Path) -> None:
    bert = train(tmp_path, "bert")
    statuses, output = said(tmp_path, 1, "generate", bert, "--prompt", "a")
    assert statuses == [1]
    assert "CFG231 generates-nothing: BertForMaskedLM does not predict next tokens" in output
    assert "dslpar eval RUN" in output
    assert set(parsed(tmp_path, 1, "eval", bert)) >= {"loss", "perplexity", "accuracy@1", "accuracy@5"}


@pytest.mark.skipif(not HAS_TRANSFORMERS, reason=NO_TRANSFORMERS)
@pytest.mark.prove
def test_classes_are_measured_one_by_one(tmp_path: Path) -> None:
    found = parsed(tmp_path, 1, "eval", train(tmp_path, "vit"))
    assert set(found) == {"loss", "accuracy@1", "accuracy@5", "checkpoint", "step", "samples", "images", "classes"}
    assert sum(each["samples"] for each in found["classes"]) == found["samples"] == 40
    right = sum(each["recall"] * each["samples"] for each in found["classes"])
    assert found["accuracy@1"] == pytest.approx(right / 40)


def test_a_corrupted_weight_is_not_used(tmp_path: Path) -> None:
    run = train(tmp_path, "gpt")
    file = next((run / "checkpoints").glob("*/tensors/*.safetensors"))
    altered = bytearray(file.read_bytes())
    altered[-5] ^= 1
    file.write_bytes(altered)
    statuses, output = said(tmp_path, 1, "generate", run, "--prompt", "a")
    assert statuses == [1]
    assert "CKP215" in output


LAUNCHERS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m"],
    "deepspeed": deepspeed("--num_gpus", "2", "--module"),
    "mpirun": [*mpirun(2), sys.executable, "-m"],
}


@pytest.mark.parametrize("launcher", sampled(LAUNCHERS, ()))
def test_under_a_launcher(run: Path, tmp_path: Path, launcher: str) -> None:
    expected = parsed(tmp_path, 1, "generate", run, *GENERATE)
    words = ["generate", str(run), *GENERATE, "--format", "json", LAYOUTS["1d-2"][1]]
    done = start([*LAUNCHERS[launcher], "dslpar", *words])
    assert done.status == 0, done.output
    found, _ = json.JSONDecoder().raw_decode(done.output[done.output.index("[\n") :])
    assert found == expected
