"""An optimizer with a companion and with prototypes: one forecaster of both, their penalties summed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dcl_optim.companion import Companion
from dcl_optim.companion.optimizer import CompanionOptions
from dcl_optim.distances import Distance, DistanceName, Rows, resolve_distance
from dcl_optim.distributed import DataParallelGroup
from dcl_optim.forecaster import Forward, Loss, Penalty, RngState
from dcl_optim.loss.outputs import find_logits
from dcl_optim.loss.reader import LossReader
from dcl_optim.optimizer import ForecastOptimizer
from dcl_optim.prototypes import Prototypes
from dcl_optim.schedules import Checked, Schedule


@dataclass(frozen=True)
class Term:
    """A penalty and what its forecast learns by."""

    distance: Distance
    weight: Checked
    alpha: Checked


class CompanionAndPrototypes(Companion):
    """A companion that has prototypes beside it; each learns as it does alone.

    It knows the weights of both penalties: the optimizer's own weight has to be 1, and its alpha and distance are not
    looked at.

    Args:
        model: the model.
        base: its optimizer.
        prototypes: the prototypes.
        dcl: the companion's term.
        dcp: the prototypes' term.
        options: the companion's own.
    """

    def __init__(
        self,
        model: nn.Module,
        base: Optimizer,
        prototypes: Prototypes,
        dcl: Term,
        dcp: Term,
        options: CompanionOptions,
    ) -> None:
        self.prototypes, self._dcl, self._dcp = prototypes, dcl, dcp
        super().__init__(model, base, find_logits, options)

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], rng_state: RngState, step: int) -> None:
        super().before_forward(args, kwargs, rng_state, step)
        self.prototypes.before_forward(args, kwargs, rng_state, step)

    def penalty(self, forward: Forward, loss: Loss, distance: Distance) -> Penalty:
        own = forward.prediction
        self._penalty = super().penalty(forward, loss, self._dcl.distance)
        self._class_penalty = self.prototypes.penalty(forward, loss, self._dcp.distance)
        self._class_prediction, forward.prediction = forward.prediction, own
        terms = ((self._penalty, self._dcl), (self._class_penalty, self._dcp))
        parts = [_weighted(penalty, term.weight(forward.step)) for penalty, term in terms]
        return Penalty(Rows(parts[0][0] + parts[1][0], parts[0][1] + parts[1][1], 1.0), 1)

    def observe(self, forward: Forward, loss: Loss, penalty: Penalty, distance: Distance, alpha: float) -> None:
        step, own = forward.step, forward.prediction
        forward.prediction = self._class_prediction
        self.prototypes.observe(forward, loss, self._class_penalty, self._dcp.distance, self._dcp.alpha(step))
        forward.prediction = own
        super().observe(forward, loss, self._penalty, self._dcl.distance, self._dcl.alpha(step))

    def step(self) -> None:
        self.prototypes.step()  # first: the companion's ends with forget()
        super().step()

    def forget(self) -> None:
        self.prototypes.forget()
        super().forget()

    def state_dict(self) -> dict[str, Any]:
        return {"companion": super().state_dict(), "prototypes": self.prototypes.state_dict()}

    def check_state(self, state: dict[str, Any]) -> None:
        super().check_state(state["companion"])
        self.prototypes.check_state(state["prototypes"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state["companion"])
        self.prototypes.load_state_dict(state["prototypes"])


class CompanionPrototypeOptimizer(ForecastOptimizer):
    r"""DCL and DCP at once: the model is held to a companion and to its classes' prototypes.

    .. math:: \theta_{t+1} = \text{base step with } \nabla_\theta\,\Big[\ell(z, y) + \lambda_1\,\Delta_1(z, c)
        + \frac{\lambda_2}{N} \sum_i \Delta_2(z_i, p^{y_i})\Big]

    The companion learns as in :class:`~dcl_optim.DCLOptimizer`, and the prototypes as in
    :class:`~dcl_optim.DCPOptimizer` with ``update="batch"``. For one process.

    Args:
        base_optimizer: the optimizer to wrap.
        model: the model that it trains.
        num_classes: K.
        dcl_weight, dcl_alpha, dcl_distance, companion, companion_lr_scale: DCLOptimizer's, the first three without
            their prefix.
        dcp_weight, dcp_alpha, dcp_distance: DCPOptimizer's, without their prefix.
        loss_scale: as in DCLOptimizer.

    Raises:
        ValueError: an argument out of range.
    """

    _name = "CompanionPrototypeOptimizer"
    forecaster: CompanionAndPrototypes

    def __init__(
        self,
        base_optimizer: Optimizer,
        model: nn.Module,
        num_classes: int,
        *,
        dcl_weight: float | Schedule = 0.1,
        dcl_alpha: float | Schedule = 0.6,
        dcl_distance: DistanceName | Distance = "squared",
        companion: nn.Module | Callable[[], nn.Module] | None = None,
        companion_lr_scale: float = 1.0,
        dcp_weight: float | Schedule = 0.1,
        dcp_alpha: float | Schedule = 0.97,
        dcp_distance: DistanceName | Distance = "squared",
        loss_scale: Any = "auto",
    ) -> None:
        dcl = _term("dcl", dcl_distance, dcl_weight, dcl_alpha)
        dcp = _term("dcp", dcp_distance, dcp_weight, dcp_alpha)
        group = DataParallelGroup(model, None)
        prototypes = Prototypes(num_classes, -100, "batch", next(model.parameters()), group)
        options = CompanionOptions(companion, lr_scale=companion_lr_scale, process_group=None)
        super().__init__(
            base_optimizer,
            model,
            lambda: CompanionAndPrototypes(model, base_optimizer, prototypes, dcl, dcp, options),
            weight=1.0,
            alpha=1.0,
            loss=LossReader(loss_scale, reads_labels=True),
        )

    def set_targets(self, targets: Tensor) -> None:
        """Give the labels of the batch whose training forward pass comes next, as that of DCPOptimizer does."""
        self._algorithm.loss.set_targets(targets)

    @property
    def companion(self) -> nn.Module:
        """The companion as a module. Made by this, if not before."""
        return self.forecaster.module


def _weighted(penalty: Penalty, weight: float) -> tuple[Tensor, Tensor]:
    """The distances of rows and their gradients, each times its weight in the sum."""
    slope = penalty.added_to(torch.zeros_like(penalty.rows.slope), 1.0, weight, 1)
    shares = 1.0 if penalty.weights is None else penalty.weights
    return penalty.rows.distances * shares * (weight / penalty.number), slope


def _term(prefix: str, distance: DistanceName | Distance, weight: float | Schedule, alpha: float | Schedule) -> Term:
    return Term(
        resolve_distance(distance), Checked(weight, f"{prefix}_weight"), Checked(alpha, f"{prefix}_alpha", upper=1.0)
    )
