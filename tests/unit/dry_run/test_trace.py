"""Traced costs equal the closed forms if there are any, and otherwise torch's own counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from dslpar.costs.any_model import flops_per_token
from dslpar.costs.model_costs import ModelCosts
from dslpar.dry_run.op_counter import OpCounter
from dslpar.dry_run.trace import TraceError, Tracer
from dslpar.forecast.device import DEVICES
from dslpar.forecast.model_states import states
from dslpar.forecast.plan import Machine, forecast
from dslpar.forecast.workload import workload_of
from dslpar.layout.resolve import Job
from dslpar.linter import check
from tests.support.ranks import on_ranks
from tests.support.sampling import sampled
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

GPT = "dict(type='GPT', num_layers=4, hidden_size=64, num_heads=8, vocab_size=256, max_seq_len=32{})"
LLAMA = ", num_kv_heads=4, norm='rmsnorm', activation='swiglu', positions='rotary', bias=False, tie_embeddings=False"
RESMLP = "dict(type='ResMLP', num_layers=4, hidden_size=64, image_size=32, patch_size=8, num_classes=10)"
MODELS = {"gpt": GPT.format(""), "llama": GPT.format(LLAMA), "resmlp": RESMLP}
LAYOUTS = {
    "alone": (1, ""),
    "1d": (4, "tensor=dict(size=4, mode='1d')"),
    "1d, sequence, pipeline": (8, "pipeline=2, tensor=dict(size=4, mode='1d', sequence=True)"),
    "2d": (4, "tensor=dict(size=4, mode='2d')"),
    "3d": (8, "tensor=dict(size=8, mode='3d')"),
    "ring": (4, "context=dict(size=4, impl='ring')"),
}
CASES = [
    (name, layout)
    for name in MODELS
    for layout in LAYOUTS
    if (name, layout) not in {("resmlp", "ring"), ("llama", "1d, sequence, pipeline")}
]


def job_of(model: str, layout: str = "alone", more: str = "") -> Job:
    world, parallel = LAYOUTS[layout]
    text = f"model = {model}\nparallel = dict({parallel})\nbatch = dict(global_size=16, micro_size=4)\n"
    text += f"precision = 'bf16'\nzero = 1\ntrain = dict(steps=3)\n{more}"
    return check.resolve(check.load_text(text, "traced.py"), world)


def _sums(costs: ModelCosts, num_layers: int) -> dict[str, Any]:
    times = 1 if costs.units else num_layers
    parts = [*[costs.layer] * times, costs.first, costs.last]
    sent: dict[object, float] = {}
    for part in parts:
        for way, traffic in (("forward", part.traffic.forward), ("backward", part.traffic.backward)):
            for key, number in traffic.items():
                name = (way, *key)
                sent[name] = sent.get(name, 0.0) + float(number)
    return {
        "weights": sum(float(part.memory.weights) for part in parts) - float(costs.tied),
        "products": sum(r * d * c for part in parts for r, d, c in part.work.products),
        "sent": {key: number for key, number in sent.items() if number},
        "logits": float(costs.logits),
        "boundary": float(costs.boundary),
    }


def _compared(name: str, layout: str) -> None:
    job = job_of(MODELS[name], layout)
    tracer = Tracer(job)
    known, traced = workload_of(job), workload_of(tracer.job, tracer.costs_of)
    assert known is not None
    assert traced is not None
    ours, expected = _sums(traced.costs, 4), _sums(known.costs, 4)
    sent, expected_sent = ours.pop("sent"), expected.pop("sent")
    if name == "resmlp":  # its closed form has no logits, since classes are few
        ours.pop("logits"), expected.pop("logits")
    assert ours == expected
    if layout != "ring":  # its backward sends gradients in fp32, two elements each, and the closed form counts one
        assert sent.keys() == expected_sent.keys()
        for key, number in sent.items():
            # fp32 numbers, such as a norm's, are elements of twice the size; all-reduces have little else
            assert number == pytest.approx(expected_sent[key], rel=1.0 if "all_reduce" in key else 0.1), key
    machine = Machine.usual(DEVICES["a100-80g"])
    made, other = forecast(traced, machine), forecast(known, machine)
    for own, its in zip(made.memory, other.memory, strict=True):
        assert own.weights == its.weights
        # Only closed forms count the peak within a layer's backward. Only traces have sine and cosine tables, and
        # images kept by the first layer: much beside 32 tokens of 64 features.
        beyond = 0.1 if name == "resmlp" else 0.04
        assert own.activations - own.working == pytest.approx(its.activations - its.working, rel=beyond)
    assert made.time.step_s == pytest.approx(other.time.step_s, rel=0.25)
    if name != "resmlp":
        assert traced.costs.flops == flops_per_token(job.spec.model, 32)


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_a_trace_finds_what_closed_forms_say(name: str, layout: str) -> None:
    on_ranks(1, _compared, name, layout, init=None)


T5 = (
    "dict(type='transformers.T5ForConditionalGeneration', config=dict(d_model=64, d_kv=8, d_ff=128, num_layers=2,"
    " num_decoder_layers=2, num_heads=8, vocab_size=386, dropout_rate=0.0))"
)
BERT = (
    "dict(type='transformers.BertForMaskedLM', config=dict(num_hidden_layers=2, num_attention_heads=4, hidden_size=64,"
    " intermediate_size=128, vocab_size=260, max_position_embeddings=32))"
)
RESNET = (
    "dict(type='transformers.ResNetForImageClassification', config=dict(num_channels=3, embedding_size=16,"
    " hidden_sizes=[32, 64], depths=[2, 2], num_labels=10))"
)
SWIN = (
    "dict(type='transformers.SwinForImageClassification', config=dict(image_size=32, patch_size=2, num_channels=3,"
    " embed_dim=24, depths=[2, 2], num_heads=[2, 4], window_size=4, num_labels=10))"
)
VIT = (
    "dict(type='transformers.ViTForImageClassification', config=dict(num_hidden_layers=2, num_attention_heads=4,"
    " hidden_size=64, intermediate_size=128, image_size=32, patch_size=4, num_channels=3, num_labels=10))"
)
OTHERS = {
    "vit": (VIT, "dict(type='images', path='images.npz', eval_fraction=0.2)"),
    "t5": (T5, "dict(type='span', seq_len=24, files=['text.txt'])"),
    "bert": (BERT, "dict(type='mlm', seq_len=32, files=['text.txt'])"),
    "resnet": (RESNET, "dict(type='images', path='images.npz', eval_fraction=0.2)"),
    "swin": (SWIN, "dict(type='images', path='images.npz', eval_fraction=0.2)"),
}


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the text and image files that the configs name."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 2000)
    drawn = np.random.default_rng(0)
    images = drawn.integers(0, 255, (200, 32, 32, 3), dtype=np.uint8)
    np.savez(tmp_path / "images.npz", images=images, labels=drawn.integers(0, 10, 200))
    monkeypatch.chdir(tmp_path)


def _flops_by_torch(name: str) -> tuple[float, float]:
    """Return a sample's forward FLOPs as traced, and as torch counts them on the whole model."""
    import transformers

    model, data = OTHERS[name]
    job = job_of(model, more=f"data = {data}\n")
    tracer = Tracer(job)
    costs = tracer.costs_of(job.mesh.tensor, 2)
    assert costs is not None
    products = sum(2 * r * d * c for r, d, c in costs.layer.work.products)
    scores = sum(4 * each.queries * each.keys for each in costs.layer.work.scores)
    cls = getattr(transformers, job.spec.model.target.rpartition(".")[2])  # type: ignore[union-attr]
    taken = [torch.zeros(tuple(shape), dtype=dtype) for dtype, shape in tracer._taken(2).inputs]
    with torch.device("meta"):
        whole = cls(cls.config_class(**job.spec.model.args["config"]))  # type: ignore[union-attr]
    names = {"t5": ("input_ids", "attention_mask", "decoder_input_ids"), "bert": ("input_ids",)}.get(name, ())
    given = dict(zip(names or ("pixel_values",), [each.to("meta") for each in taken], strict=False))
    given |= {"attention_mask": None} if name == "t5" else {}
    whole.config._attn_implementation = "sdpa"
    with FlopCounterMode(display=False) as counter, OpCounter(torch.bfloat16):
        whole.eval()(
            **{
                key: each.float() if each is not None and each.is_floating_point() else each
                for key, each in given.items()
            }
        )
    return (products + scores) / 2, counter.get_total_flops() / 2


