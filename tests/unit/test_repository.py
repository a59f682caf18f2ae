"""The repository: imports stay light, every package ships, and no file has a trace of a machine.

Each check that could pass by checking nothing has a companion test that shows it fail.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from configparser import ConfigParser
from pathlib import Path

import pytest

from dslpar.core import requirements
from tests.support.paths import ROOT
from tests.support.prove import PARTS

HEAVY = {"torch", "deepspeed", "numpy", "yaml", "mpi4py"}
CONFIG = "configs/libai/data_tensor_pipeline.py"


def run(*command: str, cwd: Path = ROOT, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, env={**os.environ, **(env or {})}, capture_output=True, text=True)


def files(*suffixes: str) -> list[Path]:
    """Return files that git tracks or would track, with these suffixes, or all files."""
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if listed.returncode:
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    return [path for path in paths if path.is_file() and path.name.endswith(suffixes or ("",))]


# Imports stay light ---------------------------------------------------------------------------------------------


def heavy_imports(*arguments: str) -> set[str]:
    """Return heavy packages that `python *arguments` imports. It must exit with 0."""
    ran = run(sys.executable, "-X", "importtime", *arguments)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "import time:" in ran.stderr
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in ran.stderr.splitlines()} & HEAVY


@pytest.mark.parametrize(
    "arguments",
    [
        ["-c", "import dslpar"],
        ["-c", "import dslpar; dslpar.load, dslpar.lint, dslpar.resolve"],
        ["-m", "dslpar.cli", "lint", CONFIG, "--world-size", "8"],
        ["-m", "dslpar.cli", "show", CONFIG, "--world-size", "8", "--format", "json"],
    ],
    ids=["import", "names", "lint", "show"],
)
def test_nothing_heavy_is_imported(arguments: list[str]) -> None:
    assert heavy_imports(*arguments) == set()


def test_a_heavy_import_would_be_seen() -> None:
    assert heavy_imports("-c", "import dslpar, yaml, numpy.linalg") == {"yaml", "numpy"}


def test_layers_has_one_import_name() -> None:
    ran = run(sys.executable, "-c", "import layers")
    assert ran.returncode == 1
    assert "import this package as dslpar.layers, not as layers" in ran.stderr


# The package ------------------------------------------------------------------------------------------------------


def listed_packages() -> set[str]:
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    return set(setup["options"]["packages"].split())


def packages_of(root: Path) -> set[str]:
    """Return dotted names of the folders with modules in the checkout at `root`, and of the example configs."""
    shipped = {"dslpar": root / "dslpar", "dslpar.layers": root / "layers", "dslpar.shipped_configs": root / "configs"}
    return {
        ".".join([name, *module.parent.relative_to(folder).parts])
        for name, folder in shipped.items()
        for module in folder.rglob("*.py")
    }


def test_every_package_is_listed() -> None:
    assert packages_of(ROOT) == listed_packages()


def test_a_missing_package_would_be_seen(tmp_path: Path) -> None:
    (tmp_path / "dslpar" / "new" / "deeper").mkdir(parents=True)
    (tmp_path / "dslpar" / "new" / "deeper" / "module.py").touch()
    assert packages_of(tmp_path) == {"dslpar.new.deeper"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return this checkout's wheel, built from a copy so that no build folder is left here."""
    copy = tmp_path_factory.mktemp("checkout")
    for path in files():
        target = copy / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    built = run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "out", cwd=copy)
    assert built.returncode == 0, built.stdout + built.stderr
    return next((copy / "out").glob("*.whl"))


def test_the_wheel_holds_dslpar_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"dslpar"}
    modules = {path.relative_to(ROOT).as_posix() for path in files(".py")}
    here = {name for name in modules if name.startswith("dslpar/")}
    here |= {f"dslpar/{name}" for name in modules if name.startswith("layers/")}
    here |= {name.replace("configs/", "dslpar/shipped_configs/", 1) for name in modules if name.startswith("configs/")}
    assert {name for name in names if name.endswith(".py")} == here
    data = {path.relative_to(ROOT).as_posix() for path in files() if path.suffix != ".py"}
    shipped = {name for name in names if not name.endswith(".py") and ".dist-info/" not in name}
    assert shipped == {name for name in data if name.startswith("dslpar/")}
    assert {Path(name).suffix for name in shipped} >= {".css", ".js", ".json", ".md", ".txt"}


