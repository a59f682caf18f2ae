"""Divisors: the table against the layers' placements, lint against the table; no ranks needed."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import product
from typing import Any

import pytest

from dslpar.core.mesh import TensorMesh
from dslpar.costs import any_model as costs
from dslpar.layers import placement
from dslpar.layout import divisors
from dslpar.layout.family_interface import conditions
from dslpar.layout.modes import cuboid_of
from dslpar.layout.nearest import nearest_attention, neighbours
from dslpar.linter.rules.tensor import gathered_panels
from dslpar.models.gpt.layout import attention_sizes
from dslpar.models.gpt.section import GPT
from dslpar.schema.sections import TensorParallel
from tests.support.lint import wrong
from tests.support.sampling import sampled

AXES = [axes for axes in product((1, 2, 3, 4), repeat=3) if axes[0] * axes[1] * axes[2] <= 12]
"""(q, y, z)."""
CUBOIDS = [
    *(
        TensorMesh(q=q, y=y, z=z, mode="cuboid", residual=residual, inner=inner)  # type: ignore[arg-type]
        for q, y, z in AXES
        for residual in ("replicated", "sequence", "hidden", "batch")
        for inner in ("batch", "heads")
    ),
    *(TensorMesh(d=d, q=2, y=2, mode="2.5d", residual="hidden") for d in (2, 3)),
    *(TensorMesh(d=d, mode="sequence", split="sequence", impl=impl) for d in (2, 3, 4) for impl in ("ring", "ulysses")),  # type: ignore[arg-type]
]
HEADS = [(1, None), (2, None), (4, 2), (6, 3), (6, 4), (8, 4), (12, 1), (12, 6), (24, 12)]
"""(num_heads, num_kv_heads)."""
HIDDEN, FFN, SAMPLES, TOKENS = (24, 36, 40, 48, 96), (24, 30, 36), (1, 4, 6, 24), (3, 8, 12)


def gpt(heads: tuple[int, int | None], hidden: int, **more: Any) -> GPT:
    num_heads, num_kv_heads = heads
    return GPT(
        num_layers=1,
        hidden_size=hidden,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        vocab_size=50,
        max_seq_len=12,
        **more,
    )


def attention(tensor: TensorMesh, model: GPT) -> list[placement.Placement]:
    """Return weights and vectors with the residual's features, and heads as in the inner activations."""
    hidden, kv = model.hidden_size, model.kv_heads * (model.hidden_size // model.num_heads)
    exchanged = tensor.split == "sequence" and tensor.impl == "ulysses"
    letters = placement.inner_cuts(tensor).features + (("d", "q") if exchanged else ())
    return [
        placement.inward_weight(tensor, (hidden, kv, kv), hidden),
        placement.inner_vector(tensor, (hidden, kv, kv)),
        placement.outward_weight(tensor, hidden, hidden),
        placement.residual_vector(tensor, hidden),
        placement.position_table(tensor, 12, hidden),
        *(placement.Placement(tensor, (count,), (letters,)) for count in (model.num_heads, model.kv_heads)),
    ]


def mlp(tensor: TensorMesh, hidden: int, ffn: int) -> list[placement.Placement]:
    """Both kinds; hidden_size divides, or `attention` reports it."""
    return [
        placement.inward_weight(tensor, ffn, hidden),
        placement.inward_weight(tensor, (ffn, ffn), hidden),
        placement.inner_vector(tensor, (ffn, ffn)),
        placement.outward_weight(tensor, hidden, ffn),
    ]


def fits(*places: placement.Placement) -> bool:
    """Return whether every piece can be made."""
    try:
        return all(at.local_shape for at in places)
    except AssertionError:
        return False


def holds(found: Any) -> bool:
    return all(each.holds for each in found)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_heads_and_hidden_divide_where_the_placements_can_be_made(heads: tuple[int, int | None]) -> None:
    seen = set()
    for tensor, hidden in product(CUBOIDS, HIDDEN):
        model = gpt(heads, hidden)
        whole = hidden % model.num_heads == model.num_heads % model.kv_heads == 0
        expected = whole and fits(*attention(tensor, model))
        assert holds(divisors.attention(attention_sizes(model), tensor)) == expected, (tensor, model)
        seen.add(expected)
    assert seen == ({False} if heads == (6, 4) else {True, False})


def legal(model: GPT, tensor: TensorMesh) -> bool:
    return holds(divisors.attention(attention_sizes(model), tensor))


def legal_sizes(key: str, model: GPT, tensor: TensorMesh) -> list[int]:
    """Return legal sizes by trying each, with the other sizes unchanged."""
    candidates = range(1, 1200 if key == "hidden_size" else 50)
    return [size for size in candidates if legal(replace(model, **{key: size}), tensor)]  # type: ignore[arg-type]


ATTENTION = product(((5, None), (6, 3), (8, 8), (9, 6), (12, 4)), ("learned", "rotary"))
FEW = {((12, 4), "rotary")}


@pytest.mark.parametrize(("heads", "positions"), sampled(ATTENTION, FEW, named=lambda row: f"{row[0]}-{row[1]}"))
def test_the_nearest_sizes_are_the_nearest(heads: tuple[int, int | None], positions: str) -> None:
    """Every size is compared, changed one at a time; several change together only if no single change suffices."""
    seen = set()
    for tensor, hidden in product(CUBOIDS[::13], (30, 36, 40)):
        model = gpt(heads, hidden, positions=positions)
        if legal(model, tensor):
            continue
        keys = ["num_heads", "hidden_size"] + (["num_kv_heads"] if heads[1] else [])
        alone = {key: legal_sizes(key, model, tensor) for key in keys}
        choices = nearest_attention(attention_sizes(model), tensor)
        assert choices
        assert all(legal(replace(model, **choice), tensor) for choice in choices)  # type: ignore[arg-type]
        (changed,) = {tuple(choice) for choice in choices}
        seen.add(len(changed))
        if len(changed) == 1:
            (key,) = changed
            sizes = [size for choice in choices for size in choice.values()]
            assert sizes == neighbours(getattr(model, key), alone[key]), (model, tensor)
        else:
            assert not any(alone.values()), (model, tensor, choices)
    assert 1 in seen


def test_the_mlp_divides_where_its_placements_can_be_made() -> None:
    seen = set()
    for tensor, ffn in product(CUBOIDS, FFN):
        hidden = 12 * 12 * 4  # divides by all
        expected = fits(*mlp(tensor, hidden, ffn))
        assert holds(divisors.inner_features(ffn, tensor)) == expected, (tensor, ffn)
        seen.add(expected)
    assert seen == {True, False}


def test_samples_and_tokens_divide_where_the_activations_can_be_made() -> None:
    seen = set()
    for tensor, samples, tokens in product(CUBOIDS, SAMPLES, TOKENS):
        features = 12 * 12 * 4
        expected = fits(
            placement.residual(tensor, samples, tokens, features), placement.inner(tensor, samples, tokens, features)
        )
        assert holds([*divisors.batch(samples, tensor), *divisors.sequence(tokens, tensor)]) == expected
        assert (samples % divisors.least_micro_size(tensor) == 0) == holds(divisors.batch(samples, tensor))
        seen.add(expected)
    assert seen == {True, False}


def test_the_vocabulary_is_padded_as_the_table_is() -> None:
    for tensor in CUBOIDS:
        found = divisors.vocabulary(50, tensor)
        assert found.holds
        assert found.value == placement.table(tensor, 50, 12).padded[0]
        assert fits(placement.table(tensor, 50, 12 * 12 * 4))
    assert divisors.vocabulary(50, TensorMesh(y=4)).why == "y * q = 4; 50 padded to 52"
    assert divisors.vocabulary(52, TensorMesh(y=2, z=2)).why == "y * lcm(q, z) = 4; no padding"


def test_keep_has_an_effect_where_the_traffic_says_so() -> None:
    """Panels that are not kept are gathered again, so a panel is gathered if keeping it saves elements."""
    model = gpt((24, 12), 12 * 12 * 4)
    for tensor in CUBOIDS:
        sent = {
            keep: costs.layer_traffic(model, replace(tensor, keep=keep), 24).total
            for keep in ("x", "w", "none")  # type: ignore[arg-type]
        }
        assert gathered_panels(tensor) == {panel for panel in ("x", "w") if sent[panel] < sent["none"]}, tensor


MODES = [
    TensorParallel(size=4, mode="1d"),
    TensorParallel(size=3, mode="1d", sequence=True),
    TensorParallel(size=4, mode="2d"),
    TensorParallel(size=8, mode="2.5d", depth=2),
    TensorParallel(size=8, mode="3d"),
    TensorParallel(size=8, mode="3d", residual="sequence", inner="heads"),
    TensorParallel(size=6, mode="cuboid", shape=(3, 2, 1)),
    TensorParallel(size=4, mode="sequence", impl="ulysses"),
]


def written(value: Any) -> str:
    """Return a section as config text."""
    return ", ".join(f"{name}={each!r}" for name, each in asdict(value).items() if each is not None)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: f"{mode.mode}-{mode.size}")
