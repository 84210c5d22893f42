"""``colossus verify`` of losses and layers that look at several samples: the difference says what to call."""

from __future__ import annotations

import pytest
from helpers.verified import Verify

NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)
    def forward(self, x):
        x = self.up(x)
        return self.down(BODY)
    def loss(self, outputs, batch):
        every = LOSS
        return (every @ every.T).logsumexp(-1).mean() * len(outputs), len(outputs)

model = dict(type=Net)
data = dict(type=_Points)
train = dict(global_batch_size=8, samples_interact=INTERACT)
optimizer = dict(type="SGD", lr=0.1)
"""
HINT = "unless it uses colossus.layers.gather_samples or mean_over_samples, with train.samples_interact=True"


@pytest.mark.parametrize(
    ("loss", "middle", "what"),
    [("outputs", "x.tanh()", "the loss"), ("layers.gather_samples(outputs)", "x - x.mean(0)", "the output of down")],
)
def test_it_names_what_brings_samples_together(verify: Verify, loss: str, middle: str, what: str) -> None:
    text = NET.replace("LOSS", loss).replace("INTERACT", str("layers" in loss))
    code, out, err = verify(text, "parallel.data=2", middle=middle)
    assert code == 3, out + err
    assert f"DIFFERENT at step 1: {what}" in out
    assert HINT in out


def test_it_agrees_where_samples_are_gathered(verify: Verify) -> None:
    text = NET.replace("LOSS", "layers.gather_samples(outputs)").replace("INTERACT", "True")
    middle = "x - layers.mean_over_samples(x)"
    code, out, err = verify(text, "parallel.data=2", "schedule.microbatches=2", middle=middle)
    assert code == 0, out + err
