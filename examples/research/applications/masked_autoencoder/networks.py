"""The autoencoder, and the classifier that its encoder becomes."""

from __future__ import annotations

from transformers import ViTConfig, ViTForImageClassification, ViTMAEConfig, ViTMAEForPreTraining

from examples.research.applications.masked_autoencoder.settings import SIZES, Pretraining

PICTURES = ("image_size", "patch_size", "num_channels")
ENCODER = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", *PICTURES)


def autoencoder(setting: Pretraining, shape: tuple[int, int, int]) -> ViTMAEForPreTraining:
    """The masked autoencoder for images of a shape (channels, height, width)."""
    channels, height, width = shape
    if height != width or setting.patch < 1 or height % setting.patch:
        raise ValueError(f"patch={setting.patch} does not cut images of {height}x{width} evenly; choose a divisor")
    pictures = dict(zip(PICTURES, (height, setting.patch, channels), strict=True))
    masking = {"mask_ratio": setting.mask_ratio, "norm_pix_loss": setting.target == "normalized"}
    model = ViTMAEForPreTraining(ViTMAEConfig(**SIZES[setting.size], **pictures, **masking))
    # transformers 5.23 ends its construction with zeros here: the decoder would not know which patch it is to fill in.
    model.decoder.initialize_weights((height // setting.patch) ** 2)
    return model


def classifier(encoder: ViTMAEForPreTraining, classes: int) -> ViTForImageClassification:
    """A linear layer on the class token of the encoder, which sees all patches now; the decoder is left behind."""
    same = {name: getattr(encoder.config, name) for name in ENCODER}
    model = ViTForImageClassification(ViTConfig(**same, num_labels=classes))
    model.vit.load_state_dict(encoder.vit.state_dict())
    # What timm's layer decay asks its own models for.
    model.group_matcher = lambda coarse: {"stem": r"vit\.embeddings", "blocks": r"vit\.layers\.(\d+)"}
    return model