def test_the_wheel_has_the_extras_of_the_readme(wheel: Path) -> None:
    """`pip` installs a git address and a checkout through such a wheel, too; an unknown extra is only a warning."""
    archive = zipfile.ZipFile(wheel)
    (metadata,) = [archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA")]
    readme = (ROOT / "README.md").read_text()
    listed = re.search(r"^Extras: (.*)$", readme, re.MULTILINE)
    assert listed is not None
    named = set(re.findall(r"`(\w+)` \(", listed[1])) | set(
        ",".join(re.findall(r"dslpar\[([\w,]+)\]", readme)).split(",")
    )
    assert {"hf", "data", "mpi", "plot"} <= named
    provided = set(re.findall(r"^Provides-Extra: (\S+)$", metadata, re.MULTILINE))
    assert named == provided - {"docs", "test"}
    assert all(re.search(rf"^Requires-Dist: .*extra == \"{extra}\"", metadata, re.MULTILINE) for extra in named)
    entry = next(archive.read(name).decode() for name in archive.namelist() if name.endswith("/entry_points.txt"))
    assert "dslpar = dslpar.cli.main:run" in entry


@pytest.mark.prove
def test_the_wheel_works_elsewhere(wheel: Path, tmp_path: Path) -> None:
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    installed = run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel))
    assert installed.returncode == 0, installed.stderr
    env = {"PYTHONPATH": str(site)}
    where = run(
        sys.executable,
        "-c",
        "import dslpar, dslpar.layers as layers; print(dslpar.__file__, layers.__file__, layers.Linear.__module__)",
        cwd=elsewhere,
        env=env,
    )
    package = site / "dslpar"
    assert where.stdout.split() == [
        str(package / "__init__.py"),
        str(package / "layers" / "__init__.py"),
        "dslpar.layers.linear",
    ], where.stderr
    shutil.copy(ROOT / CONFIG, elsewhere / "mine.py")
    text = (elsewhere / "mine.py").read_text()
    (elsewhere / "mine.py").write_text(
        text.replace("from ..common.train import train", 'train = get_config("common/train.py").train')
        .replace("from ..common.models.gpt", "from .gpt")
        .replace("\n\nfrom", "\n\nfrom dslpar.config import get_config\nfrom", 1)
    )
    shutil.copy(ROOT / "configs/common/models/gpt.py", elsewhere)
    lint = run(sys.executable, "-m", "dslpar.cli", "lint", "mine.py", "--world-size", "8", cwd=elsewhere, env=env)
    assert lint.returncode == 0, lint.stdout + lint.stderr
    explain = run(sys.executable, "-m", "dslpar.cli", "explain", "CKP211", "TEN201", cwd=elsewhere, env=env)
    assert explain.stdout.startswith("CKP211 output-dir-in-use (error)\n\nAnother run writes"), explain.stderr
    assert "A rank computes whole heads." in explain.stdout


LIGHT = ("psutil", "PyYAML")
"""What `pip install dslpar` brings; test_the_light_install_requires_these compares."""


