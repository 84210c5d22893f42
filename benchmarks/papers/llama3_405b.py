"""Llama 3 405B (2407.21783, table 3): 126 layers, 8 key/value heads, 8,192 tokens, a vocabulary of 128,256.

    colossus plan benchmarks/papers/llama3_405b.py --devices 16384 --hosts 2048 --hardware h100

The plan below is the report's on 8,192 H100 (table 4): tensor 8, pipeline 16, data 64, 2,048 sequences in a batch and
one in a microbatch, no activation checkpointing. Its 126 layers and both ends are 128 blocks, one for each of eight
stages on a rank. Nothing is read but bytes of Python's standard library: only sizes count here.
"""

parallel = dict(data=64, pipeline=16, tensor=dict(mode="1d", size=8, sequence_sharded=True), zero=1)
model = dict(
    type="Llama", num_layers=126, hidden_size=16384, num_heads=128, num_kv_heads=8, ffn_hidden_size=53248,
    vocab_size=128256, seq_len=8192, rotary_base=500000.0,
)  # fmt: skip
data = dict(type="PythonStdlib")
optimizer = dict(type="AdamW", lr=8e-5, betas=(0.9, 0.95), weight_decay=0.1)
schedule = dict(type="interleaved", microbatches=32, chunks=8)
train = dict(steps=1000, global_batch_size=2048, precision="bf16", clip_grad_norm=1.0)
