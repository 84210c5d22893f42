"""What all sections of a config are made of: strict pydantic models, sizes, names of registries. No torch."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
#: waits are counted in milliseconds, in 32 bits
Seconds = Annotated[float, Field(gt=0, le=2_000_000)]
Fraction = Annotated[float, Field(ge=0, le=1)]
#: of a tuple that may be written as a list
FROM_LIST = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
Counts = Annotated[tuple[Count, ...], FROM_LIST]
Names = Annotated[tuple[str, ...], FROM_LIST]


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, types are not converted (a string is not a number)."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        arbitrary_types_allowed=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )


class ShortSection(Section):
    """A section for which one bare value may be written."""

    @classmethod
    def keys_of(cls, bare: Any) -> dict[str, Any] | None:
        """The keys that a bare value stands for; None for one that stands for nothing."""
        raise NotImplementedError

    @model_validator(mode="before")
    @classmethod
    def _bare(cls, value: Any) -> Any:
        if isinstance(value, dict | BaseModel):
            return value
        keys = cls.keys_of(value)
        return value if keys is None else keys


class SizedSection(ShortSection):
    """A section for which a bare number stands for its size."""

    #: number of ranks along the axis
    size: Count = 1

    @classmethod
    def keys_of(cls, bare: Any) -> dict[str, Any] | None:
        return {"size": bare} if is_number(bare) else None


def is_number(value: Any) -> bool:
    """Whether a value is a whole number, which True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def require_type(value: Any) -> Any:
    """A name of a registry, or what stands for it."""
    if callable(value) or (isinstance(value, str) and value):
        return value
    raise ValueError(f"must be a registered name or a callable, got {value!r}")


class Named(ShortSection):
    """Something of a registry: ``dict(type=name or callable, **options)``; a bare name or callable will do."""

    model_config = ConfigDict(extra="allow")

    #: a registered name, or a callable
    type: Annotated[Any, AfterValidator(require_type)]

    @classmethod
    def keys_of(cls, bare: Any) -> dict[str, Any] | None:
        return {"type": bare} if isinstance(bare, str) or callable(bare) else None

    @property
    def options(self) -> dict[str, Any]:
        """The keys that the schema does not know: arguments of the component itself."""
        return dict(self.model_extra or {})

    def spec(self) -> dict[str, Any]:
        """``dict(type=..., **everything else)`` as ``Registry.build`` takes it."""
        return {**{key: getattr(self, key) for key in type(self).model_fields}, **self.options}