@pytest.mark.parametrize("name", ["bert", "resnet", "swin", "vit"])
def test_operations_are_those_that_torch_counts(data: None, name: str) -> None:
    ((ours, expected),) = on_ranks(1, _flops_by_torch, name, init=None)
    assert ours == pytest.approx(expected, rel=0.02)


def _stages(name: str) -> None:
    model, data = OTHERS[name]
    world, more = 2, f"data = {data}\nparallel = dict(pipeline=2)\n"
    text = f"model = {model}\n{more}batch = dict(global_size=16, micro_size=4)\nprecision = 'bf16'\nzero = 1\n"
    job = check.resolve(check.load_text(text + "train = dict(steps=3)\n", "traced.py"), world)
    tracer = Tracer(job)
    workload = workload_of(tracer.job, tracer.costs_of)
    assert workload is not None
    counts = tracer.job.stages.counts
    assert counts is not None
    assert sum(counts) == len(workload.costs.units)
    assert len(counts) == 2
    assert sum(workload.layers_on_ranks) == pytest.approx(1.0)
    held = workload.weights(0) + workload.weights(1)
    assert held == sum(float(each.memory.weights) for each in workload.costs.units)
    assert len(set(workload.costs.shares)) > 1, "layers differ"
    made = forecast(workload, Machine.usual(DEVICES["a100-80g"]))
    assert made.verdict == "fits"
    assert made.time.step_s > 0
    assert made.time.bubble_s > 0
    # evenly: interpolated values equal untraced ones
    direct = tracer._trace(workload.mesh.tensor)
    assert direct is not None
    twice = tracer.costs_of(workload.mesh.tensor, 2)
    assert twice is not None
    assert float(twice.logits) == float(direct[1].logits)


