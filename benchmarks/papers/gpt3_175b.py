"""GPT-3 175B (2005.14165), as Megatron-LM trained it: 96 layers, 2,048 tokens, a vocabulary of 51,200.

    colossus plan benchmarks/papers/gpt3_175b.py --devices 1024 --hosts 128 --hardware a100

The plan below is that of Korthikanti et al. (2205.05198) on 64 A100: tensor 8, pipeline 8, three stages on each rank,
microbatches of one sequence. Megatron-LM (2104.04473) took batches of 1,536 on 1,024. Nothing is read but bytes of
Python's standard library: only sizes count here.
"""

parallel = dict(data=1, pipeline=8, tensor=dict(mode="1d", size=8, sequence_sharded=True))
model = dict(type="GPT", num_layers=96, hidden_size=12288, num_heads=96, vocab_size=51200, seq_len=2048)
data = dict(type="PythonStdlib")
optimizer = dict(type="AdamW", lr=6e-5, betas=(0.9, 0.95), weight_decay=0.1)
schedule = dict(type="interleaved", microbatches=64, chunks=3)
train = dict(steps=1000, global_batch_size=64, precision="bf16", clip_grad_norm=1.0)
