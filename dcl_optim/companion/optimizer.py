"""The companion's optimizer: a second one of the base's class, whose groups follow the base's at every step.

What the script changes in the base's groups (a schedule, a momentum cycle) reaches the companion's. What an optimizer
counts in its own groups (Schedule-Free's averages, Prodigy's estimates) stays each one's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
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
NO_SECOND = "a second {} for the companion could not be built ({}); " + PASS_ANOTHER
NO_OPTIMIZER = "companion_optimizer must be an optimizer, a callable that builds one, or None, got {!r}"
NOTHING_TO_TRAIN = "companion has no parameter to train: none has requires_grad=True and is in the optimizer"


class CompanionOptimizer:
    """Trains the companion as the base optimizer trains the model: class, hyper-parameters, groups, schedule.

    There is one group for each of the base's, in the same order, and in it a slot for each of its parameters: the
    companion's parameter of the same name where it trains one, an empty placeholder otherwise (a frozen parameter that
    is shared, a parameter that is not the model's). So what is unfrozen later finds its place, and a checkpoint does
    not depend on when that was. Parameters of another architecture, whose names the model does not know, come after
    those of the first group. An optimizer that was given, or built by a callable that was, is left alone; what was
    unfrozen since wrapping, whose parameters then trained are named in ``first``, is a further group of it.
    """

    def __init__(
        self,
        base: Optimizer,
        model: nn.Module,
        companion: nn.Module,
        lr_scale: float,
        given: Optimizer | MakeOptimizer | None,
        is_copy: bool,
        first: list[str],
    ) -> None:
        self.base, self._model, self._companion = base, model, companion
        self._lr_scale, self._is_given, self._is_copy = lr_scale, given is not None, is_copy
        self._placeholders: dict[int, nn.Parameter] = {}  # by the base's parameter
        self._seen: list[dict[str, Any]] = []  # the base's options after its last step
        self._versions: list[dict[str, int]] = []  # how often those that are tensors had been written to
        self.optimizer = self._build(given, set(first))
        self._draws_nothing = is_torchs_own(self.optimizer)

    def _build(self, given: Optimizer | MakeOptimizer | None, first: set[str]) -> Optimizer:
        groups = self._slots()
        trained = [p for group in groups for p in group if p.requires_grad]
        if not trained:
            raise ValueError(NOTHING_TO_TRAIN)
        if given is None:
            self.note_options()
            return build_like(self.base, [self._options(i) | {"params": group} for i, group in enumerate(groups)])
        later: list[nn.Parameter] = []
        if self._is_copy:  # also in a resumed script, which makes its copy at another time, the groups are these
            names = {id(p): name for name, p in self._companion.named_parameters()}
            at_wrapping = [p for p in trained if names[id(p)] in first]
            if at_wrapping:
                later, trained = [p for p in trained if names[id(p)] not in first], at_wrapping
        built = given if isinstance(given, Optimizer) or not callable(given) else given(trained)
        if not isinstance(built, Optimizer):
            raise TypeError(NO_OPTIMIZER.format(built))
        if built is given and not {id(p) for p in trained} & {id(p) for p in parameters_of(built)}:
            raise ValueError("companion_optimizer holds none of the companion's parameters")
        if later:
            built.add_param_group({"params": later})
        return built

    def _slots(self) -> list[list[nn.Parameter]]:
        """The companion's parameter for each of the base's, group by group."""
        names = {id(p): name for name, p in self._model.named_parameters()}
        own = {name: p for name, p in self._companion.named_parameters() if p.requires_grad and id(p) not in names}
        groups = []
        for group in self.base.param_groups:
            pairs = [(p, own.pop(names.get(id(p), ""), None)) for p in group["params"]]
            groups.append([self._placeholder(p) if found is None else found for p, found in pairs])
        if not self._is_copy:
            known = set(names.values())
            groups[0] += [p for name, p in own.items() if name not in known]
        return groups

    def _placeholder(self, parameter: Tensor) -> nn.Parameter:
        if id(parameter) not in self._placeholders:  # of as many dimensions, which some optimizers ask for (Muon)
            shape = [0] * max(parameter.ndim, 1)
            empty = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
            self._placeholders[id(parameter)] = nn.Parameter(empty, requires_grad=False)
        return self._placeholders[id(parameter)]

    def _options(self, index: int) -> dict[str, Any]:
        group = self.base.param_groups[index]
        return {key: self._option(key, value) for key, value in group.items() if key not in NO_OPTIONS}

    def _option(self, key: str, value: Any) -> Any:
        if key == "lr" and self._lr_scale != 1:
            return value * self._lr_scale
        # A tensor that both held, one would count up for the other: timm's Lamb counts its steps in its groups.
        return value.clone() if isinstance(value, Tensor) else value

    # ---- following the base ------------------------------------------------------------------------------------------

    def follow_options(self) -> None:
        """Copy what the script has changed in the base's groups since its last step."""
        if self._is_given:
            return
        for index, (theirs, ours) in enumerate(zip(self.base.param_groups, self.optimizer.param_groups, strict=False)):
            seen, versions = self._seen[index], self._versions[index]
            if not versions and len(theirs) == len(seen) and all(map(is_, theirs.values(), seen.values())):
                continue
            for key, value in theirs.items():
                if key not in NO_OPTIONS and not (key in seen and _is_same(value, seen[key], versions.get(key, 0))):
                    _put(ours, key, self._option(key, value))

    def note_options(self) -> None:
        """Remember the base's options: what differs from them at the next step is the script's doing."""
        seen, all_versions = list(map(dict, self.base.param_groups)), []
        for group in seen:
            versions = {}
            for key, value in group.items():
                if isinstance(value, Tensor):
                    versions[key] = version_of(value)
            all_versions.append(versions)
        self._seen, self._versions = seen, all_versions  # both or, after Ctrl-C, neither

    def follow_parameters(self) -> None:
        """Train the parameters that the companion has gained, each in its counterpart's slot."""
        if self._is_given:
            held = {id(p) for p in parameters_of(self.optimizer)}
            fresh = [p for group in self._slots() for p in group if p.requires_grad and id(p) not in held]
            if fresh:
                self.optimizer.add_param_group({"params": fresh})
            return
        for index, slots in enumerate(self._slots()):
            if index == len(self.optimizer.param_groups):
                self.optimizer.add_param_group(self._options(index) | {"params": slots})
                self._seen.append(dict(self.base.param_groups[index]))
                self._versions.append({})
                continue
            ours = self.optimizer.param_groups[index]["params"]
            for place, parameter in enumerate(slots):
                if place == len(ours):
                    ours.append(parameter)
                elif ours[place] is not parameter:
                    self._replace(index, place, parameter)

    def _replace(self, index: int, place: int, parameter: nn.Parameter) -> None:
        """Put a parameter in a slot, with the state that a constructor makes, where one does (SaRA)."""
        ours = self.optimizer.param_groups[index]["params"]
        former, ours[place] = ours[place], parameter
        if self.optimizer.state.pop(former, None) and parameter.requires_grad:
            made = build_like(self.base, [self._options(index) | {"params": [parameter]}]).state
            self.optimizer.state.update({parameter: made[parameter]} if parameter in made else {})

    # ---- stepping ----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Step, with random draws that the script's generators do not notice."""
        state = {} if self._draws_nothing else _rng.capture(next(parameters_of(self.optimizer)).device)
        try:
            self.optimizer.step()
        except Exception as error:
            kind = type(self.optimizer).__name__
            raise RuntimeError(
                f"the companion's optimizer, a {kind}, could not step ({error}); {PASS_ANOTHER}"
            ) from error
        finally:
            if state:
                _rng.restore(state)

    def fill_gradients(self) -> None:
        """Give a gradient of zero to each parameter that has none."""
        for parameter in without_gradient(self.optimizer):
            if parameter.requires_grad:  # not in the placeholders
                parameter.grad = torch.zeros_like(parameter)

    # ---- the state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, its parameters by number as text: torch.distributed.checkpoint makes all keys so."""
        return _with_keys(str, self.optimizer.state_dict())

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise ValueError if a saved state is not of this optimizer's groups."""
        sizes = [len(group["params"]) for group in self.optimizer.state_dict().get("param_groups", [])]
        found = [len(group["params"]) for group in state.get("param_groups", [])]
        if found != sizes:
            raise ValueError(f"the state of the companion's optimizer has groups of {found} parameters, not {sizes}")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state that :meth:`check_state` let pass."""
        numbers = _with_keys(lambda key: int(key) if isinstance(key, str) and key.isdigit() else key, state)
        self.optimizer.load_state_dict(numbers)

    def cast_state(self) -> None:
        """Bring the state to the parameters' device and dtype."""
        self.optimizer.load_state_dict(self.optimizer.state_dict())


