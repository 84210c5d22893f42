"""Plain PyTorch modules of transformers. This file needs nothing but torch.

In a folder that ``colossus checkpoint convert .. --to torch`` has written it is ``model.py``:

    import model
    m = model.load(".")

Names and shapes of parameters are those of the checkpoints of colossus. A module here is made of the modules inside of
it; `build` makes a model from the options of its config.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: names of files in an exported folder
CONFIG, WEIGHTS = "config.json", "model.safetensors"


class FusedLinear(nn.Module):
    """Several linears of one input. Input [.., in_features]; output a tuple of [.., out_features], one of each."""

    def __init__(self, linears: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, linear in linears.items():
            self.add_module(name, linear)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(linear(x) for linear in self._modules.values() if linear is not None)


class LoRALinear(nn.Module):
    """base(x) + scale * second(first(x)) (2106.09685); of one output or of several."""

    def __init__(self, base: nn.Module, first: nn.Module, second: nn.Module, scale: float) -> None:
        super().__init__()
        self.base, self.first, self.second, self.scale = base, first, second, scale

    def forward(self, x: Tensor) -> Any:
        y, added = self.base(x), self.second(self.first(x) * self.scale)
        if isinstance(y, tuple):
            return tuple(one + other for one, other in zip(y, added, strict=True))
        return y + added


class PositionEmbedding(nn.Module):
    """Learned positions, added: x [.., tokens, dim] + weight[:tokens]."""

    def __init__(self, num_positions: int, embedding_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_positions, embedding_dim))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-2] > self.weight.shape[0]:
            raise ValueError(f"a sequence of {x.shape[-2]} tokens, but only {self.weight.shape[0]} positions")
        return x + self.weight[: x.shape[-2]]


class ClassToken(nn.Module):
    """A learned vector as the first token: x [batch, tokens, dim] -> [batch, 1 + tokens, dim]."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.weight.expand(x.shape[0], 1, -1), x), dim=1)


class PatchEmbedding(nn.Linear):
    """A convolution whose kernel is its stride, as a linear of flattened patches.

    Images [batch, channels, height, width]; output [batch, patches, hidden_size], row after row of patches.
    """

    def __init__(self, in_channels: int, hidden_size: int, patch_size: tuple[int, int], bias: bool = True) -> None:
        high, wide = patch_size
        super().__init__(in_channels * high * wide, hidden_size, bias)
        self.in_channels, self.hidden_size, self.patch_size = in_channels, hidden_size, (high, wide)

    def forward(self, images: Tensor) -> Tensor:
        high, wide = self.patch_size
        patches = images.unflatten(3, (-1, wide)).unflatten(2, (-1, high))  # [b, c, rows, high, columns, wide]
        return super().forward(patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2))


