"""DCP's prototypes that run away: the warning, when it comes and when not.

They do where batch norm ties a class's logits to the number of its rows in the batch: few rows stand out more. A
prototype counts each batch alike and the penalty each row, so that it pulls the logits further out.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcl_optim import DCPOptimizer
from tests.helpers import assert_same, train

CLASSES, ROWS, FEATURES = 10, 3, 16  # rows of a class in a batch, on average
LOOK_EVERY = 100  # steps


# ---- trainings -------------------------------------------------------------------------------------------------------


def network(head: float = 1.0) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(FEATURES, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(32, CLASSES))
    with torch.no_grad():
        model[-1].weight.mul_(head)
    return model


def clusters(steps: int, balanced: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of 300 points around ten centres."""
    generator = torch.Generator().manual_seed(1)
    y = torch.arange(30 * CLASSES) % CLASSES
    centres = torch.randn(CLASSES, FEATURES, generator=generator)
    x = centres[y] + 0.5 * torch.randn(len(y), FEATURES, generator=generator)
    for _ in range(steps):
        index = torch.randint(len(y), (ROWS * CLASSES,), generator=generator)
        if balanced:  # the points of a class are CLASSES apart
            index = index // CLASSES * CLASSES + torch.arange(ROWS * CLASSES) % CLASSES
        yield x[index], y[index]


def trained(steps: int = 1000, head: float = 1.0, adamw: bool = False, balanced: bool = False, **options) -> list[str]:
    """What is said in a training."""
    model = network(head)
    if adamw:
        base: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    else:
        base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, DCPOptimizer(base, model, **options), clusters(steps, balanced))
    return [str(warning.message) for warning in caught]


def test_prototypes_that_run_away_are_said_once_with_the_fix():
    (message,) = trained(weight=0.3, alpha=0.0)
    assert message.startswith("the prototypes run away")
    assert "0.97" in message
    assert 'reduction="per_class"' in message


FIXES = {
    "the default alpha": {"weight": 0.3},
    "per class": {"weight": 0.3 / CLASSES, "alpha": 0.0, "reduction": "per_class"},
    "balanced batches": {"weight": 0.3, "alpha": 0.0, "balanced": True},
}
HEALTHY = {
    "defaults": {"steps": 500},
    "logits large from the start": {"steps": 500, "head": 10.0},
    "AdamW": {"steps": 500, "adamw": True},
    "weight 0": {"steps": 500, "weight": 0.0},
}


@pytest.mark.parametrize("case", FIXES | HEALTHY)
def test_no_warning_with_the_fix_and_in_ordinary_trainings(case):
    assert trained(**(FIXES | HEALTHY)[case]) == []


# ---- the rule, on logits that the test sets --------------------------------------------------------------------------


class Logits(nn.Module):
    """Gives its input as logits, plus a parameter that stays 0."""

    def __init__(self) -> None:
        super().__init__()
        self.zero = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.zero


class Script:
    """Prototypes that are the last step's logits: lr and weight are 0, and so is alpha."""

    def __init__(self, num_classes: int = 2) -> None:
        self.model, self.labels = Logits(), torch.arange(2)
        base = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.optimizer = DCPOptimizer(base, self.model, num_classes, weight=0.0, alpha=0.0)

    def train_to_look(self, logits: Tensor) -> list[str]:
        """What is said in the steps up to the next look, whose prototypes are these logits."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(LOOK_EVERY):
                self.optimizer.set_targets(self.labels)
                self.optimizer.zero_grad()
                F.cross_entropy(self.model(logits), self.labels).backward()
                self.optimizer.step()
        return [str(warning.message) for warning in caught]


def margins(*values: float, common: float = 0.0) -> Tensor:
    """A row of two logits for each, its own class so far above the other, and of a common mean."""
    signs = torch.tensor([[0.5, -0.5], [-0.5, 0.5]])
    return common + torch.tensor(values)[:, None] * signs


def said(*rows: Tensor) -> list[int]:
    """The looks that said something, the first being look 0."""
    script = Script()
    return [look for look, logits in enumerate(rows) if script.train_to_look(logits)]


def test_beyond_fifty_is_said():
    assert said(margins(2, 2), margins(49.9, 49.9), margins(50.1, 50.1), margins(99, 99)) == [2]


def test_a_root_mean_square_over_the_classes():
    rest = math.sqrt(2 * 50.0**2 - 60.0**2)
    assert said(margins(2, 2), margins(60, rest - 0.1), margins(60, rest + 0.1)) == [2]


def test_logits_far_apart_from_the_beginning_may_grow_fourfold():
    assert said(margins(100, 100), margins(399, 399), margins(401, 401)) == [2]


def test_what_all_logits_have_in_common_counts_for_nothing():
    assert said(margins(2, 2), margins(2, 2, common=-1000.0), margins(51, 51, common=-1000.0)) == [2]


def test_classes_not_seen_count_for_nothing_and_the_others_by_their_mean():
    script, padding = Script(num_classes=4), torch.zeros(2, 2)
    for margin, expected in (1.0, 0), (74.9, 0), (75.1, 1):  # the mean of the others is -m/2, 0 and 0: 2/3 m below m/2
        found = script.train_to_look(torch.cat([margins(margin, margin), padding], dim=1))
        assert len(found) == expected, margin


def test_the_message_has_steps_and_values():
    script = Script()
    assert script.train_to_look(margins(5, 5)) == []
    (message,) = script.train_to_look(margins(60, 60))
    assert f"by step {2 * LOOK_EVERY}" in message
    assert "is 60 above the mean of the others, 12 times as far as in step 100" in message


def test_masked_classes_raise_no_warning():
    masked = torch.tensor([[1.0, -1.0, -torch.inf], [-1.0, 1.0, -torch.inf]])
    script = Script(num_classes=3)
    assert script.train_to_look(masked) == script.train_to_look(masked) == []


@pytest.mark.parametrize("anew", [True, False])
def test_after_loading_a_state_the_first_look_is_the_next(anew):
    script = Script()
    assert script.train_to_look(margins(2, 2)) == []
    state = copy.deepcopy(script.optimizer.state_dict())
    script = Script() if anew else script
    script.optimizer.load_state_dict(state)
    assert_same(script.optimizer.state_dict(), state)
    assert [len(script.train_to_look(margins(size, size))) for size in (20, 79, 81)] == [0, 0, 1]
