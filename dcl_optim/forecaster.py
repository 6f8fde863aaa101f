"""What a variant must provide: a forecast for a batch, and a way to learn from the model's logits."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from dcl_optim import functional
from dcl_optim.checkpointing import running_backward
from dcl_optim.functional import Distance
from dcl_optim.random_state import RandomState

Scale = float | Tensor


class Forward:
    """One training forward of the model, from the call to its backward.

    Attributes:
        logits: the model's logits as rows (N, K): a detached copy, so in-place edits by the script cannot reach it.
        forecast: what the forecaster said at the time of the call, rows (N, K); None where it speaks at the backward.
        targets: the labels, where a forecaster needs them and the script gave them.
        criterion_targets: the labels that the criterion was called with.
        loss_scale: what the criterion's loss was multiplied by in the running backward, where the criterion was handed
            over.
        model_loss_scale: what the model's own loss was multiplied by in it, where the model's output holds one.
        chased: the rows of the forecast that the forecaster learns from, with their graph; None for all or none.
        shape: the shape of the model's logits, batch first.
        counted: whether a backward has come.
        surely_linked: whether the criterion was called on the output itself.
    """

    def __init__(self, logits: Tensor, class_dim: int) -> None:
        self.shape = logits.shape
        if not -logits.ndim <= class_dim < max(logits.ndim, 2):
            raise ValueError(f"class_dim={class_dim} but the model's logits have shape {tuple(logits.shape)}")
        self._class_dim = class_dim
        self._output = weakref.ref(logits)
        self.logits = functional.to_rows(logits.detach(), class_dim).clone()
        self.forecast: Tensor | None = None
        self.chased: Tensor | None = None
        self.targets: Tensor | None = None
        self.criterion_targets: Tensor | None = None
        self.loss_scale: Scale | None = None
        self.model_loss_scale: Scale | None = None
        self.counted = False
        self.surely_linked = False
        self._backward, self._carries = -1, False  # autograd's number of the last backward; whether it has the penalty

    def produced(self, tensor: Any) -> bool:
        """Whether a tensor is the very output of this forward, or a view of it."""
        output = self._output()
        if not isinstance(tensor, Tensor) or output is None:
            return False
        return tensor is output or (tensor.data_ptr() == output.data_ptr() and tensor.numel() > 0)

    def link(self, surely: bool) -> bool:
        """Link a call of the criterion to this forward; say whether it counts.

        A call on the output itself outranks calls on what may be another head's output or a copy of this one's.
        """
        if surely and not self.surely_linked:
            self.surely_linked, self.criterion_targets, self.loss_scale = True, None, None
        return surely or not self.surely_linked

    def add_loss_scale(self, surely: bool, times: Scale, gradient: Tensor) -> None:
        """Called by autograd with the gradient of a criterion's loss: what it was multiplied by, before backward.

        ``times`` is the loss's number of terms where it is their sum, and this forward's share of it.
        """
        if self.surely_linked and not surely:
            return
        self._enter_backward()
        scale = _total(gradient) * times
        self.loss_scale = scale if self.loss_scale is None else self.loss_scale + scale

    def note_loss_scale(self, gradient: Tensor) -> None:
        """Called by autograd with the gradient of the model's own loss: what it was multiplied by, before backward."""
        self._enter_backward()
        self.model_loss_scale = _total(gradient)

    def takes_penalty(self) -> bool:
        """Whether the running backward has to get the penalty: true once in each, which may pass two hooks of ours."""
        self._enter_backward()
        carried, self._carries = self._carries, True
        return not carried

    def _enter_backward(self) -> None:
        """Forget what an earlier backward has told: another one may come with another factor, or with none."""
        backward = running_backward()
        if backward != self._backward:
            self._backward, self._carries = backward, False
            self.loss_scale = self.model_loss_scale = None

    def rows(self, gradient: Tensor) -> Tensor:
        """Lay a tensor of the output's shape out as rows."""
        return functional.to_rows(gradient, self._class_dim)

    def unrows(self, rows: Tensor) -> Tensor:
        """Lay rows out in the output's shape."""
        if len(self.shape) < 2:
            return rows.reshape(self.shape)
        if len(self.shape) == 2 and self._class_dim in (1, -1):
            return rows
        dim = self._class_dim % len(self.shape)
        moved = [size for index, size in enumerate(self.shape) if index != dim] + [self.shape[dim]]
        return rows.reshape(moved).movedim(-1, dim)


def _total(gradient: Tensor) -> Scale:
    """The sum of a loss's gradient: a plain number on the CPU, a tensor elsewhere, so that nothing synchronises."""
    if gradient.device.type == "cpu":
        return gradient.item() if gradient.ndim == 0 else gradient.double().sum().item()
    return gradient.detach().to(torch.promote_types(gradient.dtype, torch.float32)).sum()


