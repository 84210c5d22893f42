"""A small byte-level mixture of experts on the source of the Python standard library: 8 experts over 4 processes.

    colossus launch configs/moe_stdlib.py

Each token goes through 2 of the 8 experts of a layer, two of which are on each rank. The dense model that computes as
much for a token: model.experts=None model.ffn_hidden_size=384 parallel.expert=1. Converted to Hugging Face it is a
Mixtral.
"""

parallel = dict(data=4, expert=4)
model = dict(
    type="Llama", num_layers=4, hidden_size=128, num_heads=4, num_kv_heads=2, vocab_size=256, seq_len=128,
    ffn_hidden_size=192, experts=dict(num=8, top_k=2, aux_loss=0.01),
)  # fmt: skip
data = dict(type="PythonStdlib")
optimizer = dict(type="AdamW", lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
lr_schedule = dict(type="cosine", warmup_steps=50, min_ratio=0.05)
train = dict(steps=600, global_batch_size=32, clip_grad_norm=1.0, eval_every=200, eval_batches=45, seed=0)
checkpoint = dict(every=200)  # and after the last step; `colossus launch configs/moe_stdlib.py --resume` goes on
