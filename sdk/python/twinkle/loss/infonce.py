"""InfoNCE: contrastive learning of embeddings.

Legend: F features, A anchors (queries), N documents (positives and negatives of all anchors), D size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from twinkle.data_format import LossOutput
from twinkle.loss.base import Loss, LossBatch
from twinkle.loss.errors import InvalidLossInput
from twinkle.loss.options import check_flag, check_number, check_whole
from twinkle.loss.reporting import as_numbers, mean_of

_NO_CANDIDATE = float('-inf')
"""Score that excludes a feature from the candidates."""


@dataclass(frozen=True)
class _Groups:
    """Indexes of the features of each anchor."""

    anchors_A: list[int]
    documents_N: list[int]
    owners_N: list[int]
    """Index of the anchor that each document belongs to."""
    positives_A: list[int]
    """Index of each anchor's positive among the documents."""


@dataclass(frozen=True, eq=False)
class InfonceLoss(Loss):
    """`-log(e^(s+ / T) / sum over candidates of e^(s / T))` for each anchor, where s is the cosine of two embeddings.

    arXiv 1807.03748, equation 4. s+ is the similarity of the positive, which is a candidate itself. The other
    candidates are the anchor's negatives and, with `use_batch`, the documents of the other anchors. `include_qq`,
    `include_dd` and `mask_fake_negative` are from Qwen3-Embedding, arXiv 2506.05176, equation 1.

    Features are ordered as anchor, its positive, its negatives, next anchor and so on. Each feature has one counted
    label: 1 if it is an anchor, else 0. An anchor's weight is the weight of its label. A batch cannot run in
    parts, because anchors use each other's documents.

    The divisor of the loss (`LossOutput.num_tokens`) is the number of anchors. The metrics are `accuracy` (the fraction
    of anchors whose positive is the most likely candidate), `positive_similarity` (the mean over anchors) and
    `negative_similarity` (the mean over unmasked negatives). Similarities are cosines.

    Raises:
        ValueError: an option is out of range, or requires another option.
    """

    is_separable = False
    required_outputs = ('embeddings',)

    temperature: float = 0.1
    """Temperature T, above 0."""
    use_batch: bool = True
    """Whether other anchors' documents are candidates too."""
    hard_negatives: int | None = None
    """Number of negatives used per anchor: the first negatives, repeated if there are fewer. None uses all."""
    mask_fake_negative: bool = False
    """Whether to exclude documents and other anchors whose similarity to the anchor exceeds the positive's by more than
    the margin."""
    fake_neg_margin: float = 0.1
    """Margin as a difference of cosines, at least 0."""
    include_qq: bool = False
    """Whether other anchors are candidates too. Needs `use_batch`."""
    include_dd: bool = False
    """Whether similarities between the positive and other documents count as candidates too. Needs `use_batch`."""

    def __post_init__(self) -> None:
        check_number('temperature', self.temperature, low=0.0, is_low_allowed=False)
        check_number('fake_neg_margin', self.fake_neg_margin, low=0.0)
        if self.hard_negatives is not None:
            check_whole('hard_negatives', self.hard_negatives, low=1)
        for name in ('use_batch', 'mask_fake_negative', 'include_qq', 'include_dd'):
            check_flag(name, getattr(self, name))
        if (self.include_qq or self.include_dd) and not self.use_batch:
            raise ValueError('include_qq and include_dd need use_batch')

    def __call__(self, batch: LossBatch) -> LossOutput:
        """Return the sum over anchors.

        Raises:
            InvalidLossInput: the features are not ordered as described, or there are no negatives; the error names the
                first wrong feature.
        """
        groups = self._groups(batch)
        embeddings_FD = normalize(batch.output('embeddings'), dim=-1)
        documents_ND = embeddings_FD[groups.documents_N]
        scores_AN = self._document_scores(embeddings_FD[groups.anchors_A], documents_ND, groups)
        target_A = torch.tensor(groups.positives_A, device=scores_AN.device)
        positive_A = scores_AN.gather(1, target_A[:, None])[:, 0]
        if self.mask_fake_negative:
            scores_AN = self._mask_fakes(scores_AN, positive_A)
        logits = torch.cat([scores_AN, *self._more_scores(embeddings_FD, documents_ND, positive_A, groups)], dim=1)
        losses_A = cross_entropy(logits / self.temperature, target_A, reduction='none')
        negatives = scores_AN.detach().scatter(1, target_A[:, None], _NO_CANDIDATE)
        reported = {
            'accuracy': mean_of(logits.argmax(1) == target_A),
            'positive_similarity': mean_of(positive_A),
            'negative_similarity': mean_of(negatives[negatives != _NO_CANDIDATE]),
        }
        return LossOutput(
            loss=(batch.weights_R[groups.anchors_A] * losses_A).sum(),
            num_tokens=len(groups.anchors_A),
            metrics=as_numbers(reported),
            metric_weight=float(len(groups.anchors_A)),
        )

    def _document_scores(self, anchors_AD: Tensor, documents_ND: Tensor, groups: _Groups) -> Tensor:
        scores_AN = anchors_AD @ documents_ND.T
        if self.use_batch:
            return scores_AN
        owners_N = torch.tensor(groups.owners_N, device=scores_AN.device)
        others_AN = owners_N != torch.arange(len(anchors_AD), device=scores_AN.device)[:, None]
        return scores_AN.masked_fill(others_AN, _NO_CANDIDATE)

    def _more_scores(
        self, embeddings_FD: Tensor, documents_ND: Tensor, positive_A: Tensor, groups: _Groups
    ) -> list[Tensor]:
        blocks: list[Tensor] = []
        if self.include_qq:
            anchors_AD = embeddings_FD[groups.anchors_A]
            scores_AA = (anchors_AD @ anchors_AD.T).fill_diagonal_(_NO_CANDIDATE)
            blocks.append(self._mask_fakes(scores_AA, positive_A) if self.mask_fake_negative else scores_AA)
        if self.include_dd:
            indexes_A1 = torch.tensor(groups.positives_A, device=documents_ND.device)[:, None]
            scores_AN = documents_ND[groups.positives_A] @ documents_ND.T
            blocks.append(scores_AN.scatter(1, indexes_A1, _NO_CANDIDATE))
        return blocks

    def _mask_fakes(self, scores: Tensor, positive_A: Tensor) -> Tensor:
        limits_A1 = positive_A.detach()[:, None] + self.fake_neg_margin
        return scores.masked_fill(scores > limits_A1, _NO_CANDIDATE)

    def _groups(self, batch: LossBatch) -> _Groups:
        labels = batch.labels_R.tolist()
        _check_labels(batch, labels)
        anchors = [index for index, label in enumerate(labels) if label == 1]
        groups = _Groups(anchors, [], [], [])
        for number, (begin, end) in enumerate(zip(anchors, [*anchors[1:], len(labels)], strict=True)):
            documents = self._chosen_documents(list(range(begin + 1, end)), anchor=begin)
            groups.positives_A.append(len(groups.documents_N))
            groups.documents_N.extend(documents)
            groups.owners_N.extend([number] * len(documents))
        if len(groups.documents_N) == len(anchors) and (len(anchors) == 1 or not self.use_batch):
            raise InvalidLossInput('has no negatives to contrast its positive with', index=0)
        return groups

    def _chosen_documents(self, documents: list[int], *, anchor: int) -> list[int]:
        if not documents:
            raise InvalidLossInput('is an anchor that no positive follows', index=anchor)
        positive, negatives = documents[0], documents[1:]
        if self.hard_negatives is None:
            return documents
        if not negatives:
            raise InvalidLossInput('is an anchor without negatives, which hard_negatives requires', index=anchor)
        return [positive, *(negatives[index % len(negatives)] for index in range(int(self.hard_negatives)))]


def _check_labels(batch: LossBatch, labels: list[int]) -> None:
    """Check that each feature has exactly one label, 0 or 1, and that the first is 1.

    Raises:
        InvalidLossInput: a feature is wrong; the error names it.
    """
    feature_count = len(batch.output('embeddings'))
    counts = torch.bincount(batch.features_R, minlength=feature_count).tolist()
    for index, count in enumerate(counts):
        if count != 1:
            raise InvalidLossInput(f'must have one counted label, 1 on an anchor, else 0; has {count}', index=index)
    for index, label in enumerate(labels):
        if label not in (0, 1):
            raise InvalidLossInput(f'must have label 1 if it is an anchor, else 0; got {label}', index=index)
    if labels and labels[0] != 1:
        raise InvalidLossInput('must be an anchor with label 1, because every group starts with its anchor', index=0)
