"""Derive a policy from transformers' tensor plan (`base_model_tp_plan`), for models that have a plan.

A plan maps patterns of module names to words: "colwise" (column-parallel linear), "rowwise" (row-parallel), ... The
other entries of a policy are found as follows. A region is the module around a "colwise" linear, and the linear reads
the first argument of the region's forward. "colwise_gather_output" means that the linear's output cannot go straight to
the row-parallel linear. The reason is found in the model: several linears are fused in the weight, or a norm over all
features follows. A plan with an unknown word, and a model without a plan, are refused: they need a written policy.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from torch import nn
from transformers.pytorch_utils import Conv1D

from dslpar.core.catalog import raise_finding
from dslpar.policies import probe
from dslpar.policies.draft import drafted
from dslpar.policies.errors import UNSPLIT
from dslpar.policies.fitting import fitting
from dslpar.policies.replacement_modules import features
from dslpar.schema.policy import WITHOUT_ROUTER_NOISE, Names, Policy, match

_INWARD = {"colwise", "colwise_gather_output", "packed_colwise"}
_OUTWARD = {"rowwise", "rowwise_split_input"}
_AROUND = {"embedding_rowwise", "colwise_gather_output", "colwise_rep", "rowwise_rep"}
"""Words that plans use for the token table and the head, which are found through the model instead."""
_COUNTS = re.compile(r"\bself\.((?:config\.)?(?:num|n)_(?:\w+_)?heads)\b")
"""Attributes with numbers of heads that attention code may read; on a rank they must be its share of the heads."""


class _Usual(NamedTuple):
    """Usual names of the linears in a region, which mean the same in all of transformers' code.

    The fields besides `needed` and `known` are as in `Policy`.
    """

    needed: Names
    """Names by which such a region is recognized: it has all of them."""
    outward: str
    inward: Names
    latent: Names = ()
    from_latent: Names = ()

    @property
    def known(self) -> Names:
        return (*self.inward, *self.from_latent, self.outward)


_USUAL = (
    _Usual(
        needed=("kv_a_proj_with_mqa", "kv_b_proj"),
        outward="o_proj",
        inward=("q_proj", "q_a_proj", "kv_a_proj_with_mqa"),
        latent=("q_a_proj", "kv_a_proj_with_mqa"),
        from_latent=("q_b_proj", "kv_b_proj"),
    ),
    _Usual(needed=("q_proj", "k_proj", "v_proj"), outward="o_proj", inward=("q_proj", "k_proj", "v_proj")),
    _Usual(needed=("gate_proj", "up_proj"), outward="down_proj", inward=("gate_proj", "up_proj")),
)


def derive(model: Any, plan: Mapping[str, str] | None = None) -> Policy:
    """Return the policy of a model on the meta device. `plan`: a tensor plan to use in place of the model's own.

    Raises:
        DslparError: the model has no plan, or the plan has unknown entries; the error lists all of them.
    """
    plan = (model.tp_plan or {}) if plan is None else plan
    if not plan:
        _refuse(model, ["transformers has no tensor plan for it"])
    found = _Derivation(model, plan)
    if found.problems:
        _refuse(model, found.problems)
    return found.policy()


def _refuse(model: Any, problems: Sequence[str]) -> NoReturn:
    """Raise a finding whose help is a policy to try, if the model's modules have usual names."""
    name = fitting(model)
    text = f"policy={name!r}" if name else drafted(model)
    hint = f"{text}, untested: `dslpar policy check` compares it" if text else UNSPLIT
    raise_finding("TEN234", f"{type(model).__name__}: {'; '.join(problems)}", hint, key="model.policy")


def plan_of(cls: Any, prefix: str) -> dict[str, str]:
    """Return a class's tensor plan, for a model whose base model has the name `prefix`."""
    base = cls.config_class.base_model_tp_plan or {}
    return {f"{prefix}.{pattern}": word for pattern, word in base.items()} | dict(cls._tp_plan or {})


def _has_tables_per_layer(config: Any) -> bool:
    """Return whether a config may add a second token table, whose rows are inputs of all layers (Gemma 3n, Gemma 4)."""
    return hasattr(config, "hidden_size_per_layer_input")


