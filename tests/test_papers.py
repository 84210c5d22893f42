"""The published models of benchmarks/papers: their sizes, and the plans that were published for them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from colossus.config import load_config, model_options
from colossus.config.plans import world_size
from colossus.planner.lower_bounds import Sizes

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the benchmarks are no part of the installed package

from benchmarks.modes_on_paper import LLAMA, PAPERS, WAYS, Study  # noqa: E402
from benchmarks.paper_plans import CASES, FOLDER, Case  # noqa: E402


@pytest.mark.parametrize(
    ("file", "billions"), [("gpt3_175b", 175), ("llama3_70b", 70.6), ("llama3_405b", 405.8), ("deepseek_v3", 704)]
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


def test_1d_ends_where_each_rank_has_one_head() -> None:
    papers, llama = Study(PAPERS, 64, "fp32"), Study(LLAMA, 64, "bf16")
    most = {
        name: [max(shape[0] for shape in shapes if study.fits("1d", shape)) for study in (papers, llama)]
        for name, (mode, _, shapes) in WAYS.items()
        if mode == "1d"
    }
    assert most == {"1D": [128, 64], "1D, tokens split": [128, 64]}
