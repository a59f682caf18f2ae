"""Layouts that run for ten steps: each optimizer and precision, in pipelines and with ZeRO.

tests/properties/layouts proves three steps of every combination. These rows have effects that take longer, or are not
computed in fp32: settled momenta, growing loss scales, master weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from dslpar.layout.resolve import Job, resolve
from dslpar.models.gpt import section
from dslpar.models.moco.section import MoCo
from dslpar.models.resmlp.section import ResMLP
from dslpar.schema import sections

GPT = {"num_layers": 4, "hidden_size": 48, "num_heads": 12, "vocab_size": 250, "max_seq_len": 24}
"""12 heads divide by 2, 3 and 4; 250 rows need padding in all of these. Some rows of the table have two layers."""
LLAMA = GPT | {"num_kv_heads": 4, "ffn_hidden_size": 96, "norm": "rmsnorm", "activation": "swiglu", "bias": False}
STEPS, SAMPLES, CLIP = 10, 16, 0.3
"""The gradient norm is above 0.3, so clipping acts in every step."""

OPTIMIZERS: Mapping[str, Any] = {
    "SGD": sections.SGD(lr=0.1, momentum=0.9, weight_decay=0.01),
    "AdamW": sections.AdamW(lr=1e-3, weight_decay=0.1),
    "RMSprop": sections.OtherOptimizer(target="RMSprop", lr=1e-4, weight_decay=0.1, args={"momentum": 0.5}),
    "Adagrad": sections.OtherOptimizer(target="Adagrad", lr=1e-2, args={"initial_accumulator_value": 0.1}),
}

UNCLIPPED = sections.SGD(lr=0.02, momentum=0.9, weight_decay=0.01)
"""Steps as large as the clipped ones: with larger steps, fp32's own noise grows from step to step."""


class Layout(NamedTuple):
    """One row: a world, its layout, and other settings that may matter."""

    world: int
    parallel: dict[str, Any]
    zero: int = 0
    tied: bool = True
    ignoring: bool = False
    """Whether part of the labels does not count, with a different number in each micro-batch."""
    dtype: str = "fp32"
    optimizer: str = "SGD"
    """A name in `OPTIMIZERS`."""
    model: str = "GPT"
    """A name in `MODELS`."""
    accumulation: int = 2
    offload: tuple[str, ...] = ()
    """State on the CPU: "optimizer", "param"."""
    recompute: int = 0
    """Interval of activation checkpointing; 0: none."""
    scale: dict[str, Any] | None = None
    """fp16: DeepSpeed's keys of the loss scale."""
    clip: bool = True
    """Whether the norm is clipped to CLIP; only with SGD."""
    num_layers: int = GPT["num_layers"]
    """Layers of a transformer."""
    compiled: bool = False
    """Whether torch compiles the layers; the graphs run with the uncompiled kernels."""
    overlap: bool | str = False
    """Value of comm_overlap: whether collectives are split into parts that run under products."""
    gather: bool = False
    """Whether weights are gathered under the next forward, in small buckets."""
    chunks: int = 1
    """Parts of the tokens for the loss. With recomputation also for MLPs, and stored activations are offloaded."""
    schedule: tuple[str, int] = ("1f1b", 1)
    """The pipeline schedule, and the number of stages per rank."""

    @property
    def problem(self) -> Problem:
        """Return what the reference depends on."""
        problem = Problem(self.model, self.tied, self.ignoring, self.optimizer, self.clip, self.num_layers)
        takes_statistics = self.model in OF_MICRO_BATCHES
        return problem._replace(micro_size=self.job().batch.micro_size) if takes_statistics else problem

    def job(self) -> Job:
        """Return the job of this row."""
        extra: dict[str, Any] = {f"offload_{what}": {"device": "cpu"} for what in self.offload}
        if self.zero == 3:
            extra["stage3_param_persistence_threshold"] = 0  # else small parameters are never partitioned
        if self.gather:
            extra["allgather_bucket_size"] = 1000
        recompute = None
        if self.recompute:
            recompute = sections.ActivationCheckpoint(
                interval=self.recompute, offload=self.chunks > 1, mlp_chunks=self.chunks
            )
        return resolve(
            sections.Spec(
                model=self._model(),
                parallel=self._parallel(),
                optimizer=OPTIMIZERS[self.optimizer] if self.clip else UNCLIPPED,
                lr_scheduler=sections.LRScheduler(type="cosine", warmup_steps=3),
                zero=sections.Zero(stage=self.zero, overlap_param_gather=self.gather, extra=extra),
                precision=sections.Precision(dtype=self.dtype, extra=self.scale or {}),
                batch=sections.Batch(global_size=SAMPLES, accumulation=self.accumulation),
                train=sections.Train(
                    steps=STEPS,
                    clip_grad_norm=CLIP if self.clip else None,
                    loss_chunks=self.chunks,
                    compile=self.compiled,
                    compile_backend="aot_eager",
                ),
                activation_checkpoint=recompute,
                schedule=sections.PipelineSchedule(type=self.schedule[0], num_model_chunks=self.schedule[1]),
            ),
            self.world,
            "invariance.py",
        )

    def _parallel(self) -> sections.Parallel:
        parallel = sections.Parallel(**self.parallel)
        if not self.overlap or parallel.tensor is None:
            return parallel
        return replace(parallel, tensor=replace(parallel.tensor, comm_overlap=self.overlap))

    def _model(self) -> Any:
        model = MODELS[self.model](self.tied)
        return replace(model, num_layers=self.num_layers) if isinstance(model, section.GPT) else model


