r"""The companion network: its prediction for a batch, and its step toward :math:`\alpha c + (1-\alpha) z`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dcl_optim.companion import copying
from dcl_optim.companion.network import TINY, CompanionOptions, Network
from dcl_optim.companion.optimizer import add_note, are_zero, check_optimizer
from dcl_optim.companion.replay import Arguments, Replay
from dcl_optim.companion.rows import Rows
from dcl_optim.forecaster import Forecaster, Labels
from dcl_optim.penalty.distances import Distance
from dcl_optim.penalty.layout import Masks, to_rows
from dcl_optim.penalty.pull import Pull, Scale, pull_of, pull_towards_target
from dcl_optim.progress import Forward
from dcl_optim.pytorch.arguments import check_state
from dcl_optim.pytorch.internals import warn_once
from dcl_optim.pytorch.outputs import find_logits
from dcl_optim.pytorch.parameters import gradients_of, parameters_of
from dcl_optim.pytorch.ranks import DataParallelGroup, any_sharded, refuse_flat_shards, sum_of_norms, unwrapped

HALF_SIZE = 16.0  # of the largest sum over rows of a gradient in float16, which ends at 65,504
IN_COMPANION = (
    "This was raised in dcl_optim's companion, which ran on the model's inputs. Where a script sets an attribute "
    "of the model, or resets or detaches a hidden state, it has to do so on optimizer.companion too. The companion has "
    "none of the script's hooks."
)
COPIED_AGAIN = (
    "the base optimizer trains other parameters than before, or the model was moved: the companion is copied from the "
    "model again"
)
WRITES_TO_THE_MODEL = (
    "the companion's forward pass writes to the model's own tensors. Either the model's forward pass writes to "
    "parameters that no gradient trains, which the companion shares: write to them after the step, make them buffers, "
    f"or pass companion=copy.deepcopy(model). Or {copying.NOT_COPIED}"
)
OTHER_MASKS = (
    "the companion's logits are masked (900 below the largest of their row) for other classes than the model's, as "
    "where a script has opened classes of the model. They have no penalty there.\n"
    "  Fix: call optimizer.reset_companion() when classes open, or open them in optimizer.companion too. If none have "
    "opened, training diverges: lower the learning rate"
)
REACHED = (
    "the script's loss gives gradients to the companion: the model's forward puts tensors into a list or an object "
    "outside of the model, such as a global variable, where the companion's forward has put its own.\n"
    "  Fix: return them from forward, or keep them in attributes of the model; or use DCP"
)
DIVERGED = (
    "the companion's weights are not finite (a batch that was not, or too high a learning rate): it is copied from the "
    "model again. One that was given as companion= is not: load weights into it, or wrap again"
)

NOT_MADE = {"made": False}  # the state from before the first forward pass of a copy


@dataclass
class Prediction:
    """The companion's logits for one forward pass."""

    logits: Tensor  # with a graph until the companion has learned from them
    drawn: Tensor | None  # the rows of the batch that it saw; None for all


