"""Tables of torch's and DeepSpeed's names, against the installed torch and DeepSpeed."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
from torch import nn

from dslpar.core.errors import Location
from dslpar.language.lazy import locate
from dslpar.linter import check as linter_check
from dslpar.schema.sections import OPTIMIZERS as OURS
from dslpar.schema.torch_layers import LAYERS, KnownLayer
from dslpar.schema.torch_optimizers import OPTIMIZERS, KnownOptimizer, elementwise
from dslpar.schema.torch_schedulers import LR_SCHEDULERS, KnownLRScheduler
from dslpar.schema.types import TYPES
from tests.support.lint import MODEL
from tests.support.versions import needs_torch

of_this_torch = needs_torch(13, "the tables are of 2.13")
NOT_FOR_CONFIGS = {"params", "model_params", "optimizer", "lr", "last_epoch", "last_batch_iteration"}
LEFT_OUT = {
    "FusedAdam": {"amsgrad"},  # raises on it
    "DeepSpeedCPUAdam": {"amsgrad"},  # raises on it
    "Lamb": {"amsgrad", "max_grad_norm"},  # raises on the one, and clipping is the trainer's
    "Lion": {"set_grad_none"},  # exists only in the class for devices
    "OneCycleLR": {"epochs", "steps_per_epoch"},  # covered by total_steps
    "CyclicLR": {"scale_fn"},  # a function
}
"""Existing arguments that no config needs."""
OF_TORCH = {name for name, row in OPTIMIZERS.items() if row.dotted.startswith("torch.")}
RUN = [(name, row) for table in (OPTIMIZERS, LR_SCHEDULERS) for name, row in table.items() if not row.refused]


@of_this_torch
@pytest.mark.parametrize(("name", "row"), RUN, ids=[name for name, _ in RUN])
def test_arguments(name: str, row: KnownOptimizer | KnownLRScheduler) -> None:
    theirs = inspect.signature(locate(row.dotted, Location("here"))).parameters
    assert set(row.args) | LEFT_OUT.get(name, set()) == set(theirs) - NOT_FOR_CONFIGS
    assert set(row.args.values()) <= set(TYPES)
    required = {key for key, value in theirs.items() if value.default is value.empty} - NOT_FOR_CONFIGS
    if isinstance(row, KnownLRScheduler):
        left = {row.sets_lr} if row.sets_lr else set()
        assert required <= {*row.required, *left} <= {*row.args}
    else:
        assert required == set()


@of_this_torch
@pytest.mark.parametrize(("name", "row"), RUN, ids=[name for name, _ in RUN])
def test_defaults_are_of_the_type(name: str, row: KnownOptimizer | KnownLRScheduler) -> None:
    """Otherwise a config could not write a value that it leaves out."""
    theirs = inspect.signature(locate(row.dotted, Location("here"))).parameters
    for key, type_ in row.args.items():
        default = theirs[key].default
        if default not in (None, theirs[key].empty):
            assert isinstance(default, TYPES[type_].python_types), (key, type_)
            assert TYPES[type_].holds(default), (key, type_)


def test_torch_s_optimizers_are_all_there() -> None:
    theirs = {name for name in dir(torch.optim) if name[0].isupper()} - {"Optimizer"}
    ours = {row.dotted.rpartition(".")[2] for row in OPTIMIZERS.values() if row.dotted.startswith("torch.")}
    assert theirs <= ours | set(OURS)


def test_torch_s_schedules_are_all_there() -> None:
    base = torch.optim.lr_scheduler.LRScheduler
    found = {name: value for name, value in vars(torch.optim.lr_scheduler).items() if isinstance(value, type)}
    theirs = {name for name, value in found.items() if issubclass(value, base)} - {"LRScheduler", "_LRScheduler"}
    assert theirs <= set(LR_SCHEDULERS)


def test_deepspeed_runs_ours_and_has_removed_the_others() -> None:
    """Those of dslpar are DeepSpeed's own, or classes; mu-parametrized ones need a separate package."""
    ours = {"Adagrad", "Lamb", "Lion", "Muon", *OURS} - {"SGD"}
    assert {name.lower() for name in ours} == set(DEEPSPEED_OPTIMIZERS) - {"muadam", "muadamw", "musgd"}
    removed = {name.lower() for name, row in OPTIMIZERS.items() if row.refused.endswith("has removed it")}
    assert len(removed) == 3
    assert not removed & set(DEEPSPEED_OPTIMIZERS)


def test_deepspeed_s_offloaded_classes_are_there() -> None:
    for row in OPTIMIZERS.values():
        if row.on_cpu:
            theirs = inspect.signature(locate(row.on_cpu, Location("here"))).parameters
            assert set(row.args) <= set(theirs)