class Problem(NamedTuple):
    """The computation of a run, independent of the layout."""

    model: str
    tied: bool
    ignoring: bool
    optimizer: str
    clip: bool
    num_layers: int
    micro_size: int = SAMPLES
    """Samples per forward, which matter for batch statistics."""


def _gpt(tied: bool) -> section.GPT:
    return section.GPT(**GPT, tie_embeddings=tied)


def _llama(tied: bool) -> section.GPT:
    """Grouped queries, rotary positions, RMSNorm, swiglu, no bias."""
    return section.GPT(**LLAMA, positions="rotary", tie_embeddings=tied)


def _layers_cfg(tied: bool) -> sections.OtherModel:
    """Make layers by a config alone; the first layer has only a matrix, and the last has no bias."""
    return sections.OtherModel(
        target="Sequential",
        args={
            "layers_cfg": [
                {"type": "Embedding", "num_embeddings": GPT["vocab_size"], "embedding_dim": GPT["hidden_size"]},
                {"type": "LayerNorm", "normalized_shape": GPT["hidden_size"]},
                {"type": "Linear", "in_features": GPT["hidden_size"], "out_features": 2 * GPT["hidden_size"]},
                {"type": "GELU"},
                {
                    "type": "Linear",
                    "in_features": 2 * GPT["hidden_size"],
                    "out_features": GPT["vocab_size"],
                    "bias": False,
                },
            ]
        },
    )


class Mlp(nn.Sequential):
    """A user's nn.Sequential, which draws its weights when it is made."""

    def __init__(self, width: int) -> None:
        layers = [nn.Embedding(GPT["vocab_size"], width), nn.Linear(width, width), nn.Tanh(), nn.LayerNorm(width)]
        super().__init__(*layers, nn.Linear(width, GPT["vocab_size"]))


def _sequential(tied: bool) -> sections.OtherModel:
    return sections.OtherModel(target="tests.properties.invariance.layouts.Mlp", args={"width": GPT["hidden_size"]})


def _transformers_llama(tied: bool) -> sections.OtherModel:
    """transformers' own code, by a derived policy."""
    config = {
        "num_hidden_layers": 2,
        "hidden_size": GPT["hidden_size"],
        "num_attention_heads": GPT["num_heads"],
        "num_key_value_heads": 4,
        "intermediate_size": 96,
        "vocab_size": GPT["vocab_size"],
        "max_position_embeddings": GPT["max_seq_len"],
        "tie_word_embeddings": tied,
    }
    return sections.OtherModel(target="transformers.LlamaForCausalLM", args={"config": config})


def _transformers_llama_lora(tied: bool) -> sections.OtherModel:
    """The same, frozen, with adapters on part of what one product serves."""
    lora = sections.LoRA(r=3, lora_alpha=12, target_modules=("q_proj", "v_proj", "o_proj", "down_proj"))
    return replace(_transformers_llama(tied), lora=lora)


_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_ENCODER = _NO_DROPOUT | {
    "hidden_size": GPT["hidden_size"],
    "num_hidden_layers": 4,
    "num_attention_heads": GPT["num_heads"],
    "intermediate_size": 96,
}


