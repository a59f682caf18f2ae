"""Greedy generation against transformers' own `generate`, token by token, in every layout."""

from __future__ import annotations

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

PROMPTS = [[108, 105, 110], [49], [44, 32, 97, 110, 100, 32, 116, 104, 101, 32, 111], [115, 97, 121, 115, 32]]
MAX_TOKENS = 12


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return runs and transformers' output from their exported weights, by model name; trained when first requested."""
    known: dict[str, tuple[Path, list[list[int]]]] = {}

    def get(name: str) -> tuple[Path, list[list[int]]]:
        if name not in known:
            folder = tmp_path_factory.mktemp(name.partition(",")[0])
            run = train(folder, name)
            known[name] = run, on_ranks(1, by_transformers, str(run), str(folder / "hf"))[0]
        return known[name]

    return get


def by_transformers(run: str, output: str) -> list[list[int]]:
    """Export the run's newest checkpoint, and generate with plain transformers, one prompt at a time."""
    import torch
    import transformers

    from dslpar.checkpoint.export_transformers import export_transformers
    from dslpar.inference.trained import find_checkpoint

    export_transformers(find_checkpoint(Path(run)), Path(output))
    config = transformers.AutoConfig.from_pretrained(output)
    model: Any = getattr(transformers, config.architectures[0]).from_pretrained(output).eval()
    found = []
    for prompt in PROMPTS:
        settings = {"do_sample": False, "max_new_tokens": MAX_TOKENS, "pad_token_id": 0, "eos_token_id": None}
        settings |= {"decoder_start_token_id": 0} if config.is_encoder_decoder else {}
        mask = torch.ones(1, len(prompt), dtype=torch.long)
        made = model.generate(torch.tensor([prompt]), attention_mask=mask, **settings)[0].tolist()
        found.append(made[1:] if config.is_encoder_decoder else made[len(prompt) :])
    return found


def by_dslpar(
    run: str, overrides: Sequence[str], world: int, prompts: Sequence[Sequence[int]], options: dict[str, Any]
) -> list[list[int]]:
    """Generate on these ranks, and return the new ids of each prompt."""
    import torch

    from dslpar.distributed.groups import Groups
    from dslpar.inference import generation
    from dslpar.inference.model import InferenceModel
    from dslpar.inference.trained import open_run

    trained = open_run(run, world, overrides)
    model = InferenceModel(trained, Groups(trained.job.mesh), torch.device("cpu"))
    return generation.generate(model, prompts, generation.Options(**{"max_tokens": MAX_TOKENS, **options}))


FAMILIES = ("gpt", "gpt, rotary", "llama", "gpt2", "mistral", "mixtral", "t5", "bloom")
OF_PIECES = [layout for layout in LAYOUTS if "ring" in layout or "ulysses" in layout]
REFUSED = {
    *((name, layout) for name in ("t5", "bloom") for layout in OF_PIECES),
    *((name, "1d-8") for name in ("gpt, rotary", "llama", "mistral", "mixtral")),
}
"""Attention that no context mode can shard, and four key heads over eight ranks."""


def is_asked(name: str, layout: str) -> bool:
    """Return whether a cell runs: Llama on every layout, others alone and on every fourth; policies' tests cover
    sharding.
    """
    if layout == "alone" or (name, layout) in REFUSED:
        return layout == "alone"
    turn = list(LAYOUTS).index(layout) + FAMILIES.index(name)
    return name == "llama" or turn % 4 == 0 or (name == "gpt" and layout in ("2d-4", "pipe-2-1d-2"))


@pytest.mark.parametrize(
    ("name", "layout"),
    sampled(
        [(name, layout) for name in FAMILIES for layout in ("alone", *LAYOUTS) if is_asked(name, layout)],
        lambda row: row in {("gpt", "alone"), ("gpt", "2d-4"), ("gpt", "pipe-2-1d-2")},
    ),
)
def test_greedy_generation_equals_transformers(runs: Any, name: str, layout: str) -> None:
    run, expected = runs(name)
    world, *overrides = LAYOUTS.get(layout, (1,))
    for made in on_ranks(world, by_dslpar, str(run), overrides, world, PROMPTS, {}):
        assert made == expected


def lengths_run(run: str, overrides: Sequence[str], world: int) -> list[int]:
    """Return the lengths of the sequences that went through the model, in order, on the first stage."""
    import torch

    from dslpar.distributed.groups import Groups
    from dslpar.inference import generation
    from dslpar.inference.model import InferenceModel
    from dslpar.inference.trained import open_run

    trained, lengths = open_run(run, world, overrides), []
    model = InferenceModel(trained, Groups(trained.job.mesh), torch.device("cpu"))
    model.module.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    generation.generate(model, [[5, 6, 7], [8, 9, 10, 11, 12]], generation.Options(max_tokens=3))
    return lengths


