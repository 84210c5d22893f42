"""This rank's shards of the model that a config or a caller names, checked against those of other ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from colossus.config import Config
from colossus.construct.build_model import build
from colossus.context.parallel_context import ParallelContext
from colossus.context.precision import LOW
from colossus.data_parallel.strategy import Strategy
from colossus.engine.checkpointed_modules import with_activation_checkpoint
from colossus.engine.consistency import hashes_of_existing, require_same_values
from colossus.engine.forward_rng import seed_outside
from colossus.engine.pipeline import PipelineRuntime
from colossus.layers.model_parallel import model_parallel_of
from colossus.layers.patch import PatchEmbedding
from colossus.layout.parameter import num_parameters
from colossus.registry import MODELS
from colossus.sparse.survey import survey
from colossus.sparse.table_group import require_optimizer_of_tables
from colossus.tensor_parallel.dtypes import set_gradient_dtype


@dataclass
class RankModel:
    """A model on a rank.

    Attributes:
        with_tables: whether the whole model has tables with sparse gradients.
        num_parameters: elements of the whole model.
    """

    module: nn.Module
    with_tables: bool
    num_parameters: int


def build_rank_model(
    config: Config,
    context: ParallelContext,
    model: Callable[[], nn.Module] | None,
    strategy: Strategy,
    pipeline: PipelineRuntime,
    *,
    has_optimizer: bool,
) -> RankModel:
    """This rank's shards of the model, whose first values are compared over ranks."""
    spec = config.model
    factory = model if model is not None else (lambda: MODELS.build(spec.spec()))  # type: ignore[union-attr]
    factory = with_activation_checkpoint(factory, config.train.activation_checkpoint)
    existing: dict[str, str] = {}
    with_tables, of_whole = False, 0

    def prepare(whole: nn.Module) -> None:
        nonlocal with_tables, of_whole
        of_whole = num_parameters(whole)
        if context.world_size > 1:
            existing.update(hashes_of_existing(whole))
        tables = survey(whole, context)
        with_tables = bool(tables.untied)
        require_optimizer_of_tables(config.optimizer, with_tables, is_given=has_optimizer)
        strategy.check_tables(tables)
        pipeline.split(whole)
        strategy.prepare(whole, context)

    precision = context.precision
    module = build(factory, context, dtype=precision.params, wide_dtype=precision.data, prepare=prepare)
    require_same_values(module, existing, context)
    for param in module.parameters():
        if param.dtype in LOW:
            set_gradient_dtype(param, precision.gradients)
    _require_position_wise(module, context)
    if pipeline.partition is None and not any(param.requires_grad for param in module.parameters()):
        raise ValueError(f"{type(module).__name__} has no parameter to train")
    seed_outside(context)
    return RankModel(module, with_tables, of_whole)


def _require_position_wise(model: nn.Module, context: ParallelContext) -> None:
    """Under sequence parallelism, that no module is there to mix tokens: it would see the tokens of one rank.

    What is seen when they run only, `ShardedTensor` refuses.
    """
    if model_parallel_of(context).sequence is None:
        return
    mixing = (nn.MultiheadAttention, nn.RNNBase, PatchEmbedding)
    for name, module in model.named_modules():
        if isinstance(module, mixing):
            raise ValueError(
                f"{name or 'the model'} ({type(module).__name__}) mixes tokens, but parallel.sequence gives each of "
                f"{context.size('sequence')} ranks a part of them: use colossus.layers.Attention, and what works on "
                f"each token by itself"
            )
