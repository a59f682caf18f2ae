"""The typed sections of a config: frozen dataclasses whose fields are declared by `key(...)`, with the help below each.

A field's docstring is its help and its line in the reference. Its annotation names a type of `dslpar.schema.types`.
`key` holds all other facts about the key (`dslpar.schema.fields`). To add a key, add a field here, and read the field
in the code that it configures. Sections accept only the keys declared here, an idea from nanotron.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from dslpar.core.frozen import keeping_hash
from dslpar.schema.datasets import (
    BlendData,
    ChatData,
    HuggingFaceData,
    ImageData,
    MaskedTextData,
    OtherData,
    SpanTextData,
    TextData,
    TokensData,
)
from dslpar.schema.fields import key, section
from dslpar.schema.types import (
    AxisOrder,
    Betas,
    Choice,
    CommOverlap,
    CompileBackend,
    CompileComponents,
    CountList,
    Dict,
    DType,
    ExitStatus,
    Fraction,
    IntList,
    LayerCount,
    MeshShape,
    ModuleNames,
    NonNegativeFloat,
    NonNegativeInt,
    OnDifference,
    PositiveFloat,
    PositiveInt,
    ResumeFrom,
    StrList,
    TensorMode,
    ZeroStage,
)

if TYPE_CHECKING:
    from dslpar.schema.transformers_configs import TransformersConfig

LR_SCHEDULERS = ("constant", "linear", "cosine")
METHODS = ("cost", "uniform", "parameters", "libai")


@section
class DataParallel:
    """The axis of data-parallel replicas."""

    size: PositiveInt | None = key(default=None, resume="free", shorthand=True, same_as="train.dist.data_parallel_size")
    """Replicas; must equal world / (pipeline * tensor). Left out: that number."""


@section
class PipelineParallel:
    """The axis of pipeline stages, and the partition of the transformer layers over it."""

    size: PositiveInt = key(resume="free", shorthand=True, same_as="train.dist.pipeline_parallel_size")
    """Ranks of axis "pipe". Each holds one or several stages, which are contiguous groups of layers."""
    stage_ids: IntList | None = key(
        default=None,
        resume="free",
        same_as="train.dist.custom_pipeline_stage_id",
        synonyms="custom_pipeline_stage_id pipeline_model_parallel_layout",
    )
    """The stage of each transformer layer: from 0, never decreasing, each stage at least once."""
    counts: CountList | None = key(default=None, resume="free")
    """Transformer layers on each stage."""
    method: str | None = key(default=None, resume="free", synonyms="pipe_partition_method partition_method")
    """The automatic partition: 'cost' (the default), 'uniform', 'parameters', 'libai', or 'type:REGEX'."""


@keeping_hash
@section
class TensorParallel:
    """The axis of tensor parallelism: its size and mode, and how its ranks split activations."""

    INLINE: ClassVar[str] = "kwargs"  # ColossalAI documents kwargs=dict(depth=2)

    size: PositiveInt = key(resume="free", shorthand=True, same_as="train.dist.tensor_parallel_size")
    """Ranks that share each layer."""
    mode: TensorMode | None = key(default=None, resume="free")
    """'1d', '2d', '2.5d', '3d', 'sequence' or 'cuboid'. Required if size is above 1."""
    depth: PositiveInt | None = key(default=None, resume="free")
    """Mode 2.5d: size is depth * q * q, and weights are replicated over depth."""
    shape: MeshShape | None = key(default=None, resume="free")
    """Mode cuboid: (x, y, z), the numbers of ranks that split tokens, inner features and residual features."""
    sequence: bool | None = key(default=None, resume="free", synonyms="sequence_parallel")
    """Mode 1d: keep the residual stream split by sequence between layers (Megatron's sequence parallelism)."""
    impl: Choice | None = key(default=None, resume="free", choices=("ring", "ulysses"))
    """Mode sequence (a short form of parallel.context): attention by 'ring' (the default) or 'ulysses'."""
    residual: Choice | None = key(default=None, resume="free", choices=("replicated", "sequence", "hidden", "batch"))
    """Modes 3d and cuboid: the residual stream over y is 'replicated', or split by 'sequence', 'hidden' or 'batch'."""
    inner: Choice | None = key(default=None, resume="free", choices=("batch", "heads"))
    """Modes 3d and cuboid: inner activations are split over z by 'batch' or 'heads'."""
    keep: Choice | None = key(default=None, resume="free", choices=("x", "w", "both", "none"))
    """What layers gather and keep until the backward: activations ('x'), weights ('w'), 'both' or 'none'."""
    comm_overlap: CommOverlap | None = key(
        default=None, resume="free", synonyms="tp_comm_overlap async_tp enable_async_tensor_parallel"
    )
    """Overlap collectives with matrix products (default: False). Products run in parts, and weights are gathered during
    the products of other layers, which needs memory for one more gathered weight. No effect in layers that torch
    compiles. 'symmetric_memory': like True, but torch's fused products fetch tokens from other ranks, on CUDA devices
    that can access each other's memory (NVLink); most useful in mode 1d with sequence."""


@keeping_hash
@section
class ContextParallel:
    """The axis of context parallelism, which splits each sequence over its ranks in every layer."""

    size: PositiveInt = key(resume="free", shorthand=True)
    """Ranks that share each sequence. With a tensor mode, tensor ranks in turn share each rank's part."""
    impl: Choice | None = key(
        default=None,
        resume="free",
        choices=("ring", "ulysses", "hybrid"),
        synonyms="cp_comm_type",
    )
    """Attention to tokens of other ranks: 'ring' (the default) sends keys and values around, 'ulysses' exchanges tokens
    for heads, 'hybrid' uses ulysses over neighbouring ranks and a ring over the rest."""
    ulysses_size: PositiveInt | None = key(
        default=None, resume="free", synonyms="hierarchical_context_parallel_sizes ulysses_degree"
    )
    """Impl hybrid: neighbouring ranks that exchange heads. Left out: as many as the key heads divide over."""


@section
class ExpertParallel:
    """The division of a mixture's experts over the ranks of a pipeline stage."""

    size: PositiveInt = key(resume="free", shorthand=True)
    """Ranks that together hold all experts: the tensor ranks (context ranks count too) of one or several neighbouring
    replicas. Each token is sent to the ranks of its experts. Left out: each tensor group holds all experts, and gathers
    its tokens."""
    chunks: PositiveInt = key(default=1, resume="free")
    """Parts of a rank's tokens that are sent one after the other. Several parts bound the temporary memory of a rank
    whose experts get most tokens."""


@section
class Parallel:
    """Division of ranks among data, pipeline, context, expert and tensor parallelism."""

    data: DataParallel = key(
        default_factory=DataParallel, deepspeed="data_parallel_size", synonyms="data_parallel_size dp_size dp"
    )
    """Data-parallel replicas; inferred from the world size."""
    pipeline: PipelineParallel | None = key(
        default=None,
        deepspeed="pipeline",
        synonyms="pipeline_model_parallel_size pipeline_parallel_size pipe_parallel_size pipeline_size pp_size pp pipe",
    )
    """Pipeline stages: a number, or dict(size=, stage_ids= / counts= / method=)."""
    tensor: TensorParallel | None = key(
        default=None,
        deepspeed="tensor_parallel",
        synonyms="model_parallel_size tensor_model_parallel_size tensor_parallel_size tp_size tp mp mp_size "
        "tensor_parallel intra_layer_model_parallel_size",
    )
    """Tensor parallelism: dict(size=, mode=, ...)."""
    context: ContextParallel | None = key(
        default=None,
        deepspeed="sequence_parallel_size",
        synonyms="context_parallel_size context_parallel cp_size cp sequence_parallel_size "
        "ulysses_sequence_parallel_size",
    )
    """Context parallelism, for long sequences: a number, or dict(size=, impl=)."""
    expert: ExpertParallel | None = key(
        default=None,
        synonyms="expert_parallel_size expert_model_parallel_size expert_parallel ep_size ep moe_expert_parallel_size "
        "autoep_size expert_parallel_degree",
    )
    """Expert parallelism, for mixtures of experts: a number, or dict(size=, chunks=)."""
    order: AxisOrder | None = key(default=None, resume="free")
    """Axes from slow to fast: ('pipe', 'data', 'tensor'), or ColossalAI's ('data', 'pipe', 'tensor')."""


@section
class LoRA:
    """Low-rank adapters beside linear layers whose weights are frozen (arXiv 2106.09685); keys as in peft's LoraConfig.

    Only the adapters are trained, and what `bias` and `modules_to_save` add. Frozen weights have no gradient, no
    optimizer state, and in bf16 no fp32 copy.
    """

    r: PositiveInt = key(default=8, resume="refused", synonyms="lora_r lora_rank rank lora_dim")
    """Rank of the adapters. It is never split, so any number fits any layout."""
    lora_alpha: PositiveFloat = key(default=8.0, resume="refused", aliases="alpha")
    """The output of adapters is multiplied by lora_alpha / r."""
    lora_dropout: Fraction = key(default=0.0, resume="reported", aliases="dropout")
    """Probability of dropping a feature of an adapter's input."""
    target_modules: ModuleNames = key(default="all-linear", resume="refused", synonyms="lora_target_modules")
    """Linear layers with adapters, by the ends of their names, ['q_proj', 'v_proj']; 'all-linear': all but the head."""
    target_parameters: StrList = key(default=(), resume="refused", synonyms="lora_target_parameters")
    """Weights of experts with adapters, by the ends of their names: ['experts.gate_up_proj', 'experts.down_proj']. Each
    expert has its own, which is added to its weight in each forward."""
    use_rslora: bool = key(default=False, resume="refused")
    """Multiply the output of adapters by lora_alpha / sqrt(r) instead."""
    bias: Choice = key(
        default="none",
        resume="refused",
        choices=("none", "all"),
        refused={"lora_only": "q, k and v have one bias together here; 'all' trains every bias"},
    )
    """'none': biases are frozen; 'all': every bias of the model is trained."""
    modules_to_save: StrList = key(default=(), resume="refused")
    """Modules that are also trained, without adapters, by the ends of their names: ['lm_head']."""

    @property
    def scale(self) -> float:
        """Factor of the adapters' output."""
        return self.lora_alpha / (self.r**0.5 if self.use_rslora else self.r)


class Model:
    """Base of the sections of model families (see dslpar.schema.families), whose layers dslpar knows.

    Every family has the field `num_layers`. It is only annotated here, so that each family chooses its place.
    """

    DATA_TYPES: ClassVar[tuple[str, ...]] = ("text", "tokens", "chat")
    """Types of `data` that the model learns from; empty if only a program can bring the data."""
    INPUTS: ClassVar[tuple[str, ...]] = ("input_ids",)
    """Names of a micro-batch's inputs, besides labels."""
    LENGTH_KEYS: ClassVar[tuple[str, ...]] = ("max_seq_len",)
    """The keys that determine `longest_sample`."""

    num_layers: LayerCount
    """Layers that a pipeline partitions."""
    if TYPE_CHECKING:  # each family's section is a dataclass
        __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    @property
    def longest_sample(self) -> int:
        """Tokens of the longest sample: the length of the residual stream's sequence."""
        raise NotImplementedError

    @property
    def is_causal(self) -> bool:
        """Return whether tokens attend only to themselves and earlier tokens."""
        return False

    @property
    def packs(self) -> bool:
        """Return whether a sample may hold several documents that the model reads as if each were alone."""
        return False

    @property
    def num_experts(self) -> int | None:
        """Experts of a mixture; None: the model has no mixtures of experts."""
        return None

    @property
    def capacity_factor(self) -> float | None:
        """Most tokens of a sequence that an expert takes in training, over its even share; None: any number."""
        return None

    @property
    def is_balanced(self) -> bool:
        """Return whether the loss includes the load-balancing loss of mixtures of experts."""
        return False

    @property
    def router_sums(self) -> tuple[int, int] | None:
        """Shape of the routers' sums that layers pass on beside the residual; None: there are none."""
        return None


@section
class Experts:
    """A mixture of experts in place of a block's MLP: each token visits the `top_k` experts that a router chooses."""

    num: PositiveInt = key(
        resume="refused",
        aliases="num_experts",
        synonyms="num_local_experts n_routed_experts moe_num_experts num_moe_experts",
    )
    """Number of experts."""
    top_k: PositiveInt = key(
        default=2, resume="refused", synonyms="num_experts_per_tok num_experts_per_token moe_top_k moe_router_topk topk"
    )
    """Experts that each token visits."""
    ffn_hidden_size: PositiveInt | None = key(
        default=None, resume="refused", synonyms="moe_intermediate_size moe_ffn_hidden_size"
    )
    """Features of the hidden layer of one expert; default: the model's ffn_hidden_size."""
    shared: NonNegativeInt = key(
        default=0, resume="refused", synonyms="n_shared_experts num_shared_experts moe_num_shared_experts"
    )
    """Number of shared experts, which every token visits besides its own."""
    every: PositiveInt = key(default=1, resume="refused", synonyms="decoder_sparse_step expert_interval")
    """The last of every so many blocks has a mixture, and the others have an MLP. 2: blocks 1, 3, 5, ..."""
    router: Choice = key(
        default="softmax",
        resume="refused",
        choices=("softmax", "sigmoid"),
        synonyms="scoring_func moe_router_score_function",
    )
    """How the router's logits become the scores of experts: 'softmax' over all experts, as in Mixtral, or 'sigmoid' of
    each, as in DeepSeek-V3. The output of an expert is multiplied by its score."""
    renormalize: bool = key(default=True, resume="refused", synonyms="norm_topk_prob normalize_expert_weights")
    """Divide the scores of a token's experts by their sum."""
    balance: NonNegativeFloat = key(
        default=0.01,
        resume="reported",
        synonyms="router_aux_loss_coef moe_aux_loss_coeff moe_loss_coeff aux_loss_coef",
    )
    """Coefficient of the load-balancing loss, which is added to the cross-entropy; 0: no such loss."""
    z_loss: NonNegativeFloat = key(default=0.0, resume="reported", synonyms="router_z_loss_coef z_loss_coef")
    """Coefficient of the mean square of the routers' log-sum-exp, which keeps logits small; 0: no such loss."""
    bias_update: NonNegativeFloat | None = key(
        default=None, resume="reported", synonyms="moe_router_bias_update_rate aux_loss_free_bias_update_rate"
    )
    """Step of a bias that is added to the scores when experts are chosen, and not to their weights: after each step it
    rises for experts with fewer tokens than the mean, and falls for the others (DeepSeek-V3). 0: the bias stays as it
    is. Left out: there is no bias."""
    capacity_factor: PositiveFloat | None = key(
        default=None,
        resume="reported",
        synonyms="moe_expert_capacity_factor moe_capacity_factor moe_train_capacity_factor expert_capacity_factor",
    )
    """Most tokens of a sequence, also padding, that an expert takes in training, over its even share: it keeps those in
    which it has the largest weights, and other tokens go without it. Left out: no token is dropped."""


class TokenModel(Model):
    """Base of the families that read tokens of a vocabulary; each family declares these fields itself."""

    vocab_size: PositiveInt
    """Tokens of the vocabulary."""
    max_seq_len: PositiveInt
    """The longest sequence, in tokens."""

    @property
    def longest_sample(self) -> int:
        return self.max_seq_len


@section
class ImageModel(Model):
    """Base of the families that read square images, patch by patch."""

    DATA_TYPES: ClassVar[tuple[str, ...]] = ("images",)
    INPUTS: ClassVar[tuple[str, ...]] = ("images",)
    LENGTH_KEYS: ClassVar[tuple[str, ...]] = ("image_size", "patch_size")
    TOKENS_BESIDE_PATCHES: ClassVar[int] = 0
    """Tokens of a sample besides the patches of its image."""

    num_layers: LayerCount = key(resume="refused", synonyms="depth n_layer n_layers num_hidden_layers")
    """Number of blocks."""
    hidden_size: PositiveInt = key(resume="refused", synonyms="embed_dim n_embd d_model")
    """Features of the residual stream."""
    image_size: PositiveInt = key(default=224, resume="refused", synonyms="img_size")
    """Side length of an image, in pixels."""
    patch_size: PositiveInt = key(default=16, resume="refused")
    """Side length of a patch, in pixels; image_size must be a multiple."""
    num_channels: PositiveInt = key(default=3, resume="refused", synonyms="in_chans in_channels")
    """Channels of an image."""

    @property
    def num_patches(self) -> int:
        """Patches per image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def patch_features(self) -> int:
        """Numbers per patch: its pixels, over all channels."""
        return self.num_channels * self.patch_size**2

    @property
    def longest_sample(self) -> int:
        return self.num_patches + self.TOKENS_BESIDE_PATCHES


@section
class OtherModel:
    """A model that is not a dslpar family: a class by name, and its arguments.

    With `layers_cfg`, a list of dict(type=..., ...), its layers are known, and a pipeline can be partitioned before the
    model is built. The class must then be a `dslpar.ModelFromConfig`, or 'Sequential' (torch.nn's).
    """

    target: str = key(resume="refused")
    """Dotted name of the class, a name registered with MODELS, or 'Sequential'."""
    args: Dict = key(default_factory=dict)
    """Its keyword arguments."""
    lora: LoRA | None = key(default=None)
    """For transformers models: train only low-rank adapters. Left out: all weights are trained."""
    attn_implementation: Choice | None = key(
        default=None,
        resume="reported",
        synonyms="attn_impl use_flash_attention_2",
        choices=("sdpa", "flash_attention_2"),
        refused={
            "eager": "sharded models compute attention with torch's kernels only",
            "flex_attention": "sharded models compute attention with torch's scaled_dot_product_attention only",
            "flash_attention_3": "torch's own FlashAttention kernel is the only one",
        },
    )
    """For transformers models: the attention kernel. 'sdpa' (the default): the one that torch chooses;
    'flash_attention_2': torch's FlashAttention, or an error."""

    @property
    def is_of_transformers(self) -> bool:
        """Return whether the class belongs to transformers, whose configs dslpar can read."""
        return self.target.startswith("transformers.")

    @property
    def layers(self) -> tuple[Mapping[str, Any], ...] | None:
        """The layers of `layers_cfg`, or None if there is no such list."""
        layers = self.args.get("layers_cfg")
        return tuple(layers) if isinstance(layers, (list, tuple)) else None

    @cached_property
    def transformers(self) -> TransformersConfig | None:
        """The config of a transformers model, as far as it is known; None for other models."""
        if not self.is_of_transformers:
            return None
        from dslpar.schema import transformers_configs  # most configs have one of dslpar's models

        return transformers_configs.config_of(self.target, self.args)

    @property
    def num_layers(self) -> int | None:
        """Layers that a pipeline partitions: the listed ones, or the number of layer_idx; None if unknown."""
        if self.layers is None:
            return self.transformers.num_layers if self.transformers is not None else None
        placed = [layer["layer_idx"] for layer in self.layers if layer.get("layer_idx") is not None]
        return max(0, *placed) + 1 if placed else len(self.layers)

    @property
    def num_experts(self) -> int | None:
        """Experts of a mixture; None: the model has no mixtures of experts, or is unknown."""
        return None if self.transformers is None else self.transformers.size("experts")

    @property
    def is_balanced(self) -> bool:
        """Return whether the config of a transformers model enables the load-balancing loss of its experts."""
        return bool(self.num_experts and self.transformers and self.transformers.values.get("output_router_logits"))

    @property
    def router_sums(self) -> tuple[int, int] | None:
        """Shape of the routers' sums that layers pass on beside the residual; None: there are none."""
        return (2, self.num_experts or 0) if self.is_balanced else None


@section
class AdamW:
    """AdamW, torch's implementation."""

    lr: PositiveFloat = key(
        default=3e-4, resume="reported", synonyms="learning_rate base_lr", capitals="LEARNING_RATE LR"
    )
    """Peak learning rate."""
    weight_decay: NonNegativeFloat = key(default=0.01, resume="reported", capitals="WEIGHT_DECAY")
    """Decoupled decay of parameters with two or more dims."""
    betas: Betas = key(default=(0.9, 0.999), resume="reported")
    """Decay rates of the two moments."""
    eps: PositiveFloat = key(default=1e-8, resume="reported")
    """Added to the square root of the second moment."""
    amsgrad: bool = key(default=False, resume="refused")
    """Divide by the square root of the largest second moment so far."""


@section
class Adam(AdamW):
    """Adam with L2 regularisation in the gradient."""

    weight_decay: NonNegativeFloat = key(default=0.0, resume="reported")
    """L2 factor on parameters with two or more dims."""


@section
class SGD:
    """Stochastic gradient descent."""

    lr: PositiveFloat = key(default=1e-2, resume="reported")
    """Peak learning rate."""
    momentum: Fraction = key(default=0.0, resume="refused")
    """Share of the last step's update that is kept."""
    nesterov: bool = key(default=False, resume="reported")
    """Use Nesterov momentum."""
    weight_decay: NonNegativeFloat = key(default=0.0, resume="reported")
    """L2 factor on parameters with two or more dims."""


@section
class OtherOptimizer:
    """An optimizer of torch or DeepSpeed by its short name, or your own class by its full name."""

    target: str = key(resume="refused")
    """torch's 'RMSprop', ..., DeepSpeed's 'FusedAdam', 'DeepSpeedCPUAdam', 'Lion', ..., or a dotted name."""
    lr: PositiveFloat = key(default=1e-3, resume="reported")
    """Peak learning rate."""
    weight_decay: NonNegativeFloat = key(default=0.0, resume="reported")
    """Decay of parameters with two or more dims, as that optimizer defines it."""
    args: Dict = key(default_factory=dict)
    """The optimizer's other keyword arguments, as written."""


Optimizer: TypeAlias = AdamW | SGD | OtherOptimizer


@section
class LRScheduler:
    """The learning rate over the run; during warmup_steps it rises as lr * (t + 1) / warmup_steps."""

    type: Choice = key(
        default="constant", resume="reported", choices=LR_SCHEDULERS, synonyms="lr_decay_style lr_schedule"
    )
    """After the warm-up: 'constant', or decay to min_lr ('linear' or 'cosine')."""
    warmup_steps: NonNegativeInt = key(
        default=0,
        resume="reported",
        synonyms="warmup lr_warmup_iters lr_warmup_steps warmup_iter warmup_iters warmup_num_steps",
        capitals="WARMUP_EPOCHS WARMUP_FRACTION",
    )
    """Steps of linear warm-up."""
    min_lr: NonNegativeFloat = key(
        default=0.0, resume="reported", synonyms="min_learning_rate lr_min eta_min", capitals="MIN_LR"
    )
    """The learning rate at the end of the decay, and in all later steps."""
    decay_steps: PositiveInt | None = key(
        default=None,
        resume="reported",
        synonyms="lr_decay_iters lr_decay_steps lr_max_steps num_training_steps",
    )
    """Step that reaches min_lr, counted from the run's first step, with the warm-up. Left out: the run's last step."""


@section
class OtherLRScheduler:
    """An LR scheduler of DeepSpeed ('WarmupDecayLR', ...) or torch ('StepLR', ...) by its short name."""

    target: str = key(resume="reported")
    """Name of the scheduler."""
    args: Dict = key(default_factory=dict)
    """The scheduler's keyword arguments without the optimizer, as written; it steps once per optimizer step."""


@section
class Zero:
    """DeepSpeed's ZeRO: shards over replicas, and without a pipeline also over context or 2.5d's depth."""

    stage: ZeroStage = key(default=0, resume="free", shorthand=True, synonyms="zero_stage zero_level")
    """Sharded state: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters."""
    overlap_param_gather: bool = key(
        default=False, resume="free", synonyms="overlap_allgather overlap_param_sync forward_prefetch"
    )
    """ZeRO 1 and 2: gather the updated weights during the next forward, not before it."""
    extra: Dict = key(default_factory=dict)
    """DeepSpeed's other keys of `zero_optimization`, as written."""


@section
class Precision:
    """Data type of the model's computation; ZeRO keeps fp32 master weights."""

    dtype: DType = key(default="fp32", resume="reported", shorthand=True, deepspeed="bf16.enabled fp16.enabled")
    """'fp32', 'bf16' or 'fp16'."""
    extra: Dict = key(default_factory=dict)
    """DeepSpeed's other keys of `bf16` or `fp16`, as written."""


@section
class Batch:
    """Samples per step; global_size = micro_size * accumulation * data size."""

    global_size: PositiveInt | None = key(
        default=None,
        resume="free",
        deepspeed="train_batch_size",
        synonyms="global_batch_size train_batch_size batch_size",
        capitals="GLOBAL_BATCH_SIZE",
    )
    """Samples per optimizer step, over all ranks."""
    micro_size: PositiveInt | None = key(
        default=None,
        resume="free",
        deepspeed="train_micro_batch_size_per_gpu",
        synonyms="micro_batch_size train_micro_batch_size train_micro_batch_size_per_gpu per_device_train_batch_size "
        "micro_batch",
        capitals="BATCH_SIZE",
    )
    """Samples per forward of one data rank (one tensor group), before axis x splits them."""
    accumulation: PositiveInt | None = key(
        default=None,
        resume="free",
        same_as="schedule.num_microbatches",
        deepspeed="gradient_accumulation_steps",
        synonyms="gradient_accumulation gradient_accumulation_steps num_accumulation_steps num_micro_batches "
        "num_microbatches grad_accumulation_steps grad_acc_steps gas",
        capitals="NUM_MICRO_BATCHES",
    )
    """Micro-batches per step; with a pipeline, those that run through it."""


@section
class Dist:
    """LiBai's form of `parallel`; sizes of 1 or None have no effect."""

    data_parallel_size: PositiveInt | None = key(default=None, resume="free")
    """Data-parallel replicas."""
    tensor_parallel_size: PositiveInt | None = key(default=None, resume="free")
    """Ranks that share each layer, in mode 1d."""
    pipeline_parallel_size: PositiveInt | None = key(default=None, resume="free")
    """Pipeline stages."""
    pipeline_num_layers: PositiveInt | None = key(default=None, resume="free")
    """Number of transformer layers; must be the model's."""
    custom_pipeline_stage_id: IntList | None = key(default=None, resume="free")
    """The stage of each transformer layer."""
    auto_pipeline_stage_id: IntList | None = key(default=None, resume="free")
    """Written by dslpar for information; recomputed on load."""
    actual_pipeline_stage_id: IntList | None = key(default=None, resume="free")
    """Written by dslpar for information; recomputed on load."""


@section
class Train:
    """The training loop."""

    steps: PositiveInt = key(
        default=100,
        resume="reported",
        synonyms="train_iters train_iter max_steps num_steps iterations num_iterations max_iters",
        capitals="TRAIN_ITERS NUM_EPOCHS",
    )
    """Optimizer steps."""
    seed: NonNegativeInt = key(default=1234, resume="refused", synonyms="random_seed", capitals="SEED")
    """Seed of weights, data order and dropout."""
    deterministic: bool = key(default=False, resume="reported", synonyms="use_deterministic_algorithms")
    """Bitwise reproducible runs on the same layout and machine: torch's deterministic algorithms, a fixed cuBLAS
    workspace, NCCL's ring. Slower. An operation without a deterministic form is an error."""
    compile: bool = key(default=False, resume="reported", synonyms="torch_compile use_compile")
    """Use torch.compile on train.compile_components, for fewer kernels. The first step then takes minutes. Generated
    kernels round differently in the last bits."""
    compile_components: CompileComponents = key(default=("layers", "loss"), resume="reported")
    """'layers': the repeated layers, with ZeRO 0 to 2 (ZeRO 3 gathers weights between the operations of a layer).
    Dropout draws from its own seeds, so it stays outside the graphs and splits them. 'loss': the cross-entropy, without
    a copy of the logits; works with everything."""
    compile_backend: CompileBackend = key(default="inductor", resume="reported", synonyms="torch_compile_backend")
    """'inductor' (generated kernels), or 'aot_eager' (the same graphs without them, to find out whether graphs or
    kernels are at fault)."""
    clip_grad_norm: PositiveFloat | None = key(
        default=None,
        resume="reported",
        deepspeed="gradient_clipping",
        synonyms="clip_grad gradient_clipping clip_grad_norm max_grad_norm grad_clip clip_gradient",
    )
    """Largest 2-norm of the gradient. None: no clipping."""
    loss_chunks: PositiveInt = key(default=1, resume="free", synonyms="num_loss_chunks loss_chunk_size")
    """Number of chunks of tokens. Logits and loss are computed chunk by chunk, and again in the backward, so with more
    than 1 the full logits never exist. For long sequences and large vocabularies."""
    log_interval: PositiveInt = key(default=1, resume="free", synonyms="log_period logging_steps log_every")
    """Steps between lines on the terminal."""
    eval_interval: PositiveInt | None = key(
        default=None, resume="free", synonyms="eval_period evaluation_interval eval_every", capitals="EVAL_INTERVAL"
    )
    """Steps between evaluations, which also run before the first step and after the last. None: no evaluation."""
    eval_steps: PositiveInt = key(default=8, resume="free", synonyms="eval_iters eval_iter", capitals="EVAL_ITERS")
    """Global batches of held-out data per evaluation."""
    eval_train: bool = key(default=False, resume="free")
    """At each evaluation, also measure the loss of training data, without dropout: of the run's first eval_steps global
    batches."""
    output_dir: str | None = key(
        default=None, resume="free", synonyms="save_dir work_dir output_path", capitals="LOG_PATH"
    )
    """Folder that the run writes to. Left out: outputs/<config name>."""
    save_interval: NonNegativeInt | None = key(
        default=None,
        resume="free",
        synonyms="checkpoint_period checkpoint_factor save_every save_steps checkpointer_period",
    )
    """Steps between checkpoints; the last step is always saved. Left out: the last step alone; 0: never."""
    async_save: bool = key(default=True, resume="free", synonyms="async_checkpoint async_mode")
    """Continue training while a checkpoint is written, from a copy in host memory that is as large as what the rank
    writes. The run waits for the checkpoint of the last step and for one at SIGTERM. False: wait for all checkpoints;
    on a CPU nothing is copied."""
    step_timeout: PositiveFloat | None = key(default=600, resume="free")
    """Seconds after which a step counts as hanging and the job is ended, with the stacks of all ranks. The first step,
    a checkpoint (save, verify, load) and the exit may take six times as long. None: no limit."""
    max_skipped: PositiveInt | None = key(default=None, resume="free")
    """Consecutive steps that may be skipped because loss or gradient are not finite, before the run is ended. Left
    out: 3, or with fp16's dynamic loss scale, as many as it takes the scale to fall to its minimum."""
    check_replicas: PositiveInt | None = key(
        default=None, resume="free", synonyms="check_weight_hash_across_dp_replicas_interval"
    )
    """Steps between comparisons of state that must be equal on several ranks: weights, master weights, optimizer state,
    counters, loss scaler, random generators. Hashes of all bits are compared. None: never."""
    on_replica_difference: OnDifference = key(default="stop", resume="free")
    """'stop': a difference ends the run. 'report': it is logged once and noted in metrics.jsonl, and the run continues.
    Either way, checkpoints since the last comparison without a difference are marked."""
    term_grace: PositiveFloat = key(default=10, resume="free")
    """Seconds after SIGTERM to finish the current step (on a GPU also the next one) and to save a checkpoint; then the
    rank is ended."""
    requeue_status: ExitStatus = key(default=75, resume="free")
    """Exit status of a run that SIGTERM stopped, for the scheduler to queue it again."""
    dist: Dist = key(default_factory=Dist)
    """LiBai's form of `parallel`."""

    @property
    def compiles_layers(self) -> bool:
        """Return whether torch.compile compiles each repeated layer."""
        return self.compile and "layers" in self.compile_components

    @property
    def compiles_loss(self) -> bool:
        """Return whether torch.compile compiles the cross-entropy."""
        return self.compile and "loss" in self.compile_components


@section
class ActivationCheckpoint:
    """Activation checkpointing: activations are recomputed in the backward instead of being stored."""

    interval: PositiveInt = key(resume="free", shorthand=True)
    """Consecutive layers per segment; only the input of each segment is stored. 1: the input of each layer."""
    offload: bool = key(default=False, resume="free", synonyms="cpu_checkpointing offload_to_cpu cpu_offload")
    """Keep these inputs in host memory until the backward, not in device memory."""
    mlp_chunks: PositiveInt = key(default=1, resume="free")
    """Number of chunks of tokens. The second half of a block (norm and MLP) is computed chunk by chunk, and again in
    the backward, so that inner activations of only one chunk exist at a time. For dslpar's own models."""


@section
class Checkpoint:
    """The checkpoints in <output_dir>/checkpoints: the number to keep, and the one from which `--resume` continues."""

    keep: PositiveInt | None = key(default=None, resume="free")
    """Number of newest checkpoints to keep. Left out: all."""
    keep_best: bool = key(default=False, resume="free", synonyms="save_top_k load_best_model_at_end")
    """Save a checkpoint at each evaluation with the lowest held-out loss so far, and keep the best one besides the
    newest."""
    resume_from: ResumeFrom = key(default="newest", resume="free")
    """'newest' (an error if corrupted), 'newest_whole' (skips corrupted ones), 'best' (lowest held-out loss), a name
    ('step_000005') or a path."""


@section
class FileMonitor:
    """A monitor that writes files: CSV or TensorBoard."""

    enabled: bool = key(default=True, resume="free", shorthand=True)
    """Turn the monitor on."""
    output_path: str | None = key(default=None, resume="free")
    """Folder that it writes to. Left out: `csv` or `tensorboard` in output_dir."""
    job_name: str | None = key(default=None, resume="free")
    """Subfolder of the run. Left out: the config's name."""


@section
class WandbMonitor:
    """Weights & Biases."""

    enabled: bool = key(default=True, resume="free", shorthand=True)
    """Turn the monitor on."""
    project: str | None = key(default=None, resume="free")
    """wandb project. Left out: the config's name."""
    group: str | None = key(default=None, resume="free")
    """wandb group."""
    team: str | None = key(default=None, resume="free")
    """wandb team (entity)."""
    offline: bool = key(default=False, resume="free")
    """Write below output_dir, without a network; `wandb sync` sends the data later."""


@section
class Monitor:
    """Outputs for the metrics of each step besides metrics.jsonl, through DeepSpeed's monitors."""

    csv: FileMonitor | None = key(default=None, deepspeed="csv_monitor")
    """One CSV file per metric."""
    tensorboard: FileMonitor | None = key(default=None, deepspeed="tensorboard")
    """TensorBoard event files; needs the package tensorboard."""
    wandb: WandbMonitor | None = key(default=None, deepspeed="wandb")
    """Weights & Biases; needs the package wandb."""


@section
class GradientHandler:
    """Code that changes gradients after their sum over micro-batches and replicas, before norm and clipping."""

    target: str = key()
    """A name registered with GRADIENT_HANDLER, or the dotted name of a class."""
    args: Dict = key(default_factory=dict)
    """Keyword arguments of the class; model and optimizer are passed before them."""


@section
class PipelineSchedule:
    """The order in which a pipeline runs the forwards and backwards of its micro-batches."""

    type: Choice = key(
        default="1f1b",
        resume="free",
        shorthand=True,
        choices=("1f1b", "interleaved", "zero_bubble"),
        refused={
            "gpipe": "it holds the activations of all micro-batches, for the same bubble as '1f1b'",
            "zbv": "'zero_bubble' with num_model_chunks=2 has the same bubble",
        },
    )
    """'1f1b': one forward, one backward; 'interleaved': several chunks per rank; 'zero_bubble': a split backward."""
    num_microbatches: PositiveInt | None = key(default=None, resume="free")
    """Micro-batches per step; the same number as batch.accumulation."""
    num_model_chunks: PositiveInt | None = key(
        default=None,
        resume="free",
        aliases="num_chunks",
        synonyms="virtual_pipeline_model_parallel_size virtual_pipeline_parallel_size virtual_pipeline_size vpp",
    )
    """Stages per rank, by default 2 for 'interleaved' and 1 for 'zero_bubble'. In all: pipeline size * this number."""


@section
class Cluster:
    """The machines that a run is meant for, from which `dslpar plan`, lint and show forecast memory and time."""

    device: str | None = key(default=None, resume="free", shorthand=True, synonyms="gpu accelerator device_type")
    """Name of a known device, such as 'h100-80g' (`dslpar plan --help` lists them). Left out: this machine's."""
    nodes_of: PositiveInt | None = key(
        default=None, resume="free", synonyms="gpus_per_node num_gpus_per_node devices_per_node nproc_per_node"
    )
    """Devices per node. Left out: the usual number for that device."""
    nic_gb_per_s: PositiveFloat | None = key(default=None, resume="free")
    """Network bandwidth per node: GB/s in one direction, all cards together. Left out: the usual for that device."""
    calibration: str | None = key(default=None, resume="free")
    """Measured constants of these machines: a file from `dslpar plan --calibrate` or `dslpar measure`, relative to the
    config."""


@section
class Spec:
    """All values of a config with defaults filled in; nothing is inferred yet."""

    model: Model | OtherModel = key(resume="refused")
    """The model: type='GPT' and its sizes, 'Sequential' with layers_cfg, or a class by its full name."""
    parallel: Parallel = key(default_factory=Parallel)
    """Division of ranks among data, pipeline, context, expert and tensor parallelism."""
    data: (
        TextData
        | MaskedTextData
        | SpanTextData
        | ImageData
        | TokensData
        | ChatData
        | HuggingFaceData
        | BlendData
        | OtherData
    ) = key(default_factory=TextData, resume="free")
    """The training data, by type: text, masked text, spans, conversations, images, or a blend of them."""
    optimizer: AdamW | Adam | SGD | OtherOptimizer = key(
        default_factory=AdamW, resume="refused", deepspeed="optimizer optimizer.params", synonyms="optim"
    )
    """The optimizer, by type: dslpar's, torch's, DeepSpeed's, or your own class."""
    lr_scheduler: LRScheduler | OtherLRScheduler = key(
        default_factory=LRScheduler, resume="refused", deepspeed="scheduler", synonyms="scheduler lr_decay lr_policy"
    )
    """The learning rate over the run, by type."""
    zero: Zero = key(
        default_factory=Zero,
        resume="free",
        deepspeed="zero_optimization",
        synonyms="zero_optimization zero_optimisation",
    )
    """DeepSpeed's ZeRO: shards over replicas, and without a pipeline also over context or 2.5d's depth."""
    precision: Precision = key(
        default_factory=Precision,
        resume="reported",
        deepspeed="bf16 bfloat16 fp16 data_types",
        synonyms="fp16 bf16 bfloat16 amp dtype params_dtype mixed_precision torch_dtype",
    )
    """Data type of the model's computation."""
    batch: Batch = key(default_factory=Batch)
    """Samples per step; two of the sizes determine the third."""
    train: Train = key(default_factory=Train)
    """The training loop: steps, seed, clipping, intervals, output folder."""
    activation_checkpoint: ActivationCheckpoint | None = key(
        default=None,
        deepspeed="activation_checkpointing",
        synonyms="activation_checkpointing checkpoint_activations recompute_granularity recompute_activations "
        "checkpoint_num_layers gradient_checkpointing recompute_num_layers",
    )
    """Activation checkpointing: recompute activations in the backward. Left out: off."""
    checkpoint: Checkpoint = key(default_factory=Checkpoint)
    """The number of checkpoints that are kept, and the one from which a run resumes."""
    monitor: Monitor = key(
        default_factory=Monitor, synonyms="tensorboard_dir wandb_project wandb tensorboard csv_monitor"
    )
    """Outputs for the metrics of each step besides metrics.jsonl."""
    gradient_handler: tuple[GradientHandler, ...] = key(default=(), resume="reported")
    """Your own code between the sum of gradients over micro-batches and clipping: a dict, or a list of dicts."""
    schedule: PipelineSchedule | None = key(default=None)
    """The order in which a pipeline runs the forwards and backwards of its micro-batches."""
    cluster: Cluster = key(default_factory=Cluster, synonyms="hardware machine")
    """The machines that a run is meant for; used only for forecasts, never by a run."""
    deepspeed: Dict = key(default_factory=dict, resume="reported")
    """DeepSpeed keys that no other section has; merged last."""


OPTIMIZERS: Mapping[str, type] = {"AdamW": AdamW, "Adam": Adam, "SGD": SGD}
