"""Initial weights: drawn when the layer is built, kept if a program writes them, else drawn by name."""

from __future__ import annotations

import copy
import io
import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from dslpar.checkpoint import load_full_state
from dslpar.core.errors import DslparError
from dslpar.core.mesh import Mesh
from dslpar.distributed.groups import Groups
from dslpar.layers import (
    Affine,
    Block,
    Embedding,
    Init,
    LayerNorm,
    Linear,
    PositionEmbedding,
    gather,
    initialize,
    parameter,
    placement,
    placement_of,
)
from dslpar.layers.lora import KaimingUniform
from dslpar.layers.parameter import Layer, draw
from dslpar.models import GPT, ResMLP, build_module
from dslpar.models.layered import LayerSpec, build_layer
from tests.support.layouts import LAYOUTS
from tests.support.ranks import on_ranks

VALUE = 0.25
"""The value of all weights that a program sets; it is exact in every dtype."""
State = dict[str, Tensor]


@pytest.fixture
def groups() -> Groups:
    return Groups(Mesh())


def layer(groups: Groups) -> nn.Module:
    return nn.ModuleDict({"linear": Linear(groups, 4, 6, role="inward"), "norm": LayerNorm(groups, 4)})


def in_a_run(module: nn.Module, groups: Groups, seed: int = 1) -> nn.Module:
    """Initialize a module as an engine does after a program has built it."""
    return build_layer(LayerSpec(name="model", build=lambda: module), groups, seed)


def state_of(module: nn.Module) -> State:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def given(module: nn.Module) -> State:
    return {name: torch.full_like(p, VALUE) for name, p in module.state_dict().items()}


def each(write: Callable[[nn.Parameter], object]) -> Callable[[nn.Module], nn.Module]:
    """Return a function that writes every parameter."""

    @torch.no_grad()
    def apply(module: nn.Module) -> nn.Module:
        for p in module.parameters():
            write(p)
        return module

    return apply


def load(module: nn.Module, **how: bool) -> nn.Module:
    module.load_state_dict(given(module), **how)
    return module


def load_whole(module: nn.Module) -> nn.Module:
    load_full_state(module, given(module), Groups(Mesh()))
    return module


def set_attributes(module: nn.Module) -> nn.Module:
    for part in module.children():
        part.weight, part.bias = (nn.Parameter(torch.full_like(p, VALUE)) for p in (part.weight, part.bias))
    return module


