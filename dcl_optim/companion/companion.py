r"""The companion network: its prediction for a batch, and its step toward :math:`\alpha c + (1-\alpha) z`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dcl_optim._optim import all_or_nothing, gradients_of, parameters_of
from dcl_optim._torch import call_after_backward, current_backward, versions_of, warn_once
from dcl_optim._tree import tensors_of
from dcl_optim._validation import check_tensors
from dcl_optim.companion import copying
from dcl_optim.companion.copying import Follower
from dcl_optim.companion.optimizer import CompanionOptimizer, MakeOptimizer, noting, try_to_build
from dcl_optim.companion.replay import Replay, capture_rng, replayed
from dcl_optim.distances import Distance, rows_towards_target, to_rows
from dcl_optim.distributed import DataParallelGroup, is_sharded, refuse_flat_shards, unwrapped
from dcl_optim.forecaster import Forecaster, Forward, Labels, Pull, Question, Scale, pull_of

NOT_MADE = {"made": False}  # the state of a copy before its first forward pass
TINY = 1e-30  # what can be divided by
HALF_SIZE = 16.0  # of the largest sum over rows of a gradient in float16, which ends at 65,504
IN_COMPANION = (
    "This was raised in the {} pass of dcl_optim's companion, on the model's inputs. Where a script sets an attribute "
    "of the model, or resets or detaches a hidden state, it has to do so on optimizer.companion too. The companion has "
    "none of the script's hooks."
)
WEIGHTS_LOADED = (
    "weights were loaded into the model since its last training forward pass, but the companion was not reset: if they "
    "are others than before, the penalty pulls the model back.\n  Fix: call optimizer.reset_companion() after loading, "
    "or load the optimizer's state of the same moment. Ignore this for weights swapped in for an evaluation only"
)
COPIED_AGAIN = "the base optimizer trains other parameters than before: the companion is copied from the model again"
WRITES_TO_THE_MODEL = f"the companion's forward pass writes to the model's buffers: {copying.NOT_COPIED}"
DIVERGED = "the companion's weights are not finite (a batch that was not, or too high a learning rate): {}"


@dataclass(frozen=True)
class CompanionOptions:
    """What :class:`~dcl_optim.DCLOptimizer` says of the companion; see there."""

    companion: nn.Module | None = None
    make_optimizer: MakeOptimizer | None = None
    lr_scale: float = 1.0
    every: int = 1
    fraction: float = 1.0
    process_group: Any = "auto"


DEFAULTS = CompanionOptions()


@dataclass
class Network:
    """The companion once it is made."""

    module: nn.Module
    optimizer: CompanionOptimizer
    follower: Follower
    starts_equal: bool  # whether its first prediction has to be the model's logits
    versions: list[int]  # how often the parameters that it trains had been written to when it was made
    has_predicted: bool = False
    has_shown_its_leaves: bool = False
    shared_versions: list[tuple[int, int]] = field(default_factory=list)  # of what it shares, before the first forward
    loaded_since: bool = False  # whether weights were loaded into the model since the last forward pass


@dataclass
class Prediction:
    """The companion's logits for one forward pass, in the shape of the model's."""

    logits: Tensor  # with a graph until the companion has learned from them
    learns: bool
    network: Network
    rows: Tensor | None = None  # the logits as rows (N, K), on the model's device


class Companion(Forecaster):
    r"""The second network :math:`\omega` of Deep Companion Learning (Algorithm 1).

    Prediction: its logits c on the same batch. Learning: one step of its optimizer on
    :math:`\Delta(c, \alpha\,\mathrm{stop}(c) + (1-\alpha)\,\mathrm{stop}(z))` with the same c; of several forward
    passes on their mean, weighted by the loss scales. Its backward pass runs when that of the model has ended.

    Args:
        model: the model.
        base: its optimizer.
        distance: a function (z, c) of rows (N, K) that returns one value a row.
        find_logits: function of a module's output that gives the logits.
        options: see :class:`CompanionOptions`.

    Examples:
        >>> from dcl_optim.distances import mse
        >>> from dcl_optim.loss.outputs import find_logits
        >>> model = nn.Linear(4, 3)
        >>> companion = Companion(model, torch.optim.SGD(model.parameters(), lr=0.1), mse, find_logits)
        >>> torch.equal(companion.module.weight, model.weight), companion.module.weight is model.weight
        (True, False)
    """

    def __init__(
        self,
        model: nn.Module,
        base: Optimizer,
        distance: Distance,
        find_logits: Callable[[Any], Tensor],
        options: CompanionOptions = DEFAULTS,
    ) -> None:
        self.distance = distance
        self._model = model
        self._base = base
        self._find_logits = find_logits
        self._options = options
        refuse_flat_shards(model)
        try_to_build(base, options.make_optimizer)
        self._group = DataParallelGroup(model, options.process_group)
        self._mode: str | None = None  # that the base was switched to, if it has one
        self._network: Network | None = None
        self._replay = Replay()
        self._generator = torch.Generator().manual_seed(0)  # which rows the companion learns from, with a fraction
        self._said: set[str] = set()
        self._skipped: list[Prediction] = []
        self._start()
        if options.companion is not None:
            self._make()

    def _start(self) -> None:
        """Begin with nothing to learn."""
        self._pending: list[tuple[Tensor, Tensor]] = []  # logits whose backward pass has not run, and their gradients
        self._num_observed = 0
        for prediction in self._skipped:
            prediction.logits = prediction.logits.detach()  # frees the graph
        self._skipped = []
        self._total_scale: Scale | None = None  # the sum of |s|
        self._half_factor: Tensor | None = None  # of gradients in float16

    def _make(self) -> Network:
        """Build the companion and its optimizer. Making a copy leaves the script's generators as they were."""
        model = unwrapped(self._model)
        options = self._options
        is_copy = options.companion is None
        device = next(parameters_of(self._base)).device
        with replayed(capture_rng(device)), torch.inference_mode(False):
            module = copying.build(model, self._base, options.companion)
            groups = self._groups(model, module)
            optimizer = CompanionOptimizer(self._base, groups, options.make_optimizer, options.lr_scale)
        follower = Follower(model, module, self._base, is_copy, self._group)
        versions = versions_of(parameters_of(optimizer.optimizer))
        self._network = Network(module, optimizer, follower, starts_equal=is_copy, versions=versions)
        if self._mode is not None:
            self.switch(self._mode)
        return self._network

    def _groups(self, model: nn.Module, module: nn.Module) -> list[list[nn.Parameter]]:
        """The companion's parameters for each of the base's groups, by their names in the model.

        Parameters whose names the model does not know come after those of the first group.
        """
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        own = {name: p for name, p in module.named_parameters() if p.requires_grad and id(p) not in names}
        groups = []
        for group in self._base.param_groups:
            found = [own.pop(names.get(id(parameter), ""), None) for parameter in group["params"]]
            groups.append([parameter for parameter in found if parameter is not None])
        known = set(names.values())
        groups[0] += [parameter for name, parameter in own.items() if name not in known]
        return groups

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

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], step: int) -> None:
        self._group.find()
        if self._network is not None and self._network.follower.base_has_changed():
            self._network.has_shown_its_leaves = False  # one that was given may share what trains now
            if self._options.companion is None:
                self.reset()
                warn_once(self._said, COPIED_AGAIN)
        network = self._network or self._make()
        if network.loaded_since:
            warn_once(self._said, WEIGHTS_LOADED)
        network.follower.follow(network.optimizer.optimizer)
        if not network.has_predicted:
            network.shared_versions = network.follower.versions()
            if versions_of(parameters_of(network.optimizer.optimizer)) != network.versions:
                network.starts_equal = False  # the script has put other weights into it
        self._learns = step % self._options.every == 0
        self._replay.before_forward(args, kwargs, next(parameters_of(self._base)).device)

    def predict(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        network = self._network
        assert network is not None
        arguments = self._replay.arguments(args, kwargs)
        if not network.has_predicted:
            network.follower.require_unwritten(network.shared_versions)
        shows_its_leaves = self._learns and not network.has_shown_its_leaves
        given = copying.leaves_of(tensors_of(arguments)) if shows_its_leaves else []  # before the forward edits them
        buffers = [] if network.has_predicted else list(unwrapped(self._model).buffers())
        versions = versions_of(buffers)
        with torch.set_grad_enabled(self._learns), noting(IN_COMPANION.format("forward")):
            output = self._replay.call(network.module, *arguments)
        if versions_of(buffers) != versions:
            raise RuntimeError(WRITES_TO_THE_MODEL)
        logits = self._find_logits(output)
        if logits.shape != forward.logits.shape:
            raise ValueError(
                f"companion gives logits of shape {tuple(logits.shape)} where the model gives "
                f"{tuple(forward.logits.shape)}. Pass a companion with the outputs of the model, or after a change "
                "of the model's head build the base optimizer and wrap it again"
            )
        if shows_its_leaves:
            own = [*parameters_of(network.optimizer.optimizer), *network.module.parameters(), *given]
            copying.require_own_leaves(logits, unwrapped(self._model), own)
            network.has_shown_its_leaves = True
        if network.starts_equal and not network.has_predicted:
            copying.require_equal(forward.logits, logits.detach(), network.module)
        network.has_predicted = True
        forward.prediction = Prediction(logits, self._learns, network)

    def pull(self, forward: Forward, labels: Labels | None) -> Pull:
        z = forward.rows
        prediction: Prediction = forward.prediction
        prediction.rows = c = to_rows(prediction.logits.detach(), forward.class_dim).to(z.device)
        return pull_of(self.distance, z, c)

    # ---- learning: ∇_ω Δ(c, α stop(c) + (1 - α) stop(z)) -------------------------------------------------------------

    def observe(self, forward: Forward, pull: Pull, labels: Labels | None, scale: Scale, alpha: float) -> None:
        prediction: Prediction = forward.prediction
        if not prediction.learns or not len(forward.rows) or prediction.network is not self._network:
            self.skip(forward, alpha)
            return
        logits = prediction.logits
        prediction.logits = logits.detach()
        c = prediction.rows
        assert c is not None
        rows = rows_towards_target(self.distance, forward.rows, c, pull.rows, alpha)
        towards = Pull(rows, pull.number)
        if self._options.fraction < 1.0:
            towards = self._of_drawn_rows(towards)
        gradient = towards.gradient(logits.shape, rows.slope.dtype, forward.class_dim, scale, overwrites=True)
        size = scale.abs() if isinstance(scale, Tensor) else abs(scale)
        if logits.dtype == torch.float16:  # a gradient scaler's s grows until the model's gradient overflows
            if self._half_factor is None:
                self._half_factor = _half_factor(rows.slope)
            gradient = gradient * self._half_factor
            size = size * self._half_factor
        self._pending.append((logits, gradient.to(logits)))
        self._num_observed += 1
        self._total_scale = size if self._total_scale is None else self._total_scale + size
        if current_backward() != -1:
            call_after_backward(self._run_backward)  # the model's activations are freed by then

    def _of_drawn_rows(self, pull: Pull) -> Pull:
        """The mean over a random share of the rows; the others get no gradient."""
        slope = pull.rows.slope
        number = max(round(self._options.fraction * len(slope)), 1)
        drawn = torch.randperm(len(slope), generator=self._generator, device="cpu")[:number].to(
            slope.device, non_blocking=True
        )
        return Pull(pull.rows, number, torch.zeros_like(slope[:, 0]).index_fill_(0, drawn, 1.0))

    def skip(self, forward: Forward, alpha: float) -> None:
        prediction: Prediction = forward.prediction
        self._skipped.append(prediction)  # another loss of these logits may be read
        if self._group.size > 1:  # the others wait for this one's share in the mean
            self._num_observed += prediction.learns

    def _run_backward(self) -> None:
        """Run the companion's backward pass for all forward passes that wait for it."""
        if not self._pending:
            return
        logits, gradients = zip(*self._pending, strict=True)
        self._pending = []
        kind = logits[0].device.type
        # No backward pass is to run under autocast.
        with torch.autocast(kind, enabled=False), noting(IN_COMPANION.format("backward")):
            torch.autograd.backward(logits, gradients)

    def before_step(self) -> None:
        if self._network is not None:
            self._network.optimizer.follow_options()

    def step(self) -> None:
        network = self._network
        if network is None:
            return
        self._run_backward()  # of which only compiled autograd leaves something
        learns = self._num_observed > 0
        if learns and self._group.size > 1:  # every rank must bring the same tensors to the reduction
            network.optimizer.fill_gradients()
        self._average(list(gradients_of(network.optimizer.optimizer)) if learns else [])
        if learns:
            network.optimizer.step()
            network.optimizer.optimizer.zero_grad()
        network.optimizer.note_options()
        self._start()

    def _average(self, gradients: list[Tensor]) -> None:
        """Make the mean over the forward passes of the step, weighted by their loss scales, and over the ranks."""
        total = self._total_scale
        if isinstance(total, Tensor):
            torch._foreach_div_(gradients, total.clamp(min=TINY).to(gradients[0].device))
        elif total is not None and total not in (0.0, 1.0):
            torch._foreach_div_(gradients, total)
        self._group.average(gradients)

    def questions(self) -> list[Question]:
        if self._network is None:
            return []
        norms = torch.stack([_norm(self.optimizer), _norm(self._base)])  # which are the same on all ranks
        return [Question(norms, self._replace_diverged)]

    def _replace_diverged(self, norms: list[float]) -> None:
        if math.isfinite(norms[0]) or not math.isfinite(norms[1]):
            return
        what = "load weights into optimizer.companion, or wrap again"
        if self._options.companion is None:
            self.reset()
            what = "it is copied from the model again"
        warn_once(self._said, DIVERGED.format(what))

    def forget(self) -> None:
        self._start()
        if self._network is not None:
            self._network.optimizer.optimizer.zero_grad()

    # ---- following the base, and the state ---------------------------------------------------------------------------

    def switch(self, mode: str) -> None:
        self._mode = mode
        if self._network is not None and hasattr(self.optimizer, mode):
            getattr(self.optimizer, mode)()

    def model_loaded(self) -> None:
        if self._network is not None and self._options.companion is None:
            self._network.loaded_since = self._network.has_predicted

    def create_state(self) -> None:
        optimizer = (self._network or self._make()).optimizer
        optimizer.follow_options()
        if not optimizer.optimizer.state:
            optimizer.fill_gradients()
            optimizer.optimizer.step()
            optimizer.optimizer.zero_grad()
        optimizer.note_options()  # the learning rate is 0 for now

    def state_dict(self) -> dict[str, Any]:
        network = self._network
        if network is None:
            return dict(NOT_MADE)
        network.optimizer.follow_options()  # what the script has changed since the last step, as a scheduler does
        return {
            "model": network.follower.own_state(),
            "optimizer": network.optimizer.state_dict(),
            "generator": self._generator.get_state(),
        }

    def check_state(self, state: dict[str, Any]) -> None:
        if state == NOT_MADE and self._options.companion is None:
            return
        before = self._network
        try:
            network = self._network or self._make()
            names = {"model": None, "optimizer": None, "generator": self._generator.get_state()}
            check_tensors(state, names, "companion")
            network.optimizer.check_state(state["optimizer"])
            check_tensors(state["model"], network.follower.own_state(), "companion")
            torch.Generator().set_state(state["generator"].cpu())  # which raises for what is no state
        except Exception:
            self._network = before
            raise

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state == NOT_MADE:
            self.reset()
            return
        network = self._network or self._make()
        with all_or_nothing(network.optimizer.optimizer):
            network.optimizer.load_state_dict(state["optimizer"])
            network.module.load_state_dict(state["model"], strict=False)
        self._generator.set_state(state["generator"].cpu())
        self.forget()
        network.optimizer.note_options()
        network.has_predicted = False
        network.starts_equal = False
        network.loaded_since = False

    def reset(self) -> None:
        """Drop the companion: the next training forward pass begins with a new one, as the first did."""
        if self._options.companion is not None:
            raise RuntimeError("companion was given as a module: load weights into it, or wrap the model again")
        self.forget()
        self._network = None

    def __getstate__(self) -> dict[str, Any]:
        self._run_backward()  # graphs cannot be copied
        return self.__dict__ | {"_generator": self._generator.get_state(), "_skipped": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._generator = torch.Generator()
        self._generator.set_state(state["_generator"])


def _norm(optimizer: Optimizer) -> Tensor:
    """The norm of all parameters that an optimizer trains."""
    norm: Any = torch.nn.utils.get_total_norm(list(parameters_of(optimizer)))
    return (norm.full_tensor() if is_sharded(norm) else norm).detach().float()


def _half_factor(gradient: Tensor) -> Tensor:
    """What rows of a gradient are multiplied by so that their sum neither overflows in float16 nor underflows."""
    largest = gradient.abs().sum(0).amax()
    return torch.where(largest > 0, HALF_SIZE / largest, 1.0)
