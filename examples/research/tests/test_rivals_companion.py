"""DCL's default and its controls: the choice by hand, the rows, the tables."""

import copy
import json
from dataclasses import replace

import pytest
import torch

from examples.research import records
from examples.research.configuration import DCL, Configuration
from examples.research.experiments import EXPERIMENTS
from examples.research.rivals import companion, companion_tables, settings, values
from examples.research.rivals.companion import DEFAULT, KEPT, pair_row
from examples.research.rivals.experiments import name_of
from examples.research.tests.test_methods import advance, assert_close, batches, started
from examples.research.tests.test_methods_formulas import by_hand, cross_entropy, descend, normed, twin
from examples.research.tests.test_rivals import cells_of
from examples.research.trainer import Run

A, B, OLD = (0.3, 0.97), (1.0, 0.97), (0.1, 0.6)


def a_record(label, seed, validation, test):
    """A record with accuracies in percent: the model's, or those of all predictors."""
    found = {"label": label, "seed": seed}
    for part, given in (("validation_accuracy", validation), ("accuracy", test)):
        all_of_them = given if isinstance(given, dict) else {"model": given}
        found[part] = {name: value / 100 for name, value in all_of_them.items()}
    return found


def three(model, other, both):
    """The accuracies of DCL's predictors."""
    return {"model": model, "companion": other, "mean of both": both}


def written(folder, experiment, found):
    """Add records to an experiment's file."""
    with (folder / f"{experiment}.jsonl").open("a") as file:
        file.writelines(f"{json.dumps(one)}\n" for one in found)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """A folder without records, and a repository without any."""
    monkeypatch.setattr(records, "COMMITTED", tmp_path / "none")
    return tmp_path


# ---- the choice ------------------------------------------------------------------------------------------------------


def test_scores_are_of_a_predictor_and_the_kept_one_is_the_best_on_validation_images():
    """In seed 0 the companion is the best one, in seed 1 the mean of both is only as good as the model."""
    found = [
        a_record("a", 0, three(50, 60, 55), three(40, 30, 35)),
        a_record("a", 1, three(50, 40, 50), three(41, 31, 36)),
        a_record("CE", 0, 70, 45),
        a_record("a", 2, three(0, 0, 0), three(0, 0, 0)),
    ]
    expected = {
        "model": {0: 40.0, 1: 41.0},
        "companion": {0: 30.0, 1: 31.0},
        "mean of both": {0: 35.0, 1: 36.0},
        KEPT: {0: 30.0, 1: 41.0},
    }
    assert set(expected) == set(companion.PREDICTORS)
    for predictor, of_a in expected.items():
        scores = companion.scores(found, "test", predictor, {0, 1})
        assert scores == {"a": pytest.approx(of_a), "CE": pytest.approx({0: 45.0})}
    validation = companion.scores(found, "validation", KEPT, {0, 1})
    assert validation == {"a": pytest.approx({0: 60.0, 1: 50.0}), "CE": pytest.approx({0: 70.0})}


def test_scores_are_the_models_where_a_row_has_no_such_predictor():
    """The teacher comes first in the records of a training toward the average of the weights."""
    found = [a_record("a", 0, {"teacher": 60, "model": 50}, {"teacher": 45, "model": 35})]
    for predictor, expected in (("companion", 35.0), ("mean of both", 35.0), ("teacher", 45.0), (KEPT, 45.0)):
        assert companion.scores(found, "test", predictor, {0}) == {"a": pytest.approx({0: expected})}


def test_the_model_is_kept_at_a_tie_also_where_another_predictor_comes_first():
    """As the teacher does, which a training toward the average of its weights deploys."""
    assert companion.kept(a_record("a", 0, {"teacher": 50, "model": 50}, 0)) == "model"
    assert companion.kept(a_record("a", 0, {"model": 50, "teacher": 51}, 0)) == "teacher"


