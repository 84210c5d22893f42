"""Options of the models that come with colossus. No torch."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from colossus.arithmetic import either, nearest_multiples, not_a_multiple
from colossus.layers.block_options import RotaryScaling
from colossus.models.transformer_options import Count, Probability, TransformerOptions, shardings_of
from colossus.registry import SEQUENCE_MODES
from colossus.sequence_parallel.modes import cheaper, length_multiple


class DecoderOptions(TransformerOptions):
    """What every language model here can be told."""

    block_names: ClassVar[str] = "embedding, layers, head"
    token_key: ClassVar[str | None] = "seq_len"
    #: tables with a row for each position from the first: a model with fewer takes the first rows of another's
    positions_by_row: ClassVar[tuple[str, ...]] = ("positions.weight",)
    #: whether a model gives logits of all words
    generates: ClassVar[bool] = True

    #: tokens of a sequence
    seq_len: Count = 128
    #: number of tokens; padded inside of the model when it does not divide by the tensor ranks
    vocab_size: Count = 256
    #: base of the rotary positions: 10000 in Llama 2, 500000 in Llama 3
    rotary_base: Annotated[float, Field(gt=1)] = 10000.0
    #: of Llama 3.1 and later: dict(factor=8.0, original_max_position_embeddings=8192), say
    rotary_scaling: RotaryScaling | None = None
    #: the head uses the weight of the embedding
    tie_embeddings: bool = True
    #: the gradient of the embedding is of the rows that a batch touches (`colossus.layers.Embedding`, sparse)
    sparse_embeddings: bool = False
    #: part of a label's weight that is spread over all classes
    label_smoothing: Probability = 0.0
    #: weight of the squared logarithm of the softmax' divisor, which keeps logits small
    z_loss: Annotated[float, Field(ge=0)] = 0.0

    def sequence_mode(self, parallel: Any) -> str:
        """Of ring and Ulysses the one that sends fewer bytes for this attention."""
        ways = self._head_ways(parallel)
        heads, kv_heads = max(1, self.num_heads // ways), max(1, self.num_kv_heads // ways)
        return cheaper(self.seq_len, heads, kv_heads, self.head_dim, parallel.sequence.size)

    def _head_ways(self, parallel: Any) -> int:
        """Over how many ranks tensor parallelism splits the heads."""
        shardings = shardings_of(parallel.tensor) if parallel.tensor.size > 1 else None
        return shardings.ways(shardings.regions.inner.features) if shardings is not None else 1

    def check_sequence(self, parallel: Any) -> list[str]:
        sequence = parallel.sequence
        if sequence.size == 1:
            return []
        problems = []
        mode = SEQUENCE_MODES.get(sequence.mode or "ring")
        try:
            sizes = mode.axis_sizes(sequence.size, sequence.ulysses)
        except ValueError:
            return []  # the plan itself is refused for it
        ring, ulysses = (math.prod(sizes[axis] for axis in axes) for axes in (mode.ring, mode.ulysses))
        step = length_multiple(ring, ulysses)
        if self.seq_len % step and not sequence.pad:
            halves = f" (two chunks for each of the {ring} ranks of the ring)" if ring > 1 else ""
            by = f"{step}, into which parallel.sequence.size = {sequence.size} in mode {mode.name} cuts it{halves}"
            problems.append(f"{not_a_multiple('model.seq_len', self.seq_len, by, step)}; or parallel.sequence.pad=True")
        ways = self._head_ways(parallel) * ulysses
        for key, heads in (("num_heads", self.num_heads), ("num_kv_heads", self.num_kv_heads)):
            if heads % ways and ulysses > 1:
                near = either(nearest_multiples(heads, ways))
                tensor = f" x {ways // ulysses} of the tensor mode" if ways > ulysses else ""
                problems.append(
                    f"model.{key} = {heads} is not a multiple of {ways}: parallel.sequence.mode = {mode.name} gives "
                    f"each of its {ulysses} ranks{tensor} whole heads; use mode 'ring', or {near} heads"
                )
        if self.attention_dropout:
            problems.append(
                f"model.attention_dropout = {self.attention_dropout} is not there under parallel.sequence; set it to 0"
            )
        return problems

    def check(self, parallel: Any) -> list[str]:
        """What is wrong with these sizes in any run, and under the ``parallel`` section; one line per problem."""
        problems = super().check(parallel)
        if self.sparse_embeddings and self.tie_embeddings:
            problems.append(
                "model.sparse_embeddings = True, but model.tie_embeddings = True shares the table with a head, whose "
                "softmax gives all rows a gradient: set tie_embeddings=False, or leave sparse_embeddings out"
            )
        return problems


class GPTOptions(DecoderOptions):
    """Options of the GPT: ``model = dict(type="GPT", num_layers=8, ...)``."""

    #: of tokens
    positions: Literal["learned", "rotary"] = "learned"

    @property
    def is_rotary(self) -> bool:
        return self.positions == "rotary"

    def check(self, parallel: Any) -> list[str]:
        """What is wrong with these sizes in any run, and under the ``parallel`` section; one line per problem."""
        default = type(self).model_fields
        return super().check(parallel) + [
            f"model.{key} = {getattr(self, key)!r} says how positions are rotated, but model.positions = "
            f"{self.positions!r}; set positions='rotary', or leave {key} out"
            for key in ("rotary_base", "rotary_scaling")
            if not self.is_rotary and getattr(self, key) != default[key].default
        ]


class LlamaOptions(DecoderOptions):
    """Options of Llama: ``model = dict(type="Llama", num_layers=32, num_kv_heads=8, rotary_base=500000.0, ...)``."""

    norm: Literal["rmsnorm"] = "rmsnorm"
    mlp: Literal["swiglu"] = "swiglu"
    #: of all norms
    norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    bias: bool = False
    tie_embeddings: bool = False

    @property
    def is_rotary(self) -> bool:
        return True


def _side(value: Any) -> Any:
    """A side of a square as (height, width)."""
    is_side = isinstance(value, int) and not isinstance(value, bool)
    return (value, value) if is_side else tuple(value) if isinstance(value, list) else value


#: height and width; a number is both
Sides = Annotated[tuple[Count, Count], BeforeValidator(_side)]


class ViTOptions(TransformerOptions):
    """Options of the vision transformer: ``model = dict(type="ViT", image_size=224, patch_size=16, ...)``."""

    block_names: ClassVar[str] = "patches, layers, head"
    samples: ClassVar[str] = "images"
    counted: ClassVar[str] = "images"

    #: of an image, or a side
    image_size: Sides = (224, 224)
    #: of a patch, or a side
    patch_size: Sides = (16, 16)
    #: channels of an image
    in_channels: Count = 3
    #: classes of labels
    num_classes: Count = 1000
    #: what is classified: the class token, or the mean over all patches (2205.01580), then without a class token
    pool: Literal["token", "mean"] = "token"
    #: of all norms; 1e-6 in the code of the paper, 1e-12 in Hugging Face's
    norm_eps: Annotated[float, Field(gt=0)] = 1e-6
    #: part of a label's weight that is spread over all classes
    label_smoothing: Probability = 0.0

    @property
    def num_patches(self) -> int:
        return math.prod(side // patch for side, patch in zip(self.image_size, self.patch_size, strict=True))

    @property
    def num_tokens(self) -> int:
        """Patches, and the class token."""
        return self.num_patches + (self.pool == "token")

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """[channels, height, width]"""
        return (self.in_channels, *self.image_size)

    def check(self, parallel: Any) -> list[str]:
        """What is wrong with these sizes in any run, and under the ``parallel`` section; one line per problem."""
        problems = [
            not_a_multiple(f"model.image_size: {name}", side, f"model.patch_size: {name} = {patch}", patch)
            for name, side, patch in zip(("height", "width"), self.image_size, self.patch_size, strict=True)
            if side % patch
        ]
        return [*problems, *super().check(parallel)]

    def check_sample(self, shape: tuple[int, ...], label: int | None) -> list[str]:
        """What is wrong with a sample of the data: the shape of its image, its label."""
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

    def check_sequence(self, parallel: Any) -> list[str]:
        size = parallel.sequence.size
        if size == 1:
            return []
        token = " and the class token" if self.pool == "token" else ""
        return [
            f"parallel.sequence.size = {size} splits the tokens of a batch before it enters the model, but ViT takes "
            f"images and makes its {self.num_tokens} tokens ({self.num_patches} patches{token}) of them: use "
            f"parallel.tensor.sequence_sharded"
        ]
