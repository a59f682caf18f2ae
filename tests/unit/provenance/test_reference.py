"""The reference lists every field of the spec with its help, and the pages in docs/ are what it prints today."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path

import pytest

from dslpar.cli import main as cli_main
from dslpar.models.gpt import section
from dslpar.provenance.reference import below, help_of, rows
from dslpar.schema import deepspeed_policy, families, sections
from dslpar.schema.keys import aliases_of
from dslpar.schema.torch_optimizers import OPTIMIZERS
from dslpar.schema.torch_schedulers import SCHEDULES
from tests.support.paths import ROOT

CLASSES = [cls for cls in vars(sections).values() if isinstance(cls, type) and is_dataclass(cls)]
CLASSES += families.sections().values()


def test_every_field_of_the_spec_is_listed_with_its_help() -> None:
    listed = {row.field: row for row in rows() if row.field}
    assert set(listed) == {f"{cls.__name__}.{field.name}" for cls in CLASSES for field in fields(cls)}
    for cls in CLASSES:
        for field in fields(cls):
            row = listed[f"{cls.__name__}.{field.name}"]
            assert row.help == help_of(cls, field.name) != ""
            if field.default is not MISSING:
                assert row.default == repr(field.default)


def test_every_row_has_all_that_it_needs() -> None:
    for row in rows():
        assert row.key, row
        assert row.type, row
        assert row.help.endswith((".", ":")), row


def test_every_key_of_the_tables_is_listed() -> None:
    keys = {(row.key, row.of) for row in rows()}
    for name, row in OPTIMIZERS.items():
        assert {(f"optimizer.{arg}", f"type={name!r}") for arg in ("type", *row.args)} <= keys
    for name, known in SCHEDULES.items():
        assert {(f"lr_scheduler.{arg}", f"type={name!r}") for arg in ("type", *known.args)} <= keys
    assert {f"zero.{name}" for name in deepspeed_policy.ZERO} <= {key for key, _ in keys}
    assert {f"deepspeed.{name}" for name in deepspeed_policy.TOP} <= {key for key, _ in keys}


def test_aliases_are_those_of_the_spec() -> None:
    for alias, name in aliases_of(section.GPT).items():
        assert [row.key for row in below(f"model.{alias}")] == [f"model.{name}"]
    assert [row.key for row in below("train.dist.tensor_parallel_size")] == ["parallel.tensor.size"]


def test_a_key_and_all_below_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.main(["config", "--reference", "parallel.pipeline", "--format", "json"]) == 0
    listed = [row["key"] for row in json.loads(capsys.readouterr().out)]
    names = ("size", "stage_ids", "counts", "method")
    assert listed == ["parallel.pipeline", *(f"parallel.pipeline.{name}" for name in names)]


def test_reference_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.main(["config", "--reference", "train.steps"]) == 0
    assert capsys.readouterr().out == (
        "train.steps: a whole number, at least 1 (and below 2**31); default 100\n    Optimizer steps.\n"
    )


# Pages ------------------------------------------------------------------------------------------------------------


def test_the_pages_are_not_stale() -> None:
    ran = subprocess.run([sys.executable, "tools/docs.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_a_stale_page_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import docs  # type: ignore[import-not-found]

    docs.write(tmp_path)
    assert docs.stale(tmp_path) == []
    page = tmp_path / "rules" / "PAR.md"
    page.write_text(page.read_text() + "more\n")
    (tmp_path / "rules" / "GONE.md").write_text("# a family of once\n")
    (tmp_path / "config.md").unlink()
    assert docs.stale(tmp_path) == ["config.md", "rules/GONE.md", "rules/PAR.md"]


def test_links_lead_somewhere() -> None:
    """Of the pages that are generated, and of the index: files that are there, headings that are in them."""
    pages = [ROOT / "docs" / "README.md", *(ROOT / "docs" / "rules").glob("*.md")]
    checked = 0
    for page in pages:
        for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
            path, _, anchor = target.partition("#")
            linked = page.parent / path
            assert linked.is_file(), (page, target)
            assert not anchor or anchor in _anchors(linked), (page, target)
            checked += 1
    assert checked > 150


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_index_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/README.md has an example; it is run."""
    text = (ROOT / "docs" / "README.md").read_text()
    shown = re.search(r"```\n\$ dslpar (.*)\n((?:.*\n)*?)```", text)
    assert shown is not None
    ran = subprocess.run(
        [sys.executable, "-m", "dslpar.cli", *shown[1].split()], cwd=ROOT, capture_output=True, text=True
    )
    assert ran.stdout == shown[2]


# Rules on a terminal ----------------------------------------------------------------------------------------------


def test_explain_lists_all_rules(capsys: pytest.CaptureFixture[str]) -> None:
    from dslpar.linter.registry import codes

    assert cli_main.main(["explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(codes())


def test_explain_of_codes_names_and_families(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.main(["explain", "ten103", "no-model", "PAR", "TEN103", "--format", "json"]) == 0
    codes = [page["code"] for page in json.loads(capsys.readouterr().out)]
    assert codes[:3] == ["TEN103", "CFG107", "PAR101"]
    assert len(codes) == len(set(codes))
    assert {code[:3] for code in codes[2:]} == {"PAR"}


@pytest.mark.parametrize(
    ("word", "said"),
    [("TEN999", "the families are BAT, CFG"), ("not-a-cub", "did you mean 'not-a-cube'?"), ("", "unknown rule ''")],
)
def test_explain_of_no_rule(word: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli_main.main(["explain", word])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
