"""A language model over the words of Python's standard library, its large tables held by their owners: data 4 on 4
processes.

    colossus launch configs/words_hybrid.py
    colossus show configs/words_hybrid.py --strategy     # which table takes which way, and for how many bytes

The tables have 50,176 words, 131,072 buckets of pairs of words and the 50,176 classes of the softmax. A step touches a
few thousand rows of them. The loss of training is that of a sampled softmax. That of validation is the whole softmax
over all words, on the first 3,072 samples (98,304 words) held out: 3.45 with Python 3.11.7, in two minutes on two
quiet cores.
"""

# ids are sorted by frequency: parts of the tables are dealt to the owners in turn, so that all have as much to send
parallel = dict(data=4, strategy=dict(type="hybrid", partitions=1024))
model = dict(
    type="WordsLM", vocab_size=50_176, pairs=131_072, hidden_size=256, trunk="lstm", num_samples=1024, seq_len=32
)
data = dict(type="PythonStdlibWords")
optimizer = dict(type="AdamW", lr=3e-3, weight_decay=0.0, tables=dict(type="Adagrad", lr=0.1))
lr_schedule = dict(type="cosine", warmup_steps=20, min_ratio=0.1)
train = dict(steps=300, global_batch_size=128, clip_grad_norm=1.0, eval_every=300, eval_batches=24, seed=0)
