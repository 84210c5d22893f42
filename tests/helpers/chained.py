"""Models whose forwards are more than hidden states that go from block to block, as people write them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 6


def linears(number: int = 4) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(number))


class Skips(nn.Module):
    """A UNet: what early blocks returned is used again by later ones, and behind them all."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = linears(), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        first = self.body[0](x).tanh()
        second = self.body[1](first)
        third = self.body[2](second + first)
        return self.head(self.body[3](third) + first * second)


class Residual(nn.Module):
    """The loop over the blocks adds what they return, scaled by a parameter; some are linears and some are none."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(kind() for _ in range(3) for kind in (lambda: nn.Linear(WIDTH, WIDTH), nn.Tanh))
        self.gate = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate.sigmoid()
        for block in self.body:
            x = x + block(x) * gate
        return x


class Conditioned(nn.Module):
    """A diffusion transformer: all blocks take what is computed from the time, and a rotary table of the CPU."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own, self.of_time = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, time: Tensor, table: Tensor) -> dict[str, Tensor]:
            return {"x": x + self.own((x * table).real) * self.of_time(time), "time": time}

    def __init__(self) -> None:
        super().__init__()
        self.times = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU())
        self.body, self.head = nn.ModuleList(self.Block() for _ in range(3)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        time = self.times(x.mean(0, keepdim=True).expand_as(x))
        table = torch.polar(torch.ones(WIDTH, dtype=x.dtype), torch.arange(WIDTH, dtype=x.dtype))
        for block in self.body:
            x = block(x, time, table)["x"]
        return self.head(x) * self.head.weight.to(self.body[0].own.weight.dtype).mean() + time


class Recurrent(nn.Module):
    """Hidden states of an LSTM for the next one, and sequences that are packed."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1).expand(-1, 4, -1)
        states = None
        for number, block in enumerate(self.body):
            if number == 1:
                lengths = torch.arange(len(x)) % 4 + 1
                packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
                packed, states = block(packed, states)
                x, _ = nn.utils.rnn.pad_packed_sequence(packed, batch_first=True, total_length=4)
            else:
                x, states = block(x, states)
        return self.head(x)


class Transformed(nn.Module):
    """Complex weights, ``vmap`` and ``func.grad`` in blocks; a choice by values, and one by a list of them, between."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Linear(WIDTH, WIDTH)
            self.weight = nn.Parameter(torch.randn(WIDTH // 2 + 1, 2))

        def forward(self, x: Tensor) -> Tensor:
            of_one = torch.func.grad(lambda row: self.own(row).square().sum())
            weight = torch.view_as_complex(self.weight)
            return torch.fft.irfft(torch.fft.rfft(x) * weight, n=WIDTH) + torch.vmap(of_one)(x)

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(self.Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.body:
            x = block(x).tanh()
            if x.abs().max() > 0.5:
                x = x * 2
            x = x * (3.0 if x.sum(0).tolist()[0] > 0 else 0.5)
        return x


class Repeated(nn.Module):
    """One block of three is called in turn, twice; it writes to what it is given."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x += self.own(x.clone()).tanh()
            return x

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = nn.Linear(WIDTH, WIDTH), nn.ModuleList(self.Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(2):
            for block in self.body:
                x = block(x)
                x *= 0.5
        return x


@dataclass
class Output:
    logits: Tensor
    records: list[Tensor]


class Recorded(nn.Module):
    """A dataclass of what is computed before, in and after the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = nn.Linear(WIDTH, WIDTH), linears(3)

    def forward(self, x: Tensor) -> Output:
        x = self.stem(x)
        records = [x.relu()]
        for block in self.body:
            records.append(x := block(x))
        return Output(x + sum(records), records)


@dataclass
class Record:
    """What x-transformers' blocks return beside their hidden states."""

    scores: Tensor | None = None


class Attributes(nn.Module):
    """Blocks that no list holds, which return a record of their own class."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> tuple[Tensor, Record]:
            scores = self.own(x)
            return x + scores.tanh(), Record(scores)

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.first, self.second = self.Block(), self.Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(self.stem(x))[0])[0])


# -- what is refused ------------------------------------------------------------------------------------------------


class Kept(nn.Module):
    """Blocks keep what is used behind them all."""

    class Block(nn.Module):
        def __init__(self, record: list[Tensor]) -> None:
            super().__init__()
            self.own, self.record = nn.Linear(WIDTH, WIDTH), record

        def forward(self, x: Tensor) -> Tensor:
            x = self.own(x)
            self.record.append(x.sin())
            return x.tanh()

    def __init__(self) -> None:
        super().__init__()
        self.record: list[Tensor] = []
        self.body = nn.ModuleList(self.Block(self.record) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        self.record.clear()
        for block in self.body:
            x = block(x)
        return x + sum(self.record)


class Forces(nn.Module):
    """A gradient that goes back through all blocks in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = linears()

    def forward(self, x: Tensor) -> Tensor:
        h = x = x.clone().requires_grad_()
        for block in self.body:
            h = block(h).tanh()
        return torch.autograd.grad(h.sum(), x, create_graph=True)[0]


class Counts(nn.Module):
    """A buffer of the model as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.body = linears()
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.mean(0)
        for block in self.body:
            x = block(x)
        return x


class Single(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x)


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = linears()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.body:
            x = block(x)
        return x @ x
