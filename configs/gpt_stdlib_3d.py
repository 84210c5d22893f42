"""The GPT of gpt_stdlib.py, cut in all three directions: pipeline 2 x data 2 x tensor 2 on 8 processes.

    colossus launch configs/gpt_stdlib_3d.py

It trains the same model: losses agree with those of gpt_stdlib.py. To see what runs when, and how the model is cut:

    colossus show configs/gpt_stdlib_3d.py --timeline
    colossus launch configs/gpt_stdlib_3d.py --dry-run

Any schedule trains the same, too: try schedule.type=zb-h1, zb-v, interleaved or gpipe.
"""

parallel = dict(data=2, pipeline=2, tensor=dict(mode="1d", size=2))
schedule = dict(type="1f1b", microbatches=4)
model = dict(type="GPT", num_layers=4, hidden_size=128, num_heads=4, vocab_size=256, seq_len=128)
data = dict(type="PythonStdlib")
optimizer = dict(type="AdamW", lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
lr_schedule = dict(type="cosine", warmup_steps=50, min_ratio=0.05)
train = dict(steps=500, global_batch_size=32, clip_grad_norm=1.0, eval_every=250, eval_batches=90, seed=0)
