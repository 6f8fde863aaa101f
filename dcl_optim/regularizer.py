"""From the model's forward to its backward: asks for the forecast, adds the penalty to the gradient of the logits."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from operator import attrgetter
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dcl_optim import random_state
from dcl_optim.checkpointing import running_backward
from dcl_optim.forecaster import Forecaster, Forward
from dcl_optim.functional import Distance
from dcl_optim.labels import Labels
from dcl_optim.linking import concerned, terms_of_sum
from dcl_optim.loss_scale import LossScale
from dcl_optim.schedules import Checked
from dcl_optim.tap import Tap, conversion_source, find_loss, through
from dcl_optim.wrapper import gradients_of, parameters_of

_trains = attrgetter("requires_grad")


class Regularizer:
    r"""Adds :math:`s\lambda\,\partial\Delta(z, c)/\partial z` to the gradient of the logits of each training forward.

    All that changes while a script runs is kept here and not on the optimizer, because some libraries (Lightning) hand
    out optimizers that run our methods on an object of their own.

    Attributes:
        weight: the schedule of λ.
        alpha: the schedule of α.
        steps: optimizer steps so far.
        counted: forwards whose first backward came since the last step: the forecaster has learned from each.
        carried: backwards of forwards since the last step, each of which has carried the penalty.
        seen: training forwards so far.
        backwards: backwards so far.
        cleared: whether ``zero_grad`` was called since the last backward.
        learning: whether the forecaster learns; off while the model is evaluated again within one step.
        stepping: whether the base steps, without a closure.
        penalties: weighted penalties of the closure that is running.
        last: figures of the last backward.
        attached: whether hooks are on the model.
        replaced: whether another optimizer has wrapped the model since.
    """

    def __init__(
        self,
        model: nn.Module,
        base: Optimizer,
        forecaster: Forecaster,
        distance: Distance,
        *,
        weight: Checked,
        alpha: Checked,
        criterion: nn.Module | None,
        labels: Labels | None,
        loss_scale: LossScale,
        find_logits: Callable[[Any], Tensor],
        class_dim: int,
    ) -> None:
        self.model, self._base, self.forecaster, self._distance = model, base, forecaster, distance
        self.weight, self.alpha, self._criterion, self.labels = weight, alpha, criterion, labels
        self._loss_scale, self._find_logits, self._class_dim = loss_scale, find_logits, class_dim
        self.steps, self.attached, self.replaced = 0, False, False
        self.reset()
        self.attach()

    def reset(self) -> None:
        """Forget what has happened, as after loading a state."""
        self._outstanding: list[weakref.ref[Forward]] = []  # forwards whose backward has not come
        self._random_state: random_state.RandomState | None = None  # before the forward that is running
        self._backward = -1  # autograd's number of the backward that came last
        self.cleared, self.learning, self.stepping = False, True, False
        self.counted = self.carried = self.seen = self.backwards = 0
        self.penalties: list[Tensor] | None = None
        self.last: dict[str, Any] = {}

    def attach(self) -> None:
        """Put the hooks on; an optimizer that had its own there is replaced."""
        Tap.replace_others(self.model)
        self._tap, self.attached = Tap(self), True
        self._tap.attach_to_model(self.model)
        if self.forecaster.overlaps:
            self._tap.attach_to_end(self.model)
        if self._criterion is not None:
            self._tap.attach_to_criterion(self._criterion)

    def detach(self) -> None:
        """Take the hooks off; model and criterion are as they were."""
        self._tap.remove()
        self.forecaster.close()
        self.attached = self.replaced = False

    def replace(self) -> None:
        """Make way for another optimizer on the same model."""
        self.detach()
        self.replaced = True

    # ---- the forward ---------------------------------------------------------------------------------------------

    def before_forward(self, training: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Settle the previous batch, remember where the random streams stand, begin what runs beside the model."""
        self._random_state = None
        if self.labels is not None:
            self.labels.begin()
        if not training or not torch.is_grad_enabled():
            self.forecaster.rest()
            return
        if self._is_left_alone():
            return
        if self.cleared or (self.counted and not self.has_gradients()):
            self._settle_cleared()
        self.cleared = False
        self.forecaster.digest()
        device = next(parameters_of(self._base)).device
        self._random_state = random_state.capture(device) if self.forecaster.draws else {}
        self.forecaster.begin(args, kwargs, self._random_state, self.steps + 1)

    def _is_left_alone(self) -> bool:
        """Whether this forward is a counted one that checkpointing recomputes, torch.func's, or trains nothing."""
        backward = running_backward()
        if backward != -1 and backward == self._backward:
            return True
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return True
        return not any(map(_trains, parameters_of(self._base)))

    def after_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Make the forecast, and wait for the gradient of the logits."""
        state, self._random_state = self._random_state, None
        if state is None:
            return
        z = self._find_logits(output)
        if not z.requires_grad:
            return
        forward = Forward(z, self._class_dim)
        if self.labels is not None:
            self.labels.read(forward, args, kwargs)
        self.forecaster.predict(args, kwargs, forward, state)
        self._wait_for_gradient(z, forward, output)
        kept = _waits if not self.carried else _lives  # of this step's, another backward with a criterion may come
        self._outstanding = [reference for reference in self._outstanding if kept(reference())]
        self._outstanding.append(weakref.ref(forward))
        self.seen += 1

    def _wait_for_gradient(self, z: Tensor, forward: Forward, output: Any) -> None:
        loss = find_loss(output)
        if loss is not None:
            loss = through(z, loss, output)
            loss.register_hook(forward.note_loss_scale)
        z.register_hook(functools.partial(self._add_penalty, forward))
        source = conversion_source(z)
        if source is not None:
            source[0].register_prehook(functools.partial(self._add_penalty_at_source, forward, source[1]))

    def after_criterion(self, arguments: Any, logits: Any, targets: Any, loss: Tensor) -> None:
        """Take the labels, and read what the loss is multiplied by off its gradient.

        A loss that is not of some forwards' very outputs is shared among all that wait by their rows, as if they had
        been put together; each of several whose outputs were handed over one by one has it whole.
        """
        linked, surely = concerned(list(filter(_lives, (reference() for reference in self._outstanding))), arguments)
        if self.labels is not None and len(linked) > 1 and any(forward.targets is None for forward in linked):
            raise RuntimeError(
                "several forwards of the model wait for their backward, and the criterion's call does not say which "
                "one its labels belong to: call set_targets(labels) before each forward, or the criterion on each "
                "output as the model returned it"
            )
        terms, rows = terms_of_sum(self._criterion, logits, targets), sum(len(forward.logits) for forward in linked)
        for forward in linked:
            if forward.link(surely):
                if self.labels is not None and not forward.counted:
                    self.labels.take(forward, targets)
                share = 1.0 if surely or len(linked) == 1 else len(forward.logits) / max(rows, 1)
                loss.register_hook(functools.partial(forward.add_loss_scale, surely, terms * share))

    # ---- the backward --------------------------------------------------------------------------------------------

    def _add_penalty(self, forward: Forward, gradient: Tensor | None) -> Tensor | None:
        """Called by autograd with the loss's gradient of the logits: add the penalty's (Equation 2)."""
        if gradient is None or not self.attached:
            return None
        if torch.is_grad_enabled():  # create_graph: a gradient that is part of the user's loss
            return None
        if not forward.takes_penalty():
            return None
        if self.cleared and not forward.counted:
            self._settle_cleared()
        weight, alpha = self.weight(self.steps + 1), self.alpha(self.steps + 1)
        scale = self._loss_scale.resolve(forward, gradient, several=self.carried > 0)
        value, slope = self.forecaster.penalty(forward, self._distance)
        if not forward.counted:
            if self.learning:
                self.forecaster.observe(forward, self._distance, alpha, scale)
            forward.counted = True
            self.counted += 1
        self._note_backward()
        self.last = {"penalty": value, "weight": weight, "alpha": alpha, "loss_scale": scale}
        if weight == 0:
            return None
        factor = scale * weight
        if self.penalties is not None:
            self.penalties.append(value * factor)
        # In place: with many classes each tensor of the logits' size is dear.
        return forward.unrows(slope.mul_(factor)).to(gradient.dtype).add_(gradient)

    def _add_penalty_at_source(self, forward: Forward, index: int, gradients: tuple[Tensor, ...]) -> Any:
        """As :meth:`_add_penalty`, for a loss that the model took from its logits before it converted them."""
        gradient = self._add_penalty(forward, gradients[index])
        return None if gradient is None else (*gradients[:index], gradient, *gradients[index + 1 :])

    def _note_backward(self) -> None:
        self.cleared = False
        self.carried += 1
        self.backwards += 1
        self._backward = running_backward()

    def _settle_cleared(self) -> None:
        """Gradients that were counted are gone: that step never came, as when a gradient scaler found an infinity.

        If it is coming, the base evaluates the model again, elsewhere; the forecaster has learned at the first place.
        """
        if self.counted and self.learning:
            if self.stepping:
                self.learning = False
            else:
                self.counted = self.carried = 0
                self.forecaster.forget()

    def has_gradients(self) -> bool:
        """Whether any parameter that the base trains has a gradient."""
        return next(gradients_of(self._base), None) is not None

    # ---- copies --------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        transient = {"_tap", "_outstanding", "_random_state", "penalties", "last"}
        return {key: value for key, value in self.__dict__.items() if key not in transient}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.reset()
        self.__dict__.update(state)
        self._tap = Tap(self)
        if self.attached and "_forward_hooks" in vars(self.model):  # not if the model holds us and is being copied
            self.attach()


def _lives(forward: Forward | None) -> TypeGuard[Forward]:
    return forward is not None


def _waits(forward: Forward | None) -> TypeGuard[Forward]:
    return forward is not None and not forward.counted