def test_tuned_is_what_is_best_on_validation_images_in_what_is_kept(folder):
    """A has the best companion and the worst model; the seed 2 is of no choice."""
    found = [a_record("CE", seed, 50, 50) for seed in (0, 1, 2)]
    for seed in (0, 1):
        found += [
            a_record(pair_row(A), seed, three(40, 60, 50), three(0, 0, 0)),
            a_record(pair_row(B), seed, three(59, 50, 55), three(90, 90, 90)),
            a_record("never learns, λ = 0.1", seed, three(51, 10, 50), three(0, 0, 0)),
            a_record("never learns, λ = 1", seed, three(52, 10, 50), three(0, 0, 0)),
            a_record("λ = 0, α = 0.97", seed, three(50, 58, 50), three(0, 0, 0)),
            a_record("λ = 0, α = 0.99", seed, three(50, 57, 50), three(0, 0, 0)),
            a_record("toward an average, λ = 0.3", seed, {"teacher": 53, "model": 51}, 0),
            a_record("toward an average, λ = 1", seed, {"teacher": 50, "model": 52}, 0),
        ]
    found.append(a_record(pair_row(B), 2, 99, 99))
    written(folder, "rivals-companion-text", found)
    assert companion.tuned(folder, "text") == {
        "DCL": pair_row(A),
        "never learns": "never learns, λ = 1",
        "λ = 0": "λ = 0, α = 0.97",
        "toward an average": "toward an average, λ = 0.3",
    }
    assert companion.tuned(folder, "scripts") == {}


# ---- the rows --------------------------------------------------------------------------------------------------------


def test_each_row_is_another_run_and_one_is_the_rivals_dcl():
    plain = settings.FAST["kanji-5"].plain
    made = companion.rows(plain)
    assert len(companion.PAIRS) == len(set(companion.PAIRS)) == 15
    assert len(made) == 1 + 15 + 2 + 3 + 3 + 1
    assert len({json.dumps(run.as_dict(), sort_keys=True) for run in made.values()}) == len(made)
    assert made[pair_row(OLD)] == values.rows(plain)["DCL 0.1"]
    assert made[pair_row(A)] == replace(
        plain, method="dcl", options=DCL | {"weight": 0.3, "alpha": 0.97, "distance": "mse"}
    )
    assert made["λ = 0, α = 0.99"].options["weight"] == 0.0
    assert made["toward an average, λ = 0.3"].options == {
        "weight": 0.3,
        "ramp_up": 0,
        "decay": 0.998,
        "of_logits": True,
    }
    assert made[companion.AVERAGED] == replace(plain, averages=companion.AVERAGES)
    assert {companion.AVERAGED, *(row for found in companion.CONTROLS.values() for row in found)} < set(made)
    for name in settings.FAST:
        assert EXPERIMENTS[f"rivals-companion-{name}"].runs == companion.rows(settings.FAST[name].plain)


TINY = Configuration("digits", "small-cnn", "plain", epochs=2, shots=4, batch_size=20)


def trained(label):
    """A row's networks before and after a tiny training."""
    run = Run(companion.rows(TINY)[label], 0, torch.device("cpu"))
    before = copy.deepcopy(run.method.networks())
    for _ in range(TINY.epochs):
        run.train_epoch()
    return before, run.method.networks()


def differ(ours, theirs):
    """The names of the parameters and buffers in which two networks are not equal, bit for bit."""
    other = theirs.state_dict()
    return {name for name, value in ours.state_dict().items() if not torch.equal(value, other[name])}


def test_without_a_penalty_the_model_is_that_of_plain_training_bit_for_bit_and_the_companion_learns():
    plain = trained("CE")[1]["model"]
    for label in companion.ZERO_ROWS:
        before, after = trained(label)
        assert differ(after["model"], plain) == set()
        assert differ(after["companion"], before["companion"]) >= {name for name, _ in plain.named_parameters()}
    assert differ(trained(pair_row(OLD))[1]["model"], plain), "which a penalty changes"


def test_a_companion_that_never_learns_stays_as_it_was_and_the_model_is_held_to_it():
    """Batch norm's statistics are no parameters: they follow the images, as the companion predicts in training mode."""
    plain = trained("CE")[1]["model"]
    for label in companion.NEVER_ROWS:
        before, after = trained(label)
        parameters = {name for name, _ in plain.named_parameters()}
        assert differ(after["companion"], before["companion"]).isdisjoint(parameters)
        assert differ(after["model"], plain) >= parameters


