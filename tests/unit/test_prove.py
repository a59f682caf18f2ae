"""`make prove` resumes: a part runs again exactly when a file that it reads has changed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import durations, prove
from tests.support.paths import ROOT
from tests.support.prove import Part, Record, Result

PART = Part(("tests/unit",), ("tests/unit/other",))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Make a product, a part with two tests, one of which fails when the product is wrong, and other files."""
    files = {
        "setup.cfg": "[tool:pytest]\npythonpath = .\nmarkers = prove: long\n",
        "dslpar/__init__.py": "",
        "dslpar/sums.py": "ONE = 1\n",
        "tests/conftest.py": "",
        "tests/support/shared.py": "",
        "tests/system/helper.py": "from tests.system.below import TWO\n",
        "tests/system/below.py": "TWO = 2\n",
        "tests/system/test_else.py": "",
        "tests/unit/test_sums.py": "import pytest\nfrom dslpar.sums import ONE\nfrom tests.system.helper import TWO\n"
        "def test_one():\n    assert ONE + ONE == TWO\n@pytest.mark.prove\ndef test_two():\n    pass\n",
        "tests/unit/other/test_other.py": "",
        "docs/page.md": "",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("dslpar/sums.py", True),
        ("setup.cfg", True),
        ("tests/conftest.py", True),
        ("tests/support/shared.py", True),
        ("tests/unit/test_sums.py", True),
        ("tests/unit/test_new.py", True),
        ("tests/system/helper.py", True),
        ("tests/system/below.py", True),
        ("tests/system/test_else.py", False),
        ("tests/unit/other/test_other.py", False),
        ("docs/page.md", False),
        ("dslpar/__pycache__/sums.pyc", False),
    ],
)
def test_content_is_what_a_part_reads(checkout: Path, name: str, changes: bool) -> None:
    before, path = prove.content(PART, checkout), checkout / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("ANOTHER = 1\n" + (path.read_text() if path.exists() else ""))
    assert (prove.content(PART, checkout) != before) == changes


TEXTS = (
    "# another\n",
    '"""Another."""\n',
    'ANOTHER: int\n"""Its text."""\n',
    'def f():\n    """Another."""\n    return 1\n',
)


@pytest.mark.parametrize("texts", [False, True])
def test_docstrings_and_comments_count_where_tests_read_them(checkout: Path, texts: bool) -> None:
    part, path = PART._replace(texts=texts), checkout / "dslpar/sums.py"
    for text in TEXTS:
        path.write_text(f"ONE = 1\n{text}")
        before = prove.content(part, checkout)
        path.write_text(
            f"ONE = 1\n{text.replace('nother.', 'nd another.').replace('another', 'and').replace('Its', 'A')}"
        )
        assert (prove.content(part, checkout) != before) == texts
        path.write_text(f"ONE = 2\n{text}")
        assert prove.content(part, checkout) != before


def test_each_part_knows_the_pages_that_its_tests_name() -> None:
    """A page is a string in a test, as in `ROOT / "docs" / "porting.md"`."""
    for name, part in prove.PARTS.items():
        read = {path.name for path in prove._files(ROOT, (*prove.PRODUCT, *part.pages))}
        out = [ROOT / folder for folder in part.without]
        for path in prove._files(ROOT, part.paths):
            source = b"" if path.suffix != ".py" else path.read_bytes()
            if b".md" in source and not any(prove._is_below(path, folder) for folder in out):
                words = re.findall(r"[\w./]+\.md\b", prove._code(source).decode())
                unknown = {word for word in words if (ROOT / "docs" / Path(word).name).exists()} - read
                assert not {word for word in unknown if Path(word).name not in read}, (name, path)


def test_pages_count_where_tests_read_them(checkout: Path) -> None:
    part = PART._replace(pages=("docs",))
    before = prove.content(part, checkout)
    (checkout / "docs/page.md").write_text("another\n")
    assert prove.content(part, checkout) != before


