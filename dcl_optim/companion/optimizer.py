"""The companion's optimizer: a second one of the base's class, whose groups follow the base's at every step.

What the script changes in the base's groups (a schedule, a momentum cycle) reaches the companion's. What an optimizer
counts in its own groups (Schedule-Free's averages, Prodigy's estimates) stays each one's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dcl_optim import _rng
from dcl_optim._optim import inner_of, is_torchs_own, parameters_of, without_gradient
from dcl_optim._torch import version_of

MakeOptimizer = Callable[[Iterable[Any]], Optimizer]

NO_OPTIONS = ("params", "param_names")  # what a group holds in addition to its options
PASS_ANOTHER = "pass companion_optimizer=<callable that builds another optimizer from parameters>"
NO_OPTIMIZER = "companion_optimizer must be an optimizer, a callable that builds one, or None, got {!r}"
MOVED_GROUPS = "parameter groups were removed or changed places, which the companion cannot do: wrap the model again"
NOTHING_TO_TRAIN = (
    "companion has no parameter to train: none has requires_grad=True and is in the optimizer.\n"
    "  Fix: unfreeze one, or ask for optimizer.companion before a forward pass with other parameters (functional_call)"
)


@dataclass(frozen=True)
class CompanionOptions:
    """What :class:`~dcl_optim.DCLOptimizer` says of the companion; see there."""

    companion: nn.Module | Callable[[], nn.Module] | None = None
    optimizer: Optimizer | MakeOptimizer | None = None
    lr_scale: float = 1.0
    every: int = 1
    process_group: Any = "auto"


class CompanionOptimizer:
    """Trains the companion as the base optimizer trains the model: class, hyper-parameters, groups, schedule.

    There is one group for each of the base's, in the same order, and in it a slot for each of its parameters: the
    companion's parameter of the same name where it trains one, an empty placeholder otherwise (a frozen or foreign
    parameter). So what is unfrozen later finds its place, and a checkpoint does not depend on when that was. Parameters
    whose names the model does not know come after those of the first group. An optimizer that was given, or built by a
    callable that was, is left alone; what is unfrozen later is a further group of it.
    """

    def __init__(self, base: Optimizer, model: nn.Module, companion: nn.Module, options: CompanionOptions) -> None:
        self._base, self._model, self._companion = base, model, companion
        self.is_copy, self._is_given = options.companion is None, options.optimizer is not None
        self._lr_scale = options.lr_scale
        # The base's options after its last step, and how often tensors among them had been written to.
        self._seen: list[tuple[dict[str, Any], dict[str, int]]] = []
        self.optimizer = self._build(options.optimizer)
        self._draws_nothing = is_torchs_own(self.optimizer)
        self.note_options()

    def _build(self, given: Optimizer | MakeOptimizer | None) -> Optimizer:
        slots = self._slots()
        trained = [p for group in slots for p in group if p.requires_grad]
        if not trained:
            raise ValueError(NOTHING_TO_TRAIN)
        if given is None:
            return build_like(self._base, slots, self._lr_scale)
        built = given if isinstance(given, Optimizer) or not callable(given) else given(trained)
        if not isinstance(built, Optimizer):
            raise TypeError(NO_OPTIMIZER.format(built))
        if built is given and not {id(p) for p in trained} & {id(p) for p in parameters_of(built)}:
            raise ValueError("companion_optimizer holds none of the companion's parameters")
        return built

    def _slots(self) -> list[list[nn.Parameter]]:
        """The companion's parameter for each of the base's, group by group."""
        names = {id(p): name for name, p in self._model.named_parameters()}
        own = {name: p for name, p in self._companion.named_parameters() if p.requires_grad and id(p) not in names}
        groups = []
        for group in self._base.param_groups:
            pairs = [(p, own.pop(names.get(id(p), ""), None)) for p in group["params"]]
            groups.append([_stand_in(p, 0, trained=False) if found is None else found for p, found in pairs])
        if not self.is_copy:
            known = set(names.values())
            groups[0] += [p for name, p in own.items() if name not in known]
        return groups

    def follow_options(self) -> None:
        """Copy what the script has changed in the base's groups since its last step."""
        if self._is_given:
            return
        if len(self._base.param_groups) < len(self._seen):
            raise RuntimeError(MOVED_GROUPS)
        groups = zip(self._base.param_groups, self.optimizer.param_groups, self._seen, strict=False)
        for theirs, ours, (seen, versions) in groups:
            if not versions and len(theirs) == len(seen) and all(map(is_, theirs.values(), seen.values())):
                continue
            if theirs["params"] is not seen["params"]:
                raise RuntimeError(MOVED_GROUPS)
            for key, value in theirs.items():
                if key not in NO_OPTIONS and not (key in seen and _is_same(value, seen[key], versions.get(key, 0))):
                    _put(ours, key, _option(key, value, self._lr_scale))

    def note_options(self) -> None:
        """Remember the base's options: what differs from them at the next step is the script's doing."""
        self._seen = [
            (dict(group), {key: version_of(value) for key, value in group.items() if isinstance(value, Tensor)})
            for group in self._base.param_groups
        ]

    def check(self) -> None:
        """Raise ValueError, before anything changes, if :meth:`follow_parameters` could not build an optimizer."""
        self.follow_options()
        if not self._is_given:
            check_for_copy(self._base, self._model, None)

    def follow_parameters(self) -> None:
        """Train the parameters that the companion has gained, each in its counterpart's slot."""
        ours, slots = self.optimizer, self._slots()
        held = set(map(id, parameters_of(ours)))
        if self._is_given:
            fresh = [p for group in slots for p in group if p.requires_grad and id(p) not in held]
            if fresh:
                ours.add_param_group({"params": fresh})
            return
        # The constructor gets the new parameters alone: some register hooks on theirs, or give them a state.
        parts = [[_stand_in(p, 1, p.requires_grad) if id(p) in held else p for p in group] for group in slots]
        built, former = build_like(self._base, parts, self._lr_scale), len(ours.param_groups)
        for group, now in zip(ours.param_groups, slots, strict=False):
            group["params"][:] = now
        for group in built.param_groups[former:]:
            ours.add_param_group(group)
        self._seen += [(dict(group), {}) for group in self._base.param_groups[former:]]
        held = set(map(id, parameters_of(ours)))
        for emptied in [key for key in ours.state if isinstance(key, Tensor) and id(key) not in held]:
            del ours.state[emptied]
        for parameter, state in built.state.items():
            if id(parameter) in held:
                ours.state.setdefault(parameter, state)

    def step(self) -> None:
        """Step, with random draws that the script's generators do not notice."""
        state = {} if self._draws_nothing else _rng.capture(next(parameters_of(self.optimizer)).device)
        try:
            self.optimizer.step()
        except Exception as error:
            add_note(error, f"This was raised in the step of the companion's optimizer: {PASS_ANOTHER}")
            raise
        finally:
            if state:
                _rng.restore(state)

    def fill_gradients(self) -> None:
        """Give a gradient of zero to each parameter that has none."""
        for parameter in without_gradient(self.optimizer):
            if parameter.requires_grad:  # not in the placeholders
                parameter.grad = torch.zeros_like(parameter)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, its parameters by number as text: torch.distributed.checkpoint makes all keys so."""
        return _with_keys(str, self.optimizer.state_dict())

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise ValueError if a saved state is not of this optimizer's groups."""
        expected, found = (
            [len(group["params"]) for group in one.get("param_groups", [])]
            for one in (self.optimizer.state_dict(), state)
        )
        if found != expected:
            raise ValueError(f"the state of the companion's optimizer has groups of {found} parameters, not {expected}")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state that :meth:`check_state` let pass."""
        numbers = _with_keys(lambda key: int(key) if isinstance(key, str) and key.isdigit() else key, state)
        self.optimizer.load_state_dict(numbers)


def _with_keys(convert: Callable[[Any], Any], state: dict[str, Any]) -> dict[str, Any]:
    if "state" not in state:
        return state
    return state | {"state": {convert(key): value for key, value in state["state"].items()}}


def _is_same(value: Any, seen: Any, version: int) -> bool:
    """Whether an option is untouched; a comparison of a tensor's values would synchronize a device."""
    if isinstance(value, Tensor) or isinstance(seen, Tensor):
        return value is seen and version_of(value) == version
    return bool(value == seen)


