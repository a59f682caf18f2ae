"""Flags that other tools have too mean what they mean there: sampling, stdout, sizes, dtypes, help, Ctrl-C."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dslpar.cli import checkpoint, generate, import_
from dslpar.cli import main as entry
from dslpar.cli.main import main


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> list[argparse.Namespace]:
    """Return the arguments with which `dslpar generate` would run."""
    found: list[argparse.Namespace] = []

    def run_generate(args: argparse.Namespace, *_: Any) -> int:
        found.append(args)
        return 0

    monkeypatch.setattr(generate, "import_with_torch", lambda _: SimpleNamespace(run_generate=run_generate))
    return found


@pytest.mark.parametrize(
    ("words", "temperature", "top_k", "top_p"),
    [
        ("", 0.0, None, None),
        ("--temperature 0", 0.0, None, None),
        ("--temperature 0 --top-k 5 --top-p 0.9 --seed 3", 0.0, 5, 0.9),  # greedy, as in vLLM and every API
        ("--temperature 0.5 --top-k 0", 0.5, None, None),  # off, as in llama.cpp and transformers
        ("--temperature 0.5 --top-k -1", 0.5, None, None),  # off, as in vLLM
        ("--top_k 0 --top_p 1", 0.0, None, 1.0),
        ("--temperature 2 --top-k 3", 2.0, 3, None),
    ],
)
def test_values_of_sampling(
    words: str, temperature: float, top_k: int | None, top_p: float | None, generated: list[argparse.Namespace]
) -> None:
    assert main(["generate", "RUN", "--prompt", "a", "--max_new_tokens", "7", *words.split()]) == 0
    (args,) = generated
    assert (args.temperature, args.top_k, args.top_p) == (temperature, top_k, top_p)
    assert args.max_tokens == 7


@pytest.mark.parametrize(
    "words",
    [
        "--temperature -1",
        "--temperature inf",
        "--top-k -2",
        "--top-p 0",
        "--seed -1",
        "--top-k 3",
        "--top-p 0.9",
        "--seed 0",
    ],
)
def test_values_that_sampling_refuses(
    words: str, generated: list[argparse.Namespace], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["generate", "RUN", "--prompt", "a", *words.split()])
    assert (ended.value.code, generated) == (2, [])
    assert words.split()[0] in capsys.readouterr().err


def test_a_dash_is_stdout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cfg.py").write_text("model = dict(type='GTP')\n")
    assert main(["lint", "cfg.py", "--output-file", "-"]) == 1
    assert "unknown model 'GTP'" in capsys.readouterr().out
    Path("ds.json").write_text('{"train_batch_size": 8}')
    import_.run(import_arguments("ds.json", "-o", "-"), argparse.ArgumentParser())
    assert "global_size" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cfg.py", "ds.json"]


def import_arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    import_.add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("5GiB", 5 * 2**30), ("1.5 kib", 1536), ("12", 12), ("2TB", 2 * 10**12)]
)
def test_sizes_of_files(text: str, size: int) -> None:
    assert checkpoint._num_bytes(text) == size


@pytest.mark.parametrize(
    ("name", "dtype"), [("bfloat16", "bf16"), ("float32", "fp32"), ("half", "fp16"), ("fp16", "fp16")]
)
def test_names_of_dtypes(name: str, dtype: str) -> None:
    parser = argparse.ArgumentParser()
    checkpoint._add_export_arguments(parser)
    assert parser.parse_args(["RUN", "-o", "x", "--dtype", name]).dtype == dtype


def test_help_is_a_command_too(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["help"], ["help", "generate"], ["help", "checkpoint", "list"]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0
        assert f"usage: dslpar {' '.join(words[1:])}" in capsys.readouterr().out
    assert main(["-V"]) == 0
    assert capsys.readouterr().out.startswith("dslpar ")


def test_ctrl_c_ends_with_the_shell_s_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(entry, "main", interrupted)
    monkeypatch.setattr(entry.gc, "disable", lambda: None)
    with pytest.raises(SystemExit) as ended:
        entry.run()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"
