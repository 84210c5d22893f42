"""Real function bodies of the Python standard library preferred over the same lines shuffled: DPO on 2 processes.

    colossus launch configs/dpo_stdlib.py
    colossus launch configs/gpt_stdlib.py model.seq_len=256 --run-dir runs/gpt
    colossus launch configs/dpo_stdlib.py checkpoint.weights=runs/gpt optimizer.lr=2e-4    # from a model of the text

The reference has the weights with which the model begins. ``margin`` is the mean over held-out pairs of beta times the
margin, ``accuracy`` the part of pairs whose margin is positive. Any plan trains the same model.
"""

import ast
import random
import sysconfig
from pathlib import Path

import torch
from torch.utils.data import Dataset

from colossus.data import collate_pairs


class FunctionPairs(Dataset):
    """Pairs [2, seq_len] of bytes: the head of a function and its lines in their order, and in another one."""

    def __init__(self, seq_len: int, split: str = "train", most: int = 4000) -> None:
        self.seq_len, self.functions = seq_len, []
        for number, path in enumerate(sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))):
            if (number % 10 == 0) == (split == "validation"):
                self.functions += functions_of(path.read_text(encoding="utf-8", errors="replace"), seq_len)
        self.functions = self.functions[:most]

    def __len__(self) -> int:
        return len(self.functions)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        head, body = self.functions[index]
        other = body[:]
        while other == body:
            random.Random(f"{index} {len(other)}").shuffle(other)
            other = other if other != body else body[::-1]
        rows = [self.row(head, "".join(lines)) for lines in (body, other)]
        return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}

    def row(self, head: str, body: str) -> dict[str, torch.Tensor]:
        """Return ids and labels of a text: the next bytes of the body, -100 for those of the head and the padding."""
        text, start = (head + body).encode(), len(head.encode())
        ids, labels = torch.zeros(self.seq_len, dtype=torch.int64), torch.full((self.seq_len,), -100)
        ids[: len(text)] = torch.tensor(list(text))
        labels[start - 1 : len(text) - 1] = ids[start : len(text)]
        return {"inputs": ids, "labels": labels}


def functions_of(text: str, most: int) -> list[tuple[str, list[str]]]:
    """Return head and body of each function of at most so many bytes, with a body of five different lines or more."""
    lines, functions = text.splitlines(keepends=True), []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            start, stop, first = node.lineno - 1, node.end_lineno, node.body[0].lineno - 1
            head, body = "".join(lines[start:first]), lines[first:stop]
            if first > start and len(set(body)) > 4 and len("".join(lines[start:stop]).encode()) <= most:
                functions.append((head, body))
    return functions


parallel = dict(data=2)
model = dict(
    type="GPT", num_layers=4, hidden_size=128, num_heads=4, vocab_size=256, seq_len=256,
    objective=dict(type="dpo", beta=0.1), reference=dict(),
)  # fmt: skip
data = dict(type=FunctionPairs, collate_fn=collate_pairs)
optimizer = dict(type="AdamW", lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
lr_schedule = dict(type="cosine", warmup_steps=10, min_ratio=0.1)
checkpoint = dict(every=60)
train = dict(steps=60, global_batch_size=16, clip_grad_norm=1.0, eval_every=20, eval_batches=8, log_every=10, seed=0)
