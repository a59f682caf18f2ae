"""Low-rank adapters (LoRA) in a transformers model: choose linears, freeze other weights, use peft's names.

    model = HuggingFaceModel(LlamaForCausalLM, LlamaConfig(...), lora={"r": 8, "target_modules": ["q_proj", "v_proj"]})

Config keys, the matching of names, the initial A and B, and tensor names in files are those of peft's LoraConfig.
Only `target_parameters` is narrower: it takes the weights of experts alone.
`dslpar.layers.lora` describes how an adapter is sharded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from dslpar.core.catalog import finding, raise_finding
from dslpar.core.errors import DslparError, Finding
from dslpar.core.suggest import did_you_mean
from dslpar.layers import Linear
from dslpar.layers.lora import Adapter, ExpertAdapter
from dslpar.schema.policy import Policy, match
from dslpar.schema.sections import LoRA


def as_lora(value: LoRA | Mapping[str, Any] | None) -> LoRA | None:
    """Return the LoRA section, also from a dict of its keys. Raises: DslparError: an unknown key."""
    if value is None or isinstance(value, LoRA):
        return value
    names = [each.name for each in fields(LoRA)]
    if unknown := [f"unknown key {name!r}{did_you_mean(name, names, '; ')}" for name in value if name not in names]:
        raise_finding("CFG223", f"lora: {', '.join(unknown)}", f"its keys: {', '.join(names)}", key="model.lora")
    return LoRA(**value)


def ends_with(name: str, ends: Iterable[str]) -> bool:
    """Return whether a module's name is one of `ends`, or ends with one after a dot, as in peft's target_modules."""
    return any(name == end or name.endswith(f".{end}") for end in ends)


class Adapters:
    """Modules of a model that get adapters (`targets`), parameters of experts that get some (`parameters`), and modules
    whose own weights are trained (`saved`).

    Raises:
        DslparError: a name matches no module, a module cannot have an adapter, or a tied table is in `saved`. The error
            lists all problems.
    """

    def __init__(self, lora: LoRA, model: nn.Module, policy: Policy, *, is_tied: bool) -> None:
        self.lora = lora
        linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)]
        can = set(_in_regions(model, policy))
        if isinstance(lora.target_modules, str):
            head: Any = model.get_output_embeddings()  # type: ignore[operator]
            targets = [name for name in linears if model.get_submodule(name) is not head]
        else:
            targets = [name for name, _ in model.named_modules() if ends_with(name, lora.target_modules)]
        saved = [name for name, _ in model.named_modules() if ends_with(name, lora.modules_to_save)]
        self.saved = frozenset(saved)
        self.targets = frozenset(targets) - self.saved
        problems = [
            *_unknown(lora.target_modules, "target_modules", linears),
            *_unknown(lora.modules_to_save, "modules_to_save", [name for name, _ in model.named_modules()]),
        ]
        for name in sorted(self.targets - can):
            cls = type(model.get_submodule(name)).__name__
            message = f"{name} ({cls}) cannot have an adapter: it is not a linear that reads the residual or adds to it"
            legal = ", ".join(map(repr, sorted({each.rpartition(".")[2] for each in can})))
            problems.append(finding("CFG223", message, f"choose from {legal}", key="model.lora.target_modules"))
        self.parameters = self._parameters_of_experts(model, policy, problems)
        """Module of experts -> its target parameters, in the module's order."""
        if not (lora.target_modules or lora.target_parameters):
            message = "no weight has an adapter: target_modules is empty"
            legal = ", ".join(map(repr, sorted({each.rpartition(".")[2] for each in can})))
            problems.append(finding("CFG223", message, f"choose from {legal}", key="model.lora.target_modules"))
        if is_tied and any(isinstance(model.get_submodule(name), nn.Embedding | nn.Linear) for name in saved):
            message = f"{', '.join(saved)}: the table and the head are one weight, which peft would train twice"
            hint = "leave them out of modules_to_save, or config=dict(tie_word_embeddings=False)"
            problems.append(finding("CFG223", message, hint, key="model.lora.modules_to_save"))
        if problems:
            raise DslparError(problems)

    def _parameters_of_experts(self, model: nn.Module, policy: Policy, problems: list[Finding]) -> dict[str, list[str]]:
        key, found, targets = "model.lora.target_parameters", dict[str, list[str]](), self.lora.target_parameters
        mixtures = {name: module for name, module in model.named_modules() if match(policy.experts, name)}
        known = [
            f"{name}.{own}" for name, module in mixtures.items() for own, p in module.named_parameters() if p.dim() == 3
        ]
        for module, _, name in (each.rpartition(".") for each in known if ends_with(each, targets)):
            found.setdefault(module, []).append(name)
        for target in targets:
            if any(ends_with(name, [target]) for name in known):
                continue
            ends = {".".join(each.split(".")[-2:]) for each in known}
            others = [name for name, _ in model.named_parameters() if ends_with(name, [target])]
            message = f"no weight of experts is called {target!r}"
            hint = did_you_mean(target, ends) or f"choose from {', '.join(map(repr, sorted(ends)))}"
            if others:
                message = f"{others[0]} is no weight of experts, and only these have adapters by target_parameters"
            if not known:
                hint = "leave target_parameters out: the model has no experts"
            problems.append(finding("CFG223", message, hint, key=key))
        if targets and self.lora.lora_dropout:
            message = "adapters of experts are added to their weights, which leaves no input to drop features of"
            problems.append(finding("CFG223", message, "lora_dropout=0.0", key="model.lora.lora_dropout"))
        return found

    def adapt(self, linear: Linear, module: str, name: str = "", blocks: slice = slice(None)) -> None:
        """Add an adapter to a linear if transformers' `module` is among the targets.

        If several modules are fused in the linear, `blocks` selects the module's blocks of its output. `name` is the
        prefix of the adapter's parameters.
        """
        if module in self.targets:
            lora = self.lora
            adapter = linear.add_adapter(
                lora.r, scale=lora.scale, dropout=lora.lora_dropout, name=f"{name}_" if name else "", blocks=blocks
            )
            linear.adapted = {**getattr(linear, "adapted", {}), adapter: module}  # type: ignore[assignment]

    def freeze(self, part: nn.Module) -> None:
        """Freeze a part of the model, except adapters, `modules_to_save`, and, if `bias` is "all", biases."""
        for owner in part.modules():
            own = {name for adapter in getattr(owner, "adapters", ()) for name in adapter.matrices}
            sources = getattr(owner, "sources", {})
            for name, p in owner.named_parameters(recurse=False):
                whole = any(source.name.rpartition(".")[0] in self.saved for source in sources.get(name, ()))
                p.requires_grad_(name in own or whole or (self.lora.bias == "all" and name == "bias"))

    def peft_config(self, model: Any, base: str | None) -> dict[str, Any]:
        """Return the values of adapter_config.json; keys left out have peft's defaults. `base`: base model's folder."""
        lora, transposed = self.lora, {isinstance(model.get_submodule(name), Conv1D) for name in self.targets}
        others = {name for name, _ in model.named_modules()} - self.targets
        names: Iterable[str] = lora.target_modules
        if isinstance(names, str):  # as in peft: last parts of the names, if they match no other modules
            names = {name.rpartition(".")[2] for name in self.targets}
            names = self.targets if any(ends_with(name, names) for name in others) else names
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "inference_mode": True,
            "r": lora.r,
            "lora_alpha": int(lora.lora_alpha) if lora.lora_alpha == int(lora.lora_alpha) else lora.lora_alpha,
            "lora_dropout": lora.lora_dropout,
            "target_modules": sorted(names),
            "target_parameters": list(lora.target_parameters) or None,
            "use_rslora": lora.use_rslora,
            "bias": lora.bias,
            "modules_to_save": list(lora.modules_to_save) or None,
            "fan_in_fan_out": True in transposed,
        }


