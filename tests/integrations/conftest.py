"""Accelerate keeps its settings in singletons, which transformers' Trainer sets, too."""

import pytest
from accelerate.state import AcceleratorState, GradientState


def forget():
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def fresh_accelerator():
    """Of tests in other folders as well: a worker may have run an example before."""
    forget()
    yield
    forget()