@pytest.mark.parametrize("name", sampled(OTHERS, {"bert", "t5", "vit"}))
def test_models_whose_layers_differ_are_cut_and_forecast(data: None, name: str) -> None:
    on_ranks(1, _stages, name, init=None)


def _of_size(size: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values interpolated between two traced sizes, and traced directly."""
    job = job_of(MODELS["gpt"], "2d")
    tracer = Tracer(job)
    between = tracer.costs_of(job.mesh.tensor, size)
    from dslpar.distributed.groups import Groups
    from dslpar.dry_run.fake_rank import fake_rank
    from dslpar.dry_run.trace import _Trace
    from dslpar.engine.model import model_from_job

    with fake_rank(job.mesh, 0) as groups:
        assert isinstance(groups, Groups)
        traced = _Trace(job, model_from_job(job), groups).run(tracer._taken(size), size)
    assert between is not None
    return _sums(between, 1), _sums(traced, 1)


ADAPTERS = {
    "alone": ("alone", "r=3", False),
    "2d": ("2d", "r=3", False),
    "a tied table": ("alone", "r=3", True),
    "as large as a norm's gain": ("alone", "r=1", False),
    "a linear trained whole": ("alone", "r=3, target_modules=['q_proj'], modules_to_save=['down_proj']", False),
}


def _with_adapters(layout: str, lora: str, tied: bool) -> None:
    config = "hidden_size=64, num_attention_heads=8, num_key_value_heads=4, intermediate_size=96, vocab_size=256"
    config += f", num_hidden_layers=4, tie_word_embeddings={tied}"
    llama = f"dict(type='transformers.LlamaForCausalLM', config=dict({config}), lora=dict({lora}))"
    job = job_of(llama, layout, "data = dict(seq_len=16)\n")
    tracer = Tracer(job)
    known, traced = workload_of(job), workload_of(tracer.job, tracer.costs_of)
    assert known is not None
    assert traced is not None
    assert traced.trained(0) == known.trained(0) > 0
    assert traced.weights(0) == known.weights(0)
    frozen = [sum(r * d * c for r, d, c in part.work.frozen) for part in (known.costs.layer, known.costs.last)]
    units = (*traced.costs.units, traced.costs.last)
    assert sum(r * d * c for part in units for r, d, c in part.work.frozen) == 4 * frozen[0] + frozen[1]
    trained = known.costs.layer.work.products + known.costs.layer.work.adapters
    products = sum(r * d * c for r, d, c in trained)
    assert sum(r * d * c for part in units for r, d, c in part.work.products) == 4 * products
    assert states(traced, 0).weights == states(known, 0).weights


@pytest.mark.skipif(not HAS_TRANSFORMERS, reason=NO_TRANSFORMERS)
@pytest.mark.parametrize("name", ADAPTERS)
def test_what_is_frozen_beside_adapters_is_known(name: str) -> None:
    on_ranks(1, _with_adapters, *ADAPTERS[name], init=None)


@pytest.mark.parametrize("size", [6, 16])
def test_two_sizes_of_a_micro_batch_tell_all(size: int) -> None:
    ((between, traced),) = on_ranks(1, _of_size, size, init=None)
    assert between.pop("sent") == pytest.approx(traced.pop("sent"))
    assert between == pytest.approx(traced)


def _refused(text: str) -> str:
    job = check.resolve(check.load_text(text, "traced.py"), 1)
    tracer = Tracer(job)
    with pytest.raises(TraceError) as caught:
        tracer.costs_of(job.mesh.tensor, 1)
    return str(caught.value)


def test_a_layer_that_cannot_take_what_comes_is_named() -> None:
    layers = "[dict(type='torch.nn.Embedding', num_embeddings=256, embedding_dim=8),"
    layers += " dict(type='torch.nn.Linear', in_features=9, out_features=256)]"
    text = f"model = dict(type='Sequential', layers_cfg={layers})\ndata = dict(seq_len=8)\n"
    text += "batch = dict(micro_size=1)\ntrain = dict(steps=1)\n"
    (said,) = on_ranks(1, _refused, text, init=None)
    assert "cannot be traced" in said
    assert "'1'" in said


CHAIN = """
model = dict(type='Sequential', layers_cfg=[{layers}])
data = dict(type='images', path='images.npz')
batch = dict(micro_size=2)
train = dict(steps=1{more})
"""
CONV = "dict(type='torch.nn.Conv2d', in_channels={}, out_channels={}, kernel_size=3, {})"
RELU = "dict(type='torch.nn.ReLU'{})"
HEAD = "dict(type='torch.nn.Flatten'), dict(type='torch.nn.Linear', in_features={}, out_features=10)"


def _chain(layers: list[str], more: str = "") -> ModelCosts:
    text = CHAIN.format(layers=", ".join(layers), more=more)
    job = check.resolve(check.load_text(text, "traced.py"), 1)
    costs = Tracer(job).costs_of(job.mesh.tensor, 2)
    assert costs is not None
    return costs


def _convolutions() -> list[float]:
    same, halved = "padding=1", "padding=1, stride=2"
    first, alike, other = CONV.format(3, 8, same), CONV.format(8, 8, same), CONV.format(8, 8, halved)
    costs = _chain([first, alike, other, HEAD.format(2048)])
    return [rows for unit in costs.units for rows, _, _ in unit.work.products]


def test_layers_that_differ_in_their_stride_are_not_alike(data: None) -> None:
    ((rows),) = on_ranks(1, _convolutions, init=None)
    assert rows == [2 * 32 * 32, 2 * 32 * 32, 2 * 16 * 16, 2]


def _saved_by_chain(inplace: str) -> list[float]:
    costs = _chain([CONV.format(3, 8, "padding=1"), RELU.format(inplace), HEAD.format(8192)])
    return [float(unit.memory.saved.elements) for unit in costs.units]


@pytest.mark.parametrize("inplace", ["", ", inplace=True"])
def test_what_passes_through_layers_is_saved_once(data: None, inplace: str) -> None:
    """A ReLU saves its result, the Flatten after it makes a view, and the next Linear takes the same."""
    ((saved),) = on_ranks(1, _saved_by_chain, inplace, init=None)
    assert saved == [2 * 3 * 32 * 32, 2 * 8 * 32 * 32, 0.0, 0.0]


def _recomputed(name: str) -> tuple[float, float]:
    model, data = OTHERS[name]
    job = job_of(model, more=f"data = {data}\n")
    tracer = Tracer(job)
    workload = workload_of(tracer.job, tracer.costs_of)
    assert workload is not None
    machine = Machine.usual(DEVICES["a100-80g"])
    made = forecast(workload, machine), forecast(replace(workload, recompute="full"), machine)
    whole, again = (each.memory[0].activations - each.memory[0].working for each in made)
    return whole, again


@pytest.mark.parametrize(("name", "may"), [("resnet", False), ("vit", True)])
def test_what_is_never_recomputed_is_saved_all_the_same(data: None, name: str, may: bool) -> None:
    """Layers with statistics of their inputs, such as ResNet's, run only once."""
    ((whole, again),) = on_ranks(1, _recomputed, name, init=None)
    assert (again < 0.8 * whole) if may else (again == whole)


class TestOpCounter:
    """Operations by hand."""

    def test_products(self) -> None:
        x, layer = torch.empty(2, 8, 16, device="meta"), nn.Linear(16, 24, device="meta")
        with OpCounter(torch.float32) as counted:
            layer(x)
        assert [tuple(each) for each in counted.work.products] == [(16.0, 16.0, 24.0)]
        assert counted.work.elementwise == 0

    def test_a_convolution_is_the_product_that_im2col_makes(self) -> None:
        layer = nn.Conv2d(4, 8, 3, padding=1, stride=2, groups=2, device="meta")
        with OpCounter(torch.float32) as counted:
            layer(torch.empty(5, 4, 16, 16, device="meta"))
        # Two groups: 5 * 8 * 8 positions, 2 channels of 9, 4 channels out, each.
        assert [tuple(each) for each in counted.work.products] == [(640.0, 18.0, 4.0)]

    def test_elements_are_of_the_type_s_size(self) -> None:
        x = torch.empty(10, dtype=torch.bfloat16, device="meta")
        with OpCounter(torch.bfloat16) as counted:
            x.float() + 1
        assert counted.work.elementwise == (10 + 20) + (20 + 20)

    def test_a_table_is_not_read(self) -> None:
        table, ids = nn.Embedding(1000, 16, device="meta"), torch.zeros(6, dtype=torch.long, device="meta")
        with OpCounter(torch.float32) as counted:
            table(ids)
        assert counted.work.elementwise == 2 * 6 * 16

    def test_views_cost_nothing(self) -> None:
        x = torch.empty(4, 6, device="meta")
        with OpCounter(torch.float32) as counted:
            x.view(6, 4).t().unsqueeze(0).detach()
        assert counted.work.elementwise == 0
