"""The autoencoder, and the classifier that its encoder becomes."""

from __future__ import annotations

from transformers import ViTConfig, ViTForImageClassification, ViTMAEConfig, ViTMAEForPreTraining

SIZE: dict[str, int] = {}  # ViT-B with a decoder of 8 layers: transformers' own values
PICTURES = ("image_size", "patch_size", "num_channels")
ENCODER = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", *PICTURES)


def autoencoder(shape: tuple[int, int, int], mask_ratio: float, patch: int = 16) -> ViTMAEForPreTraining:
    """The masked autoencoder for images of a shape (channels, height, width); the loss is of normalized patches."""
    channels, height, width = shape
    if height != width or height % patch:
        raise ValueError(f"patch={patch} does not cut images of {height}x{width} evenly; choose a divisor")
    pictures = dict(zip(PICTURES, (height, patch, channels), strict=True))
    model = ViTMAEForPreTraining(ViTMAEConfig(**SIZE, **pictures, mask_ratio=mask_ratio, norm_pix_loss=True))
    # transformers 5.23 ends its construction with zeros here: the decoder would not know which patch it is to fill in.
    model.decoder.initialize_weights((height // patch) ** 2)
    return model


def classifier(encoder: ViTMAEForPreTraining, classes: int) -> ViTForImageClassification:
    """A linear layer on the class token of the encoder, which sees all patches now; the decoder is left behind."""
    same = {name: getattr(encoder.config, name) for name in ENCODER}
    model = ViTForImageClassification(ViTConfig(**same, num_labels=classes))
    model.vit.load_state_dict(encoder.vit.state_dict())
    # What timm's layer decay asks its own models for.
    model.group_matcher = lambda coarse: {"stem": r"vit\.embeddings", "blocks": r"vit\.layers\.(\d+)"}
    return model
