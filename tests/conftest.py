"""Settings for all tests."""

import os

import pytest

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # tests are of the CPU wherever they run: real devices are for scripts/test-gpu


def runs_tests(config: pytest.Config) -> bool:
    """Whether this process does; with ``-n`` the first only hands them out, and would import for seconds in vain."""
    return config.getoption("dist", "no") == "no"


def pytest_configure(config: pytest.Config) -> None:
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