@pytest.fixture(scope="module")
def light(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a fresh environment with the wheel and what it requires, and no other package.

    The requirements are copied from this environment, so that no network is needed; tests/unit/test_pre_commit.py
    installs them with pip.
    """
    folder = tmp_path_factory.mktemp("light") / "env"
    assert run(sys.executable, "-m", "venv", "--without-pip", str(folder)).returncode == 0
    site = next(folder.glob("lib/python*/site-packages"))
    for name in LIGHT:
        distribution = importlib.metadata.distribution(name)
        for file in distribution.files or ():
            if ".." not in file.parts and "__pycache__" not in file.parts:
                (site / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(str(distribution.locate_file(file)), site / file)
    pip = (sys.executable, "-m", "pip", "--python", str(folder / "bin/python"))
    installed = run(*pip, "install", "--quiet", "--no-deps", "--no-index", "--no-compile", str(wheel))
    assert installed.returncode == 0, installed.stderr
    checked = run(*pip, "check")
    assert checked.returncode == 0, checked.stdout
    return folder


def light_run(light: Path, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a program of the light environment in a folder, with none of this environment's packages."""
    program, *rest = words
    env = {"PATH": f"{light / 'bin'}:/usr/bin:/bin", "HOME": str(cwd), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [str(light / "bin" / program), *rest]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)


def test_the_light_install_requires_these(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (metadata,) = [archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA")]
    required = re.findall(r"^Requires-Dist: ([\w.-]+)[^;\n]*$", metadata, re.MULTILINE)
    assert sorted(required, key=str.lower) == sorted(LIGHT, key=str.lower)


def test_the_light_install_is_small(light: Path) -> None:
    """Without bytecode, which Python may write later; that doubles it."""
    site = next(light.glob("lib/python*/site-packages"))
    assert 4e6 < sum(file.stat().st_size for file in site.rglob("*") if file.is_file()) < 10e6


def test_the_light_install_checks_plans_and_converts(light: Path, tmp_path: Path) -> None:
    shutil.copy(ROOT / "configs/gpt_3d.py", tmp_path)
    (tmp_path / "bad.yaml").write_text("model: {type: GTP}\n")
    (tmp_path / "ds.json").write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 1}}')
    on_8 = ("gpt_3d.py", "--world-size", "8")
    for words, status, text in (
        (("lint", *on_8), 0, ""),
        (("lint", "bad.yaml"), 1, "unknown model 'GTP'"),
        (("show", *on_8), 0, "pipeline"),
        (("plan", *on_8, "--device", "a100-80g"), 0, "memory"),
        (("config", *on_8), 0, "train.steps"),
        (("diff", *on_8, "gpt_3d.py"), 0, ""),
        (("explain", "TEN103"), 0, "not-a-cube"),
        (("import", "ds.json", "-o", "-"), 1, "global_size"),  # 1: the result has no model
        (("schema",), 0, '"$schema"'),
        (("init", "mine.py", "--model", "gpt", "--gpus", "8"), 0, "mine.py"),
        (("completion", "bash"), 0, "complete -F _dslpar dslpar"),
        (("__complete", "show", "gpt_3d.py", "parallel.tensor.mo"), 0, "parallel.tensor.mode="),
    ):
        ran = light_run(light, tmp_path, "dslpar", *words)
        assert ran.returncode == status, (words, ran.stdout, ran.stderr)
        assert text in ran.stdout, (words, ran.stdout, ran.stderr)


def test_the_light_install_lists_runs(light: Path, tmp_path: Path) -> None:
    """Without xxhash, it cannot check the digest of a checkpoint's manifest, and says so."""
    run = tmp_path / "outputs" / "one"
    run.mkdir(parents=True)
    (run / "resolved.json").write_text("{}")
    (run / "metrics.jsonl").write_text('{"step": 7, "loss": 2.5}\n')
    ran = light_run(light, tmp_path, "dslpar", "runs", "list", "--format", "json")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert [(each["name"], each["step"]) for each in json.loads(ran.stdout)] == [("one", 7)]
    (run / "checkpoints" / "step_000007").mkdir(parents=True)
    ran = light_run(light, tmp_path, "dslpar", "runs", "list", "--format", "json")
    assert (ran.returncode, ran.stderr) == (
        0,
        "note: the checkpoints' manifests are not checked: that needs xxhash, which is not installed: "
        "pip install 'dslpar[train]'\n",
    )
    assert [each["checkpoint"] for each in json.loads(ran.stdout)] == ["step_000007"]


def test_what_the_light_install_lacks_is_said_in_one_line(light: Path, tmp_path: Path) -> None:
    shutil.copy(ROOT / "configs/gpt_3d.py", tmp_path)
    (tmp_path / "corpus.txt").write_text("text")
    saved = tmp_path / "run" / "checkpoints" / "step_000001"
    saved.mkdir(parents=True)
    manifest = {"format": 2, "step": 1, "fixed": {}, "files": {}, "digest": "0" * 32}
    (saved / "checkpoint.json").write_text(json.dumps(manifest))
    to_train = "which is not installed: pip install 'dslpar[train]'"
    for words in (
        ("prove", "gpt_3d.py", "--world-size", "8"),
        ("measure",),
        ("plan", "gpt_3d.py", "--world-size", "8", "--device", "a100-80g", "--dry-run"),
        ("eval", "run"),
        ("generate", "run", "--prompt", "a"),
        ("checkpoint", "list", "run"),
        ("data", "tokenize", "corpus.txt", "-o", "tokens"),
        ("launch", "gpt_3d.py", "--world-size", "8", "--launcher", "torchrun"),
    ):
        ran = light_run(light, tmp_path, "dslpar", *words)
        assert ran.returncode == 2, (words, ran.stderr)
        assert re.search(rf"(?m)^dslpar {words[0]} needs \w+, {re.escape(to_train)}\Z", ran.stderr.strip()), ran.stderr
        assert "Traceback" not in ran.stderr
    ran = light_run(light, tmp_path, "dslpar", "lsp")
    assert ran.stderr == "dslpar lsp needs lsprotocol, which is not installed: pip install 'dslpar[lsp]'\n"
    ran = light_run(light, tmp_path, "python", "-m", "dslpar.training", "--config", "gpt_3d.py")
    assert (ran.returncode, ran.stderr) == (1, f"dslpar.training needs torch, {to_train}\n")
    for script in ("train.py", "tools/train_net.py"):
        ran = light_run(light, tmp_path, "python", str(ROOT / script), "--config", "gpt_3d.py")
        assert (ran.returncode, ran.stderr) == (1, f"{script} needs torch, {to_train}\n")
    for code, user in (
        ("import dslpar; dslpar.start", "dslpar.start"),
        ("from dslpar import fit", "dslpar.fit"),
        ("import dslpar.layers", "dslpar.layers"),
        ("from dslpar.models import GPT", "dslpar.models.GPT"),
        ("from dslpar.compat import colossalai", "dslpar.compat.colossalai"),
    ):
        ran = light_run(light, tmp_path, "python", "-c", code)
        assert re.search(rf"(?m)^ImportError: {user} needs \w+, {re.escape(to_train)}\Z", ran.stderr.strip()), (
            ran.stderr
        )
        assert "ModuleNotFoundError" not in ran.stderr


def test_the_extras_of_setup_cfg_have_the_packages_that_messages_name() -> None:
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    listed = {"": setup["options"]["install_requires"], **setup["options.extras_require"]}
    distributions = {"PIL": "pillow", "yaml": "pyyaml"}
    for extra, packages in requirements.EXTRAS.items():
        named = {re.split("[<>=]", line)[0].lower() for line in listed[extra].split("\n") if line}
        assert named == {distributions.get(each, each) for each in packages}, extra


# The tree -------------------------------------------------------------------------------------------------------

MACHINE = re.compile(r"/(?:work|root|opt/pypi|opt/wheels)(?:/|\b)")


def traces(paths: Iterable[Path]) -> list[str]:
    """Return `path:line: text` of lines that name a folder of somebody's machine."""
    found = []
    for path in paths:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        found += [f"{path}:{number}: {line}" for number, line in enumerate(lines, 1) if MACHINE.search(line)]
    return found


def test_no_file_names_a_machine() -> None:
    assert traces(path for path in files() if path != Path(__file__)) == []


def test_a_trace_would_be_seen(tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text('HERE = "/' + 'root/dslpar"\nTHERE = "work/main"\n')
    assert len(traces([tmp_path / "file.py"])) == 1


def _opens_with_docstring(source: str) -> bool:
    return re.match(r'r?"""\s*\S', source) is not None or bool(ast.get_docstring(ast.parse(source)))


def test_every_module_says_what_it_is() -> None:
    configs = {"configs", "foreign_configs"}
    modules = [path for path in files(".py") if configs.isdisjoint(path.relative_to(ROOT).parts)]
    # To parse the modules takes seconds: most open with their docstring.
    silent = [path for path in modules if not _opens_with_docstring(path.read_text())]
    assert modules
    assert silent == []


def test_pyproject_holds_only_what_setup_cfg_cannot() -> None:
    tables = re.findall(r"(?m)^\[+(.*?)\]+\s*(?:#.*)?$", (ROOT / "pyproject.toml").read_text())
    assert "build-system" in tables
    assert all(table == "build-system" or table.startswith("tool.ruff") for table in tables)


def test_the_readme_shows_the_example_as_it_is() -> None:
    shown = re.search(r"```python\n# configs/gpt_3d.py\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = (ROOT / "configs/gpt_3d.py").read_text().splitlines(keepends=True)
    assert shown is not None
    assert shown[1] == "".join(line for line in lines if not line.startswith("#"))


# The pages ------------------------------------------------------------------------------------------------------


def dead_links(pages: Iterable[Path]) -> list[str]:
    """Return `page: target` of dead relative links."""
    found = []
    for page in pages:
        targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
        found += [f"{page}: {name}" for name in targets if "://" not in name and not (page.parent / name).exists()]
    return found


def test_links_lead_somewhere() -> None:
    pages = files(".md")
    assert len(pages) > 10
    assert dead_links(pages) == []


def test_a_dead_link_would_be_seen(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("[here](page.md), [there](https://example.org), [nowhere](gone.md#part)\n")
    assert dead_links([tmp_path / "page.md"]) == [f"{tmp_path / 'page.md'}: gone.md"]


def test_no_file_cites_a_text_that_is_not_here() -> None:
    """Comments may cite facts, or a page of docs/, but no private documents of the authors."""
    cited = re.compile(r"\b(?:DE" + r"SIGN|FA" + r"CTS|ST" + r"YLE)\b")
    texts = {
        path: path.read_text(encoding="utf-8", errors="replace") for path in files(".py", ".md", ".cfg", "Makefile")
    }
    assert [str(path) for path, text in texts.items() if cited.search(text)] == []


def test_the_readme_is_short() -> None:
    assert (ROOT / "README.md").read_text().count("\n") <= 150


def test_every_patch_of_deepspeed_has_a_record_and_a_test() -> None:
    """docs/architecture.md shows the records; a test fails when DeepSpeed no longer needs the patch."""
    from dslpar.engine.deepspeed_patch_table import AFTER, BEFORE, DURING, PATCHES

    modules = [ast.parse(path.read_text()) for path in (ROOT / "dslpar/distributed/deepspeed_patches").glob("*.py")]
    functions = [node for module in modules for node in module.body if isinstance(node, ast.FunctionDef)]
    numbers = {node.name: re.match(r"M(\d+)(?=\. )", ast.get_docstring(node) or "") for node in functions}
    there = {(name, int(number[1])) for name, number in numbers.items() if number}
    assert {(patch.function, patch.number) for patch in PATCHES} == there
    assert len(PATCHES) == len(there) > 5
    for patch in PATCHES:
        text, number = (ROOT / "tests/distributed" / patch.test).read_text(), f"M{patch.number}"
        assert f"def test_{number.lower()}_" in text or f"{number}:" in text or f"{number})" in text, patch
        for place in () if patch.where in (BEFORE, DURING, AFTER) else patch.where.split(", "):
            assert f"deepspeed_patches.{patch.function}(" in (ROOT / "dslpar" / place).read_text(), patch


def test_every_test_is_in_one_part_of_prove() -> None:
    """`make prove PART=...`, part by part, runs each test file once."""
    found: list[str] = []
    for part in PARTS.values():
        inside = [path.relative_to(ROOT).as_posix() for top in part.paths for path in (ROOT / top).rglob("test_*.py")]
        found += [path for path in inside if not any(path.startswith(f"{other}/") for other in part.without)]
    there = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    assert there
    assert sorted(found) == sorted(there)


def test_an_unknown_part_of_prove_is_refused() -> None:
    refused = run(sys.executable, "-m", "tests.support.prove", "--part", "nothing", "--list")
    assert refused.returncode == 2
    assert "'nothing' (choose from" in refused.stderr
    assert "part-exists" in run("make", "-n", "--debug=basic", "prove", "PART=nothing").stdout, "before lint"


@pytest.mark.parametrize(
    "target", ["setup", "demo", "test", "prove", "parts", "lint", "bench", "docs", "vscode", "gpu", "gpu-wheels"]
)
def test_make_has(target: str) -> None:
    planned = run("make", "-n", target)
    assert planned.returncode == 0, planned.stderr


# ---- text that leaves ----

_VISIBLE = {"visible", "visible_lines", "json_text"}


def bare_texts(tree: ast.AST) -> list[int]:
    """Return lines that print, or write to a standard stream, composed text that is not made visible."""
    found = []
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if _writes(call.func):
            found += [text.lineno for argument in call.args for text in _put_together(argument)]
    return found


def _writes(function: ast.expr) -> bool:
    if isinstance(function, ast.Attribute) and function.attr == "write":
        return ast.unparse(function.value).endswith(("stdout", "stderr"))
    return isinstance(function, ast.Name) and function.id == "print"


def _put_together(node: ast.AST) -> Iterator[ast.JoinedStr]:
    if isinstance(node, ast.Call) and ast.unparse(node.func) in _VISIBLE:
        return
    if isinstance(node, ast.JoinedStr):
        yield node
    for child in ast.iter_child_nodes(node):
        yield from _put_together(child)


def test_text_is_made_visible_where_it_leaves() -> None:
    """A file name that is printed raw may control the terminal (dslpar/core/visible.py)."""
    found = {path: bare_texts(ast.parse(path.read_text())) for path in sorted((ROOT / "dslpar").rglob("*.py"))}
    assert {str(path.relative_to(ROOT)): lines for path, lines in found.items() if lines} == {}
    assert bare_texts(ast.parse("print(f'{path} is written')")) == [1]
    assert bare_texts(ast.parse("sys.stderr.write(visible(f'{path} is written') + '\\n')")) == []


FREE = (
    "tests.properties.invariance",
    "tests.properties.families",
    "tests.properties.schedules",
    "tests.properties.context_parallel",
)
"""Folders whose tables of layouts and models other folders also run."""


def _of_other_folders(path: Path) -> Iterator[str]:
    """Yield modules that a test module imports from another folder of tests, except tests/support."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)) if re.search(r"\btests\.(?!support\b)", source) else ():
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            if not name.startswith("tests.") or name.startswith(("tests.support", *FREE)):
                continue
            target = ROOT / name.replace(".", "/")
            folder = target if target.is_dir() else target.parent
            if folder != path.parent and folder not in path.parents and path.parent not in folder.parents:
                yield name


def test_what_tests_of_several_folders_share_is_in_support(tmp_path: Path) -> None:
    """So a test can be changed, and a folder of tests run or left out, without looking at the others."""
    modules = [path for path in (ROOT / "tests").rglob("*.py") if "support" not in path.relative_to(ROOT).parts]
    assert len(modules) > 300
    assert {str(path): found for path in modules if (found := [*_of_other_folders(path)])} == {}
    bad = tmp_path / "test_bad.py"
    bad.write_text("from tests.support.ranks import on_ranks\nfrom tests.unit.linter.test_fit import TEXT\n")
    assert [*_of_other_folders(bad)] == ["tests.unit.linter.test_fit"]