def _with_keys(convert: Callable[[Any], Any], state: dict[str, Any]) -> dict[str, Any]:
    if "state" not in state:
        return state
    return state | {"state": {convert(key): value for key, value in state["state"].items()}}


def _is_same(value: Any, seen: Any, version: int) -> bool:
    """Whether an option is untouched; of a tensor without a look at its values, which would synchronise a device."""
    if isinstance(value, Tensor) or isinstance(seen, Tensor):
        return value is seen and version_of(value) == version
    return bool(value == seen)


def _put(group: dict[str, Any], key: str, value: Any) -> None:
    if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
        group[key].copy_(value)  # in place: a captured or compiled step holds on to the tensor
    else:
        group[key] = value


def _is_setting(value: Any) -> bool:
    """Whether an attribute may be what a constructor was given: some keep part of it outside ``defaults``."""
    if isinstance(value, tuple):
        return all(_is_setting(item) for item in value)
    if isinstance(value, (bool, int, float, str, torch.dtype, type(None))):
        return True
    return inspect.isroutine(value) or inspect.isclass(value)


def check_for_copy(base: Optimizer, model: nn.Module, given: Optimizer | MakeOptimizer | None) -> None:
    """Refuse, before there is a copy of the model, what cannot train one."""
    theirs = set(map(id, model.parameters()))
    if not any(parameter.requires_grad and id(parameter) in theirs for parameter in parameters_of(base)):
        raise ValueError(NOTHING_TO_TRAIN)
    if given is None:
        # A trial with parameters of one element, which costs nothing; the draws of some constructors are undone.
        options = [{key: value for key, value in group.items() if key not in NO_OPTIONS} for group in base.param_groups]
        parameters = [{"params": list(map(_of_one_element, group["params"]))} for group in base.param_groups]
        groups = [one | other for one, other in zip(options, parameters, strict=True)]
        with _rng.replayed(_rng.capture(next(parameters_of(base)).device)):
            build_like(base, groups)
    elif isinstance(given, Optimizer):
        raise ValueError(
            "companion_optimizer holds none of the companion's parameters, since a copy of the model is made later: "
            "pass a callable that builds the optimizer from parameters, or companion= too"
        )
    elif not callable(given):
        raise TypeError(NO_OPTIMIZER.format(given))


def _of_one_element(parameter: Tensor) -> nn.Parameter:
    values = torch.zeros([1] * parameter.ndim, dtype=parameter.dtype, device=parameter.device)
    return nn.Parameter(values, requires_grad=parameter.requires_grad)


def _constructor_arguments(base: Optimizer) -> tuple[Optimizer, dict[str, Any]]:
    """The optimizer to build a second one of, and the arguments for its constructor."""
    if isinstance(base, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS cannot train the companion: it evaluates its objective again and again, and the companion has one "
            f"forward a batch; {PASS_ANOTHER}"
        )
    base = inner_of(base)
    closure = inspect.signature(type(base).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(f"{type(base).__name__} steps with a closure only, and the companion has none; {PASS_ANOTHER}")
    accepted = inspect.signature(type(base).__init__).parameters
    known = {key: value for key, value in vars(base).items() if _is_setting(value)} | base.defaults
    return base, {key: value for key, value in known.items() if key in accepted}


def build_like(base: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """Build an optimizer of the base's class and settings over other groups."""
    base, settings = _constructor_arguments(base)
    try:
        return type(base)(groups, **settings)
    except Exception as error:
        raise ValueError(NO_SECOND.format(type(base).__name__, error)) from error
