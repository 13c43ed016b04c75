"""The loss of a drafter: cross-entropy on the target's token, and KL to the target's distribution.

The output matrix and the loss are one operator: logits exist for a chunk of positions at a time, and become
their own gradient in place, so memory does not grow with positions times vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

TINY = 1e-6
CHUNK_LOGITS = 1 << 29  # a gibibyte of bfloat16 logits at a time

Step = Callable[..., Any]


class Loss(NamedTuple):
    """Means over the positions of a batch, in nats, and how many there were."""

    total: Tensor
    ce: Tensor
    kl: Tensor
    positions: int


@dataclass(frozen=True)
class Targets:
    """What the target says at each position.

    Attributes:
        tokens_n: its greedy token, [positions].
        ids_nk, logprobs_nk: its k most likely tokens, all different, and their log probabilities,
            [positions, k].
        hidden_nh: where the whole distribution is wanted, its last hidden states, [positions, hidden].
        head_vh: and its output matrix, [vocabulary, hidden].
    """

    tokens_n: Tensor
    ids_nk: Tensor
    logprobs_nk: Tensor
    hidden_nh: Tensor | None = None
    head_vh: Tensor | None = None

    def __getitem__(self, part: slice) -> "Targets":
        """Return the targets of some positions."""
        hidden = None if self.hidden_nh is None else self.hidden_nh[part]
        return Targets(self.tokens_n[part], self.ids_nk[part], self.logprobs_nk[part], hidden, self.head_vh)


def drafter_loss(hidden_nd: Tensor, head_vd: Tensor, targets: Targets, ce_share: float) -> Loss:
    """Return ce_share * CE + (1 - ce_share) * KL(target || drafter) of logits = hidden @ head^T.

    With the target's hidden states KL is taken over the vocabulary. Otherwise it is taken over k + 1
    outcomes: the target's k most likely tokens, and all others as one.

    Args:
        hidden_nd: the drafter's last hidden states, [positions, hidden].
        head_vd: its output matrix, [vocabulary, hidden], of the same type.
        targets: the target's side.
        ce_share: between 0 and 1.
    """
    total, ce, kl = LinearLoss.apply(hidden_nd, head_vd, targets, ce_share)  # type: ignore[no-untyped-call]
    return Loss(total, ce, kl, len(hidden_nd))


class LinearLoss(torch.autograd.Function):
    """Takes the gradients on the way forward, chunk by chunk, and hands them out on the way back."""

    @staticmethod
    def forward(ctx: Any, hidden_nd: Tensor, head_vd: Tensor, targets: Targets,
                ce_share: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return the three means of `Loss`."""
        count, vocabulary = len(hidden_nd), len(head_vd)
        rows = max(1, min(count, CHUNK_LOGITS // vocabulary))
        wanted_hidden, wanted_head, *_ = ctx.needs_input_grad
        gradient_nd = torch.empty_like(hidden_nd) if wanted_hidden else None
        gradient_vd = None
        sums = hidden_nd.new_zeros(2, dtype=torch.float32)
        for first in range(0, count, rows):
            part = slice(first, first + rows)
            logits_cv = hidden_nd[part] @ head_vd.T
            sums += torch.stack(_into_gradient(logits_cv, targets[part], ce_share, 1 / count))
            if gradient_nd is not None:
                torch.mm(logits_cv, head_vd, out=gradient_nd[part])
            if wanted_head:
                share_vd = logits_cv.T @ hidden_nd[part]
                # Chunks add up in float32: there may be many of them.
                gradient_vd = share_vd if rows >= count else _added(gradient_vd, share_vd)
        ctx.save_for_backward(gradient_nd, gradient_vd)
        ctx.head_type = head_vd.dtype
        ce, kl = sums / count
        ctx.mark_non_differentiable(ce, kl)
        return ce_share * ce + (1 - ce_share) * kl, ce, kl

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """Scale the gradients by that of the total."""
        hidden, head = ctx.saved_tensors
        scaled = [None if x is None else (x * gradients[0]).to(ctx.head_type) for x in (hidden, head)]
        return scaled[0], scaled[1], None, None


def _added(sum_vd: Tensor | None, share_vd: Tensor) -> Tensor:
    return share_vd.float() if sum_vd is None else sum_vd.add_(share_vd)


def _into_gradient(logits_cv: Tensor, targets: Targets, ce_share: float,
                   scale: float) -> tuple[Tensor, Tensor]:
    """Turn logits into the gradient of scale * summed loss in place; return the sums of CE and KL.

    With q the drafter's softmax, p the target's, K its k likeliest tokens, t its token, a = ce_share, r and s
    what p and q leave outside K, and m = r + the sum of p over K (1, but for rounding), the gradient by logit
    j is
    q_j - a [j = t] - (1 - a) p_j                       where p is whole, and where it is not
    q_j (a + (1 - a) m) - a [j = t] - (1 - a) p_j       for j in K
    q_j (a + (1 - a) (m - r / s)) - a [j = t]           for others.
    """
    fast = _compiled if logits_cv.is_cuda else _plain
    normaliser_c1 = fast(log_sum)(logits_cv)
    ce: Tensor = (normaliser_c1 - logits_cv.gather(1, targets.tokens_n[:, None]).float()).sum()
    if targets.hidden_nh is not None and targets.head_vh is not None:
        target_cv = targets.hidden_nh @ targets.head_vh.T
        kl = fast(whole)(logits_cv, target_cv, normaliser_c1, ce_share, scale)
    else:
        kl = _topk(logits_cv, targets, normaliser_c1, ce_share, scale)
    _shift(logits_cv, targets.tokens_n[:, None], -ce_share * scale)
    return ce, kl


def _topk(logits_cv: Tensor, targets: Targets, normaliser_c1: Tensor, ce_share: float,
          scale: float) -> Tensor:
    fast = _compiled if logits_cv.is_cuda else _plain
    own_ck = logits_cv.gather(1, targets.ids_nk).float() - normaliser_c1
    target_ck = targets.logprobs_nk.exp()
    inside_c1 = target_ck.sum(-1, keepdim=True)
    target_rest_c1 = (1 - inside_c1).clamp(min=TINY)
    own_rest_c1 = (1 - own_ck.exp().sum(-1, keepdim=True)).clamp(min=TINY)
    rest_c1 = target_rest_c1 * (target_rest_c1.log() - own_rest_c1.log())
    kl: Tensor = (target_ck * (targets.logprobs_nk - own_ck)).sum() + rest_c1.sum()
    mass_c1 = inside_c1 + target_rest_c1
    others_c1 = scale * (ce_share + (1 - ce_share) * (mass_c1 - target_rest_c1 / own_rest_c1))
    fast(soften)(logits_cv, normaliser_c1, others_c1)
    inside_ck = own_ck.exp() * (ce_share + (1 - ce_share) * mass_c1) - (1 - ce_share) * target_ck
    logits_cv.scatter_(1, targets.ids_nk, (scale * inside_ck).to(logits_cv.dtype))
    return kl


def _shift(gradient_cv: Tensor, ids_c1: Tensor, by: float) -> None:
    # Gather and scatter: one index a row, so nothing is added twice and the order cannot matter.
    gradient_cv.scatter_(1, ids_c1, gradient_cv.gather(1, ids_c1) + by)


def log_sum(logits_cv: Tensor) -> Tensor:
    """Return the log of the sum of exponentials of each row, float32 [positions, 1]."""
    return logits_cv.float().logsumexp(-1, keepdim=True)


def soften(logits_cv: Tensor, normaliser_c1: Tensor, factor_c1: Tensor) -> None:
    """Replace logits by factor * softmax."""
    logits_cv.copy_((logits_cv.float() - normaliser_c1).exp() * factor_c1)


def whole(logits_cv: Tensor, target_cv: Tensor, normaliser_c1: Tensor, ce_share: float,
          scale: float) -> Tensor:
    """Replace logits by scale * (q - (1 - a) p), and return the sum of KL(p || q)."""
    own_cv, target_cv = logits_cv.float() - normaliser_c1, target_cv.float().log_softmax(-1)
    kl: Tensor = (target_cv.exp() * (target_cv - own_cv)).sum()
    logits_cv.copy_(scale * (own_cv.exp() - (1 - ce_share) * target_cv.exp()))
    return kl


def _plain(function: Step) -> Step:
    return function


@cache
def _compiled(function: Step) -> Step:
    """Each of these passes once over the logits when compiled, and several times when not."""
    compiled: Step = torch.compile(function, dynamic=True)
    return compiled


def learning_rate(step: int, steps: int, warmup: int, peak: float) -> float:
    """Return the rate at a step, counted from 0: a linear rise, then half a cosine down to zero."""
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * 0.5 * (1 + float(torch.cos(torch.tensor(done * torch.pi, dtype=torch.float64))))
