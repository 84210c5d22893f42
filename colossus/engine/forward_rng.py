"""The global generators inside of a forward, for what draws without naming one: `nn.Dropout`, ``random``, numpy."""

from __future__ import annotations

import random
from types import TracebackType

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator

from colossus.context.parallel_context import ParallelContext
from colossus.layers.model_parallel import model_parallel_of
from colossus.random import GlobalRng, hash_key


class ForwardRng:
    """Inside, the global generators start from the place in the run; outside they are untouched.

    So what a forward draws does not depend on what was drawn before it: on this rank or another one, by the user's loop
    or by the stages of a pipeline, before a resume or after it.

    Torch's generators draw for samples and tokens: ranks that hold the same ones draw the same numbers, others draw
    other ones. Python's ``random`` and numpy's legacy generator draw for the program (which layers to skip, say): all
    ranks of one model draw the same.
    """

    def __init__(self, context: ParallelContext) -> None:
        self._context = context
        self._torch = GlobalRng(tuple({torch.device("cpu"), context.device}), torch_only=True)
        self._numpy = np.random.MT19937(0)
        shard = model_parallel_of(context).regions.whole.batch
        self._shard_index = context.index(shard), context.index("sequence")
        self._data_index = context.index("data")
        self._position: tuple[object, ...] = ()
        #: number of evaluation forwards of each stage since the last training step
        self._evaluations: dict[int, int] = {}

    def at(self, stage: int, microbatch: int, *, training: bool) -> ForwardRng:
        """This object, to be entered for a forward of a stage at the current step."""
        if training:
            self._evaluations.clear()
            self._position = self._context.rng.step, microbatch, stage
        else:
            count = self._evaluations[stage] = self._evaluations.get(stage, 0) + 1
            self._position = "evaluation", self._context.rng.step, count, stage
        return self

    def __enter__(self) -> None:
        seed = self._context.rng.seed
        self._outside = self._torch.get_state(), random.getstate(), get_bit_generator()
        self._torch.seed(hash_key(seed, "torch", *self._shard_index, *self._position))
        for_program = hash_key(seed, "python", self._data_index, *self._position)
        random.seed(for_program)
        # swapped, because copying its state in and out takes longer than all the rest
        set_bit_generator(self._numpy)
        np.random.seed(for_program % 2**32)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        of_torch, of_python, of_numpy = self._outside
        self._torch.set_state(of_torch)
        random.setstate(of_python)
        set_bit_generator(of_numpy)


def seed_outside(context: ParallelContext) -> None:
    """Seed the global generators for what is drawn outside of forwards: all ranks of one model draw the same.

    The shuffle of a user's own DataLoader, say.
    """
    seed = context.rng.key("torch", context.index("data"))
    GlobalRng(tuple({torch.device("cpu"), context.device})).seed(seed)
