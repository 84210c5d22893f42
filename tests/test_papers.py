"""The published models of benchmarks/papers: their sizes, the plans that were published for them, and their speeds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from colossus.config import load_config, model_options
from colossus.config.plans import world_size
from colossus.planner.estimate import Estimator
from colossus.planner.transformer_sizes import Sizes

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the benchmarks are no part of the installed package

from benchmarks.modes_on_paper import LLAMA, PAPERS, WAYS, Study  # noqa: E402
from benchmarks.paper_plans import CASES, FOLDER, Case  # noqa: E402


@pytest.mark.parametrize(
    ("file", "billions"),
    [("gpt3_175b", 175), ("llama3_8b", 8.03), ("llama3_70b", 70.6), ("llama3_405b", 405.8), ("deepseek_v3", 671)],
)
def test_models_have_the_parameters_of_their_papers(file: str, billions: float) -> None:
    sizes = Sizes.of(model_options(load_config(FOLDER / f"{file}.py")))
    assert sizes is not None
    assert sum(sizes.stored) + sizes.embedding == pytest.approx(1e9 * billions, rel=0.005)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_published_plans_fit_their_devices(case: Case) -> None:
    config = case.config(*(case.overrides or ()))
    if case.overrides is not None:
        assert world_size(config.parallel) == case.devices


#: recorded in a fraction of a second; every second block of the 8B is checkpointed, so that each of its blocks is
QUICK = (
    "GPT-3 175B on 64 A100", "Llama 3 70B on 64 A100", "Llama 3 70B on 256 H100", "Llama 3 405B on 16,384 H100",
)  # fmt: skip
COMPARED = [case for case in CASES if case.speed or case.mfu if not case.differs]


@pytest.mark.rest("Llama 3 70B on 64 A100", "Llama 3 70B on 256 H100", "Llama 3 405B on 16,384 H100")
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.long] * (case.name not in QUICK), id=case.name) for case in COMPARED],
)
def test_predicted_speeds_are_those_that_were_published(case: Case) -> None:
    ratio = case.ratio(Estimator(case.hardware(), hosts=case.hosts).estimate(case.config(*(case.overrides or ()))))
    assert ratio is not None
    assert 0.9 <= ratio <= 1.12


@pytest.mark.parametrize("term", ["matmul", "memory_bandwidth", "link"])
def test_no_term_can_be_left_out(term: str) -> None:
    """Products at their peak, memory or links that take no time: each alone is seen."""
    case = next(case for case in CASES if case.name == QUICK[2])
    ratio = case.ratio(
        Estimator(case.hardware(**{term: 1.0 if term == "matmul" else 1e15}), hosts=case.hosts).estimate(case.config())
    )
    assert ratio is not None
    assert ratio > 1.12


def test_1d_ends_where_each_rank_has_one_head() -> None:
    papers, llama = Study(PAPERS, 64, "fp32"), Study(LLAMA, 64, "bf16")
    most = {
        name: [max(shape[0] for shape in shapes if study.fits("1d", shape)) for study in (papers, llama)]
        for name, (mode, _, shapes) in WAYS.items()
        if mode == "1d"
    }
    assert most == {"1D": [128, 64], "1D, tokens split": [128, 64]}
