"""The paper's figures from given logits and histories. Each function returns a matplotlib ``Figure``.

Needs the extra ``demo``.
"""

from dcl_optim.plots.bars import perplexity_bars, top_non_target_histogram
from dcl_optim.plots.curves import training_curves
from dcl_optim.plots.embeddings import class_embedding, logit_embedding

__all__ = ["class_embedding", "logit_embedding", "perplexity_bars", "top_non_target_histogram", "training_curves"]
