"""How strong the penalty is to be: rules for its weight, and ways in which prototypes learn, on validation images.

The rules were chosen on the settings of CHOICE. CONFIRMATION was named before any of its runs was made.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from examples.paper.configuration import Configuration, Experiment
from examples.paper.evidence import KANJI, SCRIPTS, TITLES
from examples.paper.pays import DEBIAN, DEBIAN_ADAMW, FASHION, TEXT

DIGITS = Configuration("digits", "small-cnn", "plain", epochs=100, batch_size=32, lr=0.05)

CHOICE: dict[str, tuple[str, Configuration]] = {
    "kanji": (f"{TITLES['kanji']}, 4,000 steps", KANJI),
    "noise": (f"{TITLES['kanji']}, 20 % wrong labels", replace(KANJI, label_noise=0.2)),
    "scripts": (f"{TITLES['scripts']}, 4,000 steps", SCRIPTS),
    "debian-adamw": (f"{TEXT}, AdamW", DEBIAN_ADAMW),
}
CONFIRMATION: dict[str, tuple[str, Configuration]] = {
    "kanji-480": (f"{TITLES['kanji']}, 480 images", replace(KANJI, train_size=480, epochs=267)),
    "kanji-1k": (f"{TITLES['kanji']}, 1,000 steps", replace(KANJI, epochs=40)),
    "debian": (TEXT, DEBIAN),
    "fashion-5k": ("Fashion-MNIST, 5,000 images", replace(FASHION, averages=())),
    "digits": ("digits", DIGITS),
    "kanji-16k": (f"{TITLES['kanji']}, 16,000 steps", replace(KANJI, epochs=640)),
    "scripts-16k": (f"{TITLES['scripts']}, 16,000 steps", replace(SCRIPTS, epochs=64)),
    "fashion-50k": ("Fashion-MNIST, 50,000 images", replace(FASHION, train_size=None, epochs=10, averages=())),
}


def _dcp(plain: Configuration, **options: Any) -> Configuration:
    return replace(plain, method="dcp", options={"alpha": 0.97, "update": "rows"} | options)


def _dcl(plain: Configuration, temperature: float, power: float, alpha: float = 0.6) -> Configuration:
    """The divergence at a temperature T, times its square as in distillation, and the accuracy's power."""
    rule = {"signal": "accuracy", "power": power, "floor": 0.0, "factor": temperature**2}
    options = {"alpha": alpha, "distance": "kl", "temperature": temperature, "rule": rule}
    return replace(plain, method="dcl", options=options)


def dcp_rules(plain: Configuration) -> dict[str, Configuration]:
    """Rules for DCP's weight, and other prototypes with one of them."""
    plain = replace(plain, averages=())
    powers = {f"accuracy^{power}": _dcp(plain, weight=f"accuracy^{power}") for power in (3, 6, 9, 12)}
    losses = {f"exp(-loss)^{power}": _dcp(plain, rule={"signal": "loss", "power": power}) for power in (0.5, 1.0)}
    return {
        "CE": plain,
        "λ = 0.1": _dcp(plain, weight=0.1),
        "λ = 1": _dcp(plain, weight=1.0),
        "λ grows linearly to 1": _dcp(plain, weight="ramp"),
        **powers,
        **losses,
        "accuracy^6 by class": _dcp(plain, weight=1.0, prototypes="weights by class"),
        "accuracy^6, batch": _dcp(plain, weight="accuracy^6", update="batch"),
        "accuracy^6, batch means": _dcp(plain, weight="accuracy^6", prototypes="batch means"),
        "accuracy^6, α = 0.9": _dcp(plain, weight="accuracy^6", alpha=0.9),
        "accuracy^6, α = 0.99": _dcp(plain, weight="accuracy^6", alpha=0.99),
    }


def dcl_rules(plain: Configuration) -> dict[str, Configuration]:
    """Temperatures and powers for DCL by divergence."""
    plain = replace(plain, averages=())
    return {
        "CE": plain,
        "mse, λ = 0.1": replace(plain, method="dcl", options={"alpha": 0.6, "weight": 0.1}),
        **{f"KL, T = {temperature}, accuracy^6": _dcl(plain, temperature, 6) for temperature in (2, 4, 8)},
        **{f"KL, T = 2, accuracy^{power}": _dcl(plain, 2, power) for power in (3, 9, 12)},
        "KL, T = 2, accuracy^6, α = 0.9": _dcl(plain, 2, 6, alpha=0.9),
    }


def _growth() -> Experiment:
    """Where the paper's prototypes grow without end: few classes, batch norm, long training."""
    plain = replace(DIGITS, epochs=300)
    chosen = {"weight": 1.0, "alpha": 0.6}
    runs = {update: replace(plain, method="dcp", options=chosen | {"update": update}) for update in ("batch", "rows")}
    return Experiment("DCP with λ = 1 and α = 0.6 on digits, 300 epochs", "validation", 3, "CE", {"CE": plain} | runs)


EXPERIMENTS: dict[str, Experiment] = {
    f"rules-{kind}-{name}": Experiment(
        f"the weight of {kind.upper()}: {title}", "validation", seeds, "CE", rules(plain)
    )
    for name, (title, plain) in (CHOICE | CONFIRMATION).items()
    for kind, seeds, rules in (("dcp", 2, dcp_rules), ("dcl", 1, dcl_rules))
} | {"growth-digits": _growth()}
