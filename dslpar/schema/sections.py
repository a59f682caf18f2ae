"""The typed sections of a config: frozen dataclasses whose fields are declared by `key(...)`, each with its help below.

A field's docstring is its help, its line in the reference, and the text that lint shows; its annotation names a type of
`dslpar.schema.types`; `key` holds everything else about it (`dslpar.schema.fields`). To add a key, add a field here
and use it where it takes effect. That sections are closed comes from nanotron.
"""

from __future__ import annotations

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
    """The axis of pipeline stages, and how the transformer layers are cut over it."""

    size: PositiveInt = key(resume="free", shorthand=True, same_as="train.dist.pipeline_parallel_size")
    """Stages: contiguous groups of layers, one a rank of axis "pipe"."""
    stage_ids: IntList | None = key(
        default=None,
        resume="free",
        same_as="train.dist.custom_pipeline_stage_id",
        synonyms="custom_pipeline_stage_id pipeline_model_parallel_layout",
    )
    """The stage of each transformer layer, from 0, never decreasing, each stage at least once."""
    counts: CountList | None = key(default=None, resume="free")
    """Transformer layers on each stage."""
    method: str | None = key(default=None, resume="free", synonyms="pipe_partition_method partition_method")
    """The automatic cut: 'cost' (the default), 'uniform', 'parameters', 'libai', or 'type:REGEX'."""


@keeping_hash
@section
class TensorParallel:
    """The axis of tensor parallelism: its mode, and how the cuboid keeps activations."""

    INLINE: ClassVar[str] = "kwargs"  # ColossalAI documents kwargs=dict(depth=2)

    size: PositiveInt = key(resume="free", shorthand=True, same_as="train.dist.tensor_parallel_size")
    """Ranks that share each layer."""
    mode: TensorMode | None = key(default=None, resume="free")
    """'1d', '2d', '2.5d', '3d', 'sequence' or 'cuboid'; needed if size is over 1."""
    depth: PositiveInt | None = key(default=None, resume="free")
    """Mode 2.5d: size is depth * q * q; weights are replicated over depth."""
    shape: MeshShape | None = key(default=None, resume="free")
    """Mode cuboid: (x, y, z), the ranks that split tokens, inner features, and residual features."""
    sequence: bool | None = key(default=None, resume="free", synonyms="sequence_parallel")
    """Mode 1d: keep the residual stream split by sequence between layers (Megatron's sequence parallelism)."""
    impl: Choice | None = key(default=None, resume="free", choices=("ring", "ulysses"))
    """Mode sequence, the short form of parallel.context: attention by 'ring' (the default) or 'ulysses'."""
    residual: Choice | None = key(default=None, resume="free", choices=("replicated", "sequence", "hidden", "batch"))
    """Modes 3d and cuboid: the residual stream over y, 'replicated', 'sequence', 'hidden' or 'batch'."""
    inner: Choice | None = key(default=None, resume="free", choices=("batch", "heads"))
    """Modes 3d and cuboid: inner activations over z, 'batch' or 'heads'."""
    keep: Choice | None = key(default=None, resume="free", choices=("x", "w", "both", "none"))
    """Gathered panels that live until the backward: 'x', 'w', 'both' or 'none'."""
    comm_overlap: CommOverlap | None = key(
        default=None, resume="free", synonyms="tp_comm_overlap async_tp enable_async_tensor_parallel"
    )
    """Run collectives under products: in parts, and those of weights under other linears', which takes room for one
    more gathered weight; the default is False. Without effect in layers that torch compiles. 'symmetric_memory': as
    True, and pieces of tokens come by torch's fused products, on CUDA devices that reach each other's memory (NVLink):
    for mode 1d with sequence, above all."""


@keeping_hash
@section
class ContextParallel:
    """The axis of context parallelism: each sequence is cut over its ranks, in every layer, beside any tensor mode."""

    size: PositiveInt = key(resume="free", shorthand=True)
    """Ranks that share each sequence; a tensor mode's ranks then share what each of them has."""
    impl: Choice | None = key(
        default=None,
        resume="free",
        choices=("ring", "ulysses", "hybrid"),
        synonyms="cp_comm_type",
    )
    """How tokens attend to those of other ranks: 'ring' (the default) sends keys and values around, 'ulysses' exchanges
    tokens for heads, 'hybrid' is ulysses over neighbouring ranks and a ring over the rest."""
    ulysses_size: PositiveInt | None = key(
        default=None, resume="free", synonyms="hierarchical_context_parallel_sizes ulysses_degree"
    )
    """Impl hybrid: neighbouring ranks that exchange heads; left out: as many as heads of keys divide over."""


