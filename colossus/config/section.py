"""Parts of all sections of a config: strict pydantic models, sizes, names of registries. No torch."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
#: limited, since waits are counted in milliseconds, in 32 bits
Seconds = Annotated[float, Field(gt=0, le=2_000_000)]
Fraction = Annotated[float, Field(ge=0, le=1)]
#: validator of a tuple that may be written as a list
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
    """A section that may be written as one bare value."""

    @classmethod
    def keys_of(cls, bare: Any) -> dict[str, Any] | None:
        """Return the keys that a bare value sets; None if no such value is allowed."""
        raise NotImplementedError

    @model_validator(mode="before")
    @classmethod
    def _bare(cls, value: Any) -> Any:
        if isinstance(value, dict | BaseModel):
            return value
        keys = cls.keys_of(value)
        return value if keys is None else keys


class SizedSection(ShortSection):
    """A section whose bare number is its size."""

    #: number of ranks along the axis
    size: Count = 1

    @classmethod
    def keys_of(cls, bare: Any) -> dict[str, Any] | None:
        return {"size": bare} if is_number(bare) else None


def is_number(value: Any) -> bool:
    """Return whether a value is a whole number; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def require_type(value: Any) -> Any:
    """Return a registered name or a callable; raise ValueError for any other value."""
    if callable(value) or (isinstance(value, str) and value):
        return value
    raise ValueError(f"must be a registered name or a callable, got {value!r}")


class Named(ShortSection):
    """A component of a registry, ``dict(type=name or callable, **options)``, or its bare name or callable."""

    model_config = ConfigDict(extra="allow")

    #: a registered name, or a callable
    type: Annotated[Any, AfterValidator(require_type)]

    @classmethod
    def keys_of(cls, bare: Any) -> dict[str, Any] | None:
        return {"type": bare} if isinstance(bare, str) or callable(bare) else None

    @property
    def options(self) -> dict[str, Any]:
        """Keys that the schema does not have: arguments of the component itself."""
        return dict(self.model_extra or {})

    def spec(self) -> dict[str, Any]:
        """Return ``dict(type=..., **everything else)``, the argument of ``Registry.build``."""
        return {**{key: getattr(self, key) for key in type(self).model_fields}, **self.options}
