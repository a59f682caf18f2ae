"""The page of `dslpar show --format html` in a real browser: no error, no request, and hovering over ranks works."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dslpar.cli.main import main
from tests.support.chromium import Browser, executable
from tests.support.lint import MODEL

pytestmark = [
    pytest.mark.prove,  # a browser takes some ten seconds to start on two busy cores
    pytest.mark.skipif(executable() is None, reason="no Chromium on PATH (Debian: apt-get install chromium)"),
]
CONFIG = (
    MODEL.replace("num_layers=8", "num_layers=32").replace("hidden_size=96", "hidden_size=6144")
    + "parallel = dict(pipeline=4, tensor=dict(size=2, mode='1d'))\nbatch = dict(accumulation=8)\n"
    "cluster = dict(device='h100-80g')\n"
)
PEERS = "[...document.querySelectorAll('.rank.peer')].map((each) => Number(each.dataset.rank))"
TOLD = "document.getElementById('mesh-told').textContent"
PAPER = "getComputedStyle(document.body).backgroundColor"
LIGHT, DARK = "rgb(255, 255, 255)", "rgb(15, 20, 25)"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as made:
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a page with everything on it, whose file name would be a script."""
    made = tmp_path_factory.mktemp("shown")
    outputs = made / "outputs"
    outputs.mkdir()
    records = "".join(f'{{"step": {step}, "loss": {9 / step}, "eval_loss": {10 / step}}}\n' for step in range(1, 40))
    (outputs / "metrics.jsonl").write_text(records)
    config = made / "<img src=x onerror=alert(1)>.py"
    config.write_text(CONFIG + f"train = dict(output_dir={str(outputs)!r})\n")
    argv = ["show", str(config), "--world-size", "64", "--format", "html", "--output-dir", str(made / "pages")]
    assert main(argv) == 0
    return made / "pages"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_loads_without_an_error_and_asks_for_nothing(browser: Browser, folder: Path, scheme: str) -> None:
    browser.problems.clear()
    browser.requests.clear()
    browser.open(folder / "page.html", scheme)
    assert browser.evaluate(PAPER) == (DARK if scheme == "dark" else LIGHT)
    drawn = browser.evaluate("[...document.querySelectorAll('svg')].map((each) => each.getBoundingClientRect().height)")
    assert len(drawn) == 6
    assert min(drawn) > 50
    assert browser.evaluate("document.querySelectorAll('img').length") == 0
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert browser.screenshot()[:4] == b"\x89PNG"
    assert browser.problems == []
    assert {address.partition(":")[0] for address in browser.requests} <= {"file", "data"}
    assert [address for address in browser.requests if address.startswith("file:")] == [(folder / "page.html").as_uri()]


def test_a_page_of_one_rank_has_no_axes(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "cfg.py").write_text(MODEL)
    assert (
        main(["show", str(tmp_path / "cfg.py"), "--world-size", "1", "--format", "html", "--output-dir", str(tmp_path)])
        == 0
    )
    browser.problems.clear()
    browser.open(tmp_path / "page.html")
    browser.point_at(".rank")
    assert browser.evaluate("document.querySelectorAll('.controls').length") == 0
    assert browser.problems == []


def test_pointing_at_a_rank_marks_its_group(browser: Browser, folder: Path) -> None:
    browser.open(folder / "page.html")
    assert browser.evaluate(PEERS) == []
    browser.point_at('[data-rank="5"]')
    assert browser.evaluate(PEERS) == [5, 21, 37, 53]
    assert browser.evaluate(TOLD) == "rank 5: pipe 0, data 2, tensor 1. Its group on axis pipe: 5, 21, 37, 53"
    browser.point_at('button[data-axis="data"]')
    assert browser.evaluate(PEERS) == [1, 3, 5, 7, 9, 11, 13, 15]
    browser.click('button[data-axis="tensor"]')
    assert browser.evaluate("document.querySelector('[aria-pressed=true]').dataset.axis") == "tensor"
    browser.point_at('[data-rank="40"]')
    assert browser.evaluate(PEERS) == [40, 41]
    browser.point_at("h1")
    assert browser.evaluate(PEERS) == []
    browser.click('[data-rank="8"]')
    browser.point_at("h1")
    assert browser.evaluate(PEERS) == [8, 9]


def test_the_keyboard_does_too(browser: Browser, folder: Path) -> None:
    browser.open(folder / "page.html")
    browser.point_at("h1")
    browser.evaluate("document.querySelector('.rank').focus()")
    browser.press("ArrowRight", 39)
    browser.press("ArrowDown", 40)
    assert browser.evaluate("document.activeElement.dataset.rank") == "9"
    assert browser.evaluate(PEERS) == [9, 25, 41, 57]
    assert browser.evaluate("document.querySelectorAll('.rank[tabindex=\"0\"]').length") == 1


def test_the_button_switches_the_scheme(browser: Browser, folder: Path) -> None:
    browser.open(folder / "page.html", "dark")
    assert browser.evaluate("document.getElementById('theme').textContent") == "Light"
    browser.click("#theme")
    assert browser.evaluate(PAPER) == LIGHT
    browser.click("#theme")
    assert browser.evaluate(PAPER) == DARK


def test_without_scripts_all_is_there(browser: Browser, folder: Path) -> None:
    browser.open(folder / "page.html", scripts=False)
    assert browser.evaluate("getComputedStyle(document.getElementById('mesh-controls')).display") == "none"
    assert browser.evaluate("document.querySelectorAll('svg').length") == 6
    assert browser.evaluate("document.querySelectorAll('table').length") == 6
    browser.click("details summary")
    assert browser.evaluate("document.querySelector('table').getBoundingClientRect().height") > 50


def test_a_script_that_somebody_slips_in_is_not_run(browser: Browser, folder: Path, tmp_path: Path) -> None:
    """Even if a text were not escaped, the page's policy would block it."""
    page = tmp_path / "page.html"
    slipped = "<script>document.title = 'run'</script><img src=x onerror=\"document.title = 'run'\"></main>"
    page.write_text((folder / "page.html").read_text().replace("</main>", slipped))
    browser.problems.clear()
    browser.open(page)
    assert browser.evaluate("document.title") != "run"
    assert any("Content Security Policy" in problem for problem in browser.problems)


@pytest.mark.parametrize("name", ["mesh", "stages", "schedule", "memory", "traffic", "losses"])
def test_each_picture_is_shown_by_itself(browser: Browser, folder: Path, name: str) -> None:
    browser.problems.clear()
    for scheme, ink in (("light", "rgb(31, 35, 40)"), ("dark", "rgb(230, 237, 243)")):
        browser.open(folder / f"{name}.svg", scheme)
        colors = browser.evaluate("[...document.querySelectorAll('text')].map((each) => getComputedStyle(each).fill)")
        assert ink in colors
    assert browser.problems == []
