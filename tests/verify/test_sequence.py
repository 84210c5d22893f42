"""``colossus verify`` under a plan that splits sequences: no rank has all tokens of a sample."""

from __future__ import annotations

import textwrap

import pytest
from helpers.long import but
from helpers.verified import Verify, counts

#: sequences of LENGTH tokens; labels of the first ones are ignored, in each sample another number
TOKENS = """
class _Sequences(torch.utils.data.Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        row = torch.randint(0, 13, (LENGTH + 1,), generator=torch.Generator().manual_seed(index))
        labels = row[1:].clone()
        labels[: index % 3] = -100
        return {"inputs": row[:-1], "labels": labels}

data = dict(type=_Sequences)
train = dict(global_batch_size=4, clip_grad_norm=0.5)
optimizer = dict(type="AdamW", lr=1e-2)
"""

GPT = """
model = dict(type="GPT", num_layers=2, hidden_size=16, num_heads=4, vocab_size=13, seq_len=LENGTH)
"""

# its own part is position-wise, but for MIDDLE; `local` is the way to a plain tensor
NET = """
local = getattr(layers, "local", lambda x: x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(13, 16)
        self.up = layers.Linear(16, 16)
        self.attention = layers.Attention(16, 4)
        self.norm = nn.LayerNorm(16)
        self.heads = Heads()
        self.middle = MIDDLE
        self.down = nn.Linear(16, 13)
    def forward(self, ids):
        h = self.up(self.embedding(ids))
        return self.down(self.middle(self.heads(self.norm(h + self.attention(h)))))
    def loss(self, outputs, batch):
        labels = batch["labels"]
        return F.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction="sum"), (labels >= 0).sum()

class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.turned = nn.Identity()
    def forward(self, x):
        return self.turned(x.unflatten(-1, (4, 4)).transpose(1, 2)).transpose(1, 2).flatten(2) + x

model = dict(type=Net)
"""

RING = ["parallel.sequence=2", "--steps=1"]
ULYSSES = ["parallel.sequence.size=2", "parallel.sequence.mode=ulysses"]
HYBRID = ["parallel.sequence.size=4", "parallel.sequence.mode=hybrid", "parallel.sequence.ulysses=2"]
PLANS = {
    "ring": (8, RING),
    "padded": (7, [*RING, "parallel.sequence.pad=True", "parallel.data=2"]),
    "ulysses_tensor": (6, [*ULYSSES, "parallel.tensor=2"]),
    "hybrid": (8, HYBRID),
    "pipeline": (7, [*RING, "parallel.sequence.pad=True", "parallel.pipeline=2", "schedule.microbatches=2"]),
    "2d": (8, [*RING, "parallel.tensor.mode=2d", "parallel.tensor.shape=(2,1)"]),
}


def text_of(model: str, length: int) -> str:
    return (textwrap.dedent(TOKENS) + model).replace("LENGTH", str(length))


# the model below runs padded and with tensor ranks
@pytest.mark.parametrize("plan", but(("2d", "hybrid", "padded", "ulysses_tensor"), PLANS))
def test_a_gpt_agrees(verify: Verify, plan: str) -> None:
    length, words = PLANS[plan]
    code, out, err = verify(text_of(GPT, length), *words)
    assert (code, err) == (0, ""), out
    assert counts(out)["outputs of modules"] == 8, "embedding, positions, dropout, two blocks, norm, head, model"
    assert counts(out)["gradients"] == counts(out)["initial values"]


MIXING = {
    "a mean over tokens": ("x + x.mean(1, keepdim=True)", 8, RING),
    "a shift": ("x + x.roll(1, 1)", 7, [*RING, "parallel.sequence.pad=True"]),
    "positions": ("x + torch.arange(x.shape[1], dtype=x.dtype)[:, None]", 6, ULYSSES),
    "pooled": ("x.mean(1)", 8, RING),
    "a class token": ("torch.cat((x[:, :1], x), 1)", 8, RING),
}  # fmt: skip


@pytest.mark.rest("a class token", "positions", "a shift")
@pytest.mark.parametrize("name", MIXING)
def test_a_module_that_mixes_tokens_is_named(verify: Verify, name: str) -> None:
    expression, length, words = MIXING[name]
    mixing = f"""
class Mixing(nn.Module):
    def forward(self, x):
        x = local(x)
        return {expression}
"""
    net = mixing + NET.replace("MIDDLE", "Mixing()")
    if name == "pooled":
        net = net.replace("outputs.flatten(0, 1), labels.flatten()", "outputs, labels[:, -1] % 13")
    if name == "a class token":
        net = net.replace("self.down(", "self.down(local(").replace("))))\n", "))))[:, 1:])\n")
    code, out, err = verify(text_of(net, length), *words)
    assert (code, err) == (3, ""), out
    assert out.startswith("DIFFERENT at step 1: the output of middle\n")
    if name == "a class token":
        assert "class Mixing\n  shape [5, 16] for each sample, in one process [9, 16]\n" in out
    assert "the samples and the outputs before it agree, the last is that of heads\n" in out
    assert "a rank has a part of the tokens of each sequence" in out


def test_a_gradient_that_is_wrong_on_some_tokens(verify: Verify) -> None:
    """The forward is right; the backward of one rank's tokens is not."""
    text = """
class Halved(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        if os.environ.get("RANK") == "1":
            self.weight.register_hook(lambda grad: 0.5 * grad)
    def forward(self, x):
        return x * self.weight
"""
    code, out, _ = verify(text_of(text + NET.replace("MIDDLE", "Halved()"), 8), *RING)
    assert code == 3
    assert out.startswith("DIFFERENT at step 1: the gradient of middle.weight\n")
    assert "its gradient is summed over sequence" in out
