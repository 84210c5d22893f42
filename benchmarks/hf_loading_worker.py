"""A rank of the benchmark of loading: an engine of ours, or transformers."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import distributed as dist
from torch import nn

import colossus
from benchmarks import memory
from colossus import layers

_FILES = 4

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def make_folder(folder: Path, family: str, dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    """Write random weights in several files."""
    hidden, num_layers, vocab = sizes
    torch.manual_seed(0)
    config: Any
    if family == "gpt2":
        config = transformers.GPT2Config(
            n_embd=hidden, n_layer=num_layers, n_head=hidden // 32, vocab_size=vocab, eos_token_id=0, bos_token_id=0
        )
        model: Any = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            hidden_size=hidden, num_hidden_layers=num_layers, num_attention_heads=hidden // 32, vocab_size=vocab,
            num_key_value_heads=hidden // 64, intermediate_size=8 * hidden // 3 // 32 * 32,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
    num_bytes = dtype.itemsize * sum(parameter.numel() for parameter in model.parameters())
    model.to(dtype).save_pretrained(folder, max_shard_size=-(-num_bytes // (_FILES - 1)))


class Worker:
    """A rank of a `RankGroup`; ``name`` is ``transformers``, or a case of ours on so many ranks."""

    def __init__(self, name: str, world: int, folder: Path, rank: int) -> None:
        memory.pages_of_their_own()
        warnings.simplefilter("ignore")
        self._folder, self._engine = folder, None
        if name != "transformers":
            self._engine = colossus.initialize(
                dict(
                    parallel=dict(tensor=world),
                    model=dict(type="hf", path=str(folder), weights=False, dropout=0.0, attention_dropout=0.0),
                    train=dict(steps=1, global_batch_size=1),
                    device="cpu",
                )
            )

    def _load(self) -> nn.Module:
        if self._engine is None:
            model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(self._folder, dtype=torch.float32)
        else:
            self._engine.checkpoints.load_weights(self._folder)
            model = self._engine.model
        return model

    def _load_and_write(self) -> nn.Module:
        model = self._load()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.data.mul_(1.0)
        return model

    def logits(self) -> Any:
        model = self._load().eval()
        ids = torch.arange(24).view(1, 24)
        with torch.no_grad():
            logits = model(ids).logits if self._engine is None else layers.to_whole(model(ids))
        return logits.numpy()

    def time(self) -> float:
        """Return the seconds until the weights are loaded and written to, which all ranks begin at once."""
        gc.collect()
        if dist.is_initialized():
            dist.barrier()
        began = time.perf_counter()
        self._load_and_write()
        return time.perf_counter() - began

    def peak(self) -> int | None:
        """Return the bytes that the first load of this process adds, without those of the weights."""
        models: list[nn.Module] = []
        load: Callable[[], None] = lambda: models.append(self._load_and_write())  # noqa: E731
        grown = memory.resident_growth(load)
        own = sum(parameter.nbytes for parameter in models[0].parameters())
        return None if grown is None else grown - (own if self._engine is None else 0)