def through_a_file(module: nn.Module) -> nn.Module:
    """Save and load the whole module, as torch.save does."""
    for part in module.children():
        part.groups = part.vectors = None  # process groups are in no file
    file = io.BytesIO()
    torch.save(module, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def numpy_writes(p: nn.Parameter) -> None:
    p.detach().numpy()[...] = VALUE


def set_data(p: nn.Parameter) -> None:
    p.data = torch.full_like(p, VALUE)


WRITTEN: dict[str, Callable[[nn.Module], nn.Module]] = {
    "load_state_dict": load,
    "load_state_dict(assign=True)": partial(load, assign=True),
    "load_full_state": load_whole,
    "fill_": each(lambda p: p.fill_(VALUE)),
    "copy_": each(lambda p: p.copy_(torch.full_like(p, VALUE))),
    "nn.init": each(lambda p: nn.init.constant_(p, VALUE)),
    "writes through p.data": each(lambda p: p.data.fill_(VALUE)),
    "writes through numpy": each(numpy_writes),
    "p.data = ...": each(set_data),
    "layer.weight = ...": set_attributes,
    "loaded and frozen": lambda module: load(module).requires_grad_(False),
    "loaded, then another dtype": lambda module: load(module).to(torch.bfloat16),
    "another dtype, then loaded": lambda module: load(module.to(torch.bfloat16)),
    "loaded, then copied": lambda module: copy.deepcopy(load(module)),
    "copied, then loaded": lambda module: load(copy.deepcopy(module)),
    "meta, then loaded": lambda module: load(module.to("meta").to_empty(device="cpu")),
    "meta, then assigned": lambda module: _assigned_to_meta(module),
    "a file of the module": lambda module: through_a_file(load(module)),
}


def _assigned_to_meta(module: nn.Module) -> nn.Module:
    state = given(module)
    module.to("meta").load_state_dict(state, assign=True)
    return module


@pytest.mark.parametrize("how", WRITTEN)
def test_a_run_keeps_what_a_program_has_written(how: str, groups: Groups) -> None:
    written = WRITTEN[how](layer(groups))
    dtypes = {p.dtype for p in written.parameters()}
    kept = state_of(in_a_run(written, groups))
    assert all(torch.equal(p, torch.full_like(p, VALUE)) for p in kept.values()), kept
    assert {p.dtype for p in kept.values()} == dtypes


@torch.no_grad()
def _copy(module: nn.Module, source: nn.Module) -> None:
    for p, value in zip(module.parameters(), source.parameters(), strict=True):
        p.copy_(value)


SAME: dict[str, Callable[[nn.Module, nn.Module], object]] = {
    "load_state_dict": lambda module, source: module.load_state_dict(source.state_dict()),
    "load_state_dict(assign=True)": lambda module, source: module.load_state_dict(source.state_dict(), assign=True),
    "another's parameters": lambda module, source: module.load_state_dict(
        source.state_dict(keep_vars=True), assign=True
    ),
    "copy_": _copy,
}


@pytest.mark.parametrize("how", SAME)
def test_a_run_keeps_what_was_given_though_the_layer_held_the_same(how: str, groups: Groups) -> None:
    torch.manual_seed(0)
    source = layer(groups)
    torch.manual_seed(0)
    module = layer(groups)
    before = state_of(source)
    assert_equal(state_of(module), before)
    SAME[how](module, source)
    assert_equal(state_of(in_a_run(module, groups)), before)


def test_a_run_keeps_a_layer_out_of_a_file_that_nobody_wrote_before(groups: Groups) -> None:
    module = copy.deepcopy(layer(groups))
    module["linear"].set_init("weight", KaimingUniform())  # one write since the copy, as torch counts one for a load
    module = through_a_file(module)
    before = state_of(module)
    assert_equal(state_of(in_a_run(module, groups)), before)


def test_a_run_keeps_a_permutation_of_what_was_drawn(groups: Groups) -> None:
    module = layer(groups)
    weight = module["linear"].weight
    weight.data = weight.data.flip(0)
    before = state_of(module)
    assert torch.equal(state_of(in_a_run(module, groups))["linear.weight"], before["linear.weight"])


UNWRITTEN: dict[str, Callable[[nn.Module], nn.Module]] = {
    "as it was built": lambda module: module,
    "used": lambda module: _used(module),
    "copied": copy.deepcopy,
    "frozen": lambda module: module.requires_grad_(False),
    "another dtype": lambda module: module.to(torch.bfloat16),
    "twice another dtype": lambda module: module.to(torch.bfloat16).to(torch.float64),
    "meta, then to_empty": lambda module: module.to("meta").to_empty(device="cpu"),
    "to_empty": lambda module: module.to_empty(device="cpu"),
    "written, then lost on meta": lambda module: load(module).to("meta").to_empty(device="cpu"),
    "copied from another dtype": lambda module: copy.deepcopy(module.to(torch.bfloat16)),
    "in evaluation": lambda module: module.eval(),
}


def _used(module: nn.Module) -> nn.Module:
    module["linear"](module["norm"](torch.ones(2, 4))).sum().backward()
    return module


@pytest.mark.parametrize("how", UNWRITTEN)
def test_a_run_draws_by_name_what_nobody_has_written(how: str, groups: Groups) -> None:
    module = UNWRITTEN[how](layer(groups))
    run = state_of(in_a_run(module, groups, seed=5))
    assert torch.equal(run["linear.weight"], _by_name("model.linear.weight", 5).to(run["linear.weight"].dtype))
    assert run["norm.weight"].eq(1).all()
    assert run["linear.bias"].eq(0).all()


def _by_name(name: str, seed: int) -> Tensor:
    return draw((6, 4), Init(0.0, 0.02), seed, name)


def test_a_run_draws_by_name_what_a_load_has_left_out(groups: Groups) -> None:
    module = layer(groups)
    state = {name: value for name, value in given(module).items() if name != "linear.weight"}
    module.load_state_dict(state, strict=False)
    run = state_of(in_a_run(module, groups, seed=5))
    assert torch.equal(run.pop("linear.weight"), _by_name("model.linear.weight", 5))
    assert all(value.eq(VALUE).all() for value in run.values())


def test_tied_weights_are_drawn_once_or_kept(groups: Groups) -> None:
    def tied() -> nn.Module:
        module = nn.ModuleDict({name: Embedding(groups, 6, 4) for name in ("first", "second")})
        module["second"].weight = module["first"].weight
        return module

    run = in_a_run(tied(), groups, seed=5)
    assert run["second"].weight is run["first"].weight
    assert torch.equal(run["first"].weight, _by_name("model.first.weight", 5))
    kept = in_a_run(load(tied()), groups)
    assert kept["second"].weight is kept["first"].weight
    assert kept["first"].weight.eq(VALUE).all()


def test_another_run_of_the_same_module_goes_on_with_its_weights(groups: Groups) -> None:
    module = in_a_run(layer(groups), groups, seed=5)
    before = state_of(module)
    assert_equal(state_of(in_a_run(module, groups, seed=6)), before)


def test_a_layer_that_is_built_for_a_run_keeps_its_own_init(groups: Groups) -> None:
    class Own(Layer):
        def __init__(self, groups: Groups) -> None:
            super().__init__(groups)
            self.first, self.second = (Linear(groups, 4, 6, role="inward") for _ in range(2))
            nn.init.constant_(self.first.weight, VALUE)
            self.second.weight.data.copy_(self.first.weight.data)

    built = build_layer(LayerSpec(name="own", build=lambda: Own(groups)), groups, seed=1)
    assert built.first.weight.eq(VALUE).all()
    assert built.second.weight.eq(VALUE).all()


# ---- initialize ----


def test_initialize_refuses_to_choose_between_a_seed_and_what_was_written(groups: Groups) -> None:
    module = layer(groups)
    with torch.no_grad():
        module["linear"].weight.fill_(VALUE)
    with pytest.raises(DslparError, match=r"TEN236.*'linear.weight'\nhelp: keep=True .* or keep=False"):
        initialize(module, groups, seed=5)
    initialize(module, groups, seed=5, keep=True)
    assert module["linear"].weight.eq(VALUE).all()
    initialize(module, groups, seed=5, keep=False)
    assert torch.equal(module["linear"].weight, _by_name("linear.weight", 5))


def test_initialize_draws_anew_what_it_has_drawn_and_a_run_keeps_that(groups: Groups) -> None:
    module = layer(groups)
    for seed in (5, 6):
        initialize(module, groups, seed)
        assert torch.equal(module["linear"].weight, _by_name("linear.weight", seed))
    assert torch.equal(in_a_run(module, groups, seed=7)["linear"].weight, _by_name("linear.weight", 6))


# ---- drawn when built ----


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill unwritten memory with large numbers, as another tensor may have left them there."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **how: empty(*shape, **how).fill_(7e9))


@pytest.mark.usefixtures("poisoned")
def test_a_layer_works_as_soon_as_it_is_built(groups: Groups) -> None:
    x = torch.randn(2, 3, 8)
    assert torch.equal(LayerNorm(groups, 8)(x), nn.LayerNorm(8)(x))
    assert Affine(groups, 8, init=Init(2.0))(x).eq(2 * x).all()
    linear = Linear(groups, 8, 512, role="inward")
    assert linear.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert linear.bias.eq(0).all()
    assert Embedding(groups, 5, 8, padding_idx=-2).weight[3].eq(0).all()
    block = Block(groups, 8, 2)
    assert max(p.abs().max() for p in block.parameters()) <= 1
    assert not torch.equal(block.attention.out.weight, Linear(groups, 8, 8, role="outward").weight)


def test_the_seed_of_torch_decides_what_is_drawn(groups: Groups) -> None:
    def built(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return Linear(groups, 8, 8, role="inward").weight.detach()

    assert torch.equal(built(1), built(1))
    assert not torch.equal(built(1), built(2))
    torch.manual_seed(1)
    first, second = (Linear(groups, 8, 8, role="inward").weight for _ in range(2))
    assert not torch.equal(first, second)


@pytest.mark.usefixtures("poisoned")
def test_a_parameter_of_another_module_is_nan_until_it_is_drawn(groups: Groups) -> None:
    module = nn.Module()
    module.weight = parameter(placement.residual_vector(groups.tensor, 8), Init(2.0))
    assert module.weight.isnan().all()
    assert in_a_run(module, groups).weight.eq(2).all()
    module.weight = parameter(placement.residual_vector(groups.tensor, 8), Init(2.0))
    module.weight.data[0] = VALUE
    kept = in_a_run(module, groups).weight
    assert kept[0].item() == VALUE
    assert kept[1:].isnan().all()


def test_another_init_is_drawn_at_once_and_never_over_what_was_written(groups: Groups) -> None:
    linear = Linear(groups, 4, 4, role="inward")
    before = linear.weight.detach().clone()
    linear.set_init("weight", KaimingUniform())
    assert not torch.equal(linear.weight, before)
    assert linear.weight.abs().max() <= 0.5
    load(linear).set_init("weight", KaimingUniform())
    assert linear.weight.eq(VALUE).all()


def test_meta_and_inference_tensors_have_layers_too(groups: Groups) -> None:
    state = torch.get_rng_state()
    with torch.device("meta"):
        assert Block(groups, 8, 2).mlp.up.weight.device.type == "meta"
    assert torch.equal(torch.get_rng_state(), state)
    with torch.inference_mode():
        module = layer(groups)
        assert module["norm"].weight.eq(1).all()


@pytest.mark.parametrize("name", ["gpt", "resmlp"])
def test_the_families_draw_nothing_twice(name: str, groups: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
    model = {
        "gpt": GPT(num_layers=1, hidden_size=8, num_heads=2, vocab_size=16, max_seq_len=4),
        "resmlp": ResMLP(num_layers=1, hidden_size=8, image_size=4, patch_size=2, num_channels=1, num_classes=3),
    }[name]
    drawn: list[str] = []

    def counted(shape: tuple[int, ...], init: Init, seed: int, name: str) -> Tensor:
        drawn.append(name)
        return draw(shape, init, seed, name)

    monkeypatch.setattr(sys.modules["dslpar.layers.parameter"], "draw", counted)
    module = build_module(model, groups, seed=1)
    assert sorted(drawn) == sorted(name for name, _ in module.named_parameters())


# ---- over ranks ----


def wholes(name: str) -> tuple[State, State]:
    """Return the gathered weights of layers that are built with one seed, and of the same in a run."""
    groups = Groups(Mesh(tensor=LAYOUTS[name]))
    torch.manual_seed(3)
    module = nn.ModuleList([Linear(groups, 24, 24, role="inward"), PositionEmbedding(groups, 12, 24)])
    after = torch.randn(1)  # torch's generator has the same state on any other layout
    found = [_gathered(module, groups), _gathered(in_a_run(module, groups), groups)]
    return {**found[0], "after": after}, found[1]


def _gathered(module: nn.Module, groups: Groups) -> State:
    return {name: gather(p, placement_of(p), groups) for name, p in module.named_parameters()}


@pytest.mark.parametrize("name", ["1d-2", "2.5d-8-depth-2"])
def test_layers_hold_the_same_on_any_layout_when_they_are_built(name: str) -> None:
    torch.manual_seed(3)
    seeds = [int(torch.randint(2**62, ())) for _ in range(3)]
    for built, run in on_ranks(LAYOUTS[name].size, wholes, name):
        assert torch.equal(built["0.weight"], draw((24, 24), Init(0.0, 0.02), seeds[0], ""))
        assert torch.equal(built["1.weight"], draw((12, 24), Init(0.0, 0.02), seeds[2], ""))
        assert torch.equal(built["after"], torch.randn(1, generator=_after_three()))
        assert torch.equal(run["0.weight"], draw((24, 24), Init(0.0, 0.02), 1, "model.0.weight"))


def _after_three() -> torch.Generator:
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        torch.randint(2**62, (), generator=generator)
    return generator


def assert_equal(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
