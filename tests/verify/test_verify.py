"""``colossus verify``: what agrees agrees, and what is wrong is named.

Most runs here are forked instead of launched: the same config files, hooks and report, without the seconds that
processes take to start. The last tests go through the launcher.
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from helpers.launching import finish, start
from helpers.long import but
from helpers.verified import Verify, config_file, counts, leftovers

from colossus.config import load_config
from colossus.verify.capture import row_fingerprints
from colossus.verify.hooks import Comparison, Reference
from colossus.verify.run_verify import write_config

GPT = """
model = dict(type="GPT", num_layers=2, hidden_size=16, num_heads=4, vocab_size=13, seq_len=6)
data = dict(type=_Tokens)
train = dict(global_batch_size=8, clip_grad_norm=0.5)
optimizer = dict(type="AdamW", lr=1e-2)
"""

NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = layers.Linear(6, 16)
        self.norm = nn.LayerNorm(16)
        self.gain = nn.Parameter(torch.ones(16))
        self.middle = BODY
        self.down = layers.Linear(16, 4)
    def forward(self, x):
        return self.down(self.middle(self.gain * F.gelu(self.norm(self.up(x)))))
    def loss(self, outputs, batch):
        return _loss(outputs, batch)

model = dict(type=Net)
data = dict(type=_Points)
train = dict(global_batch_size=8)
optimizer = dict(type="SGD", lr=0.1)
"""

CHAIN = """
class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = layers.Linear(6, 16)
        self.middle = MIDDLE
        self.deep = layers.Linear(16, 16)
        self.behind = BEHIND
        self.down = nn.Linear(16, 4)
    def forward(self, x):
        return layers.run_blocks(self.pipeline_blocks(), x)
    def pipeline_blocks(self):
        return [self.up, self.middle, layers.PipelineBlock(self._deep, self.deep), self.behind, self.down]
    def _deep(self, x):
        return torch.tanh(self.deep(x))
    def loss(self, outputs, batch):
        return _loss(outputs, batch)

model = dict(type=Chain)
data = dict(type=_Points)
train = dict(global_batch_size=8)
optimizer = dict(type="SGD", lr=0.1)
schedule = dict(microbatches=2)
"""


def chain(middle: str = "nn.Tanh()", behind: str = "nn.Tanh()") -> str:
    """A model of five blocks: with two stages the last two are on the second one."""
    return CHAIN.replace("MIDDLE", middle).replace("BEHIND", behind)


TWO_BY_TWO = ["parallel.data=2", "parallel.tensor=2"]
PIPELINE = ["parallel.pipeline.size=2", "parallel.pipeline.split=(3,2)"]

# -- what agrees ----------------------------------------------------------------------------------------------


PLANS = {
    "data2_tensor2": TWO_BY_TWO,
    "zero": ["parallel.data=2", "parallel.zero=3", "parallel.tensor=2"],
    "2d": ["parallel.tensor.mode=2d", "parallel.tensor.size=4"],
    "3d": ["parallel.tensor.mode=3d", "parallel.tensor.shape=(2,1,2)"],
    "2.5d": ["parallel.tensor.mode=2.5d", "parallel.tensor.shape=(2,2,1)"],
    "selective": ["parallel.tensor.size=2", "parallel.tensor.sequence_sharded=True",
                  "model.activation_checkpoint=selective"],
    "full": ["parallel.tensor.size=2", "schedule.microbatches=2", "model.activation_checkpoint=full"],
}  # fmt: skip


@pytest.mark.parametrize("plan", but(("2d", "3d", "data2_tensor2", "full", "selective", "zero"), PLANS))
def test_a_gpt_agrees(verify: Verify, plan: str) -> None:
    code, out, err = verify(GPT, *PLANS[plan], "--steps=3")
    assert (code, err) == (0, ""), out
    assert "AGREE: " in out
    assert "follows one process over 3 steps, tolerance 1e-09" in out
    assert counts(out)["losses"] == counts(out)["gradient norms"] == counts(out)["samples"] == 3
    assert counts(out)["initial values"] * 3 == counts(out)["gradients"] == counts(out)["weights after a step"] == 108
    assert counts(out)["outputs of modules"] == 3 * 8, "embedding, positions, dropout, two blocks, norm, head, model"
    assert "rounding noise (such as key biases), up to " in out


