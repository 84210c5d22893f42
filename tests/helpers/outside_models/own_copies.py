"""Well-known architectures in plain torch, as people write them in their own files."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from helpers.outside_models.batches import CLASSES, HEADS, TOKENS, VOCAB, WIDTH, distances, images, targets, tokens
from helpers.outside_models.rows import outside
from helpers.user_models.cases import BATCH, Batch, Loss, draw, integers
from torch import Tensor, nn


def _ids(step: int) -> Batch:
    batch = tokens(step)
    return batch | {"inputs": batch["inputs"]["input_ids"]}


def own(
    batch: Callable[[int], Batch], loss: Loss = targets, **more: Any
) -> Callable[[type[nn.Module]], type[nn.Module]]:
    def register(made: type[nn.Module]) -> type[nn.Module]:
        outside(f"own {made.__name__}", made, batch, loss=loss, example=True, **more)
        return made

    return register


class NanoBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.size()
        q, k, v = self.c_attn(self.ln_1(x)).split(width, dim=2)
        q, k, v = (each.view(batch, length, HEADS, width // HEADS).transpose(1, 2) for each in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, width))
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


@own(_ids)
class NanoGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            dict(wte=nn.Embedding(VOCAB, WIDTH), wpe=nn.Embedding(TOKENS, WIDTH), h=nn.ModuleList())
        )
        self.transformer.h.extend(NanoBlock() for _ in range(2))  # type: ignore[union-attr, operator]
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.transformer.wte.weight = self.lm_head.weight  # type: ignore[union-attr]

    def forward(self, idx: Tensor) -> Tensor:
        x = self.transformer.wte(idx) + self.transformer.wpe(torch.arange(idx.size(1), device=idx.device))  # type: ignore[operator]
        for block in self.transformer.h:  # type: ignore[union-attr]
            x = block(x)
        logits: Tensor = self.lm_head(x)
        return logits


class MambaBlock(nn.Module):
    """A selective state space, its recurrence a loop over tokens."""

    def __init__(self, states: int = 4, rank: int = 4) -> None:
        super().__init__()
        inner = 2 * WIDTH
        self.states, self.rank = states, rank
        self.norm = nn.RMSNorm(WIDTH)
        self.in_proj, self.out_proj = nn.Linear(WIDTH, 2 * inner, bias=False), nn.Linear(inner, WIDTH, bias=False)
        self.conv = nn.Conv1d(inner, inner, 3, groups=inner, padding=2)
        self.x_proj, self.dt_proj = nn.Linear(inner, rank + 2 * states, bias=False), nn.Linear(rank, inner)
        self.a_log = nn.Parameter(torch.log(torch.arange(1.0, states + 1).repeat(inner, 1)))
        self.skip = nn.Parameter(torch.ones(inner))

    def forward(self, hidden: Tensor) -> Tensor:
        x, gate = self.in_proj(self.norm(hidden)).chunk(2, dim=-1)
        x = F.silu(self.conv(x.transpose(1, 2))[..., : hidden.shape[1]].transpose(1, 2))
        step, b, c = self.x_proj(x).split([self.rank, self.states, self.states], dim=-1)
        step = F.softplus(self.dt_proj(step))
        decay = torch.exp(step.unsqueeze(-1) * -torch.exp(self.a_log))
        pushed = step.unsqueeze(-1) * b.unsqueeze(2) * x.unsqueeze(-1)
        state, outputs = torch.zeros_like(pushed[:, 0]), []
        for token in range(hidden.shape[1]):
            state = decay[:, token] * state + pushed[:, token]
            outputs.append((state * c[:, token].unsqueeze(1)).sum(-1))
        y = (torch.stack(outputs, 1) + x * self.skip) * F.silu(gate)
        out: Tensor = hidden + self.out_proj(y)
        return out


@own(_ids)
class MinimalMamba(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(VOCAB, WIDTH), nn.RMSNorm(WIDTH)
        self.layers = nn.ModuleList(MambaBlock() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class TimedConvolutions(nn.Module):
    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(into, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.norm, self.time, self.skip = nn.GroupNorm(2, out), nn.Linear(16, out), nn.Conv2d(into, out, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        hidden = F.silu(self.first(x)) + self.time(time)[:, :, None, None]
        out: Tensor = self.second(F.silu(self.norm(hidden))) + self.skip(x)
        return out


def _noisy(step: int) -> Batch:
    noise = draw(step, BATCH, 3, 8, 8)
    return {"inputs": {"x": noise, "time": integers(step, 100, BATCH)}}


def _of_time(time: Tensor, like: Tensor) -> Tensor:
    rates = torch.exp(-math.log(100.0) * torch.arange(8, device=time.device) / 8).to(like.dtype)
    angles = time[:, None].to(like.dtype) * rates
    return torch.cat([angles.sin(), angles.cos()], -1)


@own(_noisy, distances())
class UNet(nn.Module):
    """The denoiser of a diffusion model."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 16))
        self.down_1, self.down_2 = TimedConvolutions(3, 8), TimedConvolutions(8, 16)
        self.middle = TimedConvolutions(16, 16)
        self.up_1, self.up_2 = TimedConvolutions(32, 8), TimedConvolutions(16, 8)
        self.out = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        t = self.time(_of_time(time, x))
        a = self.down_1(x, t)
        b = self.down_2(F.avg_pool2d(a, 2), t)
        c = self.up_1(torch.cat([b, self.middle(b, t)], 1), t)
        out: Tensor = self.out(self.up_2(torch.cat([a, F.interpolate(c, scale_factor=2.0)], 1), t))
        return out


class AdaptiveBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.norm_2 = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(approximate="tanh"), nn.Linear(2 * WIDTH, WIDTH))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.modulation(condition)[:, None].chunk(6, -1)
        h = self.norm_1(x) * (1 + scale_a) + shift_a
        x = x + gate_a * self.attention(h, h, h, need_weights=False)[0]
        out: Tensor = x + gate_m * self.mlp(self.norm_2(x) * (1 + scale_m) + shift_m)
        return out


@own(_noisy, distances())
class DiT(nn.Module):
    """A transformer that denoises patches, each block shifted and scaled by the time."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.time = nn.Conv2d(3, WIDTH, 2, 2), nn.Linear(16, WIDTH)
        self.position = nn.Parameter(torch.zeros(1, 16, WIDTH))
        self.blocks = nn.ModuleList(AdaptiveBlock() for _ in range(2))
        self.out = nn.Linear(WIDTH, 12)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        condition = self.time(_of_time(time, x))
        h = self.patch(x).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            h = block(h, condition)
        patches = self.out(h).view(-1, 4, 4, 2, 2, 3)
        return torch.einsum("bhwpqc->bchpwq", patches).reshape(-1, 3, 8, 8)


@own(_ids)
class RecurrentWords(nn.Module):
    """A language model of two LSTM layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.lstm(self.embedding(ids))[0])
        return logits


@own(_ids)
class TorchTransformer(nn.Module):
    """torch's own encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1]).to(self.head.weight.dtype)
        logits: Tensor = self.head(self.encoder(self.embedding(ids), mask=mask))
        return logits


@own(images(16, 8), has_batch_norm=True)
class AllConvolutional(nn.Module):
    """A residual network with batch norms, all in one Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.blocks = nn.Sequential(*(ConvolutionalBlock() for _ in range(3)))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return logits


class ConvolutionalBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm(self.conv(x)))
