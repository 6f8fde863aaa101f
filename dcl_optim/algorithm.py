r"""Algorithm 1 for one batch, by both ways: the gradient of the logits (the line), and the term.

Not in optimizer.py, since Lightning runs the optimizer's methods on another object.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dcl_optim.forecaster import Forecaster, Labels
from dcl_optim.guards import Guards
from dcl_optim.loss.reader import LossReader
from dcl_optim.penalty.pull import Pull, Scale
from dcl_optim.penalty.weights import Checked, FollowingFit
from dcl_optim.progress import Forward, Outcome, Progress, Stage
from dcl_optim.pytorch import engines, synchronization
from dcl_optim.pytorch.engines import Engine
from dcl_optim.pytorch.hooks import Hook, ModuleHooks
from dcl_optim.pytorch.internals import (
    call_after_backward,
    constant,
    current_backward,
    in_compiled_autograd,
    is_recorded,
    outside_compiled_graphs,
    reaches_parameters,
)
from dcl_optim.pytorch.outputs import NoLogits, conversion_source, find_logits, shapes_of_others
from dcl_optim.pytorch.parameters import first_trained, have_gradients, have_zeros, parameters_of
from dcl_optim.pytorch.ranks import unwrapped

LEAST_SCALE = 1e-20  # of a term, for what learns from it: a factor of 0 weighs the batches of a step equally


class Given(NamedTuple):
    """What a call of ``penalty`` keeps until its backward pass, which brings the factor; nothing has learned yet.

    The value is not finite if one of the logits is not.
    """

    pull: Pull
    labels: Labels | None
    weight: Scale
    value: Tensor


class Logged(NamedTuple):
    """What ``logs`` tells of the last backward pass; the penalty is a function that gives it."""

    penalty: Callable[[], float | Tensor]
    weight: Scale
    alpha: float
    loss_scale: Scale


class Algorithm:
    r"""Adds :math:`s\lambda\,\partial\Delta(z, c)/\partial z` to the gradient of the logits of each forward pass.

    Args:
        model, base, ..., strict: those of ForecastOptimizer, checked; and the wrapper's name.
    """

    def __init__(
        self,
        model: nn.Module,
        base: Optimizer,
        forecaster: Forecaster,
        *,
        weight: Checked | FollowingFit,
        alpha: Checked,
        logits: Callable[[Any], Tensor] | None,
        strict: bool,
        name: str,
    ) -> None:
        self.model = model
        self.forecaster = forecaster
        self.reader = LossReader(forecaster.reads_labels)
        self.weight = weight
        self.alpha = alpha
        self.uses_term = False  # whether the script has called penalty: then the line is off
        self.progress = Progress(1)
        self.last: Logged | None = None
        self.guards = Guards(name, model, base, forecaster, self.reader, strict)
        self._base = base
        self._logits = logits
        self._engine: Engine | None = None  # that calls the model
        self._attach()

    def _attach(self) -> None:
        self.hooks = ModuleHooks(
            self, self.model, unwrapped(self.model), self.forecaster.predicts, self.guards.forward_alone
        )

    # ---- the forward pass: c = f(ω, x) -------------------------------------------------------------------------------

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called with the model, for a forecaster that predicts: begin a training forward pass."""
        if not module.training or not torch.is_grad_enabled() or is_recorded():
            return  # a call that changes nothing, also in the middle of a training forward pass, from any thread
        trained = first_trained(self._base)
        if trained is None and next(parameters_of(self._base), None) is not None:  # ZeRO 3 has none between its steps
            return
        if current_backward() == self.progress.backward != -1:
            return  # activation checkpointing recomputes a forward pass that is noted
        self.guards.forward_begins(module, trained, self.progress)
        if self._engine is None and engines.MODULE in sys.modules:
            self._engine = engines.calling_engine()
        if (self._engine is not None and self._engine.has_ended_step()) or self.progress.is_cleared:
            self.forget()
        self.progress.begin_forward()
        self.forecaster.before_forward(args, kwargs, self.progress.number)

    def after_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Called with the model's output: predict c, and wait for the gradient of the logits z."""
        predicts = self.forecaster.predicts
        if not predicts:
            self.before_forward(module, args, kwargs)
        # Of calls inside of one another the inner one has the logits, unless it is no training forward pass.
        thread = threading.get_ident()
        if thread not in self.progress.running or not module.training or not torch.is_grad_enabled():
            return
        self.progress.running.remove(thread)
        if self.uses_term and not predicts:
            return
        find = functools.partial(find_logits, output, self._logits)
        try:
            z = find()
        except NoLogits as error:
            self.guards.logits_not_found(error)
            return
        if not z.requires_grad:
            return
        forward = Forward(z, self.progress.number, self.reader.class_dim or 1)
        if predicts:
            is_in_output = output is not z and find() is z  # the script's function may compute it anew
            self.forecaster.predict(forward, args, kwargs)
            if is_in_output and find() is not z:
                self.guards.logits_replaced()
        self.progress.forwards.add(forward)
        if output is not z:
            self._note_other_tensors(forward, z, output)
        z.register_hook(functools.partial(self.hooks.on_gradient, forward))  # which holds what waits for a gradient

    def _note_other_tensors(self, forward: Forward, z: Tensor, output: Any) -> None:
        """Note an output's other tensors, and wait for a gradient of those that the logits z were converted from."""
        if self._logits is None:
            forward.shapes_of_others = shapes_of_others(output, z)
        source = conversion_source(z)
        if source is not None:  # the loss may be that of the logits before they were converted
            node, index = source
            forward.nodes = node.next_functions
            node.register_prehook(functools.partial(Hook(weakref.ref(self), "_at_source"), forward, index))

    # ---- the line: grad z + s λ ∂Δ(z, c)/∂z --------------------------------------------------------------------------

    def on_gradient(self, forward: Forward, gradient: Tensor | None) -> Tensor | None:
        """Called by autograd with the gradient of the logits: add that of the penalty (Equation 2)."""
        if gradient is None or self.uses_term or not self._is_of_training(forward):
            return None
        reading = self.reader.read(forward, gradient)
        if reading is None:
            self.guards.gradient_not_read(forward)
            self.forecaster.pass_over(forward)
            self.progress.not_finite |= not bool(gradient.isfinite().all())
            return None
        labels = Labels(reading.labels, reading.num_live) if self.reader.reads_labels else None
        self.guards.gradient_read(forward, labels)
        pull = self.forecaster.pull(forward, labels)
        weight = self.weight(forward.step_number)
        regularized = None
        if self.weight.constant != 0:
            as_logits = gradient.shape, gradient.dtype, forward.class_dim
            regularized = pull.gradient(*as_logits, reading.scale, weight, added_to=gradient)
        self._learn(forward, pull, labels, reading.scale, weight, reading.scale, reading.fits)
        return regularized

    def _at_source(self, forward: Forward, index: int, gradients: tuple[Tensor, ...]) -> Any:
        gradient = self.on_gradient(forward, gradients[index])
        return None if gradient is None else (*gradients[:index], gradient, *gradients[index + 1 :])

    def _is_of_training(self, forward: Forward) -> bool:
        """Note that a gradient has come to logits; return whether it is one of the training."""
        if not self.hooks.attached:
            return False
        progress = self.progress
        if progress.is_cleared and forward.outcome is not Outcome.LEARNED:
            self.forget()
        backward = current_backward()
        if forward.backward == backward != -1:  # each backward pass brings one
            return False
        is_another = backward != progress.backward  # than the one that brought the last gradient to any logits
        forward.backward = backward
        progress.backward = backward
        if is_another and backward != -1 and self.forecaster.predicts:
            call_after_backward(self.forecaster.end_backward)  # where the model's activations are freed
        if not reaches_parameters(forward.nodes, self._base):  # as an attack asks for the gradient of its inputs
            return False
        if torch.is_grad_enabled():  # create_graph: a gradient that is part of the script's loss
            progress.stage = max(progress.stage, Stage.GRAPH_KEPT)
            return False
        if forward.outcome is Outcome.RELEASED:
            self.guards.step_is_over()
            return False
        if is_another:
            self.last = None  # until its loss is read
        progress.stage = Stage.GRADIENTS
        return True

    def _learn(
        self,
        forward: Forward,
        pull: Pull,
        labels: Labels | None,
        share: Scale,
        weight: Scale,
        scale: Scale,
        is_read: Tensor,
    ) -> None:
        """Let the forecaster learn from a forward pass, once, which weighs this much among those of the step."""
        alpha = self.alpha(forward.step_number)
        value = pull.value  # not the pull, whose slope is as large as the logits
        self.last = Logged(lambda: value().where(is_read, torch.nan), weight, alpha, scale)
        if forward.outcome is not Outcome.LEARNED and self.progress.learns:
            forward.outcome = Outcome.LEARNED
            self.forecaster.observe(forward, pull, labels, share, alpha)

    # ---- the penalty as a term: loss + λ Δ(z, c) ---------------------------------------------------------------------

    def term(self, z: Tensor, forward: Forward | None, labels: Labels | None) -> Tensor:
        """The term, a scalar with a gradient for z; the forecaster learns in its backward pass.

        The forward pass is None if no training forward pass returned z, which is an error.
        """
        self.guards.term_called(z, forward, labels, self.hooks.attached)
        assert forward is not None
        if not self.uses_term:
            self.guards.first_term_called(self.progress)
        pull = self.forecaster.pull(forward, labels)
        weight = self.weight(forward.step_number)
        self.uses_term = True
        self.progress.penalty_called(forward)
        value = pull.value(weight)
        if forward.rows.numel():  # 0 times infinity is nan; masked logits are minus infinity
            value = torch.add(value, forward.rows.amax(), alpha=0)
        forward.given = Given(pull, labels, weight, value)
        term: Tensor = _Term.apply(z, value, forward, self)  # which keeps the last two by references
        return term

    @outside_compiled_graphs
    def on_term(self, forward: Forward, s: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Called by autograd with the gradient s of the term, the factor on it: give that of the logits."""
        if torch.is_grad_enabled():
            self.guards.graph_of_term_is_kept()
        if forward.outcome is Outcome.RELEASED:
            self.guards.step_is_over()
            return None
        pull, labels, weight, _ = forward.given
        if forward.outcome is Outcome.LEARNED and self.forecaster.predicts:  # what has learned may have overwritten it
            pull = self.forecaster.pull(forward, labels)
        gradient = None
        if self.weight.constant != 0 or in_compiled_autograd():  # which takes no None
            gradient = pull.gradient(forward.shape, dtype, forward.class_dim, s, weight)
        if self._is_of_training(forward):
            self._learn_from_term(forward, pull, s)
        return gradient

    def _learn_from_term(self, forward: Forward, pull: Pull, s: Tensor) -> None:
        _, labels, weight, value = forward.given
        share = s
        if labels is None:
            share = torch.hypot(s, constant(LEAST_SCALE, s.device))  # |s|, but never 0
        is_finite = torch.add(value, share, alpha=0) < torch.inf  # 0 times infinity is nan
        if not forward.may_read:
            labels, share = _only_if(is_finite, labels, share, forward.rows.shape[1])
            self.reader.not_counted.append((constant(1.0, value.device), is_finite))
        elif not bool(is_finite):
            self.forecaster.pass_over(forward)
            self.progress.not_finite = True
            self.reader.num_skipped += 1
            return
        self._learn(forward, pull, labels, share, weight, s, is_finite)

    # ---- the step ----------------------------------------------------------------------------------------------------

    @outside_compiled_graphs
    def before_step(self) -> None:
        """Count a step without a term as skipped if the script adds one elsewhere."""
        if self.progress.stage is Stage.GRADIENTS:
            if self.progress.number == 1:
                self.guards.first_step_begins()
            return
        self.guards.step_has_no_penalty(self.progress, self.uses_term, self.hooks.attached)
        if self.uses_term and self.hooks.attached and have_gradients(self._base):
            self.reader.num_skipped += 1

    @outside_compiled_graphs
    def is_no_training_step(self) -> bool:
        """Whether a step without a forward pass steps the base alone.

        It is the rest of a step that an engine takes group by group; or one with gradients of 0, by which
        torch.distributed.checkpoint and DeepSpeed create the state of the base.
        """
        if not self.hooks.attached:
            return False
        if self._engine is not None:
            return not self._engine.has_ended_step()
        if have_zeros(self._base):
            self.forecaster.create_state()
            return True
        return False

    def step_base(self, closure: Callable[[], Any]) -> Any:
        """Step a base optimizer that evaluates the loss itself, once or several times; give the first loss."""
        losses: list[Any] = []
        was_learned = self.progress.stage is Stage.GRADIENTS and have_gradients(self._base)

        def evaluate() -> Any:
            if was_learned and not have_gradients(self._base):  # the base has moved the model and cleared them: SAM
                self.progress.learns = False
            losses.append(closure())
            if len(losses) == 1:
                self.guards.closure_ends(self.uses_term)
                self.before_step()
                self.progress.learns = False
            return losses[-1]

        try:
            self._base.step(evaluate)
        finally:
            self.progress.learns = True
        return losses[0] if losses else None

    @outside_compiled_graphs
    def learn(self) -> None:
        """Let the forecaster learn, now that the model has stepped, and begin the next step."""
        progress = self.progress
        self.forecaster.learn(self.alpha(progress.number))
        progress.end()  # now no forward pass of this step keeps a tensor
        if progress.stage is not Stage.GRADIENTS:
            self.last = None  # that of an older batch
        self.progress = Progress(progress.number + 1)
        if synchronization.is_sync_step(progress.number):
            self.reader.count()
            self.forecaster.check_values()
        self.guards.step_ends(progress, self.last, self.weight)

    def forget(self) -> None:
        """Drop what the batches of a step show that was left out."""
        self.forecaster.forget()
        self.progress.restart()

    # ---- hooks, copies and state -------------------------------------------------------------------------------------

    def detach(self) -> None:
        """Remove the hooks."""
        self.hooks.remove()
        self.guards.detached()

    def model_loaded(self, module: nn.Module, keys: Any) -> None:
        """Called when a state was loaded into the model."""
        self.guards.model_loaded()

    def replaced(self) -> None:
        """Make way for another optimizer on the same model."""
        self.hooks.remove()
        self.forget()
        self.guards.superseded()

    def load_state(self, num_steps: int, uses_term: bool, loss: dict[str, Any]) -> None:
        """Go on from a number of steps, as after loading a state."""
        self.reader.load_state(loss)
        self.uses_term = uses_term
        self.progress.end()
        self.progress = Progress(num_steps + 1)
        self.last = None
        self.guards.state_loaded()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"progress": self.progress.number, "last": None, "_engine": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.progress = Progress(state["progress"])
        self.progress.is_cleared = True  # parameters are copied without their gradients
        if self.hooks.attached and vars(self.model):  # empty in the copy of a model that holds its optimizer
            self._attach()


def _only_if(is_finite: Tensor, labels: Labels | None, scale: Tensor, num_classes: int) -> tuple[Labels | None, Tensor]:
    """Labels and scale of a batch that is finite; else no row has a label, or without labels the scale is 0."""
    if labels is None:
        return None, scale.where(is_finite, constant(0.0, scale.device))
    none = num_classes if labels.rows.ndim == 1 else 0.0
    return labels._replace(rows=labels.rows.where(is_finite, constant(none, scale.device))), scale


class _Term(torch.autograd.Function):
    """The value of the penalty, whose gradient is written out."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, value: Tensor, forward: Forward, algorithm: Algorithm) -> Tensor:
        ctx.pass_of_logits = forward
        ctx.algorithm = algorithm
        ctx.dtype = z.dtype
        return value.detach()

    @staticmethod
    def backward(ctx: Any, s: Tensor) -> Any:
        return ctx.algorithm.on_term(ctx.pass_of_logits, s, ctx.dtype), None, None, None