def test_modules_that_run_again_in_backward_are_watched_once(verify: Verify) -> None:
    text = """
    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.grow = layers.Linear(16, 32, split="column")
            self.back = layers.Linear(32, 16, split="row")
        def forward(self, x):
            return layers.checkpoint(lambda x: self.back(F.relu(self.grow(x))), x, context=self.grow.context)
    """
    code, out, _ = verify(textwrap.dedent(text) + NET, *TWO_BY_TWO, "schedule.microbatches=2", middle="Again()")
    assert code == 0, out
    assert counts(out)["outputs of modules"] == 7


@pytest.mark.rest("nn.Dropout(0.4)")
@pytest.mark.parametrize("middle", ["nn.Dropout(0.4)", "Dropping()"])
def test_torchs_dropout_is_turned_off(verify: Verify, middle: str) -> None:
    text = """
    class Dropping(nn.Module):
        def forward(self, x):
            return F.dropout(x, 0.3, self.training)
    """
    code, out, _ = verify(textwrap.dedent(text) + NET, "parallel.data=2", middle=middle)
    assert code == 0, out


def test_our_dropout_is_the_same_and_on(verify: Verify) -> None:
    text = """
    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = layers.Dropout(0.4)
        def forward(self, x):
            y = self.drop(x)
            assert 0.2 < (layers.to_whole(y) == 0).double().mean() < 0.6
            return y
    """
    for plan in (["parallel.data=2", "schedule.microbatches=2"], ["parallel.tensor.mode=2d", "parallel.tensor.size=4"]):
        code, out, _ = verify(textwrap.dedent(text) + NET, *plan, middle="Dropping()")
        assert code == 0, out


@pytest.mark.parametrize(("module", "agrees"), [("layers", True), ("nn", False)])
def test_batch_norm_of_all_samples(verify: Verify, module: str, agrees: bool) -> None:
    """Torch's own is of the samples of one rank."""
    words = "parallel.data=2", "schedule.microbatches=2"
    code, out, _ = verify(NET, *words, middle=f"{module}.BatchNorm1d(16)")
    assert code == (0 if agrees else 3), out


# -- what is wrong --------------------------------------------------------------------------------------------


def test_a_forward_that_depends_on_the_rank(verify: Verify) -> None:
    text = """
    class Scaled(nn.Module):
        def forward(self, x):
            return x * (1 + int(os.environ["RANK"]) % 2)
    """
    code, out, _ = verify(textwrap.dedent(text) + NET, *TWO_BY_TWO, middle="Scaled()")
    assert code == 3
    lines = out.splitlines()
    assert lines[0] == "DIFFERENT at step 1: the output of middle"
    assert lines[1] == "  on ranks 1 (data 0, tensor 1), 3 (data 1, tensor 1)"
    assert "  class Scaled\n" in out
    assert "the samples and the outputs before it agree, the last is that of norm" in out
    assert "then also: down, the model\n" in out
    assert "initial values" in out


HALVED = """
    class Halved(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(16))
            RANKS = {ranks}
            if int(os.environ.get("RANK", "-1")) in RANKS and os.environ["WORLD_SIZE"] != "1":
                self.weight.register_hook(lambda grad: 0.5 * grad)
        def forward(self, x):
            return x * self.weight
"""


def test_a_gradient_that_is_halved(verify: Verify) -> None:
    """With clipping: the factor, which the wrong gradient changes, must not make the others differ."""
    text = textwrap.dedent(HALVED).replace("{ranks}", "[1]") + NET
    code, out, _ = verify(text, "parallel.data=2", "train.clip_grad_norm=0.01", middle="Halved()")
    assert code == 3
    assert out.startswith("DIFFERENT at step 1: the gradient of middle.weight\n")
    assert "shape [16], whole on every rank\n" in out
    assert "its gradient is summed over data" in out
    assert "then also" not in out
    assert "losses" in out


