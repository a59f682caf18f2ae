"""Trace a model's costs on a rank: run its layers once on the meta device. For models whose costs have no closed form.

    tracer = Tracer(job)
    tracer.job                          # the job with its stages, which are unknown before the layers are built
    workload_of(tracer.job, tracer.costs_of)

Each layer is built on the meta device as a rank of the tensor group builds it, and runs forward and backward. Three
counts become its costs (`dslpar.costs.model_costs.Costs`): tensor operations become work, collectives become traffic,
and tensors that autograd saves become memory. Layers with equal modules and equal input forms (dtypes and shapes) run
once. Two layers that are built alike but behave differently because of their number would therefore get equal costs.
Costs are affine in the samples of a micro-batch, so two sizes determine all others.

The forms of a model's inputs come from its data, unless the model defines them. LLMem and torch (MemTracker,
FakeTensorMode) also find a model's memory by running it on tensors without memory, and torch's FlopCounterMode counts
operations in this way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dslpar.core.errors import DslparError
from dslpar.core.mesh import Mesh
from dslpar.core.mesh import TensorMesh as Cuboid
from dslpar.costs.collective_traffic import LayerTraffic, Traffic
from dslpar.costs.flops import Flops, per_token
from dslpar.costs.memory import LayerMemory, Saved
from dslpar.costs.model_costs import Costs, ModelCosts
from dslpar.costs.work import Work
from dslpar.data.source import find_source, make_samples
from dslpar.distributed.groups import Groups
from dslpar.distributed.point_to_point import Forms, forms_of
from dslpar.dry_run.cost_interpolation import interpolate
from dslpar.dry_run.even_routing import even_routing
from dslpar.dry_run.fake_rank import fake_rank
from dslpar.dry_run.fused_kernels import fused_kernels
from dslpar.dry_run.op_counter import OpCounter
from dslpar.dry_run.recorder import Call, recording
from dslpar.dry_run.stage import DTYPES, META, REFUSALS, empty, input_form, message_of, tensors_of
from dslpar.engine.model import model_from_job
from dslpar.engine.partition import partition_layers
from dslpar.layers.parameter import mark_owners, placement_of
from dslpar.layout.divisors import least_micro_size
from dslpar.layout.resolve import Job, Stages
from dslpar.layout.stages import group_layers
from dslpar.layout.transformers_data_types import inputs_of
from dslpar.models.layered import LayeredModel, LayerSpec, Loss
from dslpar.schema.sections import ImageModel, TokenModel

_RAISED = (*REFUSALS, ArithmeticError, AttributeError, LookupError)
"""Exceptions of layers that read values of meta tensors, or compute with the zeros that `OpCounter` returns for them.
"""
_WIDE = 4
"""Bytes per element of `Saved.wide`."""


class TraceError(ValueError):
    """The model cannot be run on the meta device."""


class Taken(NamedTuple):
    """Forms (dtype, shape) of a micro-batch's inputs and labels."""

    inputs: Forms
    labels: Any
    """A form, or a tuple of forms."""


