"""Text corpora: the training and held-out parts, and errors for missing text."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dslpar.core.errors import DslparError
from dslpar.data.corpus import Corpus, File, load_corpus, read, split
from dslpar.layout.resolve import Job, resolve
from dslpar.models.gpt import section
from dslpar.schema import sections


def job(folder: Path | str = "", train: sections.Train | None = None, max_seq_len: int = 16, **data: Any) -> Job:
    made = sections.Spec(
        model=section.GPT(num_layers=1, hidden_size=8, num_heads=2, vocab_size=256, max_seq_len=max_seq_len),
        data=sections.TextData(**data),
        train=train or sections.Train(),
    )
    return resolve(made, 1, str(Path(folder, "cfg.py")))


def names(pieces: tuple[Any, ...]) -> list[str]:
    return [Path(piece.path).name for piece in pieces]


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_the_standard_library_is_there_and_large() -> None:
    corpus = load_corpus(job())
    num_bytes = sum(piece.num_bytes for piece in corpus.train)
    assert num_bytes > 5_000_000
    assert 0.03 < len(corpus.held_out) / len(corpus.train + corpus.held_out) < 0.07
    assert all(path.endswith(".py") for path in names(corpus.train + corpus.held_out))
    assert "argparse.py" in names(corpus.train + corpus.held_out)


def test_no_file_is_in_both_parts_and_none_is_lost(tmp_path: Path) -> None:
    write(tmp_path, **{f"f{i}_txt": f"{i} " * 50 for i in range(40)})
    corpus = load_corpus(job(tmp_path, files=(".",), eval_fraction=0.25))
    assert len(corpus.held_out) == 10
    assert sorted(names(corpus.train) + names(corpus.held_out)) == sorted(f"f{i}.txt" for i in range(40))


def test_the_split_goes_by_name_not_by_place(tmp_path: Path) -> None:
    parts = []
    for place in ("here", "there/deeper"):
        write(tmp_path / place, **{f"f{i}_txt": "text " * 50 for i in range(20)})
        parts.append([names(part) for part in load_corpus(job(tmp_path / place, files=(".",), eval_fraction=0.3))])
    assert parts[0] == parts[1]


def test_a_single_file_is_cut_near_its_end(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefghij" * 10)
    corpus = load_corpus(job(tmp_path, files=("a.txt",), eval_fraction=0.2))
    assert read(corpus.train) == b"abcdefghij" * 8
    assert read(corpus.held_out) == b"abcdefghij" * 2


def test_nothing_is_held_out_of_a_fraction_of_0(tmp_path: Path) -> None:
    write(tmp_path, a_txt="text " * 50, b_txt="text " * 50)
    assert load_corpus(job(tmp_path, files=(".",), eval_fraction=0.0)).held_out == ()
    assert load_corpus(job(tmp_path, files=("a.txt",), eval_fraction=0.0)).held_out == ()


def test_a_file_named_twice_counts_once(tmp_path: Path) -> None:
    write(tmp_path, a_txt="text " * 50, b_txt="text " * 50)
    corpus = load_corpus(job(tmp_path, files=(".", "a.txt"), eval_fraction=0.0))
    assert sorted(names(corpus.train)) == ["a.txt", "b.txt"]


def test_hidden_files_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, a_txt="text " * 50, sub__b_txt="text " * 50)
    (tmp_path / ".secret").write_text("text " * 50)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "c.txt").write_text("text " * 50)
    corpus = load_corpus(job(tmp_path, files=(".",), eval_fraction=0.0))
    assert names(corpus.train) == ["a.txt", "b.txt"]


def test_at_least_one_file_is_held_out_and_never_all() -> None:
    files = [File("a", __file__), File("b", str(Path(__file__).parent / "test_order.py"))]
    for fraction in (0.01, 0.5, 0.99):
        corpus: Corpus = split(files, fraction)
        assert (len(corpus.train), len(corpus.held_out)) == (1, 1)


@pytest.mark.parametrize(
    ("data", "code", "said"),
    [
        ({"files": ("no.txt",)}, "BAT201", "does not exist"),
        ({"files": ("empty",)}, "BAT201", "holds no files"),
        ({"files": ("short.txt",)}, "BAT203", "9 bytes are to train on, but a sample takes seq_len + 1 = 17"),
        ({"files": ("short.txt",), "seq_len": 8, "eval_fraction": 0.0}, "", ""),
    ],
)
def test_what_cannot_be_trained_on_is_said(tmp_path: Path, data: dict[str, Any], code: str, said: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "short.txt").write_text("123456789")
    if not code:
        load_corpus(job(tmp_path, **data))
        return
    with pytest.raises(DslparError) as caught:
        load_corpus(job(tmp_path, **data))
    (finding,) = caught.value.findings
    assert finding.code == code
    assert said in finding.message
    assert finding.help


def test_what_cannot_be_read_is_said_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read everything, so the system's permission check is replaced."""
    write(tmp_path, corpus__a_txt="text " * 50)
    link, pipe, folder = (tmp_path / "corpus" / name for name in ("link.txt", "pipe", "folder"))
    link.symlink_to("gone.txt")

    def said(*files: str) -> str:
        with pytest.raises(DslparError) as error:
            load_corpus(job(tmp_path, files=files))
        (finding,) = error.value.findings
        assert (finding.code, finding.key) == ("BAT201", "data.files")
        return finding.message

    assert said("corpus") == f"{str(link)!r} is a link to 'gone.txt', which does not exist"
    assert said("corpus/link.txt") == f"{str(link)!r} is a link to 'gone.txt', which does not exist"
    link.unlink()
    os.mkfifo(pipe)
    assert said("corpus") == f"{str(pipe)!r} is not a file, but a device, a pipe or a socket"
    pipe.unlink()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert said("corpus/a.txt") == f"{str(tmp_path / 'corpus/a.txt')!r} may not be read by this user"
    monkeypatch.undo()

    folder.mkdir()
    scandir = os.scandir

    def refuse(path: str) -> Any:
        if path == str(folder):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert said("corpus") == f"cannot list {str(folder)!r}: Permission denied"


def test_evaluation_needs_held_out_text(tmp_path: Path) -> None:
    write(tmp_path, a_txt="text " * 50)
    load_corpus(job(tmp_path, files=("a.txt",), eval_fraction=0.0))
    with pytest.raises(DslparError, match="held out") as caught:
        load_corpus(job(tmp_path, files=("a.txt",), eval_fraction=0.0, train=sections.Train(eval_interval=5)))
    assert "data.eval_fraction" in caught.value.findings[0].help


def test_a_model_that_says_nothing_of_length_needs_seq_len() -> None:
    other = sections.Spec(model=sections.OtherModel(target="a.B"))
    with pytest.raises(DslparError, match="BAT202"):
        load_corpus(resolve(other, 1, "cfg.py"))


def test_a_step_of_more_samples_than_the_text_has_is_refused(tmp_path: Path) -> None:
    """With a mistyped micro_size, the first step would never end."""
    write(tmp_path, a_txt="x" * 161)  # ten samples of sixteen tokens
    spec = job(tmp_path, files=("a.txt",), eval_fraction=0.0).spec
    for micro_size, fits in ((10, True), (11, False), (10**9, False)):
        sized = resolve(replace(spec, batch=sections.Batch(micro_size=micro_size)), 1, str(tmp_path / "cfg.py"))
        if fits:
            load_corpus(sized)
            continue
        with pytest.raises(DslparError, match=f"BAT210.*{micro_size} samples, but the text has 10 of 16 tokens"):
            load_corpus(sized)
