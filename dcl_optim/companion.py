"""The companion model: its forecast of a batch and its chase of the model."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dcl_optim import compilation, distributed, random_state, twin
from dcl_optim.checkpointing import outside_checkpoints
from dcl_optim.forecaster import Forecaster, Forward, Scale, check_tensors
from dcl_optim.functional import Distance, chase_target, to_rows, value_and_gradient
from dcl_optim.inputs import cut, map_tensors, outside_autocast
from dcl_optim.mirror import MakeOptimizer, MirroredOptimizer
from dcl_optim.random_state import RandomState, replayed
from dcl_optim.wrapper import parameters_of


class Companion(Forecaster):
    r"""The second network :math:`\omega` of Deep Companion Learning (Algorithm 1).

    Forecast: its logits c on the same batch. Learning: one step of its own optimizer on
    :math:`\Delta(c, \alpha\,\mathrm{stop}(c) + (1-\alpha)\,\mathrm{stop}(z))` with the same c.

    Args:
        model: the model.
        base: its optimizer.
        find_logits: function of a module's output that gives the logits.
        class_dim: the dimension of the logits that holds the classes.
        companion: None (a copy of the model), a module, or a callable without arguments that builds one.
        companion_optimizer: None (mirrors the base), an optimizer, or a callable that builds one from parameters.
        lr_scale: the companion's learning rate divided by the base's.
        fraction: the part of each batch, its first rows, that the companion learns from, in (0, 1].

    Attributes:
        module: the companion as a module.
        optimizer: its optimizer.
    """

    def __init__(
        self,
        model: nn.Module,
        base: Optimizer,
        find_logits: Callable[[Any], Tensor],
        class_dim: int,
        *,
        companion: nn.Module | Callable[[], nn.Module] | None = None,
        companion_optimizer: Optimizer | MakeOptimizer | None = None,
        lr_scale: float = 1.0,
        fraction: float = 1.0,
    ) -> None:
        self._called, self._find_logits, self._class_dim = model, find_logits, class_dim
        self._model = twin.unwrapped(model)
        self._fraction = fraction
        self._is_copy = companion is None
        self.module = twin.build(self._model, companion)
        self._mirror = MirroredOptimizer(base, self._model, lr_scale, companion_optimizer)
        self.optimizer = self._mirror.build(self.module, strangers=not self._is_copy)
        self._note_structure()
        self._forward = vars(self._model).get("forward")
        self._started = False
        self._reset()

    def _reset(self) -> None:
        self._pending: list[tuple[Tensor, Tensor]] = []  # companion logits with their graph, gradient to send in
        self._unit: Scale = 1.0  # forwards are weighed by their scale divided by this one, the first's
        self._total: Scale = 0.0  # sum of the weights so far
        self._count = 0
        self._half = False

    def predict(self, args: tuple[Any, ...], kwargs: dict[str, Any], forward: Forward, state: RandomState) -> None:
        self._keep_up()
        args, kwargs = cut((args, kwargs))
        batch = forward.shape[0]
        learned = batch if self._fraction == 1 else max(2, round(self._fraction * batch))
        with replayed(state), outside_checkpoints():
            if batch - learned < 2:  # batch normalisation cannot take a single sample
                forward.forecast = forward.chased = self._logits(args, kwargs, forward)
            else:
                self._predict_in_two(args, kwargs, forward, learned)

    def _predict_in_two(self, args: Any, kwargs: Any, forward: Forward, learned: int) -> None:
        """Keep a graph for the rows that are learned from only: this is where a fraction saves its time."""
        batch = forward.shape[0]

        def part(rows: slice) -> Any:
            return map_tensors(lambda t: t[rows] if t.ndim and len(t) == batch else t, (args, kwargs))

        forward.chased = self._logits(*part(slice(0, learned)))
        with torch.no_grad():
            rest = self._logits(*part(slice(learned, None)))
        if len(forward.chased) + len(rest) != len(forward.logits):
            raise ValueError(
                f"companion_fraction={self._fraction} needs every input and the logits to have the batch as their "
                "first dimension"
            )
        forward.forecast = torch.cat([forward.chased.detach(), rest])

    def _logits(self, args: Any, kwargs: Any, forward: Forward | None = None) -> Tensor:
        logits = self._find_logits(self.module(*args, **kwargs))
        if forward is not None and logits.shape != forward.shape:
            raise ValueError(
                f"companion gives logits of shape {tuple(logits.shape)} where the model gives {tuple(forward.shape)}; "
                "its architecture is free, its output shape is not"
            )
        return to_rows(logits, self._class_dim)

    def observe(self, forward: Forward, distance: Distance, alpha: float, scale: Scale) -> None:
        c = forward.chased
        assert c is not None
        target = chase_target(forward.logits[: len(c)], c, alpha)
        _, gradient = value_and_gradient(distance, c, target)
        if self._count == 0:
            self._half = c.dtype == torch.float16
            self._unit = scale * _head_room(gradient) if self._half else scale
        weigh = self._count > 0 or self._half
        weight = scale / self._unit if weigh else 1.0
        self._pending.append((c, (gradient * weight if weigh else gradient).to(c.dtype)))
        self._total, self._count = self._total + weight, self._count + 1
        forward.forecast = forward.chased = None

    def digest(self) -> None:
        while self._pending:
            c, gradient = self._pending.pop(0)
            with outside_autocast(c.device.type):
                c.backward(gradient)
            if all(parameter.grad is None for parameter in parameters_of(self.optimizer)):
                raise RuntimeError(
                    "the companion's logits do not depend on its parameters: its copy still calls the model (whose "
                    "forward was replaced by a function that holds it?); pass companion="
                )

    def forget(self) -> None:
        self._reset()
        self.optimizer.zero_grad()

    def prepare(self) -> None:
        self._mirror.follow(self.optimizer)

    def step(self) -> None:
        if self._count:
            self._chase()
        self._mirror.note()

    def _chase(self) -> None:
        gradients = self._gradients()
        if gradients and (self._count > 1 or self._half):
            torch._foreach_div_(gradients, self._total)
        distributed.average(gradients)
        if not self._half or bool(torch.nn.utils.get_total_norm(gradients).isfinite()):
            with random_state.kept(self.optimizer):
                self._step_optimizer()
        self.forget()

    def _step_optimizer(self) -> None:
        try:
            self.optimizer.step()
        except Exception as error:
            kind = type(self.optimizer).__name__
            raise RuntimeError(
                f"the companion's optimizer, a {kind}, could not step ({error}); pass companion_optimizer=<callable "
                "that builds another from parameters>"
            ) from error

    def _gradients(self) -> list[Tensor]:
        if distributed.world_size() > 1:  # every rank must bring the same tensors to the reduction
            self._fill_gradients()
        return [p.grad for p in parameters_of(self.optimizer) if p.grad is not None]

    def _fill_gradients(self) -> None:
        for parameter in parameters_of(self.optimizer):
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad

    def create_state(self) -> None:
        if not self.optimizer.state:
            self._fill_gradients()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self._mirror.note()

    def switch(self, mode: str) -> None:
        getattr(self.optimizer, mode, _nothing)()

    def groups_changed(self) -> None:
        if self._is_copy:
            twin.copy_new_modules(self._model, self.module)
            twin.copy_unfrozen(self._model, self.module)
            self._mirror.add_fresh(self.optimizer, self.module)
            self._note_structure()

    def _note_structure(self) -> None:
        theirs = {id(parameter) for parameter in self._model.parameters()}
        self._shared = [parameter for parameter in self.module.parameters() if id(parameter) in theirs]
        if self._is_copy:
            self._modules = list(zip(self._model.modules(), self.module.modules(), strict=True))
            pairs = zip(self._model.parameters(), self.module.parameters(), strict=True)
            self._sample = next((pair for pair in pairs if pair[0] is not pair[1]), None)

    def _keep_up(self) -> None:
        """Follow what the script did to the model since: mode, device, dtype, frozen parameters that train by now."""
        if not self._started:
            self._start()
        if not self._is_copy:
            if self.module.training != self._model.training:
                self.module.train(self._model.training)
            return
        self._follow_forward()
        for theirs, ours in self._modules:
            if ours.training != theirs.training:
                ours.training = theirs.training
        if any(parameter.requires_grad for parameter in self._shared):
            self.groups_changed()
        if self._sample is not None:
            their, our = self._sample
            if our.device != their.device or our.dtype != their.dtype:
                self.module.to(device=their.device, dtype=their.dtype)
                self.optimizer.load_state_dict(self.optimizer.state_dict())  # casts the state to the parameters' place

    def _follow_forward(self) -> None:
        """Follow what a library has put in place of the model's forward since, as Accelerate does for autocast."""
        forward = vars(self._model).get("forward")
        if forward is not self._forward:
            self._forward = forward
            if forward is None:
                vars(self.module).pop("forward", None)
            elif getattr(forward, "__self__", None) is self._model:
                self.module.forward = MethodType(forward.__func__, self.module)

    def _start(self) -> None:
        """At the first forward: the same weights on all processes, compiled as the model is."""
        distributed.broadcast([p.data for p in self.module.parameters() if p.requires_grad])
        distributed.broadcast(self.module.buffers())
        context = compilation.context_of(self._called) if self._is_copy else None
        if context is not None:
            compilation.compile_with(self.module, context)
        self._started = True

    def __getstate__(self) -> dict[str, Any]:
        self.digest()  # graphs cannot be copied; their gradients can
        return self.__dict__ | {"_started": False}  # torch leaves the compiled call out of copies

    def _own_state(self) -> dict[str, Tensor]:
        shared = {id(parameter) for parameter in self._shared}
        named = dict(self.module.named_parameters(remove_duplicate=False))
        state = self.module.state_dict()
        return {name: t for name, t in state.items() if name not in named or id(named[name]) not in shared}

    def state_dict(self) -> dict[str, Any]:
        self.prepare()  # what the script has changed since the last step, as a scheduler does, is saved too
        optimizer = self.optimizer.state_dict()
        # Strings, as torch.distributed.checkpoint makes all keys strings.
        named = (
            {"state": {str(key): value for key, value in optimizer["state"].items()}} if "state" in optimizer else {}
        )
        return {"model": self._own_state(), "optimizer": optimizer | named}

    def check_state(self, state: dict[str, Any]) -> None:
        check_tensors(state.get("model", {}), self._own_state(), "companion")
        sizes, found = (
            [len(group["params"]) for group in s.get("param_groups", [])]
            for s in (self.optimizer.state_dict(), state.get("optimizer", {}))
        )
        if sizes != found:
            raise ValueError(f"the state of the companion's optimizer has groups of {found} parameters, not {sizes}")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.forget()
        self.module.load_state_dict(state["model"], strict=False)
        optimizer = state["optimizer"]
        if "state" in optimizer:
            optimizer = optimizer | {"state": {_number(key): value for key, value in optimizer["state"].items()}}
        self.optimizer.load_state_dict(optimizer)
        self._mirror.note()


def _number(key: Any) -> Any:
    return int(key) if isinstance(key, str) and key.isdigit() else key


def _nothing() -> None:
    return None


def _head_room(gradient: Tensor) -> Tensor:
    """The power of two that a gradient is divided by to survive in float16: its peak becomes 1/16 or somewhat less.

    The loss's scale would not do: a gradient scaler raises it until the model's gradients overflow, and the companion's
    may be larger.
    """
    exponent = torch.frexp(gradient.abs().amax()).exponent
    return torch.ldexp(torch.ones_like(gradient[0, 0]), exponent + 4)
