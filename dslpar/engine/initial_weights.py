"""Check that all ranks start from the same weights if a program passes modules that it has built.

A piece is a tensor rank's shard of a weight. The weights of a layer of dslpar.layers are *written* if the program has
set them. The engine keeps written weights, and draws all other weights of these layers by name, which needs no check.

==============================  ==========================================  =========================================
modules that a program built    weights that are compared                   ranks on which they must be equal
==============================  ==========================================  =========================================
any                             written weights of dslpar.layers            all ranks of a stage that store the same
                                                                            piece
an nn.Sequential in a pipeline  written weights of dslpar.layers            all ranks that store the same piece, since
                                                                            each rank built every stage
                                parameters of all other modules             all ranks
==============================  ==========================================  =========================================

Written pieces of one weight must also differ from each other. `torch.nn.init` on a piece draws the same numbers on all
ranks with the same seed, and the whole weight would then be one piece, repeated.

Without a pipeline, DeepSpeed broadcasts the parameters of other modules from the first replica.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Hashable, Iterator, Mapping
from typing import NoReturn

from torch import nn

from dslpar.core.catalog import raise_finding
from dslpar.core.mesh import TENSOR_AXES, Mesh
from dslpar.distributed import collectives
from dslpar.distributed.groups import Groups
from dslpar.layers.initial_values import UNWRITTEN, Source, digest, source_of
from dslpar.layers.parameter import placement_of
from dslpar.layers.placement import Letters, Placement
from dslpar.models import LayeredModel

_MAX_SHOWN = 4
"""Number of ranks that a finding names."""
_WRITTEN, _OWN, _PLAIN = "choice of weights to keep", "values of the weights to keep", "set of initial weights"

Values = Mapping[tuple[str, Letters], str]
"""Digests by (what is compared, the tensor axes over which the digest must be equal)."""


def check_equal_weights(model: LayeredModel, groups: Groups, path: str) -> None:
    """Check that ranks have built equal weights, as in the table above. Collective over all ranks.

    Raises:
        DslparError: on every rank, if any two ranks differ, or pieces of a written weight repeat each other.
    """
    world, modules = groups.axis("pipe", "data", "tensor"), model.built(groups)
    if world.size == 1:
        return
    is_cut = model.built_everywhere and groups.mesh.pipe > 1
    own = socket.gethostname(), _values(modules, is_cut), _repeated(modules, groups)
    by_rank = collectives.gather_objects(own, world)
    if repeated := list(dict.fromkeys(name for _, _, names in by_rank for name in names)):
        _refuse_repeated(repeated, path)
    first: dict[Hashable, int] = {}
    differing = []
    for index, (host, values, _) in enumerate(by_rank):
        rank = world.peers[index]
        for (what, letters), value in values.items():
            place = _place(groups.mesh, rank, letters, model.built_everywhere)
            reference = first.setdefault((what, letters, place), index)
            other_host, theirs, _ = by_rank[reference]
            if theirs[what, letters] != value:
                other = f"rank {world.peers[reference]} on {other_host}"
                differing.append(f"rank {rank} on {host} has a different {what} than {other}")
                break  # one finding per rank: later values differ too
    if differing:
        more = f"; and {len(differing) - _MAX_SHOWN} more" if len(differing) > _MAX_SHOWN else ""
        hint = "build the model after dslpar.start, which seeds torch alike on every rank; or load the same weights"
        raise_finding("HST221", f"{'; '.join(differing[:_MAX_SHOWN])}{more}", hint, path)


def _place(mesh: Mesh, rank: int, letters: Letters, anywhere: bool) -> tuple[int, ...]:
    """Return coordinates that are equal for two ranks if both must hold the same values.

    letters: the tensor axes over which values are replicated, and "expert_data" for experts. anywhere: values must be
    equal on all stages.
    """
    coord = mesh.coord(rank)
    stage = 0 if anywhere else coord["pipe"]
    part = mesh.index(rank, "e") if "expert_data" in letters else 0
    return stage, part, *(coord[letter] for letter in TENSOR_AXES if letter not in letters)


def _values(modules: Mapping[str, nn.Module], is_cut: bool) -> Values:
    """Return this rank's digests; `is_cut`: a pipeline uses only some layers of modules that every rank has built."""
    placed, plain = list(_kept(modules)), []
    if is_cut:
        parameters = [p for module in modules.values() for p in module.parameters() if placement_of(p) is None]
        plain = [repr(p.detach().double().sum().item()) for p in parameters]
    values = {(_PLAIN, TENSOR_AXES): _hash(plain), (_WRITTEN, TENSOR_AXES): _hash([name for name, _ in placed])}
    by_copies: dict[Letters, list[str]] = {}
    for name, p in placed:
        placement = placement_of(p)
        assert placement is not None
        by_copies.setdefault(_copies(placement), []).append(f"{name} {digest(p)!r}")
    return values | {(_OWN, letters): _hash(texts) for letters, texts in by_copies.items()}


def _copies(placement: Placement) -> Letters:
    """Return the axes over which a written weight must be equal, as `_place` takes them; data ranks are meant always.

    Of experts that are divided over data ranks, only those that hold the same ones ("expert_data").
    """
    return (*placement.replicas, "expert_data") if placement.is_expert else placement.replicas


def _kept(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (global name, parameter) for each written weight of a layer of dslpar.layers."""
    for module_name, module in modules.items():
        for name, p in module.named_parameters():
            if placement_of(p) is not None and source_of(p) not in UNWRITTEN:
                yield f"{module_name}.{name}", p


def _repeated(modules: Mapping[str, nn.Module], groups: Groups) -> list[str]:
    """Return names of weights for which two tensor ranks have written equal numbers into different pieces.

    Constant pieces may be equal: a bias of zeros, for example.
    """
    tensor = groups.axis("tensor")
    if tensor.size == 1:
        return []
    pieces: dict[str, tuple[tuple[int, ...], bytes | None]] = {}
    for name, p in _kept(modules):
        placement = placement_of(p)
        assert placement is not None
        if source_of(p) is Source.PROGRAM and p.numel() and bool((p != p.flatten()[0]).any()):
            pieces[name] = _place(groups.mesh, groups.rank, _copies(placement), True), digest(p)
    places: dict[tuple[str, bytes | None], set[tuple[int, ...]]] = {}
    for theirs in collectives.gather_objects(pieces, tensor):
        for name, (place, numbers) in theirs.items():
            places.setdefault((name, numbers), set()).add(place)
    return [name for (name, _), found in places.items() if len(found) > 1]


def _refuse_repeated(names: list[str], path: str) -> NoReturn:
    shown = ", ".join(map(repr, names[:_MAX_SHOWN])) + (", ..." if len(names) > _MAX_SHOWN else "")
    hint = "init=... where the layer is built; or dslpar.checkpoint.load_full_state, which takes whole weights"
    raise_finding("TEN237", f"ranks have written the same values to different shards of {shown}", hint, path)


def _hash(texts: list[str]) -> str:
    return hashlib.blake2b("\n".join(texts).encode(), digest_size=16).hexdigest()
