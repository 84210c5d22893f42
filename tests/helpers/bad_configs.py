"""The table of configs that cannot train, with words that their refusals have."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

#: what every config of the table begins with
BASE = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from colossus import layers

parallel = dict()
model = dict(type="GPT", num_layers=2, hidden_size=16, num_heads=4, vocab_size=256, seq_len=8)
data = dict(type="PythonStdlib", max_bytes=20_000)
train = dict(steps=2, global_batch_size=8)

class _Samples(Dataset):
    def __init__(self, count=32, high=200, vocab=None, split="train"):
        self.count, self.high = count, high
        if vocab is not None:
            self.vocab_size = vocab
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        ids = torch.full((8,), self.high - (index != 3))
        return {"inputs": ids, "labels": ids}

class _Stream(IterableDataset):
    def __iter__(self):
        return iter([])

class _Net(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.linear = layers.Linear(width, width, split="column")
    def forward(self, x):
        return self.linear(x)
    def loss(self, outputs, batch):
        return outputs.sum(), 1

class _Words(nn.Module):
    def __init__(self, rows=256, tied=False):
        super().__init__()
        self.embedding = nn.Embedding(rows, 4, sparse=True)
        self.out = nn.Linear(4, rows)
        if tied:
            self.out.weight = self.embedding.weight
    def forward(self, ids):
        return self.out(self.embedding(ids))
    def loss(self, outputs, batch):
        return outputs.sum(), 1
"""


@dataclass(frozen=True)
class Bad:
    """One config: what stands behind `BASE`, overrides, options of ``launch``, and words that its refusal has."""

    text: str
    words: tuple[str, ...]
    overrides: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)


def bad(*words: str, text: str = "", overrides: str = "", **options: Any) -> Bad:
    return Bad(text, words, overrides.split(), options)


def tokens(path: str, **options: Any) -> str:
    return f"data = dict(type='TokenFile', path={path!r}, **{options})"


def samples(options: str) -> str:
    return f"data = dict(type=_Samples, {options})"


def words_bad(words: str, strategy: str, options: str = "") -> Bad:
    text = f"model = dict(type=_Words, {options})\ndata = dict(type=_Samples)\noptimizer = dict(type='SGD', lr=0.1)"
    return bad(words, text=text, overrides=f"parallel.data=4 parallel.{strategy}")


