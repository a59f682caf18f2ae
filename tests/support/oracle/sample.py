"""Random configs over the whole spec, one per seed: legal by the sampler's rules, or broken in one place.

    case = sample(17)
    case.text, case.world, case.ranks, case.broken

Sizes are chosen to fit the layout first, as a person does. Options are drawn from the spec's own fields and tables, by
kind. A new key of a known kind is sampled automatically, and a test lists keys of unknown kinds. A legal sample and
then a mutation is the method of grammar-based fuzzers. Csmith's random programs against a second compiler are the model
of the whole test.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from random import Random
from typing import Any, NamedTuple

from dslpar.core.mesh import ORDERS
from dslpar.layout import divisors
from dslpar.layout.family_interface import conditions
from dslpar.layout.modes import cuboid_of
from dslpar.layout.nearest import nearest_attention
from dslpar.models.gpt import section
from dslpar.models.gpt.layout import attention_sizes
from dslpar.schema import deepspeed_policy
from dslpar.schema import sections as schema_sections
from dslpar.schema.fields import facts_of
from dslpar.schema.keys import aliases_of
from dslpar.schema.torch_optimizers import OPTIMIZERS
from dslpar.schema.torch_schedulers import LR_SCHEDULERS
from tests.support.oracle import values
from tests.support.oracle.config_mistakes import BREAKINGS

Sections = dict[str, Any]
MOST_RANKS = 64


class Case(NamedTuple):
    """One config, its world size, and the ranks to build."""

    seed: int
    text: str
    world: int
    ranks: tuple[int, ...]
    broken: str
    """The breaking, or "" for a legal config."""


class Layout(NamedTuple):
    """Sizes of the mesh, and the contents of `parallel.tensor`."""

    data: int
    pipe: int
    tensor: Sections
    context: Sections = {}  # noqa: RUF012

    @property
    def world(self) -> int:
        """Return the number of ranks."""
        return self.data * self.pipe * self.tensor.get("size", 1) * self.context.get("size", 1)

    @property
    def cuboid(self) -> Any:
        """Return the mesh's tensor axes."""
        tensor = schema_sections.TensorParallel(**self.tensor) if self.tensor else None
        return cuboid_of(tensor, schema_sections.ContextParallel(**self.context) if self.context else None)


def sample(seed: int) -> Case:
    """Return the config of a seed."""
    rng = Random(f"oracle {seed}")
    apart = Random(f"oracle later {seed}")
    layout = _with_context(apart, _layout(rng))
    sections = _sections(rng, layout)
    _add_options(apart, sections)
    world, broken = layout.world, ""
    if rng.random() < 0.45:
        name = rng.choice(list(BREAKINGS))
        broken, world = name, BREAKINGS[name](rng, sections, world) or world
    last = world - 1
    other = rng.choice((last, rng.randint(0, last)))
    return Case(seed, text_of(rng, sections), world, tuple(sorted({0, other})), broken)


# ---- the layout ----


def _layout(rng: Random) -> Layout:
    while True:
        made = Layout(rng.choice((1, 1, 2, 3, 4, 8)), rng.choice((1, 1, 1, 2, 2, 3, 4)), rng.choice(_TENSORS)(rng))
        if made.world <= MOST_RANKS:
            return made


def _with_context(rng: Random, layout: Layout) -> Layout:
    """Perhaps add a context axis and overlap, with a separate generator so that other samples stay the same."""
    if layout.tensor.get("size", 1) > 1 and rng.random() < 0.1:
        layout = layout._replace(tensor=layout.tensor | {"comm_overlap": rng.choice((True, False))})
    size = rng.choice((2, 2, 3, 4))
    if layout.tensor.get("mode") in ("2.5d", "sequence") or layout.world * size > MOST_RANKS or rng.random() < 0.85:
        return layout
    context: Sections = {"size": size}
    if rng.random() < 0.7:
        context["impl"] = rng.choice(("ring", "ulysses"))
    elif size == 4:
        context |= {"impl": "hybrid", "ulysses_size": 2}
    return layout._replace(context=context)


