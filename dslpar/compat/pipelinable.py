"""ColossalAI's PipelinableContext: cut a model into stages by the names of its modules.

    pipelinable = PipelinableContext()
    with pipelinable:
        model = resnet50()
    pipelinable.to_layer_list(["conv1", "bn1", "relu", "layer1", (lambda x: torch.flatten(x, 1), "behind"), "fc"])
    model = pipelinable.partition(1, gpc.pipeline_parallel_size, gpc.get_local_rank(ParallelMode.PIPELINE))

Every rank builds the whole model once, and keeps its stage. Modules pass on one tensor, or a tuple of tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from dslpar.compat.context import global_context
from dslpar.compat.pipeline_part import PipelinePart
from dslpar.engine import model as build

Element = str | Callable[..., Any] | tuple[Callable[..., Any], str]
"""Name of a module, or a function; "front" or "behind" beside a function has no effect, since the order decides."""
_METHODS = {"uniform": "uniform", "balanced": "parameter"}
"""Policy -> partition_method."""


class PipelinableContext:
    """Context in which a model is built that a pipeline cuts. `policy` is 'balanced', by parameters, or 'uniform'."""

    def __init__(self, policy: str = "balanced") -> None:
        self.policy: str | Mapping[int, Any] = policy
        self._parents: dict[int, nn.Module] = {}
        self._children: dict[int, nn.Module] = {}
        self._layers: list[tuple[str, nn.Module]] = []

    def __enter__(self) -> PipelinableContext:
        self._hook = register_module_module_registration_hook(self._register)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._hook.remove()

    def _register(self, parent: nn.Module, name: str, child: nn.Module) -> None:
        self._parents[id(parent)] = parent
        if child is not None:
            self._children[id(child)] = child

    @property
    def model(self) -> nn.Module:
        """The model that was built in the context: the last module that is part of no other."""
        roots = [parent for key, parent in self._parents.items() if key not in self._children]
        if not roots:
            raise ValueError("no model was built in the context: build it within `with pipelinable:`")
        return roots[-1]

    @property
    def layers_count(self) -> int:
        """Number of layers in the list."""
        return len(self._layers)

    def to_layer_list(self, exec_seq: Sequence[Element] | None = None) -> None:
        """Make the list of layers from names of modules and functions, in the order in which they run.

        Default: the model's children, and those of its lists, in the order in which the model has them.

        Raises:
            ValueError: there is no such module, or a function takes more than the output of the module before it.
        """
        model = self.model
        if exec_seq is None:
            self._layers = list(_children(model))
            return
        modules = dict(model.named_modules())
        self._layers = []
        for number, element in enumerate(exec_seq):
            if isinstance(element, str):
                if element == "SPLIT_NODE":
                    raise ValueError(
                        "leave SPLIT_NODE out, and write parallel = dict(pipeline=dict(counts=[...])), layers by stage"
                    )
                if element not in modules:
                    raise ValueError(f"the model has no module {element!r}")
                self._layers.append((element.replace(".", "_"), modules[element]))
            else:
                function = element[0] if isinstance(element, tuple) else element
                self._layers.append((f"function_{number}", Function(function)))

    def partition(self, num_chunks: int, pipeline_size: int, rank: int) -> PipelinePart | nn.Sequential:
        """Return this rank's stage; without a pipeline, all layers as one nn.Sequential.

        Raises:
            ValueError: an unknown policy, or another place than this rank's.
        """
        context = global_context
        if (pipeline_size, rank) != (context.pipeline_parallel_size, context.run.stage):
            raise ValueError("pass gpc.pipeline_parallel_size and gpc.get_local_rank(ParallelMode.PIPELINE)")
        if self.policy not in _METHODS:
            raise ValueError(
                f"policy {self.policy!r}: write 'balanced', 'uniform', or parallel = dict(pipeline=dict(counts=[...]))"
            )
        layers = nn.Sequential()
        for name, module in self._layers:
            layers.add_module(name, module)
        if pipeline_size == 1:
            return layers
        method = None if context.run.job.stages.counts else _METHODS[str(self.policy)]
        return PipelinePart(build.build_pipeline_model(layers, num_chunks, method), context.run)


class Function(nn.Module):
    """A function as a layer, which takes the output of the layer before it.

    Raises:
        ValueError: the function takes something else by name, such as an attention mask.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        required = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
        if not required:
            name = getattr(function, "__name__", str(function))
            raise ValueError(
                f"{name}{inspect.signature(function)} takes an input of the model by its name, which a stage does not "
                "have: pass it on with the activations, as a tuple, from the first layer; or leave the mask out"
            )
        self.function = function

    def forward(self, *x: Any) -> Any:
        """Call the function."""
        return self.function(*x)


def _children(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the children of a model; those of an nn.ModuleList or nn.Sequential in its place."""
    found = []
    for name, child in model.named_children():
        if isinstance(child, (nn.ModuleList, nn.Sequential)):
            found += [(f"{name}_{inner}", layer) for inner, layer in child.named_children()]
        else:
            found.append((name, child))
    return found
