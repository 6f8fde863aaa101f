"""These tests run as the library's do: one thread, seeded, the same hypothesis profile."""

from tests.conftest import imports_stay, own_draws, pytest_unconfigure, threads_stay

__all__ = ["imports_stay", "own_draws", "pytest_unconfigure", "threads_stay"]
