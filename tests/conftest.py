"""Settings for all tests."""

import os

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("devices", "tests of real devices (tests/gpu, scripts/test-gpu)")
    group.addoption(
        "--device", choices=("auto", "cuda", "cpu"),
        help="run tests/gpu on this device (auto: CUDA, else what runs on the CPU); without it they are skipped",
    )  # fmt: skip
    group.addoption("--budget", type=float, default=600.0, metavar="SECONDS", help="skip what has not begun by then")
    group.addoption("--report", metavar="FOLDER", help="write gpu.jsonl there (default: $OUT, or a new folder)")


def runs_tests(config: pytest.Config) -> bool:
    """Return whether this process forks ranks of the CPU.

    With ``-n`` the first process only hands tests out and would import for seconds in vain. Of ``--device`` no process
    does: a backward in the process that forks would start torch's threads of CUDA.
    """
    return config.getoption("dist", "no") == "no" and config.getoption("device") is None


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("device") is None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the other tests are of the CPU wherever they run
    if not runs_tests(config):
        return
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
