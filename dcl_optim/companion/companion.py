r"""The companion network: its forecast of a batch, and its step towards :math:`\alpha c + (1-\alpha) z`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dcl_optim._optim import all_or_nothing, gradients_of
from dcl_optim._rng import RngState, on_device, replayed
from dcl_optim._validation import check_tensors
from dcl_optim.companion import copying, inputs
from dcl_optim.companion.inputs import Arguments
from dcl_optim.companion.optimizer import CompanionOptimizer, MakeOptimizer
from dcl_optim.companion.sync import CompanionSync
from dcl_optim.companion.weighting import WeightedMean
from dcl_optim.distances import Distance, companion_gradient
from dcl_optim.distributed import Ranks, refuse_flat_shards, unwrapped
from dcl_optim.forecaster import Forecaster, ForwardRecord, Scale

IN_COMPANION = (
    "This was raised in the forward of dcl_optim's companion, on the model's inputs. What a script sets on the model "
    "after wrapping it (an attribute, a hidden state), it has to set on optimizer.companion too."
)


class Companion(Forecaster):
    r"""The second network :math:`\omega` of Deep Companion Learning (Algorithm 1).

    Forecast: its logits c on the same batch. Learning: one step of its optimizer on
    :math:`\Delta(c, \alpha\,\mathrm{stop}(c) + (1-\alpha)\,\mathrm{stop}(z))` with the same c; of several forwards
    since the last step on their mean, weighed by the size of what each loss was multiplied by.

    Args:
        model: the model.
        base: its optimizer.
        find_logits: function of a module's output that gives the logits.
        companion: None (a copy of the model), a module, or a callable without arguments that builds one.
        companion_optimizer: None (a second one of the base's class), an optimizer, or a callable that builds one.
        lr_scale: the companion's learning rate divided by the base's.
        fraction: the part of each batch, its first rows, that the companion learns from, in (0, 1].
        every: it learns once in this many steps, at least 1.
        device: where it lives; None for the model's device.
        dtype: what it computes in; None for the model's dtype.
        process_group: as in :class:`~dcl_optim.DCLOptimizer`.

    Attributes:
        module: the companion as a module.
        optimizer: its optimizer.

    Raises:
        ValueError: the companion shares trained parameters with the model, or has none.
        TypeError: a companion, an optimizer or a group that is none.
        RuntimeError: the model cannot be copied.

    Examples:
        >>> from dcl_optim.hooks.outputs import find_logits
        >>> model = nn.Linear(4, 3)
        >>> companion = Companion(model, torch.optim.SGD(model.parameters(), lr=0.1), find_logits)
        >>> torch.equal(companion.module.weight, model.weight), companion.module.weight is model.weight
        (True, False)
    """

    def __init__(
        self,
        model: nn.Module,
        base: Optimizer,
        find_logits: Callable[[Any], Tensor],
        *,
        companion: nn.Module | Callable[[], nn.Module] | None = None,
        companion_optimizer: Optimizer | MakeOptimizer | None = None,
        lr_scale: float = 1.0,
        fraction: float = 1.0,
        every: int = 1,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        process_group: Any = "auto",
    ) -> None:
        self._find_logits, self._fraction, self._every = find_logits, fraction, every
        self._device, self._dtype = device, dtype
        refuse_flat_shards(model)
        self._ranks = Ranks(model, process_group)
        own, is_copy = unwrapped(model), companion is None
        self.module = copying.build(own, companion, device, dtype)
        self._optimizer = CompanionOptimizer(base, own, self.module, lr_scale, companion_optimizer, is_copy)
        self._sync = CompanionSync(model, self.module, self._optimizer, is_copy, self._ranks, device, dtype)
        self.optimizer = self._optimizer.optimizer
        self._cuts_rows = False  # whether the parts of a batch are known to be rows of it
        self._learns = True  # whether the companion learns from this batch
        self._reset()

    def _reset(self) -> None:
        self._pending: list[tuple[Tensor, Tensor]] = []  # logits whose backward has not run, and their gradients
        self._mean = WeightedMean()  # of the gradients since the last step

    # ---- the forecast: c = f(ω, x) -----------------------------------------------------------------------------------

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], rng_state: RngState, step: int) -> None:
        if self._pending:
            self._run_backward()
        self._learns = step % self._every == 0
        self._ranks.find()
        self._sync.follow()

    def predict(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], record: ForwardRecord, rng_state: RngState
    ) -> None:
        with replayed(on_device(rng_state, self._device)), inputs.outside_checkpoints():
            forecast = self._forecast((args, kwargs), record.shape[0])
        self._keep(forecast, (args, kwargs), record)

    def _forecast(self, arguments: Arguments, batch: int) -> list[Tensor]:
        """The companion's logits: of the whole batch, or of the rows that it learns from and then of the others."""
        arguments = inputs.detached(arguments)
        if self._device is not None or self._dtype is not None:
            arguments = inputs.to_place(arguments, self._device, self._dtype)
        if not self._learns:
            with torch.no_grad():
                return [self._logits(arguments)]
        learned = batch if self._fraction == 1 else max(2, round(self._fraction * batch))
        if batch - learned < 2:  # batch normalisation cannot take a single sample
            return [self._logits(arguments)]
        # A graph for the rows that are learned from only: this is where a fraction saves its time.
        try:
            first = self._logits(inputs.part(arguments, batch, slice(0, learned)))
            with torch.no_grad():
                rest = self._logits(inputs.part(arguments, batch, slice(learned, None)))
            if not self._cuts_rows:
                self._require_rows(arguments, batch, learned)
        except Exception as error:
            _add_note(error, self._of_fraction(arguments, batch))
            raise
        return [first, rest]

    def _require_rows(self, arguments: Arguments, batch: int, learned: int) -> None:
        """Raise ValueError if the dimension that is cut is none of independent samples, as time is; checked once.

        In evaluation mode, in which neither batch norm nor dropout makes a part another one than the rows of the whole.
        """
        parts = [inputs.part(arguments, batch, rows) for rows in (slice(0, learned), slice(learned, None))]
        with torch.no_grad(), copying.evaluating(self.module):
            whole, *pieces = [self._logits(each) for each in (arguments, *parts)]
        together = torch.cat(pieces)
        if together.shape == whole.shape and not whole.is_meta:  # other shapes are refused with the forecast
            error = (together - whole).nan_to_num().abs().max()  # -inf of masked classes in both
            half = next(self.module.parameters()).dtype.itemsize < 4 or torch.is_autocast_enabled(whole.device.type)
            rounding = 0.05 if half else 0.005  # a kernel for fewer rows sums in another order, or in TF32
            if error > rounding * whole.nan_to_num(neginf=0.0, posinf=0.0).abs().max():
                raise ValueError(
                    f"companion_fraction={self._fraction}: the companion's logits for a part of the batch are not "
                    "those rows of the whole batch's, so the first dimension of the inputs is none of independent "
                    "samples (time, or a graph's nodes); pass companion_fraction=1"
                )
        self._cuts_rows = True

    def _logits(self, arguments: Arguments) -> Tensor:
        args, kwargs = arguments
        try:
            output = self.module(*args, **kwargs)
        except Exception as error:
            _add_note(error, IN_COMPANION)
            raise
        return self._find_logits(output)

    def _keep(self, parts: list[Tensor], arguments: Arguments, record: ForwardRecord) -> None:
        """Put the forecast into the record of the forward; raise ValueError if it is none of what the model said."""
        first = parts[0]
        shape = first.shape if len(parts) == 1 else (sum(map(len, parts)), *first.shape[1:])
        if shape != record.shape:
            hint = "" if len(parts) == 1 else " " + self._of_fraction(arguments, record.shape[0])
            raise ValueError(
                f"companion gives logits of shape {tuple(shape)} where the model gives {tuple(record.shape)}; its "
                f"architecture is free, its output shape is not.{hint} If the model's head was replaced, wrap the "
                "model again"
            )
        c = record.rows(first)
        record.companion_logits = c if self._learns else None
        forecast = c.detach() if len(parts) == 1 else torch.cat([c.detach(), record.rows(parts[1])])
        record.forecast = forecast.to(record.logits.device)

    def _of_fraction(self, arguments: Arguments, batch: int) -> str:
        return (
            f"With companion_fraction={self._fraction} the companion runs on two parts of the batch: of the {batch} "
            f"rows of {', '.join(inputs.cut_inputs(arguments, batch)) or 'no input'}. Each input whose first dimension "
            "is as long as the batch is cut, and no other; where that is wrong pass companion_fraction=1."
        )

    # ---- learning: ∇_ω Δ(c, α stop(c) + (1 - α) stop(z)) -------------------------------------------------------------

    def observe(self, record: ForwardRecord, distance: Distance, alpha: float, scale: Scale) -> None:
        c, record.companion_logits = record.companion_logits, None
        if c is None:
            return
        z = record.logits if self._fraction == 1 else record.logits[: len(c)]
        gradient = companion_gradient(distance, z.to(c.device), c, alpha)
        gradient = self._mean.weigh(gradient, scale, half=c.dtype == torch.float16)
        self._pending.append((c, gradient.to(c.dtype)))

    def backward(self) -> None:
        self._optimizer.follow_options()
        self._run_backward()

    def _run_backward(self) -> None:
        pending, self._pending = self._pending, []
        self._run_backward_of(pending)

    def _run_backward_of(self, pending: list[tuple[Tensor, Tensor]]) -> None:
        for logits, gradient in pending:
            with inputs.outside_autocast(logits.device.type):
                logits.backward(gradient)
            if next(gradients_of(self.optimizer), None) is None:
                raise RuntimeError(
                    "the companion's logits do not depend on its parameters: its copy still calls the model (whose "
                    "forward was replaced by a function that holds it?); pass companion="
                )

    def step(self) -> None:
        mean = self._mean
        if mean.count:
            self._run_backward()  # of a base that has evaluated the model once, in its own step
            overflowed = self._average() if mean.count > 1 or mean.half or self._ranks.count > 1 else False
            if not overflowed:
                self._optimizer.step()
            self.forget()
        self._optimizer.note_options()

    def _average(self) -> bool:
        """Make the mean over the forwards of the step and over the ranks; say whether it has overflowed."""
        if self._ranks.count > 1:  # every rank must bring the same tensors to the reduction
            self._optimizer.fill_gradients()
        gradients = list(gradients_of(self.optimizer))
        self._mean.divide(gradients)
        self._ranks.average(gradients)
        return self._mean.has_overflowed(gradients)

    def forget(self) -> None:
        self._reset()
        self.optimizer.zero_grad()

    # ---- following the base, and the state ---------------------------------------------------------------------------

    def base_changed(self) -> None:
        self._sync.follow_base()

    def set_mode(self, mode: str) -> None:
        if hasattr(self.optimizer, mode):
            getattr(self.optimizer, mode)()

    def create_state(self) -> None:
        self._optimizer.follow_options()  # the learning rate is 0 for now
        if not self.optimizer.state:
            self._optimizer.fill_gradients()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self._optimizer.note_options()

    def state_dict(self) -> dict[str, Any]:
        self._optimizer.follow_options()  # what the script has changed since the last step, as a scheduler does
        return {"model": self._sync.own_state(), "optimizer": self._optimizer.state_dict()}

    def check_state(self, state: dict[str, Any]) -> None:
        check_tensors(state.get("model", {}), self._sync.own_state(), "companion")
        self._optimizer.check_state(state.get("optimizer", {}))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with all_or_nothing(self.optimizer):
            self._optimizer.load_state_dict(state["optimizer"])
            self.module.load_state_dict(state["model"], strict=False)
        self.forget()
        self._optimizer.note_options()

    def __getstate__(self) -> dict[str, Any]:
        self._run_backward()  # graphs cannot be copied
        return self.__dict__


def _add_note(error: BaseException, note: str) -> None:
    if hasattr(error, "add_note"):  # from Python 3.11 on
        error.add_note(note)