def test_a_copy_on_one_rank_that_differs(verify: Verify) -> None:
    """Tensor ranks hold the whole parameter, and nothing sums its gradient: rank 0's alone would be right."""
    text = textwrap.dedent(HALVED).replace("{ranks}", "[1]") + NET
    code, out, _ = verify(text, "parallel.tensor=2", middle="Halved()")
    assert code == 3
    assert out.startswith("DIFFERENT at step 1: the gradient of middle.weight\n  on rank 1 (tensor 1)\n")
    assert "its gradient needs no sum over ranks" in out


DOUBLED = """if os.environ.get('RANK') == 'NUMBER':
            self.NAME.weight.register_hook(lambda grad: 2.0 * grad)
        self."""


def test_the_shard_of_a_split_parameter_is_named(verify: Verify) -> None:
    """The gradient of a layer's weight, wrong on one of the two ranks that hold a shard of it."""
    doubled = DOUBLED.replace("NUMBER", "1").replace("NAME", "up")
    code, out, _ = verify(NET.replace("self.norm =", f"{doubled}norm ="), "parallel.tensor=2")
    assert code == 3
    assert "DIFFERENT at step 1: the gradient of up.weight\n  on rank 1 (tensor 1)\n" in out
    assert "shape [16, 6], layout [" in out
    assert "Shard(tensor)" in out


WRONG_LOSSES = [
    ("F.cross_entropy(outputs, batch[1]), batch[1].numel()", "the loss\n"),
    ("F.cross_entropy(outputs, batch[1], reduction='sum'), 8", "the number of valid samples of the global batch"),
]


@pytest.mark.long
def test_a_count_that_is_no_whole_number(verify: Verify) -> None:
    """A tenth too many in each call is a wrong loss, though it rounds to the same; weights of samples are none."""
    loss = "F.cross_entropy(outputs, batch[1], reduction='sum')"
    code, out, _ = verify(NET.replace("_loss(outputs, batch)", f"{loss}, len(outputs) + 0.1"), "parallel.data=2")
    assert code == 3
    assert out.startswith("DIFFERENT at step 1: the number of valid samples of the global batch")
    weighted = (
        "(F.cross_entropy(outputs, batch[1], reduction='none') * (w := 0.1 + batch[0][:, 0] ** 2)).sum(), w.sum()"
    )
    code, out, _ = verify(NET.replace("_loss(outputs, batch)", weighted), "parallel.data=2")
    assert code == 0, out


@pytest.mark.parametrize(("wrong", "named"), WRONG_LOSSES)
def test_a_wrong_loss_function(verify: Verify, wrong: str, named: str) -> None:
    code, out, _ = verify(NET.replace("_loss(outputs, batch)", wrong), "parallel.data=2")
    assert code == 3
    assert out.startswith(f"DIFFERENT at step 1: {named}")


@pytest.mark.parametrize("own", ["index + 100 * int(os.environ['RANK'])", "index % 4"], ids=["other", "twice"])
def test_data_that_depends_on_the_plan(verify: Verify, own: str) -> None:
    text = NET + textwrap.dedent(f"""
    class _Other(_Points):
        def __getitem__(self, index):
            return super().__getitem__({own} if os.environ["WORLD_SIZE"] == "2" else index)
    data = dict(type=_Other)
    """)
    code, out, _ = verify(text, "parallel.data=2")
    assert code == 3
    assert out.startswith("DIFFERENT at step 1: the samples\n")
    assert re.search(r"  \d of 8 samples under the plan are not in the batch of one process", out)


def test_a_model_that_splits_by_hand(verify: Verify) -> None:
    text = NET.replace("layers.Linear(16, 4)", "nn.Linear(16, 4 * int(os.environ.get('WORLD_SIZE', '1')))")
    code, out, _ = verify(text, "parallel.data=2")
    assert code == 3
    assert out.startswith("DIFFERENT from the start: the initial value of down.weight\n")
    assert "its full shape is [8, 16] under the plan and [4, 16] in one process" in out
    missing = "if os.environ.get('WORLD_SIZE', '1') == '1': self.extra = nn.Parameter(torch.ones(3))\n        self.up ="
    code, out, _ = verify(NET.replace("self.up =", missing), "parallel.data=2")
    assert code == 3
    assert "the initial value of extra\n" in out
    assert "the model has it in one process, but not under the plan" in out


