"""layers/README.md: its code runs, its tables are true, and every name in them exists."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dslpar import layers
from dslpar.layout.modes import MODES
from tests.support.paths import ROOT
from tests.support.ranks import on_ranks

TEXT = (ROOT / "layers" / "README.md").read_text()
CODE = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
CUBOID = 'TensorMesh(q=2, y=2, mode="2d", residual="hidden")'

COLOSSALAI = re.findall(
    r"\w+",
    """
    Linear Classifier Embedding PatchEmbedding LayerNorm Dropout partition_batch
    Linear1D Linear1D_Col Linear1D_Row Embedding1D Dropout1D Classifier1D VocabParallelClassifier1D
    VocabParallelEmbedding1D LayerNorm1D PatchEmbedding1D
    split_batch_2d reduce_by_batch_2d Linear2D LayerNorm2D Classifier2D PatchEmbedding2D Embedding2D
    VocabParallelEmbedding2D VocabParallelClassifier2D
    split_batch_2p5d reduce_by_batch_2p5d Linear2p5D LayerNorm2p5D Classifier2p5D PatchEmbedding2p5D Embedding2p5D
    VocabParallelEmbedding2p5D VocabParallelClassifier2p5D
    split_batch_3d reduce_by_batch_3d split_tensor_3d Linear3D LayerNorm3D Classifier3D PatchEmbedding3D Embedding3D
    VocabParallelEmbedding3D VocabParallelClassifier3D
    TransformerSelfAttentionRing RingAV RingQK PipelineSharedModuleWrapper
    VanillaLayerNorm VanillaPatchEmbedding VanillaClassifier VanillaLinear DropPath WrappedDropout WrappedDropPath
    CheckpointModule divide ACT2FN set_tensor_parallel_attribute_by_size set_tensor_parallel_attribute_by_partition
    get_tensor_parallel_mode to_2tuple
    EPExperts TPExperts Top1Router Top2Router MoeLayer MoeModule MoeRouter NormalNoiseGenerator UniformNoiseGenerator
    build_ffn_experts save_moe_model load_moe_model
    CrossEntropyLoss CrossEntropyLoss2D CrossEntropyLoss2p5D CrossEntropyLoss3D VocabParallelCrossEntropyLoss1D
    VocabParallelCrossEntropyLoss2D VocabParallelCrossEntropyLoss2p5D VocabParallelCrossEntropyLoss3D
    Accuracy Accuracy2D Accuracy2p5D Accuracy3D calc_acc
    split_forward_gather_backward gather_forward_split_backward reduce_grad reduce_input
    """,
)
"""Exports of ColossalAI's packages of layers, losses and metrics."""
LIBAI = re.findall(
    r"\w+",
    """
    Embedding VocabEmbedding SinePositionalEmbedding PatchEmbedding build_activation Linear Linear1D MLP LayerNorm
    RMSLayerNorm MultiheadAttention AttnMaskType TransformerLayer ParallelCrossEntropyLoss LMLogits DropPath
    ExtendedMask CasualMask get_nd_sbp get_layer_placement GPTEmbedding
    """,
)


def section(title: str) -> str:
    """Return the text below a heading."""
    return re.split(rf"^## {title}$", TEXT, flags=re.MULTILINE)[1].split("\n## ")[0]


