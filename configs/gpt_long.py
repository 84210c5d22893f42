"""A GPT on sequences of 4096 bytes, each split over 4 processes: ring attention with the causal zigzag.

    colossus launch configs/gpt_long.py

The other ways to split attention train the same model: parallel.sequence.mode=ulysses, or hybrid.
"""

parallel = dict(sequence=dict(size=4, mode="ring"))
model = dict(
    type="GPT", num_layers=2, hidden_size=128, num_heads=4, num_kv_heads=4, vocab_size=256, seq_len=4096,
    positions="rotary", norm="rmsnorm", mlp="swiglu",
)  # fmt: skip
data = dict(type="PythonStdlib")
optimizer = dict(type="AdamW", lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
lr_schedule = dict(type="cosine", warmup_steps=20, min_ratio=0.05)
train = dict(steps=200, global_batch_size=4, clip_grad_norm=1.0, eval_every=100, eval_batches=10, seed=0)
