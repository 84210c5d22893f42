"""Noisy waves told apart by a vision transformer that is written as for torch.nn: only the import is another.

colossus launch examples/vit.py                                                   # one process
colossus launch examples/vit.py parallel.tensor.mode=2d parallel.tensor.size=4    # the same run on four
"""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from colossus.layers import Embedding, LayerNorm, Linear  # from torch.nn import Embedding, LayerNorm, Linear


class Attention(nn.Module):
    """Self-attention, x [batch, tokens, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = Linear(width, 3 * width)
        self.out = Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        query, key, value = (
            part.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))


class Block(nn.Module):
    """A pre-norm transformer block, x [batch, tokens, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = LayerNorm(width), Attention(width, heads)
        self.mlp_norm = LayerNorm(width)
        self.up, self.down = Linear(width, 4 * width), Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class ViT(nn.Module):
    """Images [batch, 1, size, size] -> logits [batch, classes]."""

    def __init__(
        self, size: int = 32, patch: int = 8, width: int = 64, depth: int = 2, heads: int = 4, classes: int = 6
    ) -> None:
        super().__init__()
        self.patch = patch
        self.embed = Linear(patch * patch, width)
        self.class_token = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.positions = Embedding(1 + (size // patch) ** 2, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = LayerNorm(width)
        self.head = Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        patches = F.unfold(images, self.patch, stride=self.patch).transpose(1, 2)
        x = torch.cat((self.class_token.expand(len(images), -1, -1), self.embed(patches)), dim=1)
        x = x + self.positions(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(x))[:, 0])

    def loss(self, logits: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        """Sum of the losses, and their number: the engine takes the mean over the global batch."""
        _, labels = batch
        return F.cross_entropy(logits, labels, reduction="sum"), labels.numel()


def waves(split: str = "train", samples: int = 4096, size: int = 32) -> TensorDataset:
    """Images [1, size, size] of a sine wave in noise; the class is where it runs: along a side, a diagonal, out."""
    generator = torch.Generator().manual_seed(0 if split == "train" else 1)
    y, x = torch.meshgrid(*2 * [torch.linspace(-1, 1, size)], indexing="ij")
    along = torch.stack((x, y, (x + y) / 2**0.5, (x - y) / 2**0.5, torch.hypot(x, y), torch.maximum(x.abs(), y.abs())))
    labels = torch.randint(len(along), (samples,), generator=generator)
    frequency, phase = (low + 6 * torch.rand(samples, 1, 1, generator=generator) for low in (8, 0))
    images = torch.sin(frequency * along[labels] + phase) + 0.5 * torch.randn(samples, size, size, generator=generator)
    return TensorDataset(images.unsqueeze(1), labels)


model = dict(type=ViT)
data = dict(type=waves)
optimizer = dict(type="AdamW", lr=1e-3)
lr_schedule = dict(type="cosine", warmup_steps=20)
train = dict(steps=200, global_batch_size=64, clip_grad_norm=1.0, log_every=20, eval_every=200)

if __name__ == "__main__":  # python examples/vit.py parallel.tensor=2, or under torchrun
    from colossus.cli.main import main

    sys.exit(main(["launch", *sys.argv]))