def _option(key: str, value: Any, lr_scale: float) -> Any:
    if key == "lr" and lr_scale != 1:
        return value * lr_scale
    # A tensor that both held, one would count up for the other: timm's Lamb counts its steps in its groups.
    return value.clone() if isinstance(value, Tensor) else value


def _put(group: dict[str, Any], key: str, value: Any) -> None:
    if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
        group[key].copy_(value)  # in place: a captured or compiled step holds on to the tensor
    else:
        group[key] = value


def _stand_in(parameter: Tensor, length: int, trained: bool) -> nn.Parameter:
    """A parameter of as many dimensions, which some optimizers ask for (Muon), all of one length."""
    values = torch.zeros([length] * max(parameter.ndim, 1), dtype=parameter.dtype, device=parameter.device)
    return nn.Parameter(values, requires_grad=trained)


def check_for_copy(base: Optimizer, model: nn.Module, given: Optimizer | MakeOptimizer | None) -> None:
    """Refuse, before there is a copy of the model, what cannot train one."""
    theirs = set(map(id, model.parameters()))
    if not any(parameter.requires_grad and id(parameter) in theirs for parameter in parameters_of(base)):
        raise ValueError(NOTHING_TO_TRAIN)
    if given is None:  # a trial with parameters of one element, which costs nothing
        build_like(base, [[_stand_in(p, 1, p.requires_grad) for p in group["params"]] for group in base.param_groups])
    elif isinstance(given, Optimizer):
        raise ValueError(
            "companion_optimizer holds none of the companion's parameters, since a copy of the model is made later: "
            "pass a callable that builds the optimizer from parameters, or companion= too"
        )
    elif not callable(given):
        raise TypeError(NO_OPTIMIZER.format(given))


def _is_setting(value: Any) -> bool:
    """Whether an attribute may be what a constructor was given: some keep part of it outside ``defaults``."""
    if isinstance(value, tuple):
        return all(map(_is_setting, value))
    plain = isinstance(value, (bool, int, float, str, torch.dtype, type(None)))
    return plain or inspect.isroutine(value) or inspect.isclass(value)


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
        with _rng.replayed(_rng.capture(next(parameters_of(base)).device)):
            return kind(groups, **{key: value for key, value in known.items() if key in accepted})
    except Exception as error:
        raise ValueError(
            f"a second {kind.__name__} for the companion could not be built ({error}); {PASS_ANOTHER}"
        ) from error


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception, which Python knows from 3.11 on."""
    if hasattr(error, "add_note"):
        error.add_note(note)