class Rotary(nn.Module):
    """Rotary positions (2104.09864): pairs (i, i + d/2) of each head, turned by position * base^(-2i/d).

    Args:
        scaling: of Llama 3.1 (2407.21783), or ``linear`` (2306.15595), with the keys of ``rope_scaling`` in Hugging
            Face's configs.
    """

    def __init__(self, head_dim: int, base: float = 10000.0, scaling: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.head_dim, self.base, self.scaling = head_dim, base, None if scaling is None else dict(scaling)

    def forward(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.arange(query.shape[-2], dtype=torch.float64, device=query.device)
        angles = positions[:, None] * self._frequencies(query.device)
        angles = torch.cat((angles, angles), dim=-1)
        return self._turn(query, angles), self._turn(key, angles)

    def _frequencies(self, device: torch.device) -> Tensor:
        """Radians per token of each pair, [head_dim / 2]."""
        if self.scaling is None:
            steps = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=device) / self.head_dim
            return self.base**-steps
        scaled = [_stretched(self.base ** (-i / self.head_dim), self.scaling) for i in range(0, self.head_dim, 2)]
        return torch.tensor(scaled, dtype=torch.float64, device=device)

    @staticmethod
    def _turn(x: Tensor, angles: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        low, high = x.chunk(2, dim=-1)
        turned = torch.cat((-high, low), dim=-1)
        return (x * angles.cos().to(wide) + turned * angles.sin().to(wide)).to(x.dtype)


def _stretched(frequency: float, scaling: Mapping[str, Any]) -> float:
    if scaling.get("rope_type") == "linear":
        return float(frequency / scaling["factor"])
    low, high = scaling.get("low_freq_factor", 1.0), scaling.get("high_freq_factor", 4.0)
    turns = scaling.get("original_max_position_embeddings", 8192) * frequency / (2 * math.pi)
    kept = min(1.0, max(0.0, (turns - low) / (high - low)))
    return float(frequency * (kept + (1 - kept) / scaling["factor"]))


class Attention(nn.Module):
    """Multi-head attention, with grouped keys and values (2305.13245) where ``qkv`` gives fewer of them.

    Args:
        qkv: gives query [.., heads * head_dim], key and value [.., kv_heads * head_dim].
        dropout: nn.Dropout, of attention weights.
        rotary: turns query and key.

    Shape:
        x [batch, tokens, hidden] or [tokens, hidden]; ``mask`` broadcastable to [batch, heads, tokens, tokens], True
        where a query may look; ``documents`` [batch, tokens]: a token looks only at those of its own number.
    """

    def __init__(
        self,
        qkv: nn.Module,
        out: nn.Module,
        head_dim: int,
        *,
        causal: bool = True,
        dropout: nn.Module | None = None,
        rotary: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.head_dim, self.causal = head_dim, causal
        self.qkv, self.out, self.rotary = qkv, out, rotary
        self.dropout = dropout if dropout is not None else nn.Dropout(0.0)

    def forward(self, x: Tensor, mask: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        if x.dim() == 2:
            documents = documents if documents is None or documents.dim() == 2 else documents.unsqueeze(0)
            return self.forward(x.unsqueeze(0), mask, documents).squeeze(0)
        query, key, value = (y.unflatten(-1, (-1, self.head_dim)).transpose(-3, -2) for y in self.qkv(x))
        if self.rotary is not None:
            query, key = self.rotary(query, key)
        if documents is not None:
            mask = _narrowed(mask, (documents[:, :, None] == documents[:, None, :])[:, None])
        causal = self.causal and mask is None
        if mask is not None and self.causal:
            tokens = query.shape[-2]
            mask = _narrowed(mask, torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).tril())
        rate = self.dropout.p if self.training and isinstance(self.dropout, nn.Dropout) else 0.0
        grouped = {"enable_gqa": True} if key.shape[-3] != query.shape[-3] else {}
        attended = F.scaled_dot_product_attention(query, key, value, mask, rate, causal, **grouped)
        return self.out(attended.transpose(-3, -2).flatten(-2))


def _narrowed(mask: Tensor | None, allowed: Tensor) -> Tensor:
    """A mask, of booleans or of what is added to scores, with what is not allowed taken out."""
    if mask is None:
        return allowed
    return mask & allowed if mask.dtype == torch.bool else mask.masked_fill(~allowed, float("-inf"))


class MLP(nn.Module):
    """down(gelu(up(x))). Input and output [.., hidden].

    Args:
        approximate: of gelu, ``"none"`` or ``"tanh"`` (GPT-2).
    """

    def __init__(self, up: nn.Module, down: nn.Module, approximate: str = "none") -> None:
        super().__init__()
        self.up, self.down, self.approximate = up, down, approximate

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate=self.approximate))


class GatedMLP(nn.Module):
    """SwiGLU (2002.05202): down(silu(gate) * value), of the two outputs of ``up``."""

    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x)
        return self.down(F.silu(gate) * value)


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). Input and output [batch, tokens, hidden]."""

    def __init__(
        self,
        attention_norm: nn.Module,
        attention: nn.Module,
        mlp_norm: nn.Module,
        mlp: nn.Module,
        attention_dropout: nn.Module,
        mlp_dropout: nn.Module,
    ) -> None:
        super().__init__()
        self.attention_norm, self.attention = attention_norm, attention
        self.mlp_norm, self.mlp = mlp_norm, mlp
        self.attention_dropout, self.mlp_dropout = attention_dropout, mlp_dropout

    def forward(self, x: Tensor, mask: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        given = {"mask": mask, "documents": documents}
        more = {name: value for name, value in given.items() if value is not None}
        x = x + self.attention_dropout(self.attention(self.attention_norm(x), **more))
        return x + self.mlp_dropout(self.mlp(self.mlp_norm(x)))


class Decoder(nn.Module):
    """Decoder-only language model.

    Shape:
        ids [batch, tokens], or dict(ids=.., documents=..) with the number of the document of each token; logits
        [batch, tokens, vocabulary].
    """

    def __init__(
        self,
        embedding: nn.Module,
        positions: nn.Module | None,
        dropout: nn.Module,
        blocks: Iterable[nn.Module],
        norm: nn.Module,
        head: nn.Module,
    ) -> None:
        super().__init__()
        self.embedding, self.positions, self.dropout = embedding, positions, dropout
        self.blocks, self.norm, self.head = nn.ModuleList(blocks), norm, head

    def forward(self, ids: Tensor | dict[str, Tensor]) -> Tensor:
        documents = ids.get("documents") if isinstance(ids, dict) else None
        x = self.embedding(ids["ids"] if isinstance(ids, dict) else ids)
        if self.positions is not None:
            x = self.positions(x)
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x) if documents is None else block(x, documents=documents)
        return self.head(self.norm(x))


class SoftmaxLoss(nn.Module):
    """Logits over many classes, and their loss: x [.., hidden_size], labels [..] -> (sum, count).

    The bias is [num_classes, 1]. A label of -100, or what ``ignore_index`` says, counts for nothing.
    """

    bias: Tensor | None

    def __init__(self, hidden_size: int, num_classes: int, bias: bool = True, ignore_index: int = -100) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_classes, hidden_size))
        self.register_parameter("bias", nn.Parameter(torch.zeros(num_classes, 1)) if bias else None)
        self.ignore_index = ignore_index

    def logits(self, x: Tensor) -> Tensor:
        """[.., num_classes]"""
        return F.linear(x, self.weight, None if self.bias is None else self.bias.squeeze(1))

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits, labels = self.logits(x).flatten(0, -2), labels.reshape(-1)
        loss = F.cross_entropy(logits, labels, reduction="sum", ignore_index=self.ignore_index)
        return loss, (labels != self.ignore_index).sum()


class WordsLM(nn.Module):
    """Language model over words.

    Shape:
        ids [batch, tokens], or dict(ids=.., pairs=..) with the buckets of hashed pairs of words; output
        [batch, tokens, hidden_size], of which ``head.logits`` makes [batch, tokens, vocabulary].
    """

    def __init__(
        self,
        embedding: nn.Module,
        pairs: nn.Module | None,
        positions: nn.Module | None,
        dropout: nn.Module,
        blocks: Iterable[nn.Module],
        lstm: nn.Module | None,
        norm: nn.Module,
        head: nn.Module,
    ) -> None:
        super().__init__()
        self.embedding, self.pairs, self.positions, self.dropout = embedding, pairs, positions, dropout
        self.blocks, self.lstm, self.norm, self.head = nn.ModuleList(blocks), lstm, norm, head

    def forward(self, inputs: Tensor | dict[str, Tensor]) -> Tensor:
        x = self.embedding(inputs["ids"] if isinstance(inputs, dict) else inputs)
        if self.pairs is not None:
            assert isinstance(inputs, dict), "a model with pairs of words takes dict(ids=.., pairs=..)"
            x = x + self.pairs(inputs["pairs"])
        x = self.dropout(x if self.positions is None else self.positions(x))
        for block in self.blocks:
            x = block(x)
        x = x if self.lstm is None else x + self.lstm(x)[0]
        normalized: Tensor = self.norm(x)
        return normalized

    def loss(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(sum, count) over the words whose label is not -100."""
        loss: tuple[Tensor, Tensor] = self.head(hidden, labels)
        return loss


