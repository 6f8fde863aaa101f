"""Masked autoencoders: one mask for model and companion, the losses by hand, and what fine-tuning starts from."""

from __future__ import annotations

from operator import attrgetter

import pytest
import torch

from dcl_optim import DCLOptimizer
from examples.research.applications.masked_autoencoder import networks

SHAPE = (1, 8, 8)
WIDTHS = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
TINY = WIDTHS | {f"decoder_{name}": value for name, value in WIDTHS.items()}
TINY |= {"num_hidden_layers": 2, "decoder_num_hidden_layers": 1}


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setattr(networks, "SIZE", TINY)


def autoencoder(seed=0):
    torch.manual_seed(seed)
    return networks.autoencoder(SHAPE, 0.75, patch=2).double()


def with_dcl(model, weight=1.0):
    options = {"distance": "squared", "logits": attrgetter("logits")}
    return DCLOptimizer(
        torch.optim.AdamW(model.parameters()), model, weight=weight, alpha=0.6, companion_fraction=1, **options
    )


def pictures(count=3, seed=1):
    return torch.randn(count, *SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_model_and_companion_see_the_same_mask_and_another_one_at_each_step():
    model = autoencoder()
    optimizer = with_dcl(model)
    seen = [[], []]
    for network, masks in zip((model, optimizer.companion), seen, strict=True):
        network.vit.register_forward_hook(lambda _, __, output, masks=masks: masks.append(output.mask))
    for _ in range(3):
        optimizer.zero_grad()
        output = model(pixel_values=pictures())
        (output.loss + optimizer.penalty(output.logits)).backward()
        optimizer.step()
    for mask, mask_of_companion in zip(*seen, strict=True):
        assert torch.equal(mask, mask_of_companion)
        assert (mask.sum(1) == 12).all()  # of 16
    assert not torch.equal(seen[0][0], seen[0][1])


def test_the_decoder_knows_which_patch_it_is_to_fill_in():
    """All hidden patches are one token: what tells them apart is the place."""
    model, x = autoencoder(), pictures(1)
    output = model.eval()(pixel_values=x)
    hidden = output.logits[0][output.mask[0] == 1]
    assert torch.pdist(hidden).min() > 1e-4
    # sines before cosines, and, as in the published weights, columns before rows
    rates = 10_000.0 ** -(torch.arange(4.0) / 4)
    row, column = (place * rates for place in (2.0, 3.0))
    wanted = torch.cat([column.sin(), column.cos(), row.sin(), row.cos()]).double()
    torch.testing.assert_close(model.decoder.decoder_pos_embed[0, 1 + 2 * 4 + 3], wanted, rtol=1e-5, atol=1e-6)


def test_the_loss_is_the_squared_error_on_the_hidden_patches_normalized():
    model, x = autoencoder(), pictures()
    output = model(pixel_values=x)
    errors = []
    for picture, reconstruction, mask in zip(x, output.logits, output.mask, strict=True):
        for number in range(16):
            row, column = 2 * (number // 4), 2 * (number % 4)
            patch = picture[0, row : row + 2, column : column + 2].flatten()
            patch = (patch - patch.mean()) / (patch.var() + 1e-6).sqrt()
            if mask[number]:
                errors.append((reconstruction[number] - patch).square().mean())
    assert len(errors) == 3 * 12
    torch.testing.assert_close(output.loss, torch.stack(errors).mean())


def test_the_classifier_computes_what_the_encoder_computes_of_all_patches():
    encoder, x = autoencoder(seed=5), pictures()
    model = networks.classifier(encoder, classes=10).double().eval()
    encoder.config.mask_ratio = 0.0
    in_order = torch.arange(16.0).expand(3, 16)
    wanted = encoder.eval().vit(x, noise=in_order).last_hidden_state
    torch.testing.assert_close(model.vit(x).last_hidden_state, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model(pixel_values=x).logits, model.classifier(wanted[:, 0]))
    assert model.classifier.out_features == 10


def test_its_size_is_that_of_he_et_al(monkeypatch):
    monkeypatch.undo()
    with torch.device("meta"):
        base = networks.autoencoder(SHAPE, 0.75, patch=4)
    assert (base.config.hidden_size, len(base.vit.layers), base.config.decoder_hidden_size) == (768, 12, 512)
    with pytest.raises(ValueError, match="patch=3 does not cut images of 8x8 evenly"):
        networks.autoencoder(SHAPE, 0.75, patch=3)
