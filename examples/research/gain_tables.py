"""Markdown tables of gains: by experiment, setting (p values corrected) and measure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.table import grid
from dcl_optim.trial.paired import holm, mean_and_error, plus_minus, probability_cell
from examples.research.gains import CE, Gain, Row, gain, gain_in_all, values
from examples.research.records import Record

ACCURACY = "accuracy, %"
SHOWN = 0.01  # the corrected p below which a gain counts as shown


def by_experiment(
    columns: Mapping[str, Sequence[Record]],
    rows: Mapping[str, Row],
    together: Mapping[str, Sequence[Sequence[Record]]] | None = None,
) -> str:
    """CE's accuracy in training and in the test, and the gain of each row over CE, a column for each experiment.

    In training it is that on the labels that were trained on, noise included.

    Args:
        columns: the records by the head of their column.
        rows: what is compared with CE, by its name in the table.
        together: further columns, of the pairs of several experiments with the p of the paired t-test, corrected for
            the rows. Default: none.
    """
    lines = [
        ["CE, training images, %", *(_mean(found, "train accuracy, %") for found in columns.values())],
        ["CE, test images, %", *(_mean(found, ACCURACY) for found in columns.values())],
    ]
    for name, row in rows.items():
        lines.append([f"{name}, minus CE", *(_cell(gain(found, row, CE)) for found in columns.values())])
    heads = ["", *columns]
    for head, experiments in (together or {}).items():
        gains = {name: gain_in_all(experiments, row, CE) for name, row in rows.items()}
        p = holm({name: one.p for name, one in gains.items() if one and one.p is not None})
        cells = [["", ""], ["", ""], *([_cell(one), probability_cell(p.get(name))] for name, one in gains.items())]
        lines = [[*line, *added] for line, added in zip(lines, cells, strict=True)]
        heads += [head, "p"]
    return "\n".join(grid(heads, lines, words=1))


def by_setting(settings: Mapping[str, Sequence[Record]], rows: Mapping[str, Row], *, bold: bool = False) -> str:
    """CE's accuracy and the gains over it in each setting, with p values corrected for all cells of the table.

    Args:
        settings: the records of each, by its name.
        rows: what is compared with CE, by its name in the table.
        bold: print gains with a corrected p below ``SHOWN`` in bold, in place of the columns of p.
    """
    gains = {(title, name): gain(found, row, CE) for title, found in settings.items() for name, row in rows.items()}
    p = holm({f"{title}\n{name}": one.p for (title, name), one in gains.items() if one and one.p is not None})
    lines = []
    for title, found in settings.items():
        cells = [title, _mean(found, ACCURACY)]
        for name in rows:
            cell, probability = _cell(gains[title, name]), p.get(f"{title}\n{name}")
            if bold:
                cells.append(f"**{cell}**" if probability is not None and probability < SHOWN else cell)
            else:
                cells += [cell, probability_cell(probability)]
        lines.append([*cells, str(len(values(found, CE, ACCURACY)))])
    head = ["", "CE, %", *(part for name in rows for part in (f"{name}, minus CE", "p")[: 1 if bold else 2]), "seeds"]
    return "\n".join(grid(head, lines, words=1))


def by_measure(found: Sequence[Record], rows: Mapping[str, Row], measures: Sequence[str]) -> str:
    """Each measure of CE, and its difference to CE of each row."""
    places = {measure: 2 if measure.endswith("%") else 3 for measure in measures}
    lines = [["CE", *(_mean(found, measure, places[measure]) for measure in measures)]]
    for name, row in rows.items():
        cells = [_cell(gain(found, row, CE, measure), places[measure]) for measure in measures]
        lines.append([f"{name}, minus CE", *cells])
    return "\n".join(grid(["", *measures], lines, words=1))


def _mean(found: Sequence[Record], measure: str, places: int = 2) -> str:
    known = list(values(found, CE, measure).values())
    return plus_minus(*mean_and_error(known), places=places) if known else ""


def _cell(found: Gain | None, places: int = 2) -> str:
    return "" if found is None else plus_minus(found.mean, found.error, sign="+", places=places)