class ViT(nn.Module):
    """Vision transformer (2010.11929).

    Args:
        class_token: what is classified; without one the mean over all patches is.

    Shape:
        images [batch, channels, height, width]; logits [batch, classes].
    """

    def __init__(
        self,
        patches: nn.Module,
        class_token: nn.Module | None,
        positions: nn.Module,
        dropout: nn.Module,
        blocks: Iterable[nn.Module],
        norm: nn.Module,
        head: nn.Module,
    ) -> None:
        super().__init__()
        self.patches, self.class_token, self.positions, self.dropout = patches, class_token, positions, dropout
        self.blocks, self.norm, self.head = nn.ModuleList(blocks), norm, head

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images)
        if self.class_token is not None:
            x = self.class_token(x)
        x = self.dropout(self.positions(x))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1) if self.class_token is None else self.norm(x[:, 0]))


# -- models by their options -------------------------------------------------------------------------------


def build(options: Mapping[str, Any]) -> nn.Module:
    """A model from the options of its config, ``type`` among them. Its values are those that torch's layers draw.

    Raises:
        ValueError: for a type or a kind of layer that is not known here.
    """
    kind = options.get("type")
    if kind not in _MODELS:
        raise ValueError(f"no model of type {kind!r} here; known: {', '.join(_MODELS)}")
    return _MODELS[kind](options)


