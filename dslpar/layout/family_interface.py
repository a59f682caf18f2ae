"""Interface of a model family to the layout: the module `layout` in the family's package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar, cast

from dslpar.core.mesh import TensorMesh
from dslpar.layout import listed_layers, transformers_sizes
from dslpar.layout.divisors import Condition, batch, sequence
from dslpar.layout.inferred_value import InferredValue
from dslpar.layout.stages import Weights
from dslpar.schema import families
from dslpar.schema.sections import Model, OtherModel

Family = TypeVar("Family", bound=Model, contravariant=True)
Known = TypeVar("Known", bound=Model)


class FamilyLayout(Protocol[Family]):
    """Conditions, layer weights and inferred fields of one family; `model` is its section."""

    def conditions(self, model: Family, cuboid: TensorMesh, seq_len: int) -> Sequence[Condition]:
        """Return the divisibility conditions; `seq_len` is 0 if not known."""
        ...

    def padding(self, model: Family, cuboid: TensorMesh) -> Sequence[Condition]:
        """Return the sizes that need not be divisible, because they are padded, with their padded values."""
        ...

    def pipeline_weights(self, model: Family, method: str, seq_len: int) -> Weights:
        """Return the weights of layers by 'cost', 'parameters' or 'type:REGEX'."""
        ...

    def class_names(self, model: Family) -> Sequence[str]:
        """Return the class names of the layers, each once, in order; 'type:REGEX' matches them."""
        ...

    def inferred(self, model: Family, field: str) -> InferredValue | None:
        """Return the value of a field that was left out; None if it does not follow from other fields."""
        ...


def layout_of(model: Known) -> FamilyLayout[Known]:
    """Return the layout module of the family of `model`."""
    return cast("FamilyLayout[Known]", families.family_module(model, "layout"))


def is_chain(model: Model | OtherModel) -> bool:
    """Return whether the model may run as a pipeline and with several micro-batches per step, by its family."""
    return not isinstance(model, Model) or bool(getattr(layout_of(model), "IS_CHAIN", True))


def splits_sequences(model: Model | OtherModel) -> bool:
    """Return whether attention can run over split sequences: dslpar knows it, and only masks change its scores."""
    if isinstance(model, Model):
        return getattr(model, "num_heads", None) is not None
    config = model.transformers
    if config is None:
        return False
    from dslpar.schema.transformers_policies import POLICIES  # reads a table

    policy = POLICIES.get(config.model)
    if policy and (policy.own_attention or policy.head_vectors):
        return False
    return not any(transformers_sizes.beyond_masks(config.values))


def conditions(model: Model | OtherModel, cuboid: TensorMesh, seq_len: int = 0, micro_size: int = 0) -> list[Condition]:
    """Return all divisibility conditions of a job, except divisions by 1; a size of 0 is not known."""
    found = [*batch(micro_size, cuboid)]
    if isinstance(model, Model):
        found += layout_of(model).conditions(model, cuboid, seq_len)
    elif model.transformers is not None:
        found += transformers_conditions(model, cuboid, seq_len)
    return [each for each in found if each.by > 1]


def transformers_conditions(model: OtherModel, cuboid: TensorMesh, seq_len: int) -> list[Condition]:
    """Return the divisibility conditions of a transformers model; the keys are those of `model.config`."""
    return [
        *(
            each._replace(key=f"model.config.{each.key}")
            for each in transformers_sizes.conditions(model.transformers, cuboid)
        ),
        *sequence(seq_len, cuboid),
    ]


def pipeline_weights(model: Model | OtherModel, method: str, seq_len: int) -> Weights | None:
    """Return the weights of layers by 'cost', 'parameters' or 'type:REGEX'; None if that needs the built layers."""
    if isinstance(model, Model):
        return layout_of(model).pipeline_weights(model, method, seq_len)
    if model.transformers is not None:
        from dslpar.layout import transformers_costs  # few configs

        return transformers_costs.pipeline_weights(model.transformers, method, seq_len)
    return listed_layers.weights(model, method)
