"""`colossus verify` of a model of transformers that is not changed."""

from __future__ import annotations

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
