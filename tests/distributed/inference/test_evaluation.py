"""Loss, perplexity and accuracy: equal to training's own evaluation, in every layout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dslpar.core.errors import DslparError
from tests.support.ranks import on_ranks
from tests.support.sampling import sampled
from tests.support.trained_runs import LAYOUTS, train
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

if not HAS_TRANSFORMERS:
    pytest.skip(NO_TRANSFORMERS, allow_module_level=True)


MILDER = {"t5": ("model.config.initializer_factor=1.0",)}
"""With the weights of the generation tests, float32 rounding of T5's large logits is 6e-5 of a loss of 23.5."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return runs and their metrics in one process, by model name; they are trained when first requested."""
    known: dict[str, tuple[Path, dict[str, float]]] = {}

    def get(name: str) -> tuple[Path, dict[str, float]]:
        if name not in known:
            run = train(tmp_path_factory.mktemp(name), name, *MILDER.get(name, ()))
            known[name] = run, on_ranks(1, measure, str(run), [], 1)[0]
        return known[name]

    return get


def measure(run: str, overrides: Sequence[str], world: int, limit: int | None = None) -> dict[str, float]:
    import torch

    from dslpar.data.source import find_source
    from dslpar.distributed.groups import Groups
    from dslpar.inference.evaluation import evaluate, held_out_parts
    from dslpar.inference.model import InferenceModel
    from dslpar.inference.trained import open_run

    trained = open_run(run, world, overrides)
    model = InferenceModel(trained, Groups(trained.job.mesh), torch.device("cpu"))
    result = evaluate(model, held_out_parts(find_source(trained.job)), [], limit)
    return result.values | {"samples": result.samples, "labels": result.labels}


OF_PIECES = {layout for layout in LAYOUTS if "ring" in layout or "ulysses" in layout}
REFUSED = {
    *((name, layout) for name in ("t5", "vit") for layout in OF_PIECES),
    *((name, "1d-8") for name in ("llama", "bert", "vit")),
    *(("vit", f"1d-{size}-sequence") for size in (2, 4)),
}
"""Attention that mode 'sequence' does not support, heads that do not divide, and an image's 17 tokens."""


@pytest.mark.parametrize(
    ("name", "layout"),
    sampled(
        [
            (name, layout)
            for name in ("gpt", "llama", "t5", "bert", "vit")
            for number, layout in enumerate(LAYOUTS)  # gpt on every layout, the others in turns
            if (name, layout) not in REFUSED and (name == "gpt" or (number + len(name)) % 3 == 0)
        ],
        lambda row: row in {("gpt", "2d-4"), ("gpt", "pipe-2-1d-2"), ("gpt", "data-3")},
    ),
)
def test_every_layout_measures_the_same(runs: Any, name: str, layout: str) -> None:
    run, expected = runs(name)
    world, *overrides = LAYOUTS[layout]
    for found in on_ranks(world, measure, str(run), overrides, world):
        # Float32 sums differ in their last bits; whole numbers and their shares do not. Perplexity is exp(loss), so its
        # relative difference is the loss's absolute one.
        assert found.pop("perplexity", 0) == pytest.approx(
            expected.get("perplexity", 0), rel=1e-6 * max(1, expected["loss"])
        )
        assert found == pytest.approx({name: expected[name] for name in found}, rel=1e-6)
        assert {*expected} - {*found} <= {"perplexity"}


@pytest.mark.prove
@pytest.mark.parametrize(("name", "layout"), sorted(REFUSED))
def test_what_is_refused_says_why(runs: Any, name: str, layout: str) -> None:
    run, _ = runs(name)
    world, *overrides = LAYOUTS[layout]

    def refused(*args: Any) -> list[str]:
        with pytest.raises(DslparError) as caught:
            measure(*args)
        return [found.code for found in caught.value.findings]

    for codes in on_ranks(world, refused, str(run), overrides, world):
        assert {code[:3] for code in codes} == {"TEN"}


@pytest.mark.parametrize("name", sampled(["gpt", "llama", "t5", "bert", "vit"], {"gpt"}))
def test_the_first_samples_give_the_loss_that_training_saw(runs: Any, name: str) -> None:
    run, _ = runs(name)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (found,) = on_ranks(1, measure, str(run), [], 1, 8)  # two batches of four
    assert found["samples"] == 8
    # for masked tokens, training's mean is over batches with different numbers of labels
    assert found["loss"] == pytest.approx(records[-1]["eval_loss"], rel=1e-6 if name != "bert" else 0.05)
