"""The paper's figures, for logits and histories of one's own. Needs the extra ``demo``."""

from dcl_optim.plots.bars import histogram_figure, perplexity_bars, perplexity_figure, top_non_target_histogram
from dcl_optim.plots.curves import curves_figure, training_curves
from dcl_optim.plots.embeddings import (
    class_embedding,
    class_embedding_figure,
    logit_embedding,
    logit_embedding_figure,
)

__all__ = [
    "class_embedding",
    "class_embedding_figure",
    "curves_figure",
    "histogram_figure",
    "logit_embedding",
    "logit_embedding_figure",
    "perplexity_bars",
    "perplexity_figure",
    "top_non_target_histogram",
    "training_curves",
]
