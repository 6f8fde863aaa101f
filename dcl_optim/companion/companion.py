r"""The companion network: its forecast of a batch, and its step towards :math:`\alpha c + (1-\alpha) z`."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dcl_optim import _rng
from dcl_optim._optim import all_or_nothing, gradients_of, parameters_of
from dcl_optim._rng import RngState, replayed
from dcl_optim._torch import versions_of, warn
from dcl_optim._validation import check_tensors
from dcl_optim.companion import checks, copying, inputs
from dcl_optim.companion.inputs import Arguments
from dcl_optim.companion.optimizer import CompanionOptimizer, MakeOptimizer, check_for_copy
from dcl_optim.companion.sync import CompanionSync
from dcl_optim.companion.weighting import WeightedMean
from dcl_optim.distances import Distance, companion_gradient
from dcl_optim.distributed import Ranks, refuse_flat_shards, unwrapped
from dcl_optim.forecaster import LOOK_EVERY, Forecaster, ForwardRecord, Scale

_zero_what_is_not_finite = functools.partial(torch.nan_to_num_, nan=0.0, posinf=0.0, neginf=0.0)
WRITTEN_TO = (
    "This was raised in the backward of dcl_optim's companion, which runs in optimizer.step(): the script has written "
    "to the batch, or to a tensor that it is a view of, since the forward. Do so after step(), or pass on a copy."
)
OLD_STATE = (
    "This was raised in the backward of dcl_optim's companion, which goes through a state that one of its modules "
    "keeps in an attribute (a hidden state) and that is of an earlier batch. Where the script resets or detaches the "
    "model's, it has to do so on optimizer.companion too; or pass the state to forward and return it."
)
NOT_MADE = {"made": False}  # the state of a copy before its first forward
IN_COMPANION = (
    "This was raised in the forward of dcl_optim's companion, on the model's inputs. What a script sets on the model "
    "after wrapping it (an attribute, a hidden state), it has to set on optimizer.companion too."
)


class Companion(Forecaster):
    r"""The second network :math:`\omega` of Deep Companion Learning (Algorithm 1).

    Forecast: its logits c on the same batch. Learning: one step of its optimizer on
    :math:`\Delta(c, \alpha\,\mathrm{stop}(c) + (1-\alpha)\,\mathrm{stop}(z))` with the same c; of several forwards
    since the last step on their mean, weighed by the size of what each loss was multiplied by.

    A copy is made when the first training forward begins, so that it starts where the model does whatever a script does
    to the model before; ``module``, ``optimizer`` and :meth:`load_state_dict` make it earlier.

    Args:
        model: the model.
        base: its optimizer.
        find_logits: function of a module's output that gives the logits.
        companion: None (a copy of the model), a module, or a callable without arguments that builds one at once.
        companion_optimizer: None (a second one of the base's class), an optimizer, or a callable that builds one.
        lr_scale: the companion's learning rate divided by the base's.
        fraction: the part of each batch, its first rows, that the companion learns from, in (0, 1].
        every: it learns once in this many steps, at least 1.
        process_group: as in :class:`~dcl_optim.DCLOptimizer`.

    Raises:
        ValueError: the companion shares trained parameters with the model, or has none.
        TypeError: a companion, an optimizer or a group that is none.
        RuntimeError: the model cannot be copied; most such models are found out at the first forward only.

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
        process_group: Any = "auto",
    ) -> None:
        self._model, self._base, self._find_logits = model, base, find_logits
        self._given, self._given_optimizer = companion, companion_optimizer
        self._lr_scale, self._fraction, self._every = lr_scale, fraction, every
        refuse_flat_shards(model)
        self._ranks = Ranks(model, process_group)
        self._made = self._loaded_since = False
        self._wrapped_with = [name for name, p in unwrapped(model).named_parameters() if p.requires_grad]
        self._mode: str | None = None  # that the base was switched to, if it has one
        self._cuts_rows = False  # whether the parts of a batch are known to be rows of it
        self._learns = True  # whether the companion learns from this batch
        self._looks = False  # whether a device may be looked at in this step
        self._is_lost = False  # whether its logits were not finite where the model's were
        self._own_frozen: set[str] = set()  # frozen parameters that the model's forward writes to
        self._says_loads = True  # whether the user is still to be told of weights that were loaded in the run
        self._kept: inputs.Kept | None = None  # the arguments of the forward that runs
        self._writes: bool | None = None  # whether the model's forward writes to its inputs; None until its first
        self._reset()
        if companion is None:
            copying.check_model(model)
            check_for_copy(base, model, companion_optimizer)
        else:
            self._make()

    def _make(self) -> None:
        """Build the companion and its optimizer. Making a copy leaves the script's generators as they were."""
        own, is_copy = unwrapped(self._model), self._given is None
        rng_state = _rng.capture(next(parameters_of(self._base)).device) if is_copy else {}
        with replayed(rng_state), torch.inference_mode(False):
            self._module = copying.build(own, self._given)
            self._optimizer = CompanionOptimizer(
                self._base, own, self._module, self._lr_scale, self._given_optimizer, is_copy, self._wrapped_with
            )
        self._sync = CompanionSync(self._model, self._module, self._optimizer, is_copy, self._ranks)
        self._made, self._has_forecast, self._loaded_since = True, False, False
        self._starts_equal = is_copy
        self._versions = versions_of(self._module.parameters())
        if self._mode is not None:
            self.set_mode(self._mode)

    def settings(self) -> dict[str, Any]:
        if not self._made:
            return {"companion": "not made yet"}
        return {"companion": f"{sum(p.numel() for p in self._module.parameters()):,} parameters"}

    @property
    def module(self) -> nn.Module:
        """The companion as a module."""
        if not self._made:
            self._make()
        return self._module

    @property
    def optimizer(self) -> Optimizer:
        """The companion's optimizer."""
        if not self._made:
            self._make()
        return self._optimizer.optimizer

    def _reset(self) -> None:
        self._pending: list[tuple[Tensor, Tensor]] = []  # logits whose backward has not run, and their gradients
        self._mean = WeightedMean()  # of the gradients since the last step

    # ---- the forecast: c = f(ω, x) -----------------------------------------------------------------------------------

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], rng_state: RngState, step: int) -> None:
        if self._pending:
            self._run_backward()
        self._learns, self._looks = step % self._every == 0, step % LOOK_EVERY == 0
        self._ranks.find()
        if not self._made:
            self._make()
        elif self._loaded_since:
            self._tell_of_loaded_weights()
        self._sync.follow()
        if not self._has_forecast:
            self._watched_until = step + 1  # a moving average may move only once the model has stepped
        if step <= self._watched_until or self._sync.shared:
            self._sync.watch(closely=step <= self._watched_until)
        self._kept = inputs.Kept(args, kwargs, clones=self._writes is not False)

    def predict(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], record: ForwardRecord, rng_state: RngState
    ) -> None:
        arguments = self._as_given(args, kwargs)
        if self._sync.shared:
            self._keep_what_is_written()
        with replayed(rng_state), inputs.outside_checkpoints():
            forecast = self._forecast(arguments, record.shape[0])
        self._keep(forecast, arguments, record)

    def _as_given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """The arguments as the model got them.

        Raises:
            RuntimeError: the model has written to them, which it had not done in its first forward.
        """
        kept, self._kept = self._kept, None
        if kept is None or not kept.are_of(args, kwargs):
            return inputs.detached((args, kwargs))
        self._writes = kept.use_clones_if_written() or bool(self._writes)
        return kept.arguments

    def _forecast(self, arguments: Arguments, batch: int) -> list[Tensor]:
        """The companion's logits: of the whole batch, or of the rows that it learns from and then of the others."""
        if not self._learns:
            with torch.no_grad():
                return [self._logits(arguments)]
        learned = batch if self._fraction == 1 else max(2, round(self._fraction * batch))
        if batch - learned < 2:  # batch normalisation cannot take a single sample
            return [self._logits(arguments)]
        # A graph for the rows that are learned from only: this is where a fraction saves its time.
        try:
            writes = bool(self._writes)
            first = self._logits(inputs.part(arguments, batch, slice(0, learned), writes))
            with torch.no_grad():
                rest = self._logits(inputs.part(arguments, batch, slice(learned, None), writes))
            if not self._cuts_rows:
                self._require_rows(arguments, batch, learned, writes)
        except Exception as error:
            _add_note(error, self._of_fraction(arguments, batch))
            raise
        return [first, rest]

    def _require_rows(self, arguments: Arguments, batch: int, learned: int, writes: bool) -> None:
        """Raise ValueError if the dimension that is cut is none of independent samples, as time is; checked once.

        In evaluation mode, in which neither batch norm nor dropout makes a part another one than the rows of the whole.
        """
        rows = (slice(None), slice(0, learned), slice(learned, None))
        with torch.no_grad(), copying.evaluating(self._module):
            whole, *pieces = [self._logits(inputs.part(arguments, batch, part, writes)) for part in rows]
        together = torch.cat(pieces)
        if together.shape == whole.shape and not whole.is_meta:  # other shapes are refused with the forecast
            error = (together - whole).nan_to_num().abs().max()  # -inf of masked classes in both
            half = next(self._module.parameters()).dtype.itemsize < 4 or torch.is_autocast_enabled(whole.device.type)
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
        for hook in self._sync.pre_hooks:
            hook.ignored = True
        try:
            output = self._module(*args, **kwargs)
        except Exception as error:
            _add_note(error, IN_COMPANION)
            raise
        finally:
            for hook in self._sync.pre_hooks:
                hook.ignored = False
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
        if not self._has_forecast:
            self._end_first_forward(record)

    # ---- the first forward -------------------------------------------------------------------------------------------

    def _keep_what_is_written(self) -> None:
        """Have frozen parameters of its own that the model's forward has written to, as a queue or a moving average."""
        written = self._sync.written()
        if written:
            self._own_frozen |= set(written)
            self._sync.unshare(written)
            # What they were before is gone: the first forecast is the model's, of which there is nothing to learn.
            self._learns &= self._has_forecast or not self._starts_equal

    def _end_first_forward(self, record: ForwardRecord) -> None:
        self._has_forecast = True
        self._sync.note_grown()
        if not self._starts_equal:
            return
        if self._own_frozen:
            self._sync.take_values(self._own_frozen)  # which are those after one forward, for both
            record.forecast = record.logits
        elif self._versions == versions_of(self._module.parameters()) and self._fraction == 1:  # as the script left it
            assert record.forecast is not None
            checks.require_equal(record.logits, record.forecast, self._module)

    def model_loaded(self) -> None:
        self._loaded_since = self._made and self._has_forecast and not isinstance(self._given, nn.Module)

    def _tell_of_loaded_weights(self) -> None:
        self._loaded_since = False
        if self._says_loads:
            self._says_loads = False
            warn(
                "weights were loaded into the model since its last training forward, and the companion stays where it "
                "was: if these are others than before, the penalty pulls the model back. Call "
                "optimizer.reset_companion() after loading, for a companion that is copied from the model anew, or "
                "load the optimizer's state of the same moment too. Weights that were swapped in for an evaluation and "
                "out again need nothing"
            )

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
        if isinstance(record.finite, Tensor):
            gradient = torch.where(record.finite.to(c.device), gradient, 0.0)
        gradient = self._mean.weigh(gradient, scale, half=c.dtype == torch.float16)
        self._pending.append((c, gradient.to(c.dtype)))

    def skip(self, record: ForwardRecord, alpha: float) -> None:
        c, record.companion_logits = record.companion_logits, None
        if c is None:
            return
        assert record.forecast is not None
        self._is_lost |= bool((record.logits.isfinite() & ~record.forecast.isfinite()).any())
        if self._ranks.count > 1:  # the others wait for this one's share in the mean
            self._mean.count += 1

    def backward(self) -> None:
        if self._made:
            self._optimizer.follow_options()
            self._run_backward()

    def _run_backward(self) -> None:
        pending, self._pending = self._pending, []
        for logits, gradient in pending:
            try:
                with inputs.outside_autocast(logits.device.type):
                    logits.backward(gradient)
            except RuntimeError as error:
                for sign, note in (("inplace operation", WRITTEN_TO), ("a second time", OLD_STATE)):
                    if sign in str(error):
                        _add_note(error, note)
                raise
            if next(gradients_of(self._optimizer.optimizer), None) is None:
                raise RuntimeError(
                    "the companion's logits do not depend on its parameters: its copy still calls the model (whose "
                    "forward was replaced by a function that holds it?); pass companion="
                )

    def step(self) -> None:
        mean = self._mean
        if mean.count:
            self._run_backward()  # of a base that has evaluated the model once, in its own step
            # A layer that saturates hides an infinity from the logits, and behind logits that are left out 0 · nan is
            # nan. In float16 the whole step is skipped.
            if not mean.half:
                deque(map(_zero_what_is_not_finite, gradients_of(self._optimizer.optimizer)), maxlen=0)
            overflowed = self._average() if mean.count > 1 or mean.half or self._ranks.count > 1 else False
            if not overflowed:
                self._optimizer.step()
            self.forget()
        if self._is_lost:
            self._start_anew()
        if self._made:
            self._optimizer.note_options()

    def _start_anew(self) -> None:
        self._is_lost, is_module = False, isinstance(self._given, nn.Module)
        if not is_module:
            self.reset()
        warn(
            "the companion's logits were not finite where the model's are, as after a learning rate too high for it or "
            "a state that held nan: "
            + ("load weights into optimizer.companion, or wrap again" if is_module else "it is made anew")
        )

    def _average(self) -> bool:
        """Make the mean over the forwards of the step and over the ranks; say whether it has overflowed."""
        if self._ranks.count > 1:  # every rank must bring the same tensors to the reduction
            self._optimizer.fill_gradients()
        gradients = list(gradients_of(self._optimizer.optimizer))
        self._mean.divide(gradients)
        if self._ranks.count > 1 and (self._looks or gradients[0].device.type == "cpu"):
            like = gradients[0]
            # The ranks start anew together, or none does.
            lost = torch.full((1,), float(self._is_lost), dtype=like.dtype, device=like.device)
            self._ranks.average([*gradients, lost])
            self._is_lost = bool(lost > 0)
        else:
            self._ranks.average(gradients)
        return self._mean.has_overflowed(gradients)

    def forget(self) -> None:
        self._reset()
        if self._made:
            self._optimizer.optimizer.zero_grad()

    # ---- following the base, and the state ---------------------------------------------------------------------------

    def base_changed(self) -> None:
        if self._made:
            self._sync.follow_base()

    def set_mode(self, mode: str) -> None:
        self._mode = mode
        if self._made and hasattr(self.optimizer, mode):
            getattr(self.optimizer, mode)()

    def create_state(self) -> None:
        optimizer = self.optimizer
        self._optimizer.follow_options()  # the learning rate is 0 for now
        if not optimizer.state:
            self._optimizer.fill_gradients()
            optimizer.step()
            optimizer.zero_grad()
        self._optimizer.note_options()

    def state_dict(self) -> dict[str, Any]:
        if not self._made:
            return dict(NOT_MADE)
        self._optimizer.follow_options()  # what the script has changed since the last step, as a scheduler does
        state = {"model": self._sync.own_state(), "optimizer": self._optimizer.state_dict()}
        return state | {"own_frozen": sorted(self._own_frozen)} if self._own_frozen else state

    def check_state(self, state: dict[str, Any]) -> None:
        if state == NOT_MADE and self._given is None:
            return
        was_made = self._made
        try:
            if not was_made:
                self._make()
            model = state.get("model", {})
            expected = self._sync.own_state(self._sync.shared_in(model))
            self._require_unfrozen(sorted(expected.keys() - model.keys()))
            check_tensors(model, expected, "companion")
            self._optimizer.check_state(state.get("optimizer", {}))
        except Exception:
            self._made = was_made
            raise

    def _require_unfrozen(self, missing: list[str]) -> None:
        """Raise ValueError, with the fix, for a state of when some of the model's parameters were frozen."""
        parameters = dict(self._module.named_parameters(remove_duplicate=False))
        if missing and self._given is None and all(name in parameters for name in missing):
            raise ValueError(
                f"the state of the companion does not fit: missing {missing[:5]}; if these were frozen when it was "
                "saved, freeze them again, call reset_companion(), load, and unfreeze them"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state == NOT_MADE:
            self.reset()
            return
        # Layers that were unfrozen and frozen again, which go on training; parameters that the forward writes to, not.
        unshared, self._own_frozen = self._sync.shared_in(state["model"]), set(state.get("own_frozen", ()))
        for names, trained in ((self._own_frozen & set(unshared), False), (set(unshared) - self._own_frozen, True)):
            if names:
                self._sync.unshare(names, trained)
        with all_or_nothing(self.optimizer):
            self._optimizer.load_state_dict(state["optimizer"])
            self._module.load_state_dict(state["model"], strict=False)
        self.forget()
        self._optimizer.note_options()
        self._has_forecast = self._starts_equal = self._loaded_since = False

    def reset(self) -> None:
        """Drop the companion: the next training forward begins with a new one, as the first did.

        Raises:
            RuntimeError: the companion was given as a module, of which there is no second.
        """
        if isinstance(self._given, nn.Module):
            raise RuntimeError(
                "the companion was given as a module, which cannot be made anew: load the weights that it is to have "
                "into optimizer.companion, or wrap the model again"
            )
        self.forget()
        self._made = self._loaded_since = False
        self._own_frozen = set()
        if self._given is not None:
            self._make()

    def __getstate__(self) -> dict[str, Any]:
        self._run_backward()  # graphs cannot be copied
        return self.__dict__ | {"_kept": None}


def _add_note(error: BaseException, note: str) -> None:
    if hasattr(error, "add_note"):  # from Python 3.11 on
        error.add_note(note)