class _Derivation:
    """Entries of a plan, sorted into the fields of a policy."""

    def __init__(self, model: Any, plan: Mapping[str, str]) -> None:
        self.model, self.config, self.plan = model, model.config, plan
        self.named = dict(model.named_modules())
        self.hidden = model.get_input_embeddings().weight.shape[1]
        self.problems: list[str] = []
        self.regions: dict[str, dict[str, list[str]]] = {}
        self.outward: list[str] = []
        self.per_head: list[str] = []
        self.experts: list[str] = []
        self.routers: list[str] = []
        self.head_vectors: list[str] = []
        self.latent: list[str] = []
        self.from_latent: list[str] = []
        vectors = [name for name, p in model.named_parameters() if p.dim() == 1]
        around = {model.get_input_embeddings(), model.get_output_embeddings()}
        for pattern, word in self.plan.items():
            found = [module for name, module in self.named.items() if match([pattern], name)]
            if found and not (word in _AROUND and around.issuperset(found)):
                self._read(pattern, word, found)
            elif not found and word == "colwise" and any(match([pattern], name) for name in vectors):
                self.head_vectors.append(pattern)
        self._left_out()
        if not self._blocks():
            self.problems.append("no list of blocks holds its regions")

    def _read(self, pattern: str, word: str, found: list[nn.Module]) -> None:
        """Read one entry of the plan."""
        is_linear = all(isinstance(module, nn.Linear | Conv1D) for module in found)
        region = pattern.rpartition(".")[0]
        if word in _INWARD and is_linear and any(features(module)[1] != self.hidden for module in found):
            self.from_latent.append(pattern)
        elif word in _INWARD and is_linear:
            self._inward(pattern)
        elif word == "mla_kv_a_proj" and is_linear:
            self._inward(pattern)
            self.latent.append(pattern)
        elif word == "local_params" and any(each.startswith(f"{pattern}.") for each in self.head_vectors):
            pass  # the word only says how transformers implements the plan's other words
        elif word in _OUTWARD and is_linear:
            self.outward.append(pattern)
        elif word == "replicated_with_grad_allreduce":
            self.per_head.append(pattern)
        elif word == "moe_tp_experts":
            self.experts.append(pattern)
            self.routers += [f"{region}.{own}" for own in self._routers(pattern)]
        else:
            self.problems.append(f"{pattern}: {word!r} of {type(found[0]).__name__}")

    def _inward(self, pattern: str) -> None:
        region, _, last = pattern.rpartition(".")
        argument = list(inspect.signature(type(self._first(region)).forward).parameters)[1]
        self.regions.setdefault(region, {}).setdefault(argument, []).append(last)

    def _left_out(self) -> None:
        """Add regions with usual names that the plan does not shard, because transformers itself cannot."""
        by_region: dict[str, dict[str, nn.Module]] = {}
        for name, module in self.named.items():
            if isinstance(module, nn.Linear):
                region, _, last = re.sub(r"\.\d+\.", ".*.", name).rpartition(".")
                by_region.setdefault(region, {}).setdefault(last, module)
        for region, linears in by_region.items():
            usual = next(
                (each for each in _USUAL if each.outward in linears and set(each.needed) <= set(linears)), None
            )
            if usual is None or not set(linears) <= set(usual.known):
                continue
            for last in linears:
                pattern = f"{region}.{last}"
                if last in usual.inward and last not in self._names(region):
                    self._inward(pattern)
                if last in usual.latent and pattern not in self.latent:
                    self.latent.append(pattern)
                if last in usual.from_latent and pattern not in self.from_latent:
                    self.from_latent.append(pattern)
                if last == usual.outward and pattern not in self.outward:
                    self.outward.append(pattern)

    def _names(self, region: str) -> list[str]:
        """Return the names of the region's inward linears."""
        return [name for names in self.regions.get(region, {}).values() for name in names]

    def policy(self) -> Policy:
        """Return the policy: the plan's entries, completed from the model."""
        return Policy(
            blocks=self._blocks(),
            regions={
                region: {argument: tuple(names) for argument, names in of.items()}
                for region, of in self.regions.items()
            },
            outward=tuple(self.outward),
            experts=tuple(self.experts),
            routers=tuple(self.routers),
            per_head=(*self.per_head, *self._scalars(), *self._latent_norms()),
            head_vectors=tuple(self.head_vectors),
            latent=tuple(self.latent),
            from_latent=tuple(self.from_latent),
            inner_norms=tuple(self._inner_norms()),
            fused=self._fused(),
            local=self._local(),
            requires={
                **(WITHOUT_ROUTER_NOISE if self.experts else {}),
                **({"hidden_size_per_layer_input": 0} if _has_tables_per_layer(self.config) else {}),
            },
        )

    def _first(self, pattern: str) -> Any:
        return next(module for name, module in self.named.items() if match([pattern], name))

    def _around(self, pattern: str) -> Any:
        """Return the module around the first module that matches the pattern; not every block has a match."""
        around: nn.Module = self.named[next(name for name in self.named if match([pattern], name)).rpartition(".")[0]]
        return around

    def _routers(self, experts: str) -> list[str]:
        """Return the names of the routers: modules beside the experts with one weight that has a row per expert."""
        rows, beside = self._first(experts).num_experts, self._around(experts).named_children()
        shapes = {own: [tuple(p.shape) for p in module.parameters()] for own, module in beside}
        return [own for own, found in shapes.items() if len(found) == 1 and found[0][:1] == (rows,)]

    def _blocks(self) -> Names:
        """Return the names of the ModuleLists that hold the regions."""
        lists = [name for name, module in self.named.items() if isinstance(module, nn.ModuleList)]
        return tuple(name for name in lists if any(region.startswith(f"{name}.*.") for region in self.regions))

    def _leaves(self, region: str) -> Iterator[tuple[str, nn.Module]]:
        """Yield (pattern, module) of the modules with weights within a region that the plan does not name."""
        known = {*self.outward, *self.per_head, *self.from_latent}
        known |= {f"{region}.{name}" for name in self._names(region)}
        for name, module in self._around(f"{region}.{self._names(region)[0]}").named_modules():
            pattern = f"{region}.{name}"
            if name and pattern not in known and list(module.parameters(recurse=False)):
                yield pattern, module

    def _inner_norms(self) -> Iterator[str]:
        """Yield the norms within regions that are over all output features of an inward linear."""
        for region in self.regions:
            made = {features(self._first(f"{region}.{name}"))[0] for name in self._names(region)}
            for pattern, module in self._leaves(region):
                if any(probe.norm_of(module, length) for length in made):
                    yield pattern

    def _scalars(self) -> Iterator[str]:
        """Yield the activation functions within regions whose weights are single numbers (xIELU)."""
        for region in self.regions:
            for pattern, module in self._leaves(region):
                if all(p.numel() == 1 for p in module.parameters(recurse=False)):
                    yield pattern

    def _latent_norms(self) -> Iterator[str]:
        """Yield the norms within regions that have a latent."""
        regions = {pattern.rpartition(".")[0] for pattern in self.latent}
        for region in regions:
            for pattern, module in self._leaves(region):
                if any(probe.norm_of(module, len(p)) for p in module.parameters(recurse=False) if p.dim() == 1):
                    yield pattern

    def _fused(self) -> dict[str, int | Names]:
        """Return the fused inward linears: those with more output features than the region's outward linear reads."""
        fused: dict[str, int | Names] = {}
        for region in self.regions:
            names = self._names(region)
            ends = [self._first(each) for each in self.outward if each.startswith(f"{region}.")]
            if len(names) != 1 or len(ends) != 1:
                continue
            made, read = features(self._first(f"{region}.{names[0]}"))[0], features(ends[0])[1]
            if self.plan.get(f"{region}.{names[0]}") == "colwise":
                continue  # consecutive rows can be sharded: in GPT-NeoX q, k and v are fused head by head
            if self._attends(region):
                heads, keys = (getattr(self.config, f"num_{each}_heads", 0) for each in ("attention", "key_value"))
                if keys and made * heads == read * (heads + 2 * keys):
                    fused[names[0]] = ("num_attention_heads", "num_key_value_heads", "num_key_value_heads")
            elif made == 2 * read:
                fused[names[0]] = 2
        return fused

    def _attends(self, region: str) -> bool:
        return "ALL_ATTENTION_FUNCTIONS" in inspect.getsource(type(self._first(region)).forward)

    def _local(self) -> dict[str, Names]:
        """Return the attributes with numbers of heads that the code of attention regions reads, by region."""
        local: dict[str, Names] = {}
        for region in self.regions:
            if self._attends(region):
                read = _COUNTS.findall(inspect.getsource(type(self._first(region)).forward))
                if read:
                    local[region] = tuple(dict.fromkeys(read))
        return local
