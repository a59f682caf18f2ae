"""Recognize norms, and scale factors of embedding tables, in transformers by calling the modules.

Classes and names are not reliable: dozens of transformers' files subclass nn.LayerNorm and nn.Embedding, or give an
RMSNorm a gain of 1 + weight. So a module is called with random weights and input in float64, and its output is compared
with that of each known norm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

_EPS = ("eps", "variance_epsilon", "epsilon")
"""Attributes in which transformers' norms store the epsilon that they add to the variance."""
_USUAL_EPS = (1e-5, 1e-6, 1e-8, 1e-12, torch.finfo(torch.float32).eps)
_CLOSE = 1e-5
"""Absolute tolerance: norms compute in float32, for inputs of any dtype."""


P = ParamSpec("P")
R = TypeVar("R")


def on_cpu(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: the function creates tensors on the CPU, even while a model is built on the meta device."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.device("cpu"):
            return function(*args, **kwargs)

    return run


class Norm(NamedTuple):
    """Properties of a norm over the last dim."""

    centred: bool
    """True: LayerNorm; False: RMSNorm."""
    one_plus: bool
    """Whether the gain is 1 + weight."""
    eps: float
    bias: bool
    """Whether the norm has a bias."""
    weight: bool = True
    """Whether the norm has a gain; OLMo's norms have none."""


@on_cpu
def norm_of(module: nn.Module, hidden_size: int) -> Norm | None:
    """Return the properties of a module that is a norm over `hidden_size` features; None: it is no known norm."""
    own = dict(module.named_parameters(recurse=False))
    shapes = {name: tuple(p.shape) for name, p in own.items()}
    legal = [dict.fromkeys(names, (hidden_size,)) for names in ((), ("weight",), ("weight", "bias"))]
    if list(module.children()) or shapes not in legal:
        return None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, hidden_size, generator=generator, dtype=torch.float64) * 2 + 1
    given = {name: torch.randn(hidden_size, generator=generator, dtype=torch.float64) for name in own}
    y = _call(module, given, x)
    if y is None or y.shape != x.shape or torch.equal(y, x):
        return None
    for eps in _epsilons(module):
        tiny = x * eps**0.5  # its variance is about as small as eps
        found = _fit(x, y, given, eps)
        of_tiny = _call(module, given, tiny) if found else None
        if of_tiny is not None and _fit(tiny, of_tiny, given, eps) == found:
            return found
    return None


def _epsilons(module: nn.Module) -> Sequence[float]:
    """Return the values to try as a norm's epsilon: that of a known attribute, or else the usual constants."""
    kept = [float(value) for name in _EPS if isinstance(value := getattr(module, name, None), float)]
    return kept[:1] or _USUAL_EPS


def _fit(x: Tensor, y: Tensor, given: Mapping[str, Tensor], eps: float) -> Norm | None:
    """Return the properties of the norm that maps `x` to `y` with these parameters; None: no known norm does."""
    length = x.shape[-1:]
    weight, bias = given.get("weight"), given.get("bias")
    for one_plus in (False, True) if weight is not None else (False,):
        gain = 1 + weight if one_plus and weight is not None else weight
        expected = {True: functional.layer_norm(x, length, gain, bias, eps)}
        if bias is None:
            expected[False] = functional.rms_norm(x, length, gain, eps)
        for centred, of_x in expected.items():
            if torch.allclose(y, of_x, rtol=0, atol=_CLOSE * 10):
                return Norm(centred, one_plus, eps, bias is not None, weight is not None)
    return None


@on_cpu
def factor_of(table: nn.Embedding) -> float | None:
    """Return the factor by which a table scales the rows it looks up; None: it computes something else."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(8, table.embedding_dim, generator=generator, dtype=torch.float64)
    rows = torch.cat([rows, rows.new_zeros(max(0, (table.padding_idx or 0) + 1 - len(rows)), table.embedding_dim)])
    ids = torch.arange(1, 7).view(2, 3)
    y = _call(table, {"weight": rows}, ids)
    if y is None:
        return None
    factor = float((y / rows[ids]).median())
    return factor if torch.allclose(y, rows[ids] * factor, rtol=1e-6) else None


@torch.no_grad()
def _call(module: nn.Module, given: dict[str, Tensor], x: Tensor) -> Tensor | None:
    """Call a module with these parameters in place of its own. Return None if it fails or returns no tensor."""
    try:
        y = torch.func.functional_call(module, given, (x,))
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):  # the module is no norm or table
        return None
    return y.double() if isinstance(y, Tensor) else None
