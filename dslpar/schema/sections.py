"""The typed sections of a config: frozen dataclasses, one docstring a field.

A field's docstring is its help, its line in the reference, and the text that lint shows. An annotation names a *kind*
(`Count`, `Rate`, `Mode`, ...): to mypy a kind is its Python type, to `dslpar.schema.sections_reader` it is a check
with words for what is
right. `SHORTHAND` names the field that a bare scalar stands for (`pipeline=2` is `pipeline=dict(size=2)`), `ALIASES`
other names of a field. That a field is followed by its help comes from litgpt, closed sections from nanotron.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, ClassVar, TypeAlias

from dslpar.core.frozen import frozen

Count: TypeAlias = int
Layers: TypeAlias = int
Index: TypeAlias = int
Status: TypeAlias = int
Positive: TypeAlias = float
Rate: TypeAlias = float
Fraction: TypeAlias = float
Flag: TypeAlias = bool
Text: TypeAlias = str
Ids: TypeAlias = tuple[int, ...]
Counts: TypeAlias = tuple[int, ...]
Shape: TypeAlias = tuple[int, int, int]
Texts: TypeAlias = tuple[str, ...]
Betas: TypeAlias = tuple[float, float]
Order: TypeAlias = tuple[str, str, str]
Table: TypeAlias = Mapping[str, Any]
Mode: TypeAlias = str
ResidualKind: TypeAlias = str
InnerKind: TypeAlias = str
KeepKind: TypeAlias = str
ImplKind: TypeAlias = str
NormKind: TypeAlias = str
ActivationKind: TypeAlias = str
PositionsKind: TypeAlias = str
DType: TypeAlias = str
Schedule: TypeAlias = str
PipelineScheduleKind: TypeAlias = str
ResumeFrom: TypeAlias = str
ZeroStage: TypeAlias = int


@frozen
class DataParallel:
    """The axis of data-parallel replicas."""

    SHORTHAND: ClassVar[str] = "size"

    size: Count | None = None
    """Replicas; must equal world / (pipeline * tensor). Left out: that number."""


@frozen
class PipelineParallel:
    """The axis of pipeline stages, and how the transformer layers are cut over it."""

    SHORTHAND: ClassVar[str] = "size"

    size: Count
    """Stages: contiguous groups of layers, one a rank of axis "pipe"."""
    stage_ids: Ids | None = None
    """The stage of each transformer layer, from 0, never decreasing, each stage at least once."""
    counts: Counts | None = None
    """Transformer layers on each stage."""
    method: Text | None = None
    """The automatic cut: 'cost' (the default), 'uniform', 'parameters', 'libai', or 'type:REGEX'."""


@frozen
class TensorParallel:
    """The axis of tensor parallelism: its mode, and how the cuboid keeps activations."""

    SHORTHAND: ClassVar[str] = "size"
    INLINE: ClassVar[str] = "kwargs"  # ColossalAI documents kwargs=dict(depth=2)

    size: Count
    """Ranks that share each layer."""
    mode: Mode | None = None
    """'1d', '2d', '2.5d', '3d', 'sequence' or 'cuboid'; needed if size is over 1."""
    depth: Count | None = None
    """Mode 2.5d: size is depth * q * q; weights are replicated over depth."""
    shape: Shape | None = None
    """Mode cuboid: (x, y, z), the ranks that split tokens, inner features, and residual features."""
    sequence: Flag | None = None
    """Mode 1d: keep the residual stream split by sequence between layers (Megatron's sequence parallelism)."""
    impl: ImplKind | None = None
    """Mode sequence: attention by 'ring' (the default) or 'ulysses'."""
    residual: ResidualKind | None = None
    """Modes 3d and cuboid: the residual stream over y, 'replicated', 'sequence', 'hidden' or 'batch'."""
    inner: InnerKind | None = None
    """Modes 3d and cuboid: inner activations over z, 'batch' or 'heads'."""
    keep: KeepKind | None = None
    """Gathered panels that live until the backward: 'x', 'w', 'both' or 'none'."""


@frozen
class Parallel:
    """How ranks are divided among data, pipeline and tensor parallelism."""

    data: DataParallel = field(default_factory=DataParallel)
    """Data-parallel replicas; inferred from the world size."""
    pipeline: PipelineParallel | None = None
    """Pipeline stages: a number, or dict(size=, stage_ids= / counts= / method=)."""
    tensor: TensorParallel | None = None
    """Tensor parallelism: dict(size=, mode=, ...)."""
    order: Order | None = None
    """Axes from slow to fast: ('pipe', 'data', 'tensor'), or ColossalAI's ('data', 'pipe', 'tensor')."""


@frozen
class GPT:
    """A decoder-only transformer of pre-norm blocks: GPT-2's by default; by its fields Llama's."""

    INLINE: ClassVar[str] = "cfg"  # LiBai keeps a model's arguments under cfg
    ALIASES: ClassVar[Mapping[str, str]] = {
        "hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "max_seq_length": "max_seq_len",
        "layernorm_epsilon": "layernorm_eps",
        "initializer_range": "init_std",
    }

    num_layers: Layers
    """Transformer blocks."""
    hidden_size: Count
    """Features of the residual stream."""
    num_heads: Count
    """Attention heads; hidden_size must be a multiple."""
    vocab_size: Count
    """Tokens of the vocabulary, before padding."""
    max_seq_len: Count
    """The longest sequence, in tokens; learned positions have a table of so many rows."""
    num_kv_heads: Count | None = None
    """Heads of keys and values, each shared by num_heads / num_kv_heads queries' heads; left out: num_heads."""
    ffn_hidden_size: Count | None = None
    """Features of the MLP's hidden layer; left out: 4 * hidden_size."""
    dropout: Fraction = 0.0
    """Probability of dropping an activation."""
    tie_embeddings: Flag = True
    """Whether the head uses the token table's weight."""
    norm: NormKind = "layernorm"
    """'layernorm', or 'rmsnorm' (no mean, no bias)."""
    activation: ActivationKind = "gelu"
    """Of the MLP: 'gelu', or 'swiglu' (silu(gate) * up: three weights)."""
    positions: PositionsKind = "learned"
    """'learned': a table added to the tokens; 'rotary': queries and keys are rotated by their position."""
    rope_theta: Positive = 10000.0
    """Rotary positions: the longest wavelength is 2 pi times this, in tokens."""
    bias: Flag = True
    """Whether linear layers and LayerNorm have a bias."""
    layernorm_eps: Positive = 1e-5
    """Added to the variance (RMSNorm: to the mean square) before its root."""
    init_std: Positive = 0.02
    """Standard deviation of initial weights."""

    @property
    def ffn_size(self) -> int:
        """Features of the MLP's hidden layer."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_kv_heads or self.num_heads


@frozen
class OtherModel:
    """A model of other layers: a class by name, and its arguments.

    With `layers_cfg`, a list of dict(type=..., ...), its layers are known, and a pipeline can be cut before it is
    built: a class of `dslpar.ModelFromConfig`, or 'Sequential' (torch.nn's).
    """

    target: str
    """Dotted name of the class, a name registered with MODELS, or 'Sequential'."""
    args: Table = field(default_factory=dict)
    """Its keyword arguments."""

    @property
    def layers(self) -> tuple[Mapping[str, Any], ...] | None:
        """The layers of `layers_cfg`; None where there is no such list."""
        layers = self.args.get("layers_cfg")
        return tuple(layers) if isinstance(layers, (list, tuple)) else None

    @property
    def num_layers(self) -> int | None:
        """Layers that a pipeline counts: the listed ones, or as many as their layer_idx count; None: not known."""
        if self.layers is None:
            return None
        placed = [layer["layer_idx"] for layer in self.layers if layer.get("layer_idx") is not None]
        return max(0, *placed) + 1 if placed else len(self.layers)


@frozen
class TextData:
    """Byte-level text: by default the source of Python's standard library, split by file."""

    seq_len: Count | None = None
    """Tokens of a sample; left out: the model's max_seq_len."""
    files: Texts | None = None
    """Text files or folders to train on, relative to the config; left out: the standard library's source."""
    eval_fraction: Fraction = 0.05
    """Share of the files that is held out for evaluation."""


@frozen
class AdamW:
    """AdamW, torch's implementation."""

    lr: Positive = 3e-4
    """Learning rate at its peak."""
    weight_decay: Rate = 0.01
    """Decoupled decay of parameters with two or more dims."""
    betas: Betas = (0.9, 0.999)
    """Decay rates of the two moments."""
    eps: Positive = 1e-8
    """Added to the root of the second moment."""
    amsgrad: Flag = False
    """Divide by the root of the largest second moment so far."""


@frozen
class Adam(AdamW):
    """Adam with L2 regularisation in the gradient."""

    weight_decay: Rate = 0.0
    """L2 factor on parameters with two or more dims."""


@frozen
class SGD:
    """Stochastic gradient descent."""

    lr: Positive = 1e-2
    """Learning rate at its peak."""
    momentum: Fraction = 0.0
    """Share of the last step that is kept."""
    nesterov: Flag = False
    """Nesterov's momentum."""
    weight_decay: Rate = 0.0
    """L2 factor on parameters with two or more dims."""


@frozen
class OtherOptimizer:
    """An optimizer of torch's or DeepSpeed's by its name there, or a class of your own by its full name."""

    target: str
    """'RMSprop' and the like, DeepSpeed's 'FusedAdam', 'DeepSpeedCPUAdam', 'Lion', ..., or a dotted name."""
    lr: Positive = 1e-3
    """Learning rate at its peak."""
    weight_decay: Rate = 0.0
    """Decay of parameters with two or more dims, as that optimizer has it."""
    args: Table = field(default_factory=dict)
    """Its other keyword arguments, as written."""


Optimizer: TypeAlias = AdamW | SGD | OtherOptimizer


@frozen
class LRScheduler:
    """The learning rate over the run; the first warmup_steps rise as lr * (t + 1) / warmup_steps."""

    type: Schedule = "constant"
    """After the warm-up: 'constant', or down to min_lr at the last step by 'linear' or 'cosine'."""
    warmup_steps: Index = 0
    """Steps of linear warm-up."""
    min_lr: Rate = 0.0
    """The learning rate at the last step."""


@frozen
class OtherSchedule:
    """A schedule of DeepSpeed's ('WarmupDecayLR', ...) or torch's ('StepLR', ...) by its name there."""

    target: str
    """Its name."""
    args: Table = field(default_factory=dict)
    """Its keyword arguments, but for the optimizer, as written; one step of it is one optimizer step."""


@frozen
class Zero:
    """DeepSpeed's ZeRO: what is sharded over the data axis."""

    SHORTHAND: ClassVar[str] = "stage"

    stage: ZeroStage = 0
    """0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too."""
    extra: Table = field(default_factory=dict)
    """DeepSpeed's other keys of `zero_optimization`, as written."""


@frozen
class Precision:
    """The type that the model computes in; fp32 masters stay with ZeRO."""

    SHORTHAND: ClassVar[str] = "dtype"

    dtype: DType = "fp32"
    """'fp32', 'bf16' or 'fp16'."""
    extra: Table = field(default_factory=dict)
    """DeepSpeed's other keys of `bf16` or `fp16`, as written."""


@frozen
class Batch:
    """Samples a step; global_size = micro_size * accumulation * data size."""

    global_size: Count | None = None
    """Samples of one optimizer step, over all ranks."""
    micro_size: Count | None = None
    """Samples of one forward of one data rank (one tensor group), before x splits them."""
    accumulation: Count | None = None
    """Micro-batches a step; with a pipeline, the micro-batches in flight."""


@frozen
class Dist:
    """LiBai's form of `parallel`; sizes of 1 or None say nothing."""

    data_parallel_size: Count | None = None
    """Data-parallel replicas."""
    tensor_parallel_size: Count | None = None
    """Ranks that share each layer, in mode 1d."""
    pipeline_parallel_size: Count | None = None
    """Pipeline stages."""
    pipeline_num_layers: Count | None = None
    """Transformer layers; must be the model's."""
    custom_pipeline_stage_id: Ids | None = None
    """The stage of each transformer layer."""
    auto_pipeline_stage_id: Ids | None = None
    """Written by dslpar for information; recomputed on load."""
    actual_pipeline_stage_id: Ids | None = None
    """Written by dslpar for information; recomputed on load."""


@frozen
class Train:
    """The run."""

    steps: Count = 100
    """Optimizer steps."""
    seed: Index = 1234
    """Seed of weights, data order and dropout."""
    clip_grad_norm: Positive | None = None
    """Largest 2-norm of the gradient; None: no clipping."""
    log_interval: Count = 1
    """Steps between lines on the terminal."""
    eval_interval: Count | None = None
    """Steps between evaluations; with it, also before the first step and after the last. None: no evaluation."""
    eval_steps: Count = 8
    """Global batches of held-out data in one evaluation."""
    output_dir: Text | None = None
    """Where the run writes; left out: outputs/<config name>."""
    save_interval: Index | None = None
    """Steps between checkpoints, the last step always among them; left out: the last step alone; 0: never."""
    step_timeout: Positive | None = 600
    """Seconds that a step may take before the job is taken for hanging and ended, with the stacks of all ranks; the
    first step and a checkpoint six times as many. None: it may hang for ever."""
    max_skipped: Count | None = None
    """Steps in a row that may be skipped since the loss or the gradient is not finite, before the run is ended; left
    out: 3, or with fp16's dynamic loss scale, as many as that takes to fall to its least."""
    term_grace: Positive = 10
    """Seconds after SIGTERM in which the step under way is finished and a checkpoint saved; then the rank is ended."""
    requeue_status: Status = 75
    """Exit status of a run that was stopped by SIGTERM, on which a scheduler queues it again."""
    dist: Dist = field(default_factory=Dist)
    """LiBai's form of `parallel`."""


@frozen
class ActivationCheckpoint:
    """Activations that are computed again in the backward instead of being stored."""

    SHORTHAND: ClassVar[str] = "interval"

    interval: Count
    """Layers that go together: of so many in a row only the first one's input is stored; 1: of each layer."""


@frozen
class Checkpoint:
    """The checkpoints in <output_dir>/checkpoints: what is kept of them, and from which one `--resume` goes on."""

    keep: Count | None = None
    """The newest so many; left out: all."""
    resume_from: ResumeFrom = "newest"
    """'newest' (damaged: an error), 'newest_whole' (passes over damaged ones), a name ('step_000005') or a path."""


@frozen
class FileMonitor:
    """A monitor that writes files: CSV or TensorBoard."""

    SHORTHAND: ClassVar[str] = "enabled"

    enabled: Flag = True
    """Whether it writes."""
    output_path: Text | None = None
    """Folder that it writes to; left out: `csv` or `tensorboard` in output_dir."""
    job_name: Text | None = None
    """Folder of the run below it; left out: the config's name."""


@frozen
class WandbMonitor:
    """Weights & Biases."""

    SHORTHAND: ClassVar[str] = "enabled"

    enabled: Flag = True
    """Whether it writes."""
    project: Text | None = None
    """Its project; left out: the config's name."""
    group: Text | None = None
    """Its group."""
    team: Text | None = None
    """Its team (entity)."""
    offline: Flag = False
    """Write below output_dir, without a network; `wandb sync` sends it later."""


@frozen
class Monitor:
    """Where the numbers of each step go besides metrics.jsonl, through DeepSpeed's monitors."""

    csv: FileMonitor | None = None
    """One CSV file a number."""
    tensorboard: FileMonitor | None = None
    """TensorBoard event files; needs the package tensorboard."""
    wandb: WandbMonitor | None = None
    """Weights & Biases; needs the package wandb."""


@frozen
class GradientHandler:
    """What is done to gradients after they are summed over micro-batches and replicas, before norm and clipping."""

    target: str
    """A name registered with GRADIENT_HANDLER, or the dotted name of a class."""
    args: Table = field(default_factory=dict)
    """Its keyword arguments, after model and optimizer."""


@frozen
class PipelineSchedule:
    """The order in which a pipeline works off its micro-batches."""

    type: PipelineScheduleKind = "1f1b"
    """'1f1b': one forward, one backward, as DeepSpeed's pipeline has it."""
    num_microbatches: Count | None = None
    """Micro-batches a step; the same number as batch.accumulation."""
    num_chunks: Count = 1
    """Runs of layers on each stage; more than 1 would be the interleaved schedule."""


@frozen
class Spec:
    """Everything that a config says, defaults filled in, nothing inferred yet."""

    model: GPT | OtherModel
    """What is trained: type='GPT' and its sizes, 'Sequential' with layers_cfg, or a class by its full name."""
    parallel: Parallel = field(default_factory=Parallel)
    """How ranks are divided among data, pipeline and tensor parallelism."""
    data: TextData = field(default_factory=TextData)
    """What it is trained on: text, byte by byte."""
    optimizer: AdamW | SGD | OtherOptimizer = field(default_factory=AdamW)
    """The optimizer by its type: dslpar's own, or one of torch's or DeepSpeed's."""
    lr_scheduler: LRScheduler | OtherSchedule = field(default_factory=LRScheduler)
    """The learning rate over the run, by its type."""
    zero: Zero = field(default_factory=Zero)
    """DeepSpeed's ZeRO: what is sharded over the data axis."""
    precision: Precision = field(default_factory=Precision)
    """The type that the model computes in."""
    batch: Batch = field(default_factory=Batch)
    """Samples of a step: two of its sizes give the third."""
    train: Train = field(default_factory=Train)
    """The run: steps, seed, clipping, intervals, where it writes."""
    activation_checkpoint: ActivationCheckpoint | None = None
    """Activations that are computed again in the backward; left out: none are."""
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    """What is kept of the checkpoints, and from which one a run goes on."""
    monitor: Monitor = field(default_factory=Monitor)
    """Where the numbers of each step go besides metrics.jsonl."""
    gradient_handler: tuple[GradientHandler, ...] = ()
    """Code of your own between the sum over micro-batches and clipping; a list of dicts, or one."""
    schedule: PipelineSchedule | None = None
    """The order in which a pipeline works off its micro-batches."""
    deepspeed: Table = field(default_factory=dict)
    """Keys of DeepSpeed's own that no other section has, merged last."""


MODELS: Mapping[str, type] = {"GPT": GPT}
DATASETS: Mapping[str, type] = {"text": TextData}
OPTIMIZERS: Mapping[str, type] = {"AdamW": AdamW, "Adam": Adam, "SGD": SGD}
SCHEDULES = ("constant", "linear", "cosine")
MODES = ("1d", "2d", "2.5d", "3d", "sequence", "cuboid")
METHODS = ("cost", "uniform", "parameters", "libai")
PIPELINE_SCHEDULES = ("1f1b",)
OTHER_PIPELINE_SCHEDULES: Mapping[str, str] = {
    "gpipe": "it holds the activations of all micro-batches, for the same bubble as '1f1b'",
    "interleaved": "the interleaved schedule is not part of this version of dslpar",
    "zero-bubble": "zero-bubble schedules are not part of this version of dslpar",
}
"""Schedules that dslpar does not run, and why."""