def test_lint_says_what_the_table_says(mode: TensorParallel) -> None:
    """Each violated condition has its code, unless it waits for another to be repaired first."""
    waits = {"TEN208": {"TEN201", "TEN205", "TEN206", "TEN207"}, "TEN209": {"TEN205"}}
    tensor, world = cuboid_of(mode), mode.size
    others = [(36, "rotary", 4, 12), (30, "learned", 24, 12), (36, "learned", 6, 8)]
    for heads, hidden, (ffn, positions, samples, tokens) in product(HEADS[1:8], (36, 48), others):
        model = gpt(heads, hidden, ffn_hidden_size=ffn, positions=positions)
        text = (
            f"model = dict(type='GPT', {written(model).replace('rope_theta=10000.0, ', '')})\n"
            f"parallel = dict(tensor=dict({written(mode)}))\n"
            f"batch = dict(micro_size={samples})\ndata = dict(seq_len={tokens})\n"
        )
        broken = {each.code for each in conditions(model, tensor, tokens, samples) if not each.holds}
        expected = {code for code in broken if not waits.get(code, set()) & broken}
        found = {finding.code for finding in wrong(text.replace("vocab_size=50", "vocab_size=256"), world)}
        assert found == expected, (text, found, expected)


def test_a_table_that_forgets_a_cut_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divisors, "inner_axes", lambda cuboid: [("y",)])
    with pytest.raises(AssertionError):
        test_heads_and_hidden_divide_where_the_placements_can_be_made((2, None))
