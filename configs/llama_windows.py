"""A Llama whose layers attend to 256 bytes, every fourth to all of 4096, each sequence split over 4 processes.

    colossus launch configs/llama_windows.py

A rank's local layers need the keys of its two neighbours only.
"""

parallel = dict(sequence=dict(size=4, mode="ring"))
model = dict(
    type="Llama", num_layers=4, hidden_size=128, num_heads=4, vocab_size=256, seq_len=4096,
    window=256, attention_pattern=3 * ["local"] + ["global"], rotary_base=100_000.0, rotary_base_local=10_000.0,
    qk_norm=True,
)  # fmt: skip
data = dict(type="PythonStdlib")
optimizer = dict(type="AdamW", lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
lr_schedule = dict(type="cosine", warmup_steps=20, min_ratio=0.05)
train = dict(steps=200, global_batch_size=4, clip_grad_norm=1.0, eval_every=100, eval_batches=10, seed=0)