def _transformers_bert(tied: bool) -> sections.OtherModel:
    """Masked tokens, and next-sentence prediction."""
    config = _ENCODER | {"vocab_size": GPT["vocab_size"], "max_position_embeddings": GPT["max_seq_len"]}
    return sections.OtherModel(target="transformers.BertForPreTraining", args={"config": config})


def _transformers_t5(tied: bool) -> sections.OtherModel:
    """An encoder and a decoder; the table is used three times."""
    config = {
        "d_model": GPT["hidden_size"],
        "d_kv": 4,
        "d_ff": 96,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "num_heads": GPT["num_heads"],
        "vocab_size": GPT["vocab_size"],
        "dropout_rate": 0.0,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 16,
    }
    return sections.OtherModel(target="transformers.T5ForConditionalGeneration", args={"config": config})


def _transformers_vit(tied: bool) -> sections.OtherModel:
    """Image classification with 7 x 1 patches and the class token."""
    config = _ENCODER | {"image_size": [28, 4], "patch_size": 4, "num_channels": 2, "num_labels": 5}
    return sections.OtherModel(target="transformers.ViTForImageClassification", args={"config": config})


SQUARE = 16
"""Height and width of images of the models below."""
_IMAGES = {"image_size": SQUARE, "num_channels": 2, "num_labels": 5, "initializer_range": 0.1}


def _transformers_swin(tied: bool, name: str = "Swin") -> sections.OtherModel:
    """Image classification with 8 x 8 patches: 4 x 4 windows, shifted in every second block; first four windows, then
    one.

    SwinV2 divides queries by their lengths. With heads of 4 features, fp32 noise is 5e-6 in plain transformers'
    gradients, too.
    """
    sizes = {
        "patch_size": 2,
        "embed_dim": 32,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": 4,
        "mlp_ratio": 2.0,
    }
    config = _IMAGES | _NO_DROPOUT | sizes | {"drop_path_rate": 0.0}
    return sections.OtherModel(target=f"transformers.{name}ForImageClassification", args={"config": config})


def _transformers_mae(tied: bool) -> sections.OtherModel:
    """Predict the pixels of half of 16 patches from the other half."""
    decoder = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    sizes = {"patch_size": 4, "mask_ratio": 0.5} | {f"decoder_{name}": size for name, size in decoder.items()}
    config = _ENCODER | {"num_hidden_layers": 2} | _IMAGES | sizes
    return sections.OtherModel(target="transformers.ViTMAEForPreTraining", args={"config": config})


def _transformers_resnet(tied: bool) -> sections.OtherModel:
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 1], "layer_type": "basic"}
    config = sizes | {name: _IMAGES[name] for name in ("num_channels", "num_labels")}
    return sections.OtherModel(target="transformers.ResNetForImageClassification", args={"config": config})


OF_MICRO_BATCHES = ("transformers' ResNet",)
"""Models whose batch norms take statistics per micro-batch: the maths is equal only with equal micro-batches."""


def _transformers_gpt2(tied: bool) -> sections.OtherModel:
    config = {
        "n_layer": 2,
        "n_embd": GPT["hidden_size"],
        "n_head": GPT["num_heads"],
        "vocab_size": GPT["vocab_size"],
        "n_positions": GPT["max_seq_len"],
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": tied,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    }
    return sections.OtherModel(target="transformers.GPT2LMHeadModel", args={"config": config})


def _transformers_opt(tied: bool) -> sections.OtherModel:
    config = {
        "num_hidden_layers": 2,
        "hidden_size": GPT["hidden_size"],
        "word_embed_proj_dim": GPT["hidden_size"],
        "num_attention_heads": GPT["num_heads"],
        "ffn_dim": 96,
        "vocab_size": GPT["vocab_size"],
        "max_position_embeddings": GPT["max_seq_len"],
        "tie_word_embeddings": tied,
        **dict.fromkeys(("dropout", "attention_dropout", "layerdrop"), 0.0),
    }
    return sections.OtherModel(target="transformers.OPTForCausalLM", args={"config": config})


def _transformers_bloom(tied: bool) -> sections.OtherModel:
    config = {
        "n_layer": 2,
        "hidden_size": GPT["hidden_size"],
        "n_head": GPT["num_heads"],
        "vocab_size": GPT["vocab_size"],
        "tie_word_embeddings": tied,
        **dict.fromkeys(("hidden_dropout", "attention_dropout"), 0.0),
    }
    return sections.OtherModel(target="transformers.BloomForCausalLM", args={"config": config})


def _transformers_mixtral(tied: bool) -> sections.OtherModel:
    sizes = {"num_local_experts": 6, "num_experts_per_tok": 2}
    return sections.OtherModel(
        target="transformers.MixtralForCausalLM", args={"config": _transformers_llama(tied).args["config"] | sizes}
    )


def _transformers_qwen3_moe(tied: bool) -> sections.OtherModel:
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [0]}
    return sections.OtherModel(
        target="transformers.Qwen3MoeForCausalLM", args={"config": _transformers_llama(tied).args["config"] | sizes}
    )


