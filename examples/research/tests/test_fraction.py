"""The criterion of the fractions, by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.research import fraction


def write(folder: Path, changes: dict[float, list[float]], predictor: str = "model") -> None:
    """Two settings of four seeds whose accuracies differ from f = 1 by these points in both, for one predictor."""
    for name in list(fraction.SETTINGS)[:2]:
        lines = []
        for seed in range(4):
            for share in fraction.FRACTIONS:
                accuracy = dict.fromkeys(fraction.PREDICTORS, 0.8 + 0.01 * seed)
                accuracy[predictor] += changes.get(share, [0.0] * 4)[seed] / 100
                lines.append(json.dumps({"label": fraction.label_of(share), "seed": seed, "accuracy": accuracy}))
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(fraction.records, "COMMITTED", tmp_path / "none")
    return tmp_path


@pytest.mark.parametrize("predictor", fraction.PREDICTORS)
@pytest.mark.parametrize(
    ("points", "passes", "is_behind"),
    [
        ([0.1, -0.1, 0.2, -0.2], True, False),
        ([-0.4, -0.6, 0.4, -0.4], True, False),  # -0.25 in the mean, not shown
        ([-0.9, 0.5, -1.1, -0.1], False, False),  # -0.4, not shown
        ([-0.2, -0.21, -0.2, -0.19], False, True),  # -0.2, but in each seed
        ([0.9, 0.91, 0.9, 0.89], True, False),  # ahead in each seed
    ],
)
def test_a_fraction_passes_unless_a_mean_or_a_setting_is_behind(
    folder: Path, points: list[float], passes: bool, is_behind: bool, predictor: str
) -> None:
    write(folder, {0.5: points}, predictor)
    assert fraction.passes(folder, 0.5) is passes
    titles = [title for title, _ in list(fraction.SETTINGS.values())[:2]]
    assert set(fraction.behind(folder, 0.5)) == ({f"{title}, {predictor}" for title in titles} if is_behind else set())
    assert fraction.passes(folder, 0.25)