@section
class Parallel:
    """How ranks are divided among data, pipeline, context and tensor parallelism."""

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
    order: AxisOrder | None = key(default=None, resume="free")
    """Axes from slow to fast: ('pipe', 'data', 'tensor'), or ColossalAI's ('data', 'pipe', 'tensor')."""


@section
class LoRA:
    """Low-rank adapters beside linear layers whose weights are frozen (arXiv 2106.09685); keys as in peft's LoraConfig.

    Nothing else is trained: what is frozen has no gradient, no optimizer state, and in bf16 no fp32 copy.
    """

    r: PositiveInt = key(default=8, resume="refused", synonyms="lora_r lora_rank rank lora_dim")
    """Rank of the adapters; never cut, so any number goes with any layout."""
    lora_alpha: PositiveFloat = key(default=8.0, resume="refused", aliases="alpha")
    """What adapters add is multiplied by lora_alpha / r."""
    lora_dropout: Fraction = key(default=0.0, resume="reported", aliases="dropout")
    """Probability of dropping a feature of an adapter's input."""
    target_modules: ModuleNames = key(default="all-linear", resume="refused", synonyms="lora_target_modules")
    """Linear layers that get one: ends of their names, ['q_proj', 'v_proj']; 'all-linear': all but the head."""
    use_rslora: bool = key(default=False, resume="refused")
    """Multiply by lora_alpha / sqrt(r) instead."""
    bias: Choice = key(
        default="none",
        resume="refused",
        choices=("none", "all"),
        refused={"lora_only": "q, k and v have one bias together here; 'all' trains every bias"},
    )
    """'none': biases are frozen; 'all': every bias of the model is trained."""
    modules_to_save: StrList = key(default=(), resume="refused")
    """Modules that are trained whole besides: ends of their names, ['lm_head']."""

    @property
    def scale(self) -> float:
        """What the adapters' product is multiplied by."""
        return self.lora_alpha / (self.r**0.5 if self.use_rslora else self.r)


class Model:
    """Base of the sections of model families (see dslpar.schema.families), whose layers dslpar knows.

    Every family has this field; as a plain annotation here, it keeps its place among the family's own.
    """

    DATA_TYPES: ClassVar[tuple[str, ...]] = ("text", "tokens", "chat")
    """Types of `data` that it learns from; none: a program brings the data."""
    INPUTS: ClassVar[tuple[str, ...]] = ("input_ids",)
    """What a micro-batch brings beside labels."""
    LENGTH_KEYS: ClassVar[tuple[str, ...]] = ("max_seq_len",)
    """The keys that `longest_sample` follows from."""

    num_layers: LayerCount
    """Layers that a pipeline cuts."""

    @property
    def longest_sample(self) -> int:
        """Tokens of the longest sample that the model takes: what the sequence of its residual stream counts."""
        raise NotImplementedError

    @property
    def is_causal(self) -> bool:
        """Whether tokens attend to none that come after them."""
        return False

    @property
    def packs(self) -> bool:
        """Whether a sample may hold several documents, each of which is read as if it were alone."""
        return False


