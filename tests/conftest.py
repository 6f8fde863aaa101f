"""Which tests run where, and one thread for all: the tensors are tiny, and threads fight each other on a busy machine.

``pytest`` alone runs the default suite, without the markers of ``REST``. Whoever names a path or ``-m`` gets what they
name, so ``pytest tests dcl_optim docs README.md`` runs everything.

``--without-guards`` has guards that do nothing, and leaves out the tests of guards: the method asks its guards nothing.
"""

import gc
import random
import signal
import tempfile
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch._dynamo  # which the first optimizer imports, otherwise in the middle of a test
from hypothesis import HealthCheck, settings
from hypothesis.configuration import set_hypothesis_home_dir

from tests.helpers import NoGuards, on_two_ranks

REST = ("integration", "example", "stress", "adversary")
DEFAULT = " and ".join(f"not {marker}" for marker in REST)
FOLDERS = {
    "adversary": "adversary",
    "benchmarks": "example",
    "examples": "example",
    "guards": "guard",
    "integrations": "integration",
    "reliability": "stress",
}
HERE = Path(__file__).parent
NO_GUARDS = patch("dcl_optim.algorithm.Guards", NoGuards)

torch.set_num_threads(1)
# The same examples in every run, however slow the machine and whatever an earlier run has found.
settings.register_profile(
    "seeded", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("seeded")
# What a shell starts in the background ignores Ctrl-C, which some tests press.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    parser.addoption(
        "--without-guards", action="store_true", help="the tests of the method, with guards that do nothing"
    )


def pytest_configure(config):
    if config.option.without_guards:
        NO_GUARDS.start()
    if not config.option.markexpr and config.args_source is config.ArgsSource.TESTPATHS:
        config.option.markexpr = DEFAULT
    home = tempfile.TemporaryDirectory()  # or hypothesis writes into the repository's folder
    config.add_cleanup(home.cleanup)
    set_hypothesis_home_dir(home.name)


def pytest_ignore_collect(collection_path, config):
    """Import no folder that the default suite leaves out: its packages need not be installed."""
    if config.option.markexpr == DEFAULT and collection_path.parent == HERE:
        return FOLDERS.get(collection_path.name) in REST or None
    return None


def _leaves_out_gpu(config):
    return config.option.markexpr == DEFAULT and not torch.cuda.is_available()


def pytest_terminal_summary(terminalreporter, config):
    if _leaves_out_gpu(config):
        terminalreporter.write_line("Tests that need a GPU are left out: torch finds none. `pytest -m gpu` names them.")


def pytest_collection_modifyitems(config, items):
    for item in items:
        assert " at 0x" not in item.nodeid, f"{item.nodeid} has another name in each of pytest-xdist's processes"
        folder = item.path.relative_to(HERE).parts[0] if item.path.is_relative_to(HERE) else ""
        if folder in FOLDERS:
            item.add_marker(FOLDERS[folder])
        if item.path.name == "frameworks.md":
            item.add_marker("integration")
        for marker in item.iter_markers("gpu"):
            if torch.cuda.device_count() < (marker.args or (1,))[0]:
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))
    left_out = []
    if config.option.without_guards:
        left_out += [item for item in items if item.get_closest_marker("guard")]
    if _leaves_out_gpu(config):
        # Skipped, they would fill the first lines of a run, where a reader looks for what passes.
        left_out += [item for item in items if item.get_closest_marker("gpu")]
    kept = set(items).difference(left_out)
    items[:] = [item for item in items if item in kept]
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture
def without_guards():
    """A context in which the optimizers that are made have guards that do nothing."""
    return NO_GUARDS


@pytest.fixture(autouse=True)
def own_draws():
    """A test that does not seed draws the same numbers in any order of the tests, other libraries' among them."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - timm's mixup draws from the global state
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def threads_stay():
    """Another number would change the last bits of what later tests compare with other processes."""
    yield
    assert torch.get_num_threads() == 1


@pytest.fixture(autouse=True, scope="module")
def imports_stay():
    """A collection that looks at all that imports have made takes a third of a second."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()  # triton complains of what the interpreter's end does not collect


@pytest.fixture
def older_objects():
    """What earlier tests have left, which goes when it likes: not in gc.get_objects() while the test runs."""
    gc.collect()
    gc.unfreeze()
    older = gc.get_objects()
    gc.freeze()
    return older


@pytest.fixture(scope="module")
def ranks(request, tmp_path_factory):
    """What the module's ``worker`` has written on each of two ranks, all of it in one go: starting them takes long."""
    folder = tmp_path_factory.mktemp("ranks")
    on_two_ranks(request.module.worker, folder)
    return folder
