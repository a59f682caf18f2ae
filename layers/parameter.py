"""Sharded parameters: create and draw them, mark the copies that norms count, and sum the gradients of vectors.

Like torch.nn, a layer draws its parameters from torch's generator when it is built. Each parameter is drawn whole and
then cut, so ranks with the same seed hold pieces of one tensor in any layout. `initialize` draws each parameter from
its own generator, seeded by (seed, global name). So weights do not depend on the stage that builds a layer either. When
an engine is built, it does the same with all parameters that the program has not written (initial_values.py).

Vectors are parameters with one value per feature: biases, gains, and position tables. Their gradients are partial,
since a rank applies them to its own tokens only. A stand-in of a vector is the tensor that a layer uses instead of the
Parameter, so that the backward sums the gradient over ranks.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, Protocol, cast

import torch
from torch import nn

from dslpar.core.catalog import raise_finding
from dslpar.distributed import collectives
from dslpar.distributed.groups import Groups
from dslpar.layers.initial_values import (
    UNWRITTEN,
    WRITTEN,
    Source,
    fill_with_nan,
    forget,
    holds_numbers,
    record,
    skips_init,
    source_of,
)
from dslpar.layers.placement import Letters, Placement

Shared = Mapping[nn.Parameter, torch.Tensor]
"""{vector: its stand-in}; one all-reduce sums the gradients of all stand-ins."""


class Drawing(Protocol):
    """Distribution of a parameter's initial values."""

    def piece(self, placement: Placement, coord: Mapping[str, int], seed: int, name: str) -> torch.Tensor:
        """Return the piece of parameter `name` for the rank at `coord`, in a run with `seed`; on the CPU."""
        ...


class Init(NamedTuple):
    """Draw elements from N(mean, std); with std 0 all elements are `mean`."""

    mean: float = 0.0
    std: float = 0.0
    zero_row: int | None = None
    """A row to set to zero, such as a table's padding row. Other rows are the same with and without it."""

    def piece(self, placement: Placement, coord: Mapping[str, int], seed: int, name: str) -> torch.Tensor:
        """Draw the whole parameter, and cut the piece out of it."""
        return placement.cut(draw(placement.shape, self, seed, name), coord)


ZEROS, ONES = Init(0.0), Init(1.0)


def normal(std: float) -> Init:
    """Initialize from N(0, std)."""
    return Init(0.0, std)


GPT2 = normal(0.02)


def parameter(placement: Placement, init: Drawing) -> nn.Parameter:
    """Make this rank's piece, with `p.placement` and `p.init`; dtype and device are torch's defaults.

    The parameter is drawn when a layer of dslpar.layers registers it, since the layer knows the rank's coordinates.
    Until then it is NaN, which makes any use visible. In other modules it stays NaN until `initialize`.

    Raises:
        DslparError: a dim is not divisible by the number of ranks that cut it.
    """
    placement.check()
    p = nn.Parameter(torch.empty(placement.local_shape))
    p.placement, p.init = placement, init  # type: ignore[attr-defined]
    if holds_numbers(p) and not skips_init():
        fill_with_nan(p)
    else:
        record(p, Source.NOBODY, digested=False)
    return p


def placement_of(p: torch.Tensor) -> Placement | None:
    """Return the parameter's placement; None for other modules' parameters, which are equal copies on all ranks."""
    return cast("Placement | None", getattr(p, "placement", None))


def initialize(module: nn.Module, groups: Groups, seed: int, prefix: str = "", *, keep: bool | None = None) -> None:
    """Draw every parameter that `parameter` made, by the seed and its global name.

    `prefix` is the module's prefix in the whole model ("blocks.0."). Values are drawn as float32 on the CPU, whatever
    the parameter's dtype and device. Ranks must agree on `seed` and names. `dslpar.initialize` keeps the values that
    this function has drawn.

    With `keep=True`, parameters that were written since they were drawn (loaded, filled, trained) stay unchanged. With
    `keep=False` they are drawn too.

    Raises:
        DslparError: parameters were written since, and `keep` is not given; then nothing is drawn.
    """
    placed = {name: p for name, p in module.named_parameters() if placement_of(p) is not None}
    written = [] if keep is False else [name for name, p in placed.items() if source_of(p) in WRITTEN]
    if written and keep is None:
        names = ", ".join(map(repr, written[:4])) + (", ..." if len(written) > 4 else "")
        message = f"these weights were changed after they had been initialized: {names}"
        raise_finding("TEN236", message, "keep=True to keep their values, or keep=False to initialize them again")
    for name in placed.keys() - written:
        _draw(placed[name], groups, seed, prefix + name)
        record(placed[name], Source.INITIALIZE)


def initialize_built(module: nn.Module, groups: Groups, seed: int, prefix: str = "") -> None:
    """Draw by name the parameters that nothing has written since they were built; keep all others."""
    for name, p in module.named_parameters():
        if placement_of(p) is not None and source_of(p) in UNWRITTEN:
            _draw(p, groups, seed, prefix + name)
            # Without a digest, which takes as long as drawing: writes through p.data no longer matter from here on.
            record(p, Source.INITIALIZE, digested=False)


