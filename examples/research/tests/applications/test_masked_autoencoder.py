"""Masked autoencoders: one mask for model and companion, the losses by hand, and what fine-tuning starts from."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch
from torch import nn

from examples.research import datasets
from examples.research.applications.masked_autoencoder import __main__ as application
from examples.research.applications.masked_autoencoder import networks
from examples.research.applications.masked_autoencoder.__main__ import APPLICATION, ROWS, SETTINGS, main
from examples.research.applications.masked_autoencoder.settings import SIZES, TARGETS, FineTuning, Pretraining
from examples.research.applications.masked_autoencoder.trainer import Trainer

CPU = torch.device("cpu")
SHAPE = (1, 8, 8)
SMALL = Pretraining("digits", pictures=48, patch=2, pretraining_epochs=2, pretraining_batch_size=16)
FEW = FineTuning("digits", labels=40, epochs=2)
TOGETHER = SETTINGS | asdict(SMALL) | asdict(FEW)
WIDTHS = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
NETWORK = WIDTHS | {f"decoder_{name}": value for name, value in WIDTHS.items()}
NETWORK |= {"num_hidden_layers": 2, "decoder_num_hidden_layers": 1}


@pytest.fixture(autouse=True)
def tiny_is_tinier(monkeypatch):
    monkeypatch.setitem(SIZES, "tiny", NETWORK)


def autoencoder(setting=SMALL, seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return networks.autoencoder(setting, SHAPE).to(dtype)


def pictures(count=3, seed=1, dtype=torch.float64):
    return torch.randn(count, *SHAPE, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def run(seed=0, label="MAE, DCL", folder="", texts=None, **changes):
    texts = [] if texts is None else texts
    settings = TOGETHER | dict(ROWS[label].options) | {"checkpoints": str(folder)} | changes
    return application.train(**settings, seed=seed, device=CPU, progress=texts.append)


def pretrained(folder, seed=0, label="MAE, DCL", **changes):
    """The pre-trained weights and the score of a run."""
    score = run(seed, label, folder, **changes)
    file = folder / f"{ROWS[label].options['method']}-{seed}.pt"
    return torch.load(file, weights_only=True)["model"], score


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def record_masks(encoder):
    seen = []
    encoder.register_forward_hook(lambda _, __, output: seen.append((output.mask, output.ids_restore)))
    return seen


def masks_of(method):
    """Which patches model and companion saw, step by step, in the epochs of a pre-training."""
    model = autoencoder()
    optimizer = application.pretraining_optimizer(model, SMALL, method)
    data = datasets.load("digits", train_size=48)
    trainer = Trainer(model, optimizer, data, 16, 2, seed=0)
    networks = [model, optimizer.companion] if method == "dcl" else [model]
    seen = [record_masks(network.vit) for network in networks]
    torch.manual_seed(7)
    for _ in range(2):
        trainer.train_epoch(lambda x, y: {"pixel_values": x})
    return seen


def test_model_and_companion_see_the_same_mask_and_another_one_at_each_step():
    theta, omega = masks_of("dcl")
    assert len(theta) == len(omega) == 6
    for (mask, order), (mask_of_companion, order_of_companion) in zip(theta, omega, strict=True):
        assert torch.equal(mask, mask_of_companion)
        assert torch.equal(order, order_of_companion)
        assert (mask.sum(1) == 12).all()  # of 16
    assert all(not torch.equal(a[0], b[0]) for i, a in enumerate(theta) for b in theta[:i])


def test_with_and_without_the_companion_the_masks_are_the_same():
    for (one, _), (other, _) in zip(masks_of("dcl")[0], masks_of("mae")[0], strict=True):
        assert torch.equal(one, other)


def test_the_decoder_knows_which_patch_it_is_to_fill_in():
    """All hidden patches are one token: what tells them apart is the place."""
    model, x = autoencoder(dtype=torch.float64), pictures(1)
    output = model.eval()(pixel_values=x)
    hidden = output.logits[0][output.mask[0] == 1]
    assert torch.pdist(hidden).min() > 1e-4
    # sines before cosines, and, as in the published weights, columns before rows
    rates = 10_000.0 ** -(torch.arange(4.0) / 4)
    row, column = (place * rates for place in (2.0, 3.0))
    wanted = torch.cat([column.sin(), column.cos(), row.sin(), row.cos()]).double()
    torch.testing.assert_close(model.decoder.decoder_pos_embed[0, 1 + 2 * 4 + 3], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("target", TARGETS)
def test_the_loss_is_the_squared_error_on_the_hidden_patches(target):
    model, x = autoencoder(replace(SMALL, target=target), dtype=torch.float64), pictures()
    output = model(pixel_values=x)
    errors = []
    for picture, reconstruction, mask in zip(x, output.logits, output.mask, strict=True):
        for number in range(16):
            row, column = 2 * (number // 4), 2 * (number % 4)
            patch = picture[0, row : row + 2, column : column + 2].flatten()
            if target == "normalized":
                patch = (patch - patch.mean()) / (patch.var() + 1e-6).sqrt()
            if mask[number]:
                errors.append((reconstruction[number] - patch).square().mean())
    assert len(errors) == 3 * 12
    torch.testing.assert_close(output.loss, torch.stack(errors).mean())


@pytest.mark.filterwarnings("ignore:the first prediction of dcl_optim's companion")  # changed on purpose
def test_the_penalty_is_the_mean_squared_difference_of_the_reconstructions():
    model, twin, x = autoencoder(dtype=torch.float64), autoencoder(dtype=torch.float64), pictures()
    setting = replace(SMALL, weight=0.3)
    optimizer = application.pretraining_optimizer(model, setting, "dcl")
    with torch.no_grad():
        for weight in optimizer.companion.parameters():
            weight += 0.1 * torch.randn_like(weight) * weight.requires_grad
    torch.manual_seed(3)
    output = model(pixel_values=x)
    (output.loss + optimizer.penalty(output.logits)).backward()
    torch.manual_seed(3)
    noise = torch.rand(3, 16)
    output = twin(pixel_values=x, noise=noise)
    forecast = optimizer.companion.eval()(pixel_values=x, noise=noise).logits.detach()
    penalty = ((output.logits - forecast) ** 2).sum() / (3 * 16 * 4)
    (output.loss + 0.3 * penalty).backward()
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=name)
    assert optimizer.logs()["penalty"] == pytest.approx(penalty.item(), rel=1e-6)
    assert penalty.item() > 1e-3


def test_the_classifier_computes_what_the_encoder_computes_of_all_patches():
    encoder, x = autoencoder(seed=5, dtype=torch.float64), pictures()
    model = networks.classifier(encoder, classes=10).double().eval()
    encoder.config.mask_ratio = 0.0
    in_order = torch.arange(16.0).expand(3, 16)
    wanted = encoder.eval().vit(x, noise=in_order).last_hidden_state
    torch.testing.assert_close(model.vit(x).last_hidden_state, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model(pixel_values=x).logits, model.classifier(wanted[:, 0]))
    assert model.classifier.out_features == 10


def test_fine_tuning_starts_from_the_pretrained_encoder_and_all_of_it_learns(tmp_path, monkeypatch):
    starts, ends, fine_tune = [], [], application.fine_tune

    def spied(model, *others):
        starts.append({name: value.clone() for name, value in model.vit.state_dict().items()})
        fine_tune(model, *others)
        ends.append(model.vit.state_dict())

    monkeypatch.setattr(application, "fine_tune", spied)
    for label in ROWS:
        run(label=label, folder=tmp_path)
    for start, file in zip(starts[1:], ("mae-0.pt", "dcl-0.pt"), strict=True):
        weights = torch.load(tmp_path / file, weights_only=True)["model"]
        assert equal(start, {name[4:]: value for name, value in weights.items() if name.startswith("vit.")})
    assert equal(starts[0], autoencoder().vit.state_dict())  # without pre-training
    assert not equal(starts[0], starts[1])
    assert not equal(starts[1], starts[2])
    for start, end in zip(starts, ends, strict=True):
        # The bias of the keys has no gradient: softmax does not see what all its inputs have in common.
        assert [name for name in start if torch.equal(start[name], end[name]) and "k_proj.bias" not in name] == []


def test_a_seed_gives_one_result_and_without_a_weight_dcl_is_plain_training_bit_for_bit(tmp_path):
    plain, score = pretrained(tmp_path / "plain", label="MAE")
    torch.manual_seed(99)
    zero, score_of_zero = pretrained(tmp_path / "zero", weight=0.0)
    one, _ = pretrained(tmp_path / "one")
    other, _ = pretrained(tmp_path / "other", seed=1)
    assert equal(zero, plain)
    assert score_of_zero == score
    assert not equal(one, plain)
    assert not equal(one, other)


def test_an_interrupted_pretraining_ends_as_the_whole_one(tmp_path):
    whole, score = pretrained(tmp_path / "whole", pretraining_epochs=3)

    class Interrupted(list):
        def append(self, text):
            if "epoch 2" in text:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(folder=tmp_path, texts=Interrupted(), pretraining_epochs=3)
    torch.manual_seed(99)
    texts: list[str] = []
    resumed, score_resumed = pretrained(tmp_path, texts=texts, pretraining_epochs=3)
    assert [text for text in texts if "pre-" in text] == [next(t for t in texts if "pre-training epoch 3" in t)]
    assert equal(resumed, whole)
    assert score_resumed == score


def test_an_encoder_is_made_once_for_all_fine_tunings_but_not_for_other_settings(tmp_path):
    first = run(folder=tmp_path)
    texts: list[str] = []
    assert run(folder=tmp_path, texts=texts) == first
    run(folder=tmp_path, texts=texts, labels=50)
    assert not [text for text in texts if "pre-training" in text]
    with pytest.raises(ValueError, match="was pre-trained with"):
        run(folder=tmp_path, mask_ratio=0.5)


def test_the_learning_rates_are_smaller_near_the_pixels_and_vectors_do_not_decay():
    model = networks.classifier(autoencoder(), classes=10)
    optimizer = application.fine_tuning_optimizer(model, replace(FEW, lr=1.0, layer_decay=0.5))
    found = {id(p): (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}
    factors = {"vit.embeddings": 0.125, "vit.layers.0": 0.25, "vit.layers.1": 0.5}
    factors |= {"vit.layernorm": 1.0, "classifier": 1.0}
    for name, parameter in model.named_parameters():
        lr = next(factor for prefix, factor in factors.items() if name.startswith(prefix))
        assert found[id(parameter)] == (lr, 0.05 if parameter.ndim > 1 else 0.0), name


def test_pretraining_has_the_settings_of_he_et_al():
    with torch.device("meta"):
        base = networks.autoencoder(replace(SMALL, size="base", patch=4), SHAPE)
    assert (base.config.hidden_size, len(base.vit.layers), base.config.decoder_hidden_size) == (768, 12, 512)
    model = autoencoder()
    optimizer = application.pretraining_optimizer(model, SMALL, "mae")
    assert {group["betas"] for group in optimizer.param_groups} == {(0.9, 0.95)}
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    for parameter in model.parameters():
        if parameter.requires_grad:
            assert decays[id(parameter)] == (0.05 if parameter.ndim > 1 else 0.0)


def test_the_learning_rate_warms_up_and_ends_at_zero():
    class Loss(nn.Linear):
        def forward(self, x):
            z = super().forward(x.flatten(1))
            return type("Output", (), {"loss": z.square().mean(), "logits": z})

    model, data = Loss(64, 1), datasets.load("digits", train_size=97)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer, rates = Trainer(model, optimizer, data, 12, 5, seed=0), []
    optimizer.register_step_pre_hook(lambda *_: rates.append(optimizer.param_groups[0]["lr"]))
    for _ in range(5):
        trainer.train_epoch(lambda x, y: {"x": x})
    steps = torch.arange(38.0)  # of 5 x 8, as the lone image of each epoch is dropped, 2 warm up
    wanted = torch.cat([torch.tensor([0.0, 0.5]), 0.5 * (1 + torch.cos(torch.pi * steps / 38))])
    torch.testing.assert_close(torch.tensor(rates), wanted)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-9)


def test_the_command_prints_the_rows(tmp_path, capsys):
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in TOGETHER.items()]
    main(APPLICATION, application.__doc__, [*arguments, "--seeds=1", "--device=cpu", f"--results={tmp_path}"])
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split(" | ")[0] for line in lines] == [f"| {label}" for label in ROWS]
    assert f"| {run(label='MAE'):.2f} |" in lines[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": "huge"}, "size='huge' is unknown; choose one of tiny, base"),
        ({"target": "edges"}, "target='edges' is unknown; choose one of pixels, normalized"),
        ({"patch": 3}, "patch=3 does not cut images of 8x8 evenly"),
    ],
)
def test_errors_name_what_is_wrong(changes, message):
    with pytest.raises(ValueError, match=message):
        run(**changes)


def test_pictures_of_another_shape_are_refused(monkeypatch):
    load = datasets.load

    def larger(name, **options):
        found = load("digits", **options)
        found.shape = SHAPE if name == "digits" else (1, 28, 28)
        return found

    monkeypatch.setattr(datasets, "load", larger)
    with pytest.raises(ValueError, match=r"data='fashion-mnist' has .* \(1, 28, 28\), but pretraining_data='digits'"):
        run(data="fashion-mnist")
