"""What a variant must provide: a forecast for each training forward, and a way to learn from the model's logits.

``replayed``, ``RngState`` and ``check_tensors`` are here too, for forecasters from outside the package.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from dcl_optim import distances
from dcl_optim._rng import RngState, replayed
from dcl_optim._torch import current_backward
from dcl_optim._validation import check_tensors
from dcl_optim.distances import Distance

__all__ = ["NO_SCALE", "Forecaster", "ForwardRecord", "RngState", "Scale", "check_tensors", "replayed"]

Scale = float | Tensor
LOOK_EVERY = 100  # steps from one look at a device's values to the next, since a look synchronises
NO_SCALE: tuple[int, Scale] = (-1, 1.0)  # read in no backward


class ForwardRecord:
    """One training forward of the model, from the call to its last backward.

    Args:
        logits: what the model gave, of any shape with the batch first.
        class_dim: the dimension of it that holds the classes.

    Raises:
        ValueError: the logits have no such dimension.

    Attributes:
        logits: the model's logits z as rows (N, K): a detached copy, which in-place edits by the script cannot reach.
        shape: the shape of the model's logits, batch first.
        class_dim: the dimension of it that holds the classes.
        forecast: c as rows (N, K), without a graph; None where the forecaster makes it at the backward.
        companion_logits: the rows of c that the companion learns from, with their graph; None for none.
        targets: the labels, where a forecaster needs them and the script gave them.
        criterion_targets: the labels that the criterion was called with.
        is_open: whether nothing has told yet which dimension holds the classes, and dimension 1 is taken for now.
        read_labels: the labels (N,) that the gradient told, K for a row without one, and whether there is none such.
        classes: what a forecaster read off the labels: the class of each row (N,), or its shares in all (N, K).
        all_labelled: whether these are classes, and no row is without one.
        criterion_scale: what the criterion's losses were multiplied by, and the backward that this was read in.
        has_several_heads: whether these were losses of more tensors, none of them a part of the output, than forwards.
        model_scale: what the model's own loss was multiplied by, likewise.
        loss_hides_gradient: whether that loss sends no gradient to the logits: a compiled model gives both in one node.
        is_criterion_input: whether a criterion was called on the very output.
        nodes_below: the nodes of autograd that a gradient of the logits goes on to, each with the number of its input;
            None where the logits are a parameter.
        finite: whether the penalty and the loss scale of the last backward are finite; on a device a tensor, as a rule.
        counted: whether a backward has come.
        added_in: the backward that the penalty was added to last, by autograd's number.

    Examples:
        >>> import torch
        >>> record = ForwardRecord(torch.zeros(2, 10, 4, 4), class_dim=1)
        >>> record.logits.shape, record.unrows(record.logits).shape
        (torch.Size([32, 10]), torch.Size([2, 10, 4, 4]))
    """

    def __init__(self, logits: Tensor, class_dim: int) -> None:
        if not -logits.ndim <= class_dim < max(logits.ndim, 2):
            raise ValueError(f"class_dim={class_dim} but the model's logits have shape {tuple(logits.shape)}")
        self.shape, self.class_dim = logits.shape, class_dim
        self._is_rows = logits.ndim == 2 and class_dim in (1, -1)
        self._output = weakref.ref(logits)
        rows = self.rows(logits.detach())
        is_copy = not self._is_rows and rows.data_ptr() != logits.data_ptr()  # in some layouts
        self.logits = rows if is_copy else rows.clone()
        self.forecast: Tensor | None = None
        self.companion_logits: Tensor | None = None
        self.targets: Tensor | None = None
        self.criterion_targets: Tensor | None = None
        self.is_open = False
        self.read_labels: tuple[Tensor, bool] | None = None
        self.classes: Tensor | None = None
        self.all_labelled = False
        self.nodes_below = None if logits.grad_fn is None else logits.grad_fn.next_functions
        self.finite: bool | Tensor = True
        self.counted, self.added_in = False, -1
        self.is_criterion_input = False
        self.criterion_scale: tuple[int, Scale] = NO_SCALE
        self._calls: dict[int, int] = {}  # of the criterion on other tensors, in that backward
        self.has_several_heads = False
        self.model_scale: tuple[int, Scale] = NO_SCALE
        self.loss_hides_gradient = False

    def produced(self, tensor: Any) -> bool:
        """Whether a tensor is the very output of this forward, or a view of all its rows."""
        output = self._output()
        if not isinstance(tensor, Tensor) or output is None:
            return False
        if tensor is output:
            return True
        whole = tensor.numel() == output.numel() or tensor.shape[:1] == output.shape[:1]
        return tensor.data_ptr() == output.data_ptr() and tensor.numel() > 0 and whole

    def link(self, exact: bool) -> bool:
        """Link a call of the criterion to this forward, and say whether it counts.

        A call on the output itself outranks calls on what may be another head's output or a copy of this one's.
        """
        if exact and not self.is_criterion_input:
            self.is_criterion_input, self.criterion_targets, self.criterion_scale = True, None, NO_SCALE
        return exact or not self.is_criterion_input

    def holds(self, tensor: Any) -> bool:
        """Whether a tensor is a part of the output of this forward."""
        output = self._output()
        if output is None or not isinstance(tensor, Tensor):
            return False
        return tensor.untyped_storage().data_ptr() == output.untyped_storage().data_ptr()

    def add_loss_scale(
        self,
        exact: bool,
        call: tuple[int, int] | None,
        times: Scale,
        index: int,
        gradients: tuple[Tensor | None, ...],
    ) -> None:
        """Called by autograd with the gradient of a criterion's loss: what it was multiplied by, before backward.

        The loss is output ``index`` of its node; ``times`` are its terms where it is a sum, and this forward's share.
        ``call`` are, where the criterion got no part of the output, the number of the call and of the forwards that it
        may be about.
        """
        gradient = gradients[index]
        if gradient is None or (self.is_criterion_input and not exact):
            return
        backward, scale = current_backward(), _total(gradient) * times
        if self.criterion_scale[0] == backward:
            scale = self.criterion_scale[1] + scale
        else:
            self._calls = {}
        if call is not None:
            self._calls[call[0]] = call[1]
        self.has_several_heads = len(self._calls) > max(self._calls.values(), default=0)
        self.criterion_scale = backward, scale

    def note_loss_scale(self, index: int, gradients: tuple[Tensor | None, ...]) -> None:
        """As :meth:`add_loss_scale`, for the model's own loss."""
        gradient = gradients[index]
        if gradient is not None:
            self.model_scale = current_backward(), _total(gradient)

    def lay_out(self, class_dim: int) -> None:
        """Lay all rows out anew, the classes being another dimension than was taken for them."""
        for name in ("logits", "forecast", "companion_logits"):
            rows = getattr(self, name)
            if rows is not None:
                batch = rows.numel() // max(self.shape[1:].numel(), 1)  # perhaps a part of the whole
                with torch.enable_grad():  # called from a backward, and the companion's logits have a graph
                    whole = distances.from_rows(rows, (batch, *self.shape[1:]), self.class_dim)
                    setattr(self, name, distances.to_rows(whole, class_dim))
        self.class_dim = class_dim

    def rows(self, tensor: Tensor) -> Tensor:
        """Lay a tensor of the output's shape out as rows (N, K)."""
        return tensor if self._is_rows else distances.to_rows(tensor, self.class_dim)

    def unrows(self, rows: Tensor) -> Tensor:
        """Lay rows (N, K) out in the output's shape."""
        return rows if self._is_rows else distances.from_rows(rows, self.shape, self.class_dim)