class Tracer:
    """Traces the layers of a job's model, for any cuboid (tensor group) and any micro-batch size.

    Raises:
        DslparError: the model cannot be built, or cannot be partitioned into the job's stages.
    """

    def __init__(self, job: Job) -> None:
        self._models = {job.mesh.tensor.size > 1: model_from_job(job)}
        (model,) = self._models.values()
        self.job, specs = partition_layers(job, model, Groups.without_processes(job.mesh))
        if self.job.stages.counts is None:
            count = len(group_layers([spec.layer_idx for spec in specs]))
            self.job = replace(self.job, stages=Stages(None, None, (count,)))
        self._traced: dict[Cuboid, tuple[ModelCosts, ModelCosts] | None] = {}
        self._samples: dict[int, Taken] = {}

    def costs_of(self, cuboid: Cuboid, micro_size: int) -> ModelCosts | None:
        """Return the model's costs on a rank of a cuboid; None if its layers cannot be sharded on this cuboid.

        Raises:
            TraceError, DslparError: the job's own cuboid cannot be traced.
        """
        if cuboid not in self._traced:
            self._traced[cuboid] = self._trace(cuboid)
        found = self._traced[cuboid]
        return None if found is None else interpolate(*found, micro_size / least_micro_size(cuboid) - 1)

    def _own(self, cuboid: Cuboid) -> bool:
        """Return whether a cuboid is the job's own. Its errors are raised, because there is no forecast without it."""
        return cuboid == self.job.mesh.tensor

    def _trace(self, cuboid: Cuboid) -> tuple[ModelCosts, ModelCosts] | None:
        """Return the costs for the smallest micro-batch and for one twice as large; None as in `costs_of`."""
        mesh, least = Mesh(pipe=1, data=cuboid.e, tensor=cuboid), least_micro_size(cuboid)
        routing = even_routing() if cuboid.exchanges_tokens else nullcontext()
        job = replace(self.job, mesh=mesh)
        try:
            if (cuboid.size > 1) not in self._models:
                self._models[cuboid.size > 1] = model_from_job(job)
            with fake_rank(mesh, 0) as groups, torch.random.fork_rng(devices=()), _one_thread(), routing:
                trace = _Trace(job, self._models[cuboid.size > 1], groups)
                one, two = (trace.run(self._taken(size), size) for size in (least, 2 * least))
            interpolate(one, two, 0.5)  # raises if the two sizes have different operations
        except (TraceError, DslparError):
            if self._own(cuboid):
                raise
            return None
        except _RAISED as error:
            if self._own(cuboid):
                raise TraceError(f"the model cannot be traced: {message_of(error)}") from error
            return None
        return one, two

    def _taken(self, micro_size: int) -> Taken:
        """Return the forms of a micro-batch: defined by the model, or else read from its data."""
        model, job = self.job.spec.model, self.job
        if isinstance(model, TokenModel) or (isinstance(model, ImageModel) and not model.TOKENS_BESIDE_PATCHES):
            sized = replace(job, batch=job.batch._replace(micro_size=micro_size))
            shape = (micro_size, job.seq_len) if isinstance(model, TokenModel) else (micro_size,)
            return Taken([input_form(sized)], (torch.int64, shape))
        if micro_size not in self._samples:
            self._samples[micro_size] = self._read(micro_size)
        return self._samples[micro_size]

    def _read(self, micro_size: int) -> Taken:
        data = self._data
        first = [number % data.num_samples for number in range(micro_size)]
        inputs, labels = data.batch(first, range(micro_size))
        dtype = DTYPES[self.job.spec.precision.dtype]
        forms = [(dtype if kind.is_floating_point else kind, shape) for kind, shape in forms_of(tensors_of(inputs))]
        return Taken(forms, tuple(forms_of(labels)) if isinstance(labels, tuple) else forms_of([labels])[0])

    @cached_property
    def _data(self) -> Any:
        return make_samples(self.job, find_source(self.job).train, inputs_of(self.job))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run the body in one thread. transformers policies compute many small products, for which threads cost more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Layer(NamedTuple):
    """Traced behaviour of one layer."""

    costs: Costs
    outputs: Forms
    saved: frozenset[int]
    """Indices of outputs that the layer has saved itself. If the next layer saves them too, they are not counted again.
    """
    tied: float
    """Elements of the layer's weights if they are tied, else 0."""
    recomputable: bool
    """True if activation checkpointing may recompute the layer."""


