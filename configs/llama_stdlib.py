"""A small byte-level Llama on the source of the Python standard library: data 2 x tensor 2 on 4 processes.

    colossus launch configs/llama_stdlib.py

Grouped-query attention with one key/value head for each two query heads. Any plan trains the same model: try
parallel.tensor=4 parallel.data=1, where each of the two key/value heads is on two ranks, or parallel.tensor=1
parallel.sequence=2.
"""

parallel = dict(data=2, tensor=dict(mode="1d", size=2))
model = dict(
    type="Llama", num_layers=4, hidden_size=128, num_heads=4, num_kv_heads=2, vocab_size=256, seq_len=128,
    rotary_base=10000.0,
)  # fmt: skip
data = dict(type="PythonStdlib")
optimizer = dict(type="AdamW", lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
lr_schedule = dict(type="cosine", warmup_steps=50, min_ratio=0.05)
train = dict(steps=400, global_batch_size=32, clip_grad_norm=1.0, eval_every=200, eval_batches=90, seed=0)
checkpoint = dict(every=200)  # and after the last step; `colossus launch configs/llama_stdlib.py --resume` goes on
