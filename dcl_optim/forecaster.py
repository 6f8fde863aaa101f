"""The extension point: what predicts the logits that the model is pulled toward, and learns from its logits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from torch import Tensor

from dcl_optim.penalty.distances import Distance
from dcl_optim.penalty.pull import Pull, Scale
from dcl_optim.progress import Forward


class Labels(NamedTuple):
    """The labels of one batch.

    Attributes:
        rows: the label of each row (N,), K for none; or soft labels (N, K), 0 in rows without.
        number: what the sum over the rows is divided by, the number of rows with a label.
    """

    rows: Tensor
    number: float | Tensor


class Forecaster(ABC):
    r"""Predicts the logits c that the model is pulled toward, and learns from the model's logits z.

    For each training forward pass of the model, in this order:

    1. :meth:`before_forward` as the model is called;
    2. :meth:`predict` when it has returned, if its logits need a gradient;
    3. :meth:`pull` at each backward pass through its logits, or when the term is made;
    4. :meth:`observe` at the first of these backward passes, if its batch was read and is finite.

    :meth:`learn` follows each step of the base optimizer; :meth:`forget` a step that a gradient scaler skipped.

    Attributes:
        distance: a function (z, c) of rows (N, K) that returns one value a row.
        reads_labels: whether the labels of a batch are needed.
        predicts: whether :meth:`predict` is needed; if not, the term takes any logits.
        num_classes: K of a forecaster with ``reads_labels``; 0 before it is known.
        given_num_classes: K if the script gave it; then labels that are the rows' places are classes.
    """

    distance: Distance
    reads_labels = False
    predicts = True
    num_classes = 0
    given_num_classes: int | None = None

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], step_number: int) -> None:  # noqa: B027
        """Prepare for the training forward pass that begins. Default: nothing.

        Args:
            args, kwargs: the arguments of the model.
            step_number: of the optimizer step that the batch belongs to, from 1.
        """

    def predict(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: B027
        """Put into ``forward.prediction`` what :meth:`pull` needs. Default: nothing.

        Args:
            forward: the forward pass that has returned.
            args, kwargs: the arguments of the model.
        """

    @abstractmethod
    def pull(self, forward: Forward, labels: Labels | None) -> Pull:
        r"""The penalty :math:`\Delta(z, c)` of a forward pass, which a further backward pass asks for again.

        Args:
            forward: the forward pass; its ``rows`` must not change.
            labels: of its rows; None without ``reads_labels``.
        """

    @abstractmethod
    def observe(self, forward: Forward, pull: Pull, labels: Labels | None, scale: Scale, alpha: float) -> None:
        """Learn from a forward pass at its first backward pass, now or in :meth:`learn`.

        Args:
            forward: the forward pass; its ``rows`` must not change.
            pull: what :meth:`pull` returned; it was added to the gradient already, and may be overwritten.
            labels: of its rows; None without ``reads_labels``.
            scale: how much it weighs among those of the step: what its loss was multiplied by. Without labels it is
                at least 0.
            alpha: the value of this step, in [0, 1].
        """

    def pass_over(self, forward: Forward) -> None:  # noqa: B027
        """Called in place of :meth:`observe` for a batch that was not read or is not finite. Default: nothing."""

    def measure_accuracy(self, from_classes: float) -> None:  # noqa: B027
        """Measure the training accuracy of more classes than this, since the weight follows it.

        Only with ``reads_labels``.
        """

    def train_accuracy(self) -> Tensor:
        """The running mean of the training accuracy, a scalar.

        Only a forecaster with ``reads_labels`` is asked, after :meth:`measure_accuracy`, and it has to answer.
        """
        raise NotImplementedError

    def end_backward(self) -> None:  # noqa: B027
        """Called when a backward pass that brought gradients of logits has ended. Default: nothing."""

    def check_values(self) -> None:  # noqa: B027
        """Called at the end of a step that may read values of a device. Default: nothing."""

    def logs(self) -> dict[str, Any]:
        """Numbers or scalar tensors for the optimizer's ``logs``, always the same keys. Default: none."""
        return {}

    @abstractmethod
    def learn(self, alpha: float) -> None:
        """Learn from what was observed since the last step, if anything was.

        A forecaster that communicates with other ranks has to do so also if nothing was.

        Args:
            alpha: the value of this step, in [0, 1].
        """

    @abstractmethod
    def forget(self) -> None:
        """Drop what was observed since the last step."""

    def create_state(self) -> None:  # noqa: B027
        """Create the state to load into, for torch.distributed.checkpoint. Default: nothing."""

    def switch(self, mode: str) -> None:  # noqa: B027
        """Follow the base optimizer to its mode ``"train"`` or ``"eval"``. Default: nothing."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything a bit-exact resumption needs, in types that ``torch.load(weights_only=True)`` reads."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state, or nothing of it, with a ValueError, if it does not fit."""
