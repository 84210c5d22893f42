"""Sizes and choices of the vision transformer. No torch."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from colossus.arithmetic import not_a_multiple
from colossus.models.options import Count, Probability, TransformerOptions


def _side(value: Any) -> Any:
    """Return a side of a square as (height, width)."""
    return (value, value) if type(value) is int else tuple(value) if isinstance(value, list) else value


#: height and width; a number is both
Sides = Annotated[tuple[Count, Count], BeforeValidator(_side)]


class ViTOptions(TransformerOptions):
    """Options of the vision transformer: ``model = dict(type="ViT", image_size=224, patch_size=16, ...)``."""

    samples: ClassVar[str] = "images"
    counted: ClassVar[str] = "images"

    #: height and width of an image, or the side of a square
    image_size: Sides = (224, 224)
    #: height and width of a patch, or the side of a square
    patch_size: Sides = (16, 16)
    #: channels of an image
    in_channels: Count = 3
    #: classes of labels
    num_classes: Count = 1000
    #: input of the classifier: the class token, or the mean over all patches without a class token (2205.01580)
    pool: Literal["token", "mean"] = "token"
    #: epsilon of all norms; 1e-6 in the code of the paper, 1e-12 in Hugging Face's
    norm_eps: Annotated[float, Field(gt=0)] = 1e-6
    #: part of a label's weight that is spread over all classes
    label_smoothing: Probability = 0.0

    @property
    def num_patches(self) -> int:
        return math.prod(side // patch for side, patch in zip(self.image_size, self.patch_size, strict=True))

    @property
    def num_tokens(self) -> int:
        """The number of patches, with the class token."""
        return self.num_patches + (self.pool == "token")

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """The shape of an image: [channels, height, width]."""
        return (self.in_channels, *self.image_size)

    def check(self, parallel: Any) -> list[str]:
        problems = [
            not_a_multiple(f"model.image_size: {name}", side, f"model.patch_size: {name} = {patch}", patch)
            for name, side, patch in zip(("height", "width"), self.image_size, self.patch_size, strict=True)
            if side % patch
        ]
        return [*problems, *super().check(parallel)]

    def check_sample(self, shape: tuple[int, ...], label: int | None) -> list[str]:
        """Return the problems of a sample of the data: the shape of its image, its label."""
        problems = []
        if shape != self.image_shape:
            problems.append(
                f"has shape {list(shape)}, but model.in_channels and model.image_size say {list(self.image_shape)} "
                f"(channels, height, width)"
            )
        if label is not None and not 0 <= label < self.num_classes:
            problems.append(
                f"has the label {label}, but model.num_classes = {self.num_classes} (labels 0..{self.num_classes - 1})"
            )
        return problems