def _draw(p: nn.Parameter, groups: Groups, seed: int, name: str) -> None:
    drawing = cast("Drawing", p.init)  # type: ignore[attr-defined]
    with torch.no_grad():
        p.copy_(drawing.piece(cast("Placement", placement_of(p)), groups.coord, seed, name))


def draw(shape: tuple[int, ...], init: Init, seed: int, name: str) -> torch.Tensor:
    """Draw the full parameter `name` of a run with `seed`."""
    if init.std == 0:
        full = torch.full(shape, init.mean, dtype=torch.float32, device="cpu")
    else:
        generator = torch.Generator("cpu").manual_seed(stable_hash(seed, name))
        full = torch.normal(init.mean, init.std, shape, generator=generator, dtype=torch.float32, device="cpu")
    if init.zero_row is not None:
        full[init.zero_row] = 0
    return full


def stable_hash(*values: object) -> int:
    """Return a 63-bit hash of the values' text, equal in every process, Python version and run."""
    # Not hash(), whose salt differs between processes.
    digest = hashlib.blake2b("\0".join(map(str, values)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def mark_owners(module: nn.Module, groups: Groups) -> None:
    """Set `p.tensor_model_parallel` on every parameter: whether this rank's optimizer elements count in global norms.

    DeepSpeed counts a parameter in norms and overflow checks if the flag is set or the tensor rank is 0. Tensor rank 0
    holds copy 0 of all its parameters, so each element counts once, in every mode. If ZeRO shards the copies, all
    copies count, since each rank updates another part.
    """
    replicated = Placement(groups.tensor, (), ())
    for p in module.parameters():
        p.tensor_model_parallel = (placement_of(p) or replicated).is_stepped_at(groups.coord)  # type: ignore[attr-defined]


def gather(shard: torch.Tensor, placement: Placement, groups: Groups) -> torch.Tensor:
    """Gather the pieces to the full, unpadded tensor on every rank that holds a piece (`Placement.holders`)."""
    pieces = collectives.all_gather(shard.detach().unsqueeze(0), groups.axis(placement.holders))
    return placement.merge(list(pieces))


class PlacedModule(nn.Module):
    """Module that draws its own parameters, and restores their placements when torch replaces them.

    torch makes new Parameters without attributes in `load_state_dict(assign=True)`, `to_empty` and `copy.deepcopy`. A
    parameter without its placement would be treated as equal copies, and its gradient as complete.
    """

    __call__: Callable[..., torch.Tensor]  # nn.Module's says Any

    def __init__(self, groups: Groups) -> None:
        super().__init__()
        self.groups = groups
        self._placements: dict[str, tuple[Placement, Drawing]] = {}

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register as torch does, and draw a parameter that `parameter` has just made. Also called by setattr."""
        super().register_parameter(name, param)
        if param is not None and placement_of(param) is not None:
            self._placements[name] = (param.placement, param.init)  # type: ignore[attr-defined]
            if source_of(param) is Source.NOBODY:
                self._draw_built(param)
        self._restore_placements()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> PlacedModule:
        sources = self._own_sources()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._restore_placements()
        self._restore_sources(sources)
        return self

    def _load_from_state_dict(self, state_dict: Mapping[str, object], prefix: str, *args: object) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        for name, p in self._parameters.items():
            if p is not None and prefix + name in state_dict:
                forget(p)  # assign=True may have brought another module's Parameter, with its record

    def __deepcopy__(self, memo: dict[int, object]) -> PlacedModule:
        """Copy as torch does; the origins of the parameters' values (`Source`) carry over to the copy."""
        made: PlacedModule = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(self.__dict__, memo))
        made._restore_sources(self._own_sources())
        return made

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._restore_placements()

    def set_init(self, name: str, init: Drawing) -> None:
        """Change the distribution of one of the module's own parameters; redraw it now unless it was written."""
        placement, _ = self._placements[name]
        self._placements[name] = (placement, init)
        p = cast("nn.Parameter", self._parameters[name])
        p.init = init  # type: ignore[attr-defined]
        if source_of(p) in UNWRITTEN:
            self._draw_built(p)

    def _draw_built(self, p: nn.Parameter) -> None:
        """Draw a parameter's first values with a seed from torch's generator, which this advances."""
        if not holds_numbers(p) or skips_init():
            return
        _draw(p, self.groups, int(torch.randint(2**62, (), device="cpu")), "")
        record(p, Source.LAYER)

    def _own_sources(self) -> dict[str, Source]:
        return {name: source_of(p) for name, p in self._parameters.items() if p is not None}

    def _restore_sources(self, sources: Mapping[str, Source]) -> None:
        """Record the origin of the values again for parameters that were moved or copied."""
        for name, source in sources.items():
            p = cast("nn.Parameter", self._parameters[name])
            if p.device.type == "meta":
                source = Source.NOBODY  # whatever was written there is gone
            if source is not Source.PROGRAM:
                record(p, source)

    def _restore_placements(self) -> None:
        for name, placement_and_init in self._placements.items():
            p = self._parameters.get(name)
            if p is not None and placement_of(p) is None:
                p.placement, p.init = placement_and_init  # type: ignore[attr-defined]


class Vectors:
    """The vectors of a module and its submodules.

    `share()` returns stand-ins for all vectors. The backward sums their gradients, with one all-reduce per set of axes.
    A caller that knows when a step's last backward is over may instead sum the gradients once, after it (`defer_sums`).
    """

    deferred = False
    """Whether gradients stay partial, and the caller of `defer_sums` sums them."""

    def __init__(self, module: nn.Module, groups: Groups) -> None:
        self.module, self.groups = module, groups
        self._found: dict[Letters, list[tuple[nn.Module, str]]] | None = None

    def find(self) -> dict[Letters, list[tuple[nn.Module, str]]]:
        """Return {axes over which gradients are summed: the (module, attribute) of each vector}; cached.

        torch.compile would make another graph for a module without the cache, so call this beforehand.
        """
        # As (module, name), since ZeRO and load_state_dict may replace the Parameters later.
        if self._found is None:
            self._found = _vectors_by_reduction(self.module)
        return self._found

    def share(self) -> Shared:
        """Return {vector: its stand-in} for vectors whose gradient is needed and partial; {} if sums are deferred."""
        shared: dict[nn.Parameter, torch.Tensor] = {}
        if self.deferred:
            return shared
        for letters, vectors in self.find().items():
            # Read the attribute each time: ZeRO 3 detects so that a parameter is used outside its own module.
            parameters = [cast("nn.Parameter", getattr(owner, name)) for owner, name in vectors]
            parameters = [p for p in parameters if p.requires_grad]
            stand_ins = collectives.copy_to_group_coalesced(parameters, self.groups.axis(*letters))
            shared.update(zip(parameters, stand_ins, strict=True))
        return shared


def defer_sums(module: nn.Module, deferred: bool = True) -> None:
    """Leave the gradients of all vectors in `module` partial; the caller sums those of `deferred_vectors` once.

    With `deferred=False` the layers sum them in each backward again.
    """
    for part in module.modules():
        if isinstance(vectors := getattr(part, "vectors", None), Vectors):
            vectors.deferred = deferred


def deferred_vectors(module: nn.Module) -> dict[Letters, list[nn.Parameter]]:
    """Return {axes over which the caller must sum: the vectors whose gradients stay partial over these axes}."""
    found: dict[Letters, list[nn.Parameter]] = {}
    for letters, vectors in _vectors_by_reduction(module).items():
        deferred = [owner._parameters[name] for owner, name in vectors if _is_deferred(owner)]
        if deferred:
            found[letters] = list(dict.fromkeys(deferred))  # type: ignore[arg-type]  # tied ones once
    return found


def _is_deferred(owner: nn.Module) -> bool:
    """Return whether the gradient sums of a module's own vectors are deferred. False if the module is no `Layer`."""
    vectors = getattr(owner, "vectors", None)
    return isinstance(vectors, Vectors) and vectors.deferred


def external_parameters(module: nn.Module) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    """Yield (module, vector of an inner layer for which it makes a stand-in): DeepSpeed's external parameters."""
    for outer in module.modules():
        vectors = getattr(outer, "vectors", None)
        if isinstance(vectors, Vectors) and vectors.module is outer:
            for found in _vectors_by_reduction(outer).values():
                yield from ((outer, owner._parameters[name]) for owner, name in found if owner is not outer)  # type: ignore[misc]


class Layer(PlacedModule):
    """Base of layers, whose vectors get complete gradients through stand-ins, except over axes that ZeRO sums.

    A forward takes the stand-ins that an enclosing module has made as the argument `shared`. Without this argument the
    layer makes its own stand-ins from `vectors`. If the enclosing code passes no `shared`, `vectors` may be set to the
    `Vectors` of an enclosing module.

    `layer_idx` (LiBai's name) is the layer's index in the pipeline if it is in an nn.Sequential; -1 is the last.
    """

    def __init__(self, groups: Groups, layer_idx: int | None = None) -> None:
        super().__init__(groups)
        self.layer_idx = layer_idx
        self.vectors = Vectors(self, groups)

    def share(self) -> Shared:
        """Return stand-ins for all vectors of the module and its submodules."""
        return self.vectors.share()

    def stand_in(self, p: nn.Parameter | None, shared: Shared) -> torch.Tensor | None:
        """Return the tensor to use instead of the parameter `p`: its stand-in, or `p` if there is none."""
        return shared.get(p, p) if shared and p is not None else p


def _vectors_by_reduction(module: nn.Module) -> dict[Letters, list[tuple[nn.Module, str]]]:
    """Return the (module, attribute) of every vector in `module`, by the axes over which its gradient is summed."""
    found: dict[Letters, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for name, p in owner.named_parameters(recurse=False):
            placement = placement_of(p)
            letters = () if placement is None else placement.summed
            if placement is not None and any(getattr(placement.tensor, letter) > 1 for letter in letters):
                found.setdefault(letters, []).append((owner, name))
    return found
