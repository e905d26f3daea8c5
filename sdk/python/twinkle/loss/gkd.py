"""Generalized Knowledge Distillation."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from twinkle.data_format import IGNORE_INDEX, LossOutput
from twinkle.loss.base import Loss, LossBatch
from twinkle.loss.errors import InvalidLossInput
from twinkle.loss.options import check_choice, check_number, check_whole
from twinkle.loss.reporting import as_numbers, mean_of


class GKDLoss(Loss):
    """Divergence of the student's distribution from a teacher's, at each label.

    P is the teacher's distribution and Q the student's, both at `temperature`. The divergence is
    `beta KL(P | M) + (1 - beta) KL(Q | M)` with `M = beta P + (1 - beta) Q` (arXiv 2306.13649, equation 1). This
    formula is 0 for beta 0 and 1. For beta 0, the loss is KL(P | Q), which covers the teacher's modes. For beta 1, it
    is KL(Q | P), which seeks one mode.

    `teacher='topk'` restricts both distributions to the teacher's K most likely tokens (K is at least 2) and
    renormalizes them. It reads the streams `teacher_topk_ids`, int64 [R, K], and `teacher_topk_logps`, float32 [R, K].
    'full' uses the whole vocabulary and reads the stream `teacher_logits`, float32 [R, V]. The labels only mark the
    positions that count. With sequences sampled from the student, this is on-policy distillation.

    The divisor of the loss (`LossOutput.num_tokens`) is the number of labels. The metric `divergence` is the mean over
    the labels, in nats.

    Args:
        beta: in [0, 1].
        temperature: divides the scores of both models; for the student, in addition to the temperature of the pass.
            Above 0.
        ignore_index: label value to ignore, in addition to -100.
        chunk_size: number of rows per block with 'full'. If there are several blocks, each is recomputed for the
            gradient.
        teacher: 'topk' or 'full'.

    Raises:
        ValueError: an option is out of range.
    """

    def __init__(
        self,
        beta: float = 0.5,
        temperature: float = 1.0,
        ignore_index: int = IGNORE_INDEX,
        chunk_size: int = 512,
        teacher: str = 'topk',
    ) -> None:
        self.ignore_index = check_whole('ignore_index', ignore_index)
        self.beta = check_number('beta', beta, low=0.0, high=1.0)
        self.temperature = check_number('temperature', temperature, low=0.0, is_low_allowed=False)
        self.chunk_size = check_whole('chunk_size', chunk_size, low=1)
        self.is_full = check_choice('teacher', teacher, ('topk', 'full')) == 'full'
        if self.is_full:
            self.required_streams, self.required_outputs = ('teacher_logits',), ('logits',)
        else:
            self.required_streams = ('teacher_topk_ids', 'teacher_topk_logps')
            self.required_outputs, self.candidate_stream = ('candidate_logps',), 'teacher_topk_ids'

    def __call__(self, batch: LossBatch) -> LossOutput:
        """Return the weighted sum.

        Raises:
            InvalidLossInput: there are fewer than two candidates per label.
        """
        divergence_R = self._over_vocabulary(batch) if self.is_full else self._over_candidates(batch)
        return LossOutput(
            loss=(batch.weights_R * divergence_R).sum(),
            num_tokens=batch.label_count,
            metrics=as_numbers({'divergence': mean_of(divergence_R)}),
            metric_weight=float(batch.label_count),
        )

    def _over_candidates(self, batch: LossBatch) -> Tensor:
        teacher_RK = batch.stream('teacher_topk_logps')
        if teacher_RK.ndim != 2 or teacher_RK.shape[1] < 2:
            raise InvalidLossInput('teacher_topk_logps must have at least 2 candidates for each label')
        return self._divergence(batch.output('candidate_logps'), teacher_RK)

    def _over_vocabulary(self, batch: LossBatch) -> Tensor:
        student_RV, teacher_RV = batch.output('logits'), batch.stream('teacher_logits')
        if len(student_RV) <= self.chunk_size:
            return self._divergence(student_RV, teacher_RV)
        return _InBlocks.apply(student_RV, teacher_RV, self._divergence, self.chunk_size)

    def _divergence(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return [R], the divergence of the softmax distributions of two score tensors, [R, K] or [R, V]."""
        log_q, log_p = (student / self.temperature).log_softmax(-1), (teacher / self.temperature).log_softmax(-1)
        if self.beta == 0.0:
            return _kl(log_p, log_q)
        if self.beta == 1.0:
            return _kl(log_q, log_p)
        log_m = torch.logaddexp(log_p + math.log(self.beta), log_q + math.log1p(-self.beta))
        return self.beta * _kl(log_p, log_m) + (1.0 - self.beta) * _kl(log_q, log_m)


class _InBlocks(Function):
    """Rowwise function, evaluated in blocks and recomputed for the gradient, so that only one graph is stored."""

    @staticmethod
    def forward(
        ctx: Any, student_RV: Tensor, teacher_RV: Tensor, function: Callable[[Tensor, Tensor], Tensor], rows: int
    ) -> Tensor:
        ctx.save_for_backward(student_RV, teacher_RV)
        ctx.function, ctx.rows = function, rows
        blocks = zip(student_RV.split(rows), teacher_RV.split(rows), strict=True)
        return torch.cat([function(student, teacher) for student, teacher in blocks])

    @staticmethod
    def backward(ctx: Any, gradient_R: Tensor) -> tuple[Tensor, None, None, None]:
        student_RV, teacher_RV = ctx.saved_tensors
        result = torch.empty_like(student_RV)
        for begin in range(0, len(student_RV), ctx.rows):
            block = slice(begin, begin + ctx.rows)
            with torch.enable_grad():
                student = student_RV[block].detach().requires_grad_()
                value = (gradient_R[block] * ctx.function(student, teacher_RV[block])).sum()
            (result[block],) = torch.autograd.grad(value, student)
        return result, None, None, None


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return KL(p | q) over the last dimension, in nats."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)
