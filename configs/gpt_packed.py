"""A GPT on the files of the standard library as documents, packed into rows of 512 bytes: data 2 on 2 processes.

    colossus data show configs/gpt_packed.py
    colossus launch configs/gpt_packed.py

A byte attends only to its own file. Any plan trains the same model: try parallel.data=1 parallel.tensor=2.
"""

parallel = dict(data=2)
model = dict(
    type="GPT", num_layers=4, hidden_size=128, num_heads=4, vocab_size=256, seq_len=512, positions="rotary",
    norm="rmsnorm", mlp="swiglu",
)  # fmt: skip
data = dict(
    type="Packed", strategy="best_fit", source=dict(type="Text", source=dict(type="StdlibFiles"), end=0, skip=["empty"])
)  # fmt: skip
optimizer = dict(type="AdamW", lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
lr_schedule = dict(type="cosine", warmup_steps=20, min_ratio=0.05)
train = dict(steps=200, global_batch_size=8, clip_grad_norm=1.0, eval_every=100, eval_batches=10, seed=0)