class _Trace:
    """Runs the layers of a model one after the other, as one rank."""

    def __init__(self, job: Job, model: LayeredModel, groups: Groups) -> None:
        self.job, self.model, self.groups = job, model, groups
        self.dtype = DTYPES[job.spec.precision.dtype]
        self.specs: Sequence[LayerSpec] = model.layers(groups)
        self._modules: dict[str, tuple[nn.Module, object]] = {}
        self._known: dict[object, _Layer] = {}

    def run(self, taken: Taken, micro_size: int) -> ModelCosts:
        """Run all layers and the loss on a micro-batch of `micro_size` samples."""
        forms, is_saved = taken.inputs, frozenset[int]()
        layers: list[_Layer] = []
        boundary = 0.0
        for spec in self.specs:
            layer = self._layer(spec, forms, is_saved)
            layers.append(layer)
            forms, is_saved = layer.outputs, layer.saved
            if len(layers) < len(self.specs):
                boundary = max(boundary, self._elements(forms))
        last = self._loss(forms, taken.labels)
        groups = group_layers([spec.layer_idx for spec in self.specs])
        units = [sum((layers[position].costs for position in group), Costs()) for group in groups]
        logits = last.work.losses
        return ModelCosts(
            first=Costs(),
            layer=sum(units, Costs()),
            last=last,
            boundary=boundary,
            tied=sum(layer.tied for layer in layers),
            tied_frozen=sum(float(layer.costs.memory.frozen) for layer in layers if layer.tied),
            logits=logits,
            units=tuple(units),
            recomputable=tuple(any(layers[position].recomputable for position in group) for group in groups),
            flops=self._flops(units, micro_size * (self.job.seq_len or 1)),
        )

    def _elements(self, forms: Forms) -> float:
        return sum(empty(form).numel() * form[0].itemsize / self.dtype.itemsize for form in forms)

    def _flops(self, units: Sequence[Costs], tokens: int) -> Flops:
        """Return the FLOPs per token, or per sample if samples are not sequences."""
        ranks = self.groups.mesh.tensor.size
        # A frozen weight has no gradient, which saves a third of its operations.
        trained, frozen = (
            sum(rows * depth * columns for each in units for rows, depth, columns in getattr(each.work, kind))
            for kind in ("products", "frozen")
        )
        scores = [each for unit in units for each in unit.work.scores]
        causal = sum(2 * each.queries * each.keys for each in scores if each.causal)
        others = sum(2 * each.queries * each.keys for each in scores if not each.causal)
        # `per_token` counts half of the scores, which a causal mask leaves.
        trained += sum(rows * depth * columns for each in units for rows, depth, columns in each.work.kernels)
        products, scores_of_rank = trained + frozen, causal + 2 * others
        return per_token(*(round(ranks * each / tokens) for each in (products, scores_of_rank, frozen)))

    # ---- a layer ----

    def _layer(self, spec: LayerSpec, forms: Forms, is_saved: frozenset[int]) -> _Layer:
        shown = tuple((dtype, tuple(shape)) for dtype, shape in forms)
        try:
            module, likeness = self._built(spec)
            key = (
                likeness,
                _function(spec.forward),
                spec.tied,
                spec.recomputable,
                shown,
                is_saved,
                spec is self.specs[0],
            )
            if key not in self._known:
                with recording(self.groups) as calls:
                    self._known[key] = self._run(spec, module, forms, is_saved, calls)
        except _RAISED as error:
            raise TraceError(f"{spec.name!r} cannot be traced: {message_of(error)}") from error
        return self._known[key]

    def _built(self, spec: LayerSpec) -> tuple[nn.Module, object]:
        """Return a layer's module, and a key that is equal for layers that are built alike."""
        if spec.owner not in self._modules:
            with META:
                module = spec.build()
            module.to(META, self.dtype)  # also moves buffers that it computes
            mark_owners(module, self.groups)
            self._modules[spec.owner] = module.train(), _likeness(module)
        return self._modules[spec.owner]

    def _run(
        self, spec: LayerSpec, module: nn.Module, forms: Forms, is_saved: frozenset[int], calls: list[Call]
    ) -> _Layer:
        with torch.no_grad(), OpCounter(self.dtype), fused_kernels():
            # A run that is not counted: in their first forward, transformers policies replace forwards of modules.
            spec.apply(module, _entering([empty(form) for form in forms]))
        calls.clear()
        # Data needs no gradient, so the first layer computes none for its input.
        needs_gradient = spec is not self.specs[0]
        leaves = [empty(form).requires_grad_(needs_gradient and form[0].is_floating_point) for form in forms]
        x = [each.clone() for each in leaves]  # a layer may work in place, which autograd forbids for leaves
        before = {_storage(x[position]) for position in is_saved}
        own = {_storage(p) for p in module.parameters()} | before
        saved: dict[int, Tensor] = {}

        def pack(each: Tensor) -> Tensor:
            if _storage(each) not in own:
                saved.setdefault(_storage(each), each)
            return each

        with (
            OpCounter(self.dtype, self._is_frozen(module)) as counted,
            fused_kernels(),
            torch.autograd.graph.saved_tensors_hooks(pack, _same),
        ):
            output = spec.apply(module, _entering(x))
        forward = _traffic(calls, self.dtype.itemsize)
        outputs = tensors_of(output)
        kept = frozenset(position for position, each in enumerate(outputs) if _storage(each) in before | saved.keys())
        is_tied = spec.tied is not None
        weights = float(sum(p.numel() for p in module.parameters()))
        frozen = [p.numel() for p in module.parameters() if not p.requires_grad]
        experts = [p.numel() for p in module.parameters() if p.requires_grad and _is_expert(p)]
        memory = LayerMemory(
            weights=weights,
            saved=self._saved(saved.values()),
            frozen=float(sum(frozen)),
            experts=float(sum(experts)),
        )
        self._backward(outputs)
        costs = Costs(
            work=counted.work,
            traffic=LayerTraffic(forward=forward, backward=_traffic(calls, self.dtype.itemsize)),
            memory=memory,
        )
        return _Layer(costs, forms_of(outputs), kept, weights if is_tied else 0.0, spec.recomputable)

    def _is_frozen(self, module: nn.Module) -> Callable[[Tensor], bool]:
        """Return a test for frozen weights: by the operand's storage, or by its size if it was gathered over q."""
        matrices = [p for p in module.parameters() if p.dim() > 1]
        frozen, trained = ([p for p in matrices if p.requires_grad is trained] for trained in (False, True))
        storages, q = {_storage(p) for p in frozen}, self.groups.tensor.q
        panels = {q * p.numel() for p in frozen} - {q * p.numel() for p in trained} if q > 1 else set()

        def is_frozen(operand: Tensor) -> bool:
            return operand.dim() > 1 and (_storage(operand) in storages or operand.numel() in panels)

        return is_frozen

    def _saved(self, tensors: Any) -> Saved:
        elements = wide = 0.0
        for each in tensors:
            num_bytes = each.untyped_storage().nbytes()
            if each.dtype == torch.float32 and self.dtype != torch.float32:
                wide += num_bytes / _WIDE
            else:
                elements += num_bytes / self.dtype.itemsize
        return Saved(elements=elements, wide=wide)

    def _backward(self, outputs: Sequence[Tensor]) -> None:
        with fused_kernels(), OpCounter(self.dtype):
            ends = [each for each in outputs if each.is_floating_point() and each.requires_grad]
            torch.autograd.backward(ends, [torch.empty_like(each) for each in ends])

    def _loss(self, forms: Forms, labels: Any) -> Costs:
        """Run the loss, and count its collectives and the elements of the model's output."""
        try:
            loss_fn: Loss = self.model.loss(self.groups)
            outputs = [empty(form).requires_grad_(form[0].is_floating_point) for form in forms]
            wanted = tuple(map(empty, labels)) if isinstance(labels[0], tuple) else empty(labels)
            with recording(self.groups) as calls, OpCounter(self.dtype):
                loss = loss_fn(_entering(outputs), wanted)  # type: ignore[arg-type]
                forward = _traffic(calls, self.dtype.itemsize)
                self._backward([loss])
                backward = _traffic(calls, self.dtype.itemsize)
        except _RAISED as error:
            raise TraceError(f"the loss cannot be traced: {message_of(error)}") from error
        return Costs(work=Work(losses=self._elements(forms)), traffic=LayerTraffic(forward=forward, backward=backward))