def test_an_optimizer_that_takes_a_norm(verify: Verify) -> None:
    text = NET + textwrap.dedent("""
    class _Normed(torch.optim.Optimizer):
        def __init__(self, params, lr):
            super().__init__(params, dict(lr=lr))
        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for param in group["params"]:
                    param.sub_(param.grad / param.grad.norm(), alpha=group["lr"])
    optimizer = dict(type=_Normed, lr=0.1)
    """)
    code, out, _ = verify(text, "parallel.tensor=2")
    assert code == 3
    assert out.startswith("DIFFERENT at step 1: up.weight after the optimizer\n")
    assert verify(text, "parallel.data=2")[0] == 0, "whole parameters: nothing wrong with it"


def test_the_tolerance_decides(verify: Verify) -> None:
    """A forward that is off by 1e-6 on rank 1."""
    text = """
    class Off(nn.Module):
        def forward(self, x):
            return x * (1 + 1e-6 * int(os.environ["RANK"]))
    """
    off = textwrap.dedent(text) + NET
    code, out, _ = verify(off, "parallel.data=2", middle="Off()")
    assert code == 3
    assert "relative difference 1e-06 (tolerance 1e-09)" in out
    code, out, _ = verify(off, "parallel.data=2", "--tolerance", "1e-4", middle="Off()")
    assert code == 0
    assert re.search(r"outputs of modules +\d+ +[1-9.]+e-06 ", out)


# -- pipelines ------------------------------------------------------------------------------------------------


STAGED = {
    "1f1b": ["parallel.pipeline=2", "model.tie_embeddings=False"],
    "zb-v": ["parallel.pipeline=2", "model.tie_embeddings=False", "schedule.type=zb-v", "schedule.microbatches=4"],
    "tied": ["parallel.pipeline=2", "parallel.data=2", "schedule.type=interleaved", "schedule.microbatches=2"],
}


@pytest.mark.rest("1f1b", "zb-v")
@pytest.mark.parametrize("plan", STAGED)
def test_a_gpt_in_stages_agrees(verify: Verify, plan: str) -> None:
    """All of it is compared, each thing once: what is on one rank only, too."""
    code, out, err = verify(GPT, *STAGED[plan])
    assert (code, err) == (0, ""), out
    tensors = 36 if plan == "tied" else 37
    kinds = ("initial values", "gradients", "weights after a step")
    assert [counts(out)[kind] for kind in kinds] == [tensors] * 3
    assert counts(out)["outputs of modules"] == 8, "embedding, positions, dropout, two blocks, norm, head, model"


SIZED = """
    class Sized(nn.Module):
        def forward(self, x):
            return x * (1 + 0.01 * x.shape[0])
"""


@pytest.mark.rest("plan0-ranks 2 (pipeline 1, data 0), 3 (pipeline 1, data 1)")
@pytest.mark.parametrize(
    ("plan", "place"),
    [
        ([*PIPELINE, "parallel.data=2"], "ranks 2 (pipeline 1, data 0), 3 (pipeline 1, data 1)"),
        (["parallel.pipeline=2", "schedule.type=zb-v"], "rank 0 (pipeline 0)"),
    ],
)
def test_a_block_that_depends_on_the_microbatch_is_named(verify: Verify, plan: list[str], place: str) -> None:
    code, out, _ = verify(textwrap.dedent(SIZED) + chain(behind="Sized()"), *plan)
    assert code == 3
    assert out.startswith(f"DIFFERENT at step 1: the output of behind\n  on {place}\n")
    assert "the samples and the outputs before it agree, the last is that of deep\n" in out
    assert "then also: down, the model\n" in out


# -- usage ----------------------------------------------------------------------------------------------------


USAGE = [
    (["parallel.tensor=5"], "model.ffn_hidden_size = 24 is not a multiple of parallel.tensor.size = 5; nearest: "),
    (["--nproc", "3", "parallel.data=2"], "data 2, but 3 processes"),
    (["data=None"], "data: the file sets none, and verify needs one"),
    (["--tolerance", "0"], "argument --tolerance: must be a number above zero"),
]