@pytest.mark.parametrize(
    ("name", "layout", "expected"),
    [
        # the shorter prompt, then the rest of the longer one, and the drawn tokens
        ("gpt", "alone", [3, 1, 1, 1, 1]),
        pytest.param("llama", "3d-8", [3, 1, 1, 1, 1], marks=pytest.mark.prove),
        # chunks begin where a mode's pieces do
        pytest.param("mixtral", "1d-2-sequence", [4, 2, 2, 2, 2], marks=pytest.mark.prove),
        pytest.param("bloom", "alone", [3, 4, 5, 6, 7], marks=pytest.mark.prove),
        pytest.param("gpt", "ring-2", [4, 4, 6, 6, 8], marks=pytest.mark.prove),
    ],
)
def test_a_step_runs_what_was_not_run_before(runs: Any, name: str, layout: str, expected: list[int]) -> None:
    run, _ = runs(name)
    world, *overrides = LAYOUTS.get(layout, (1,))
    assert on_ranks(world, lengths_run, str(run), overrides, world)[0] == expected


@pytest.mark.prove
@pytest.mark.parametrize(("name", "layout"), sorted(REFUSED))
def test_what_is_refused_says_why(runs: Any, name: str, layout: str) -> None:
    run, _ = runs(name)
    world, *overrides = LAYOUTS[layout]

    def refused(*args: Any) -> list[str]:
        with pytest.raises(DslparError) as caught:
            by_dslpar(*args)
        return [found.code for found in caught.value.findings]

    for codes in on_ranks(world, refused, str(run), overrides, world, PROMPTS, {}):
        assert {code[:3] for code in codes} == {"TEN"}


def test_a_prompt_among_others_is_as_it_is_alone(runs: Any) -> None:
    """With sampling, too: draws depend only on the seed, the prompt and the position, and padding changes nothing."""
    from dslpar.inference.sampling import Sampling

    run, _ = runs("gpt")
    options = {"sampling": Sampling(temperature=0.9, top_k=40, top_p=0.95, seed=5)}
    (together,) = on_ranks(1, by_dslpar, str(run), [], 1, PROMPTS, options)
    for prompt, expected in zip(PROMPTS, together, strict=True):
        assert on_ranks(1, by_dslpar, str(run), [], 1, [prompt], options) == [[expected]]
    (others,) = on_ranks(1, by_dslpar, str(run), [], 1, PROMPTS, {"sampling": options["sampling"]._replace(seed=6)})
    assert others != together


@pytest.mark.parametrize("layout", sampled(LAYOUTS, {"1d-2-sequence"}))
def test_draws_are_the_same_on_every_layout(runs: Any, layout: str) -> None:
    from dslpar.inference.sampling import Sampling

    run, _ = runs("gpt")
    options = {"sampling": Sampling(temperature=0.9, top_p=0.95, seed=5)}
    (expected,) = on_ranks(1, by_dslpar, str(run), [], 1, PROMPTS, options)
    world, *overrides = LAYOUTS[layout]
    for made in on_ranks(world, by_dslpar, str(run), overrides, world, PROMPTS, options):
        assert made == expected


def test_prompts_end_by_themselves(runs: Any) -> None:
    """One ends at its end token, one at a stop text; the others continue."""
    run, expected = runs("gpt")
    end = expected[0][3]
    (made,) = on_ranks(1, by_dslpar, str(run), [], 1, PROMPTS, {"end": end})
    for new, whole in zip(made, expected, strict=True):
        assert new == whole[: whole.index(end) + 1] if end in whole else new == whole


def test_prompts_that_cannot_be_used(runs: Any) -> None:
    run, _ = runs("gpt")

    def refused(prompts: list[list[int]]) -> list[str]:
        with pytest.raises(DslparError) as caught:
            by_dslpar(str(run), [], 1, prompts, {})
        return [found.message for found in caught.value.findings]

    (messages,) = on_ranks(1, refused, [[], [259], [1] * 21])
    assert messages == [
        "prompt 1 has no tokens",
        "prompt 2 has the token id 259, outside the model's vocabulary of 259 tokens",
        "prompt 3 has 21 tokens, 33 with the new ones, but the model takes 32",
    ]


def test_weights_of_another_model_are_refused(runs: Any) -> None:
    run, _ = runs("gpt")

    def refused(override: str) -> list[str]:
        with pytest.raises(DslparError) as caught:
            by_dslpar(str(run), [override], 1, PROMPTS, {})
        return [found.code for found in caught.value.findings]

    # the shapes of all weights are equal, but the numbers would not be
    assert on_ranks(1, refused, "model.num_heads=4") == [["CKP208"]]
