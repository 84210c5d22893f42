"""All plans of a model on so many devices: the layouts, and the plans of each. No torch.

A *layout* is what another profile of the model is needed for: how tensors and tokens are split, over how many ranks
experts are spread, what backward computes again. All else of a plan is arithmetic on top of that profile: data,
pipeline, schedule, microbatches, ZeRO. The space of plans:

- tensor: 1D of any size, with activations split by tokens or not; 2D, 2.5D and 3D on squares and cubes and boxes whose
  sides are within a factor of two of each other, in 2.5D no deeper than wide, each with every scope of weights;
- sequence: ring and Ulysses of any size, and their hybrids, beside no tensor parallelism or 1D;
- experts over every divisor of their number that divides data and sequence;
- activation checkpointing of no, of selected and of full blocks;
- pipelines of any size, by 1F1B, interleaved with 2, 4, 8, .. chunks, ZB-H1 and ZB-V;
- every number of microbatches of at most `MOST_TOKENS` tokens on a rank, or of the fewest samples that can be split;
- ZeRO of every stage, over all data ranks or over those of a host, and of stage 3 without 2D, 2.5D or 3D every scope.

Other keys are those of the config, as is what it says that a model of unknown sizes can do: tensor, sequence and expert
parallelism only where the config has them already.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from colossus.config import Config
from colossus.config.schema import SequenceSection, TensorSection
from colossus.config.training import ActivationCheckpoint

#: of a microbatch on a rank: products do not get faster with more
MOST_TOKENS = 16_384
SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-v")
SCOPES = ("matmul", "microbatch", "step")
_MODES = ("1d", "2d", "2.5d", "3d")


@dataclass(frozen=True)
class ModelLayout:
    """What needs a profile of the model of its own.

    Attributes:
        tensor: with any scope of weights where the mode is 1d: there it is of ZeRO 3, and belongs to the plan.
        sequence: its mode is known where its size is above one.
        expert: ranks that share experts.
    """

    tensor: TensorSection
    sequence: SequenceSection
    expert: int
    activation_checkpoint: ActivationCheckpoint

    @property
    def ranks(self) -> int:
        """Of one copy of the model, pipelines aside."""
        return self.tensor.size * self.sequence.size


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan that fits by arithmetic.

    Attributes:
        config: resolved.
        overrides: what a user types behind the file to have this plan.
    """

    config: Config
    overrides: tuple[str, ...]

    @property
    def samples(self) -> int:
        """Of a microbatch of a data rank."""
        return (
            self.config.train.global_batch_size // (self.config.parallel.data or 1) // self.config.schedule.microbatches
        )


def layouts(
    config: Config, devices: int, *, hosts: int = 1, keep: Mapping[str, Any] | None = None
) -> list[ModelLayout]:
    """Every layout of the space, the likely ones first: few ranks, on one host, little computed again.

    Args:
        hosts: over which the devices are spread equally.
        keep: what stays as given, see `Kept`; precision and whatever else is no part of a plan always does.

    Raises:
        ConfigError: for options of the model, and for ``keep``.
    """
    raise NotImplementedError


def plans(
    config: Config,
    devices: int,
    layout: ModelLayout,
    *,
    hosts: int = 1,
    keep: Mapping[str, Any] | None = None,
    blocks: int | None = None,
) -> list[Candidate]:
    """Every plan of a layout, of few pipeline ranks first.

    Args:
        config: its own plan counts for nothing but for what is kept.
        blocks: into how many stages the model can be cut at most; None: what its options say, else any number.
    """
    raise NotImplementedError