def _add_options(rng: Random, sections: Sections) -> None:
    """Add keys that depend on other keys, with a separate generator as well."""
    is_gpt = sections["model"].get("type") in ("GPT", "dslpar.models.GPT")
    if "activation_checkpoint" in sections and is_gpt and rng.random() < 0.3:
        sections["activation_checkpoint"] = {
            "interval": 1,
            "offload": rng.choice((True, False)),
            "mlp_chunks": rng.choice((1, 2)),
        }
    if "train" in sections and rng.random() < 0.1:
        sections["train"]["compile_backend"] = "aot_eager"
    if "train" in sections and sections["train"].get("check_replicas") and rng.random() < 0.5:
        sections["train"]["on_replica_difference"] = rng.choice(("stop", "report"))
    if "train" in sections and rng.random() < 0.1:
        sections["train"]["compile_components"] = rng.choice((["loss"], ["layers"], ("layers", "loss"), []))
    tensor = sections.get("parallel", {}).get("tensor")
    options = tensor.get("kwargs", tensor) if isinstance(tensor, dict) else {}
    if options.get("comm_overlap") and rng.random() < 0.5:
        options["comm_overlap"] = "symmetric_memory"


def _keep(rng: Random, **tensor: Any) -> Sections:
    return tensor | ({"keep": rng.choice(_choices("keep"))} if rng.random() < 0.3 else {})


def _kept(rng: Random) -> Sections:
    """Return options for the activations that a cuboid keeps."""
    return {name: rng.choice(_choices(name)) for name in ("residual", "inner") if rng.random() < 0.5}


def _choices(name: str) -> tuple[str, ...]:
    """Return the choices of a key of `parallel.tensor`."""
    return facts_of(schema_sections.TensorParallel.__dataclass_fields__[name]).choices


def _none(rng: Random) -> Sections:
    return {}


def _1d(rng: Random) -> Sections:
    more = {"sequence": rng.choice((True, False))} if rng.random() < 0.5 else {}
    return _keep(rng, size=rng.choice((1, 2, 3, 4, 6)), mode="1d", **more)


def _2d(rng: Random) -> Sections:
    return _keep(rng, size=rng.choice((1, 4, 9)), mode="2d")


def _tesseract(rng: Random) -> Sections:
    depth, side = rng.choice(((1, 2), (2, 2), (3, 1), (3, 2), (1, 1)))
    return _keep(rng, size=depth * side * side, mode="2.5d", depth=depth)


def _3d(rng: Random) -> Sections:
    return _keep(rng, size=rng.choice((1, 8, 8, 27)), mode="3d", **_kept(rng))


def _sequence(rng: Random) -> Sections:
    impl = {"impl": rng.choice(_choices("impl"))} if rng.random() < 0.7 else {}
    return _keep(rng, size=rng.choice((1, 2, 3, 4)), mode="sequence", **impl)


def _cuboid(rng: Random) -> Sections:
    shape = rng.choice(((2, 2, 1), (1, 2, 2), (2, 1, 2), (2, 3, 1), (1, 3, 2), (2, 3, 2), (1, 1, 4), (4, 1, 1)))
    return _keep(rng, size=math.prod(shape), mode="cuboid", shape=rng.choice((shape, list(shape))), **_kept(rng))


_TENSORS: tuple[Callable[[Random], Sections], ...] = (_none, _none, _1d, _1d, _2d, _tesseract, _3d, _sequence, _cuboid)


# ---- sections ----


def _sections(rng: Random, layout: Layout) -> Sections:
    """Return all sections of the config; empty ones are left out."""
    made: Sections = {"model": _model(rng, layout)}
    made |= _parallel(rng, layout, made["model"])
    made["zero"] = _zero(rng, layout)
    stage = made["zero"]["stage"] if isinstance(made["zero"], dict) else made["zero"]
    made["precision"] = _precision(rng, stage)
    made["optimizer"] = _optimizer(rng, layout, made["zero"], stage)
    made["train"] = made.get("train", {}) | _fields(rng, schema_sections.Train, 4, without=("dist", "steps"))
    made["train"] |= {"steps": rng.choice((10, 100))} if rng.random() < 0.4 else {}
    made["lr_scheduler"] = _schedule(rng, made["optimizer"], made["train"].get("steps", 100))
    made["batch"], made["schedule"] = _batch(rng, layout)
    made["data"] = _data(rng, made["model"], layout)
    made["activation_checkpoint"] = rng.choice((None, None, 1, 2, {"interval": 2}))
    made["checkpoint"] = rng.choice((None, None, None, _fields(rng, schema_sections.Checkpoint, 2)))
    made["monitor"] = _monitor(rng)
    made["gradient_handler"] = _handlers(rng, stage)
    made["deepspeed"] = _raw(rng)
    return {name: section for name, section in made.items() if section not in (None, {}) or rng.random() < 0.05}


