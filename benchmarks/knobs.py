"""What makes the companion cheaper: one line each, with what it changes and what the paper says of the accuracy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from benchmarks.methods import Row, companion_learning, plain_row
from benchmarks.script import Script, Training, sgd
from benchmarks.workloads import Workload
from dcl_optim import DCLOptimizer

DEFAULT = ""
EXACT = "nothing"
ROUNDING = "rounding"
# CIFAR-100, ResNet-18, test accuracy; 82.4 % with a full companion, 79.6 % the baseline of these experiments (Table 6).
UNCHANGED, UNKNOWN = "as DCLOptimizer's", "not in the paper"


@dataclass(frozen=True)
class Knob:
    """One way to make the companion cheaper.

    Attributes:
        name: as a user writes it.
        options: DCLOptimizer's arguments, which may depend on the script.
        changes: what changes in the numbers.
        accuracy: what the paper measured, by the number of its table.
        finish: what the script does to the wrapper before it trains.
        variant: what the script itself does to its model, plain training too.
        suits: which workloads it concerns.
        period: the steps after which its costs repeat.
    """

    name: str
    options: Callable[[Script], dict[str, Any]] = lambda script: {}
    changes: str = EXACT
    accuracy: str = UNCHANGED
    finish: Callable[[DCLOptimizer], Any] | None = None
    variant: str = ""
    suits: Callable[[Workload], bool] = lambda work: True
    period: int = 1

    def row(self) -> Row:
        """The knob as a line of a table."""
        return Row(self.name, self._build, self.variant, period=self.period)

    def _build(self, script: Script) -> Training:
        return companion_learning(script, self.finish, **self.options(script))


def _small(script: Script) -> nn.Module:
    """The workload's smaller network in the model's place and layout."""
    assert script.work.small is not None
    return script.setting.compile(script.setting.model(script.work.small()).train())


def _smaller(title: str, accuracy: str) -> Knob:
    return Knob(
        f"companion={title}",
        lambda script: {"companion": _small(script)},
        "smaller companion",
        accuracy,
        suits=lambda work: work.small is not None and work.small_title == title,
    )


KNOBS: dict[str, Knob] = {
    knob.name: knob
    for knob in (
        Knob("DCLOptimizer", changes=DEFAULT, accuracy="82.4 % (Table 8)"),
        Knob(
            "companion_every=2",
            lambda script: {"companion_every": 2},
            "it learns at every second step",
            UNKNOWN,
            period=2,
        ),
        Knob(
            "companion_every=4",
            lambda script: {"companion_every": 4},
            "it learns at every fourth step",
            UNKNOWN,
            period=4,
        ),
        _smaller("half the width", "80.2 to 81.4 % with smaller ResNets (Table 9)"),
        _smaller("ResNet-10", "81.4 % (Table 9)"),
        Knob("linear probe: frozen parameters are shared", variant="linear probe"),
        Knob(
            "channels last: the companion keeps the layout",
            variant="channels last",
            suits=lambda work: work.convolutional,
        ),
        Knob("companion.compile()", changes=ROUNDING, finish=lambda optimizer: optimizer.companion.compile()),
        Knob(
            "companion_optimizer: foreach",
            lambda script: {"companion_optimizer": partial(sgd, foreach=True)},
            ROUNDING,
        ),
        Knob(
            "companion_optimizer: fused",
            lambda script: {"companion_optimizer": partial(sgd, fused=True)},
            ROUNDING,
        ),
    )
}


def rows_for(work: Workload) -> list[Row]:
    """The knobs that concern a workload, after the plain trainings they are divided by."""
    knobs = [knob for knob in KNOBS.values() if knob.suits(work)]
    return [plain_row(variant) for variant in dict.fromkeys(knob.variant for knob in knobs)] + [
        knob.row() for knob in knobs
    ]
