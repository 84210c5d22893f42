"""The run of `benchmarks.restarts`: two ranks of a GPT note their progress; rank 1 kills itself before step DEATH."""

import os
import signal
from typing import Any

from benchmarks.restart_moments import note

_IS_RANK = "RANK" in os.environ
if _IS_RANK:
    note("python")

from colossus.engine import Hook, initialize  # noqa: E402


class _Moments(Hook):
    def on_train_start(self, engine: Any) -> None:
        note("resumed")

    def on_step_start(self, engine: Any) -> None:
        is_first_attempt = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if is_first_attempt and os.environ["RANK"] == "1" and engine.completed_steps + 1 == int(os.environ["DEATH"]):
            note("death")
            os.kill(os.getpid(), signal.SIGKILL)

    def on_step_end(self, engine: Any, result: Any) -> None:
        note("step")


def _noted_make_engine(*arguments: Any, **options: Any) -> Any:
    note("imported")
    engine = _make_engine(*arguments, **options)
    note("built")
    return engine


if _IS_RANK:
    _make_engine, initialize.make_engine = initialize.make_engine, _noted_make_engine

hooks = [_Moments]
parallel = dict(data=2)
model = dict(type="GPT", num_layers=4, hidden_size=64, num_heads=4, vocab_size=256, seq_len=128)
data = dict(type="PythonStdlib")
optimizer = dict(type="AdamW", lr=1e-3)
train = dict(steps=100, global_batch_size=16, clip_grad_norm=1.0, eval_every=0)
launch = dict(restarts=1)
