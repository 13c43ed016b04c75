"""The loss of a drafter: cross-entropy on the target's token, and KL to the target's top-k distribution."""

from typing import NamedTuple

import torch
from torch import Tensor

TINY = 1e-6


class Loss(NamedTuple):
    """Means over the positions of a batch, in nats, and how many there were."""

    total: Tensor
    ce: Tensor
    kl: Tensor
    positions: int


def loss(logits_nv: Tensor, targets_n: Tensor, topk_ids_nk: Tensor, topk_logprobs_nk: Tensor,
         ce_share: float) -> Loss:
    """Return ce_share * CE + (1 - ce_share) * KL(target || drafter).

    KL is taken over k + 1 outcomes: the target's k most likely tokens, and all others as one.

    Args:
        logits_nv: the drafter's logits, [positions, vocab], any floating type.
        targets_n: the target's greedy token, [positions].
        topk_ids_nk, topk_logprobs_nk: the target's top-k, [positions, k].
        ce_share: between 0 and 1.
    """
    logits_nv = logits_nv.float()
    normaliser_n1 = logits_nv.logsumexp(-1, keepdim=True)
    ce = (normaliser_n1 - logits_nv.gather(1, targets_n[:, None])).mean()
    own_nk = logits_nv.gather(1, topk_ids_nk) - normaliser_n1
    target_nk = topk_logprobs_nk.exp()
    target_rest_n = (1 - target_nk.sum(-1)).clamp(min=TINY)
    own_rest_n = (1 - own_nk.exp().sum(-1)).clamp(min=TINY)
    rest_n = target_rest_n * (target_rest_n.log() - own_rest_n.log())
    kl = ((target_nk * (topk_logprobs_nk - own_nk)).sum(-1) + rest_n).mean()
    return Loss(ce_share * ce + (1 - ce_share) * kl, ce.detach(), kl.detach(), len(targets_n))


def learning_rate(step: int, steps: int, warmup: int, peak: float) -> float:
    """Return the rate at a step, counted from 0: a linear rise, then half a cosine down to zero."""
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * 0.5 * (1 + float(torch.cos(torch.tensor(done * torch.pi, dtype=torch.float64))))