def rows(title: str) -> list[list[str]]:
    """Return the cells of a section's tables, without the table heads."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    heads = {index - 1 for index, line in enumerate(lines) if line.startswith("|---")}
    table = [line for index, line in enumerate(lines) if index not in heads and not line.startswith("|---")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table]


def spans(text: str) -> list[str]:
    """Return the texts between backticks."""
    return re.findall(r"`([^`]+)`", text)


# ---- code ----


def executed(blocks: list[str]) -> float:
    """Run code blocks one after the other as one program, and return its loss."""
    names: dict[str, Any] = {}
    exec("\n".join(blocks), names)
    loss: torch.Tensor = names["loss"]
    return loss.item()


def test_the_code_runs_and_the_mesh_changes_nothing() -> None:
    assert CUBOID in CODE[0]
    losses = on_ranks(4, executed, CODE)
    assert len(set(losses)) == 1
    assert losses[0] == pytest.approx(executed([CODE[0].replace(CUBOID, "TensorMesh()")]), rel=1e-6)  # float32


# ---- tables ----


def test_the_modes_are_those_of_the_language() -> None:
    documented = {}
    for name, _, split, residual, inner, keep, _ in [row for row in rows("Modes") if len(row) == 7]:
        if "sequence=True" not in name:
            documented[spans(name)[0]] = (split, residual, inner, keep)
    assert documented.keys() == MODES.keys()
    for mode, row in MODES.items():
        split, residual, inner, keep = documented[mode]
        assert residual in (row.residual, "-")
        assert inner in (row.inner, "-")
        assert keep == row.keep
        assert (split == "sequence") == (mode == "sequence")


def test_the_readme_lists_every_public_name() -> None:
    prose = re.sub(r"```.*?```", "", TEXT.split("## Coming from")[0], flags=re.DOTALL)
    known = set(re.findall(r"\w+", " ".join(spans(prose))))
    assert not set(layers.__all__) - known


@pytest.mark.parametrize(("title", "names"), [("Coming from ColossalAI", COLOSSALAI), ("Coming from LiBai", LIBAI)])
def test_every_colossalai_and_libai_name_is_mapped(title: str, names: list[str]) -> None:
    mapped = {span for there, *_ in rows(title) for span in spans(there)}
    assert not set(names) - mapped


def calls() -> Iterator[tuple[str, ast.expr]]:
    """Yield the code on the right side of a table, and signatures in the table of layers."""
    for title, column in (("The layers", 0), ("Coming from ColossalAI", 1), ("Coming from LiBai", 1)):
        for row in rows(title):
            for span in spans(row[column]):
                try:
                    yield span, ast.parse(span.replace("...", "None"), mode="eval").body
                except SyntaxError:
                    assert re.fullmatch(r"\w+=.*|//|forward\(.*", span), span


PLAIN = {"gather_output", "max_norm", "scale_grad_by_freq", "is_decoder", "apply_residual_post_layernorm"} | {
    "activation_checkpoint",
    "groups.tensor.mode",
}
"""Names that are no objects: arguments, a section of a config, an attribute."""


def found(span: str, node: ast.expr) -> Any:
    """Return the object that a name means: in dslpar.layers, in torch.nn, or with its module."""
    *path, name = ast.unparse(node).split(".")
    module = importlib.import_module(".".join(path) or "dslpar.layers")
    assert hasattr(module, name), f"{span}: no {name} in {module.__name__}"
    return getattr(module, name)


def checked(span: str, node: ast.expr) -> None:
    """Raise AssertionError if a name does not exist, or a call has unknown arguments."""
    if isinstance(node, ast.Call):
        if ast.unparse(node.func) in ("forward", "groups.axis"):
            return
        made = found(span, node.func)
        try:
            inspect.signature(made).bind_partial(*node.args, **{str(word.arg): word.value for word in node.keywords})
        except TypeError as error:
            raise AssertionError(f"{span}: {error}") from None
        for child in (*node.args, *(word.value for word in node.keywords)):
            if isinstance(child, ast.Call):
                checked(span, child)
    elif isinstance(node, (ast.Name, ast.Attribute)) and span not in PLAIN | MODES.keys():
        found(span, node)


def test_what_the_tables_name_exists() -> None:
    assert len([checked(span, node) for span, node in calls()]) > 60


WRONG = (
    "Linear4D",
    "LayerNorm(groups, 4, epsilon=1)",
    "dslpar.distributed.collectives.gone(x)",
    "Block(groups, 8, 2, form=Form(c=2))",
)


@pytest.mark.parametrize("span", WRONG)
def test_a_name_that_does_not_exist_is_detected(span: str) -> None:
    with pytest.raises(AssertionError):
        checked(span, ast.parse(span, mode="eval").body)


def test_torch_has_what_the_tables_name() -> None:
    assert found("torch.nn.Conv2d", ast.parse("torch.nn.Conv2d", mode="eval").body) is torch.nn.Conv2d
