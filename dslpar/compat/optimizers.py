"""ColossalAI's optimizers: its Adams and SGD are torch's with its defaults, and Lamb and Lars its own arithmetic.

    optimizer = HybridAdam(model.parameters(), lr=1e-3)      # decays as AdamW, 0 by default
    optimizer = Lamb(model.parameters(), lr=1.8e-2, weight_decay=0.1)

Where an optimizer runs follows from the config's `zero.offload_optimizer`, not from its name. Lamb and Lars take the
norm of each weight, so neither ZeRO nor tensor parallelism may cut it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import SGD, AdamW, Optimizer

from dslpar.compat.context import global_context

Parameters = Iterable[Any]


class HybridAdam(AdamW):
    """torch's AdamW with ColossalAI's defaults.

    Raises:
        ValueError: an argument asks for another Adam.
    """

    def __init__(
        self,
        model_params: Parameters,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        adamw_mode: bool = True,
        nvme_offload_fraction: float = 0.0,
        nvme_offload_dir: str | None = None,
        **_: Any,
    ) -> None:
        if not adamw_mode:
            raise ValueError(f"adamw_mode=False is Adam: write torch.optim.Adam for {type(self).__name__}")
        if not bias_correction:
            raise ValueError("torch's Adam always corrects its bias: leave bias_correction=False out")
        if nvme_offload_fraction:
            raise ValueError(
                "leave nvme_offload_fraction out, and write zero = dict(offload_optimizer=dict(device='nvme', "
                "nvme_path='...')) in the config"
            )
        super().__init__(model_params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


class CPUAdam(HybridAdam):
    """HybridAdam under its other name."""


class FusedAdam(HybridAdam):
    """HybridAdam under its other name."""


class FusedSGD(SGD):
    """torch's SGD with ColossalAI's order of arguments."""

    def __init__(
        self,
        params: Parameters,
        lr: float,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
    ) -> None:
        if wd_after_momentum:
            raise ValueError("torch's SGD decays before the momentum: leave wd_after_momentum=True out")
        super().__init__(
            params, lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov
        )


class _LayerWise(Optimizer):
    """Base of optimizers that scale each weight's step by a ratio of norms."""

    def __init__(self, params: Parameters, defaults: dict[str, Any]) -> None:
        context = global_context
        if context.is_initialized() and context.tensor_parallel_size > 1:
            name, size = type(self).__name__, context.tensor_parallel_size
            raise ValueError(
                f"{name} takes the norm of a whole weight, but {size} tensor ranks hold pieces: use AdamW or SGD"
            )
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take a step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._step(p, p.grad, group)
        return loss

    def _step(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError


class Lamb(_LayerWise):
    """LAMB (arXiv 1904.00962) without bias correction; `adam=True` leaves the trust ratio out."""

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0,
        adam: bool = False,
    ) -> None:
        self.adam = adam
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    def _step(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[p], group["betas"]
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        mean = state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        update = mean / square.sqrt().add(group["eps"]) + group["weight_decay"] * p
        weight_norm, update_norm = p.norm(), update.norm()
        # A weight of zeros, or a step of zeros, has no ratio.
        ratio = torch.where((weight_norm > 0) & (update_norm > 0), weight_norm / update_norm, 1.0)
        p.sub_(group["lr"] * (1.0 if self.adam else ratio) * update)


class Lars(_LayerWise):
    """LARS (arXiv 1708.03888), with steps clamped to [-10, 10] and the trust ratio to [0, 50], as in ColossalAI."""

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        momentum: float = 0,
        eeta: float = 1e-3,
        weight_decay: float = 0,
        epsilon: float = 0.0,
    ) -> None:
        if not 0 < eeta <= 1:
            raise ValueError(f"eeta is {eeta}: it is above 0, and at most 1")
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay, eeta=eeta, epsilon=epsilon))

    def _step(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        decay, weight_norm, grad_norm = group["weight_decay"], p.norm(), grad.norm()
        ratio = group["eeta"] * weight_norm / (grad_norm + decay * weight_norm + group["epsilon"])
        ratio = torch.where((weight_norm > 0) & (grad_norm > 0), ratio, 1.0).clamp(0.0, 50)
        update = (grad + decay * p).clamp(-10.0, 10.0)
        if group["momentum"]:
            state = self.state[p]
            first = "momentum_buffer" not in state
            state["momentum_buffer"] = (
                update if first else state["momentum_buffer"].mul_(group["momentum"]).add_(update)
            )
            update = state["momentum_buffer"]
        p.sub_(group["lr"] * ratio * update)
