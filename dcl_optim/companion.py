"""The companion model: its forecast of a batch and its chase of the model."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dcl_optim import companion_state, distributed, random_state, twin
from dcl_optim.chase import ignores_gradient_scale, slowed
from dcl_optim.checkpointing import outside_checkpoints
from dcl_optim.follower import Follower
from dcl_optim.forecast import Forecast
from dcl_optim.forecaster import Forecaster, Forward, Scale, check_tensors
from dcl_optim.functional import Distance, chase_target, to_rows, value_and_gradient
from dcl_optim.inputs import batch_size, cut, outside_autocast, part, to_place
from dcl_optim.mirror import MakeOptimizer, MirroredOptimizer
from dcl_optim.overlap import Overlap
from dcl_optim.random_state import RandomState, on_device, replayed
from dcl_optim.shares import Shares
from dcl_optim.wrapper import all_or_nothing, gradients_of, parameters_of, without_gradient

IN_COMPANION = (
    "This was raised in the forward of dcl_optim's companion, on the model's inputs. What a script sets on the model "
    "after wrapping it (an attribute, a hidden state), it has to set on optimizer.companion too."
)


class Companion(Forecaster):
    r"""The second network :math:`\omega` of Deep Companion Learning (Algorithm 1).

    Forecast: its logits c on the same batch. Learning: one step of its own optimizer on
    :math:`\Delta(c, \alpha\,\mathrm{stop}(c) + (1-\alpha)\,\mathrm{stop}(z))` with the same c.

    Args:
        model: the model.
        base: its optimizer.
        find_logits: function of a module's output that gives the logits.
        class_dim: the dimension of the logits that holds the classes.
        companion: None (a copy of the model), a module, or a callable without arguments that builds one.
        companion_optimizer: None (mirrors the base), an optimizer, or a callable that builds one from parameters.
        lr_scale: the companion's learning rate divided by the base's.
        fraction: the part of each batch, its first rows, that the companion learns from, in (0, 1].
        every: it learns at every so many steps, at least 1.
        overlap: whether it runs beside the model.
        device: where it lives; None for the model's device.
        dtype: what it computes in; None for the model's dtype.

    Attributes:
        module: the companion as a module.
        optimizer: its optimizer.

    Raises:
        ValueError: the companion shares trained parameters with the model, or has none.
        TypeError: a companion or an optimizer that is none.
        RuntimeError: the model cannot be copied.

    Examples:
        >>> from dcl_optim.tap import find_logits
        >>> model = nn.Linear(4, 3)
        >>> companion = Companion(model, torch.optim.SGD(model.parameters(), lr=0.1), find_logits, class_dim=1)
        >>> torch.equal(companion.module.weight, model.weight), companion.module.weight is model.weight
        (True, False)
    """

    def __init__(
        self,
        model: nn.Module,
        base: Optimizer,
        find_logits: Callable[[Any], Tensor],
        class_dim: int,
        *,
        companion: nn.Module | Callable[[], nn.Module] | None = None,
        companion_optimizer: Optimizer | MakeOptimizer | None = None,
        lr_scale: float = 1.0,
        fraction: float = 1.0,
        every: int = 1,
        overlap: bool = False,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._find_logits, self._class_dim = find_logits, class_dim
        self._fraction, self._every, self._place = fraction, every, (device, dtype)
        own = twin.unwrapped(model)
        self.module = twin.build(own, companion, device, dtype)
        self._mirror = MirroredOptimizer(base, own, lr_scale, companion_optimizer)
        self.optimizer = self._mirror.build(self.module, strangers=companion is not None)
        self._follower = Follower(model, self.module, companion is None, self._mirror, self.optimizer, device, dtype)
        self.overlaps, self._overlap = overlap, Overlap(self.module, wanted=overlap)
        self._learns, self._slows = True, ignores_gradient_scale(self.optimizer)
        self._reset()

    def _reset(self) -> None:
        self._pending: list[Callable[[], None]] = []  # backwards that have been started
        self._moved: Callable[[], None] | None = None  # the step that has been started
        self._shares, self._alpha = Shares(), 0.0

    # ---- the forecast --------------------------------------------------------------------------------------------

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any], state: RandomState, step: int) -> None:
        self._learns = step % self._every == 0
        self._follower.follow()
        self._overlap.begin(args, kwargs, state, self._forecast)

    def predict(self, args: tuple[Any, ...], kwargs: dict[str, Any], forward: Forward, state: RandomState) -> None:
        forecast = self._overlap.result(args, kwargs, state)
        if forecast is None:
            with replayed(on_device(state, self._place[0])), outside_checkpoints():
                forecast = self._forecast(args, kwargs)
                self._overlap.inspect(state)
        forecast.check(forward, self._fraction)
        forward.forecast = forecast.rows.to(forward.logits.device)
        forward.chased = forecast.chased
        if self._fraction == 1:
            self._follower.compare(forward.logits, forward.forecast)

    def _forecast(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Forecast:
        inputs = to_place(cut((args, kwargs)), *self._place)
        if not self._learns:
            with torch.no_grad():
                return self._whole(inputs)
        batch = batch_size(inputs)
        learned = batch if self._fraction == 1 else max(2, round(self._fraction * batch))
        if batch - learned < 2:  # batch normalisation cannot take a single sample
            return self._whole(inputs)
        # A graph for the rows that are learned from only: this is where a fraction saves its time.
        chased, shape = self._logits(part(inputs, batch, slice(0, learned)))
        with torch.no_grad():
            rest, other = self._logits(part(inputs, batch, slice(learned, None)))
        return Forecast(torch.cat([chased.detach(), rest]), chased, (shape[0] + other[0], *shape[1:]), batch)

    def _whole(self, inputs: Any) -> Forecast:
        logits, shape = self._logits(inputs)
        return Forecast(logits.detach(), logits if self._learns else None, tuple(shape))

    def _logits(self, inputs: Any) -> tuple[Tensor, torch.Size]:
        args, kwargs = inputs
        try:
            output = self.module(*args, **kwargs)
        except Exception as error:
            if hasattr(error, "add_note"):  # from Python 3.11 on
                error.add_note(IN_COMPANION)
            raise
        logits = self._find_logits(output)
        return to_rows(logits, self._class_dim), logits.shape

    # ---- learning ------------------------------------------------------------------------------------------------

    def observe(self, forward: Forward, distance: Distance, alpha: float, scale: Scale) -> None:
        c, forward.chased = forward.chased, None
        if c is None:
            return
        target = chase_target(forward.logits[: len(c)].to(c.device), c, alpha)
        _, gradient = value_and_gradient(distance, c, target)
        gradient = self._shares.weigh(gradient, scale, half=c.dtype == torch.float16).to(c.dtype)
        self._alpha = alpha
        self._pending.append(self._overlap.lane.start(functools.partial(self._backward, c, gradient)))

    def _backward(self, logits: Tensor, gradient: Tensor) -> None:
        with outside_autocast(logits.device.type):
            self._overlap.backward(logits, gradient, parameters_of(self.optimizer))

    def digest(self) -> None:
        self._overlap.abandon()
        while self._pending:
            self._pending.pop(0)()
            if next(gradients_of(self.optimizer), None) is None:
                raise RuntimeError(
                    "the companion's logits do not depend on its parameters: its copy still calls the model (whose "
                    "forward was replaced by a function that holds it?); pass companion="
                )

    def forget(self) -> None:
        self._overlap.lane.settle()
        self._reset()
        self.optimizer.zero_grad()

    def forward_ended(self) -> None:
        self._overlap.abandon()

    def rest(self) -> None:
        self._overlap.lane.rest()

    def close(self) -> None:
        self._overlap.lane.close()

    def prepare(self) -> None:
        self._mirror.follow(self.optimizer)

    def begin_step(self) -> None:
        if self._shares.count and self._moved is None:
            self._finish_gradients()
            self._moved = self._overlap.start_step(self._move, self._mirror.base, self.optimizer)

    def step(self) -> None:
        self.begin_step()
        if self._moved is not None:
            self._moved()
            self.forget()
        self._mirror.note()

    def _finish_gradients(self) -> None:
        several, together = self._shares.several, distributed.world_size() > 1
        if together:  # every rank must bring the same tensors to the reduction
            self._fill_gradients()
        if several or together:
            gradients = list(gradients_of(self.optimizer))
            if several:
                self._shares.divide(gradients)
            distributed.average(gradients)

    def _move(self) -> None:
        if self._shares.half and not _finite(list(gradients_of(self.optimizer))):
            return
        try:
            with random_state.kept(self.optimizer), slowed(self.optimizer, 1 - self._alpha if self._slows else 1.0):
                self.optimizer.step()
        except Exception as error:
            kind = type(self.optimizer).__name__
            raise RuntimeError(
                f"the companion's optimizer, a {kind}, could not step ({error}); pass companion_optimizer=<callable "
                "that builds another from parameters>"
            ) from error

    def _fill_gradients(self) -> None:
        for parameter in without_gradient(self.optimizer):
            parameter.grad = torch.zeros_like(parameter)

    def create_state(self) -> None:
        if not self.optimizer.state:
            self._fill_gradients()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self._mirror.note()

    def switch(self, mode: str) -> None:
        getattr(self.optimizer, mode, _nothing)()

    def groups_changed(self) -> None:
        self._follower.follow_parameters()

    def __getstate__(self) -> dict[str, Any]:
        self.digest()  # graphs cannot be copied; their gradients can
        return self.__dict__

    # ---- the state -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        self.prepare()  # what the script has changed since the last step, as a scheduler does, is saved too
        self._follower.follow_unfrozen()
        return {"model": self._follower.own_state(), "optimizer": companion_state.saved(self.optimizer, self.module)}

    def check_state(self, state: dict[str, Any]) -> None:
        self._follower.follow_unfrozen()
        check_tensors(state.get("model", {}), self._follower.own_state(), "companion")
        companion_state.check(state.get("optimizer", {}), self.optimizer, self.module)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with all_or_nothing(self.optimizer):
            self.optimizer.load_state_dict(companion_state.loadable(state["optimizer"], self.optimizer, self.module))
            self.module.load_state_dict(state["model"], strict=False)
        self._follower.no_longer_equal()
        self.forget()
        self._mirror.note()


def _finite(gradients: list[Tensor]) -> bool:
    return bool(torch.stack(torch._foreach_norm(gradients, math.inf)).isfinite().all())


def _nothing() -> None:
    return None