@of_this_torch
@pytest.mark.parametrize("name", [name for name, _ in RUN if name in OF_TORCH])
def test_elementwise_is_what_it_says(name: str) -> None:
    """Five steps on a matrix equal five steps on its halves exactly if the optimizer acts elementwise."""
    row = OPTIMIZERS[name]
    whole, halves = _trained(row.dotted, 1), _trained(row.dotted, 2)
    assert torch.equal(whole, halves) == row.elementwise == elementwise(name) == elementwise(row.dotted)


def _trained(dotted: str, pieces: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    parts = [nn.Parameter(part.clone()) for part in start.chunk(pieces, dim=1)]
    optimizer = locate(dotted, Location("here"))(parts, lr=0.1)
    for _ in range(5):
        gradient = torch.randn(4, 6, generator=generator, dtype=torch.float64)
        for part, piece in zip(parts, gradient.chunk(pieces, dim=1), strict=True):
            part.grad = piece.contiguous()
        optimizer.step()
    return torch.cat([part.detach() for part in parts], dim=1)


def test_layers_are_torch_s() -> None:
    theirs = {name for name, value in vars(nn).items() if isinstance(value, type) and issubclass(value, nn.Module)}
    assert theirs >= set(LAYERS)
    others = {name for name in theirs - set(LAYERS) if not name.endswith(("Loss", "Loss2d", "LossWithLoss"))}
    assert others <= {
        *("Module", "Container", "Sequential", "ModuleList", "ModuleDict", "ParameterList", "ParameterDict"),
        *("DataParallel", "AdaptiveLogSoftmaxWithLoss"),
        *("Bilinear", "CosineSimilarity", "PairwiseDistance", "MultiheadAttention"),  # take several tensors
        *("EmbeddingBag", "MaxUnpool1d", "MaxUnpool2d", "MaxUnpool3d"),
        *("Transformer", "TransformerDecoder", "TransformerDecoderLayer"),
        *("RNN", "LSTM", "GRU", "RNNBase", "RNNCell", "LSTMCell", "GRUCell", "RNNCellBase"),  # return a tuple
    }


# a lazy layer makes its parameters before it knows that it will have none
@pytest.mark.parametrize("name", sorted(name for name in LAYERS if not name.startswith("LazyInstance")))
def test_what_has_parameters(name: str) -> None:
    made = _made(getattr(nn, name))
    if made is not None:
        assert (next(made.parameters(), None) is not None) == LAYERS[name].parameters


def _made(cls: type[nn.Module]) -> nn.Module | None:
    """Return the layer from as many small numbers as it needs, or None if it needs more than numbers."""
    needed = [p for p in inspect.signature(cls).parameters.values() if p.default is p.empty]
    try:
        return cls(*(1 for p in needed if p.kind is not p.VAR_POSITIONAL))
    except (TypeError, AttributeError, NotImplementedError, ValueError):
        return None


def test_a_config_of_our_own_classes_needs_no_table() -> None:
    """They are imported when a config uses them, so that the linter's start stays as fast."""
    code = (
        "import sys; from dslpar.linter.check import lint, load_text\n"
        f"assert lint(load_text({MODEL!r}, 'cfg.py'), 8) == []\n"
        "assert not [name for name in sys.modules if name.startswith('dslpar.schema.torch')]\n"
        "assert not {'dslpar.schema.tables', 'dslpar.schema.deepspeed_policy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@of_this_torch
@pytest.mark.parametrize("name", sorted(LAYERS))
def test_arguments_of_layers_are_torch_s(name: str) -> None:
    cls = getattr(torch.nn, name)
    if cls.__init__ is nn.Module.__init__:  # its signature has any arguments, and it refuses them all
        assert LAYERS[name] == KnownLayer(LAYERS[name].parameters, [], [])
        return
    parameters = inspect.signature(cls).parameters.values()
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        assert LAYERS[name].required is None
        return
    required = [p.name for p in parameters if p.default is p.empty]
    optional = [p.name for p in parameters if p.default is not p.empty]
    assert LAYERS[name] == KnownLayer(LAYERS[name].parameters, required, optional)


@pytest.mark.parametrize(
    ("layer", "code"),
    [
        ("dict(type='Linear', in_features=4)", "CFG104"),
        ("dict(type='torch.nn.Linear', in_features=4, out_featurs=4)", "CFG101"),
        ("dict(type='ReLU', inplace=True, slope=1)", "CFG101"),
        ("dict(type='Identity', anything=1)", None),
        ("dict(type='Linear', in_features=4, out_features=4, bias=False)", None),
    ],
)
def test_arguments_of_a_config_s_layers_are_checked(layer: str, code: str | None) -> None:
    """The oracle once found a false pass: the linter accepted a layer without its class's arguments."""
    trained = "dict(type='Linear', in_features=4, out_features=4)"
    config = linter_check.load_text(f"model = dict(type='Sequential', layers_cfg=[{layer}, {trained}])\n", "cfg.py")
    found = [finding.code for finding in linter_check.lint(config, 1) if finding.severity == "error"]
    assert found == ([code] if code else [])
