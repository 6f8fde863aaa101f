"""The training methods that are compared, by name."""

from __future__ import annotations

from typing import Any

from examples.research.methods.base import Method, Setting
from examples.research.methods.class_wise import ClassWiseDistillation
from examples.research.methods.companion import CompanionLearning, CompanionPrototype
from examples.research.methods.ensembles import Bagging, Snapshot, Voting
from examples.research.methods.mean_teacher import MeanTeacher, MeanTeacherByLine
from examples.research.methods.mutual import MutualLearning
from examples.research.methods.plain import Plain
from examples.research.methods.self_distillation import SelfDistillation
from examples.research.methods.sharpness import GradientNormAware
from examples.research.methods.sharpness_free import SharpnessFree

METHODS: dict[str, type[Method]] = {
    "plain": Plain,
    "dcl": CompanionLearning,
    "dcp": CompanionPrototype,
    "cs-kd": ClassWiseDistillation,
    "gam": GradientNormAware,
    "saf": SharpnessFree,
    "dml": MutualLearning,
    "ps-kd": SelfDistillation,
    "mean-teacher": MeanTeacher,
    "mean-teacher-by-line": MeanTeacherByLine,
    "voting": Voting,
    "bagging": Bagging,
    "snapshot": Snapshot,
}
NAMES = tuple(METHODS)

__all__ = ["METHODS", "NAMES", "Method", "Setting", "make"]


def make(name: str, setting: Setting, **options: Any) -> Method:
    """Set a method up by name.

    Args:
        name: one of NAMES.
        setting: what it trains with.
        options: the method's own; see its class.

    Raises:
        ValueError: an unknown name or option, or an option out of range.
    """
    if name not in METHODS:
        raise ValueError(f"method {name!r} is unknown; choose one of {', '.join(NAMES)}")
    known = METHODS[name].options()
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(f"method {name!r} has no option {', '.join(unknown)}; it has {', '.join(known) or 'none'}")
    return METHODS[name](setting, **options)