def steep():
    """A network whose logits move far in a step."""
    network = normed()
    with torch.no_grad():
        network[-1].weight.mul_(10.0)
    return network


def test_toward_an_average_the_distance_is_of_the_logits():
    """Squared up to the distance K / sqrt(2) of a row and linear from there on, without a ramp, the mean over rows."""
    method = started("mean-teacher", by_hand(steep), weight=3.0, ramp_up=0, decay=0.8, of_logits=True)
    net, teacher = twin(method), twin(method, "teacher")
    far = []
    for count, batch in enumerate(batches()):
        epoch, _, x, y, _ = batch
        advance(method, batch)
        z, average = net(x), copy.deepcopy(teacher)(x).detach()
        classes = z.shape[1]
        radius = classes / 2**0.5
        squares = (z - average).square().sum(1)
        distant = squares > radius**2
        linear = 2 * radius * squares.clamp(min=radius**2).sqrt() - radius**2
        penalty = torch.where(distant, linear, squares) / classes
        far += distant.tolist()
        descend(net, cross_entropy(z, y) + 3.0 * penalty.mean(), epoch)
        share = min(0.8, count / (count + 1))
        state = net.state_dict()
        for name, value in teacher.state_dict().items():
            value.copy_(share * value + (1 - share) * state[name] if value.is_floating_point() else state[name])
    assert_close(method.networks()["model"], net)
    assert_close(method.networks()["teacher"], teacher)
    assert 0 < sum(far) < len(far), "some rows are distant, and some are not"


# ---- the tables ------------------------------------------------------------------------------------------------------


def of_seeds(label, seeds, validation, tests):
    """Records of a row with the same accuracies on validation images in all seeds."""
    return [a_record(label, seed, validation, test) for seed, test in zip(seeds, tests, strict=True)]


@pytest.fixture
def new_seeds(folder):
    """Two new seeds of text: CE has 50 and 52 on test images; by the validation images the default has its companion in
    the first seed alone. B is the best pair of the setting, by its companion, and A the best one in the scripts."""
    found = [a_record("CE", 0, 50, 0), a_record(pair_row(A), 0, 54, 0)]
    written(folder, "rivals-companion-scripts", found)
    found.append(a_record(pair_row(B), 0, three(50, 70, 60), three(0, 0, 0)))
    found += of_seeds("CE", (9, 10), 50, (50, 52))
    found += of_seeds(pair_row(DEFAULT), (9,), three(55, 56, 54), (three(52, 54, 53),))
    found += of_seeds(pair_row(DEFAULT), (10,), three(55, 54, 55), (three(54, 58, 56),))
    found += of_seeds(pair_row(B), (9, 10), three(50, 70, 60), (three(50, 57, 54), three(50, 57, 54)))
    written(folder, "rivals-companion-text", found)
    return folder


def test_the_three_networks_and_the_kept_one_have_their_gains_in_new_seeds(new_seeds):
    """The companion gains 4 in the first seed, where it is kept, and the model 2 in the second one."""
    found = cells_of(companion_tables.predictors(new_seeds))
    assert found[""] == ["model", "companion", "mean of both", "kept", "seeds"]
    assert found["text"] == ["+2.0 ± 0.0", "+5.0 ± 1.0", "+3.5 ± 0.5", "+3.0 ± 1.0", "2"]
    assert found["scripts"] == [""] * 5


