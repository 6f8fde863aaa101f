"""A companion once it is made: the module, its optimizer, and how both are kept as the model and its optimizer are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dcl_optim.companion.copying import build
from dcl_optim.companion.optimizer import CompanionOptimizer, MakeOptimizer
from dcl_optim.companion.replay import forked_rng
from dcl_optim.pytorch.arguments import check_state
from dcl_optim.pytorch.parameters import all_or_nothing, has_other_parameters, parameters_of, requires_grad
from dcl_optim.pytorch.ranks import DataParallelGroup, is_sharded

MOVED = (
    "the model was moved or converted, but its companion was not: what is trained was {} and is {}.\n"
    "  Fix: move the model before its first training forward pass and before a state is loaded; or call "
    "optimizer.reset_companion() after the move: the companion is then copied from the model again"
)
REPLACED = (
    "companion has no parameter to train, since none of the base optimizer's is one of the model's: an engine has put "
    "its own in their place (DeepSpeed's ZeRO, or its bfloat16 in stage 0), or this forward pass has others.\n"
    "  Fix: with an engine use DCPOptimizer and add the penalty to the loss, loss + optimizer.penalty(logits, labels); "
    "else ask for optimizer.companion before a forward pass with other parameters (functional_call)"
)


@dataclass(frozen=True)
class CompanionOptions:
    """What :class:`~dcl_optim.DCLOptimizer` says of the companion; see there."""

    companion: nn.Module | None = None
    make_optimizer: MakeOptimizer | None = None
    lr_scale: float = 1.0
    fraction: float = 1.0
    process_group: Any = "auto"


class Network:
    """A companion with its optimizer, which follow mode and options. A copy shares what the base does not train.

    Args:
        model: the user's own module.
        base: its optimizer.
        options: see :class:`CompanionOptions`.
        group: the ranks that train the model together, which all get the first one's companion.

    Attributes:
        module: the companion.
        optimizer: its optimizer.
        has_predicted: whether it has, and was found to share nothing that it trains.
        is_new: whether it has neither predicted nor weights of a state.
        loaded_since: whether weights were loaded into the model since the last forward pass.
        has_shards: whether some of its parameters are sharded.
    """

    def __init__(self, model: nn.Module, base: Optimizer, options: CompanionOptions, group: DataParallelGroup) -> None:
        self.has_predicted = False
        self.is_new = True
        self.loaded_since = False
        self._base = base
        self._group = group
        self._num_ranks = 0  # at the last forward; 0 before the first
        self._known = _trained_by(base)
        self._last: list[list[int]] = []  # the ids of what was trained at the last forward, by groups
        self._model = model
        self._is_copy = options.companion is None
        self._forward = vars(model).get("forward")
        if has_other_parameters(base, model):
            raise ValueError(REPLACED)
        device = next(parameters_of(base)).device
        with forked_rng(device), torch.inference_mode(False):
            self.module = build(model, base, options.companion)
            self._twins, others = _twins_of(model, base, self.module)
            self._places = list(map(_place, self._twins))
            self.optimizer = CompanionOptimizer(base, self._twins, others, options.make_optimizer, options.lr_scale)
        self.has_shards = any(map(is_sharded, self.module.parameters()))
        self._modules = [(model, self.module)]
        if self._is_copy:
            self._modules = list(zip(model.modules(), self.module.modules(), strict=True))

    def base_has_changed(self) -> bool:
        """Whether the base optimizer trains a parameter that it did not or in another group, or the model has moved.

        The companion keeps a parameter that is frozen; it learns again when it is unfrozen. One that has learned is not
        to be lost by a move.

        Raises:
            RuntimeError: the model has moved, and the companion is more than a copy of it.
            ValueError: the base has none of the model's parameters.
        """
        places = list(map(_place, self._twins))
        if self._is_copy and places != self._places:
            if not self.is_new:
                raise RuntimeError(MOVED.format(set(self._places), set(places)))
            return True
        # Without a line of Python for each parameter. In a copy of this object the ids are others, and the rest is run.
        ids = [list(map(id, filter(requires_grad, group["params"]))) for group in self._base.param_groups]
        if ids == self._last:
            return False
        if self._twins.keys().isdisjoint(parameters_of(self._base)) and has_other_parameters(self._base, self._model):
            raise ValueError(REPLACED)
        self._last = ids
        trained = _trained_by(self._base)
        for theirs, ours in self._twins.items():
            ours.requires_grad_(theirs in trained)
        return not trained.items() <= self._known.items()

    def follow(self) -> None:
        """Bring the companion to where the model is."""
        if self._group.size != self._num_ranks:  # DistributedDataParallel may come later than the companion
            self._num_ranks = self._group.size
            wide = self.optimizer.wide
            wide.read_network()
            self._group.broadcast(wide.behind(p).data for p in self.module.parameters() if p.requires_grad)
            self._group.broadcast(self.module.buffers())
            wide.write_network()
        if vars(self._model).get("forward") is not self._forward and self._is_copy:
            self._follow_forward()
        for theirs, ours in self._modules:
            if ours.training != theirs.training:
                ours.train(theirs.training)

    def _follow_forward(self) -> None:
        """Follow what a library has put in place of the model's forward since: Lightning for a call, Accelerate."""
        self._forward = forward = vars(self._model).get("forward")
        if forward is None:
            vars(self.module).pop("forward", None)
        elif getattr(forward, "__self__", None) is self._model:
            self.module.forward = MethodType(forward.__func__, self.module)

    def state_dict(self) -> dict[str, Any]:
        """The companion's tensors without what it shares with the model, and its optimizer's state."""
        self.optimizer.follow_options()  # what the script has changed since the last step, as a scheduler does
        self.optimizer.wide.read_network()
        begun = {"begun": self.optimizer.has_begun}
        return begun | {"model": self._own_tensors(), "optimizer": self.optimizer.optimizer.state_dict()}

    def _own_tensors(self) -> dict[str, Any]:
        """The state of the module, with weights of float32 in the place of parameters in half precision."""
        own = self.module.state_dict()
        trained = set(self._twins.values())
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            if self._is_copy and parameter not in trained:  # the model's
                own.pop(name, None)
            elif parameter in self.optimizer.wide.weights:
                own[name] = self.optimizer.wide.weights[parameter].detach()
        return own

    def check_tensors(self, state: dict[str, Any]) -> None:
        """Raise ValueError unless the companion's tensors are of its names and shapes."""
        check_state(state, self._own_tensors(), "companion")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state of :meth:`state_dict`, or nothing of it."""
        with all_or_nothing(self.optimizer.optimizer):
            self.optimizer.optimizer.load_state_dict(state["optimizer"])
            self.module.load_state_dict(state["model"], strict=False)
            for name, parameter in self.module.named_parameters(remove_duplicate=False):
                if parameter in self.optimizer.wide.weights:
                    self.optimizer.wide.weights[parameter].data.copy_(state["model"][name])
            self.optimizer.wide.write_network()
        self.optimizer.has_begun = state["begun"]
        self.has_predicted = False
        self.is_new = False
        self.loaded_since = False


@contextmanager
def in_evaluation(module: nn.Module) -> Iterator[None]:
    """Put layers into evaluation mode for a while, without what their own ``eval`` may do."""
    training = [layer for layer in module.modules() if layer.training]
    try:
        for layer in training:
            layer.training = False
        yield
    finally:
        for layer in training:
            layer.training = True


def _twins_of(model: nn.Module, base: Optimizer, module: nn.Module) -> tuple[dict[Tensor, Tensor], list[nn.Parameter]]:
    """The companion's parameters for those of the base, by their names in the model; and those of other names."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    own = {name: p for name, p in module.named_parameters() if p.requires_grad and id(p) not in names}
    twins: dict[Tensor, Tensor] = {p: own[names[id(p)]] for p in parameters_of(base) if names.get(id(p)) in own}
    known = set(names.values())
    return twins, [parameter for name, parameter in own.items() if name not in known]


def _trained_by(base: Optimizer) -> dict[Tensor, int]:
    """What a base optimizer trains, with the number of its group."""
    groups = enumerate(base.param_groups)
    return {parameter: number for number, group in groups for parameter in group["params"] if parameter.requires_grad}


_place = attrgetter("device", "dtype")