def _resmlp(tied: bool) -> ResMLP:
    """Image classification with 36 patches."""
    sizes = {"image_size": 12, "patch_size": 2, "num_channels": 2, "ffn_hidden_size": 96}
    return ResMLP(num_layers=4, hidden_size=GPT["hidden_size"], num_classes=5, **sizes)


def _moco(tied: bool) -> MoCo:
    """Two views of images with 9 patches and the class token."""
    sizes = {"image_size": 6, "patch_size": 2, "num_channels": 2, "ffn_hidden_size": 96}
    heads = {"num_heads": GPT["num_heads"], "projection_size": 96, "projection_hidden_size": 192}
    # With the paper's temperature and eps, small batches of small images amplify fp32's noise from step to step.
    calm = {"temperature": 1.0, "layernorm_eps": 1e-2, "momentum": 0.9}
    return MoCo(num_layers=2, hidden_size=GPT["hidden_size"], **sizes, **heads, **calm)


MODELS: Mapping[str, Callable[[bool], Any]] = {
    "GPT": _gpt,
    "Llama": _llama,
    "layers_cfg": _layers_cfg,
    "Sequential": _sequential,
    "transformers' Llama": _transformers_llama,
    "transformers' BERT": _transformers_bert,
    "transformers' T5": _transformers_t5,
    "transformers' ViT": _transformers_vit,
    "transformers' Swin": _transformers_swin,
    "transformers' SwinV2": partial(_transformers_swin, name="Swinv2"),
    "transformers' MAE": _transformers_mae,
    "transformers' ResNet": _transformers_resnet,
    "transformers' Llama, LoRA": _transformers_llama_lora,
    "transformers' GPT-2": _transformers_gpt2,
    "transformers' OPT": _transformers_opt,
    "transformers' Bloom": _transformers_bloom,
    "transformers' Mixtral": _transformers_mixtral,
    "transformers' Qwen3-MoE": _transformers_qwen3_moe,
    "ResMLP": _resmlp,
    "MoCo": _moco,
}
"""Name -> function from (whether weights are tied) to a model section. A row of another model is `Layout(...,
model="its name")`. The model maps ids [batch, sequence] to logits [batch, sequence, vocabulary], or takes what
`Samples.batch` makes for its name.
"""


LEGACY = ("data", "pipe", "tensor")


def pipe(size: int, **more: Any) -> dict[str, Any]:
    """Return the sections of a pipeline."""
    return {"pipeline": sections.PipelineParallel(size=size, **more)}


def tensor(mode: str, size: int, **more: Any) -> dict[str, Any]:
    """Return the sections of a tensor group."""
    return {"tensor": sections.TensorParallel(size=size, mode=mode, **more)}