def test_controls_have_their_best_value_and_the_best_one_is_taken_from_dcl_seed_by_seed(new_seeds):
    """On validation images toward an average with λ = 0.3 gains 8, the averages 9 in what they keep, the penalty 5.

    On test images the averages gain 1 and 2 in what they keep, and B's companion 7 and 5.
    """
    averages = {"model": 50, "EMA over 100 steps": 59}
    found = [
        a_record("toward an average, λ = 0.3", 0, {"teacher": 58, "model": 51}, 0),
        a_record("toward an average, λ = 1", 0, {"teacher": 57, "model": 51}, 99),
        a_record("never learns, λ = 1", 0, three(52, 1, 51), 0),
        a_record(companion.AVERAGED, 0, averages, 0),
        *of_seeds("toward an average, λ = 0.3", (9,), {"teacher": 55, "model": 51}, ({"teacher": 53, "model": 0},)),
        *of_seeds(companion.AVERAGED, (9, 10), averages, [averages | {"EMA over 100 steps": 51 + n} for n in (0, 3)]),
    ]
    written(new_seeds, "rivals-companion-text", found)
    penalties = [a_record("CE", 0, 50, 50), a_record("logit penalty 0.1", 0, 55, 53)]
    written(new_seeds, name_of("text"), penalties)
    written(new_seeds, name_of("scripts"), penalties)
    table = cells_of(companion_tables.controls(new_seeds))
    assert table[""][:5] == [*companion.CONTROLS, "averages of the weights", "logit penalty"]
    penalty = "+3.0 (seeds of the choice)"
    assert table["text"] == [
        *("", "", "+3.0", "+1.5 ± 0.5", penalty),
        *("+6.0 ± 1.0", "averages of the weights", "+4.5 ± 1.5", "2"),
    ]
    assert "scripts" not in table, "A, which is its best pair, was not run in these seeds"
    assert table["all"][-2:] == ["+4.50 ± 1.50", "2"], "without the seeds of the choice"
    written(new_seeds, name_of("text"), of_seeds("CE", (9, 10), 50, (50, 52)))
    written(new_seeds, name_of("text"), of_seeds("logit penalty 0.1", (9, 10), 50, (52, 55)))
    assert cells_of(companion_tables.controls(new_seeds))["text"][4] == "+2.5 ± 0.5"


def test_other_networks_are_compared_with_plain_training_of_the_same_network(folder):
    found = [
        *of_seeds("CNN: CE", (0, 1), 50, (10, 10)),
        *of_seeds("MLP: CE", (0,), 50, (60,)),
        *of_seeds("MLP: DCL", (0,), three(50, 50, 50), (three(62, 65, 63),)),
        *of_seeds("CNN: DCL", (0, 1), three(50, 50, 50), (three(11, 12, 13), three(13, 14, 15))),
    ]
    written(folder, companion.VARIANTS, found)
    table = cells_of(companion_tables.variants(folder))
    assert table["CNN"] == ["10.0", "+2.0 ± 1.0", "+3.0 ± 1.0", "+4.0 ± 1.0", "2"]
    assert table["MLP"] == ["60.0", "+2.0", "+5.0", "+3.0", "1"]


def test_with_wrong_labels_dcl_stands_beside_tuned_rivals(folder):
    """Mean Teacher's second value is chosen, and gains 5 and 7."""
    place = "digits-30-noise-30"
    first, second = settings.PLACES[place].of_round(9)[:2]
    found = of_seeds("CE", (first, second), 50, (50, 52))
    found += of_seeds(pair_row(DEFAULT), (first, second), three(51, 50, 50), (three(52, 53, 54), three(54, 57, 58)))
    written(folder, f"rivals-companion-{place}", found)
    rivals = [a_record("CE", 0, 50, 50)]
    rivals += [a_record(label, 0, 51 + n, 50) for n, label in enumerate(values.LABELS["Mean Teacher"])]
    rivals += of_seeds("CE", (first, second), 50, (50, 52))
    rivals += of_seeds(values.LABELS["Mean Teacher"][1], (first, second), 50, (55, 59))
    written(folder, name_of(place), rivals)
    table = cells_of(companion_tables.wrong_labels(folder))
    assert table["DCL, model"] == ["+2.0 ± 0.0", "2", "", ""]
    assert table["DCL, companion"] == ["+4.0 ± 1.0", "2", "", ""]
    assert table["DCL, mean of both"] == ["+5.0 ± 1.0", "2", "", ""]
    assert table["DCL, kept"] == ["+2.0 ± 0.0", "2", "", ""]
    assert table["Mean Teacher, tuned"] == ["+6.0 ± 1.0 (10)", "2", "", ""]
    assert table["ELR, tuned"] == ["", "", "", ""]


def test_the_tables_are_printed_with_and_without_records(new_seeds, capsys):
    companion_tables.main(["--results", str(new_seeds / "nothing")])
    assert "Wrong labels of ten classes" in capsys.readouterr().out
    companion_tables.main(["--results", str(new_seeds), "--rounds", "0"])
    assert "Other networks" in capsys.readouterr().out
