"""Keeping the companion as the model is: mode, device, dtype, patched forward, compilation, trained parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from operator import attrgetter
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from dcl_optim._optim import parameters_of
from dcl_optim._torch import compile_context, compile_with, versions_of
from dcl_optim.companion import copying
from dcl_optim.companion.optimizer import CompanionOptimizer
from dcl_optim.distributed import DataParallelGroup, layers, unwrapped

_training, _requires_grad, _data = attrgetter("training"), attrgetter("requires_grad"), attrgetter("data")


class ModelFollower:
    """Follows, at each forward pass, what a script does to the model; ``called`` is the model with its wrappers.

    Nothing in Python grows with the model. A companion that is no copy follows the mode only.
    """

    def __init__(
        self, called: nn.Module, companion: nn.Module, optimizer: CompanionOptimizer, group: DataParallelGroup
    ) -> None:
        self._called, self._model, self._companion = called, unwrapped(called), companion
        self._optimizer, self._is_copy, self._group = optimizer, optimizer.is_copy, group
        self._forward = vars(self._model).get("forward")
        self._ranks = 0  # at the last forward; 0 before the first
        self._known = list(self._model.parameters())
        self._note_parameters()

    def follow(self) -> None:
        """Bring the companion to where the model is."""
        if self._group.size != self._ranks:
            self._start()
        if not self._is_copy:
            if self._companion.training != self._model.training:
                self._companion.train(self._model.training)
            return
        if vars(self._model).get("forward") is not self._forward:
            self._follow_forward()
        if list(map(_training, self._theirs)) != list(map(_training, self._ours)):
            for theirs, ours in zip(self._theirs, self._ours, strict=True):
                ours.training = theirs.training
        if any(map(_requires_grad, self._shared)):
            self.follow_parameters()
        if self._sample is not None:
            their, our = self._sample
            if our.device != their.device or our.dtype != their.dtype:
                self._companion.to(device=their.device, dtype=their.dtype)
                optimizer = self._optimizer.optimizer
                optimizer.load_state_dict(optimizer.state_dict())  # which brings it to where the parameters are
        if self._trained_elsewhere:
            # By data: a forward whose backward is to come has saved them, with these values.
            sources, copies = zip(*self._trained_elsewhere, strict=True)
            torch._foreach_copy_(list(map(_data, copies)), list(map(_data, sources)))

    def _start(self) -> None:
        """Compile as the model is, and give all ranks the same weights; DistributedDataParallel may come later."""
        context = compile_context(layers(self._called)) if self._is_copy and not self._ranks else None
        if context is not None:
            compile_with(self._companion, context, copying.has_other_hooks(self._model, self._companion))
        self._ranks = self._group.size
        self._group.broadcast(p.data for p in self._companion.parameters() if p.requires_grad)
        self._group.broadcast(self._companion.buffers())

    def _follow_forward(self) -> None:
        """Follow what a library has put in place of the model's forward since, as Accelerate does for autocast."""
        forward = self._forward = vars(self._model).get("forward")
        if forward is None:
            vars(self._companion).pop("forward", None)
        elif getattr(forward, "__self__", None) is self._model:
            self._companion.forward = MethodType(forward.__func__, self._companion)

    def follow_parameters(self) -> None:
        """Take over parameters that the model or its optimizer trains now; a model with new ones is refused."""
        if not self._is_copy:
            return
        known = set(map(id, self._known))
        added = [name for name, parameter in self._model.named_parameters() if id(parameter) not in known]
        if added:
            raise RuntimeError(
                f"the model's parameters {added[:5]} were added or replaced since it was wrapped: wrap the model again"
            )
        self._unshare([parameter for parameter in self._shared if parameter.requires_grad])

    def _unshare(self, parameters: Iterable[Tensor]) -> None:
        self._optimizer.check()
        copying.unshare(self._companion, parameters)
        self._optimizer.follow_parameters()
        self._note_parameters()

    def _note_parameters(self) -> None:
        theirs = set(map(id, self._model.parameters()))
        self.parameters = [parameter for _, parameter in self._companion.named_parameters()]
        self._shared = [parameter for parameter in self.parameters if id(parameter) in theirs]
        if not self._is_copy:
            return
        self._theirs, self._ours = list(self._model.modules()), list(self._companion.modules())
        pairs = zip(self._model.parameters(), self._companion.parameters(), strict=True)
        own = [pair for pair in pairs if pair[0] is not pair[1]]
        self._sample = own[0] if own else None
        held = set(map(id, parameters_of(self._optimizer.optimizer)))
        self._trained_elsewhere = [pair for pair in own if id(pair[1]) not in held]

    def shared_names(self) -> set[str]:
        """The names of the parameters that the companion shares."""
        shared = set(map(id, self._shared))
        return {name for name, p in self._companion.named_parameters(remove_duplicate=False) if id(p) in shared}

    def versions(self) -> list[Any]:
        """Of each parameter: how often it was written to, and where its values are, which ``.data =`` changes."""
        places = [parameter.data_ptr() if self._is_copy else 0 for parameter in self.parameters]
        return list(zip(versions_of(self.parameters), places, strict=True))

    def require_unwritten(self, before: list[Any]) -> None:
        """Raise RuntimeError if the model's forward has written to them since the companion's had these versions."""
        named = zip(self._companion.named_parameters(), before, self.versions(), strict=True)
        written = [name for (name, parameter), one, other in named if one != other and not parameter.requires_grad]
        if self._is_copy and written:
            raise RuntimeError(
                f"the model's forward pass writes to its frozen parameters {written[:5]}, which the companion shares: "
                "write to them after the step, make them buffers, or pass companion=copy.deepcopy(model)"
            )

    def unshare(self, names: Collection[str]) -> None:
        """Replace the parameters that the companion shares by these names by copies, which train."""
        shared = self.shared_names().intersection(names)
        if shared:
            self._unshare([self._companion.get_parameter(name) for name in shared])

    def own_state(self, unshared: Collection[str] = ()) -> dict[str, Tensor]:
        """The companion's tensors without what it shares with the model, except under some names."""
        if any(map(_requires_grad, self._shared)):
            self.follow_parameters()
        left_out = self.shared_names().difference(unshared)
        return {name: tensor for name, tensor in self._companion.state_dict().items() if name not in left_out}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_ranks": 0}  # torch leaves the compiled call out of copies
