"""`colossus verify` of a model of transformers that is not changed."""

from __future__ import annotations

import pytest
from helpers.verified import Verify

TEXT = """
import transformers
from colossus.convert.forward_chain import make_chain

def model():
    sizes = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=28, vocab_size=13)
    config = transformers.GPTNeoXConfig(**sizes, max_position_embeddings=8, use_cache=False)
    made = transformers.GPTNeoXForCausalLM(config)
    make_chain(made, torch.ones(2, 6, dtype=torch.long))
    made.loss = loss
    return made

def loss(outputs, batch):
    logits = outputs.logits
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum"), batch["labels"].numel()

parallel = dict(pipeline=2)
schedule = dict(type="1f1b", microbatches=2)
data = _Tokens
optimizer = dict(type="SGD", lr=0.1)
train = dict(steps=1, global_batch_size=4)
device = "cpu"
"""


def test_the_outputs_of_modules_are_those_of_one_process(verify: Verify) -> None:
    code, out, err = verify(TEXT)
    print(out, err)
    assert code == 0


HOOKED = """
import colossus

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.up, self.down = nn.Embedding(13, 8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.head, self.drop = nn.Linear(8, 13, bias=False), nn.Dropout(0.2)
        self.head.weight = self.words.weight
        self.up.weight.register_hook(lambda grad: grad * 0.5)
        self.words.weight.lr_scale = 2.0

    def forward(self, ids):
        x = self.words(ids)
        return self.head(self.drop(x + self.down(torch.relu(self.up(x)))))

def loss(logits, batch):
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum"), batch["labels"].numel()

def net():
    made = colossus.parallelize(Net, example=torch.ones(2, 6, dtype=torch.long))()
    made.loss = loss
    return made

class Scaled(torch.optim.SGD):
    def __init__(self, params, lr):
        groups = [dict(params=[param], lr=lr * getattr(param, "lr_scale", 1.0)) for param in params]
        super().__init__(groups, lr=lr)

model = net
data = _Tokens
optimizer = dict(type=Scaled, lr=0.1)
train = dict(steps=2, global_batch_size=4)
device = "cpu"
"""


def test_the_reference_has_the_hooks_of_parameters(verify: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversion that loses them in one process, too, is a difference; so is one that loses attributes."""
    code, out, _ = verify(HOOKED, "parallel.tensor=2")
    assert code == 0, out
    with monkeypatch.context() as patched:
        patched.setattr("colossus.convert.swap.share_hooks", lambda made, parameter: None)
        code, out, _ = verify(HOOKED, "parallel.data=2")
    assert code == 3
    assert out.startswith("DIFFERENT at step 1: the gradient of up.weight\n")
    with monkeypatch.context() as patched:
        patched.setattr("colossus.convert.swap.copy_attributes", lambda made, parameter: None)
        code, out, _ = verify(HOOKED, "parallel.tensor=2")
    assert code == 3
    assert out.startswith("DIFFERENT at step 1: words.weight after the optimizer\n")
