"""A companion once it is made: the module and its optimizer, both kept as the model and its optimizer are."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from operator import attrgetter
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dcl_optim.companion.copying import build
from dcl_optim.companion.optimizer import PASS_ANOTHER, MakeOptimizer, add_note, are_zero, make_optimizer
from dcl_optim.companion.replay import forked_rng
from dcl_optim.companion.wide_weights import WideWeights
from dcl_optim.penalty.pull import Scale
from dcl_optim.pytorch.arguments import check_state
from dcl_optim.pytorch.internals import count_as_step
from dcl_optim.pytorch.parameters import (
    all_or_nothing,
    gradients_of,
    has_other_parameters,
    parameters_of,
    requires_grad,
)
from dcl_optim.pytorch.ranks import DataParallelGroup, any_sharded, local_parts

TINY = 1e-30  # what can be divided by
FOLLOWED = ("lr", "weight_decay", "momentum", "betas")  # what schedules change
NOTHING_TO_TRAIN = (
    "companion has no parameter to train: none that the base optimizer trains is one of the model's and has "
    "requires_grad=True. Either all are frozen, or an engine has put its own in their place (DeepSpeed's ZeRO, or its "
    "bfloat16 in stage 0), or this forward pass has others.\n"
    "  Fix: unfreeze one; with an engine use DCPOptimizer and add the penalty to the loss, loss + "
    "optimizer.penalty(logits, labels); else ask for optimizer.companion before a forward pass with other parameters "
    "(functional_call)"
)


@dataclass(frozen=True)
class CompanionOptions:
    """What :class:`~dcl_optim.DCLOptimizer` says of the companion; see there."""

    companion: nn.Module | None = None
    make_optimizer: MakeOptimizer | None = None
    lr_scale: float = 1.0
    fraction: float | None = None
    process_group: Any = "auto"


class Network:
    """A companion with its optimizer. A copy shares what the base does not train, and follows the base's options.

    Args:
        model: the user's own module.
        base: its optimizer.
        options: see :class:`CompanionOptions`.
        group: the ranks that train the model together, which all get the first one's companion.

    Attributes:
        module: the companion.
        device: where the base's first parameter is.
        optimizer: its optimizer.
        own: its parameters that are trained.
        wide: the float32 weights behind parameters in half precision, which the optimizer steps in their place.
        is_new: whether no backward pass has run in it, and it has no weights of a state.
        has_predicted: whether it has, and was found to share nothing that it trains.
        has_begun: whether a gradient was not 0. A copy of the model begins with gradients of exactly 0, by which some
            optimizers divide later; until then no step is taken.
    """

    is_new = True
    has_predicted = False
    has_begun = False
    _num_ranks = 0  # at the last forward pass; 0 before the first

    def __init__(self, model: nn.Module, base: Optimizer, options: CompanionOptions, group: DataParallelGroup) -> None:
        if has_other_parameters(base, model):
            raise ValueError(NOTHING_TO_TRAIN)
        self._model = model
        self._base = base
        self._options = options
        self._group = group
        self._is_copy = options.companion is None
        self._forward = vars(model).get("forward")
        self._known = _trained_by(base)
        self._seen: list[Any] = []  # the groups at the last forward
        self.device = next(parameters_of(base)).device
        with forked_rng(self.device), torch.inference_mode(False):  # some layers draw when they are copied
            self.module = build(model, base, options.companion)
            # What is trained: the base's parameters, the companion's in their place and others, and what is stepped.
            names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
            own = {name: p for name, p in self.module.named_parameters() if p.requires_grad and p not in names}
            self._theirs = [parameter for parameter in parameters_of(base) if names.get(parameter) in own]
            self.own: list[Tensor] = [own.pop(names[parameter]) for parameter in self._theirs]
            self.own += [parameter for name, parameter in own.items() if name not in names.values()]
            if not self.own:
                raise ValueError(NOTHING_TO_TRAIN)
            self.wide = WideWeights(self.own)
            self._weights = list(map(self.wide.behind, self.own))
            self.optimizer = make_optimizer(base, self._theirs, self._weights, options.make_optimizer)
        self._modules = [(model, self.module)]
        if self._is_copy:
            self._modules = list(zip(model.modules(), self.module.modules(), strict=True))

    # ---- following the model and its optimizer -----------------------------------------------------------------------

    def has_changed(self) -> bool:
        """Whether the base optimizer trains a parameter that it did not or in another group, or the model has moved.

        The companion keeps a parameter that is frozen; it learns again when it is unfrozen.
        """
        # Without a line of Python for each parameter. In a copy of this object the ids are others, and the rest is run.
        seen = [[*map(id, group["params"]), *map(_kind, group["params"])] for group in self._base.param_groups]
        if seen == self._seen:
            return False
        trained = _trained_by(self._base)
        parameters = {parameter for parameter, *_ in trained}
        if parameters.isdisjoint(self._theirs) and has_other_parameters(self._base, self._model):
            raise ValueError(NOTHING_TO_TRAIN)
        self._seen = seen
        self.device = next(parameters_of(self._base)).device
        for theirs, *ours in zip(self._theirs, self.own, self._weights, strict=False):
            for tensor in ours:
                tensor.requires_grad_(theirs in parameters)
        return not trained <= self._known

    def follow(self) -> None:
        """Bring the companion to where the model is."""
        if self._group.size != self._num_ranks:  # DistributedDataParallel may come later than the companion
            self._num_ranks = self._group.size
            self.wide.read_network()
            self._group.broadcast(weight.data for weight in self._weights)
            self._group.broadcast(self.module.buffers())
            self.wide.write_network()
        forward: Any = vars(self._model).get("forward")
        if forward is not self._forward and self._is_copy:  # by a library: Lightning for a call, Accelerate
            self._forward = forward
            vars(self.module).pop("forward", None)
            if getattr(forward, "__self__", None) is self._model:
                self.module.forward = MethodType(forward.__func__, self.module)
        for theirs, ours in self._modules:
            if ours.training != theirs.training:
                ours.train(theirs.training)

    def _follow_options(self) -> None:
        """Give the groups the base's learning rate, weight decay and momentum."""
        if self._options.make_optimizer is not None:
            return
        for theirs, ours in zip(self._base.param_groups, self.optimizer.param_groups, strict=False):
            ours |= {key: copy.deepcopy(theirs[key]) for key in FOLLOWED if key in theirs}
            if self._options.lr_scale != 1:
                ours["lr"] = ours["lr"] * self._options.lr_scale

    # ---- gradients, and the step -------------------------------------------------------------------------------------

    def _fill_gradients(self) -> None:
        """Give zeros to each weight that has no gradient."""
        for weight in filter(requires_grad, self._weights):
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)

    def step(self, total: Scale, has_ranks: bool) -> None:
        """Step with the base's options, unless no gradient was other than 0; its draws are not taken from the script's.

        To ask whether one was synchronizes, mostly in two steps.

        Args:
            total: what the gradients are divided by, so that they are the mean over the forward passes, weighted by
                their loss scales; also 0, of batches that were not read, or without any.
            has_ranks: whether the gradients are averaged over the ranks, and those that are missing are zeros.
        """
        if self.wide.weights:
            self.wide.widen_gradients()
        if has_ranks:
            self._fill_gradients()
        gradients = list(gradients_of(self._weights))
        first = self._weights[0]
        divisor = torch.as_tensor(total, dtype=first.dtype, device=first.device).clamp(min=TINY)
        if has_ranks and any_sharded(gradients):  # this rank has parts of the gradients of all
            self._group.average([divisor])
        if gradients:
            torch._foreach_div_(local_parts(gradients), divisor)
        if has_ranks:
            self._group.average(gradients)
        self._follow_options()
        self.has_begun = self.has_begun or not are_zero(gradients)
        if self.has_begun:
            try:
                with forked_rng(self.device):
                    self.optimizer.step()
            except Exception as error:
                add_note(error, f"This was raised in the step of the companion's optimizer: {PASS_ANOTHER}")
                raise
            if self.wide.weights:
                self.wide.write_network()
        else:
            count_as_step(self.optimizer)
        self.optimizer.zero_grad()

    def create_state(self) -> None:
        """Create the optimizer's state for torch.distributed.checkpoint to load into, by a step with gradients of 0."""
        if not self.optimizer.state:
            self._follow_options()
            self._fill_gradients()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def switch(self, mode: str) -> None:
        """Call the optimizer's method of this name, ``"train"`` or ``"eval"``, if it has one."""
        if hasattr(self.optimizer, mode):
            self.wide.read_network()
            getattr(self.optimizer, mode)()
            self.wide.write_network()

    def clear_gradients(self) -> None:
        """Drop the gradients."""
        for weight in (*self.own, *self._weights):
            weight.grad = None

    # ---- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The companion's tensors without what it shares with the model, and its optimizer's state."""
        self.wide.read_network()
        return {"begun": self.has_begun, "model": self.own_tensors(), "optimizer": self.optimizer.state_dict()}

    def own_tensors(self) -> dict[str, Any]:
        """The state of the module, with weights of float32 in the place of parameters in half precision."""
        own = self.module.state_dict()
        trained = set(self.own)
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            if self._is_copy and parameter not in trained:  # the model's
                own.pop(name, None)
            else:
                own[name] = self.wide.behind(parameter).detach()
        return own

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state of :meth:`state_dict`, or nothing of it, with a ValueError if it does not fit."""
        check_state(state["model"], self.own_tensors(), "companion")
        with all_or_nothing(self.optimizer):
            saved = dict(state["optimizer"])
            if "state" in saved:  # torch.distributed.checkpoint makes texts of all keys
                states = saved["state"].items()
                saved["state"] = {int(key) if str(key).isdigit() else key: one for key, one in states}
            self.optimizer.load_state_dict(saved)
            self.module.load_state_dict(state["model"], strict=False)
            names: dict[Tensor, str] = {parameter: name for name, parameter in self.module.named_parameters()}
            for half, weight in self.wide.weights.items():  # which has more than was loaded into its rounding
                weight.data.copy_(state["model"][names[half]])
        self.has_begun = state["begun"]
        self.has_predicted = False
        self.is_new = False


def _trained_by(base: Optimizer) -> set[Any]:
    """What a base optimizer trains, each parameter with the number of its group, and where it is."""
    return {
        (parameter, number, _kind(parameter))
        for number, group in enumerate(base.param_groups)
        for parameter in filter(requires_grad, group["params"])
    }


_kind = attrgetter("requires_grad", "device", "dtype")
