"""Names of ColossalAI that are not here, each with what to write instead.

    >>> explain("nn.Matmul_AB_2D")
    'colossalai.nn.Matmul_AB_2D is not in dslpar.compat: write dslpar.layers.Linear, cut alike in every mode'

A module of `dslpar.compat.colossalai` takes `__getattr__ = names_of(__name__)`, which raises ImportError with this
text. As in scikit-learn, it is no AttributeError: Python replaces the text of that one in `from module import name`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from dslpar.core.suggest import did_you_mean

PACKAGE = "dslpar.compat.colossalai"
_LAYERS = "dslpar.layers has tensor-parallel layers for every mode; layers/README.md lists them by ColossalAI's names"
_PRODUCT = "write dslpar.layers.Linear, cut alike in every mode"
_COLLECTIVE = (
    "write dslpar.layers.to_residual, from_residual, to_inner or from_inner; or torch.distributed with gpc.get_group"
)
_COLO_TENSOR = (
    "write parallel = dict(tensor=dict(size=N, mode='1d')) in the config, and layers of colossalai.nn; a transformers "
    "class needs no change, as the config's model = dict(type='transformers.GPT2LMHeadModel', ...)"
)
_SEARCH = "`dslpar plan CONFIG` searches layouts; write the one that it finds into the config"
_LATER = "it belongs to ColossalAI's later interface: write a config, and dslpar.initialize (docs/porting.md)"
_MOE = (
    "write dslpar.layers.Mixture, or a transformers mixture, as the model; its balance loss is part of the model's loss"
)
_CHUNKS = "leave it out: DeepSpeed's ZeRO 3 decides how tensors are sharded and moved"

MISSING = (
    (
        "Matmul_AB_2D Matmul_ABT_2D Matmul_ATB_2D Matmul_AB_2p5D Matmul_ABT_2p5D Matmul_ATB_2p5D",
        _PRODUCT,
    ),
    (
        "Matmul_AB_3D Matmul_ABT_3D Matmul_ATB_3D linear_3d classifier_2d classifier_2p5d classifier_3d",
        _PRODUCT,
    ),
    (
        "parallel_1d parallel_2d parallel_2p5d parallel_3d vanilla wrapper",
        _LAYERS,
    ),
    (
        "add_bias_2d add_bias_2p5d Add_Bias_2p5D layernorm_2d layernorm_2p5d layernorm_3d",
        _LAYERS,
    ),
    (
        "split_batch_2d split_batch_2p5d split_batch_3d reduce_by_batch_2d reduce_by_batch_2p5d reduce_by_batch_3d",
        _COLLECTIVE,
    ),
    (
        "split_tensor_2p5d split_tensor_3d all_gather_tensor_2d all_gather_tensor_2p5d all_gather_tensor_3d",
        _COLLECTIVE,
    ),
    (
        "reduce_scatter_tensor_2d reduce_scatter_tensor_2p5d reduce_scatter_tensor_3d reduce_tensor_2p5d",
        _COLLECTIVE,
    ),
    (
        "gather_forward_split_backward split_forward_gather_backward reduce_input reduce_grad",
        _COLLECTIVE,
    ),
    (
        "communication",
        _COLLECTIVE,
    ),
    (
        "VocabParallelEmbedding1D VocabParallelEmbedding2D VocabParallelEmbedding2p5D VocabParallelEmbedding3D",
        "write colossalai.nn.Embedding, whose rows are always split",
    ),
    (
        "VocabParallelClassifier1D VocabParallelClassifier2D VocabParallelClassifier2p5D VocabParallelClassifier3D",
        "write dslpar.layers.Head with dslpar.layers.cross_entropy",
    ),
    (
        "VocabParallelCrossEntropyLoss1D VocabParallelCrossEntropyLoss2D VocabParallelCrossEntropyLoss2p5D "
        "VocabParallelCrossEntropyLoss3D",
        "write dslpar.layers.cross_entropy, on logits as dslpar.layers.Head stores them",
    ),
    (
        "TransformerSelfAttentionRing RingQK RingAV parallel_sequence",
        "write dslpar.layers.Attention; parallel.tensor = dict(size=N, mode='sequence') splits sequences around a ring",
    ),
    (
        "WrappedDropout WrappedDropPath DropPath",
        "write colossalai.nn.Dropout, or torch.nn's modules on whole activations",
    ),
    (
        "CheckpointModule checkpoint",
        "write activation_checkpoint = dict(interval=1) in the config",
    ),
    (
        "MOE_CONTEXT MoeLoss MoeModule MoeLayer Experts Top1Router Top2Router build_ffn_experts "
        "MoeCrossEntropyLoss FFNExperts TPExperts UniformNoiseGenerator NormalNoiseGenerator",
        _MOE,
    ),
    (
        "ColoTensor ColoParameter ShardSpec ReplicaSpec ComputeSpec ComputePattern TensorSpec ParallelAction "
        "DistSpecManager distspec ColoTensorSpec DistSpec init_colo_module _ops",
        _COLO_TENSOR,
    ),
    (
        "ColoDDP",
        "leave it out: colossalai.initialize averages gradients over replicas",
    ),
    (
        "auto_parallel fx device",
        _SEARCH,
    ),
    (
        "booster Booster cluster DistCoordinator lazy LazyInitContext shardformer interface inference autochunk cli",
        _LATER,
    ),
    (
        "kernel",
        "write torch.nn's modules: DeepSpeed and torch choose kernels",
    ),
    (
        "legacy",
        "leave `legacy` out: colossalai.legacy.core is dslpar.compat.colossalai.core",
    ),
    (
        "StatefulTensorMgr StatefulTensor BaseOpHook ophooks memory_tracer search_chunk_configuration",
        _CHUNKS,
    ),
    (
        "FusedLAMB",
        "write colossalai.nn.optimizer.Lamb",
    ),
    (
        "NVMeOptimizer",
        "write zero = dict(offload_optimizer=dict(device='nvme', nvme_path='...')) in the config",
    ),
    (
        "ShardedModel",
        "write ShardedModelV2",
    ),
    (
        "CommunicationProfiler PcieProfiler MemProfiler ProfilerContext profiler",
        "write train = dict(profile=...), or torch.profiler",
    ),
    (
        "rpc PipelineEngineBase FillDrainPipelineEngine OneFOneBPipelineEngine ChimeraPipelineEngine PipelineModel",
        "write parallel = dict(pipeline=N) in the config, PipelinableContext and engine.execute_schedule",
    ),
    (
        "HOOKS DATASETS OPTIMIZERS LOSSES LR_SCHEDULERS OPHOOKS DATA_SAMPLERS TOPOLOGIES",
        "write the class itself; dslpar.MODELS, LAYERS and GRADIENT_HANDLER register names",
    ),
    (
        "clip_grad_norm_fp32 count_zeros_fp32 copy_tensor_parallel_attributes param_is_not_tensor_parallel_duplicate",
        "write clip_grad_norm in the config; engine.grad_norm has the norm of the last step",
    ),
    (
        "convert_to_apex_amp convert_to_naive_amp convert_to_torch_amp convert_to_amp",
        "write fp16 = dict(mode=AMP_TYPE.NAIVE) in the config",
    ),
    (
        "convert_to_zero_v2",
        "write zero = dict(model_config=..., optimizer_config=...) in the config",
    ),
    (
        "TensorDetector MemTracerOpHook",
        "`dslpar show CONFIG` forecasts memory; the log has that of the first step",
    ),
    (
        "testing",
        "it belongs to ColossalAI's own tests: write pytest's parametrize",
    ),
    (
        "ProcessGroupInitializer Initializer_Data ParallelContext",
        "colossalai.launch makes all groups: gpc.get_group(ParallelMode.DATA)",
    ),
)
"""(Names of ColossalAI's classes, functions and modules; what to write)."""
_INSTEAD = {name: instead for names, instead in MISSING for name in names.split()}

ALIASES = {
    "colossalai.amp": "amp.amp_type",
    "colossalai.builder": "builder.builder builder.pipeline",
    "colossalai.context": "context.parallel_mode context.config",
    "colossalai.engine": "engine.schedule engine.gradient_accumulation engine.gradient_handler",
    "colossalai.gemini": "gemini.chunk gemini.gemini_mgr",
    "colossalai.logging": "logging.logger",
    "colossalai.nn": "nn.metric nn.loss nn.optimizer nn.layer nn.layer.colossalai_layer",
    "colossalai.pipeline": "pipeline.pipelinable utils.model.pipelinable",
    "colossalai.tensor": "tensor.process_group",
    "colossalai.utils": "utils.timer utils.cuda utils.common utils.checkpointing utils.checkpoint utils.data_sampler "
    "utils.memory utils.memory_utils utils.memory_utils.utils utils.model",
    "colossalai.zero": "zero.init_ctx zero.shard_utils zero.sharded_model zero.sharded_optim zero.zero_optimizer "
    "nn.parallel nn.parallel.data_parallel utils.model.colo_init_context",
    "hooks": "trainer.hooks",
    "lr_schedulers": "nn.lr_scheduler",
}
"""Module of dslpar.compat -> ColossalAI's modules whose names it has."""
_MODULE_OF = {path: module for module, paths in ALIASES.items() for path in paths.split()}


def explain(path: str) -> str:
    """Return what is missing and what to write, for a dotted path below `colossalai`."""
    parts = path.split(".")
    ends = range(len(parts), 0, -1)
    named = (parts[end - 1] for end in ends if ".".join(parts[:end]) not in _MODULE_OF)
    instead = next((_INSTEAD[part] for part in named if part in _INSTEAD), None)
    if instead is None:
        return (
            f"colossalai.{path} is not in dslpar.compat; docs/porting.md lists what is, and what to write for the rest"
        )
    return f"colossalai.{path} is not in dslpar.compat: {instead}"


def names_of(module: str) -> Callable[[str], Any]:
    """Return a module's `__getattr__`, which imports ColossalAI's submodules and explains names that are not here.

    Raises:
        ImportError: ColossalAI has the name, and dslpar something else.
        AttributeError: the name is unknown.
    """
    below = module.removeprefix(PACKAGE).lstrip(".")

    def find(name: str) -> Any:
        path = f"{below}.{name}" if below else name
        if path in _MODULE_OF:
            return importlib.import_module(f"{PACKAGE}.{path}")
        if name in _INSTEAD:
            raise ImportError(explain(path), name=module)
        own = [each for each in vars(sys.modules[module]) if not each.startswith("_")]
        raise AttributeError(
            f"module {module!r} has no attribute {name!r}; {did_you_mean(name, own) or 'see docs/porting.md'}"
        )

    return find


class _Submodules(MetaPathFinder):
    """Finds ColossalAI's submodules in the module here that has their names, and explains those that are missing."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of an alias; None for modules of other packages.

        Raises:
            ModuleNotFoundError: ColossalAI may have the module, and dslpar something else.
        """
        if not fullname.startswith(f"{PACKAGE}."):
            return None
        below = fullname.removeprefix(f"{PACKAGE}.")
        if below not in _MODULE_OF:
            raise ModuleNotFoundError(explain(below), name=fullname)
        return ModuleSpec(fullname, _Alias(below), is_package=True)


class _Alias(Loader):
    """Loader of a module whose names are those of another one."""

    def __init__(self, path: str) -> None:
        self.path = path

    def exec_module(self, module: ModuleType) -> None:
        """Look names up in the other module, then in the table of missing names."""
        other = importlib.import_module(f"dslpar.compat.{_MODULE_OF[self.path]}")
        explained = names_of(module.__name__)
        module.__dict__["__getattr__"] = lambda name: getattr(other, name) if hasattr(other, name) else explained(name)


def install() -> None:
    """Find ColossalAI's submodules after Python's own finders."""
    if not any(isinstance(finder, _Submodules) for finder in sys.meta_path):
        sys.meta_path.append(_Submodules())