class Forecaster(ABC):
    """A source of forecasts that learns from the model's logits; ``DCLOptimizer`` and ``DCPOptimizer`` hold one each.

    The optimizer calls, for each training forward, :meth:`begin` before it and :meth:`predict` after it; at each of its
    backwards :meth:`penalty`, and after the first :meth:`observe`; before the next forward and before the step,
    :meth:`digest`; at the step, :meth:`prepare` and :meth:`begin_step` before the base optimizer moves the model, and
    :meth:`step` after it. :meth:`forget` drops what was observed since the last step (a step that a gradient scaler
    skipped).
    """

    # Whether predicting may draw random numbers, which then replay the model's.
    draws = True
    # Whether it runs beside the model.
    overlaps = False

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any], state: RandomState, step: int) -> None:  # noqa: B027
        """Begin what may run beside the model's forward, in training step number ``step``. Default: nothing."""

    def predict(self, args: tuple[Any, ...], kwargs: dict[str, Any], forward: Forward, state: RandomState) -> None:  # noqa: B027
        """Fill ``forward.forecast`` or what else is known at the time of the call. Default: nothing."""

    def penalty(self, forward: Forward, distance: Distance) -> tuple[Tensor, Tensor]:
        r"""Value of :math:`\Delta(z, \mathrm{forecast})` and its gradient with respect to z, rows (N, K).

        Another backward of the forward asks again: logits and forecast stay as they are. The gradient is written over.
        """
        assert forward.forecast is not None
        return functional.value_and_gradient(distance, forward.logits, forward.forecast)

    @abstractmethod
    def observe(self, forward: Forward, distance: Distance, alpha: float, scale: Scale) -> None:
        """Take note of a forward whose first backward came, of this step's alpha and of the factor on that loss."""

    def digest(self) -> None:  # noqa: B027
        """Do the heavy part of learning from what was observed. Default: nothing."""

    @abstractmethod
    def forget(self) -> None:
        """Drop what was observed since the last step."""

    def prepare(self) -> None:  # noqa: B027
        """Note what the script has set for this step, before the base optimizer moves the model. Default: nothing."""

    def begin_step(self) -> None:  # noqa: B027
        """Begin what may run beside the base optimizer's step, which takes no closure. Default: nothing."""

    @abstractmethod
    def step(self) -> None:
        """Learn from what was observed since the last step, if anything was."""

    def forward_ended(self) -> None:  # noqa: B027
        """A forward of the model has ended, by its result or by an error. Default: nothing."""

    def rest(self) -> None:  # noqa: B027
        """The script does something else than a training step. Default: nothing."""

    def close(self) -> None:  # noqa: B027
        """Stop what runs beside the caller; a later forward may start it again. Default: nothing."""

    def create_state(self) -> None:  # noqa: B027
        """Create optimizer state that the first step would create, for a checkpoint to load into. Default: nothing."""

    def check_parameters(self, parameters: list[Any]) -> None:  # noqa: B027
        """Raise RuntimeError if the base optimizer must not get these parameters. Default: nothing."""

    def groups_changed(self) -> None:  # noqa: B027
        """Follow a change of the base optimizer's parameter groups. Default: nothing."""

    def switch(self, mode: str) -> None:  # noqa: B027
        """Follow the base optimizer to its "train" or "eval" mode (Schedule-Free). Default: nothing."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything a bit-exact resumption needs, in types that ``torch.load(weights_only=True)`` reads."""

    @abstractmethod
    def check_state(self, state: dict[str, Any]) -> None:
        """Raise ValueError if a state does not fit, before anything is changed."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state that :meth:`check_state` let pass."""


def check_tensors(found: dict[str, Any], expected: dict[str, Any], owner: str) -> None:
    """Raise ValueError unless both hold the same names, and tensors of the same shapes (an extra state may be any)."""
    missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing or extra:
        raise ValueError(f"the state of the {owner} does not fit: missing {missing[:5]}, unexpected {extra[:5]}")
    for name, tensor in expected.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        if not isinstance(found[name], torch.Tensor) or found[name].shape != tensor.shape:
            shape = tuple(getattr(found[name], "shape", ()))
            raise ValueError(f"the state of the {owner} has shape {shape} for {name!r}, expected {tuple(tensor.shape)}")
        if not torch.can_cast(found[name].dtype, tensor.dtype):
            raise ValueError(f"the state of the {owner} has {found[name].dtype} for {name!r}, expected {tensor.dtype}")
