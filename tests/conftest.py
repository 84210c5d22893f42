"""Settings for all tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from helpers.laws import TrainingRanks


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("devices", "tests of real devices (tests/gpu, scripts/test-gpu)")
    group.addoption(
        "--device", choices=("auto", "cuda", "cpu"),
        help="run tests/gpu on this device (auto: CUDA, else what runs on the CPU); without it they are skipped",
    )  # fmt: skip
    group.addoption("--budget", type=float, default=600.0, metavar="SECONDS", help="skip what has not begun by then")
    group.addoption("--report", metavar="FOLDER", help="write gpu.jsonl there (default: $OUT, or a new folder)")
    group = parser.getgroup("workers")
    group.addoption("--workers", type=int, default=1, help="run tests in so many processes, each file in one of them")


def runs_tests(config: pytest.Config) -> bool:
    """Return whether this process forks ranks of the CPU.

    With ``-n`` (pytest-xdist) the first process only hands tests out and would import for seconds in vain. Of
    ``--device`` no process does: a backward in the process that forks would start torch's threads of CUDA.
    """
    return config.getoption("dist", "no") == "no" and config.getoption("device") is None


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("device") is None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the other tests are of the CPU wherever they run
    if not runs_tests(config):
        return
    gc.disable()  # until all is imported
    import torch

    if torch.cuda.device_count():  # the tests' process is forked, which CUDA and its thread of autograd do not survive
        os.environ["CUDA_VISIBLE_DEVICES"] = ""

    from helpers import forked_from, segments
    from helpers.drawn import DEV_EXAMPLES
    from hypothesis import settings

    forked_from.prepare()
    segments.shrink()

    # the machine's speed is not a property of the code; HYPOTHESIS_PROFILE=long draws as many as find what is rare
    settings.register_profile("dev", deadline=None, max_examples=DEV_EXAMPLES)
    settings.register_profile("long", deadline=None, max_examples=20 * DEV_EXAMPLES)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    from helpers.long import mark_the_rest

    some = config.getoption("lf", False) or any("::" in word for word in config.args)
    mark_the_rest(items, complete=not some)


def pytest_collection_finish(session: pytest.Session) -> None:
    if runs_tests(session.config):
        from helpers import forked_from

        forked_from.collected()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    number = session.config.getoption("workers")
    if number == 1 or session.config.option.collectonly or session.testsfailed:
        return None
    from helpers import workers

    return workers.run(session, number)


@pytest.fixture(scope="session")
def compiler() -> None:
    """Compile something here: what that imports, no forked rank imports again."""
    import torch

    torch.compile(torch.nn.Linear(2, 2), backend="aot_eager")(torch.ones(2, 2)).sum().backward()
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def training_ranks() -> Iterator[TrainingRanks]:
    """Give ranks for all training runs of a file."""
    from helpers.laws import TrainingRanks

    ranks = TrainingRanks()
    yield ranks
    ranks.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call":
        from helpers import covered

        path = item.path.relative_to(Path(__file__).parent).as_posix()
        report.user_properties.append(("law", (covered.law_of(path), covered.noted())))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what was covered of each law: by the tests that passed, wherever they ran."""
    from helpers.covered import report

    passed = [dict(test.user_properties).get("law") for test in terminalreporter.stats.get("passed", [])]
    if lines := report(filter(None, passed)):
        terminalreporter.section("what was covered")
        for line in lines:
            terminalreporter.write_line(line)