TABLE: dict[str, Bad] = {
    # what is missing
    "no model": bad("model: the config has none", text="model = None"),
    "no data": bad("data: the config has none", "PythonStdlib", text="data = None"),
    "neither": bad("2 problems", "model: ", "data: ", text="model = data = None"),
    "no such folder": bad("data: TextFolder", "'absent'", text="data = dict(type='TextFolder', path='absent')"),
    "empty folder": bad("data: TextFolder", "no file", text="data = dict(type='TextFolder', path='empty')"),
    "no such file": bad("data: TokenFile 'absent.bin' does not exist (looked from", text=tokens("absent.bin")),
    "a folder for a file": bad("is a folder, not a file", text=tokens("empty")),
    "no path": bad("data.path: is missing: TokenFile needs it", text="data = dict(type='TokenFile')"),
    "type of model": bad("no model named 'GTP'. Did you mean 'GPT'?", overrides="model.type=GTP"),
    "type of data": bad("no dataset named 'TokenFil'. Did you mean 'TokenFile'?", overrides="data.type=TokenFil"),
    # files of tokens
    "empty file": bad("is empty (0 bytes)", text=tokens("empty.bin")),
    "odd bytes": bad("has 33 bytes, which is not a multiple of 2", text=tokens("odd.bin")),
    "dtype": bad("has float32; tokens are integers in one dimension", text=tokens("ids.bin", dtype="float32")),
    "no dtype": bad("data.dtype = 'int99' is no type", text=tokens("ids.bin", dtype="int99")),
    "table of tokens": bad("has int64 [20, 20]; tokens are integers in one dimension", text=tokens("table.npy")),
    "no npy": bad("cannot be read as .npy", text=tokens("broken.npy")),
    "too short": bad(
        "has 19 tokens, but one sample needs seq_len + 1 = 65", text=tokens("short.bin"), overrides="model.seq_len=64"
    ),
    "validation fraction": bad("validation_fraction = 1.5 is outside", text=tokens("ids.bin", validation_fraction=1.5)),
    # ids beyond the vocabulary
    "vocabulary of bytes": bad(
        "model.vocab_size = 100", "set model.vocab_size to 256", overrides="model.vocab_size=100"
    ),
    "vocabulary of a file": bad(
        "has the token id 300, but the vocabulary has 256",
        "set model.vocab_size to 301",
        text=tokens("ids.bin", validation_fraction=0),
    ),
    "vocabulary of held-out tokens": bad(
        "(validation) has the token id 300", text=tokens("ids.bin", validation_fraction=0.1)
    ),
    "negative ids": bad("has the token id -3; ids must not be negative", text=tokens("negative.npy")),
    "stated vocabulary": bad(
        "token ids up to 299 (a vocabulary of 300), but model.vocab_size = 256", text=samples("vocab=300")
    ),
    "ids of a dataset": bad(
        "sample 3 of _Samples has the token id 256 in its inputs, but model.vocab_size = 256",
        "set model.vocab_size to 257",
        text=samples("high=256"),
    ),
    "ids of an object": bad("sample 0 of _Samples has the token id 399", text="data = _Samples(high=400)"),
    "ids of validation": bad("has the token id 399", text=samples("validation=_Samples(high=400)")),
    # fewer samples than a batch
    "batch of text": bad(
        "samples, fewer than train.global_batch_size = 4096", overrides="train.global_batch_size=4096"
    ),
    "batch of a file": bad(
        "has 6 samples, fewer than train.global_batch_size = 8",
        "6 or less",
        text=tokens("small.bin", validation_fraction=0),
    ),
    "batch of a dataset": bad("_Samples has 7 samples", text=samples("count=7")),
    "no samples": bad("_Samples has no samples", text=samples("count=0")),
    "batch of a loader": bad(
        "gives batches of 4 samples, but train.global_batch_size = 8 over 2 data ranks",
        "DistributedSampler",
        text="data = dict(type=lambda: DataLoader(_Samples(), batch_size=4))",
        overrides="parallel.data=2",
    ),
    # how data is read
    "workers": bad("data.num_workers: must be at least 0, got -1", overrides="data.num_workers=-1"),
    "workers of a stream": bad(
        "_Stream is an IterableDataset, and each worker would read all of it",
        text="data = dict(type=_Stream, num_workers=2)",
    ),
    "collate_fn": bad("data.collate_fn: input should be callable, got 3", text=samples("collate_fn=3")),
    "per_rank of a dataset": bad("data.per_rank is for a DataLoader", text=samples("per_rank=True")),
    "workers of a loader": bad(
        "data.num_workers are for a dataset",
        text="data = dict(type=lambda: DataLoader(_Samples(), batch_size=8), num_workers=1)",
    ),
    "option of data": bad("data.cuont: no such key; did you mean data.count?", text=samples("cuont=7")),
    "option of validation": bad(
        "data.cuont: no such key; did you mean data.count?", text=samples("validation=dict(cuont=7)")
    ),
    "type of validation": bad("no dataset named 'TextFold'", text=samples("validation=dict(type='TextFold')")),
    "validation that is no data": bad("data is a int, which is neither", text=samples("validation=5")),
    "validation read once": bad("is an iterator, which can be read once", text=samples("validation=iter([1])")),
    "eval batch": bad(
        "train.eval_batch_size = 3 is not a multiple of data 2; nearest: 2 or 4",
        overrides="train.eval_batch_size=3 parallel.data=2",
    ),
    # the optimizer and its learning rate
    "params": bad("optimizer.params: no such key; known keys of optimizer: type, lr", overrides="optimizer.params=[]"),
    "learning rate": bad("optimizer.lr: must be greater than 0, got 0", overrides="optimizer.lr=0"),
    "schedule without arguments": bad(
        "is called as f(progress, min_ratio, **options)", text="lr_schedule = lambda: 1.0"
    ),
    "schedule that raises": bad(
        "at progress 0 it raises ZeroDivisionError",
        text="lr_schedule = lambda progress, ratio: 1 / progress",
    ),
    "schedule that returns nothing": bad(
        "returns the learning rate as a part of optimizer.lr, 0 or more; at progress 0 it returns None",
        text="lr_schedule = lambda progress, ratio: None",
    ),
    "option of the schedule": bad(
        "lr_schedule.", "powr", text="lr_schedule = dict(type=lambda progress, ratio, power: 1.0, powr=2)"
    ),
    "batches that do not grow": bad(
        "train.batch_ramp is for a dataset whose samples are read by number",
        text="data = dict(type=lambda: DataLoader(_Samples(), batch_size=8))",
        overrides="train.batch_ramp=dict(start=4,steps=2) schedule.microbatches=2",
    ),
    # plan and model
    "processes": bad(
        "parallel: data 2 x tensor 2 = 4, but 3 processes", overrides="parallel.data=2 parallel.tensor=2", nproc=3
    ),
    "heads": bad("model.num_heads = 4 is not a multiple of parallel.tensor.size = 8", overrides="parallel.tensor=8"),
    "batch": bad(
        "train.global_batch_size = 8 is not a multiple of data 3 x microbatches 1 = 3; nearest: 6 or 9",
        overrides="parallel.data=3",
    ),
    "square": bad("parallel.tensor.size = 6 is not a square", text="parallel = dict(tensor=dict(mode='2d', size=6))"),
    "stages": bad("fewer than parallel.pipeline.size = 9", overrides="parallel.pipeline=9"),
    "split of stages": bad(
        "split = [1, 1]: 1 + 1 = 2, but the model has 4 blocks",
        overrides="parallel.pipeline=2 parallel.pipeline.split=[1,1]",
    ),
    "sequence": bad("model.seq_len = 8", "6", overrides="parallel.sequence=3"),
    "sequence mode": bad(
        "parallel.sequence.mode: no sequence mode named 'rings'",
        overrides="parallel.sequence=2 parallel.sequence.mode=rings",
    ),
    "user's layer": bad(
        "the model cannot be built under this plan",
        "out_features = 9 does not divide over the 2 ranks",
        text="model = dict(type=_Net, width=9)",
        overrides="parallel.tensor=2",
    ),
    "option of a user's model": bad(
        "model.widht: no such key; did you mean model.width?", text="model = dict(type=_Net, widht=8)"
    ),
    "schedule": bad("no schedule named '1f2b'", overrides="schedule.type=1f2b"),
    "strategy": bad("no data-parallel strategy named 'gossipp'", overrides="parallel.strategy=gossipp"),
    "spikes of replicas": bad(
        "train.on_spike: under an inexact strategy",
        text="",
        overrides="train.on_spike=dict(factor=2,action='raise') parallel.data=2 parallel.strategy=sgp",
    ),
    # tables
    "tables under gossip": words_bad("table 'embedding.weight' has sparse=True, but SGP takes dense", "strategy=sgp"),
    "tables and compression": words_bad(
        "AllReduce takes dense gradients only, as does compress",
        "strategy.type=all_reduce parallel.strategy.compress=bf16",
    ),
    "tables under ZeRO": words_bad("but Zero takes dense gradients only", "zero=3"),
    "owners and ZeRO": words_bad("zero = 3 and strategy = 'hybrid' both define", "strategy=hybrid parallel.zero=3"),
    "fewer rows than ranks": words_bad(
        "'embedding.weight' has 3 rows, fewer than the 4 ranks",
        "strategy.type=hybrid parallel.strategy.ways={'*':'owners'}",
        "rows=3",
    ),
    "owners of a tied table": words_bad(
        "'embedding.weight' is tied to out (Linear)",
        "strategy.type=hybrid parallel.strategy.ways={'embedding.weight':'owners'}",
        "tied=True",
    ),
    "ways of no table": words_bad(
        "parallel.strategy.ways: 'embeding.weight' fits no table with sparse=True; the tables are 'embedding",
        "strategy.type=hybrid parallel.strategy.ways={'embeding.weight':'owners'}",
    ),
    "no such way": words_bad(
        "parallel.strategy.ways.*: must be 'dense', 'gather' or 'owners'",
        "strategy.type=hybrid parallel.strategy.ways={'*':'owner'}",
    ),
    "hosts of tables": words_bad("hosts = 3 does not divide data 4", "strategy.type=hybrid parallel.strategy.hosts=3"),
    # everything else
    "cuda": bad("device = 'cuda', but torch finds no CUDA device", overrides="device=cuda"),
    "device": bad("device: must be 'auto', 'cpu' or 'cuda', got 'tpu'", overrides="device=tpu"),
    "huge timeout": bad("comm.timeout_seconds: must be at most 2e+06", overrides="comm.timeout_seconds=1e30"),
    "long name": bad("name: must have at most 200 letters, got 'xxx", overrides="name=" + 300 * "x"),
    "hook": bad("hooks.0.type: no hook named 'Tensorbord'. Did you mean 'TensorBoard'?", text="hooks = ['Tensorbord']"),
    "unknown key": bad(
        "train.global_batch: no such key; did you mean train.global_batch_size?", overrides="train.global_batch=3"
    ),
    "steps": bad("train.steps: must be at least 1, got 0", overrides="train.steps=0"),
    "profile": bad("profile.steps = (1, 3), but the run ends with step 2", overrides="train.profile.steps=(1,3)"),
    "profile of nobody": bad(
        "train.profile.ranks: no rank 1: this plan has rank 0 alone",
        overrides="train.profile=dict(steps=(1,2),ranks=(0,1))",
    ),
    "an override that is none": bad("'train.steps' has no '='", overrides="train.steps"),
    "a file that raises": bad("NameError: name 'nowhere' is not defined", text="data = nowhere"),
    "a file that exits": bad("SystemExit: the file called exit()", text="raise SystemExit(0)"),
    "a file that does not parse": bad("SyntaxError", text="train = dict(steps=3"),
    "nodes": bad("--nnodes 2 needs --rdzv-endpoint host:port", nnodes=(2, 2), overrides="parallel.data=2"),
    "run folder": bad("is a file, not a folder", run_dir="ids.bin"),
}
