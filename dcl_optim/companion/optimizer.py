"""The companion's optimizer: a second one of the base's class, whose groups follow the base's at every step.

What the script changes in the base's groups (a schedule, a momentum cycle) reaches the companion's. What an optimizer
counts in its own groups (Schedule-Free's averages, Prodigy's estimates) stays each one's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dcl_optim._optim import inner_of, parameters_of, without_gradient
from dcl_optim.companion.replay import capture_rng, replayed

MakeOptimizer = Callable[[Iterable[Any]], Optimizer]

OF_SCHEDULERS = ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr")  # what they put there
NO_OPTIONS = ("params", "param_names", *OF_SCHEDULERS)  # what a group holds in addition to its options
PASS_ANOTHER = "pass companion_optimizer=<callable that builds another optimizer from parameters>"
NOTHING_TO_TRAIN = (
    "companion has no parameter to train: none has requires_grad=True and is in the optimizer.\n"
    "  Fix: unfreeze one, or ask for optimizer.companion before a forward pass with other parameters (functional_call)"
)


class CompanionOptimizer:
    """Trains the companion as the base optimizer trains the model: class, options, groups, schedule.

    An optimizer that was built by a callable is left alone.

    Args:
        base: the model's optimizer.
        groups: the companion's parameters, a list for each of the base's groups.
        make: the callable; None for an optimizer like the base.
        lr_scale: the companion's learning rate divided by the base's.
    """

    def __init__(
        self, base: Optimizer, groups: list[list[nn.Parameter]], make: MakeOptimizer | None, lr_scale: float
    ) -> None:
        self._base = base
        self._follows = make is None
        self._lr_scale = lr_scale
        trained = [parameter for group in groups for parameter in group]
        if not trained:
            raise ValueError(NOTHING_TO_TRAIN)
        if make is None:
            self.optimizer = build_like(base, groups, lr_scale)
        else:
            self.optimizer = make(trained)
            if not isinstance(self.optimizer, Optimizer):
                raise TypeError(f"companion_optimizer must build an optimizer, but returned {self.optimizer!r}")
        self.note_options()

    def follow_options(self) -> None:
        """Copy what the script has changed in the base's groups since its last step."""
        if not self._follows:
            return
        for theirs, ours, seen in zip(self._base.param_groups, self.optimizer.param_groups, self._seen, strict=False):
            for key, value in theirs.items():
                is_lr_tensor = key == "lr" and isinstance(value, Tensor) and isinstance(ours["lr"], Tensor)
                if is_lr_tensor:  # which is filled in place: a captured step holds on to it
                    ours["lr"].copy_(value * self._lr_scale)
                elif key not in NO_OPTIONS and value is not seen.get(key):
                    ours[key] = _option(key, value, self._lr_scale)

    def note_options(self) -> None:
        """Remember the base's options: what differs from them at the next step is the script's doing."""
        self._seen = [dict(group) for group in self._base.param_groups]

    def step(self) -> None:
        """Step, with random draws that the script's generators do not notice."""
        with noting(f"This was raised in the step of the companion's optimizer: {PASS_ANOTHER}"):
            if type(self.optimizer).__module__.startswith("torch.optim"):  # none of which draws
                self.optimizer.step()
                return
            with replayed(capture_rng(next(parameters_of(self.optimizer)).device)):
                self.optimizer.step()

    def fill_gradients(self) -> None:
        """Give a gradient of zero to each parameter that has none."""
        for parameter in without_gradient(self.optimizer):
            parameter.grad = torch.zeros_like(parameter)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, its parameters by number as text: torch.distributed.checkpoint makes all keys so."""
        return _with_keys(str, self.optimizer.state_dict())

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise ValueError if a saved state is not of this optimizer's groups."""
        own = self.optimizer.state_dict()
        if "param_groups" not in own:  # it wraps another optimizer, whose groups are somewhere inside
            return
        expected = [len(group["params"]) for group in own["param_groups"]]
        found = [len(group["params"]) for group in state.get("param_groups", [])]
        if found != expected:
            raise ValueError(
                f"the state of the companion's optimizer has groups of {found} parameters, not {expected}: freeze the "
                "parameters that were frozen when it was saved, load, and unfreeze them"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state that :meth:`check_state` let pass."""
        numbers = _with_keys(lambda key: int(key) if isinstance(key, str) and key.isdigit() else key, state)
        self.optimizer.load_state_dict(numbers)


def _with_keys(convert: Callable[[Any], Any], state: dict[str, Any]) -> dict[str, Any]:
    if "state" not in state:
        return state
    return state | {"state": {convert(key): value for key, value in state["state"].items()}}


def _option(key: str, value: Any, lr_scale: float) -> Any:
    if key == "lr" and lr_scale != 1:
        return value * lr_scale
    # A tensor that both held, one would count up for the other: timm's Lamb counts its steps in its groups.
    return value.clone() if isinstance(value, Tensor) else value


def try_to_build(base: Optimizer, make: MakeOptimizer | None) -> None:
    """Raise, before there is a companion, if no optimizer can be built for it."""
    if make is not None:
        if not callable(make) or isinstance(make, Optimizer):
            raise TypeError(f"companion_optimizer must be a callable that builds one from parameters, got {make!r}")
        return
    # With parameters of one element, which costs nothing, of as many dimensions, which some optimizers ask for (Muon).
    groups = [
        [nn.Parameter(torch.zeros([1] * max(p.ndim, 1), dtype=p.dtype, device=p.device)) for p in group["params"]]
        for group in base.param_groups
    ]
    build_like(base, groups)


def build_like(base: Optimizer, parameters: list[list[nn.Parameter]], lr_scale: float = 1.0) -> Optimizer:
    """Build an optimizer of the base's class and settings over other parameters; what it draws is undone."""
    groups: list[dict[str, Any]] = []
    for group, own in zip(base.param_groups, parameters, strict=True):
        options = {key: _option(key, value, lr_scale) for key, value in group.items() if key not in NO_OPTIONS}
        groups.append(options | {"params": own})
    base = inner_of(base)
    kind = type(base)
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{kind.__name__} cannot train the companion: it steps with a closure only, and the companion has none; "
            + PASS_ANOTHER
        )
    accepted = inspect.signature(kind.__init__).parameters
    known = {key: value for key, value in vars(base).items() if _is_setting(value)} | base.defaults
    try:
        with replayed(capture_rng(next(parameters_of(base)).device)):
            return kind(groups, **{key: value for key, value in known.items() if key in accepted})
    except Exception as error:
        raise ValueError(
            f"a second {kind.__name__} for the companion could not be built ({error!r}); {PASS_ANOTHER}"
        ) from error


def _is_setting(value: Any) -> bool:
    """Whether an attribute may be what a constructor was given: some keep part of it outside ``defaults``."""
    if isinstance(value, tuple):
        return all(map(_is_setting, value))
    plain = isinstance(value, (bool, int, float, str, torch.dtype, type(None)))
    return plain or inspect.isroutine(value) or inspect.isclass(value)


@contextmanager
def noting(note: str) -> Iterator[None]:
    """Add a note to an error in the block, which Python knows from 3.11 on."""
    try:
        yield
    except Exception as error:
        if hasattr(error, "add_note"):
            error.add_note(note)
        raise
