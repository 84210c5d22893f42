"""Fine-tuning with LoRA (2106.09685): a frozen trunk, and thin matrices beside its linears that are trained. Any plan:

python examples/finetune.py
torchrun --nproc-per-node 4 examples/finetune.py parallel.tensor.mode=2d parallel.tensor.size=4
torchrun --nproc-per-node 2 examples/finetune.py parallel.pipeline=2 schedule.microbatches=4 save=/tmp/adapters.pt

The trunk goes through a checkpoint, which in practice another run has saved, under a plan of its own.
"""

import sys
from typing import Any

import torch
from torch.utils.data import Dataset

import colossus
from colossus import layers
from colossus.checkpoint import full_state_dict
from colossus.models.gpt import GPT

SIZES = dict(num_layers=2, hidden_size=64, num_heads=4, vocab_size=97, seq_len=32)
RANK = 4
CONFIG = dict(
    train=dict(steps=150, global_batch_size=32, clip_grad_norm=1.0), checkpoint=dict(dir="runs/finetune-trunk")
)
#: names of the trunk -> names in the adapted model
RENAME = {f"blocks.*.{linear}.*": f"blocks.*.{linear}.base.*" for linear in ("qkv", "out", "up", "down")}


def trunk() -> GPT:
    return GPT(**SIZES)


def adapted() -> GPT:
    """The trunk, frozen, with an adapter on each linear of its blocks."""
    model = trunk().requires_grad_(False)
    for block in model.blocks:
        assert isinstance(block, layers.TransformerBlock)
        for owner, names in ((block.attention, ("qkv", "out")), (block.mlp, ("up", "down"))):
            for name in names:
                setattr(owner, name, layers.LoRALinear(getattr(owner, name), RANK, alpha=2 * RANK))
    return model


def is_adapter(name: str) -> bool:
    """By the name of a parameter: ``blocks.0.mlp.up.first.weight``; the frozen linear is ``blocks.0.mlp.up.base``."""
    return ".first." in name or ".second." in name


def make_optimizer(named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
    """It is given what is trained, so the adapters alone."""
    assert all(is_adapter(name) for name, _ in named)
    return torch.optim.AdamW(named, lr=1e-2, weight_decay=0.0, fused=True)


class Steps(Dataset[dict[str, torch.Tensor]]):
    """Sequences that count in steps of ``stride``."""

    def __init__(self, stride: int, samples: int = 4096) -> None:
        self.stride, self.samples = stride, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        length, numbers = SIZES["seq_len"], SIZES["vocab_size"]
        ids = (index * 31 + torch.arange(length + 1) * self.stride) % numbers
        return {"inputs": ids[:-1], "labels": ids[1:]}


def train(engine: Any, what: str) -> None:
    for batch in engine.loader:
        result = engine.train_step(batch)
        if engine.context.is_logging_rank and result.step in (1, engine.config.train.steps):
            print(f"{what}, step {result.step}: loss {result.loss:.6f}", flush=True)
        if result.step == engine.config.train.steps:
            break


def main() -> None:
    if {"-h", "--help"} & {*sys.argv}:
        print(__doc__)
        return
    save = next((word[5:] for word in sys.argv[1:] if word.startswith("save=")), None)
    overrides = [word for word in sys.argv[1:] if not word.startswith("save=")]
    engine = colossus.initialize(
        {**CONFIG, "optimizer": dict(lr=3e-3)}, model=trunk, data=Steps(stride=1), overrides=overrides
    )
    train(engine, "trunk")
    checkpoint = engine.checkpoints.save(background=False).wait().path
    engine.close()

    engine = colossus.initialize(
        CONFIG, model=adapted, data=Steps(stride=5), optimizer=make_optimizer, overrides=overrides
    )
    match = engine.checkpoints.load_weights(checkpoint, rename=RENAME, strict=False)
    assert all(is_adapter(name) for name in match.missing), match
    train(engine, "adapters")
    whole = full_state_dict(engine.model, engine.context, aliases=False)
    adapters = {name: value for name, value in whole.items() if is_adapter(name)}
    if engine.context.is_logging_rank:
        count, total = (sum(value.numel() for value in each.values()) for each in (adapters, whole))
        print(f"trained {count:,} of {total:,} parameters ({count / total:.1%})")
        if save is not None:
            torch.save(adapters, save)
    engine.close()


if __name__ == "__main__":
    main()