KEEPS = ("x", "w", "both", "none")
MODES: Mapping[str, Callable[[str], dict[str, Any]]] = {
    "1d 2": lambda keep: tensor("1d", 2, keep=keep),
    "1d 2 sequence": lambda keep: tensor("1d", 2, sequence=True, keep=keep),
    "2d 4": lambda keep: tensor("2d", 4, keep=keep),
    "2.5d 2 (depth 2)": lambda keep: tensor("2.5d", 2, depth=2, keep=keep),
    "3d 8": lambda keep: tensor("3d", 8, keep=keep),
    "cuboid (1, 2, 2)": lambda keep: tensor("cuboid", 4, shape=(1, 2, 2), keep=keep, **HELD[keep]),
    "ring 2": lambda keep: tensor("sequence", 2, keep=keep),
    "ulysses 2": lambda keep: tensor("sequence", 2, impl="ulysses", keep=keep),
}
"""Name -> function from the kept panels to sections."""
HELD: Mapping[str, dict[str, Any]] = {
    "x": {"residual": "sequence", "inner": "batch"},
    "w": {"residual": "replicated", "inner": "heads"},
    "both": {"residual": "batch", "inner": "heads"},
    "none": {"residual": "hidden", "inner": "batch"},
}
"""A way to keep the residual and the inner activations of a cuboid, for each choice of kept panels."""
ONE = Layout(1, {})
STATIC, DYNAMIC = {"loss_scale": 1024.0}, {"initial_scale_power": 12}
LAYOUTS: dict[str, Layout] = {
    # SGD, with weights compared to 1e-6 after ten steps
    "one process": ONE,
    "no clipping": ONE._replace(clip=False),
    "data 2": Layout(2, {}, ignoring=True),
    "pipe 4": Layout(4, pipe(4)),
    "pipe 2 (3, 1), data 2": Layout(4, pipe(2, stage_ids=(0, 0, 0, 1)), ignoring=True),
    "data 2, 1d 2 sequence, ZeRO 2": Layout(4, tensor("1d", 2, sequence=True), zero=2),
    "legacy order, pipe 2, data 2": Layout(4, pipe(2) | {"order": LEGACY}),
    # AdamW
    "AdamW, one process": ONE._replace(optimizer="AdamW"),
    "AdamW, pipe 2, data 2": Layout(4, pipe(2), optimizer="AdamW"),
    "AdamW, data 2, 2d 4, ZeRO 2": Layout(8, tensor("2d", 4), zero=2, optimizer="AdamW"),
    # other elementwise optimizers
    "RMSprop, one process": ONE._replace(optimizer="RMSprop"),
    "RMSprop, data 2, 1d 2, ZeRO 3": Layout(4, tensor("1d", 2), zero=3, optimizer="RMSprop"),
    "Adagrad, one process": ONE._replace(optimizer="Adagrad"),
    "Adagrad, data 2, ZeRO 3": Layout(2, {}, zero=3, optimizer="Adagrad"),
    "Adagrad, pipe 2, data 2, ZeRO 1, offload": Layout(4, pipe(2), zero=1, optimizer="Adagrad", offload=("optimizer",)),
    # bf16
    "bf16, one process, ZeRO 1": ONE._replace(zero=1, dtype="bf16"),
    "bf16, data 2, ZeRO 2": Layout(2, {}, zero=2, dtype="bf16"),
    "bf16, data 2, 1d 2, ZeRO 3": Layout(4, tensor("1d", 2), zero=3, dtype="bf16"),
    "bf16, pipe 2, 1d 2, ZeRO 1": Layout(4, pipe(2) | tensor("1d", 2), zero=1, dtype="bf16"),
    "bf16, pipe 2, 2d 4, ZeRO 1": Layout(8, pipe(2) | tensor("2d", 4), zero=1, dtype="bf16"),
    "bf16, data 2, ring 2, ZeRO 1": Layout(4, tensor("sequence", 2), zero=1, dtype="bf16"),  # two ranks own nothing
    "bf16, pipe 2, ZeRO 1, offload": Layout(2, pipe(2), zero=1, dtype="bf16", offload=("optimizer",)),
    # fp16
    "fp16 static, one process, ZeRO 1": ONE._replace(zero=1, dtype="fp16", scale=STATIC),
    "fp16 dynamic, data 2, ZeRO 2": Layout(2, {}, zero=2, dtype="fp16", scale=DYNAMIC),
    "fp16 dynamic, data 2, 1d 2, ZeRO 3": Layout(4, tensor("1d", 2), zero=3, dtype="fp16", scale=DYNAMIC),
    "fp16 static, pipe 2, data 2, ZeRO 1": Layout(4, pipe(2), zero=1, dtype="fp16", scale=STATIC),
    "fp16 dynamic, pipe 2, 2d 4, ZeRO 1": Layout(8, pipe(2) | tensor("2d", 4), zero=1, dtype="fp16", scale=DYNAMIC),
    "fp16 dynamic, pipe 2, data 2, ZeRO 1, offload": Layout(
        4, pipe(2), zero=1, dtype="fp16", scale=DYNAMIC, offload=("optimizer",)
    ),
    # adapters, and transformers' code, in bf16
    "transformers' Llama, LoRA, pipe 2, cuboid (1, 2, 2), ZeRO 1, AdamW": Layout(
        8, pipe(2) | tensor("cuboid", 4, shape=(1, 2, 2)), zero=1, optimizer="AdamW", model="transformers' Llama, LoRA"
    ),
    "transformers' Llama, LoRA, bf16, data 2, ZeRO 1": Layout(
        2, {}, zero=1, dtype="bf16", model="transformers' Llama, LoRA"
    ),
    "transformers' Llama, LoRA, bf16, data 2, ZeRO 3": Layout(
        2, {}, zero=3, dtype="bf16", model="transformers' Llama, LoRA"
    ),
    "transformers' Llama, bf16, data 2, 1d 2 sequence, ZeRO 1, recompute 1": Layout(
        4, tensor("1d", 2, sequence=True), zero=1, tied=False, dtype="bf16", recompute=1, model="transformers' Llama"
    ),
    "transformers' Llama, bf16, data 2, 2d 4, ZeRO 3, recompute 1": Layout(
        8, tensor("2d", 4), zero=3, dtype="bf16", recompute=1, model="transformers' Llama"
    ),
    "transformers' Llama, LoRA, bf16, pipe 2, 1d 2, ZeRO 1, recompute 1": Layout(
        4, pipe(2) | tensor("1d", 2), zero=1, dtype="bf16", recompute=1, model="transformers' Llama, LoRA"
    ),
    # gathers under the next forward
    "gathers overlap, data 4, ZeRO 2, bf16": Layout(4, {}, zero=2, dtype="bf16", gather=True),
    "gathers overlap, ring 4, ZeRO 1, bf16": Layout(4, tensor("sequence", 4), zero=1, dtype="bf16", gather=True),
}