class TokenModel(Model):
    """Base of the families that read tokens of a vocabulary; the fields are the family's own again."""

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
    """Tokens of a sample that are no patch of its image."""

    num_layers: LayerCount = key(resume="refused", synonyms="depth n_layer n_layers num_hidden_layers")
    """Blocks."""
    hidden_size: PositiveInt = key(resume="refused", synonyms="embed_dim n_embd d_model")
    """Features of the residual stream."""
    image_size: PositiveInt = key(default=224, resume="refused", synonyms="img_size")
    """Pixels of a side of an image."""
    patch_size: PositiveInt = key(default=16, resume="refused")
    """Pixels of a side of a patch; image_size must be a multiple."""
    num_channels: PositiveInt = key(default=3, resume="refused", synonyms="in_chans in_channels")
    """Channels of an image."""

    @property
    def num_patches(self) -> int:
        """Patches of an image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def patch_features(self) -> int:
        """Numbers of a patch: its pixels, over all channels."""
        return self.num_channels * self.patch_size**2

    @property
    def longest_sample(self) -> int:
        return self.num_patches + self.TOKENS_BESIDE_PATCHES


@section
class OtherModel:
    """A model of other layers: a class by name, and its arguments.

    With `layers_cfg`, a list of dict(type=..., ...), its layers are known, and a pipeline can be cut before it is
    built: a class of `dslpar.ModelFromConfig`, or 'Sequential' (torch.nn's).
    """

    target: str = key(resume="refused")
    """Dotted name of the class, a name registered with MODELS, or 'Sequential'."""
    args: Dict = key(default_factory=dict)
    """Its keyword arguments."""
    lora: LoRA | None = key(default=None)
    """Of a model of transformers': adapters are trained, and nothing else; left out: all is trained."""

    @property
    def is_of_transformers(self) -> bool:
        """Whether the name is one of transformers', by which dslpar knows what its config says."""
        return self.target.startswith("transformers.")

    @property
    def layers(self) -> tuple[Mapping[str, Any], ...] | None:
        """The layers of `layers_cfg`; None where there is no such list."""
        layers = self.args.get("layers_cfg")
        return tuple(layers) if isinstance(layers, (list, tuple)) else None

    @cached_property
    def transformers(self) -> TransformersConfig | None:
        """The config of a model of transformers', as far as it is known; None where there is none."""
        if not self.is_of_transformers:
            return None
        from dslpar.schema import transformers_configs  # most configs have a model of dslpar's own

        return transformers_configs.config_of(self.target, self.args)

    @property
    def num_layers(self) -> int | None:
        """Layers that a pipeline counts: the listed ones, or as many as their layer_idx count; None: not known."""
        if self.layers is None:
            return self.transformers.num_layers if self.transformers is not None else None
        placed = [layer["layer_idx"] for layer in self.layers if layer.get("layer_idx") is not None]
        return max(0, *placed) + 1 if placed else len(self.layers)


@section
class AdamW:
    """AdamW, torch's implementation."""

    lr: PositiveFloat = key(
        default=3e-4, resume="reported", synonyms="learning_rate base_lr", capitals="LEARNING_RATE LR"
    )
    """Learning rate at its peak."""
    weight_decay: NonNegativeFloat = key(default=0.01, resume="reported", capitals="WEIGHT_DECAY")
    """Decoupled decay of parameters with two or more dims."""
    betas: Betas = key(default=(0.9, 0.999), resume="reported")
    """Decay rates of the two moments."""
    eps: PositiveFloat = key(default=1e-8, resume="reported")
    """Added to the root of the second moment."""
    amsgrad: bool = key(default=False, resume="refused")
    """Divide by the root of the largest second moment so far."""


@section
class Adam(AdamW):
    """Adam with L2 regularisation in the gradient."""

    weight_decay: NonNegativeFloat = key(default=0.0, resume="reported")
    """L2 factor on parameters with two or more dims."""


@section
class SGD:
    """Stochastic gradient descent."""

    lr: PositiveFloat = key(default=1e-2, resume="reported")
    """Learning rate at its peak."""
    momentum: Fraction = key(default=0.0, resume="refused")
    """Share of the last step that is kept."""
    nesterov: bool = key(default=False, resume="reported")
    """Nesterov's momentum."""
    weight_decay: NonNegativeFloat = key(default=0.0, resume="reported")
    """L2 factor on parameters with two or more dims."""


@section
class OtherOptimizer:
    """An optimizer of torch's or DeepSpeed's by its name there, or a class of your own by its full name."""

    target: str = key(resume="refused")
    """'RMSprop' and the like, DeepSpeed's 'FusedAdam', 'DeepSpeedCPUAdam', 'Lion', ..., or a dotted name."""
    lr: PositiveFloat = key(default=1e-3, resume="reported")
    """Learning rate at its peak."""
    weight_decay: NonNegativeFloat = key(default=0.0, resume="reported")
    """Decay of parameters with two or more dims, as that optimizer has it."""
    args: Dict = key(default_factory=dict)
    """Its other keyword arguments, as written."""


Optimizer: TypeAlias = AdamW | SGD | OtherOptimizer


@section
class LRScheduler:
    """The learning rate over the run; the first warmup_steps rise as lr * (t + 1) / warmup_steps."""

    type: Choice = key(
        default="constant", resume="reported", choices=LR_SCHEDULERS, synonyms="lr_decay_style lr_schedule"
    )
    """After the warm-up: 'constant', or down to min_lr at the last step by 'linear' or 'cosine'."""
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
    """The learning rate at the last step."""


@section
class OtherLRScheduler:
    """An LR scheduler of DeepSpeed's ('WarmupDecayLR', ...) or torch's ('StepLR', ...) by its name there."""

    target: str = key(resume="reported")
    """Its name."""
    args: Dict = key(default_factory=dict)
    """Its keyword arguments, but for the optimizer, as written; one step of it is one optimizer step."""


@section
class Zero:
    """DeepSpeed's ZeRO: what is sharded over replicas, and (no pipeline) over ranks of a context or 2.5d's depth."""

    stage: ZeroStage = key(default=0, resume="free", shorthand=True, synonyms="zero_stage zero_level")
    """0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too."""
    overlap_param_gather: bool = key(
        default=False, resume="free", synonyms="overlap_allgather overlap_param_sync forward_prefetch"
    )
    """ZeRO 1 and 2: gather the weights that a step has changed under the next forward; not all are there before."""
    extra: Dict = key(default_factory=dict)
    """DeepSpeed's other keys of `zero_optimization`, as written."""


@section
class Precision:
    """The type that the model computes in; fp32 masters stay with ZeRO."""

    dtype: DType = key(default="fp32", resume="reported", shorthand=True, deepspeed="bf16.enabled fp16.enabled")
    """'fp32', 'bf16' or 'fp16'."""
    extra: Dict = key(default_factory=dict)
    """DeepSpeed's other keys of `bf16` or `fp16`, as written."""


@section
class Batch:
    """Samples a step; global_size = micro_size * accumulation * data size."""

    global_size: PositiveInt | None = key(
        default=None,
        resume="free",
        deepspeed="train_batch_size",
        synonyms="global_batch_size train_batch_size batch_size",
        capitals="GLOBAL_BATCH_SIZE",
    )
    """Samples of one optimizer step, over all ranks."""
    micro_size: PositiveInt | None = key(
        default=None,
        resume="free",
        deepspeed="train_micro_batch_size_per_gpu",
        synonyms="micro_batch_size train_micro_batch_size train_micro_batch_size_per_gpu per_device_train_batch_size "
        "micro_batch",
        capitals="BATCH_SIZE",
    )
    """Samples of one forward of one data rank (one tensor group), before x splits them."""
    accumulation: PositiveInt | None = key(
        default=None,
        resume="free",
        same_as="schedule.num_microbatches",
        deepspeed="gradient_accumulation_steps",
        synonyms="gradient_accumulation gradient_accumulation_steps num_accumulation_steps num_micro_batches "
        "num_microbatches grad_accumulation_steps grad_acc_steps gas",
        capitals="NUM_MICRO_BATCHES",
    )
    """Micro-batches a step; with a pipeline, the micro-batches in flight."""


@section
class Dist:
    """LiBai's form of `parallel`; sizes of 1 or None say nothing."""

    data_parallel_size: PositiveInt | None = key(default=None, resume="free")
    """Data-parallel replicas."""
    tensor_parallel_size: PositiveInt | None = key(default=None, resume="free")
    """Ranks that share each layer, in mode 1d."""
    pipeline_parallel_size: PositiveInt | None = key(default=None, resume="free")
    """Pipeline stages."""
    pipeline_num_layers: PositiveInt | None = key(default=None, resume="free")
    """Transformer layers; must be the model's."""
    custom_pipeline_stage_id: IntList | None = key(default=None, resume="free")
    """The stage of each transformer layer."""
    auto_pipeline_stage_id: IntList | None = key(default=None, resume="free")
    """Written by dslpar for information; recomputed on load."""
    actual_pipeline_stage_id: IntList | None = key(default=None, resume="free")
    """Written by dslpar for information; recomputed on load."""


@section
class Train:
    """The run."""

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
    """Same bits each time on the same layout and machine: torch's deterministic algorithms, cuBLAS's fixed workspace,
    NCCL's ring. Slower; an operation that has no such form is an error."""
    compile: bool = key(default=False, resume="reported", synonyms="torch_compile use_compile")
    """Whether torch.compile makes fewer kernels of what train.compile_components names; the first step then takes
    minutes. Kernels of its own round otherwise, in the last bits."""
    compile_components: CompileComponents = key(default=("layers", "loss"), resume="reported")
    """'layers', the repeated ones, with ZeRO 0 to 2: ZeRO 3 gathers weights between the operations of a layer; and
    dropout, which draws from seeds of its own, stays outside of the graphs and cuts them. 'loss', the cross-entropy,
    which then makes no copy of the logits: goes with everything."""
    compile_backend: CompileBackend = key(default="inductor", resume="reported", synonyms="torch_compile_backend")
    """'inductor' (kernels of its own), or 'aot_eager' (the same graphs without: to find out which of the two is at
    fault)."""
    clip_grad_norm: PositiveFloat | None = key(
        default=None,
        resume="reported",
        deepspeed="gradient_clipping",
        synonyms="clip_grad gradient_clipping clip_grad_norm max_grad_norm grad_clip clip_gradient",
    )
    """Largest 2-norm of the gradient; None: no clipping."""
    loss_chunks: PositiveInt = key(default=1, resume="free", synonyms="num_loss_chunks loss_chunk_size")
    """Parts of the tokens for which logits and loss are computed one after the other, and again in the backward: with
    more than 1, logits are never whole. For long sequences and large vocabularies."""
    log_interval: PositiveInt = key(default=1, resume="free", synonyms="log_period logging_steps log_every")
    """Steps between lines on the terminal."""
    eval_interval: PositiveInt | None = key(
        default=None, resume="free", synonyms="eval_period evaluation_interval eval_every", capitals="EVAL_INTERVAL"
    )
    """Steps between evaluations; with it, also before the first step and after the last. None: no evaluation."""
    eval_steps: PositiveInt = key(default=8, resume="free", synonyms="eval_iters eval_iter", capitals="EVAL_ITERS")
    """Global batches of held-out data in one evaluation."""
    output_dir: str | None = key(
        default=None, resume="free", synonyms="save_dir work_dir output_path", capitals="LOG_PATH"
    )
    """Where the run writes; left out: outputs/<config name>."""
    save_interval: NonNegativeInt | None = key(
        default=None,
        resume="free",
        synonyms="checkpoint_period checkpoint_factor save_every save_steps checkpointer_period",
    )
    """Steps between checkpoints, the last step always among them; left out: the last step alone; 0: never."""
    async_save: bool = key(default=True, resume="free", synonyms="async_checkpoint async_mode")
    """Whether steps go on while a checkpoint is written, from a copy in the host's memory that is as large as what this
    rank writes; the last step's, and one at SIGTERM, are waited for. False: all are, and nothing is copied on a CPU."""
    step_timeout: PositiveFloat | None = key(default=600, resume="free")
    """Seconds that a step may take before the job is taken for hanging and ended, with the stacks of all ranks; the
    first step, a checkpoint (saved, verified, loaded) and leaving six times as many. None: it may hang for ever."""
    max_skipped: PositiveInt | None = key(default=None, resume="free")
    """Steps in a row that may be skipped since the loss or the gradient is not finite, before the run is ended; left
    out: 3, or with fp16's dynamic loss scale, as many as that takes to fall to its least."""
    check_replicas: PositiveInt | None = key(
        default=None, resume="free", synonyms="check_weight_hash_across_dp_replicas_interval"
    )
    """Steps between comparisons of what ranks must hold equal copies of: weights, masters, the optimizer's state,
    counters, loss scaler, random generators. Their hashes are compared, to the bit; None: never."""
    on_replica_difference: OnDifference = key(default="stop", resume="free")
    """'stop': a difference ends the run. 'report': it is logged once and noted in metrics.jsonl, and the run goes on.
    Either way checkpoints since the last comparison without one are marked."""
    term_grace: PositiveFloat = key(default=10, resume="free")
    """Seconds after SIGTERM in which the step under way, or on a GPU also the next one, is finished and a checkpoint
    saved; then the rank is ended."""
    requeue_status: ExitStatus = key(default=75, resume="free")
    """Exit status of a run that was stopped by SIGTERM, on which a scheduler queues it again."""
    dist: Dist = key(default_factory=Dist)
    """LiBai's form of `parallel`."""

    @property
    def compiles_layers(self) -> bool:
        """Whether torch.compile makes one graph of each repeated layer."""
        return self.compile and "layers" in self.compile_components

    @property
    def compiles_loss(self) -> bool:
        """Whether torch.compile makes kernels of cross-entropy."""
        return self.compile and "loss" in self.compile_components


@section
class ActivationCheckpoint:
    """Activations that are computed again in the backward instead of being stored."""

    interval: PositiveInt = key(resume="free", shorthand=True)
    """Layers that go together: of so many in a row only the first one's input is stored; 1: of each layer."""
    offload: bool = key(default=False, resume="free", synonyms="cpu_checkpointing offload_to_cpu cpu_offload")
    """Whether that input waits for the backward in the host's memory, and not in the device's."""
    mlp_chunks: PositiveInt = key(default=1, resume="free")
    """Parts of the tokens for which a block's second half, norm and MLP, is computed one after the other, and once more
    in the backward: of its inner activations only one part's are ever there. Of dslpar's own models."""


@section
class Checkpoint:
    """The checkpoints in <output_dir>/checkpoints: what is kept of them, and from which one `--resume` goes on."""

    keep: PositiveInt | None = key(default=None, resume="free")
    """The newest so many; left out: all."""
    resume_from: ResumeFrom = key(default="newest", resume="free")
    """'newest' (damaged: an error), 'newest_whole' (passes over damaged ones), a name ('step_000005') or a path."""


@section
class FileMonitor:
    """A monitor that writes files: CSV or TensorBoard."""

    enabled: bool = key(default=True, resume="free", shorthand=True)
    """Whether it writes."""
    output_path: str | None = key(default=None, resume="free")
    """Folder that it writes to; left out: `csv` or `tensorboard` in output_dir."""
    job_name: str | None = key(default=None, resume="free")
    """Folder of the run below it; left out: the config's name."""


@section
class WandbMonitor:
    """Weights & Biases."""

    enabled: bool = key(default=True, resume="free", shorthand=True)
    """Whether it writes."""
    project: str | None = key(default=None, resume="free")
    """Its project; left out: the config's name."""
    group: str | None = key(default=None, resume="free")
    """Its group."""
    team: str | None = key(default=None, resume="free")
    """Its team (entity)."""
    offline: bool = key(default=False, resume="free")
    """Write below output_dir, without a network; `wandb sync` sends it later."""


@section
class Monitor:
    """Where the numbers of each step go besides metrics.jsonl, through DeepSpeed's monitors."""

    csv: FileMonitor | None = key(default=None, deepspeed="csv_monitor")
    """One CSV file a number."""
    tensorboard: FileMonitor | None = key(default=None, deepspeed="tensorboard")
    """TensorBoard event files; needs the package tensorboard."""
    wandb: WandbMonitor | None = key(default=None, deepspeed="wandb")
    """Weights & Biases; needs the package wandb."""


@section
class GradientHandler:
    """What is done to gradients after they are summed over micro-batches and replicas, before norm and clipping."""

    target: str = key()
    """A name registered with GRADIENT_HANDLER, or the dotted name of a class."""
    args: Dict = key(default_factory=dict)
    """Its keyword arguments, after model and optimizer."""


@section
class PipelineSchedule:
    """The order in which a pipeline works off its micro-batches."""

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
    """'1f1b': one forward, one backward; 'interleaved': several chunks a rank; 'zero_bubble': the backward is split."""
    num_microbatches: PositiveInt | None = key(default=None, resume="free")
    """Micro-batches a step; the same number as batch.accumulation."""
    num_model_chunks: PositiveInt | None = key(
        default=None,
        resume="free",
        aliases="num_chunks",
        synonyms="virtual_pipeline_model_parallel_size virtual_pipeline_parallel_size virtual_pipeline_size vpp",
    )
    """Stages that each rank holds, of 'interleaved' (2) and 'zero_bubble' (1); pipeline times as many are cut."""


@section
class Cluster:
    """The machines that a run is meant for: what `dslpar plan`, lint and show forecast memory and time with."""

    device: str | None = key(default=None, resume="free", shorthand=True, synonyms="gpu accelerator device_type")
    """A device of the table, 'h100-80g' or the like (`dslpar plan --help` lists them); left out: this machine's."""
    nodes_of: PositiveInt | None = key(
        default=None, resume="free", synonyms="gpus_per_node num_gpus_per_node devices_per_node nproc_per_node"
    )
    """Devices of a node; left out: as many as that device's nodes usually have."""
    nic_gb_per_s: PositiveFloat | None = key(default=None, resume="free")
    """Network of a node to the others, GB/s in one direction, all cards together; left out: that device's usual."""
    calibration: str | None = key(default=None, resume="free")
    """A file of `dslpar plan --calibrate` or `dslpar measure`, relative to the config: what these machines reach."""


@section
class Spec:
    """Everything that a config says, defaults filled in, nothing inferred yet."""

    model: Model | OtherModel = key(resume="refused")
    """What is trained: type='GPT' and its sizes, 'Sequential' with layers_cfg, or a class by its full name."""
    parallel: Parallel = key(default_factory=Parallel)
    """How ranks are divided among data, pipeline and tensor parallelism."""
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
    """What it is trained on, by its type: text, masked text, spans, conversations, images, or a blend of them."""
    optimizer: AdamW | Adam | SGD | OtherOptimizer = key(
        default_factory=AdamW, resume="refused", deepspeed="optimizer optimizer.params", synonyms="optim"
    )
    """The optimizer by its type: dslpar's own, or one of torch's or DeepSpeed's."""
    lr_scheduler: LRScheduler | OtherLRScheduler = key(
        default_factory=LRScheduler, resume="refused", deepspeed="scheduler", synonyms="scheduler lr_decay lr_policy"
    )
    """The learning rate over the run, by its type."""
    zero: Zero = key(
        default_factory=Zero,
        resume="free",
        deepspeed="zero_optimization",
        synonyms="zero_optimization zero_optimisation",
    )
    """DeepSpeed's ZeRO: what is sharded over replicas, and (no pipeline) over ranks of a context or 2.5d's depth."""
    precision: Precision = key(
        default_factory=Precision,
        resume="reported",
        deepspeed="bf16 bfloat16 fp16 data_types",
        synonyms="fp16 bf16 bfloat16 amp dtype params_dtype mixed_precision torch_dtype",
    )
    """The type that the model computes in."""
    batch: Batch = key(default_factory=Batch)
    """Samples of a step: two of its sizes give the third."""
    train: Train = key(default_factory=Train)
    """The run: steps, seed, clipping, intervals, where it writes."""
    activation_checkpoint: ActivationCheckpoint | None = key(
        default=None,
        deepspeed="activation_checkpointing",
        synonyms="activation_checkpointing checkpoint_activations recompute_granularity recompute_activations "
        "checkpoint_num_layers gradient_checkpointing recompute_num_layers",
    )
    """Activations that are computed again in the backward; left out: none are."""
    checkpoint: Checkpoint = key(default_factory=Checkpoint)
    """What is kept of the checkpoints, and from which one a run goes on."""
    monitor: Monitor = key(
        default_factory=Monitor, synonyms="tensorboard_dir wandb_project wandb tensorboard csv_monitor"
    )
    """Where the numbers of each step go besides metrics.jsonl."""
    gradient_handler: tuple[GradientHandler, ...] = key(default=(), resume="reported")
    """Code of your own between the sum over micro-batches and clipping; a list of dicts, or one."""
    schedule: PipelineSchedule | None = key(default=None)
    """The order in which a pipeline works off its micro-batches."""
    cluster: Cluster = key(default_factory=Cluster, synonyms="hardware machine")
    """The machines that a run is meant for; nothing of a run follows from it."""
    deepspeed: Dict = key(default_factory=dict, resume="reported")
    """Keys of DeepSpeed's own that no other section has, merged last."""


OPTIMIZERS: Mapping[str, type] = {"AdamW": AdamW, "Adam": Adam, "SGD": SGD}
