"""The model as rules read it, `cx.model`: its family, and the sizes that a config of any kind may have."""

from __future__ import annotations

from typing import TypeVar

from dslpar.linter.problem import UnknownValueError, require
from dslpar.schema import sections

Family = TypeVar("Family", bound=sections.Model)


class RequestedModel:
    """The model of the config. A member raises UnknownValueError if its value is unknown."""

    def __init__(self, spec: sections.Spec, invalid: frozenset[str], by_program: bool) -> None:
        self._spec = spec
        self._invalid = invalid
        self.by_program = by_program
        """Whether the config has no model because a program passes it."""

    def of(self, family: type[Family]) -> Family:
        """Return the model if it is of that family, or of any family if `family` is `sections.Model`."""
        return require(self._spec.model, family)

    @property
    def other(self) -> sections.OtherModel:
        """The model, if the config names a class that is not a dslpar family."""
        return require(self._spec.model, sections.OtherModel)

    @property
    def unlisted(self) -> str:
        """The name of the model's class if the config does not list its layers; empty if the layers are known."""
        if self.by_program:
            return "the program's model"
        if "model.layers_cfg" in self._invalid:
            raise UnknownValueError("model.layers_cfg")
        model = self._spec.model
        return "" if isinstance(model, sections.Model) or model.num_layers is not None else model.target

    @property
    def num_layers(self) -> int:
        """Number of layers that a pipeline partitions; unknown if the config does not determine it."""
        layers = None if self.unlisted else self._spec.model.num_layers
        if layers is None:
            raise UnknownValueError("layers")
        return layers

    @property
    def vocabulary(self) -> tuple[int, str]:
        """The size of the vocabulary, and its key."""
        model = self._spec.model
        return (
            (model.vocab_size, "model.vocab_size")
            if isinstance(model, sections.TokenModel)
            else self._size_of_transformers("vocab")
        )

    @property
    def longest_sequence(self) -> tuple[int, str]:
        """The longest sequence in tokens, and its key; unknown if a transformers config does not have it."""
        model = self._spec.model
        if isinstance(model, sections.TokenModel):
            return model.max_seq_len, "model.max_seq_len"
        found, key = self._size_of_transformers("positions")
        return found - self.unused_positions, key

    @property
    def unused_positions(self) -> int:
        """Rows of the position table that no token uses: RoBERTa's positions start after the id of its padding."""
        model = self._spec.model
        config = None if isinstance(model, sections.Model) else model.transformers
        return config.unused_positions if config is not None else 0

    def _size_of_transformers(self, size: str) -> tuple[int, str]:
        """Return a size of a transformers model, and its key; unknown if neither its config nor its class has it."""
        config = self.other.transformers
        found = config.size(size) if config is not None else None
        if config is None or found is None:
            raise UnknownValueError(size)
        return found, f"model.config.{config.key(size)}"
