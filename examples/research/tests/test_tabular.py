"""Tables of numbers: their parts, and the learning rate that the records of a choice name."""

import pytest
import torch

from examples.research import datasets, records, tabular
from examples.research.datasets import tabular as tables
from examples.research.table import markdown


@pytest.mark.parametrize("name", tables.NAMES)
def test_parts_share_no_row_and_features_are_standardized_by_the_training_rows(name):
    data = datasets.load(name)
    parts = {part: torch.cat([x for x, _ in data.fixed(part)]) for part in ("train", "validation", "test")}
    number = sum(map(len, parts.values()))
    assert [round(len(x) / number, 1) for x in parts.values()] == [0.5, 0.2, 0.3]
    features = parts["train"].squeeze() if data.shape[0] > 1 else parts["train"].reshape(-1, 1)
    assert torch.allclose(features.mean(0), torch.zeros(()), atol=1e-4)
    assert torch.allclose(features.std(0), torch.ones(()), atol=1e-4)
    assert torch.cat([y for _, y in data.fixed("train")]).unique().tolist() == list(range(data.classes))


def test_a_table_takes_no_size():
    with pytest.raises(ValueError, match="train_size and augmentation are not for wine"):
        datasets.load("wine", train_size=5)
    with pytest.raises(ValueError, match="download=True is not possible for wine"):
        datasets.load("wine", download=True)


def test_gaussian_classes_overlap():
    """The best rule, the nearest mean, is right for three rows of four at most."""
    x, y = tables.gaussians()
    means = torch.stack([x[y == label].mean(0) for label in range(5)])
    right = torch.cdist(x, means).argmin(1) == y
    assert 0.6 < right.float().mean() < 0.75


def test_the_best_rate_of_a_choice_is_that_of_the_best_mean():
    def record(rate, seed, accuracy):
        return {"label": tabular.label_of("CE", rate), "seed": seed, "accuracy": {"model": accuracy}}

    made = [record(1.0, 0, 0.9), record(1.0, 1, 0.5), record(1 / 3, 0, 0.8), record(1 / 3, 1, 0.7)]
    assert tabular.best_rate([*made, record(0.1, 0, 0.6), record(0.1, 1, 0.6)]) == 1 / 3
    assert tabular.best_rate([*made, record(0.1, 0, 0.8), record(0.1, 1, 0.7)]) == 1 / 3  # of equal ones the larger


@pytest.mark.parametrize("name", tabular.SETTINGS)
def test_the_learning_rate_is_that_of_the_choice(name):
    made = records.read(records.COMMITTED / f"{tabular.choice_of(name)}.jsonl")
    assert len(made) == len(tabular.RATES) * tabular.CHOICE_SEEDS
    assert tabular.CHOSEN[name] == tabular.best_rate(made)


def test_records_of_accuracies_alone_have_a_table_too():
    name = "tables-wine-5"
    made = records.read(records.COMMITTED / f"{name}.jsonl")
    lines = markdown(tabular.EXPERIMENTS[name], made).splitlines()
    assert len(lines) == 2 + len(tabular.EXPERIMENTS[name].runs)
    assert "|  |  |  |" in lines[2]  # neither other predictors nor consistency nor perplexity