def _is_expert(p: nn.Parameter) -> bool:
    placement = placement_of(p)
    return placement is not None and placement.is_expert


def _likeness(module: nn.Module) -> object:
    """Return a key that is equal for layers that are built alike.

    It has the classes of all submodules, their plain attributes except the layer's number, and the shapes of all
    parameters and buffers.
    """
    return tuple(
        (
            name,
            type(part),
            tuple((key, _plain(value)) for key, value in sorted(vars(part).items()) if _counts(key)),
            tuple((key, tuple(p.shape), p.requires_grad) for key, p in part.named_parameters(recurse=False)),
            tuple((key, tuple(buffer.shape)) for key, buffer in part.named_buffers(recurse=False)),
        )
        for name, part in module.named_modules()
    )


def _counts(key: str) -> bool:
    return not key.startswith("_") and key != "layer_idx"


def _plain(value: object) -> object:
    """Return a value that can be compared, such as a convolution's stride; for other objects, their class."""
    if isinstance(value, tuple | list):
        return tuple(map(_plain, value))
    return value if isinstance(value, bool | int | float | str | type(None) | torch.dtype) else type(value)


def _function(forward: Any) -> object:
    """Return the function that applies a layer, without bound arguments such as a block's number."""
    while isinstance(forward, partial):
        forward = forward.func
    return getattr(forward, "__func__", forward)


def _entering(tensors: Sequence[Tensor]) -> Any:
    """Return a layer's input: a single tensor, or a tuple of several."""
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def _same(x: Tensor) -> Tensor:
    return x


def _storage(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def _traffic(calls: list[Call], element_bytes: int) -> Traffic:
    """Return the recorded traffic in elements of the model's dtype, and clear `calls`."""
    elements: dict[tuple[str, str], float] = {}
    number: dict[tuple[str, str], float] = {}
    for call in calls:
        if call.kind == "receive":
            continue  # the other end of a send
        key = call.kind, call.axes
        elements[key] = elements.get(key, 0.0) + float(call.num_bytes) / element_bytes
        number[key] = number.get(key, 0.0) + 1
    calls.clear()
    return Traffic(elements, number)
