"""Keeping the companion as the model is: mode, forward, device, dtype, parameters that train by now or elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import compress
from operator import attrgetter, or_
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dcl_optim import compilation, distributed, hooks, twin
from dcl_optim.mirror import MirroredOptimizer
from dcl_optim.wrapper import parameters_of

_training, _trains, _data = attrgetter("training"), attrgetter("requires_grad"), attrgetter("data")


class Follower:
    """Follows what a script does to the model, at each forward, with no work in Python that grows with the model.

    Args:
        called: the model as the script calls it, with its wrappers.
        module: the companion.
        is_copy: whether it is a copy of the model; one that is not follows the mode and the device only.
        mirror: what built its optimizer.
        optimizer: its optimizer.
        device: the companion's own device; None for the model's.
        dtype: the companion's own dtype; None for the model's.
    """

    def __init__(
        self,
        called: nn.Module,
        module: nn.Module,
        is_copy: bool,
        mirror: MirroredOptimizer,
        optimizer: Optimizer,
        device: torch.device | None,
        dtype: torch.dtype | None,
    ) -> None:
        self._called, self._model, self._module = called, twin.unwrapped(called), module
        self._is_copy, self._mirror, self._optimizer = is_copy, mirror, optimizer
        self._device, self._dtype = device, dtype
        self._forward = vars(self._model).get("forward")
        self._started = False
        self._known = dict(self._model.named_parameters())  # what the companion was made from
        if is_copy and called is self._model:
            hooks.hear_only(module)
        self._note_structure()

    def follow(self) -> None:
        """Bring the companion to where the model is."""
        if not self._started:
            self._start()
        if not self._is_copy:
            if self._module.training != self._model.training:
                self._module.train(self._model.training)
            self._follow_place()
            return
        self._follow_forward()
        if list(map(_training, self._theirs)) != list(map(_training, self._ours)):
            for theirs, ours in zip(self._theirs, self._ours, strict=True):
                ours.training = theirs.training
        self.follow_unfrozen()
        self._follow_place()
        if self._elsewhere[0]:
            self._follow_elsewhere()

    def follow_unfrozen(self) -> None:
        """Take over parameters that the model trains by now.

        Raises:
            RuntimeError: the model has other parameters than when it was wrapped.
        """
        if any(map(_trains, self.shared)):
            self._require_same_parameters()
            self.follow_parameters()

    def follow_parameters(self) -> None:
        """Take over parameters that the model trains by now, and train those that the wrapped optimizer has got."""
        if self._is_copy and not self._changed():
            twin.copy_unfrozen(self._model, self._module)
            self._mirror.add_fresh(self._optimizer, self._module)
            self._note_structure()

    def check_parameters(self, parameters: Iterable[Any]) -> None:
        """Refuse parameters for the wrapped optimizer if the model has got or lost some since it was wrapped.

        Raises:
            RuntimeError: they are the model's, whose parameters are not those that it was wrapped with.
        """
        theirs = {id(parameter) for parameter in self._model.parameters()}
        if any(id(parameter) in theirs for parameter in parameters):
            self._require_same_parameters()

    def _require_same_parameters(self) -> None:
        names = self._changed() if self._is_copy else []
        if names:
            raise RuntimeError(
                f"the model's parameters {names} were added, replaced or removed since it was wrapped, and the "
                "companion is a copy of the model as it was: wrap the model again (new parameters that are to be "
                "trained belong to optimizer.base first)"
            )

    def _changed(self) -> list[str]:
        now = dict(self._model.named_parameters())
        return sorted(name for name in now.keys() | self._known if now.get(name) is not self._known.get(name))

    def _note_structure(self) -> None:
        theirs = {id(parameter) for parameter in self._model.parameters()}
        self.shared = [parameter for parameter in self._module.parameters() if id(parameter) in theirs]
        if not self._is_copy:
            places = (twin.common_device(self._model), twin.common_device(self._module))
            first = (next(self._model.parameters()), next(self._module.parameters()))
            self._sample = first if None not in places else None
            return
        self._theirs, self._ours = list(self._model.modules()), list(self._module.modules())
        pairs = list(zip(self._model.parameters(), self._module.parameters(), strict=True))
        self._sample = next((pair for pair in pairs if pair[0] is not pair[1]), None)
        held = {id(parameter) for parameter in parameters_of(self._optimizer)}
        elsewhere = [pair for pair in pairs if pair[0] is not pair[1] and id(pair[1]) not in held]
        self._elsewhere = ([pair[0] for pair in elsewhere], [pair[1] for pair in elsewhere])
        self._trained = [True] * len(elsewhere)  # of those whether they have trained until the last forward

    def _follow_elsewhere(self) -> None:
        """Take over the values of parameters that an optimizer of the script's own trains, and not the wrapped one."""
        trained, self._trained = self._trained, list(map(_trains, self._elsewhere[0]))
        # Not what stays frozen, as in a companion of its own dtype, but what was frozen after its last step.
        theirs, ours = (list(compress(side, map(or_, trained, self._trained))) for side in self._elsewhere)
        if theirs:
            # By data: a forward whose backward is to come has saved them, with these values.
            torch._foreach_copy_(list(map(_data, ours)), list(map(_data, theirs)))
            for parameter in ours:
                parameter.grad = None

    def _follow_forward(self) -> None:
        """Follow what a library has put in place of the model's forward since, as Accelerate does for autocast."""
        forward = vars(self._model).get("forward")
        if forward is not self._forward:
            self._forward = forward
            if forward is None:
                vars(self._module).pop("forward", None)
            elif getattr(forward, "__self__", None) is self._model:
                self._module.forward = MethodType(forward.__func__, self._module)

    def _follow_place(self) -> None:
        if self._sample is None:
            return
        their, our = self._sample
        device = self._device or their.device
        dtype = self._dtype or (their.dtype if self._is_copy else our.dtype)
        if our.device != device or our.dtype != dtype:
            self._module.to(device=device, dtype=dtype)
            self._optimizer.load_state_dict(self._optimizer.state_dict())  # casts the state to the parameters' place

    def _start(self) -> None:
        """At the first forward: the same weights on all processes, compiled as the model is."""
        distributed.broadcast([p.data for p in self._module.parameters() if p.requires_grad])
        distributed.broadcast(self._module.buffers())
        context = compilation.context_of(self._called) if self._is_copy else None
        if context is not None:
            compilation.compile_with(self._module, context, apart=hooks.differ(self._model, self._module))
        self._started = True

    def own_state(self) -> dict[str, Tensor]:
        """The companion's tensors without those that it shares with the model."""
        shared = {id(parameter) for parameter in self.shared}
        named = dict(self._module.named_parameters(remove_duplicate=False))
        state = self._module.state_dict()
        return {name: t for name, t in state.items() if name not in named or id(named[name]) not in shared}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_started": False}  # torch leaves the compiled call out of copies