def _fields(rng: Random, cls: type, most: int, without: tuple[str, ...] = ()) -> Sections:
    """Return some fields of a section, with values of their types."""
    types = {item.name: facts_of(item).choices or str(item.type).removesuffix(" | None") for item in fields(cls)}
    known = {name: type_ for name, type_ in types.items() if type_ in values.LEGAL or isinstance(type_, tuple)}
    return values.some(rng, known, most, without)


def _parallel(rng: Random, layout: Layout, model: Sections) -> Sections:
    """Return `parallel`, or LiBai's form if it can express the same."""
    pipeline = _pipeline(rng, layout.pipe, model)
    is_libai_s = layout.tensor.get("mode", "1d") == "1d" and set(layout.tensor) <= {"size", "mode"}
    if is_libai_s and rng.random() < 0.3 and not layout.context:
        return {"train": {"dist": _dist(rng, layout, pipeline, num_layers(model))}}
    made: Sections = {}
    if pipeline is not None:
        made["pipeline"] = pipeline
    if layout.tensor:
        inline = {name: layout.tensor[name] for name in layout.tensor if name not in ("size", "mode")}
        kwargs = inline and rng.random() < 0.2
        own = {name: value for name, value in layout.tensor.items() if name not in inline}
        made["tensor"] = own | {"kwargs": inline} if kwargs else dict(layout.tensor)
        if layout.tensor["size"] == 1 and rng.random() < 0.5:
            made["tensor"] = 1
    if rng.random() < 0.3:
        made["data"] = rng.choice((layout.data, {"size": layout.data}))
    if layout.context:
        made["context"] = dict(layout.context)
    if rng.random() < 0.3:
        made["order"] = rng.choice(ORDERS)
    return {"parallel": made}


def _pipeline(rng: Random, size: int, model: Sections) -> Any:
    if size == 1:
        return rng.choice((None, None, 1, {"size": 1}))
    layers = num_layers(model)
    cuts: list[Sections] = [{"method": name} for name in schema_sections.METHODS]
    if layers is not None:
        counts = _counts(rng, layers, size)
        ids = [stage for stage, count in enumerate(counts) for _ in range(count)]
        name = "Block" if model.get("type") != "Sequential" else "Linear"
        cuts += [{"counts": counts}, {"stage_ids": ids}, {"stage_ids": tuple(ids)}, {"method": f"type:{name}"}]
    return rng.choice((size, {"size": size}, {"size": size} | rng.choice(cuts), {"size": size} | rng.choice(cuts)))


def _counts(rng: Random, layers: int, size: int) -> list[int]:
    """Return a partition without an empty stage."""
    marks = sorted(rng.sample(range(1, layers), size - 1))
    return [end - begin for begin, end in zip([0, *marks], [*marks, layers], strict=True)]


def _dist(rng: Random, layout: Layout, pipeline: Any, layers: int | None) -> Sections:
    made: Sections = {}
    if layout.pipe > 1:
        made["pipeline_parallel_size"] = layout.pipe
        if isinstance(pipeline, dict) and pipeline.get("stage_ids"):
            made["custom_pipeline_stage_id"] = list(pipeline["stage_ids"])
    if layout.tensor.get("size", 1) > 1 or rng.random() < 0.3:
        made["tensor_parallel_size"] = layout.tensor.get("size", 1)
    if rng.random() < 0.5:
        made["data_parallel_size"] = layout.data
    if rng.random() < 0.2:
        made |= {"auto_pipeline_stage_id": [0, 1], "actual_pipeline_stage_id": [0, 1]}
    if layers is not None and rng.random() < 0.2:
        made["pipeline_num_layers"] = layers
    return made


# ---- the model ----


def num_layers(model: Sections) -> int | None:
    """Return the number of layers in a pipeline's partition, or None if lint cannot know it."""
    if "layers_cfg" in model:
        return len(model["layers_cfg"])
    inner = model.get("cfg", model)
    return inner.get("num_layers", inner.get("hidden_layers"))


def _model(rng: Random, layout: Layout) -> Sections:
    if not layout.tensor.get("size", 1) > 1 and rng.random() < 0.25 and not layout.context:
        return _other_model(rng, layout)
    return _gpt(rng, layout)


_GPT = {"num_layers", "hidden_size", "num_heads", "vocab_size", "max_seq_len", "num_kv_heads", "ffn_hidden_size"}


