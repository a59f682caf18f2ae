"""Count the compute of a forward, operation by operation, as `dslpar.costs.work.Work`.

    with OpCounter(dtype) as counted:
        module(x)
    counted.work.products, counted.work.elementwise

The counter serves layers whose costs have no closed form. It works on the meta device too, where nothing is computed.
Matrix products are those of `mm` and its variants, of attention, and of convolutions, which count like the products
after im2col. Every other operation that makes a tensor counts as elementwise: it reads its arguments and writes its
results. Kernels that a compiler would fuse are counted one by one. torch's FlopCounterMode counts operations in the
same way, but no bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dslpar.costs.work import Grouped, Product, Scores, Work

aten = torch.ops.aten


class OpCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counter of the operations in its body.

    Elementwise work is counted in elements of the size of `dtype`: with bf16, a float32 element counts as two.
    `is_frozen` returns True if a tensor, the last operand of a product, is a frozen weight.
    """

    def __init__(self, dtype: torch.dtype, is_frozen: Callable[[Tensor], bool] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._size, self._is_frozen = dtype.itemsize, is_frozen
        self.work = Work()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation and count it."""
        answer = _ANSWERS.get(func.overloadpacket)
        if answer is not None and any(each.is_meta for each in _tensors(args)):
            return answer(args)
        result = func(*args, **(kwargs or {}))
        if func.namespace == "transformers" and "grouped_mm" in func._schema.name:
            self.work += _grouped(args, {}, result)  # transformers' own, for the dtypes that torch's kernel lacks
        elif func.namespace == "aten":
            counting = _COUNTED.get(func.overloadpacket)
            if counting is not None:
                work = counting(args, kwargs or {}, result)
                if self._is_frozen is not None and len(work.products) == 1 and self._is_frozen(_tensors(args)[-1]):
                    work = work._replace(products=(), frozen=work.products)
                self.work += work
            elif not _is_view(func) and func.overloadpacket not in _FREE:
                tensors = [*_tensors(args), *_tensors((kwargs or {}).values()), *_tensors([result])]
                moved = sum(each.numel() * each.element_size() for each in tensors)
                self.work += Work(elementwise=moved / self._size)
        return result


_FREE = {
    aten._unsafe_view,
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.lift_fresh,
    aten.new_empty,
    aten.new_empty_strided,
}
"""Operations that start no kernel, although their schema returns a new tensor."""


_ANSWERS: Mapping[Any, Callable[[Sequence[Any]], Any]] = {
    aten.equal: lambda args: True,
    aten._local_scalar_dense: lambda args: torch.zeros((), dtype=args[0].dtype).item(),
}
"""Results for operations that read values of meta tensors, which have none: all tensors are equal, and a value is 0."""


def _is_view(func: Any) -> bool:
    """Return whether an operation only returns views of its arguments and does not write to them."""
    returns = func._schema.returns
    aliases = [each.alias_info for each in returns]
    return bool(returns) and all(each is not None and not each.is_write for each in aliases)


def _tensors(values: Any) -> list[Tensor]:
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


Counting = Callable[[Sequence[Any], Mapping[str, Any], Any], Work]


def _product(a: Tensor, b: Tensor) -> Work:
    """Count [..., rows, depth] @ [..., depth, columns]; a batch of products counts as one product with all rows."""
    rows, depth, columns = prod(a.shape[:-1]), a.shape[-1], b.shape[-1]
    return Work(products=(Product(float(rows), float(depth), float(columns)),))


def _grouped(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Work:
    """Count [all rows, depth] with the weights [number, depth, columns], at equally many rows per weight."""
    if args[0].dim() != 2 or args[1].dim() != 3:  # the gradient of weights: only forwards are counted
        return Work()
    (rows, depth), (num, _, columns) = args[0].shape, args[1].shape
    return Work(grouped=(Grouped(num, rows / num, float(depth), float(columns)),))


def _convolution(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Work:
    """Count a convolution as [samples * positions, channels * window] @ [channels * window, channels out].

    Positions are those of the output, or of the input if the convolution is transposed.
    """
    x, weight, transposed = args[0], args[1], bool(args[6])
    groups = int(args[8])
    positions = x if transposed else result
    rows = positions.shape[0] * prod(positions.shape[2:])
    depth, columns = prod(weight.shape[1:]), weight.shape[0] // groups
    return Work(products=(Product(float(rows * groups), float(depth), float(columns)),))


def _attention(position: int) -> Counting:
    """Return the counter of a fused attention operation, whose argument at `position` is `is_causal`."""

    def count(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Work:
        q, k = args[0], args[1]
        causal = bool(args[position] if len(args) > position else kwargs.get("is_causal", False))
        return Work(scores=(Scores(float(q.numel()), float(k.shape[-2]), float(q.shape[-1]), causal),))

    return count


def _embedding(args: Sequence[Any], kwargs: Mapping[str, Any], result: Tensor) -> Work:
    """Count the rows that are looked up, not the table."""
    return Work(elementwise=2.0 * result.numel())


_COUNTED: Mapping[Any, Counting] = {
    aten.embedding: _embedding,
    aten.mm: lambda args, kwargs, result: _product(args[0], args[1]),
    aten.bmm: lambda args, kwargs, result: _product(args[0], args[1]),
    aten.addmm: lambda args, kwargs, result: _product(args[1], args[2]),
    aten.baddbmm: lambda args, kwargs, result: _product(args[1], args[2]),
    aten.convolution: _convolution,
    **({aten._grouped_mm: _grouped} if hasattr(aten, "_grouped_mm") else {}),  # not in torch 2.4
    aten._scaled_dot_product_flash_attention: _attention(4),
    aten._scaled_dot_product_efficient_attention: _attention(6),
    aten._scaled_dot_product_cudnn_attention: _attention(6),
    aten._scaled_dot_product_flash_attention_for_cpu: _attention(4),
}
