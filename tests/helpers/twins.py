"""The oracle: the same models in plain torch, with the same parameter names as our logical ones."""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from helpers.latent_twin import PlainLatentAttention
from torch import Tensor, nn

from colossus.layers.block_options import RotaryScaling
from colossus.models.llama_options import LlamaOptions
from colossus.models.options import DecoderOptions, GPTOptions, TransformerOptions
from colossus.models.vit_options import ViTOptions


def options_of(kind: str, hidden: int, heads: int, wide: int) -> GPTOptions:
    """Options of a ``gpt`` block, or of one like Llama's."""
    sizes = dict(hidden_size=hidden, num_heads=heads, ffn_hidden_size=wide)
    if kind == "gpt":
        return GPTOptions(**sizes)
    return GPTOptions(**sizes, positions="rotary", norm="rmsnorm", mlp="swiglu", bias=False)


class PlainAttention(nn.Module):
    def __init__(self, o: TransformerOptions, layer: int = 0) -> None:
        super().__init__()
        width, kv = o.num_heads * o.head_dim, o.num_kv_heads * o.head_dim
        self.head_dim, self.rotary, self.causal = o.head_dim, o.is_rotary, isinstance(o, DecoderOptions)
        self.scale, self.cap, self.sinks = o.head_dim**-0.5, None, None
        if isinstance(o, DecoderOptions):
            self.base, self.scaling = o.rotary_base, o.rotary_scaling
            is_local = o.attention_pattern[layer % len(o.attention_pattern)] == "local"
            self.window = o.window if o.window is not None and is_local else o.seq_len
            self.chunk = o.chunk if o.chunk is not None and is_local else o.seq_len
            if is_local and o.rotary_base_local is not None:
                self.base, self.scaling = o.rotary_base_local, None
            self.rotated = int(o.head_dim * o.rotary_fraction)
            self.scale, self.cap = o.attention_scale or self.scale, o.soft_cap
            self.sinks = nn.Parameter(torch.zeros(o.num_heads)) if o.sinks else None
        self.qkv = nn.ModuleDict(
            {
                "query": nn.Linear(o.hidden_size, width, o.bias),
                "key": nn.Linear(o.hidden_size, kv, o.bias),
                "value": nn.Linear(o.hidden_size, kv, o.bias),
            }
        )
        self.out = nn.Linear(width, o.hidden_size, o.bias)
        if isinstance(o, DecoderOptions) and o.qk_norm:
            self.q_norm, self.k_norm = (plain_rms_norm(o, o.head_dim) for _ in range(2))
        else:
            self.q_norm, self.k_norm = nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        query, key, value = (
            self.qkv[name](x).view(batch, tokens, -1, self.head_dim).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        query, key = self.q_norm(query), self.k_norm(key)
        if self.rotary:
            query, key = self.turn(query), self.turn(key)
        copies = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
        scores = query @ key.transpose(-1, -2) * self.scale
        if self.cap is not None:
            scores = self.cap * torch.tanh(scores / self.cap)
        if self.causal:
            place = torch.arange(tokens)
            behind, chunk = place[:, None] - place, place // self.chunk
            hidden = (behind < 0) | (behind >= self.window) | (chunk[:, None] != chunk)
            scores = scores.masked_fill(hidden, float("-inf"))
        if self.sinks is not None:
            scores = torch.cat((scores, self.sinks.view(1, -1, 1, 1).expand(batch, -1, tokens, 1)), -1)
        return self.out((scores.softmax(-1)[..., :tokens] @ value).transpose(1, 2).reshape(batch, tokens, -1))

    def turn(self, x: Tensor) -> Tensor:
        x, rest = x[..., : self.rotated], x[..., self.rotated :]
        half, size = self.rotated // 2, 1.0
        rate = self.base ** (-torch.arange(half, dtype=torch.float64) / half)
        if self.scaling is not None and self.scaling.rope_type == "yarn":
            rate, size = yarn_rates(self.base, self.rotated, self.scaling)
        elif self.scaling is not None:
            rate = llama3_rates(rate, self.scaling)
        angle = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * rate
        turned = torch.polar(torch.full_like(angle, size), angle).to(torch.complex128)
        pairs = torch.complex(x[..., :half].double(), x[..., half:].double()) * turned
        return torch.cat((pairs.real, pairs.imag, rest), -1).to(x.dtype)


def llama3_rates(rate: Tensor, scaling: RotaryScaling) -> Tensor:
    """Llama 3.1's scaling by wavelengths, as its reference code writes it."""
    if scaling.rope_type == "linear":
        return rate / scaling.factor
    length = scaling.original_max_position_embeddings
    wave = 2 * torch.pi / rate
    smooth = (length / wave - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    between = (1 - smooth) * rate / scaling.factor + smooth * rate
    scaled = torch.where(wave > length / scaling.low_freq_factor, rate / scaling.factor, between)
    return torch.where(wave < length / scaling.high_freq_factor, rate, scaled)


def yarn_rates(base: float, dim: int, scaling: RotaryScaling) -> tuple[Tensor, float]:
    """YaRN's scaling as the paper writes it, by turns: rates, and the factor of cosines and sines."""
    pair = torch.arange(dim // 2, dtype=torch.float64)
    rate = base ** (-2 * pair / dim)
    turning = [
        math.log(scaling.original_max_position_embeddings / (2 * math.pi * beta)) / math.log(base) * dim / 2
        for beta in (scaling.beta_fast, scaling.beta_slow)
    ]
    low, high = (math.floor(turning[0]), math.ceil(turning[1])) if scaling.truncate else turning
    ramp = ((pair - max(low, 0)) / (min(high, dim - 1) - max(low, 0))).clamp(0, 1)
    return rate / scaling.factor * ramp + rate * (1 - ramp), 0.1 * math.log(scaling.factor) + 1


class PlainMLP(nn.Module):
    def __init__(self, o: TransformerOptions) -> None:
        super().__init__()
        self.gated = {"swiglu": F.silu, "geglu_tanh": partial(F.gelu, approximate="tanh")}.get(o.mlp)
        wide = o.ffn_hidden_size
        self.up: nn.Module
        if self.gated is not None:
            self.up = nn.ModuleDict({name: nn.Linear(o.hidden_size, wide, o.bias) for name in ("gate", "value")})
        else:
            self.up = nn.Linear(o.hidden_size, wide, o.bias)
        self.down = nn.Linear(wide, o.hidden_size, o.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gated is not None:
            return self.down(self.gated(self.up["gate"](x)) * self.up["value"](x))
        return self.down(F.gelu(self.up(x)))


class PlainMoE(nn.Module):
    """Every expert on every token, those that were not chosen with weight 0."""

    def __init__(self, o: LlamaOptions) -> None:
        super().__init__()
        assert o.experts is not None
        num, ffn, hidden, self.top_k = o.experts.num, o.experts.ffn_size, o.hidden_size, o.experts.top_k
        self.router = nn.Linear(hidden, num, False)
        shapes = {"gate": (num, ffn, hidden), "up": (num, ffn, hidden), "down": (num, hidden, ffn)}
        self.experts = nn.ParameterDict({name: torch.zeros(shape) for name, shape in shapes.items()})  # type: ignore[arg-type]
        self.shared = PlainMLP(o.model_copy(update={"ffn_hidden_size": o.experts.shared}))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        kept = torch.zeros_like(scores).scatter(-1, scores.topk(self.top_k).indices, 1.0)
        weights = scores * kept / (scores * kept).sum(-1, keepdim=True)
        gate, up = (torch.einsum("bth,efh->btef", x, self.experts[name]) for name in ("gate", "up"))
        out = torch.einsum("btef,ehf->bteh", F.silu(gate) * up, self.experts["down"])
        return (out * weights[..., None]).sum(-2) + self.shared(x)


def plain_norm(o: TransformerOptions) -> nn.Module:
    if o.norm == "layernorm":
        return nn.LayerNorm(o.hidden_size, eps=o.norm_eps, bias=o.bias)
    return plain_rms_norm(o, o.hidden_size)


def plain_rms_norm(o: TransformerOptions, size: int) -> nn.Module:
    kind = ZeroCentered if o.norm == "zero_centered_rmsnorm" else nn.RMSNorm
    return kind(size, eps=o.norm_eps)


class ZeroCentered(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        assert self.weight is not None
        return F.rms_norm(x, self.normalized_shape, None, self.eps) * (1 + self.weight)


class PlainBlock(nn.Module):
    def __init__(self, o: TransformerOptions, layer: int = 0) -> None:
        super().__init__()
        place = o.norm_place if isinstance(o, DecoderOptions) else "before"
        before, after = place != "after", place != "before"
        self.attention_norm = plain_norm(o) if before else None
        if isinstance(o, LlamaOptions) and o.latent is not None:
            self.attention: nn.Module = PlainLatentAttention(
                o.hidden_size, o.num_heads, o.latent, o.bias, o.rotary_base
            )
        elif isinstance(o, LlamaOptions) and o.linear is not None and o.kind_of(layer) == "linear":
            from helpers.delta_net_twin import PlainDeltaNet  # transformers: only where it is asked

            self.attention = PlainDeltaNet(o.hidden_size, o.linear, o.norm_eps)
        else:
            self.attention = PlainAttention(o, layer)
        has_experts = isinstance(o, LlamaOptions) and o.experts is not None and o.experts.is_in(layer)
        self.attention_out_norm = plain_norm(o) if after else None
        self.mlp_norm = plain_norm(o) if before else None
        self.mlp = PlainMoE(o) if has_experts else PlainMLP(o)  # type: ignore[arg-type]
        self.mlp_out_norm = plain_norm(o) if after else None

    def forward(self, x: Tensor) -> Tensor:
        for before, part, after in (
            (self.attention_norm, self.attention, self.attention_out_norm),
            (self.mlp_norm, self.mlp, self.mlp_out_norm),
        ):
            y = part(x if before is None else before(x))
            x = x + (y if after is None else after(y))
        return x


class PlainNextToken(nn.Module):
    """The block that predicts the token after the next, from the decoder's last activation and the next token."""

    def __init__(self, o: DecoderOptions) -> None:
        super().__init__()
        self.embedding_norm, self.hidden_norm, self.norm = (plain_norm(o) for _ in range(3))
        self.join = nn.Linear(2 * o.hidden_size, o.hidden_size, bias=False)
        self.block = PlainBlock(o, o.num_layers - 1)

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        both = torch.cat((self.embedding_norm(embedded), self.hidden_norm(hidden)), -1)
        return self.norm(self.block(self.join(both)))


class PlainGPT(nn.Module):
    options_class: type[DecoderOptions] = GPTOptions

    def __init__(self, **options: object) -> None:
        super().__init__()
        o = self.options = self.options_class(**options)  # type: ignore[arg-type]
        self.embedding = nn.Embedding(o.vocab_size, o.hidden_size)
        self.positions = None if o.is_rotary else nn.Embedding(o.seq_len, o.hidden_size)
        self.blocks = nn.ModuleList(PlainBlock(o, layer) for layer in range(o.num_layers))
        self.norm = plain_norm(o)
        self.head = nn.Linear(o.hidden_size, o.vocab_size, bias=False)
        if o.tie_embeddings:
            self.head.weight = self.embedding.weight
        if o.mtp_weight:
            self.next_token = PlainNextToken(o)

    def forward(self, ids: Tensor) -> Tensor:
        return self.logits(self.hidden(ids))

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) * (self.options.embedding_scale or 1.0)
        if self.positions is not None:
            x = x + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        logits, cap = self.head(hidden), self.options.logit_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def loss_sum(self, ids: Tensor, labels: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The loss by its definition; its value is that of next tokens, its gradient also that of further ones."""
        hidden = self.hidden(ids)
        weights = torch.ones(labels.shape, dtype=hidden.dtype) if weights is None else weights
        total, count = self.sum_over_tokens(self.logits(hidden), labels, weights)
        if self.options.mtp_weight:
            embedded = self.embedding(ids[:, 1:]) * (self.options.embedding_scale or 1.0)
            logits = self.logits(self.next_token(hidden[:, :-1], embedded))
            further, number = self.sum_over_tokens(logits, labels[:, 1:], weights[:, 1:])
            further = self.options.mtp_weight * further / number * count
            total = total + further - further.detach()
        return total, count

    def sum_over_tokens(self, logits: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Sums over valid tokens of -log softmax, smoothed, with the z-loss, and of their weights."""
        o = self.options
        valid = labels != -100
        log_sum = torch.logsumexp(logits, -1)
        logp = logits - log_sum.unsqueeze(-1)
        picked = logp.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        loss = -(1 - o.label_smoothing) * picked - o.label_smoothing * logp.mean(-1) + o.z_loss * log_sum**2
        return (loss * valid * weights).sum(), (valid * weights).sum()


class PlainLlama(PlainGPT):
    options_class = LlamaOptions


class PlainPatches(nn.Module):
    """A convolution whose weight is stored flat."""

    def __init__(self, o: ViTOptions) -> None:
        super().__init__()
        conv = nn.Conv2d(o.in_channels, o.hidden_size, o.patch_size, o.patch_size)
        self.shape, self.stride = conv.weight.shape, o.patch_size
        self.weight, self.bias = nn.Parameter(conv.weight.detach().flatten(1)), conv.bias

    def forward(self, images: Tensor) -> Tensor:
        y = F.conv2d(images, self.weight.view(self.shape), self.bias, self.stride)
        return y.flatten(2).transpose(1, 2)


class PlainViT(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        o = self.options = ViTOptions(**options)  # type: ignore[arg-type]
        self.patches = PlainPatches(o)
        self.class_token = nn.ParameterDict({"weight": torch.zeros(o.hidden_size)}) if o.pool == "token" else None
        self.positions = nn.Embedding(o.num_tokens, o.hidden_size)
        self.blocks = nn.ModuleList(PlainBlock(o, layer) for layer in range(o.num_layers))
        self.norm = plain_norm(o)
        self.head = nn.Linear(o.hidden_size, o.num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images)
        if self.class_token is not None:
            x = torch.cat((self.class_token["weight"].expand(len(x), 1, -1), x), 1)
        x = x + self.positions.weight
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x.mean(1) if self.class_token is None else x[:, 0])

    def loss_sum(self, images: Tensor, labels: Tensor) -> tuple[Tensor, int]:
        loss = F.cross_entropy(self(images), labels, reduction="sum", label_smoothing=self.options.label_smoothing)
        return loss, len(labels)