def _decoder(o: Mapping[str, Any]) -> nn.Module:
    hidden, vocabulary = o["hidden_size"], o["vocab_size"]
    is_rotary = o.get("positions", "rotary") == "rotary"
    decoder = Decoder(
        nn.Embedding(vocabulary, hidden),
        None if is_rotary else PositionEmbedding(o["seq_len"], hidden),
        nn.Dropout(o["dropout"]),
        (_block(o, causal=True, is_rotary=is_rotary) for _ in range(o["num_layers"])),
        _norm(o),
        nn.Linear(hidden, vocabulary, bias=False),
    )
    if o["tie_embeddings"]:
        decoder.head.weight = decoder.embedding.weight
    return decoder


def _words(o: Mapping[str, Any]) -> nn.Module:
    hidden, vocabulary, is_gpt = o["hidden_size"], o["vocab_size"], o["trunk"] == "gpt"
    is_rotary = o["positions"] == "rotary"
    return WordsLM(
        nn.Embedding(vocabulary, hidden),
        nn.Embedding(o["pairs"], hidden) if o["pairs"] else None,
        PositionEmbedding(o["seq_len"], hidden) if is_gpt and not is_rotary else None,
        nn.Dropout(o["dropout"]),
        (_block(o, causal=True, is_rotary=is_rotary) for _ in range(o["num_layers"] if is_gpt else 0)),
        None if is_gpt else nn.LSTM(hidden, hidden, o["num_layers"], batch_first=True),
        _norm(o),
        SoftmaxLoss(hidden, vocabulary),
    )


