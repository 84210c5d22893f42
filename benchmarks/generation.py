"""Text from a model with a key/value cache, beside the same model in plain torch with a cache written by hand.

    python -m benchmarks.generation
    python -m benchmarks.generation --models llama --hidden 512 --layers 8

One process with one thread, greedy: a prompt at once, then token by token. Each side has the same weights and must make
the same tokens. The plain model comes with its matmuls fused (query, key, value; both parts of SwiGLU) and apart; the
faster one is the peer. Ours is what ``colossus generate`` runs, from a checkpoint. Under 1D over two ranks tokens per
second are printed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

import colossus
from benchmarks import common
from benchmarks.peers.cached import CachedDecoder
from benchmarks.ranks import RankGroup
from colossus import registry
from colossus.checkpoint.state_dict import read_state_dict
from colossus.inference import Decoding, Sampling, find_source, load_model

MODELS = {"gpt": dict(type="GPT"), "llama": dict(type="Llama", num_kv_heads=4)}
OURS, TENSOR = "colossus", "colossus-tensor-2"


class Turn(NamedTuple):
    """Seconds of one text, and its tokens."""

    prefill: float
    decode: float
    tokens: list[list[int]]


class Plain:
    def __init__(self, folder: Path, options: Any, *, fused: bool) -> None:
        self.model = CachedDecoder(read_state_dict(folder), options, fused=fused)

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], count: int) -> Turn:
        began = time.perf_counter()
        self.model.begin(len(prompts), len(prompts[0]) + count)
        ids = self.model(torch.tensor(prompts)).argmax(-1)
        first = time.perf_counter()
        turns = [ids.tolist()]
        for _ in range(count - 1):
            ids = self.model(ids.unsqueeze(1)).argmax(-1)
            turns.append(ids.tolist())
        return Turn(first - began, time.perf_counter() - first, [list(row) for row in zip(*turns, strict=True)])


class Ours:
    def __init__(self, folder: Path, overrides: Sequence[str] = ()) -> None:
        self.model = load_model(find_source(folder), overrides=overrides)

    def run(self, prompts: list[list[int]], count: int) -> Turn:
        began = time.perf_counter()
        decoding = Decoding(self.model, prompts, max_tokens=count, sampling=Sampling(greedy=True))
        decoding.step()
        first = time.perf_counter()
        while not decoding.is_done:
            decoding.step()
        return Turn(
            first - began, time.perf_counter() - first, [tokens[len(prompts[0]) :] for tokens in decoding.tokens]
        )


def save(folder: Path, model: dict[str, Any]) -> None:
    """Save a checkpoint of fresh weights, grown so that the likeliest token is so by far."""
    config = dict(
        parallel=dict(data=1), model=model, checkpoint=dict(dir=str(folder)), device="cpu",
        train=dict(global_batch_size=1),
    )  # fmt: skip
    engine = colossus.initialize(config)
    with torch.no_grad():
        for name, param in engine.model.named_parameters():
            if "norm" not in name:
                param.mul_(3)
    engine.checkpoints.save(background=False).wait()
    engine.close()


def measure(folder: Path, options: Any, arguments: Any, batch: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, options.vocab_size, (batch, arguments.prompt), generator=generator).tolist()
    cases: dict[str, Any] = {
        "plain": Plain(folder, options, fused=True),
        "plain-apart": Plain(folder, options, fused=False),
        OURS: Ours(folder),
    }
    tokens_by_case = {name: case.run(prompts, arguments.tokens).tokens for name, case in cases.items()}
    for name, tokens in tokens_by_case.items():
        if tokens != tokens_by_case["plain"]:
            raise RuntimeError(f"{name} makes other tokens than plain: nothing can be compared")
    turns: dict[str, list[Turn]] = {name: [] for name in cases}

    def total(name: str) -> float:
        turn = cases[name].run(prompts, arguments.tokens)
        turns[name].append(turn)
        return turn.prefill + turn.decode

    series = common.alternate({name: partial(total, name) for name in cases}, arguments.blocks, label=f"batch {batch}")
    peer = min(("plain", "plain-apart"), key=lambda name: common.Spread.of(series[name]).median)
    rows = []
    for name in cases:
        prefill = common.Spread.of([turn.prefill for turn in turns[name]]).median
        decode = common.Spread.of([turn.decode for turn in turns[name]]).median
        speeds = (batch * arguments.prompt / prefill, batch * (arguments.tokens - 1) / decode)
        rows.append((name, *(f"{speed:.1f}" for speed in speeds), common.ratio(series, name, peer)))
    common.print_table(
        f"batch {batch}: {arguments.prompt} tokens of prompt, {arguments.tokens} made",
        ("case", "prefill tokens/s", "decode tokens/s", f"time / {peer}"),
        rows,
    )
    return {"batch": batch, "peer": peer, "seconds": series, "tokens_of_plain": tokens_by_case["plain"][0]}


def measure_ranks(folder: Path, group: RankGroup, arguments: Any, batch: int, wanted: list[int]) -> float:
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, arguments.vocab, (batch, arguments.prompt), generator=generator).tolist()
    turns = [group.call("run", prompts, arguments.tokens) for _ in range(1 + min(3, arguments.blocks))][1:]
    if turns[0][0].tokens[0] != wanted:
        raise RuntimeError(f"{TENSOR} makes other tokens than plain")
    speed = batch * (arguments.tokens - 1) / min(max(turn.decode for turn in ranks) for ranks in turns)
    print(f"  {TENSOR}, batch {batch}: {speed:.1f} decode tokens/s")
    return speed


def main(argv: Sequence[str] | None = None) -> int:
    parser = common.make_parser(__doc__, blocks=7)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="(default: all)")
    parser.add_argument("--hidden", type=int, default=512, help="(default %(default)s)")
    parser.add_argument("--layers", type=int, default=8, help="(default %(default)s)")
    parser.add_argument("--vocab", type=int, default=256, help="(default %(default)s)")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the prompt (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens to make (default %(default)s)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], help="(default 1 8)")
    arguments = parser.parse_args(argv)
    if arguments.smoke:
        arguments.hidden, arguments.layers, arguments.prompt, arguments.tokens, arguments.blocks = 64, 2, 4, 6, 2
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for name in arguments.models:
        model = {
            **MODELS[name], "num_layers": arguments.layers, "hidden_size": arguments.hidden, "num_heads": 8,
            "vocab_size": arguments.vocab, "seq_len": arguments.prompt + arguments.tokens,
        }  # fmt: skip
        options = registry.MODELS.options(model["type"])(
            **{key: value for key, value in model.items() if key != "type"}
        )
        with TemporaryDirectory() as temporary:
            folder = Path(temporary)
            save(folder, model)
            print(f"\n{name}: hidden {arguments.hidden} x {arguments.layers} layers, fp32, one thread")
            with RankGroup(TENSOR, 2, lambda rank: Ours(folder, ["parallel.tensor=2"])) as group:  # noqa: B023
                results[name] = [measure(folder, options, arguments, batch) for batch in arguments.batches]
                for row in results[name]:
                    expected = row.pop("tokens_of_plain")
                    row[TENSOR] = measure_ranks(folder, group, arguments, row["batch"], expected)
    common.write_json(arguments.json, results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