@pytest.mark.parametrize(("words", "message"), USAGE)
def test_usage_errors(verify: Verify, words: list[str], message: str) -> None:
    code, out, err = verify(GPT.replace("num_heads=4", "num_heads=6, ffn_hidden_size=24").replace("=16", "=24"), *words)
    assert (code, out) == (2, ""), err
    assert message in err


# -- units ----------------------------------------------------------------------------------------------------


def test_fingerprints_see_every_element_and_no_batch_size() -> None:
    x = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for place in [(0, 0, 0), (3, 2, 4), (2, 1, 3)]:
        other = x.clone()
        other[place] += 1e-6
        difference = (row_fingerprints(other) - row_fingerprints(x)).abs().amax(1)
        assert (difference > 1e-8).tolist() == [row == place[0] for row in range(4)]
    torch.testing.assert_close(row_fingerprints(x[1:3]), row_fingerprints(x)[1:3], rtol=1e-14, atol=1e-14)
    swapped = x[:, [1, 0, 2]]
    assert ((row_fingerprints(swapped) - row_fingerprints(x)).abs().amax(1) > 1e-3).all()
    assert row_fingerprints(torch.ones(2)).shape == row_fingerprints(torch.ones(2, 0, 3)).shape == (2, 2)


def test_the_hooks_and_sections_of_both_runs(tmp_path: Path) -> None:
    user = config_file(tmp_path, GPT + "\nhooks = [print]\nlr_schedule = dict(type='linear')\n")
    overrides = [*TWO_BY_TWO, "train.precision=fp32", "train.steps=50", "schedule.microbatches=2"]
    for tolerance, kind, size in ((None, Reference, 1), (1e-9, Comparison, 2)):
        config = load_config(write_config(tmp_path, str(user), overrides, None, 2, tolerance=tolerance))
        assert [type(hook.type(**hook.options)) for hook in config.hooks] == [kind]
        assert (config.train.precision.name, config.train.steps, config.train.schedule_steps) == ("fp64", 2, 50)
        assert config.lr_schedule.type == "linear"
        assert (config.parallel.data, config.parallel.tensor.size) == (size, size)
        assert config.schedule.microbatches == 2  # in one process the hook makes it one


# -- through the launcher -------------------------------------------------------------------------------------


def from_outside(tmp_path: Path, *words: str) -> tuple[int, str, str]:
    return finish(start([sys.executable, "-m", "colossus", "verify", *words], tmp_path, TMPDIR=str(tmp_path)))


def test_launched_runs_are_compared_and_leave_nothing(tmp_path: Path) -> None:
    text = textwrap.dedent(HALVED).replace("{ranks}", "[0]") + NET
    code, out, err = from_outside(
        tmp_path, str(config_file(tmp_path, text, "Halved()")), "parallel.tensor=2", "--steps", "1"
    )
    assert (code, err) == (3, "")
    lines = out.splitlines()
    assert lines[0].startswith("user: one process, float64, 1 process ... done in ")
    assert lines[1].startswith("user: data 1 x tensor 2 (1d), float64, 2 processes ... done in ")
    assert "DIFFERENT at step 1: the gradient of middle.weight\n" in out
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    ("wrong", "run", "message"),
    [
        (("self.down(self.middle", "self.gone(self.middle"), "run in one process", "has no attribute 'gone'"),
        (
            ("torch.ones(16)", "torch.ones(16) + int(os.environ.get('RANK', '0'))"),
            "run under the plan",
            "gain would start with other values on rank 1 than on rank 0",
        ),
    ],
)
def test_a_failure_is_reported_as_launch_reports_it(
    tmp_path: Path, wrong: tuple[str, str], run: str, message: str
) -> None:
    code, _, err = from_outside(tmp_path, str(config_file(tmp_path, NET.replace(*wrong))), "parallel.data=2")
    assert code == 1
    assert "run failed: " in err
    assert message in err
    assert f"the {run} failed, so nothing was compared" in err
    assert not [name for name in leftovers(tmp_path) if name.endswith(".pt")]
    assert "attempts.jsonl" in leftovers(tmp_path)
