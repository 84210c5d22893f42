"""Folders of models with adapters of peft: the adapters alone, or merged into the weights of their model.

peft and transformers write both. They need their own modules for that, not those that `colossus.parallelize` made: rank
0 makes the model again from its configs and fills in the values that the plan has spread over ranks.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from colossus.arithmetic import listed
from colossus.checkpoint.durable import flush, new_folder
from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.part import Part
from colossus.checkpoint.rank_errors import on_all_ranks
from colossus.checkpoint.weight_sources import Assets, write_assets
from colossus.checkpoint.weights_only import require_finite
from colossus.comm.objects import all_gather_object, broadcast_object
from colossus.context.parallel_context import ParallelContext
from colossus.hf.native import original_config
from colossus.layout.parameter import logical_parameters


def has_adapters(model: Any) -> bool:
    """Return whether a model has adapters of peft.

    Raises:
        CheckpointError: the model has adapters without peft's own class around it.
    """
    if not getattr(model, "peft_config", None):
        return False
    if not hasattr(model, "get_base_model"):
        raise CheckpointError(
            f"{type(model).__name__} has adapters from add_adapter, or inject_adapter_in_model: make it with "
            f"peft.get_peft_model(model, config), and colossus.hf.save writes an adapter folder, or the merged model"
        )
    return True


def plan_adapters(
    model: Any,
    context: ParallelContext,
    tensors: Mapping[str, Part],
    *,
    merge: bool,
    dtype: torch.dtype | None,
) -> tuple[PeftFolder | None, list[str]]:
    """Return what rank 0 writes (None on other ranks) and the names of the tensors that it needs. Collective.

    Raises:
        CheckpointError: on all ranks, see `PeftFolder`.
    """
    world = context.group(context.grid.names)
    mine = [entry.name for entry in logical_parameters(model) if entry.parameter.requires_grad]
    trained = {name for names in all_gather_object(mine, world) for name in names}
    folder = on_all_ranks(
        world,
        lambda: PeftFolder(model, tensors, trained, merge, dtype) if context.is_logging_rank else None,
        names_ranks=False,
    )
    return folder, broadcast_object([] if folder is None else folder.names, world, 0)


class PeftFolder:
    """A model with adapters as peft has it in one process, on the rank that writes.

    Args:
        model: the engine's model.
        tensors: its parameters and buffers by first name.
        trained: names of the parameters that are trained.
        merge: merge the adapters into the weights, so that this rank holds all weights in host memory; else write only
            the adapters.
        dtype: the dtype of the written tensors; None: each tensor's own.

    Attributes:
        names: the tensors that are written, or needed to merge.

    Raises:
        CheckpointError: the model is none of transformers', its adapters cannot be merged, or a trained parameter has
            no place in the folder.
    """

    def __init__(
        self,
        model: Any,
        tensors: Mapping[str, Part],
        trained: set[str],
        merge: bool,
        dtype: torch.dtype | None,
    ) -> None:
        self._merge, self._dtype, self._tensors = merge, dtype, tensors
        base, configs = model.get_base_model(), copy.deepcopy(model.peft_config)
        if not hasattr(getattr(base, "config", None), "to_dict"):
            raise CheckpointError(
                f"{type(base).__name__} is not a model of transformers, and peft reads folders of no others"
            )
        if merge and any(config.is_prompt_learning for config in configs.values()):
            raise CheckpointError(
                "adapters that put tokens before a text (prompts, prefixes) cannot be merged into weights: leave merge "
                "out, which writes an adapter folder"
            )
        with torch.random.fork_rng(devices=()):  # other ranks draw nothing here, and generators must stay equal
            with torch.device("cpu" if merge else "meta"):
                plain = type(base)(original_config(base, model))
            self._model = _adapted(plain, configs)
        if len(configs) > 1:
            self._model.base_model.set_adapter(model.active_adapters)
        self._is_transposed = {
            name
            for name, module in self._model.named_modules()
            if _is_conv1d(module) and not _is_conv1d(model.get_submodule(name))
        }
        self.names = [*tensors] if merge else self._names_of_adapters(trained)

    def _names_of_adapters(self, trained: set[str]) -> list[str]:
        from peft import get_peft_model_state_dict

        state = self._model.state_dict(keep_vars=True)
        chosen = {
            id(value)
            for name in self._model.peft_config
            for value in get_peft_model_state_dict(self._model, state, name).values()
        }
        by_first = {alias: first for first, tensor in self._tensors.items() for alias in tensor.names}
        names = [name for name, value in state.items() if id(value) in chosen or name.startswith("prompt_encoder.")]
        if missing := sorted(trained - set(names)):
            raise CheckpointError(
                f"{listed(missing)}: trained, but no part of an adapter folder. Save the merged model, "
                f"colossus.hf.save(engine, .., merge=True), or list it in modules_to_save"
            )
        return [*dict.fromkeys(by_first[name] for name in names)]

    def write(
        self, target: Path, parts: Iterable[tuple[str, Tensor]], assets: Assets, max_shard_bytes: int,
        on_tensor: Callable[[int], None],
    ) -> None:  # fmt: skip
        """Write the folder; it gets its name when it is complete.

        Args:
            target: the folder, which must not exist.
            parts: first name and value of each of the whole tensors ``names``.
            assets: files of the source that are copied (tokenizer, settings of generation).
            max_shard_bytes: the largest size of a file of weights.
            on_tensor: called with the bytes of each tensor.
        """
        for first, value in parts:
            self._fill_in(first, value)
            on_tensor(value.numel() * value.element_size())
        with new_folder(target) as folder:
            if self._merge:
                self._merged().save_pretrained(folder, max_shard_size=max_shard_bytes)
            else:
                self._model.save_pretrained(folder)
            write_assets(assets.files, folder)
            for path in folder.rglob("*"):
                flush(path)

    def _fill_in(self, first: str, value: Tensor) -> None:
        """Put a tensor into all its places in the model."""
        cast = value.detach().to("cpu", self._dtype if value.is_floating_point() else None)
        require_finite(cast, first, value)
        parameters: dict[bool, nn.Parameter] = {}
        for name in self._tensors[first].names:
            path, _, leaf = name.rpartition(".")
            module, is_transposed = self._model.get_submodule(path), path in self._is_transposed and leaf == "weight"
            if leaf in module._buffers:
                module._buffers[leaf] = cast
                continue
            if is_transposed not in parameters:
                data = cast.T.contiguous() if is_transposed else cast
                parameters[is_transposed] = nn.Parameter(data, requires_grad=False)
            module._parameters[leaf] = parameters[is_transposed]

    def _merged(self) -> Any:
        from peft.tuners.tuners_utils import BaseTunerLayer

        holders = Counter(id(value) for module in self._model.modules() for value in module._parameters.values())
        for layer in self._model.modules():
            if isinstance(layer, BaseTunerLayer):  # merging must not change a weight that another module shares
                own = layer.get_base_layer()._parameters
                shared = {leaf: value for leaf, value in own.items() if value is not None and holders[id(value)] > 1}
                own.update({leaf: nn.Parameter(value.clone(), False) for leaf, value in shared.items()})
        try:
            merged = self._model.merge_and_unload()
        except (NotImplementedError, AttributeError, ValueError) as error:
            raise CheckpointError(
                f"peft cannot merge these adapters ({error}): leave merge out, which writes an adapter folder"
            ) from error
        words, head = merged.get_input_embeddings(), merged.get_output_embeddings()
        if words is not None and head is not None and merged.config.tie_word_embeddings:
            merged.config.tie_word_embeddings = head.weight is words.weight
        return merged


def _adapted(model: Any, configs: Mapping[str, Any]) -> Any:
    """Return a model with adapters of these configs, whose values do not matter."""
    import peft

    for name, config in configs.items():
        plain = copy.deepcopy(config)
        if isinstance(getattr(plain, "init_lora_weights", None), str):  # it would use the weights, which come later
            plain.init_lora_weights = True
        if getattr(plain, "prompt_tuning_init", None):  # it would need a text and a tokenizer
            plain.prompt_tuning_init = "RANDOM"
        if isinstance(model, peft.PeftModel):
            model.add_adapter(name, plain)
        else:
            model = peft.get_peft_model(model, plain, name, autocast_adapter_dtype=False)
        if plain.is_prompt_learning:  # peft runs the encoder that makes the tokens
            model.prompt_encoder.to_empty(device="cpu")
    model.peft_config.update(configs)
    return model


def _is_conv1d(module: nn.Module) -> bool:
    """Return whether a module is transformers' linear, whose weight is [in, out]."""
    return type(module).__name__ == "Conv1D"
