"""A name of ColossalAI that is not here is refused with what to write instead."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

from dslpar.compat import colossalai, missing
from tests.support import ported_programs as ported


@pytest.mark.parametrize("kind", ported.REFUSED, ids=lambda kind: kind.line)
def test_the_first_missing_name_of_a_program_tells_what_to_write(kind: ported.Refused) -> None:
    with pytest.raises(ImportError) as error:
        exec(ported.with_import_lines(kind.line + "\n"), {})
    assert kind.instead in str(error.value)
    assert "is not in dslpar.compat" in str(error.value)


def test_the_porting_guide_counts_the_programs() -> None:
    claim = f"{len(ported.RUNNING)} of {len(ported.KINDS)} launch programs of ColossalAI-Examples"
    assert claim in " ".join(ported.PORTING.read_text().split())
    assert len(ported.RUNNING) >= 30


@pytest.mark.parametrize(
    ("line", "after"),
    [
        ("import colossalai", "from dslpar.compat import colossalai"),
        ("    import colossalai.nn as col_nn", "    import dslpar.compat.colossalai.nn as col_nn"),
        ("from colossalai import nn", "from dslpar.compat.colossalai import nn"),
        ("from colossalai.amp import AMP_TYPE", "from dslpar.compat.colossalai.amp import AMP_TYPE"),
        ("from colossalai_utils import x", "from colossalai_utils import x"),
        ("engine = colossalai.initialize(model)", "engine = colossalai.initialize(model)"),
    ],
)
def test_import_lines_are_all_that_changes(line: str, after: str) -> None:
    assert ported.with_import_lines(line + "\n") == after + "\n"


@pytest.mark.parametrize("path", sorted(missing._MODULE_OF))
def test_each_module_of_colossalai_has_the_names_of_a_module_here(path: str) -> None:
    module = import_module(f"{missing.PACKAGE}.{path}")
    assert module.__name__.endswith(path)
    other = import_module(f"dslpar.compat.{missing._MODULE_OF[path]}")
    name = next(name for name, value in vars(other).items() if callable(value) and name[0] != "_")
    assert getattr(module, name) is getattr(other, name)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("nn.Matmul_AB_2D", "write dslpar.layers.Linear"),
        ("nn.layer.parallel_2d.Matmul_AB_2D", "write dslpar.layers.Linear"),
        ("context.MOE_CONTEXT", "dslpar.layers.Mixture"),
        ("utils.checkpoint.load_checkpoints", "docs/porting.md"),
    ],
)
def test_explanations(path: str, text: str) -> None:
    assert text in missing.explain(path)


def test_an_unknown_name_is_an_attribute_error_with_the_nearest_one() -> None:
    with pytest.raises(AttributeError, match="'MultTimer'; did you mean 'MultiTimer'"):
        colossalai.utils.MultTimer  # noqa: B018
    assert not hasattr(colossalai, "nothing_of_the_sort")


def test_a_missing_name_of_parallel_mode_is_near_others() -> None:
    with pytest.raises(AttributeError, match="PARALLEL_1D"):
        colossalai.ParallelMode.PARALLEL_1  # noqa: B018


def test_no_name_is_both_here_and_missing() -> None:
    """A name that is here would never be explained, and one in the table would never be found."""
    modules = [value for value in vars(colossalai).values() if type(value) is type(missing)]
    here = {name for module in modules for name in getattr(module, "__all__", ())}
    assert here
    assert not here & missing._INSTEAD.keys()


@pytest.mark.prove  # three seconds; a program that imports both would end with an ImportError, and lose nothing
def test_the_finder_leaves_other_packages_alone() -> None:
    code = (
        "import dslpar.compat.colossalai\nfrom importlib.util import find_spec\n"
        "print(find_spec('dslpar.compat.nothing'), find_spec('x_y'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "None None"
