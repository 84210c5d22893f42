"""A language model for inference: this rank's shards of it under a plan, and the logits of the next token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from colossus.checkpoint.rank_errors import on_all_ranks
from colossus.checkpoint.weight_sources import open_weights
from colossus.comm import collectives, shared_memory
from colossus.config import Config, model_options
from colossus.construct.build_model import build
from colossus.context.parallel_context import ParallelContext
from colossus.context.world import pick_device
from colossus.engine.inputs import batch_axes
from colossus.inference.config import WeightSource, generation_config
from colossus.layers import to_whole
from colossus.layers.embedding import PositionEmbedding
from colossus.layers.kv_cache import KeyValueCache
from colossus.layers.model_parallel import BatchInfo, model_parallel_of
from colossus.layers.pipeline_block import run_blocks
from colossus.layout.split_parameter import as_shards
from colossus.models.transformer import Transformer
from colossus.registry import MODELS
from colossus.schedule.pipeline import PipelineRuntime
from colossus.state.model_parts import buffer_parts, parameter_parts
from colossus.state.model_state_dict import whole_tensors
from colossus.state.parameters import load_matched, require_same_model


class TextModel:
    """A language model under a plan; `load_model` returns one.

    Attributes:
        module: this rank's shards, in eval mode, without gradients.
        context: ranks, axes, groups.
        row_multiple: the number of rows of a batch is a multiple of it, so that the ranks can split them.
        num_positions: the number of positions that the model has learned; None without a limit.
        vocab_size: the size of the vocabulary; None if the model does not tell.
        can_cache: a token can be computed from a cache of those before it. Model classes declare that with
            ``key_value_cache = True``, as ours do; other models take whole sequences.
    """

    def __init__(self, config: Config, context: ParallelContext, module: nn.Module, pipeline: PipelineRuntime) -> None:
        self.context, self.module = context, module
        self._parallel = model_parallel_of(context)
        self._autocast = context.precision.autocast(context.device)
        self._stages, self._pipeline = _Stages(pipeline, module), pipeline
        self._executor = pipeline.make_executor(self._stages, self._parallel) if pipeline.partition else None
        self._chain = None if self._executor is not None else _chain_of(module)
        self._axes = batch_axes(context)
        ways, index = (context.size(self._axes), context.index(self._axes)) if self._axes else (1, 0)
        self.row_multiple, self._rows_index = ways * context.size("data"), context.index("data") * ways + index
        self._world = context.group(context.grid.names)
        positions = [layer.num_positions for layer in module.modules() if isinstance(layer, PositionEmbedding)]
        self.num_positions = min(positions, default=None)
        self.vocab_size = getattr(model_options(config), "vocab_size", None)
        self.can_cache = bool(getattr(module, "key_value_cache", False))

    def logits(self, ids: Tensor, cache: KeyValueCache | None = None, *, only_last: bool = True) -> Tensor | None:
        """Return the logits of this rank's rows, with the whole vocabulary. Collective.

        Args:
            ids: [rows, tokens] of the whole batch, the same on all ranks; rows a multiple of `row_multiple`. With a
                cache these tokens follow those in it, and are added to it.
            only_last: return the logits of the last token of each row.

        Returns:
            [rows / ranks that split them, tokens or 1, vocabulary], see `rows`; None except on the last pipeline stage.
        """
        local = ids[self.rows(len(ids))].to(self.context.device, non_blocking=True)
        info = BatchInfo(cache=cache, only_last_token=only_last)
        with torch.inference_mode(), self.context, self._parallel.batch(info), self._autocast:
            out = self._run(local)
            if cache is not None:
                cache.advance(ids.shape[1])
            if not self._stages.has_last:
                return None
            if getattr(out, "ndim", None) != 3:
                raise ValueError(
                    f"{type(self.module).__name__}: its output is not logits [batch, tokens, vocabulary] (for a model "
                    f"of transformers' own code, `colossus checkpoint convert --to hf` writes a folder that its own "
                    f"generate takes)"
                )
            logits = to_whole(out)
            return logits[:, -1:] if only_last else logits

    def _run(self, ids: Tensor) -> Any:
        if self._executor is None:
            return self.module(ids) if self._chain is None else run_blocks(self._chain, ids)
        self._executor.run(self._pipeline.forward_actions(1), [ids])
        return self._stages.output

    def rows(self, count: int) -> slice:
        """Return the slice of ``count`` rows that this rank computes."""
        size = count // self.row_multiple
        return slice(self._rows_index * size, (self._rows_index + 1) * size)

    def agree(self, count: int, of_rows: Tensor | None) -> Tensor:
        """Return the ids of all rows, on all ranks, from the ids of each rank's rows. Collective.

        Args:
            of_rows: int64 [rows of this rank], on the last pipeline stage; among ranks with the same rows, one rank
                sends.
        """
        if self._world.size == 1:
            assert of_rows is not None
            return of_rows
        out = torch.zeros(count, dtype=torch.int64, device=self.context.device)
        split = {*self.context.grid.axes("data"), *self._axes, "pipeline"}
        is_sender = all(index == 0 for axis, index in self.context.coordinates.items() if axis not in split)
        if of_rows is not None and is_sender:
            out[self.rows(count)] = of_rows
        return collectives.all_reduce(out, self._world, owned=True).wait()

    def close(self) -> None:
        self._pipeline.close()
        self.context.close()


class _Stages:
    """The stages of this rank with the methods that the executor calls for forwards.

    Attributes:
        output: the output of the last stage.
    """

    def __init__(self, pipeline: PipelineRuntime, module: nn.Module) -> None:
        self._forwards = pipeline.stage_forwards(module)
        self._last_stage = pipeline.last_stage
        self.has_last = self._last_stage in self._forwards
        self.output: Any = None
        self._nothing = torch.zeros(())

    def forward(self, stage: int, microbatch: int, value: Any, batch: Any) -> Any:
        out = self._forwards[stage](value if stage else batch)
        if stage != self._last_stage:
            return out
        self.output = out
        return self._nothing, self._nothing  # in place of a loss and its count

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} belongs to a backward")


def load_model(
    source: WeightSource, config: Config | None = None, *, overrides: Sequence[str] = (), config_file: str | None = None
) -> TextModel:
    """Return the model of a checkpoint, with its weights, under a plan. Collective over the ranks of the plan.

    Args:
        source: the result of `find_source`.
        config: the result of `generation_config`; by default it is made from the other arguments.

    Raises:
        CheckpointError: on all ranks, when it is damaged or of another model.
        ValueError: the plan cannot split the model's sizes.
    """
    config = config or generation_config(source, overrides, config_file)
    shared_memory.enable(config.comm.shared_memory)
    context = ParallelContext.from_config(config, device=pick_device(config.device, config.comm.backend))
    try:
        pipeline, precision = PipelineRuntime(config, context), context.precision
        assert config.model is not None
        module = build(
            partial(MODELS.build, config.model.spec()),
            context,
            dtype=precision.params,
            wide_dtype=precision.data,
            draw=False,
            prepare=pipeline.split,
        )
        module.requires_grad_(False)
        module.eval()
        _load(source, module, context)
        return TextModel(config, context, module, pipeline)
    except BaseException:
        context.close()
        raise


@torch.no_grad()
def _load(source: WeightSource, module: nn.Module, context: ParallelContext) -> None:
    world = context.group(context.grid.names)
    with as_shards(), on_all_ranks(world, lambda: open_weights(source.folder, source.average)) as reader:
        reader.verify(world)
        parts = [*parameter_parts(module, context), *buffer_parts(module)]
        match = require_same_model(reader, whole_tensors(module, context))
        on_all_ranks(world, lambda: load_matched(reader, match, parts, None))


def _chain_of(module: nn.Module) -> list[Callable[[Any], Any]] | None:
    """Return the links of a model whose ``forward`` only calls them, made once instead of in each forward.

    Parameters and submodules also become plain attributes, which Python finds ten times as fast as those of a module: a
    token of a small model takes some hundred lookups. A new assignment replaces both.
    """
    if not isinstance(module, Transformer) or module._forward_hooks or module._forward_pre_hooks:
        return None
    for layer in module.modules():
        vars(layer).update(layer._parameters)
        vars(layer).update(layer._modules)
    return list(module.pipeline_blocks())
