"""`dslpar init`: every written file lints clean for the requested ranks; its questions and refusals."""

from __future__ import annotations

import json
import os
import pty
import select
import sys
from pathlib import Path

import pytest

from dslpar.cli.main import main
from dslpar.cli.starter import Choices, Layout, layouts, make_starter
from dslpar.cli.starter_models import NAMES, StarterError, find_model
from dslpar.layout.transformers_data_types import data_types
from dslpar.linter import check
from dslpar.schema.transformers_policies import DERIVED, POLICIES
from tests.support.paths import ROOT
from tests.support.sampling import sampled

WORLDS = [(1, 1), (2, 1), (3, 1), (4, 1), (6, 1), (8, 1), (1, 2), (4, 2), (8, 2), (5, 3), (8, 8)]
"""(ranks per node, nodes)."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty working folder, with images of three classes beside it."""
    for name in ("cat", "dog", "owl"):
        (tmp_path / "images" / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def choices(model: str, gpus: int = 1, nodes: int = 1) -> Choices:
    images = find_model(model).data[:1] == ("images",)
    return Choices(model, gpus, nodes, data_path="images" if images else None)


@pytest.mark.parametrize("model", NAMES)
def test_every_model_lints_clean_in_every_world(folder: Path, model: str) -> None:
    for gpus, nodes in WORLDS:
        made = make_starter(choices(model, gpus, nodes), "config.py")
        assert made.findings == [], (gpus, nodes)
        assert made.world_size == gpus * nodes
        job = check.resolve(check.load_text(made.text, "config.py"), made.world_size)
        assert gpus % job.mesh.tensor.size == 0, "a tensor group is within a node"
        assert (
            f"samples = micro {job.batch.micro_size} * accumulation {job.batch.accumulation} * data {job.mesh.data}"
            in made.text
        )
        assert len(made.text.splitlines()) <= 40
        assert max(map(len, made.text.splitlines())) <= 120


CLASSES = sorted(cls for cls in {*POLICIES, *DERIVED} if data_types(cls))


@pytest.mark.parametrize("cls", sampled(CLASSES, {"LlamaForCausalLM", "GPT2LMHeadModel", "Gemma3ForCausalLM"}))
def test_every_class_of_transformers_lints_clean(folder: Path, cls: str) -> None:
    for gpus in (1, 4, 8):
        assert make_starter(choices(cls, gpus), "config.py").findings == []


def test_the_layouts_of_the_rule() -> None:
    assert next(layouts(Choices(gpus=8))) == Layout(2, 2, 2)
    assert next(layouts(Choices(gpus=4))) == Layout(1, 2, 2)
    assert next(layouts(Choices(gpus=8, nodes=4))) == Layout(4, 4, 2)
    assert next(layouts(Choices(gpus=3, nodes=2))) == Layout(2, 3, 1), "two tensor ranks would lie on two nodes"
    assert list(layouts(Choices(gpus=8, tensor=4, pipeline=2))) == [Layout(2, 1, 4)]
    assert list(layouts(Choices(gpus=8, tensor=3))) == []


def test_a_layout_that_does_not_fit_is_refused_with_lint_s_words(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", "mine.py", "--gpus", "16", "--tensor", "16"]) == 1
    assert "TEN201 heads-do-not-divide" in capsys.readouterr().err
    assert not (folder / "mine.py").exists()


def test_it_writes_and_says_what_is_next(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "mine.py", "--model", "llama", "--gpus", "8"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "mine.py is written, for 8 ranks. Next:",
        "  dslpar lint mine.py --world-size 8",
        "  dslpar launch mine.py --world-size 8",
    ]
    assert main(["lint", "mine.py", "--world-size", "8"]) == 0
    assert capsys.readouterr().out == "no findings\n"


def test_nothing_is_overwritten(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "config.py").write_text("mine")
    with pytest.raises(SystemExit):
        main(["init"])
    assert "config.py exists: choose another name, or --force" in capsys.readouterr().err
    assert (folder / "config.py").read_text() == "mine"
    (folder / "link.py").symlink_to(folder / "nowhere")
    with pytest.raises(SystemExit):
        main(["init", "link.py"])
    assert main(["init", "--force"]) == 0
    assert (folder / "config.py").read_text() != "mine"


def test_paths_are_relative_to_the_file(folder: Path) -> None:
    (folder / "configs").mkdir()
    (folder / "corpus").mkdir()
    assert main(["init", "configs/a.py", "--data-path", "corpus"]) == 0
    assert "files=['../corpus']" in (folder / "configs/a.py").read_text()


def test_images_count_their_classes(folder: Path) -> None:
    for model, key in (("vit", "num_labels"), ("resmlp", "num_classes")):
        assert f"{key}=3" in make_starter(choices(model), "config.py").text
    (folder / "images.npz").touch()
    assert "num_labels=10" in make_starter(Choices("vit", data_path="images.npz"), "config.py").text


def test_a_model_has_the_tokens_of_its_files(folder: Path) -> None:
    (folder / "a.txt").write_text("def f(): return 1\n" * 2000)
    assert main(["data", "train-tokenizer", "a.txt", "-o", "tokenizer", "--vocab-size", "270"]) == 0
    assert main(["data", "tokenize", "a.txt", "-o", "tokens", "--tokenizer", "tokenizer"]) == 0
    for model, size in (("gpt", 320), ("llama", 320), ("gpt2", 384)):
        made = make_starter(Choices(model, data="tokens", data_path="tokens"), "config.py")
        assert f"vocab_size={size}" in made.text
        assert made.findings == []


def test_a_folder_of_transformers_gives_class_weights_and_tokenizer(folder: Path) -> None:
    saved = folder / "models" / "tiny"
    saved.mkdir(parents=True)
    config = dict(
        find_model("LlamaForCausalLM").section["config"], architectures=["LlamaForCausalLM"], model_type="llama"
    )  # type: ignore[call-overload]
    (saved / "config.json").write_text(json.dumps(config))
    (saved / "tokenizer.json").write_text("{}")
    made = make_starter(Choices("models/tiny", 4), "config.py")
    assert "model = dict(type='transformers.LlamaForCausalLM', pretrained='models/tiny')" in made.text
    assert "lr=2e-5" in made.text, "its weights have learned something"
    assert "lr=1e-3" in make_starter(choices("llama"), "config.py").text
    assert "data = dict(type='text', tokenizer='models/tiny', seq_len=128)" in made.text
    (saved / "config.json").write_text("{}")
    with pytest.raises(StarterError, match="does not name the class that saved it"):
        make_starter(Choices("models/tiny"), "config.py")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "lama"], "no model 'lama': did you mean 'llama'?"),
        (["--model", "BertForTokenClassification"], "only a program can pass data for BertForTokenClassification"),
        (
            ["--model", "transformers.MptForCausalLM"],
            "MptForCausalLM has no proven policy",
        ),
        (["--model", "vit"], "need --data-path: a folder with a folder of images for each class"),
        (["--gpus", "8", "--tensor", "3"], "8 ranks are not a multiple of tensor 3"),
        (["--from", "keras", "x.py"], "the frameworks are"),
        (["--from", "deepspeed", "x.json", "--tensor", "2"], "takes the data and the layout from x.json"),
        (["no/such/folder/a.py"], "cannot write no/such/folder/a.py"),
        (["--gpus", "0"], "whole number"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage(folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["init", *words])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(folder.glob("*.py"))


def test_from_another_framework_is_dslpar_import(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "ds.json").write_text(
        '{"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW"}}'
    )
    assert main(["init", "mine.py", "--from", "deepspeed", "ds.json", "--model", "gpt", "--gpus", "4"]) == 0
    text = (folder / "mine.py").read_text()
    assert "type='GPT'" in text
    assert "zero = dict(stage=2)" in text
    assert "lint of the result" in capsys.readouterr().out


# ---- questions ----


def talk(folder: Path, answers: list[str], *words: str) -> tuple[int, str]:
    """Run the command on a terminal with these answers, and return its status and output."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.environ["PYTHONPATH"] = str(ROOT)
        os.execv(sys.executable, [sys.executable, "-m", "dslpar.cli", "init", *words])
    shown, waiting = "", iter([*answers, "\x04"])
    while True:
        if not select.select([terminal], [], [], 1)[0]:
            continue
        try:
            shown += os.read(terminal, 4096).decode()
        except OSError:  # the other side has closed it
            break
        if shown.endswith(": "):
            os.write(terminal, next(waiting).encode() + b"\n")
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(terminal)
    return status, shown


def test_questions_on_a_terminal(folder: Path) -> None:
    status, shown = talk(folder, ["lama", "llama", "", "eight", "8", "", ""])
    assert status == 0, shown
    assert "did you mean 'llama'?" in shown
    assert "'eight' is not a whole number" in shown
    assert "config.py is written, for 8 ranks." in shown
    assert "norm='rmsnorm'" in (folder / "config.py").read_text()


@pytest.mark.prove
def test_no_answer_is_wrong_usage_and_yes_asks_nothing(folder: Path) -> None:
    status, shown = talk(folder, [])
    assert status == 2
    assert "no answer" in shown
    status, shown = talk(folder, [], "--yes", "--model", "gpt")
    assert status == 0, shown
    assert (folder / "config.py").exists()