def test_a_new_version_of_a_package_changes_the_content(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert any(line.startswith("torch==") for line in prove.versions())
    before = prove.content(PART, checkout)
    monkeypatch.setattr(prove, "versions", lambda: ["3.11", "torch==99"])
    assert prove.content(PART, checkout) != before


def test_only_what_was_green_at_this_content_is_not_run_again(tmp_path: Path) -> None:
    record = Record(tmp_path / "build" / "prove.json")
    assert record.green("unit", "a") is None
    green, red = Result("a", True, 3, 1.5, 2.5), Result("b", False, 1, 1.0, 1.0)
    record.write("unit", green)
    record.write("layers", red)
    assert Record(record.path).read() == {"unit": green, "layers": red}
    assert record.green("unit", "a") == green
    assert record.green("unit", "b") is None, "another content"
    assert record.green("layers", "b") is None, "red is run again"
    record.write("unit", red)
    assert record.green("unit", "a") is None, "what was shown last counts"


def test_a_part_is_run_and_remembered(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    quiet = ["-q", "-p", "no:cacheprovider"]
    shown = prove.run("unit", PART, quiet, checkout / "build", checkout)
    assert (shown.green, shown.passed) == (True, 2), "with what is marked prove, and without the other part"
    assert shown.cpu_s > 0
    (checkout / "dslpar/sums.py").write_text("ONE = 1 + 1\n")  # another length: bytecode is checked by size and second
    broken = prove.run("unit", PART, quiet, checkout / "build", checkout)
    assert (broken.green, broken.passed) == (False, 1)
    assert broken.content != shown.content


def test_a_part_whose_files_change_while_it_runs_is_not_green(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    writes = "def test_writes():\n    open('dslpar/sums.py', 'a').write('MORE = 1\\n')\n"
    (checkout / "tests/unit/test_writes.py").write_text(writes)
    assert not prove.run("unit", PART, ["-q", "-p", "no:cacheprovider"], checkout / "build", checkout).green


def test_the_table_says_what_was_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = list[str]()

    def run(name: str, *args: object) -> Result:
        ran.append(name)
        return Result("now", name != "kills", 7, 90.0, 100.0)

    monkeypatch.setattr(prove, "content", lambda part: "now")
    monkeypatch.setattr(prove, "run", run)
    record = Record(tmp_path / "prove.json")
    record.write("unit", Result("now", True, 5, 60.0, 110.0))
    assert not prove.prove(["unit", "kills"], record, [])
    assert ran == ["kills"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "unit: green at this content already; --fresh runs it again"
    assert [line.split() for line in lines[2:]] == [
        ["unit", "5", "1.0", "110", "from", "the", "record"],
        ["kills", "7", "1.5", "100", "run:", "RED"],
    ]
    assert prove.prove(["unit"], record, [], fresh=True)
    assert ran == ["kills", "unit"]
    assert not record.read()["kills"].green
    for selects in (["-k", "one"], ["-kone"], ["tests/unit"], ["--lf"]):
        assert prove.prove(["layers"], record, ["-q", *selects])
    assert "layers" not in record.read(), "some of its tests alone"


def test_durations_of_the_last_runs(tmp_path: Path) -> None:
    assert durations.taken(tmp_path / "test.json", tmp_path / "prove.json") == {}
    assert durations.run(["--version"], tmp_path / "test.json") == 0
    Record(tmp_path / "prove.json").write("unit", Result("now", True, 5, 60.0, 110.0))
    found = durations.taken(tmp_path / "test.json", tmp_path / "prove.json")
    assert found["make prove PART=unit"] == (60.0, 110.0)
    wall_s, cpu_s = found["make test"]
    assert 0.05 < cpu_s < 60
    assert wall_s > 0.05


BURN = "import time\nwhile time.process_time() < 0.3: pass"


@pytest.mark.prove  # the tests' own tool, for seconds
@pytest.mark.parametrize("workers", ["0", "2"])
def test_cpu_seconds_of_a_test_are_its_own_and_of_what_it_starts(tmp_path: Path, workers: str) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest, subprocess, sys\n"
        "@pytest.mark.parametrize('row', [1, 2])\n"
        f"def test_burns(row): subprocess.run([sys.executable, '-c', {BURN!r}], check=True)\n"
        "def test_rests(): pass\n"
    )
    found = tmp_path / "build" / "cpu.json"
    words = ["-q", "-n", workers, "-c", os.devnull, "--rootdir", str(tmp_path), str(tmp_path / "test_it.py")]
    plugin = ["-p", "tests.support.cpu_by_test", "--cpu-by-test", str(found)]
    subprocess.run([sys.executable, "-m", "pytest", *plugin, *words], cwd=ROOT, check=True, capture_output=True)
    cpu_s = json.loads(found.read_text())
    assert len(cpu_s) == 3
    assert cpu_s["test_it.py::test_burns[1]"] >= 0.3
    assert cpu_s["test_it.py::test_rests"] < 0.2
    total, *table = durations.by_test(cpu_s)
    assert total.endswith("CPU s in 3 tests")
    assert table[-2].split()[1] == "test_it.py::test_burns"
    assert float(table[-2].split()[0]) >= 0.6