def _lean(row: Layout) -> Layout:
    """Use two layers for rows with much traffic, ZeRO 3, and tensor groups of 4 or more, unless four layers are
    partitioned.
    """
    pipeline, group = row.parallel.get("pipeline"), row.parallel.get("tensor")
    even = pipeline is None or (pipeline.size == 2 and not pipeline.counts and not pipeline.stage_ids)
    sends = row.zero == 3 or (group is not None and group.size >= 4)
    return row._replace(num_layers=2) if sends and even and row.recompute < 2 else row


LAYOUTS = {name: _lean(row) for name, row in LAYOUTS.items()}


class Bound(NamedTuple):
    """Largest relative deviations of a run from the reference."""

    loss: float
    grad_norm: float
    weights: float


def bound_of(layout: Layout) -> Bound:
    """Return the claimed bounds of a layout.

    fp32: 1e-6, as promised. The largest measured value, 4e-7, is noise of summation orders, as in one process. SwinV2's
    weights: 1e-5, since it divides queries and keys by their lengths; one process measured 2.6e-6. AdamW divides by the
    root of the second moment, so the noise of a small gradient becomes a step: 5e-5 of the weights in one process, too,
    without key biases, whose true gradient is 0. The bound leaves a factor of five. MoCo: the BatchNorm of its heads
    subtracts most of what a bias adds, so the bias's gradient is a small difference of larger numbers: 4e-6 of the
    weights in one process, too. bf16 keeps 8 bits, 4e-3 of a number: weights, activations and gradients round at each
    layer, and the reference does not round at all. A loss averages the rounding over its tokens, a norm over its
    elements. A weight that has just moved from 0 is off by a few roundings. Measured: 2e-4, 2e-3 and 2e-2, in one
    process as in many. fp16 keeps 11 bits, so an eighth of each. Measured: 2e-5, 2e-4 and 1.2e-3. The loss scale keeps
    gradients from vanishing and overflowing: without one (scale 1) the norm is off by a hundredth.
    """
    bounds = {"bf16": Bound(1e-3, 1e-2, 5e-2), "fp16": Bound(1.25e-4, 1.25e-3, 6.25e-3)}
    if layout.dtype in bounds:
        return bounds[layout.dtype]
    if layout.model == "MoCo":
        return Bound(1e-6, 5e-6, 1e-5)
    if layout.model == "transformers' SwinV2":
        return Bound(1e-6, 1e-6, 1e-5)
    return Bound(1e-6, 1e-6, 1e-6) if layout.optimizer == "SGD" else Bound(1e-6, 5e-6, 3e-4)