def _total(gradient: Tensor) -> Scale:
    """The sum of a loss's gradient: a plain number on the CPU, a tensor elsewhere, so that nothing synchronises."""
    total = gradient if gradient.ndim == 0 else gradient.sum()
    return total.item() if gradient.device.type == "cpu" else total


class Forecaster(ABC):
    r"""Gives the forecast c that the model is held to, and learns from the model's logits z.

    For each training forward of the model, in this order:

    1. :meth:`before_forward` as the model is called;
    2. :meth:`predict` when it has returned: the forecast for the batch;
    3. :meth:`penalty` at each backward through its logits;
    4. :meth:`observe` at the first of them, or :meth:`skip`.

    For each optimizer step :meth:`backward` before the base optimizer steps, and :meth:`step` after it. Where gradients
    were cleared without a step (a gradient scaler skipped it), :meth:`forget` comes instead.

    Attributes:
        replays_draws: whether the model's random draws are to be replayed, for which the RNG state is captured before
            the forward.
    """

    replays_draws = True

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], rng_state: RngState, step: int) -> None:  # noqa: B027
        """Prepare for the training forward that begins. Default: nothing.

        Args:
            args, kwargs: the arguments of the model.
            rng_state: the state that the model's forward draws from; empty without ``replays_draws``.
            step: the number of the optimizer step that the batch belongs to, from 1.
        """

    @abstractmethod
    def predict(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], record: ForwardRecord, rng_state: RngState
    ) -> None:
        """Make the forecast for a training forward that has returned: ``record.forecast``, rows (N, K), no graph.

        Args:
            args, kwargs: the arguments of the model.
            record: the forward; its ``logits`` are rows (N, K).
            rng_state: as in :meth:`before_forward`.
        """

    def penalty(self, record: ForwardRecord, distance: Distance) -> tuple[Tensor, Tensor]:
        r"""Value of :math:`\Delta(z, c)` and its gradient with respect to z, rows (N, K).

        The record's logits stay as they are: a further backward through the same forward asks again.

        Args:
            record: the forward.
            distance: (z, c) -> scalar.
        """
        assert record.forecast is not None
        return distances.value_and_gradient(distance, record.logits, record.forecast)

    @abstractmethod
    def observe(self, record: ForwardRecord, distance: Distance, alpha: float, scale: Scale) -> None:
        """Take note of a forward at its first backward.

        Args:
            record: the forward.
            distance: (z, c) -> scalar.
            alpha: this step's, in [0, 1].
            scale: what the loss was multiplied by, a number or a scalar tensor. 0 on a device, as a rule, where the
                penalty or the scale is not finite (``record.finite``): such a batch is not to be learned from.
        """

    def skip(self, record: ForwardRecord, alpha: float) -> None:  # noqa: B027
        """Take note of a forward that is not observed, since its penalty or its loss scale is not finite.

        Default: nothing. One that talks to other ranks in its step has to do so all the same.

        Args:
            record: the forward.
            alpha: this step's, in [0, 1].
        """

    def figures(self) -> dict[str, Any]:
        """Numbers or scalar tensors of its own for the optimizer's ``logs``, always the same keys. Default: none."""
        return {}

    def settings(self) -> dict[str, Any]:
        """What the optimizer's repr shows of it. Default: nothing."""
        return {}

    def backward(self) -> None:  # noqa: B027
        """Compute the gradients of what was observed, before the base optimizer steps. Default: nothing."""

    @abstractmethod
    def step(self) -> None:
        """Learn from what was observed since the last step, if anything was."""

    @abstractmethod
    def forget(self) -> None:
        """Drop what was observed since the last step."""

    def model_loaded(self) -> None:  # noqa: B027
        """Take note that a state was loaded into the model, or into what holds it. Default: nothing."""

    def base_changed(self) -> None:  # noqa: B027
        """Follow a change of the base optimizer's parameter groups. Default: nothing."""

    def set_mode(self, mode: str) -> None:  # noqa: B027
        """Follow the base optimizer to its "train" or "eval" mode (Schedule-Free). Default: nothing."""

    def create_state(self) -> None:  # noqa: B027
        """Create the optimizer state that the first step would, for a checkpoint to load into. Default: nothing."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything a bit-exact resumption needs, in types that ``torch.load(weights_only=True)`` reads."""

    @abstractmethod
    def check_state(self, state: dict[str, Any]) -> None:
        """Raise ValueError if a state does not fit, before anything is changed."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state that :meth:`check_state` let pass."""
