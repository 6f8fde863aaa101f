r"""The companion network: its prediction for a batch, and its step towards :math:`\alpha c + (1-\alpha) z`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dcl_optim import _rng, _sync
from dcl_optim._optim import all_or_nothing, gradients_of, parameters_of
from dcl_optim._rng import RngState, replayed
from dcl_optim._torch import call_after_backward, current_backward, warn
from dcl_optim._validation import check_tensors
from dcl_optim.companion import copying, inputs
from dcl_optim.companion.follow import ModelFollower
from dcl_optim.companion.optimizer import CompanionOptimizer, CompanionOptions, add_note, check_for_copy
from dcl_optim.companion.weighting import WeightedMean
from dcl_optim.distances import Distance, from_rows, to_rows
from dcl_optim.distributed import DataParallelGroup, refuse_flat_shards, unwrapped
from dcl_optim.forecaster import Forecaster, Forward, Loss, Penalty

DEFAULTS = CompanionOptions()
NOT_MADE = {"made": False}  # the state of a copy before its first forward pass
IN_COMPANION = (
    "This was raised in the {} pass of dcl_optim's companion, on the model's inputs. Where a script sets an attribute "
    "of the model, or resets or detaches a hidden state, it has to do so on optimizer.companion too."
)
WEIGHTS_LOADED = (
    "weights were loaded into the model since its last training forward pass, but the companion was not reset: if they "
    "are others than before, the penalty pulls the model back.\n  Fix: call optimizer.reset_companion() after loading, "
    "or load the optimizer's state of the same moment. Ignore this for weights swapped in for an evaluation only"
)


@dataclass
class Network:
    """The companion once it is made."""

    module: nn.Module
    optimizer: CompanionOptimizer
    follower: ModelFollower
    versions: list[Any]  # of its parameters, as it was made or before its first forward pass
    starts_equal: bool  # whether its first prediction has to be the model's logits
    has_predicted: bool = False
    has_learned: bool = False
    loaded_since: bool = False  # whether weights were loaded into the model since the last forward pass


@dataclass
class Prediction:
    """The companion's logits for one forward pass, in the shape of the model's."""

    logits: Tensor  # with a graph until the companion has learned from them
    learns: bool
    rows: Tensor | None = None  # the logits as rows (N, K)


class Companion(Forecaster):
    r"""The second network :math:`\omega` of Deep Companion Learning (Algorithm 1).

    Prediction: its logits c on the same batch. Learning: one step of its optimizer on
    :math:`\Delta(c, \alpha\,\mathrm{stop}(c) + (1-\alpha)\,\mathrm{stop}(z))` with the same c; of several forward
    passes on their mean, weighted by the loss scales. Its backward pass runs when that of the model has ended.

    Args:
        model: the model.
        base: its optimizer.
        find_logits: function of a module's output that gives the logits.
        options: see :class:`CompanionOptions`.

    Examples:
        >>> from dcl_optim.loss.outputs import find_logits
        >>> model = nn.Linear(4, 3)
        >>> companion = Companion(model, torch.optim.SGD(model.parameters(), lr=0.1), find_logits)
        >>> torch.equal(companion.module.weight, model.weight), companion.module.weight is model.weight
        (True, False)
    """

    group: DataParallelGroup

    def __init__(
        self,
        model: nn.Module,
        base: Optimizer,
        find_logits: Callable[[Any], Tensor],
        options: CompanionOptions = DEFAULTS,
    ) -> None:
        self._model, self._base, self._find_logits, self._options = model, base, find_logits, options
        refuse_flat_shards(model)
        self.group = DataParallelGroup(model, options.process_group)
        self._mode: str | None = None  # that the base was switched to, if it has one
        self._network: Network | None = None
        self._captured = inputs.InputCapture()
        self._step, self._learns = 0, True  # the number of the step, and whether the companion learns in it
        self._diverged = False  # whether its logits were not finite where the model's were
        self._warned_weights_loaded = False
        self._pending: list[tuple[Tensor, Tensor]] = []  # logits whose backward pass has not run, and their gradients
        self._mean = WeightedMean()  # of the gradients since the last step
        if options.companion is None:
            check_for_copy(base, model, options.optimizer)
        else:
            self._make()

    def _make(self) -> Network:
        """Build the companion and its optimizer. Making a copy leaves the script's generators as they were."""
        own, options = unwrapped(self._model), self._options
        is_copy = options.companion is None
        if is_copy:
            check_for_copy(self._base, own, options.optimizer)
        device = next(parameters_of(self._base)).device
        with _rng.unchanged(device) if is_copy else nullcontext(), torch.inference_mode(False):
            module = copying.build(own, options.companion, is_called=own is self._model)
            optimizer = CompanionOptimizer(self._base, own, module, options)
        follower = ModelFollower(self._model, module, optimizer, self.group)
        self._network = Network(module, optimizer, follower, follower.versions(), starts_equal=is_copy)
        if self._mode is not None:
            self.follow(self._mode)
        return self._network

    def settings(self) -> dict[str, Any]:
        if self._network is None:
            return {"companion": "not made yet"}
        return {"companion": f"{sum(p.numel() for p in self._network.module.parameters()):,} parameters"}

    @property
    def module(self) -> nn.Module:
        """The companion as a module."""
        return (self._network or self._make()).module

    @property
    def optimizer(self) -> Optimizer:
        """The companion's optimizer."""
        return (self._network or self._make()).optimizer.optimizer

    # ---- the prediction: c = f(ω, x) ---------------------------------------------------------------------------------

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], rng_state: RngState, step: int) -> None:
        self._learns, self._step = step % self._options.every == 0, step
        self.group.find()
        network = self._network or self._make()
        if network.loaded_since and not self._warned_weights_loaded:
            self._warned_weights_loaded = True
            warn(WEIGHTS_LOADED)
        network.follower.follow()
        if not network.has_predicted:
            versions = network.follower.versions()
            network.starts_equal &= versions == network.versions  # as the script left it
            network.versions = versions
        self._captured.before_forward(args, kwargs)

    def predict(self, args: tuple[Any, ...], kwargs: dict[str, Any], forward: Forward, rng_state: RngState) -> None:
        network = self._network
        assert network is not None
        arguments = self._captured.after_forward(args, kwargs)
        if not network.has_predicted:
            network.follower.require_unwritten(network.versions)
        with replayed(rng_state), inputs.outside_checkpoints(), torch.set_grad_enabled(self._learns):
            try:
                output = network.module(*arguments[0], **arguments[1])
            except Exception as error:
                add_note(error, IN_COMPANION.format("forward"))
                raise
            logits = self._find_logits(output)
        if logits.shape != forward.logits.shape:
            raise ValueError(
                f"companion gives logits of shape {tuple(logits.shape)} where the model gives "
                f"{tuple(forward.logits.shape)}. If the model's head was replaced, wrap the model again"
            )
        if network.starts_equal and not network.has_predicted:
            copying.require_equal(forward.logits, logits.detach(), network.module)
        network.has_predicted = True
        forward.prediction = Prediction(logits, self._learns)

    # ---- learning: ∇_ω Δ(c, α stop(c) + (1 - α) stop(z)) -------------------------------------------------------------

    def penalty(self, forward: Forward, loss: Loss, distance: Distance) -> Penalty:
        z, prediction = forward.rows, forward.prediction
        prediction.rows = c = to_rows(prediction.logits.detach(), loss.class_dim).to(z.device)
        # A device is read in another step than the one in which the loss reader does so.
        if _sync.may_sync(forward.step - 1, z) and not math.isfinite(c.sum()):
            self._diverged |= bool((z.isfinite() & ~c.isfinite()).any())
        return Penalty(distance.rows(z, c), max(len(z), 1))

    def observe(self, forward: Forward, loss: Loss, penalty: Penalty, distance: Distance, alpha: float) -> None:
        prediction: Prediction = forward.prediction
        logits, prediction.logits = prediction.logits, prediction.logits.detach()
        if not prediction.learns:
            return
        c = prediction.rows
        assert c is not None
        found = distance.towards_target(forward.rows, c, penalty.rows, alpha)
        gradient = self._mean.weigh(found, max(len(c), 1), loss.scale, logits.dtype == torch.float16)
        self._pending.append((logits, from_rows(gradient, logits.shape, loss.class_dim).to(logits)))
        if current_backward() != -1:
            call_after_backward(self._run_backward)  # the model's activations are freed by then

    def skip(self, forward: Forward, alpha: float) -> None:
        forward.prediction.logits = forward.prediction.logits.detach()
        if forward.prediction.learns and self.group.size > 1:  # the others wait for this one's share in the mean
            self._mean.count += 1

    def _run_backward(self) -> None:
        pending, self._pending, network = self._pending, [], self._network
        for logits, gradient in pending:
            try:
                kind = logits.device.type  # no backward pass is to run under autocast
                with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
                    logits.backward(gradient)
            except RuntimeError as error:
                add_note(error, IN_COMPANION.format("backward"))
                raise
            if network is not None and not network.has_learned:
                network.has_learned = next(gradients_of(self.optimizer), None) is not None
                if not network.has_learned:
                    raise RuntimeError(
                        "the companion's logits do not depend on its parameters: was the model's forward replaced by a "
                        "function that holds the model? Pass companion="
                    )

    def before_step(self, creates_state: bool = False) -> None:
        network = self._make() if creates_state and self._network is None else self._network
        if network is None:
            return
        network.optimizer.follow_options()
        if creates_state:
            optimizer = network.optimizer.optimizer
            if not optimizer.state:
                network.optimizer.fill_gradients()
                optimizer.step()
                optimizer.zero_grad()
            network.optimizer.note_options()  # the learning rate is 0 for now

    def step(self) -> None:
        network, mean = self._network, self._mean
        if network is None:
            return
        if self._pending:  # only compiled autograd leaves it to the step
            self._run_backward()
        if mean.count:
            averages = mean.count > 1 or mean.half or self.group.size > 1
            if not (averages and self._average(network.optimizer)):
                network.optimizer.step()
            self._mean = WeightedMean()
            deque(map(setattr, network.follower.parameters, repeat("grad"), repeat(None)), maxlen=0)
        if self._diverged:
            self._recreate()
        if self._network is not None:
            self._network.optimizer.note_options()

    def _recreate(self) -> None:
        self._diverged, what = False, "load weights into optimizer.companion, or wrap again"
        if not isinstance(self._options.companion, nn.Module):
            self.reset()
            what = "it is copied from the model"
        warn(f"the companion's logits were not finite where the model's are (is its learning rate too high?): {what}")

    def _average(self, optimizer: CompanionOptimizer) -> bool:
        """Make the mean over the forward passes of the step and over the ranks; say whether it has overflowed."""
        if self.group.size > 1:  # every rank must bring the same tensors to the reduction
            optimizer.fill_gradients()
        gradients = list(gradients_of(optimizer.optimizer))
        self._mean.divide(gradients)
        if self.group.size > 1:
            # The ranks are recreated together, or none is.
            diverged = torch.full_like(gradients[0].flatten()[:1], float(self._diverged))
            self.group.average([*gradients, diverged])
            if _sync.may_sync(self._step - 1, diverged):
                self._diverged = bool(diverged > 0)
        return self._mean.has_overflowed(gradients)

    def forget(self) -> None:
        self._pending, self._mean = [], WeightedMean()
        if self._network is not None:
            self._network.module.zero_grad()

    # ---- following the base, and the state ---------------------------------------------------------------------------

    def follow(self, change: str) -> None:
        network = self._network
        if change == "loaded":
            if network is not None and not isinstance(self._options.companion, nn.Module):
                network.loaded_since = network.has_predicted
        elif change == "added":
            if network is not None:
                network.follower.follow_parameters()
        else:
            self._mode = change
            if network is not None and hasattr(self.optimizer, change):
                getattr(self.optimizer, change)()

    def state_dict(self) -> dict[str, Any]:
        network = self._network
        if network is None:
            return dict(NOT_MADE)
        network.optimizer.follow_options()  # what the script has changed since the last step, as a scheduler does
        return {"model": network.follower.own_state(), "optimizer": network.optimizer.state_dict()}

    def check_state(self, state: dict[str, Any]) -> None:
        if state == NOT_MADE and self._options.companion is None:
            return
        before = self._network
        try:
            network = self._network or self._make()
            model = state.get("model", {})
            expected = network.follower.own_state(unshared=model)
            missing = sorted(expected.keys() - model.keys())
            if missing and self._options.companion is None:
                raise ValueError(
                    f"the state of the companion does not fit: missing {missing[:5]}; if these were frozen when it was "
                    "saved, freeze them again, call reset_companion(), load, and unfreeze them"
                )
            check_tensors(model, expected, "companion")
            network.optimizer.check_state(state.get("optimizer", {}))
        except Exception:
            self._network = before
            raise

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state == NOT_MADE:
            self.reset()
            return
        network = self._network or self._make()
        network.follower.unshare(state["model"])  # also layers that were frozen again, which go on training
        with all_or_nothing(network.optimizer.optimizer):
            network.optimizer.load_state_dict(state["optimizer"])
            network.module.load_state_dict(state["model"], strict=False)
        self.forget()
        network.optimizer.note_options()
        network.has_predicted = network.starts_equal = network.loaded_since = False

    def reset(self) -> None:
        """Drop the companion: the next training forward pass begins with a new one, as the first did."""
        if isinstance(self._options.companion, nn.Module):
            raise RuntimeError("companion was given as a module: load weights into it, or wrap the model again")
        self.forget()
        self._network = None
        if self._options.companion is not None:
            self._make()

    def __getstate__(self) -> dict[str, Any]:
        self._run_backward()  # graphs cannot be copied
        return self.__dict__