def _vit(o: Mapping[str, Any]) -> nn.Module:
    hidden, (high, wide) = o["hidden_size"], o["patch_size"]
    has_token = o["pool"] == "token"
    num_patches = (o["image_size"][0] // high) * (o["image_size"][1] // wide)
    return ViT(
        PatchEmbedding(o["in_channels"], hidden, (high, wide)),
        ClassToken(hidden) if has_token else None,
        PositionEmbedding(num_patches + has_token, hidden),
        nn.Dropout(o["dropout"]),
        (_block(o, causal=False, is_rotary=False) for _ in range(o["num_layers"])),
        _norm(o),
        nn.Linear(hidden, o["num_classes"]),
    )


def _block(o: Mapping[str, Any], *, causal: bool, is_rotary: bool) -> TransformerBlock:
    hidden, bias, wide = o["hidden_size"], o["bias"], o["ffn_hidden_size"]
    head_dim, num_heads, num_kv_heads = o["head_dim"], o["num_heads"], o["num_kv_heads"]
    sizes = {"query": num_heads * head_dim, "key": num_kv_heads * head_dim, "value": num_kv_heads * head_dim}
    attention = Attention(
        FusedLinear({name: nn.Linear(hidden, size, bias) for name, size in sizes.items()}),
        nn.Linear(num_heads * head_dim, hidden, bias),
        head_dim,
        causal=causal,
        dropout=nn.Dropout(o["attention_dropout"]),
        rotary=Rotary(head_dim, o["rotary_base"], o["rotary_scaling"]) if is_rotary else None,
    )
    down, mlp = nn.Linear(wide, hidden, bias), o["mlp"]
    if mlp == "swiglu":
        gate_and_value = {name: nn.Linear(hidden, wide, bias) for name in ("gate", "value")}
        made: nn.Module = GatedMLP(FusedLinear(gate_and_value), down)
    elif mlp in ("gelu", "gelu_tanh"):
        made = MLP(nn.Linear(hidden, wide, bias), down, "tanh" if mlp == "gelu_tanh" else "none")
    else:
        raise ValueError(f"no MLP of kind {mlp!r} here; known: gelu, gelu_tanh, swiglu")
    return TransformerBlock(_norm(o), attention, _norm(o), made, nn.Dropout(o["dropout"]), nn.Dropout(o["dropout"]))


def _norm(o: Mapping[str, Any]) -> nn.Module:
    if o["norm"] == "layernorm":
        return nn.LayerNorm(o["hidden_size"], o["norm_eps"], bias=o["bias"])
    if o["norm"] == "rmsnorm":
        return nn.RMSNorm(o["hidden_size"], o["norm_eps"])
    raise ValueError(f"no norm of kind {o['norm']!r} here; known: layernorm, rmsnorm")


_MODELS: dict[Any, Callable[[Mapping[str, Any]], nn.Module]] = {
    "GPT": _decoder,
    "Llama": _decoder,
    "ViT": _vit,
    "WordsLM": _words,
}


# -- folders -----------------------------------------------------------------------------------------------


def load(
    folder: str | Path = Path(__file__).parent, *, dtype: torch.dtype | None = None, device: str = "cpu"
) -> nn.Module:
    """The model of an exported folder with its weights, in eval mode.

    Args:
        folder: by default that of this file.
        dtype: of all weights; by default as they were saved.
    """
    config = json.loads((Path(folder) / CONFIG).read_text())
    with torch.device("meta"):
        model = build(config["model"])
    state = read_safetensors(Path(folder) / WEIGHTS, dtype, device)
    for alias, name in config["tied"].items():
        state[alias] = state[name]
    model.load_state_dict(state, strict=True, assign=True)
    for alias, name in config["tied"].items():  # one parameter again
        path, _, leaf = alias.rpartition(".")
        setattr(model.get_submodule(path), leaf, model.get_parameter(name))
    return model.eval()


def read_safetensors(path: str | Path, dtype: torch.dtype | None = None, device: str = "cpu") -> dict[str, Tensor]:
    """The tensors of a safetensors file (https://huggingface.co/docs/safetensors), one after the other."""
    tensors = {}
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            start, stop = entry["data_offsets"]
            file.seek(8 + length + start)
            buffer = bytearray(file.read(stop - start))
            if len(buffer) != stop - start:
                raise ValueError(f"{path}: {name} ends early: the file is truncated")
            stored = _DTYPES[entry["dtype"]]
            flat = torch.frombuffer(buffer, dtype=stored) if buffer else torch.empty(0, dtype=stored)
            tensors[name] = flat.view(entry["shape"]).to(device, dtype if stored.is_floating_point else None)
    return tensors


_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
