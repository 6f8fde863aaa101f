r"""Algorithm 1 for one batch, by both ways: the gradient of the logits (the line), and the penalty term.

Not in optimizer.py, since Lightning runs the optimizer's methods on another object.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dcl_optim import _sync
from dcl_optim._engine import Engine, calling_engine
from dcl_optim._hooks import Hook, ModuleHooks
from dcl_optim._optim import has_other_parameters, have_gradients, parameters_of, trains_any
from dcl_optim._torch import (
    REPLICA,
    Reach,
    constant,
    current_backward,
    in_compiled_autograd,
    is_batched,
    is_recorded,
    outside_compiled_graphs,
    warn_once,
)
from dcl_optim.distances import mse, squared
from dcl_optim.distributed import SHARDED_LOGITS, is_sharded, unwrapped
from dcl_optim.forecaster import Forecaster, Labels
from dcl_optim.loss.reader import TERMS, LossReader
from dcl_optim.outputs import NoLogits, conversion_source, find_logits, leaves_of
from dcl_optim.progress import Forward, Outcome, Progress, Stage, Term
from dcl_optim.pull import Pull, Scale
from dcl_optim.schedules import Checked
from dcl_optim.weights import FollowingFit

SETTLED = 100  # steps, before which the prototypes follow a model that learns fast
LEAST_SCALE = 1e-20  # of a term, for what learns from it: a factor of 0 weighs the batches of a step equally

NOT_FINITE = (
    "non-finite logits or loss: a batch whose logits or whose gradient of them is not finite gets no penalty, and "
    "neither the companion nor the prototypes learn from it.\n  Fix: if these are logits of rows without a label, "
    "leave these rows out, as in optimizer.penalty(z[keep], y[keep])"
)
REPLICATED = (
    "model was wrapped by nn.DataParallel after it was given to the optimizer, whose hooks then run once for each part "
    "of the batch.\n  Fix: wrap the optimizer with nn.DataParallel(model)"
)
GIVEN_TWICE = (
    "{}.penalty was called twice with the same logits since the last step, which would count them twice.\n"
    "  Fix: call it once, and use what it returned again, or call the model again{}. See docs/losses.md"
)
MIXED_LABELS = "; for mixup pass soft labels, lam * F.one_hot(a, K) + (1 - lam) * F.one_hot(b, K)"
TOO_LATE = (
    "{}.penalty was called after a backward pass through the same logits, in which they got their penalty.\n"
    "  Fix: call it before the first backward pass. See docs/losses.md"
)
ONCE = (
    "{}.penalty is differentiable once, and this backward pass keeps a graph of the gradient (create_graph=True): its "
    "second derivative would be missing.\n  Fix: take that gradient of the loss without the penalty"
)
STALE = (
    "a backward pass came through logits, or through what penalty returned, of before the last step of {}, or "
    "before a state was loaded: their penalty is that of other weights.\n"
    "  Fix: call the model in each step, and penalty if the script adds it"
)
BATCHED = (
    "a backward pass takes several gradients at once through the logits of {} (is_grads_batched=True, the default of "
    "torchjd), but each of them has a penalty.\n"
    "  Fix: take one at a time, without is_grads_batched; with torchjd pass parallel_chunk_size=1"
)
SPLIT = (
    "one backward pass through the logits of {} asked for the gradient of inputs or activations alone, and another one "
    "for that of parameters alone, as zero-bubble pipelines do: only one of them would have the penalty.\n"
    "  Fix: call loss.backward() without inputs=, in a pipeline by the schedule GPipe, 1F1B or interleaved 1F1B; or "
    "outside of schedules add the penalty to the loss, {}"
)
WEIGHTS_LOADED = (
    "weights were loaded into the model since its last step, but what {name} learned from the weights before was kept: "
    "if they are others, the penalty pulls the model back.\n"
    "  Fix: wrap again, optimizer = {name}(optimizer.base, model), or load the optimizer's state of the same moment. "
    "Ignore this for weights swapped in for an evaluation only"
)

ANOTHER_NETWORK = (
    "{}.penalty got logits that no parameter of the model has computed, as those of a teacher or of an averaged copy: "
    "their penalty changes no weight that is trained here.\n  Fix: pass the logits that the wrapped model returned"
)
TOO_STRONG = (
    "the penalty of {name} is {penalty:.2g}, which is large beside {guess:.2g}, the cross-entropy of a guess among "
    "{classes} classes: the logits swing about their prototypes, and training may diverge.\n"
    "  Fix: a smaller learning rate, or a smaller weight than {weight:.2g}. See docs/troubleshooting.md"
)

# What a step refuses.
SUPERSEDED = (
    "another optimizer has wrapped the model since this {} did: step that one, or call detach() on this one to go on "
    "with its base optimizer alone"
)
DETACHED = (
    "{}.penalty was called after detach(), which has ended the method: further steps are those of the base alone.\n"
    "  Fix: leave the term out, or wrap the base optimizer again"
)
CHANGED = (
    "the weights were changed twice without a step of {name}: the base {base} was stepped, or another optimizer, or a "
    "method wrote to them. Prototypes and companion learn nothing so.\n"
    "  Fix: call step() of the wrapper, with SAM step(closure); detach() before another optimizer; where weights are "
    "changed and restored (FGM, Embedding(max_norm=)), strict=False. See docs/get-started.md"
)
NOT_REGULARIZED = (
    "{}.step found gradients, but no backward through a training forward of the wrapped model since the last step.\n"
    "  Seen: {}.\n  Fix: {}. {}See docs/troubleshooting.md"
)
ALLOWED = "strict=False allows such steps. "
SEEN = {
    Stage.NOTHING: (
        "no training forward pass of the model: step was called twice, or another method, a part or a copy of it was "
        "called, or it was compiled and called before it was wrapped"
    ),
    Stage.FORWARD: (
        "the gradient did not come through the logits that were found (others, or these detached), or no backward pass "
        "ran"
    ),
    Stage.INPUTS: (
        "a backward pass through the logits for the gradient of inputs or activations alone, as of an attack, or of a "
        "pipeline that takes that of parameters later"
    ),
    Stage.GRAPH_KEPT: "a backward pass with create_graph=True",
}
EVAL_MODE = "the model is in eval mode", f"call model.train(); to train in eval mode use DCP with {TERMS[True]}"
FIXES = {
    Stage.NOTHING: (
        "call step once after each backward pass, and the model itself before it, as model(x); or wrap the module that "
        "is called"
    ),
    Stage.FORWARD: "pass logits=<their function>, or add the penalty to the loss, {}",
    Stage.INPUTS: (
        "train by loss.backward() without inputs=, through these logits; in a pipeline take the schedule GPipe, 1F1B "
        "or interleaved 1F1B; if the training loss is that of others, pass logits=<their function>, or add the penalty "
        "to the loss, {}"
    ),
    Stage.GRAPH_KEPT: "run a backward pass without it before the step",
}
OF_AN_ENGINE = (
    "no training forward pass of the model, and parameters that an engine (DeepSpeed) has put in place of the model's",
    "call the engine in training mode in each step, z = engine(x), and add the penalty to the loss, {}",
)
NOT_ADDED = (
    "{}.penalty was called since the last step, but what it returned took part in no backward pass that goes on to the "
    "parameters.\n"
    "  Fix: add it to the loss, loss = loss + optimizer.penalty(...), before loss.backward(), outside of fused losses, "
    "which take gradients in their forward pass. To look at the value use logs(). strict=False allows such steps"
)
TERM_FOR_INPUTS = (
    "what {}.penalty returned took part in backward passes for the gradient of inputs or activations alone, as "
    "zero-bubble pipelines take it before that of parameters: nothing learns from them.\n"
    "  Fix: in a pipeline take the schedule GPipe, 1F1B or interleaved 1F1B; else call loss.backward() without inputs="
)
NOT_TRAINED = (
    "a backward pass came through what {}.penalty returned, but no parameter of the base optimizer has a gradient: was "
    "the model built again after the optimizer?\n  Fix: build the base optimizer and the wrapper again too"
)
WITHOUT_TERM = (
    "a step without a penalty: the script has called {}.penalty in other steps, and then nothing else adds one. "
    "Such steps are counted as skipped in logs().\n  Fix: add it to the loss of each step, if it is meant there too"
)
MINIMIZES_A_VALUE = (
    "{} does not regularize LBFGS by the gradient alone, since LBFGS compares values of the loss.\n"
    "  Fix: add the penalty to the loss in the closure, {}"
)


class Given(NamedTuple):
    """What the penalty term keeps for its backward pass; the weight is None if it is 0 in all steps.

    The value, which is without the weight then, is not finite if one of the logits is not.
    """

    pull: Pull
    labels: Labels | None
    weight: Scale | None
    alpha: float
    value: Tensor


class Call:
    """A call of the model that runs.

    Attributes:
        is_training: whether it is a training forward pass.
        hooks: the handles of the hooks on the logits that calls inside of it have returned, or on its own.
    """

    def __init__(self) -> None:
        self.is_training = False
        self.hooks: list[Any] = []


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
        self.reader = LossReader(name, forecaster.reads_labels)
        self.weight = weight
        self.alpha = alpha
        self.uses_term = False  # whether the script has called penalty: then the line is off
        self.progress = Progress(1)
        self.last: dict[str, Any] = {}  # figures of the last backward pass
        self.superseded = False
        self._has_learned = False  # since the start, or since a state was loaded
        self._is_loaded = False  # whether weights were loaded into the model since the last step
        self._must_look = True  # whether the next training forward pass calls _look_around
        self._engine: Engine | None = None  # that calls the model
        self._is_replaced = False  # whether an engine has put its parameters in the place of the model's
        self._stepped: set[int] = set()  # the ids of what was stepped last, if it has
        self._base = base
        self._logits = logits
        self._is_strict = strict
        self._name = name
        self._calls: dict[int, list[Call]] = {}  # of the model, that run now: by thread, a later one inside the earlier
        self._inner_calls_count = True  # whether logits of a call inside of another may be those of the loss
        self._said: set[str] = set()
        self.hooks = ModuleHooks(self, model, unwrapped(model))

    @property
    def num_steps(self) -> int:
        """The number of steps so far."""
        return self.progress.number - 1

    # ---- the forward pass: c = f(ω, x) -------------------------------------------------------------------------------

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called with the model: forget a step that was skipped, and prepare the forecaster."""
        calls = self._calls.setdefault(threading.get_ident(), [])
        call = Call()
        calls.append(call)
        if not module.training or not torch.is_grad_enabled() or is_recorded() or not self._trains_any():
            return
        if current_backward() == self.progress.backward != -1:
            return  # activation checkpointing recomputes a forward pass that is noted
        if len(calls) > 1 and not self._inner_calls_count:
            return
        call.is_training = True
        if REPLICA in vars(module):
            raise RuntimeError(REPLICATED)
        if self._must_look:
            self._look_around()
        if self.progress.begin_forward() and self._is_strict:
            raise RuntimeError(CHANGED.format(name=self._name, base=type(self._base).__name__))
        if self.progress.were_cleared(self._base, self.model) or (
            self._engine is not None and self._engine.has_skipped()
        ):
            self.forget()
        self.forecaster.before_forward(args, kwargs, self.progress.number)

    def _trains_any(self) -> bool:
        """Whether the base trains a parameter now, or has none, as between the steps of DeepSpeed's ZeRO 3."""
        return trains_any(self._base) or next(parameters_of(self._base), None) is None

    def _look_around(self) -> None:
        """Ask what seldom changes: at the first forward pass, after the first step, and once something was loaded."""
        self._must_look = False
        self._engine = calling_engine()
        self._is_replaced = has_other_parameters(self._base, self.model)
        if self._is_loaded:
            self._is_loaded = False
            warn_once(self._said, WEIGHTS_LOADED.format(name=self._name))

    def after_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Called with the model's output: predict c, and wait for the gradient of the logits z."""
        thread = threading.get_ident()
        calls = self._calls.get(thread)
        if not calls:
            return
        call = calls.pop()
        if not calls:
            del self._calls[thread]
        has_failed = output is None and sys.exc_info()[0] is not None
        if call.is_training and not has_failed:
            z = self._logits_of(output, call)
            if z is not None and z.requires_grad:
                self._wait_for_gradient(z, call, args, kwargs, output)
        if calls:
            calls[-1].hooks += call.hooks

    def _logits_of(self, output: Any, call: Call) -> Tensor | None:
        """Find the logits; None if there are none, if the term brings them, or if they are those of an inner call."""
        predicts = self.forecaster.predicts
        if self.uses_term and not predicts:
            return None
        try:
            z = find_logits(output, self._logits)
            if type(z) is not Tensor and is_sharded(z):
                raise NoLogits(SHARDED_LOGITS.format(cast("Any", z).placements))
        except NoLogits as error:  # no fault if the script adds the term, or if the model called itself for them
            if predicts and not call.hooks:
                raise
            self.reader.not_found = str(error)
            return None
        return None if call.hooks and self.progress.forward_of(z) is not None else z

    def _wait_for_gradient(
        self, z: Tensor, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Note a forward pass, and hook its logits in place of those of the calls inside of it."""
        forecaster = self.forecaster
        if call.hooks:
            self._inner_calls_count = False
        for hook in call.hooks:
            hook.remove()
        call.hooks = []
        forward = Forward(z, self.progress.number, self.reader.class_dim or 1)
        if forecaster.predicts:
            forecaster.predict(forward, args, kwargs)
        self.progress.add(forward)
        if output is not z:
            forward.is_one_of_several = self._logits is None and isinstance(output, (tuple, list))
            source = conversion_source(z)
            if source is not None:  # the loss may be that of the logits before they were converted
                node, index = source
                forward.nodes = node.next_functions
                at_source = functools.partial(Hook(weakref.ref(self), "_at_source"), forward, index)
                call.hooks.append(node.register_prehook(at_source))
        call.hooks.append(z.register_hook(functools.partial(self.hooks.on_gradient, forward)))

    # ---- the line: grad z + s λ ∂Δ(z, c)/∂z --------------------------------------------------------------------------

    def on_gradient(self, forward: Forward, gradient: Tensor | None) -> Tensor | None:
        """Called by autograd with the gradient of the logits: add that of the penalty (Equation 2)."""
        if gradient is None or self.uses_term:
            return None
        is_of_training = self._is_of_training(forward)
        if forward.is_split:
            raise RuntimeError(SPLIT.format(self._name, self.reader.term))
        if not is_of_training:
            return None
        if forward.outcome is Outcome.RELEASED:
            raise RuntimeError(STALE.format(self._name))
        weight = self.weight(forward.step_number)
        alpha = self.alpha(forward.step_number)
        reading = self.reader.read(forward, gradient)
        if reading is None:
            is_finite = bool(gradient.isfinite().all())
            if is_finite and forward.outcome is Outcome.LEARNED:
                return None  # a further loss of logits that have their penalty
            if forward.backward == -1 or forward.backward != self.last.get("backward"):  # else another loss was read
                self.last = {"weight": weight, "alpha": alpha, "loss_scale": self.reader.scale}
            self._miss(forward, is_finite)
            return None
        labels = Labels(reading.labels, reading.num_live) if self.reader.reads_labels else None
        pull = self.forecaster.pull(forward, labels)
        self.last = {
            "weight": weight,
            "alpha": alpha,
            "loss_scale": reading.scale,
            "fits": reading.fits,
            "penalty": pull.value,
            "backward": forward.backward,
        }
        regularized = None
        if self.weight.constant != 0:
            regularized = pull.added_to(gradient, forward.class_dim, reading.scale, weight)
        if self.progress.batch_learned(forward):
            self.forecaster.observe(forward, pull, labels, reading.scale, alpha)
        return regularized

    def _at_source(self, forward: Forward, index: int, gradients: tuple[Tensor, ...]) -> Any:
        gradient = self.on_gradient(forward, gradients[index])
        return None if gradient is None else (*gradients[:index], gradient, *gradients[index + 1 :])

    def _is_of_training(self, forward: Forward) -> bool:
        """Note that a gradient has come to logits; return whether it is one of the training."""
        if not self.hooks.attached:
            return False
        if forward.outcome is not Outcome.LEARNED and self.progress.were_cleared(self._base, self.model):
            self.forget()
        is_of_training = self.progress.gradient(forward, self._base, self._end_backward)
        if is_of_training and is_batched():
            raise RuntimeError(BATCHED.format(self._name))
        return is_of_training

    def _end_backward(self) -> None:
        """Called when a backward pass has ended, and the model's activations are freed."""
        self.forecaster.end_backward()
        self.progress.end_backward(self._base)

    # ---- the penalty as a term: loss + λ Δ(z, c) ---------------------------------------------------------------------

    def why_detached(self) -> str:
        """Say why the hooks are gone, and nothing learns."""
        return (SUPERSEDED if self.superseded else DETACHED).format(self._name)

    def check_network(self, z: Tensor) -> None:
        """Warn of logits whose graph ends in parameters that are neither the model's nor the base optimizer's."""
        trained = [leaf for leaf in leaves_of([z]) if isinstance(leaf, nn.Parameter)]
        own = [*self.model.parameters(), *parameters_of(self._base)]
        if any(map(is_sharded, own)):  # whose graph has the gathered ones
            return
        if trained and set(map(id, trained)).isdisjoint(map(id, own)):
            warn_once(self._said, ANOTHER_NETWORK.format(self._name))

    def term(self, z: Tensor, forward: Forward, labels: Labels | None) -> Tensor:
        """The weighted penalty, a scalar with a gradient for z; the forecaster learns in its backward pass."""
        if forward.outcome is Outcome.GIVEN or (forward.outcome is Outcome.LEARNED and self.uses_term):
            fix = MIXED_LABELS if self.forecaster.reads_labels else ""
            raise ValueError(GIVEN_TWICE.format(self._name, fix))
        if forward.outcome is Outcome.LEARNED:
            raise ValueError(TOO_LATE.format(self._name))
        pull = self.forecaster.pull(forward, labels)
        weight = None if self.weight.constant == 0 else self.weight(forward.step_number)
        alpha = self.alpha(forward.step_number)
        self.uses_term = True
        self.progress.penalty_called(forward)
        value = pull.value(1.0 if weight is None else weight)
        if forward.rows.numel():  # 0 times infinity is nan; masked logits are minus infinity
            value = torch.add(value, forward.rows.amax(), alpha=0)
        forward.given = Given(pull, labels, weight, alpha, value)
        term: Tensor = _Term.apply(z, forward, weakref.ref(self))  # which keeps both by references
        return term

    def on_term(self, forward: Forward, s: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Called by autograd with the gradient s of the term, the factor on it: give that of the logits."""
        if torch.is_grad_enabled():
            raise RuntimeError(ONCE.format(self._name))
        if forward.outcome is Outcome.RELEASED:
            raise RuntimeError(STALE.format(self._name))
        pull, labels, weight, alpha, _ = forward.given
        if forward.outcome is Outcome.LEARNED and self.forecaster.predicts:  # what has learned may have overwritten it
            pull = self.forecaster.pull(forward, labels)
        gradient = None
        if weight is not None:
            gradient = pull.gradient(forward.shape, dtype, forward.class_dim, s, weight)
        if self._is_of_training(forward):
            self.progress.penalty_met()
            self.last = {
                "weight": 0.0 if weight is None else weight,
                "alpha": alpha,
                "loss_scale": s,
                "penalty": pull.value,
            }
            self._learn_from_term(forward, pull, labels, s, alpha)
        elif forward.reach is Reach.INPUTS:
            self.progress.penalty_met_for_inputs()
        if gradient is None and in_compiled_autograd():  # which takes no None; and -0.0 changes no bit
            gradient = torch.full(forward.shape, -0.0, dtype=dtype, device=s.device)
        return gradient

    on_compiled_term = outside_compiled_graphs(on_term)

    def _learn_from_term(self, forward: Forward, pull: Pull, labels: Labels | None, s: Tensor, alpha: float) -> None:
        scale = s
        if labels is None:
            scale = torch.hypot(s, constant(LEAST_SCALE, s.device))  # |s|, but never 0
        if forward.rows.numel():
            is_finite = torch.add(forward.given.value, scale, alpha=0) < torch.inf  # 0 times infinity is nan
            if not forward.may_read:
                labels, scale = _only_if(is_finite, labels, scale, forward.rows.shape[1])
            elif not bool(is_finite):
                self._miss(forward, is_finite=False)
                return
        if self.progress.batch_learned(forward):
            self.forecaster.observe(forward, pull, labels, scale, alpha)

    # ---- learning ----------------------------------------------------------------------------------------------------

    def _miss(self, forward: Forward, is_finite: bool) -> None:
        if self.progress.batch_missed(forward, is_finite):
            self.forecaster.skip(forward)

    # ---- the step ----------------------------------------------------------------------------------------------------

    @outside_compiled_graphs
    def end_calls(self) -> None:
        """Called where no call of the model can run in this thread: drop those that an interrupt has ended."""
        self._calls.pop(threading.get_ident(), None)

    @outside_compiled_graphs
    def before_step(self) -> None:
        """Raise unless the gradients are those of Equation 2, or were cleared; then the batches are forgotten."""
        progress = self.progress
        self.end_calls()
        if progress.were_cleared(self._base, self.model):
            self.forget()
        elif progress.stage < Stage.GRADIENTS or (
            self.uses_term and not (progress.term is Term.MET and progress.trained is not None)
        ):
            self._refuse_or_skip(progress)

    def _refuse_or_skip(self, progress: Progress) -> None:
        """Raise for gradients without a penalty, or count them as skipped if the script adds the term elsewhere."""
        if self.superseded:
            raise RuntimeError(SUPERSEDED.format(self._name))
        if not self.hooks.attached:
            return
        if progress.term in (Term.CALLED, Term.INPUTS) and self._is_strict:
            message = NOT_ADDED if progress.term is Term.CALLED else TERM_FOR_INPUTS
            raise RuntimeError(message.format(self._name))
        if progress.term is Term.MET:
            if self._is_strict and trains_any(self._base) and not have_gradients(self._base):
                raise RuntimeError(NOT_TRAINED.format(self._name))
        elif have_gradients(self._base):
            if self.uses_term:
                self.reader.skip()
                self.last = {}
                warn_once(self._said, WITHOUT_TERM.format(self._name))
            elif self._is_strict:
                raise RuntimeError(self._not_regularized(progress.stage))

    def _not_regularized(self, stage: Stage) -> str:
        seen = SEEN[stage]
        fix = FIXES[stage].format(self.reader.term)
        allowed = ALLOWED
        if stage is Stage.NOTHING and self.forecaster.reads_labels:
            fix += f"; or add the penalty to the loss, {self.reader.term}"
        if stage is Stage.FORWARD and self.reader.not_found:
            seen = self.reader.not_found
        if stage is Stage.NOTHING and not self.model.training:
            seen, fix = EVAL_MODE
        elif stage is Stage.NOTHING and has_other_parameters(self._base, self.model):
            seen, fix = OF_AN_ENGINE[0], OF_AN_ENGINE[1].format(self.reader.term)
            allowed = ""
        return NOT_REGULARIZED.format(self._name, seen, fix, allowed)

    @outside_compiled_graphs
    def is_no_training_step(self) -> bool:
        """Whether this call steps the base alone: it creates a state, or it is the rest of a step that was counted.

        A call that steps others than the call before it, with no forward pass between them, is the rest of its step:
        DeepSpeed's ZeRO steps each parameter group alone.
        """
        if not self.hooks.attached or not have_gradients(self._base):
            return False
        stepped = set(map(id, parameters_of(self._base)))
        if self._stepped and self._stepped.isdisjoint(stepped):
            self._stepped |= stepped
            return True
        if self._is_creating_state():
            self.forecaster.create_state()
            return True
        return False

    def _is_creating_state(self) -> bool:
        """Whether torch.distributed.checkpoint creates the state, with lr 0; or DeepSpeed, with gradients of 0."""
        if not any(float(group.get("lr", 1.0)) for group in self._base.param_groups):
            return True
        is_before_training = self._must_look and self.num_steps == 0 and has_other_parameters(self._base, self.model)
        return is_before_training and not have_gradients(self._base, other_than_zero=True)

    def step_base(self, closure: Callable[[], Any]) -> Any:
        """Step a base optimizer that evaluates the loss itself, once or several times; give the first loss."""
        if not callable(closure):
            raise TypeError(f"closure must be callable, got {type(closure).__name__}")
        if self.superseded:
            raise RuntimeError(SUPERSEDED.format(self._name))
        losses: list[Any] = []
        was_learned = self.progress.stage is Stage.GRADIENTS and have_gradients(self._base)

        def evaluate() -> Any:
            if was_learned and not have_gradients(self._base):  # the base has moved the model and cleared them: SAM
                self.progress.end_learning()
            losses.append(closure())
            if len(losses) == 1:
                self._refuse_minimizer()
                self.before_step()
                self.progress.end_learning()
            return losses[-1]

        try:
            self._base.step(evaluate)
        finally:
            self.progress.end_evaluations()
        return losses[0] if losses else None

    def _refuse_minimizer(self) -> None:
        progress = self.progress
        is_line = progress.stage is Stage.GRADIENTS and progress.term is not Term.MET
        if is_line and isinstance(self._base, torch.optim.LBFGS):
            raise RuntimeError(MINIMIZES_A_VALUE.format(self._name, self.reader.term))

    @outside_compiled_graphs
    def end_step(self) -> None:
        """Both networks have stepped."""
        progress = self.progress
        progress.end()
        if progress.stage < Stage.GRADIENTS:
            self.last = {}  # those of an older batch
        if self._is_replaced:
            self._stepped = set(map(id, parameters_of(self._base)))
        self._has_learned = True
        self.progress = Progress(progress.number + 1)
        if _sync.is_sync_step(progress.number):
            if progress.number == 1:  # an engine may have come after a first call of the model
                self._must_look = True
            self.reader.count()
            self.forecaster.check_values()
            self._check_strength(progress.number)
        if progress.not_finite:
            warn_once(self._said, NOT_FINITE)

    def _check_strength(self, step_number: int) -> None:
        """Warn of a penalty with a given weight that is more than half of log K, the loss of a guess. Synchronizes."""
        num_classes = self.forecaster.num_classes
        is_squared = self.forecaster.distance in (mse, squared)  # others have other sizes
        is_given = not isinstance(self.weight, FollowingFit)
        if num_classes < 2 or not (is_given and is_squared) or step_number < SETTLED or "penalty" not in self.last:
            return
        weight = float(self.last["weight"])
        penalty = weight * float(self.last["penalty"]())
        guess = math.log(num_classes)
        if guess / 2.0 < penalty < math.inf:
            message = TOO_STRONG.format(
                name=self._name, penalty=penalty, guess=guess, classes=num_classes, weight=weight
            )
            warn_once(self._said, message, about="strength")

    def forget(self) -> None:
        """Drop the batches of the step."""
        self.forecaster.forget()
        self.progress.restart()

    # ---- hooks, copies and state -------------------------------------------------------------------------------------

    def detach(self) -> None:
        """Remove the hooks."""
        self.hooks.remove()
        self.superseded = False

    def model_loaded(self, module: nn.Module, keys: Any) -> None:
        """Called when a state was loaded into the model."""
        self.forecaster.model_loaded()
        self._is_loaded = self._has_learned and self.forecaster.reads_labels
        self._must_look = True

    def replaced(self) -> None:
        """Make way for another optimizer on the same model."""
        self.hooks.remove()
        self.forget()
        self.superseded = True

    def load_state(self, num_steps: int, uses_term: bool, loss: dict[str, Any]) -> None:
        """Go on from a number of steps, as after loading a state."""
        self.reader.load_state(loss)
        self._has_learned = False
        self._is_loaded = False
        self._must_look = True
        self.uses_term = uses_term
        self.progress.end()
        self.progress = Progress(num_steps + 1)
        self.last = {}

    def __getstate__(self) -> dict[str, Any]:
        without: dict[str, Any] = {"last": {}, "_calls": {}, "_engine": None, "_must_look": True, "_stepped": set()}
        return self.__dict__ | without | {"progress": self.progress.without_forwards()}


def _only_if(is_finite: Tensor, labels: Labels | None, scale: Tensor, num_classes: int) -> tuple[Labels | None, Tensor]:
    """Labels and scale of a batch that is finite; else no row has a label, or without labels the scale is 0."""
    if labels is None:
        return None, scale.where(is_finite, constant(0.0, scale.device))
    none = num_classes if labels.rows.ndim == 1 else 0.0
    return labels._replace(rows=labels.rows.where(is_finite, constant(none, scale.device))), scale


class _Term(torch.autograd.Function):
    """The value of the penalty, whose gradient is written out."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, forward: Forward, algorithm: weakref.ref[Algorithm]) -> Tensor:
        ctx.pass_of_logits = forward
        ctx.algorithm = algorithm
        ctx.dtype = z.dtype
        value: Tensor = forward.given.value
        return torch.zeros_like(value) if forward.given.weight is None else value.detach()

    @staticmethod
    def backward(ctx: Any, s: Tensor) -> Any:
        algorithm = ctx.algorithm()
        if algorithm is None:
            raise RuntimeError(STALE.format("an optimizer that is gone"))
        if torch.compiler.is_dynamo_compiling():  # a compiled function holds the backward pass
            return algorithm.on_compiled_term(ctx.pass_of_logits, s, ctx.dtype), None, None
        return algorithm.on_term(ctx.pass_of_logits, s, ctx.dtype), None, None
