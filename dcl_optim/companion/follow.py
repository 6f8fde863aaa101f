"""Keeping the companion as the model is: mode, device, dtype, patched forward, compilation, trained parameters.

Apart from companion.py, which is Algorithm 1: this is what scripts and libraries do to a model meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import compress
from operator import attrgetter, or_
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
    """Follows what a script does to the model, at each forward, with no work in Python that grows with the model.

    A companion that is no copy of the model follows the mode only. ``called`` is the model as the script
    calls it, with its wrappers.
    """

    def __init__(
        self,
        called: nn.Module,
        companion: nn.Module,
        optimizer: CompanionOptimizer,
        is_copy: bool,
        group: DataParallelGroup,
    ) -> None:
        self._called, self._model, self._companion = called, unwrapped(called), companion
        self._optimizer, self._is_copy, self._group = optimizer, is_copy, group
        self._forward = vars(self._model).get("forward")
        self._started, self._size_in_step = False, 1
        self._before: list[int] = []  # versions of the shared parameters before the first forward pass
        own_hooks = is_copy and called is self._model
        self.pre_hooks = copying.ignore_inputs_of_pre_hooks(companion) if own_hooks else []
        self._known = list(self._model.parameters())
        self._note_parameters()

    def follow(self) -> None:
        """Bring the companion to where the model is."""
        if not self._started:
            self._start()
        if self._group.size != self._size_in_step:
            self._give_all_ranks_the_firsts()
        if not self._is_copy:
            if self._companion.training != self._model.training:
                self._companion.train(self._model.training)
            return
        if vars(self._model).get("forward") is not self._forward:
            self._follow_forward()
        if list(map(_training, self._theirs)) != list(map(_training, self._ours)):
            for theirs, ours in zip(self._theirs, self._ours, strict=True):
                ours.training = theirs.training
        if any(map(_requires_grad, self.shared)):
            self.follow_parameters()
        if self._sample is not None:
            their, our = self._sample
            if our.device != their.device or our.dtype != their.dtype:
                self._companion.to(device=their.device, dtype=their.dtype)
                self._optimizer.cast_state()
        if self._trained_elsewhere[0]:
            self._follow_elsewhere()

    # ---- frozen parameters that the forward pass writes to -----------------------------------------------------------

    def before_first_forward(self) -> None:
        """Note the versions of the shared parameters."""
        self._before = versions_of(self.shared)

    def written(self) -> list[str]:
        """After the first forward pass: the names of the shared parameters that it has written to."""
        now = versions_of(self.shared)
        if not self._is_copy or now == self._before:
            return []
        changed = {id(p) for p, before, after in zip(self.shared, self._before, now, strict=True) if before != after}
        return [name for name, p in self._companion.named_parameters(remove_duplicate=False) if id(p) in changed]

    def unshare(self, names: Iterable[str], trained: bool = False) -> None:
        """Give the companion parameters of its own, with the values of those that it has shared by these names."""
        named = dict(self._companion.named_parameters(remove_duplicate=False))
        copying.unshare(self._companion, {id(named[name]): trained for name in names})
        self._optimizer.follow_parameters()
        self._note_parameters()

    def copy_values_from_model(self, names: Iterable[str]) -> None:
        """Give parameters the values that they have in the model."""
        ours = dict(self._companion.named_parameters(remove_duplicate=False))
        theirs = dict(self._model.named_parameters(remove_duplicate=False))
        for name in names:
            ours[name].data.copy_(theirs[name].data)

    def follow_base(self) -> None:
        """Take over parameters that the base trains now; new ones of the model are refused."""
        if self._is_copy:
            unknown, trained = self._unknown(), set(map(id, parameters_of(self._optimizer.base)))
            _refuse({name: parameter for name, parameter in unknown.items() if id(parameter) in trained})
            if unknown:
                self._optimizer.follow_parameters()
                self._note_trained_elsewhere(zip(*self._trained_elsewhere, strict=True))
            else:
                self.follow_parameters()

    def _unknown(self) -> dict[str, nn.Parameter]:
        known = set(map(id, self._known))
        return {name: parameter for name, parameter in self._model.named_parameters() if id(parameter) not in known}

    def follow_parameters(self) -> None:
        """Take over parameters that the model trains now; a model with new ones is refused."""
        _refuse(self._unknown())
        copying.unshare(self._companion, {id(p): True for p in self.shared if p.requires_grad})
        self._optimizer.follow_parameters()
        self._note_parameters()

    def _note_parameters(self) -> None:
        theirs = {id(parameter) for parameter in self._model.parameters()}
        self.parameters = list(self._companion.parameters())
        self.shared = [parameter for parameter in self.parameters if id(parameter) in theirs]
        if not self._is_copy:
            return
        self._theirs, self._ours = list(self._model.modules()), list(self._companion.modules())
        pairs = list(zip(self._model.parameters(), self._companion.parameters(), strict=True))
        own = [pair for pair in pairs if pair[0] is not pair[1]]
        self._sample = own[0] if own else None
        self._note_trained_elsewhere(own)

    def _note_trained_elsewhere(self, pairs: Iterable[tuple[nn.Parameter, nn.Parameter]]) -> None:
        held = {id(parameter) for parameter in parameters_of(self._optimizer.optimizer)}
        elsewhere = [pair for pair in pairs if id(pair[1]) not in held]
        self._trained_elsewhere = ([theirs for theirs, _ in elsewhere], [ours for _, ours in elsewhere])
        self._trained = [theirs.requires_grad for theirs, _ in elsewhere]  # until the last forward

    def _follow_elsewhere(self) -> None:
        """Take over the values of parameters that an optimizer of the script's own trains, and not the wrapped one."""
        trained, self._trained = self._trained, list(map(_requires_grad, self._trained_elsewhere[0]))
        # Not what stays frozen, which the model's forward has written to, but what was frozen after its last step.
        theirs, ours = (list(compress(side, map(or_, trained, self._trained))) for side in self._trained_elsewhere)
        if theirs:
            # By data: a forward whose backward is to come has saved them, with these values.
            torch._foreach_copy_(list(map(_data, ours)), list(map(_data, theirs)))
            for parameter in ours:
                parameter.grad = None

    def _follow_forward(self) -> None:
        """Follow what a library has put in place of the model's forward since, as Accelerate does for autocast."""
        forward = self._forward = vars(self._model).get("forward")
        if forward is None:
            vars(self._companion).pop("forward", None)
        elif getattr(forward, "__self__", None) is self._model:
            self._companion.forward = MethodType(forward.__func__, self._companion)

    def _start(self) -> None:
        """At the first forward: compiled as the model is."""
        context = compile_context(layers(self._called)) if self._is_copy else None
        if context is not None:
            compile_with(self._companion, context, copying.has_other_hooks(self._model, self._companion))
        self._started = True

    def _give_all_ranks_the_firsts(self) -> None:
        """The same weights on all ranks, once these are known: DistributedDataParallel may wrap the model later."""
        self._size_in_step = self._group.size
        self._group.broadcast(p.data for p in self._companion.parameters() if p.requires_grad)
        self._group.broadcast(self._companion.buffers())

    def own_state(self, unshared: Iterable[str] = ()) -> dict[str, Tensor]:
        """The companion's tensors without those that it shares with the model, but for those of some names."""
        if any(map(_requires_grad, self.shared)):
            self.follow_parameters()
        shared = {id(parameter) for parameter in self.shared}
        named = dict(self._companion.named_parameters(remove_duplicate=False))
        state = self._companion.state_dict()
        return {n: t for n, t in state.items() if n not in named or n in unshared or id(named[n]) not in shared}

    def shared_in(self, names: Iterable[str]) -> list[str]:
        """Those of some names whose parameter the companion shares."""
        shared = {id(parameter) for parameter in self.shared}
        named = dict(self._companion.named_parameters(remove_duplicate=False))
        return [name for name in names if name in named and id(named[name]) in shared]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_started": False}  # torch leaves the compiled call out of copies


def _refuse(added: dict[str, nn.Parameter]) -> None:
    if added:
        raise RuntimeError(
            f"the model's parameters {list(added)[:5]} were added or replaced since it was wrapped, and the companion "
            "has none of them: wrap the model again"
        )
