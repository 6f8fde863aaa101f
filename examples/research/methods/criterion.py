"""The task loss of the methods that are one training step: cross-entropy, or another form of it, and further terms."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.research.methods.base import check_range
from examples.research.methods.early_learning import EarlyLearning
from examples.research.methods.generalized import generalized_cross_entropy
from examples.research.methods.symmetric import reverse_cross_entropy


class Criterion(nn.Module):
    r"""Cross-entropy, changed by options that may be combined; each is off at 0, its default.

    .. math:: \ell = (1 - s)\, a\, \text{CE}_\varepsilon(z, y) + s\, \text{CE}(z, S_y) + b\, \text{RCE}(z, y)
        + \frac{\lambda_z}{BK} \lVert z \rVert^2 + \frac{\lambda_c}{2B} \sum_i \lVert z_i - c_{y_i}
        \rVert^2 + \lambda_e\, \text{ELR}(z)

    z are the logits. All numbers are of one batch; what a term remembers (S, c) changes in :meth:`learn` and
    :meth:`end_epoch` alone.

    Args:
        classes: K.
        samples: size of the training set, which early_learning alone needs.
        label_smoothing: :math:`\varepsilon \in [0, 1]`, as in :class:`torch.nn.CrossEntropyLoss`.
        logit_penalty: :math:`\lambda_z \ge 0`: DCP with the distance mse and prototypes that are all zero, in DCP's
            normalisation. A control, from no paper.
        online_label_smoothing: the share :math:`s \in [0, 1]` of the soft labels (Zhang et al., "Delving Deep into
            Label Smoothing", TIP 2021): 1 - α in their Equation 6; they use 0.5. :math:`S_k` is the mean of the
            softmaxes that the training steps of the last epoch gave for samples of class k classified right, and
            uniform without such a sample and in the first epoch, as in the authors' code for fine-grained data (in that
            for CIFAR the first epoch's second term is zero).
        center_loss: :math:`\lambda_c \ge 0` (Wen et al., ECCV 2016, Equation 5), here on the logits, not the last
            features, and with means where they sum over the batch. After each step
            :math:`c_k \leftarrow c_k - \alpha \sum_{i: y_i = k} (c_k - z_i) / (1 + n_k)`, :math:`n_k` samples of the
            batch being of class k and α = 0.5, theirs; the centres start at zero. DCP with the weight
            :math:`K \lambda_c / 2` has the same penalty, but its prototypes start at the first batch mean of their
            class, which has no penalty until then, and go 1 - α of the way to the next, however few samples it is of.
        generalized: q in [0, 1] of generalized cross-entropy, which takes the place of cross-entropy
            (:mod:`~examples.research.methods.generalized`).
        reverse: b >= 0, the weight of reverse cross-entropy (:mod:`~examples.research.methods.symmetric`); SCE has
            it and ``forward_weight``.
        forward_weight: a >= 0, the weight of cross-entropy. Default 1.
        early_learning: :math:`\lambda_e \ge 0`, the weight of ELR's term
            (:mod:`~examples.research.methods.early_learning`). They use 3 on CIFAR-10, 7 on CIFAR-100.
        early_learning_momentum: its targets'. Default 0.7.

    Attributes:
        one_class: whether each sample must have one class, since a term has no formula for mixed labels.

    Raises:
        ValueError: an option out of range, or generalized with another form of cross-entropy.
    """

    table: Tensor  # S, (K, K): row k for class k
    sums: Tensor  # (K, K): this epoch's softmaxes of samples classified right, added up by class
    centres: Tensor  # c, (K, K)

    def __init__(
        self,
        classes: int,
        samples: int = 0,
        *,
        label_smoothing: float = 0.0,
        logit_penalty: float = 0.0,
        online_label_smoothing: float = 0.0,
        center_loss: float = 0.0,
        generalized: float = 0.0,
        reverse: float = 0.0,
        forward_weight: float = 1.0,
        early_learning: float = 0.0,
        early_learning_momentum: float = 0.7,
    ) -> None:
        for name, share in (
            ("label_smoothing", label_smoothing),
            ("online_label_smoothing", online_label_smoothing),
            ("generalized", generalized),
            ("early_learning_momentum", early_learning_momentum),
        ):
            check_range(name, share, 0, 1)
        for name, value in (
            ("logit_penalty", logit_penalty),
            ("center_loss", center_loss),
            ("reverse", reverse),
            ("forward_weight", forward_weight),
            ("early_learning", early_learning),
        ):
            check_range(name, value, 0)
        if generalized and (label_smoothing or online_label_smoothing):
            raise ValueError(f"generalized={generalized!r} takes the place of cross-entropy: leave its smoothing out")
        super().__init__()
        self._label_smoothing, self._logit_penalty = label_smoothing, logit_penalty
        self._online, self._center_loss, self._center_rate = online_label_smoothing, center_loss, 0.5
        self._generalized, self._reverse, self._forward_weight = generalized, reverse, forward_weight
        self._early_learning, self._early = early_learning, None
        self.one_class = bool(online_label_smoothing or center_loss or generalized or reverse or early_learning)
        if early_learning:
            self._early = EarlyLearning(samples, classes, early_learning_momentum)
        if online_label_smoothing:
            self.register_buffer("table", torch.full((classes, classes), 1 / classes))
            self.register_buffer("sums", torch.zeros(classes, classes))
        if center_loss:
            self.register_buffer("centres", torch.zeros(classes, classes))

    def forward(self, z: Tensor, y: Tensor, index: Tensor) -> Tensor:
        """Give the loss of logits (B, K) for class indices (B,), or distributions (B, K) if not ``one_class``."""
        if self._generalized:
            loss = generalized_cross_entropy(z, y, self._generalized)
        else:
            loss = F.cross_entropy(z, y, label_smoothing=self._label_smoothing)
        loss = self._forward_weight * loss
        if self._online:
            loss = (1 - self._online) * loss + self._online * F.cross_entropy(z, self.table[y])
        if self._logit_penalty:
            loss = loss + self._logit_penalty * z.square().mean()
        if self._center_loss:
            loss = loss + self._center_loss / 2 * (z - self.centres[y]).square().sum(1).mean()
        if self._reverse:
            loss = loss + self._reverse * reverse_cross_entropy(z, y)
        if self._early is not None:
            loss = loss + self._early_learning * self._early(z, index)
        return loss

    @torch.no_grad()
    def learn(self, z: Tensor, y: Tensor, index: Tensor) -> None:
        """Take note of a step's logits, class indices and samples, once a step."""
        if self._early is not None:
            self._early.learn(z, index)
        if self._online:
            right = z.argmax(1) == y
            self.sums.index_add_(0, y, F.softmax(z, dim=1) * right[:, None])
        if self._center_loss:
            counts = torch.zeros_like(self.centres[0]).index_add_(0, y, torch.ones_like(z[:, 0]))
            pulls = torch.zeros_like(self.centres).index_add_(0, y, self.centres[y] - z)
            self.centres.sub_(self._center_rate * pulls / (1 + counts[:, None]))

    def end_epoch(self) -> None:
        """Take this epoch's soft labels over."""
        if self._online:
            totals = self.sums.sum(1, keepdim=True)
            uniform = 1 / len(self.sums)
            self.table.copy_(torch.where(totals > 0, self.sums / totals, uniform))
            self.sums.zero_()