def parameters_with_peft_names(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, str]]:
    """Yield (name in dslpar, parameter, name in peft) of all adapter matrices A and B."""
    for name, owner in module.named_modules():
        adapted: Mapping[Adapter | ExpertAdapter, str] = getattr(owner, "adapted", {})
        for adapter, of in adapted.items():
            for own, matrix in zip(adapter.matrices, ("lora_A", "lora_B"), strict=True):
                yield (f"{name}.{own}" if name else own), owner.get_parameter(own), f"{of}.{matrix}.weight"


def in_peft_s_form(name: str, matrix: Tensor) -> Tensor:
    """Return A [r, in] or B [out, r] as in peft's files, where those of E experts are [E r, in] and [out, r E]."""
    if matrix.dim() == 2:
        return matrix
    return matrix.flatten(0, 1) if name.endswith("lora_A.weight") else matrix.permute(1, 2, 0).flatten(1)


def _in_regions(model: nn.Module, policy: Policy) -> Iterator[str]:
    """Yield the names of linears that can have an adapter: inward and outward linears outside of mixtures."""
    names = [name for name, _ in model.named_modules()]
    mixtures = tuple(f"{name.rpartition('.')[0]}." for name in names if match(policy.experts, name))
    for name in names:
        if f"{name}.".startswith(mixtures):
            continue
        if pattern := match(policy.regions, name):
            inward = policy.regions[pattern]
            parts = inward.values() if isinstance(inward, Mapping) else [inward]
            yield from (f"{name}.{each}" for names in parts for each in names)
        elif match((*policy.inward, *policy.outward), name):
            yield name


def _unknown(names: str | tuple[str, ...], key: str, known: Iterable[str]) -> Iterator[Any]:
    known = list(known)
    for name in () if isinstance(names, str) else names:
        if not any(ends_with(each, [name]) for each in known):
            ends = {each.rpartition(".")[2] for each in known}
            hint = did_you_mean(name, ends) or f"choose from {', '.join(map(repr, sorted(ends)))}"
            yield finding("CFG223", f"no module of the model is called {name!r}", hint, key=f"model.lora.{key}")
