"""Attention over a split sequence: exactness, bytes against the formula, balance, memory, time; and a long sequence.

    python -m benchmarks.sequence                # minutes
    python -m benchmarks.sequence --smoke        # seconds, toy sizes
    python -m benchmarks.sequence --tokens 8192 --local 1024

Beside one process's scaled_dot_product_attention in the same run. Torch's own context parallel does not run on CPU. All
ranks share this machine's cores, so the time to look at is processor time, summed over the ranks.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from benchmarks.common import Spread, make_parser, print_table, progress, write_json
from benchmarks.ranks import RankGroup
from benchmarks.sequence_cases import AttentionCase, Counted, Shape, TrainWorker
from colossus.sequence_parallel.mask import Mask
from colossus.sequence_parallel.modes import attention_traffic

MB = 1e6
#: tokens of a mask as a tensor that one process computes with
LARGEST_DENSE = 16384
PARTS = ("modes", "masked", "memory", "train")


def ring_and_ulysses(mode: str, world: int) -> dict[str, int]:
    """Return the numbers of ring and of Ulysses ranks, as arguments of `attention_traffic`."""
    if mode == "hybrid":
        from colossus.sequence_parallel.modes import Hybrid

        return dict(Hybrid.axis_sizes(world))
    return {mode: world}


def attention(shape: Shape, modes: list[tuple[str, int]], blocks: int) -> list[dict[str, Any]]:
    """Measure every mode beside one process, in alternating blocks."""
    reference = RankGroup("one process", 1, partial(_case, shape, "ring", 1))
    groups = {(mode, n): RankGroup(f"{mode} x {n}", n, partial(_case, shape, mode, n)) for mode, n in modes}
    try:
        whole = reference.call("result")[0]
        rows: dict[tuple[str, int], dict[str, Any]] = {}
        for (mode, n), group in groups.items():
            counted: list[Counted] = group.call("count")
            formula = attention_traffic(
                shape.tokens * shape.batch, shape.heads, shape.kv_heads, shape.head_dim, **ring_and_ulysses(mode, n)
            )
            gap = max(group.call("gap", whole))
            if gap > 1e-4:
                raise SystemExit(f"{mode} x {n}: output or gradients differ from one process by {gap:.2g}")
            rows[mode, n] = {
                "mode": mode, "ranks": n, "gap": gap, "formula": asdict(formula),
                "counted": [asdict(count) for count in counted], "processor": [], "slowest": [], "wall": [],
            }  # fmt: skip
        for block in range(blocks):
            progress(f"attention, block {block + 1}/{blocks}")
            base_cpu, base_wall = reference.call("times", 2)[0]
            for key, group in groups.items():
                times = group.call("times", 2)
                used = [cpu for cpu, _ in times]
                rows[key]["processor"].append(sum(used) / base_cpu)
                rows[key]["slowest"].append(max(used) / (sum(used) / len(used)))
                rows[key]["wall"].append(max(wall for _, wall in times) / base_wall)
        progress("")
        return list(rows.values())
    finally:
        for group in (reference, *groups.values()):
            group.close()


def masked(tokens: int, blocks: int) -> list[dict[str, Any]]:
    """Measure a window, and packed documents, in one process with a dense mask and in tiles, and over 4 ranks."""
    window = Shape(tokens, heads=2, kv_heads=2, mask=Mask.window(max(tokens // 16, 2) - 1))
    packed = Shape(tokens, heads=2, kv_heads=2, lengths=lengths_of(tokens))
    rows = []
    for kind, shape in (("window", window), ("packed", packed)):
        cases = [("in tiles", shape, 1)]
        if tokens <= LARGEST_DENSE:
            cases.append(("dense mask", replace(shape, is_dense=True), 1))
        for chunks in (2, 8, 32):
            cases.append((f"ring x 4, {chunks} chunks", replace(shape, chunks=chunks), 4))
        used: list[list[list[float]]] = [[] for _ in cases]
        with ExitStack() as stack:
            groups = []
            for name, each, n in cases:
                group = RankGroup(f"{kind}: {name}", n, partial(_case, each, "ring", n))
                stack.callback(group.close)
                groups.append(group)
            whole = groups[tokens <= LARGEST_DENSE].call("result")[0]
            counted = [group.call("count") for group in groups]
            gaps = [max(group.call("gap", whole)) for group in groups]
            for block in range(blocks):
                progress(f"{kind}, block {block + 1}/{blocks}")
                for times, group in zip(used, groups, strict=True):
                    times.append([cpu for cpu, _ in group.call("times", 1)])
        progress("")
        if max(gaps) > 1e-4:
            raise SystemExit(f"{kind}: output or gradients differ from one process's by {max(gaps):.2g}")
        for (name, _, n), counts, times, gap in zip(cases, counted, used, gaps, strict=True):
            rows.append({
                "kind": kind, "name": name, "ranks": n, "gap": gap, "counted": [asdict(count) for count in counts],
                "pairs": shape.pairs, "seconds": [sum(of_ranks) for of_ranks in times],
                "processor": [sum(mine) / sum(base) for mine, base in zip(times, used[0], strict=True)],
                "share": [n * max(mine) / sum(base) for mine, base in zip(times, used[0], strict=True)],
            })  # fmt: skip
    return rows


def lengths_of(tokens: int) -> tuple[int, ...]:
    """Return the lengths of 16 documents that differ as those of files do."""
    sizes = (900, 15000, 340, 4200, 7400, 120, 26000, 2300, 610, 9800, 5100, 3300, 12200, 1800, 450, 8784)
    lengths = [max(1, size * tokens // sum(sizes)) for size in sizes]
    return (*lengths[:-1], tokens - sum(lengths[:-1]))


def memory_of(shape_of: Any, mode: str, counts: list[int]) -> dict[int, list[int]]:
    """Return peak bytes on top of those between steps, per rank, at a fixed number of tokens on each rank."""
    peaks = {}
    for n in counts:
        progress(f"memory, {mode} x {n}")
        with RankGroup(f"{mode} x {n}", n, partial(_case, shape_of(n), mode, n)) as group:
            peaks[n] = group.call("peak")
    progress("")
    return peaks


def train(tokens: int, hidden: int, num_layers: int, ranks: int, steps: int) -> dict[str, Any]:
    """Train the same GPT on the same long sequence, in one process and over ranks."""
    out: dict[str, Any] = {"tokens": tokens, "ranks": ranks}
    for n in (1, ranks):
        progress(f"training on {tokens} tokens, {n} {'process' if n == 1 else 'processes'}")
        with RankGroup(f"GPT x {n}", n, partial(TrainWorker, tokens, hidden, num_layers, n), timeout=900) as group:
            results = group.call("train", steps)
        out[f"x{n}"] = {
            "losses": results[0][0],
            "peaks": [peak for _, peak, _ in results],
            "seconds": max(seconds for *_, seconds in results),
        }
    progress("")
    return out


def _case(shape: Shape, mode: str, world: int, rank: int) -> AttentionCase:
    return AttentionCase(shape, mode, rank, world)


def report(rows: list[dict[str, Any]], shape: Shape) -> None:
    wanted = shape.batch * shape.heads * shape.tokens * (shape.tokens + 1) // 2
    table, timed = [], []
    for row in rows:
        counted, formula, name = row["counted"], row["formula"], f"{row['mode']} x {row['ranks']}"
        scores = [count["scores"] for count in counted]
        mean = sum(scores) / len(scores)
        sent = [(count["forward"], count["backward"]) for count in counted]
        assert all(pair == (formula["forward"], formula["backward"]) for pair in sent), f"{name}: {sent} != {formula}"
        whole = row["mode"] != "ulysses"  # which computes by torch's own kernel, over all tokens
        table.append([
            name, f"{row['gap']:.1e}", f"{4 * formula['forward'] / MB:.1f}", f"{4 * formula['backward'] / MB:.1f}",
            f"{sum(scores) / wanted:.4f}" if whole else "-", f"{max(scores) / mean:.4f}" if whole else "-",
        ])  # fmt: skip
        timed.append([name, *(Spread.of(row[key]) for key in ("processor", "slowest", "wall"))])
    print_table(
        f"causal attention over {shape.tokens} tokens, {shape.heads} heads of {shape.head_dim}; MB sent = formula",
        ["", "gap", "MB forward", "MB backward", "scores / one process", "most / mean"],
        table,
    )
    print_table(
        "time / one process",
        ["", "processor, all ranks", "slowest rank / mean", "wall on shared cores"],
        timed,
    )


def report_masked(rows: list[dict[str, Any]], tokens: int) -> None:
    table = []
    for row in rows:
        sent, scores = row["counted"][0], [count["scores"] for count in row["counted"]]
        is_counted = row["name"] != "dense mask"  # torch's kernel computes all of them
        table.append([
            f"{row['kind']}: {row['name']}", f"{row['gap']:.1e}", f"{4 * sent['forward'] / MB:.1f}",
            f"{4 * sent['backward'] / MB:.1f}",
            f"{(sum(scores) if is_counted else 2 * tokens**2) / row['pairs']:.2f}",
            f"{max(scores) * len(scores) / sum(scores):.3f}" if is_counted else "-",
            f"{max(scores) * len(scores) / row['pairs']:.3f}" if is_counted else "-",
            Spread.of(row["processor"]), Spread.of(row["share"]),
        ])  # fmt: skip
    print_table(
        f"a window of {max(tokens // 16, 2)}, and 16 documents, in {tokens} tokens, 2 heads of 64",
        ["", "gap", "MB forward", "MB backward", "scores / pairs", "most / mean", "most / share of pairs",
         "processor of all ranks / in tiles", "slowest rank / its share of it"],
        table,
    )  # fmt: skip


def main() -> None:
    parser = make_parser(__doc__, blocks=5)
    parser.add_argument("--tokens", type=int, default=8192, help="of the whole sequence (default %(default)s)")
    parser.add_argument("--local", type=int, default=1024, help="tokens of a rank for memory (default %(default)s)")
    parser.add_argument("--train", type=int, default=16384, help="tokens of the training run (default %(default)s)")
    parser.add_argument("--masked", type=int, default=16384, help="tokens of windows, documents (default %(default)s)")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS, help="what is measured (default: all)")
    parser.add_argument("--device", default="cpu", help="of all ranks: cpu (default) or cuda, for attention alone")
    args = parser.parse_args()
    if args.smoke:
        args.tokens, args.local, args.train, args.masked, args.blocks = 128, 32, 64, 1024, 1
    found: dict[str, Any] = {}
    if "modes" in args.parts:
        shape = Shape(args.tokens, device=args.device)
        modes = [("ring", 2), ("ring", 4), ("ulysses", 4), ("hybrid", 4)]
        found["attention"] = attention(shape, modes, args.blocks)
        report(found["attention"], shape)
    if args.device != "cpu":  # processor time and memory are those of the CPU
        return write_json(args.json, found)
    if "masked" in args.parts:
        found["masked"] = masked(args.masked, args.blocks)
        report_masked(found["masked"], args.masked)
    if "memory" in args.parts:
        counts = [2, 4] if args.smoke else [2, 4, 8]
        found["memory"] = memory_of(lambda n: Shape(args.local * n), "ring", counts)
        print_table(
            f"peak memory of forward and backward on top of inputs, ring, {args.local} tokens on each rank",
            ["ranks", "MB, largest rank"],
            [[n, f"{max(of_ranks) / MB:.1f}"] for n, of_ranks in found["memory"].items()],
        )
    if "train" in args.parts:
        found["train"] = train(args.train, *((32, 1) if args.smoke else (128, 2)), 4 if args.smoke else 8, 1)
        report_training(found["train"])
    write_json(args.json, found)


def report_training(long: dict[str, Any]) -> None:
    one, many = long["x1"], long[f"x{long['ranks']}"]
    ratio = one["peaks"][0] / max(max(many["peaks"]), 1)
    print_table(
        f"training a GPT on one sequence of {long['tokens']} tokens",
        ["", "MB at the peak of a step", "seconds of a step", "losses"],
        [
            [name, f"{max(run['peaks']) / MB:.0f}", f"{run['seconds']:.1f}",
             " ".join(f"{loss:.5f}" for loss in run["losses"])]
            for name, run in (("one process", one), (f"each of {long['ranks']} ranks", many))
        ],
    )  # fmt: skip
    print(f"\n  one process needs {ratio:.1f} times the memory of a rank")


if __name__ == "__main__":
    main()
