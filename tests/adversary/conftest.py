"""Says which seed was drawn from."""

from typing import Any

from tests.adversary import SEED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"adversary: ADVERSARY_SEED={SEED} draws the same cases")