def _gpt(rng: Random, layout: Layout) -> Sections:
    cuboid = layout.cuboid
    heads = rng.choice((2, 4, 6, 8, 12))
    made: Sections = {
        "num_layers": rng.choice((1, 2, 3, 4, 6)) if layout.pipe == 1 else layout.pipe + rng.choice((0, 1, 2, 3)),
        "hidden_size": heads * rng.choice((2, 4, 6, 8)),
        "num_heads": heads,
        "vocab_size": rng.choice((256, 257, 300)),
        "max_seq_len": cuboid.x * cuboid.y * rng.choice((2, 4)),  # factor 2: a ring stores a piece from either end
    }
    if rng.random() < 0.25:
        made["num_kv_heads"] = heads // 2
    # A folder of weights belongs to a machine, and lint may run on another one.
    options = _fields(rng, section.GPT, 5, without=(*_GPT, "pretrained", "experts"))
    fit = _fitted(section.GPT(**made, **options), cuboid)
    made |= fit
    if rng.random() < 0.25:
        made["ffn_hidden_size"] = made["hidden_size"] * rng.choice((1, 2))
        by = divisors.common(divisors.inner_features(made["ffn_hidden_size"], cuboid))
        made["ffn_hidden_size"] = -(-made["ffn_hidden_size"] // by) * by
    if rng.random() < 0.2:
        made["experts"] = _experts(rng, made["num_layers"], cuboid)
    return {"type": rng.choice(("GPT", "GPT", "dslpar.models.GPT"))} | _renamed(rng, made | options)


def _experts(rng: Random, num_layers: int, cuboid: Any) -> Sections:
    """Return a mixture of experts, whose shared experts this cuboid divides."""
    num, by = rng.choice((3, 4, 8)), divisors.common(divisors.inner_features(1, cuboid))
    made: Sections = {"num": num, "ffn_hidden_size": by * rng.choice((2, 4))}
    if rng.random() < 0.5:
        made["top_k"] = rng.randint(2, num)
    options: Sections = {
        "shared": rng.choice((1, 2)),
        "every": rng.randint(1, min(2, num_layers)),
        "router": rng.choice(("softmax", "sigmoid")),
        "renormalize": rng.random() < 0.5,
        "balance": rng.choice((0.0, 0.02)),
        "z_loss": rng.choice((0.0, 0.001)),
        "bias_update": rng.choice((0.0, 0.001)),
    }
    return made | {name: value for name, value in options.items() if rng.random() < 0.4}


def _fitted(model: section.GPT, cuboid: Any) -> Sections:
    """Return numbers of heads and features that this cuboid divides, near the model's."""
    if all(each.holds for each in conditions(model, cuboid)):
        return {}
    choices = nearest_attention(attention_sizes(model), cuboid)
    return dict(choices[-1]) if choices else {}


def _renamed(rng: Random, made: Sections) -> Sections:
    """Return the model with dslpar's key names, or with LiBai's, under cfg or not."""
    if rng.random() < 0.75:
        return made
    theirs = {ours: alias for alias, ours in aliases_of(section.GPT).items()}
    renamed = {theirs.get(name, name) if rng.random() < 0.8 else name: value for name, value in made.items()}
    return {"cfg": renamed} if rng.random() < 0.6 else renamed


def _other_model(rng: Random, layout: Layout) -> Sections:
    if layout.pipe == 1 and rng.random() < 0.3:
        return {"type": "tests.support.oracle.models.Module", "width": rng.choice((4, 8))}
    if rng.random() < 0.3:
        name = rng.choice(("Chain", "Listed"))
        return {"type": f"tests.support.oracle.models.{name}", "depth": layout.pipe + rng.randint(0, 3)}
    return {"type": rng.choice(("Sequential", "torch.nn.Sequential")), "layers_cfg": _layers(rng, layout)}


def _layers(rng: Random, layout: Layout) -> list[Sections]:
    """Return linears, at least one per stage, perhaps with other layers between them."""
    width = rng.choice((4, 8))
    made: list[Sections] = []
    for _ in range(2 * layout.pipe + rng.randint(0, 2)):
        made.append(dict(type=rng.choice(("Linear", "torch.nn.Linear")), in_features=width, out_features=width))
        if layout.pipe == 1:
            made += rng.choice(([], [dict(type="ReLU")], [dict(type="LayerNorm", normalized_shape=width)]))
    if rng.random() < 0.3:
        for index, layer in enumerate(made):
            layer["layer_idx"] = index
    return made


# ---- what runs it ----


def _zero(rng: Random, layout: Layout) -> Any:
    stage = rng.choice((0, 1, 1)) if layout.pipe > 1 else rng.choice((0, 1, 1, 2, 2, 3, 3))
    if rng.random() < 0.35:
        return stage
    simple = {name: type_ for name, type_ in deepspeed_policy.ZERO.items() if type_ in values.LEGAL}
    made = values.some(rng, simple, 3, without=("stage", "compute_grad_norm"))
    made |= {"stage": stage}
    made |= {"leaf_module": {"classes": ["Block"]}} if rng.random() < 0.03 else {}
    made |= {"compute_grad_norm": True} if rng.random() < 0.05 else {}
    if stage and rng.random() < 0.3:
        made["offload_optimizer"] = rng.choice(("cpu", _offload(rng, deepspeed_policy.OFFLOAD_OPTIMIZER)))
    if stage == 3 and rng.random() < 0.3:
        made["offload_param"] = rng.choice(("cpu", _offload(rng, deepspeed_policy.OFFLOAD_PARAM)))
    return made


def _offload(rng: Random, keys: Mapping[str, str]) -> Sections:
    return values.some(rng, keys, 3, without=("device",)) | {"device": values.legal(rng, "OffloadDevice")}


def _precision(rng: Random, stage: int) -> Any:
    dtype = rng.choice(("bf16", "fp16", "fp32")) if stage else "fp32"
    if rng.random() < 0.5:
        return rng.choice((dtype, {"dtype": dtype}))
    known = {"bf16": deepspeed_policy.BF16, "fp16": deepspeed_policy.FP16}.get(dtype, {})
    made = values.some(rng, known, 2) | {"dtype": dtype}
    needs_offload = [name for name in made if "master_weights" in name or "states" in name]
    return made | (dict.fromkeys(needs_offload, False) if rng.random() < 0.8 else {})


def _optimizer(rng: Random, layout: Layout, zero: Any, stage: int) -> Sections:
    shards = stage or layout.tensor.get("size", 1) > 1
    offloaded = isinstance(zero, dict) and zero.get("offload_optimizer")
    offloaded = bool(offloaded) and not (isinstance(offloaded, dict) and offloaded["device"] == "none")
    if rng.random() < 0.4:
        return _own_optimizer(rng)
    if not stage and layout.tensor.get("size", 1) == 1 and rng.random() < 0.1:
        return {"type": "tests.support.oracle.models.Descent", "lr": 0.1, "momentum": 0.9}
    rows = {
        name: row
        for name, row in OPTIMIZERS.items()
        if not row.refused and (row.elementwise or not shards) and row.offload in (None, offloaded)
    }
    name = rng.choice(list(rows))
    made = values.some(rng, {"lr": "PositiveFloat", **rows[name].args}, 3)
    made |= {"differentiable": False} if "differentiable" in made else {}
    made |= {"foreach": False} if made.get("fused") else {}
    return {"type": rng.choice((name, rows[name].dotted))} | made


def _own_optimizer(rng: Random) -> Sections:
    name = rng.choice(list(schema_sections.OPTIMIZERS))
    made = _fields(rng, schema_sections.OPTIMIZERS[name], 3)
    if made.get("nesterov"):
        made["momentum"] = 0.9
    return {"type": rng.choice((name, f"torch.optim.{name}"))} | made


_HAS_MOMENTUM = ("AdamW", "Adam", "SGD")


def _schedule(rng: Random, optimizer: Sections, steps: int) -> Any:
    if rng.random() < 0.3:
        return None
    if rng.random() < 0.4:
        made = {"type": rng.choice(schema_sections.LR_SCHEDULERS), "warmup_steps": rng.choice((0, 5))}
        if made["type"] != "constant" and made["warmup_steps"] < steps:
            made["decay_steps"] = steps
        return made | ({"min_lr": 0.0} if rng.random() < 0.5 else {})
    rows = {name: row for name, row in LR_SCHEDULERS.items() if not row.refused}
    name = rng.choice(list(rows))
    row = rows[name]
    made = values.some(rng, row.args, 3) | {key: values.legal(rng, row.args[key]) for key in row.required}
    if name == "OneCycleLR":
        made["total_steps"] = steps
    if name in ("CyclicLR", "OneCycleLR") and optimizer["type"] not in _HAS_MOMENTUM:
        made["cycle_momentum"] = False
    return {"type": rng.choice((name, row.dotted))} | made


def _batch(rng: Random, layout: Layout) -> tuple[Sections, Any]:
    """Return `batch`, and `schedule`, which may hold the accumulation."""
    least = divisors.least_micro_size(layout.cuboid)
    micro, accumulation = least * rng.choice((1, 2)), rng.choice((1, 2, 4))
    sizes = {"micro_size": micro, "accumulation": accumulation, "global_size": micro * accumulation * layout.data}
    given = rng.choice(
        ((), ("micro_size",), ("accumulation",), ("micro_size", "accumulation"), ("global_size", "micro_size"),
         ("global_size", "accumulation"), tuple(sizes))
    )  # fmt: skip
    schedule: Any = None
    if rng.random() < 0.25:
        schedule = {"type": "1f1b"} if layout.pipe > 1 else {}
        schedule |= {"num_chunks": 1} if rng.random() < 0.2 else {}
        schedule |= {"num_microbatches": accumulation} if "accumulation" in given else {}
    return {name: sizes[name] for name in given}, schedule


def _data(rng: Random, model: Sections, layout: Layout) -> Any:
    if rng.random() < 0.6:
        return None
    made = _fields(rng, schema_sections.TextData, 2, without=("seq_len",))
    inner = model.get("cfg", model)
    longest = inner.get("max_seq_len", inner.get("max_seq_length", 8))
    return {"type": "text", **made} | ({"seq_len": longest} if rng.random() < 0.4 else {})


def _monitor(rng: Random) -> Any:
    if rng.random() < 0.8:
        return None
    made: Sections = {}
    for name, cls in (
        ("csv", schema_sections.FileMonitor),
        ("tensorboard", schema_sections.FileMonitor),
        ("wandb", schema_sections.WandbMonitor),
    ):
        if rng.random() < 0.5:
            made[name] = rng.choice((True, False, _fields(rng, cls, 3)))
    return made


def _handlers(rng: Random, stage: int) -> Any:
    if rng.random() < 0.85:
        return None
    idle = {"type": "PipelineSharedModuleGradientHandler"}
    own = {"type": "tests.support.oracle.models.Handler", "scale": 0.5}
    return rng.choice(([idle], idle, []) if stage else ([own], own, [idle, own]))


RAW: Mapping[str, tuple[Any, ...]] = {
    "steps_per_print": (1, 10),
    "dump_state": (True, False),
    "disable_python_gc": (True, False),
    "disable_allgather": (True, False),
    "wall_clock_breakdown": (True, False),
    "memory_breakdown": (True, False),
    "log_level": ("info", "warning"),
    "dataloader_drop_last": (True, False),
    "vocabulary_size": (256, 300),
    "communication_data_type": ("fp32", "bf16", "fp16"),
    "seq_parallel_communication_data_type": ("fp32", "bf16"),
    "prescale_gradients": (True, False),
    "gradient_predivide_factor": (1.0, 2.0),
    "zero_allow_untested_optimizer": (True, False),
    "zero_force_ds_cpu_optimizer": (True, False),
    "comms_logger": ({"enabled": False}, {"enabled": True, "verbose": False, "prof_all": True}),
    "flops_profiler": ({"enabled": False}, {"enabled": True, "profile_step": 3}),
    "aio": ({"block_size": 1048576},),
    "timers": ({"throughput": {"enabled": False}},),
}
"""Legal values of raw keys by DeepSpeed's documentation."""


def _raw(rng: Random) -> Any:
    if rng.random() < 0.7:
        return None
    return {name: rng.choice(RAW.get(name, ({},))) for name in rng.sample(deepspeed_policy.TOP, rng.randint(1, 3))}


# ---- as text ----


def text_of(rng: Random, sections: Sections) -> str:
    """Return the text of a config file, with the model as dict(...) or LazyCall."""
    lines = [f"{name} = {_shown(section)}" for name, section in sections.items()]
    model = sections.get("model")
    if isinstance(model, dict) and model.get("type") in ("GPT", "dslpar.models.GPT") and rng.random() < 0.15:
        args = ", ".join(f"{key}={value!r}" for key, value in model.items() if key != "type")
        lazy = ["from dslpar import LazyCall", "from dslpar.models import GPT", f"model = LazyCall(GPT)({args})"]
        lines = [*lazy, *(line for line in lines if not line.startswith("model = "))]
    return "\n".join(lines) + "\n"


def _shown(section: Any) -> str:
    if isinstance(section, dict) and all(isinstance(key, str) and key.isidentifier() for key in section):
        return f"dict({', '.join(f'{key}={_shown(value)}' for key, value in section.items())})"
    return repr(section)
