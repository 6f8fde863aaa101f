"""A torch.optim optimizer around another one: groups, state, hooks, checkpoints and copies."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch.optim import Optimizer

from dcl_optim.pytorch import internals
from dcl_optim.pytorch.parameters import all_or_nothing


def _of_base(name: str, document: str) -> Any:
    """Make a property that reads and sets an attribute of the base optimizer."""
    return property(
        lambda self: getattr(self.base, name), lambda self, value: setattr(self.base, name, value), doc=document
    )


class OptimizerWrapper(internals.OptimizerInternals, ABC):
    """Shares ``param_groups``, ``state`` and ``defaults`` with its base; its ``state_dict`` has one key more."""

    # Not the class's own name, which is another in a subclass, and in the shell that Lightning hands out.
    _name: ClassVar[str]

    # Only of a base that has them.
    train: Callable[[], None]
    eval: Callable[[], None]

    def __init__(self, base: Optimizer) -> None:
        if not isinstance(base, Optimizer):
            raise TypeError(
                f"base_optimizer must be a torch.optim.Optimizer instance, got {type(base).__name__}: build the "
                "optimizer as before and wrap it, as in "
                f"{self._name}(torch.optim.SGD(model.parameters(), lr=0.1), model)"
            )
        if isinstance(base, OptimizerWrapper):
            raise TypeError(f"base_optimizer is a {type(base).__name__} itself; wrap its base, optimizer.base")
        self.base = base
        self._set_up_hooks()

    @abstractmethod
    def _own_state(self) -> dict[str, Any]:
        """What to save in addition to the base optimizer's state."""

    @abstractmethod
    def _load_own_state(self, state: dict[str, Any]) -> None:
        """Take over a state that was checked."""

    param_groups: list[dict[str, Any]] = _of_base("param_groups", "The base optimizer's parameter groups.")
    state: Any = _of_base("state", "The base optimizer's per-parameter state.")
    defaults: dict[str, Any] = _of_base("defaults", "The base optimizer's default options.")

    if not TYPE_CHECKING:  # a checker that saw it would let every misspelt name pass

        def __getattr__(self, name: str) -> Any:
            """``train`` and ``eval`` of a base that has them (Schedule-Free); SAM's ``first_step`` would bypass us."""
            is_of_base = hasattr(self.__dict__.get("base"), name)
            if is_of_base and name in ("train", "eval"):
                return functools.partial(self._switch, name)
            hint = f": its base has, optimizer.base.{name}" if is_of_base else ""
            if name in ("first_step", "second_step"):
                hint = ": optimizer.step(closure) takes all steps of SAM"
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")

    def _switch(self, mode: str) -> None:
        """Call the base's method of this name."""
        getattr(self.base, mode)()

    def state_dict(self) -> dict[str, Any]:
        """Return the base optimizer's state and, under a key for the class, what a bit-exact resumption needs.

        It loads with ``torch.load(weights_only=True)``, and into the plain base optimizer.
        """
        self._run_hooks("state_dict_pre")
        state = self.base.state_dict()
        # torch.distributed.checkpoint drops top-level keys that it does not know, and keeps the entries of groups. In
        # other states a plain optimizer that loads one would keep such an entry, and save it when it is stale.
        in_group = any(internals.frames_of("torch.distributed.checkpoint.state_dict"))
        place = state["param_groups"][0] if in_group else state
        place[self._key] = self._own_state()
        return self._passed_through_hooks("state_dict_post", state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of :meth:`state_dict`.

        Raises:
            ValueError, TypeError: the state does not fit, or is no dictionary; nothing has changed.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"state_dict must be a dictionary, got {type(state_dict).__name__}")
        state_dict = self._passed_through_hooks("load_state_dict_pre", dict(state_dict))
        own = self._take_own_state(state_dict)
        if not isinstance(own, dict):
            raise ValueError(
                f"state_dict has no entry {self._key!r} but {sorted(map(str, state_dict))}.\n"
                "  Fix: the state of a plain optimizer or of another wrapper goes into the base, "
                "optimizer.base.load_state_dict(state_dict). Where a trainer loads it, see docs/frameworks.md. "
                "Save without flatten_optimizer_state_dict=True"
            )
        try:
            with all_or_nothing(self.base):
                self.base.load_state_dict(state_dict)
                self._load_own_state(own)
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
            raise ValueError(f"state_dict could not be loaded, and nothing has changed: {error!r}") from error
        self._run_hooks("load_state_dict_post")

    def _take_own_state(self, state_dict: dict[str, Any]) -> Any:
        """Remove our part from a state, which may be changed on its top level only, and return it."""
        groups = state_dict.get("param_groups")
        if self._key in state_dict or not groups:
            return state_dict.pop(self._key, None)
        first = dict(groups[0])
        state_dict["param_groups"] = [first, *groups[1:]]
        return first.pop(self._key, None)

    @property
    def _key(self) -> str:
        return f"dcl_optim.{self._name}"
