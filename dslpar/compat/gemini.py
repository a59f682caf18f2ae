"""ColossalAI's ZeRO as wrappers of model and optimizer: ZeroDDP and ShardedModelV2, on DeepSpeed's ZeRO 3.

    with ColoInitContext(device=get_current_device()):
        model = gpt2_medium()
    model = ZeroDDP(model, GeminiManager("auto", ChunkManager(chunk_size)))
    optimizer = ZeroOptimizer(HybridAdam(model.parameters(), lr=1e-3), model, initial_scale=2**5)
    logits = model(input_ids, attention_mask)
    optimizer.backward(criterion(logits, labels)); optimizer.step()

The engine is built when the optimizer is wrapped. Chunks, placement "auto" and margins have no effect: DeepSpeed
decides how a tensor is sharded. A placement "cpu" offloads parameters and optimizer. On a device that computes in fp16,
the model does, as in ColossalAI; elsewhere in fp32.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import nn
from torch.optim import Optimizer

from dslpar.compat.context import global_context
from dslpar.compat.engine import ColossalaiEngine, current_device
from dslpar.compat.initialize import build_engine


class TensorShardStrategy:
    """Name of a way to shard a tensor; DeepSpeed has its own."""


class BucketTensorShardStrategy(TensorShardStrategy):
    """TensorShardStrategy under another name."""


class _InitContext:
    """Context in which a model is built as usual; it counts the elements of the model's parameters."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.model_numel_tensor = torch.zeros(1, dtype=torch.int64)

    def __enter__(self) -> _InitContext:
        hook = torch.nn.modules.module.register_module_parameter_registration_hook
        self._hook = hook(self._count)
        return self

    def _count(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            self.model_numel_tensor += parameter.numel()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._hook.remove()


class ZeroInitContext(_InitContext):
    """Context of ShardedModelV2. DeepSpeed shards the model when the engine is built."""


class ColoInitContext(_InitContext):
    """Context of ZeroDDP.

    Raises:
        ValueError: `default_pg` or `default_dist_spec` asks for tensor parallelism.
    """

    def __init__(
        self, device: Any = None, dtype: Any = None, default_pg: Any = None, default_dist_spec: Any = None, **_: Any
    ) -> None:
        if default_dist_spec is not None:
            raise ValueError(
                "ColoTensor's tensor parallelism is not here: write parallel = dict(tensor=dict(size=N, mode='1d')), "
                "and layers of colossalai.nn, or a transformers class as the config's model"
            )
        super().__init__()


class ProcessGroup:
    """The ranks of the run, by ColossalAI's later name.

    Raises:
        ValueError: `tp_degree` is not the size of the run's tensor groups.
    """

    def __init__(
        self, rank: int | None = None, ranks: Any = None, tp_degree: int | None = None, dp_degree: int | None = None
    ) -> None:
        context = global_context
        if tp_degree not in (None, context.tensor_parallel_size):
            raise ValueError(
                f"tp_degree is {tp_degree}, but the run has tensor groups of {context.tensor_parallel_size}: write "
                f"parallel = dict(tensor=dict(size={tp_degree}, mode='1d')) in the config, and layers of colossalai.nn"
            )
        self.run = context.run

    def rank(self) -> int:
        """Return this rank's global rank."""
        return self.run.groups.rank

    def dp_world_size(self) -> int:
        """Return the number of replicas."""
        return self.run.groups.axis("data").size

    def tp_world_size(self) -> int:
        """Return the size of a tensor group."""
        return self.run.groups.axis("tensor").size

    def dp_process_group(self) -> Any:
        """Return the process group of the replicas."""
        return self.run.groups.axis("data").group

    def tp_process_group(self) -> Any:
        """Return the tensor group."""
        return self.run.groups.axis("tensor").group


class ChunkManager:
    """Settings of chunks, which have no effect."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    @staticmethod
    def search_chunk_size(model: nn.Module, *_: Any, **__: Any) -> int:
        """Return a size of chunks, which has no effect."""
        return 0

    def __repr__(self) -> str:
        return "ChunkManager: DeepSpeed's ZeRO 3 has no chunks"


def init_chunk_manager(*args: Any, **kwargs: Any) -> ChunkManager:
    """Return settings of chunks, which have no effect."""
    return ChunkManager()


class GeminiManager:
    """Placement of a model's tensors: 'cuda', 'cpu' or 'auto'. 'auto' is 'cuda' here: no tensor moves by itself."""

    def __init__(self, placement_policy: str, chunk_manager: ChunkManager | None = None) -> None:
        self.placement_policy = placement_policy

    @staticmethod
    def get_default_device(placement_policy: str) -> torch.device:
        """Return the device of a placement."""
        return torch.device("cpu") if placement_policy == "cpu" else current_device()


class ZeroDDP(nn.Module):
    """A model under ZeRO 3. It is called once its optimizer is wrapped by ZeroOptimizer."""

    engine: ColossalaiEngine | None = None

    def __init__(self, module: nn.Module, gemini_manager: GeminiManager | None = None, *_: Any, **__: Any) -> None:
        super().__init__()
        self.module = module
        self.placement = "cuda" if gemini_manager is None else gemini_manager.placement_policy

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output."""
        if self.engine is None:
            raise RuntimeError("wrap the model's optimizer before the first forward: ZeroOptimizer(optimizer, model)")
        output = self.engine(*args, **kwargs)
        return output.float() if isinstance(output, torch.Tensor) and output.is_floating_point() else output

    def train(self, mode: bool = True) -> ZeroDDP:
        """Set training or evaluation mode."""
        super().train(mode)
        if self.engine is not None:
            self.engine.train(mode)
        return self

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward."""
        assert self.engine is not None
        self.engine.backward(loss)


class ShardedModelV2(ZeroDDP):
    """ZeroDDP under its earlier name."""

    def __init__(
        self, module: nn.Module, shard_strategy: Any = None, tensor_placement_policy: str = "cuda", **_: Any
    ) -> None:
        super().__init__(module, GeminiManager(tensor_placement_policy))


class ZeroOptimizer(Optimizer):
    """The optimizer of a ZeroDDP. It shares its parameter groups with the wrapped one, for LR schedulers."""

    def __init__(self, optim: Optimizer, module: ZeroDDP, initial_scale: float | None = None, **_: Any) -> None:
        run = global_context.with_overrides(_zero3(module.placement, initial_scale))
        module.engine = build_engine(run, module.module, optim, None, None, None, None).engine
        module.engine.train(module.training)
        self.engine = module.engine
        super().__init__(optim.param_groups, optim.defaults)
        self.param_groups = optim.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: a step clears the gradients."""
        self.engine.zero_grad()

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward, with the loss scale of fp16."""
        self.engine.backward(loss)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step."""
        self.engine.step()


class ShardedOptimizerV2(ZeroOptimizer):
    """ZeroOptimizer under its earlier name, with the model first."""

    def __init__(self, sharded_model: ZeroDDP, optimizer: Optimizer, **kwargs: Any) -> None:
        super().__init__(optimizer, sharded_model, kwargs.pop("initial_scale", None))


def _zero3(placement: str, initial_scale: float | None) -> list[str]:
    half = get_accelerator().is_fp16_supported()
    sections = ["zero.stage=3", f"precision.dtype={'fp16' if half else 'fp32'}"]
    if half and initial_scale is not None:
        sections.append(f"precision.initial_scale_power={round(initial_scale).bit_length() - 1}")
    if placement == "cpu":
        sections += ["zero.offload_param.device=cpu", "zero.offload_optimizer.device=cpu"]
    return sections