class Companion(Forecaster):
    r"""The second network :math:`\omega` of Deep Companion Learning (Algorithm 1).

    Prediction: its logits c on the same batch. Learning: one step of its optimizer on
    :math:`\Delta(c, \alpha\,\mathrm{stop}(c) + (1-\alpha)\,\mathrm{stop}(z))` with the same c; of several forward
    passes on their mean, weighted by the losses' factors. Its backward pass runs when that of the model has ended.

    Args:
        model: the model.
        base: its optimizer.
        distance: a function (z, c) of rows (N, K) that returns one value a row.
        logits: the script's function that finds the logits in a module's output; None for :func:`find_logits`.
        options: see :class:`CompanionOptions`.

    Examples:
        >>> from dcl_optim.penalty.distances import mse
        >>> model = nn.Linear(4, 3)
        >>> companion = Companion(model, torch.optim.SGD(model.parameters(), lr=0.1), mse, None, CompanionOptions())
        >>> torch.equal(companion.network.module.weight, model.weight)
        True
    """

    def __init__(
        self,
        model: nn.Module,
        base: Optimizer,
        distance: Distance,
        logits: Callable[[Any], Tensor] | None,
        options: CompanionOptions,
    ) -> None:
        self.distance = distance
        self._model = unwrapped(model)
        self._base = base
        self._logits = logits
        self._is_copy = options.companion is None
        refuse_flat_shards(model)
        check_optimizer(base, options.make_optimizer)
        self._group = DataParallelGroup(model, options.process_group)
        self._make = functools.partial(Network, self._model, base, options, self._group)
        self._replay = Replay()
        self._rows = Rows(options.fraction)
        self._said: set[str] = set()
        self._masks = Masks()
        self._start()
        # A copy is made at the first training forward pass, when the script has set up the model.
        if not self._is_copy:
            self.network = self._make()

    def _start(self) -> None:
        """Begin with nothing to learn."""
        self._rows.generator = None
        self._pending: list[tuple[Tensor, Tensor]] = []  # logits whose backward pass has not run, and their gradients
        self._has_predicted = False  # in this step
        self._total_scale: Scale | None = None  # the sum of |s|, once it has something to learn
        self._half_factor: Tensor | None = None  # of all gradients, once there were logits in float16

    @functools.cached_property
    def network(self) -> Network:
        """The module with its optimizer; made now if not before."""
        return self._make()

    @property
    def _made(self) -> Network | None:
        return vars(self).get("network")

    # ---- the prediction: c = f(ω, x) ---------------------------------------------------------------------------------

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], step_number: int) -> None:
        self._group.find()
        if self.network.has_changed():
            self.network.has_predicted = False  # one that was given may share what trains now
            if self._is_copy:
                self.reset()
                warn_once(self._said, COPIED_AGAIN)
        self.network.follow()
        self._replay.before_forward(args, kwargs, self.network.device)

    def predict(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        network = self.network
        arguments = self._replay.arguments(args, kwargs)
        checks = not network.has_predicted
        before = copying.written(self._model) if checks else []
        is_equal = checks and self._is_copy and network.is_new  # to the model
        seed = forward.step_number * self._group.size + self._group.rank  # ranks have rows of their own
        try:
            drawn, part = self._rows.draw(forward, arguments, network.module, self._call, seed)
            if is_equal and drawn is not None:
                self._compare_whole(arguments, forward)
            logits = self._call(part)
        except Exception as error:
            add_note(error, IN_COMPANION)
            raise
        length = forward.shape[0] if drawn is None else len(drawn)
        shape = (length, *forward.shape[1:])
        if logits.shape != shape:
            raise ValueError(
                f"companion gives logits of shape {tuple(logits.shape)} where the model gives {shape}. Pass a "
                "companion with the outputs of the model, or after a change of the model's head build the base "
                "optimizer and wrap it again"
            )
        if checks:
            if copying.written(self._model) != before:
                raise RuntimeError(WRITES_TO_THE_MODEL)
            copying.require_own_leaves(logits, self._model, self._base, network.module)
            if is_equal and drawn is None:
                copying.require_equal(forward.logits, logits.detach())
            self._masks.look_for(logits)  # of a companion from a state, which may mask what the model does not
            network.has_predicted = True
        forward.prediction = Prediction(logits, drawn)
        self._has_predicted = True

    def _compare_whole(self, arguments: Arguments, forward: Forward) -> None:
        """Check that a new copy equals the model, of the whole batch, but without a graph, and leave no trace."""
        buffers = list(self.network.module.buffers())
        before = [buffer.clone() for buffer in buffers]
        with torch.no_grad():
            logits = self._call(arguments.copied())
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
        copying.require_equal(forward.logits, logits)

    def _call(self, arguments: Arguments) -> Tensor:
        return find_logits(self._replay.call(self.network.module, arguments), self._logits)

    def pull(self, forward: Forward, labels: Labels | None) -> Pull:
        prediction: Prediction = forward.prediction
        drawn = prediction.drawn
        z = forward.rows
        if drawn is not None:  # rows of logits lie in the order of the batch
            z = z.view(forward.shape[0], -1, z.shape[1]).index_select(0, drawn).flatten(0, 1)
        c = to_rows(prediction.logits.detach(), forward.class_dim).to(z.device)
        if forward.may_read:
            self._masks.look_for(z)
        if self._masks.are_there:
            z, c = map(self._masks.left_out, (z, c))
            if forward.may_read and not torch.equal(z.isinf(), c.isinf()):
                warn_once(self._said, OTHER_MASKS)
        return pull_of(self.distance, z, c)._replace(lesson=(z, c), drawn=drawn)

    # ---- learning: ∇_ω Δ(c, α stop(c) + (1 - α) stop(z)) -------------------------------------------------------------

    def observe(self, forward: Forward, pull: Pull, labels: Labels | None, scale: Scale, alpha: float) -> None:
        prediction: Prediction = forward.prediction
        logits = prediction.logits
        if not len(forward.rows) or not logits.requires_grad:
            return
        prediction.logits = logits.detach()  # the graph waits in _pending, for one backward pass of all together
        z, c = pull.lesson
        towards = pull_towards_target(self.distance, z, c, pull, alpha)
        gradient = towards.gradient(logits.shape, towards.slope.dtype, forward.class_dim, scale, overwrites=True)
        if logits.dtype == torch.float16:  # a gradient scaler's s grows until the model's gradient overflows
            self._fit_into_half(towards.slope)
        if self._half_factor is not None:
            gradient = gradient * self._half_factor
        self._pending.append((logits, gradient.to(logits)))
        self._total_scale = scale if self._total_scale is None else self._total_scale + scale

    def _fit_into_half(self, gradient: Tensor) -> None:
        """Choose what all gradients of the step are multiplied by: no sum of rows overflows in float16, or underflows.

        It is the smallest factor of all forward passes, also for what they have brought before.
        """
        factor = HALF_SIZE / gradient.abs().sum(0).amax().clamp(min=TINY)
        share = factor
        if self._half_factor is not None:
            factor = torch.minimum(factor, self._half_factor)
            share = factor / self._half_factor
        for brought in (*gradients_of(self.network.own), *(waiting for _, waiting in self._pending)):
            brought.mul_(share)
        self._half_factor = factor

    def pass_over(self, forward: Forward) -> None:
        """Run the backward pass of sharded layers by zeros, since the other ranks run theirs."""
        prediction: Prediction = forward.prediction
        if any_sharded(self.network.own) and prediction.logits.requires_grad:
            self._pending.append((prediction.logits, torch.zeros_like(prediction.logits)))
            prediction.logits = prediction.logits.detach()

    def end_backward(self) -> None:
        """Run the companion's backward pass for all forward passes that wait for it."""
        if not self._pending:
            return
        network = self.network
        if network.is_new and not are_zero(gradients_of(network.own)):
            raise RuntimeError(REACHED)
        network.is_new = False
        logits, gradients = zip(*self._pending, strict=True)
        self._pending = []
        try:
            with torch.autocast(logits[0].device.type, enabled=False):  # under which no backward pass is to run
                torch.autograd.backward(logits, gradients)
        except Exception as error:
            add_note(error, IN_COMPANION)
            raise

    def learn(self, alpha: float) -> None:
        if self._pending:  # which only compiled autograd leaves
            self.end_backward()
        has_ranks = self._group.size > 1 and self._has_predicted  # each of which must bring the same to the reduction
        total = self._total_scale
        if total is None and has_ranks:
            total = 0.0
        if total is not None:
            self.network.step(total if self._half_factor is None else total * self._half_factor, has_ranks)
        self._start()

    def check_values(self) -> None:
        self._group.warn_of_ranks()
        if self._made is None or _is_finite(self._made.optimizer) or not _is_finite(self._base):  # alike on all ranks
            return
        if self._is_copy:
            self.reset()
        warn_once(self._said, DIVERGED)

    def forget(self) -> None:
        self._start()
        if self._made is not None:
            self._made.clear_gradients()

    # ---- following the base, and the state ---------------------------------------------------------------------------

    def create_state(self) -> None:
        self.network.create_state()

    def switch(self, mode: str) -> None:
        if self._made is not None:
            self._made.switch(mode)

    def state_dict(self) -> dict[str, Any]:
        return dict(NOT_MADE) if self._made is None else self._made.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state == NOT_MADE and self._is_copy:
            self.reset()
            return
        check_state(state, {"begun": bool, "model": dict, "optimizer": dict}, "companion")
        network = self._made or self._make()
        network.load_state_dict(state)
        self.network = network
        self.forget()

    def reset(self) -> None:
        """Drop the companion: the next training forward pass begins with a new one, as the first did."""
        if not self._is_copy:
            raise RuntimeError("companion was given as a module: load weights into it, or wrap the model again")
        self._start()
        vars(self).pop("network", None)


def _is_finite(optimizer: Optimizer) -> bool:
    """Whether the norm of all parameters that an optimizer trains is finite. Synchronizes."""
    return math.isfinite(sum_of_norms(list(parameters_of(optimizer))))
