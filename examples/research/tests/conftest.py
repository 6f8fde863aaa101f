"""These tests run as the library's do: one thread, seeded, the same hypothesis profile."""

import pytest

from examples.research.tests import paper_files
from tests.conftest import imports_stay, own_draws, pytest_unconfigure, threads_stay

__all__ = ["imports_stay", "own_draws", "pytest_unconfigure", "threads_stay"]


@pytest.fixture(scope="session")
def paper_root(tmp_path_factory):
    """A few images of each data set of the paper, in its makers' format, without weights."""
    return paper_files.make(tmp_path_factory.mktemp("paper") / "data")


@pytest.fixture
def files(paper_root):
    """The same, taken for the whole data sets."""
    with paper_files.accepted():
        yield paper_root
