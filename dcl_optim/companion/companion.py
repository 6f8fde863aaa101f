r"""The companion network: its prediction for a batch, and its step toward :math:`\alpha c + (1-\alpha) z`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dcl_optim._optim import all_or_nothing, gradients_of, parameters_of
from dcl_optim._torch import tensors_of, versions_of, warn_once
from dcl_optim._validation import check_state
from dcl_optim.companion import copying
from dcl_optim.companion.copying import Follower
from dcl_optim.companion.optimizer import CompanionOptimizer, MakeOptimizer, noting, try_to_copy
from dcl_optim.companion.replay import Replay, capture_rng, replayed
from dcl_optim.distances import Distance
from dcl_optim.distributed import DataParallelGroup, is_sharded, refuse_flat_shards, unwrapped
from dcl_optim.forecaster import Forecaster, Forward, Labels, Pull, Scale, pull_of
from dcl_optim.layout import to_rows
from dcl_optim.loss.outputs import find_logits
from dcl_optim.pull import pull_towards_target

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
COPIED_AGAIN = (
    "the base optimizer trains other parameters than before, or in another place: the companion is copied from the "
    "model again"
)
WRITES_TO_THE_MODEL = (
    "the companion's forward pass writes to the model's own tensors. Either the model's forward pass writes to "
    "parameters that no gradient trains, which the companion shares: write to them after the step, make them buffers, or pass "
    f"companion=copy.deepcopy(model). Or {copying.NOT_COPIED}"
)
LAZY = "the model has lazy layers without weights, of which no copy can be made: run a forward pass, then wrap it"
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
    is_loaded: bool = False  # whether its weights are those of a state, and it has not predicted since
    loaded_since: bool = False  # whether weights were loaded into the model since the last forward pass


@dataclass
class Prediction:
    """The companion's logits for one forward pass, in the shape of the model's."""

    logits: Tensor  # with a graph until the companion has learned from them
    learns: bool
    network: Network


class Companion(Forecaster):
    r"""The second network :math:`\omega` of Deep Companion Learning (Algorithm 1).

    Prediction: its logits c on the same batch. Learning: one step of its optimizer on
    :math:`\Delta(c, \alpha\,\mathrm{stop}(c) + (1-\alpha)\,\mathrm{stop}(z))` with the same c; of several forward
    passes on their mean, weighted by the loss scales. Its backward pass runs when that of the model has ended.

    Args:
        model: the model.
        base: its optimizer.
        distance: a function (z, c) of rows (N, K) that returns one value a row.
        logits: the script's function that finds the logits in a module's output; None for :func:`find_logits`.
        options: see :class:`CompanionOptions`.

    Examples:
        >>> from dcl_optim.distances import mse
        >>> model = nn.Linear(4, 3)
        >>> companion = Companion(model, torch.optim.SGD(model.parameters(), lr=0.1), mse)
        >>> torch.equal(companion.module.weight, model.weight), companion.module.weight is model.weight
        (True, False)
    """

    def __init__(
        self,
        model: nn.Module,
        base: Optimizer,
        distance: Distance,
        logits: Callable[[Any], Tensor] | None = None,
        options: CompanionOptions = DEFAULTS,
    ) -> None:
        self.distance = distance
        self._model = model
        self._base = base
        self._logits = logits
        self._options = options
        refuse_flat_shards(model)
        try_to_copy(base, options.make_optimizer)
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
        if any(map(nn.parameter.is_lazy, model.parameters())):
            raise ValueError(LAZY)
        device = next(parameters_of(self._base)).device
        with replayed(capture_rng(device)), torch.inference_mode(False):
            module = copying.build(model, self._base, options.companion)
            groups, pairs = self._groups(model, module)
            optimizer = CompanionOptimizer(self._base, groups, pairs, options.make_optimizer, options.lr_scale)
        follower = Follower(model, module, self._base, is_copy, self._group)
        versions = versions_of(parameters_of(optimizer.optimizer))
        self._network = Network(module, optimizer, follower, starts_equal=is_copy, versions=versions)
        if self._mode is not None:
            self.switch(self._mode)
        return self._network

    def _groups(
        self, model: nn.Module, module: nn.Module
    ) -> tuple[list[list[nn.Parameter]], list[tuple[Tensor, nn.Parameter]]]:
        """The companion's parameters for each of the base's groups, by their names in the model; and pairs of both.

        Parameters whose names the model does not know come after those of the first group.
        """
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        own = {name: p for name, p in module.named_parameters() if p.requires_grad and id(p) not in names}
        groups = []
        pairs = []
        for group in self._base.param_groups:
            found = [(parameter, own.pop(names.get(id(parameter), ""), None)) for parameter in group["params"]]
            paired = [(theirs, ours) for theirs, ours in found if ours is not None]
            groups.append([ours for _, ours in paired])
            pairs += paired
        known = set(names.values())
        groups[0] += [parameter for name, parameter in own.items() if name not in known]
        return groups, pairs

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
                self._copy_again()
        network = self._network or self._make()
        if network.loaded_since:
            warn_once(self._said, WEIGHTS_LOADED)
        network.follower.follow()
        if not network.has_predicted and versions_of(parameters_of(network.optimizer.optimizer)) != network.versions:
            network.starts_equal = False  # the script has put other weights into it
        self._learns = step % self._options.every == 0
        self._replay.before_forward(args, kwargs, next(parameters_of(self._base)).device)

    def _copy_again(self) -> None:
        """Follow a change of what the base trains; a state that was loaded and not used yet survives it."""
        assert self._network is not None
        state = self.state_dict() if self._network.is_loaded else None
        self.reset()
        if state is None:
            warn_once(self._said, COPIED_AGAIN)
            return
        self.check_state(state)
        self.load_state_dict(state)

    def predict(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        network = self._network
        assert network is not None
        args, kwargs = self._replay.arguments(args, kwargs)
        with torch.set_grad_enabled(self._learns), noting(IN_COMPANION.format("forward")):
            if network.has_predicted and (network.has_shown_its_leaves or not self._learns):
                logits = self._call(network, args, kwargs)
            else:
                logits = self._call_first(network, forward.logits, args, kwargs)
        if logits.shape != forward.logits.shape:
            raise ValueError(
                f"companion gives logits of shape {tuple(logits.shape)} where the model gives "
                f"{tuple(forward.logits.shape)}. Pass a companion with the outputs of the model, or after a change "
                "of the model's head build the base optimizer and wrap it again"
            )
        forward.prediction = Prediction(logits, self._learns, network)

    def _call(self, network: Network, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        return find_logits(self._replay.call(network.module, args, kwargs), self._logits)

    def _call_first(self, network: Network, z: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The first prediction, and the first that learns: check that the companion is one of its own."""
        model = unwrapped(self._model)
        given = copying.leaves_of(tensors_of((args, kwargs)))  # before the forward edits them
        before = copying.written(model)
        logits = self._call(network, args, kwargs)
        if copying.written(model) != before:
            raise RuntimeError(WRITES_TO_THE_MODEL)
        if self._learns:
            own = [*parameters_of(network.optimizer.optimizer), *network.module.parameters(), *given]
            copying.require_own_leaves(logits, model, own)
            network.has_shown_its_leaves = True
        if network.starts_equal and not network.has_predicted and logits.shape == z.shape:
            copying.require_equal(z, logits.detach(), network.module)
        network.has_predicted = True
        network.is_loaded = False
        return logits

    def drop_forward(self) -> None:
        self._replay.forget()

    def pull(self, forward: Forward, labels: Labels | None) -> Pull:
        return pull_of(self.distance, forward.rows, self._rows_of(forward))

    def _rows_of(self, forward: Forward) -> Tensor:
        """The prediction as rows, on the model's device."""
        logits = forward.prediction.logits.detach()
        return to_rows(logits, forward.class_dim).to(forward.rows.device)

    # ---- learning: ∇_ω Δ(c, α stop(c) + (1 - α) stop(z)) -------------------------------------------------------------

    def observe(self, forward: Forward, pull: Pull, labels: Labels | None, scale: Scale, alpha: float) -> None:
        prediction: Prediction = forward.prediction
        if not prediction.learns or not len(forward.rows) or prediction.network is not self._network:
            self.skip(forward, alpha)
            return
        logits = prediction.logits
        prediction.logits = logits.detach()
        towards = pull_towards_target(self.distance, forward.rows, self._rows_of(forward), pull, alpha)
        if self._options.fraction < 1.0:
            towards = self._of_drawn_rows(towards)
        gradient = towards.gradient(logits.shape, towards.slope.dtype, forward.class_dim, scale, overwrites=True)
        size = scale.abs() if isinstance(scale, Tensor) else abs(scale)
        if logits.dtype == torch.float16:  # a gradient scaler's s grows until the model's gradient overflows
            if self._half_factor is None:
                self._half_factor = _half_factor(towards.slope)
            gradient = gradient * self._half_factor
            size = size * self._half_factor
        self._pending.append((logits, gradient.to(logits)))
        self._num_observed += 1
        self._total_scale = size if self._total_scale is None else self._total_scale + size

    def _of_drawn_rows(self, pull: Pull) -> Pull:
        """The mean over a random share of the rows; the others get no gradient."""
        slope = pull.slope
        number = max(round(self._options.fraction * len(slope)), 1)
        drawn = torch.randperm(len(slope), generator=self._generator, device="cpu")[:number]
        weights = torch.zeros_like(slope[:, 0])
        weights[drawn.to(slope.device, non_blocking=True)] = len(slope) / number
        return pull._replace(weights=weights)

    def skip(self, forward: Forward, alpha: float) -> None:
        prediction: Prediction = forward.prediction
        self._skipped.append(prediction)  # another loss of these logits may be read
        if self._group.size > 1:  # the others wait for this one's share in the mean
            self._num_observed += prediction.learns

    def end_backward(self) -> None:
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
        self.end_backward()  # of which only compiled autograd leaves something
        learns = self._num_observed > 0
        if learns and self._group.size > 1:  # every rank must bring the same tensors to the reduction
            network.optimizer.fill_gradients()
        self._average(list(gradients_of(network.optimizer.optimizer)) if learns else [])
        if learns:
            network.optimizer.step()
            network.optimizer.optimizer.zero_grad()
        self._start()

    def _average(self, gradients: list[Tensor]) -> None:
        """Make the mean over the forward passes of the step, weighted by their loss scales, and over the ranks."""
        total = self._total_scale
        if isinstance(total, Tensor):
            total = total.clamp(min=TINY)
            for device in dict.fromkeys(gradient.device for gradient in gradients):
                here = [gradient for gradient in gradients if gradient.device == device]
                torch._foreach_div_(here, total.to(device))
        elif total is not None and total not in (0.0, 1.0):
            torch._foreach_div_(gradients, total)
        self._group.average(gradients)

    def check_values(self) -> None:
        if self._network is None or _is_finite(self.optimizer) or not _is_finite(self._base):  # the same on all ranks
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

    def state_dict(self) -> dict[str, Any]:
        network = self._network
        generator = self._generator.get_state()
        if network is None:
            return {"made": False, "generator": generator}
        network.optimizer.follow_options()  # what the script has changed since the last step, as a scheduler does
        model = network.follower.own_state()
        return {"model": model, "optimizer": network.optimizer.state_dict(), "generator": generator}

    def check_state(self, state: dict[str, Any]) -> None:
        before = self._network
        generator = self._generator.get_state()
        try:
            if _is_not_made(state) and self._options.companion is None:
                check_state(state, {"made": None, "generator": generator}, "companion")
            else:
                network = self._network or self._make()
                check_state(state, {"model": dict, "optimizer": dict, "generator": generator}, "companion")
                network.optimizer.check_state(state["optimizer"])
                check_state(state["model"], network.follower.own_state(), "companion")
            torch.Generator().set_state(state["generator"].cpu())  # which raises for what is no state
        finally:
            self._network = before

    def load_state_dict(self, state: dict[str, Any]) -> None:
        generator = state["generator"].cpu()
        if _is_not_made(state):
            self.reset()
            self._generator.set_state(generator)
            return
        before = self._network
        network = self._network or self._make()
        try:
            with all_or_nothing(network.optimizer.optimizer):
                network.optimizer.load_state_dict(state["optimizer"])
                network.module.load_state_dict(state["model"], strict=False)
        except Exception:
            self._network = before
            raise
        self._generator.set_state(generator)
        self.forget()
        network.has_predicted = False
        network.starts_equal = False
        network.is_loaded = True
        network.loaded_since = False

    def reset(self) -> None:
        """Drop the companion: the next training forward pass begins with a new one, as the first did."""
        if self._options.companion is not None:
            raise RuntimeError("companion was given as a module: load weights into it, or wrap the model again")
        self.forget()
        self._network = None

    def __getstate__(self) -> dict[str, Any]:
        self.end_backward()  # graphs cannot be copied
        return self.__dict__ | {"_generator": self._generator.get_state(), "_skipped": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._generator = torch.Generator()
        self._generator.set_state(state["_generator"])


def _is_not_made(state: Any) -> bool:
    """Whether a state is one from before the first forward pass of a copy."""
    return isinstance(state, dict) and state.get("made") is False


def _is_finite(optimizer: Optimizer) -> bool:
    """Whether the norm of all parameters that an optimizer trains is finite. Synchronizes."""
    norm: Any = torch.nn.utils.get_total_norm(list(parameters_of(optimizer)))
    return math.isfinite((norm.full_tensor() if is_sharded(norm) else norm).item())


def _half_factor(gradient: Tensor) -> Tensor:
    """What rows of a gradient are multiplied by so that their sum neither overflows in float16 nor underflows."""
    largest = gradient.abs().sum(0).amax()
    return torch.where(largest > 0, HALF_SIZE / largest, 1.0)
