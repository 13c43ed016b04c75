"""Choosing the next token from logits, on their device: the most likely ones, or a sample."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

CHUNK = 64           # of the vocabulary: only chunks with the largest maxima are looked into
SAMPLING_POOL = 256  # a sample comes from the most likely tokens only


@dataclass(frozen=True)
class Choice:
    """What one step chose for each row.

    Attributes:
        tokens_b: the next token.
        topk_ids_bk: the most likely tokens, the best first; of equals the lower id first.
        topk_logprobs_bk: their natural-log probabilities, float32.
    """

    tokens_b: Tensor
    topk_ids_bk: Tensor
    topk_logprobs_bk: Tensor


def greedy(logits_bv: Tensor, top_k: int) -> Choice:
    """Choose the most likely token; `top_k` may be 0."""
    ids_bk = largest(logits_bv, max(top_k, 1))
    return Choice(ids_bk[:, 0], ids_bk[:, :top_k], _logprobs(logits_bv, ids_bk[:, :top_k]))


def sampled(logits_bv: Tensor, top_k: int, draws_b: Tensor, temperature: float, top_p: float) -> Choice:
    """Sample from the smallest set of most likely tokens that has probability `top_p`.

    Args:
        logits_bv: logits, [rows, vocab].
        top_k: how many of the most likely tokens to report; may be 0.
        draws_b: a number in [0, 1) for each row: the place in the cumulative distribution.
        temperature: what logits are divided by.
        top_p: see above; the set holds at least the best token and at most `SAMPLING_POOL`.
    """
    pool = min(SAMPLING_POOL, logits_bv.shape[1])
    values_bk, ids_bk = logits_bv.topk(pool)
    mass_bk = (values_bk.float() / temperature).softmax(-1).cumsum(-1)
    kept_b1 = torch.searchsorted(mass_bk, torch.full_like(mass_bk[:, :1], top_p))
    total_b1 = mass_bk.gather(1, kept_b1.clamp(max=pool - 1))
    index_b1 = torch.searchsorted(mass_bk, draws_b[:, None] * total_b1).clamp(max=pool - 1)
    top_bk = largest(logits_bv, top_k)
    return Choice(ids_bk.gather(1, index_b1)[:, 0], top_bk, _logprobs(logits_bv, top_bk))


def largest(logits_bv: Tensor, count: int) -> Tensor:
    """Return the ids of each row's `count` largest logits, the largest first, of equals the lower id first.

    One pass over the vocabulary finds the maximum of each chunk. The `count` largest logits lie in the
    `count` chunks with the largest maxima, in the same order of value and place, so only those are sorted.
    """
    rows, vocab = logits_bv.shape
    if not count:
        return logits_bv.new_zeros((rows, 0), dtype=torch.int64)
    padding = -vocab % CHUNK
    if padding:
        logits_bv = functional.pad(logits_bv, (0, padding), value=-torch.inf)
    chunks_bnc = logits_bv.reshape(rows, -1, CHUNK)
    maxima_bn = chunks_bnc.amax(-1)
    places_bn = torch.arange(maxima_bn.shape[1], device=logits_bv.device).expand_as(maxima_bn)
    best_bk = _ordered(maxima_bn, places_bn, min(count, maxima_bn.shape[1]))
    candidates_bkc = chunks_bnc.gather(1, best_bk[:, :, None].expand(-1, -1, CHUNK))
    ids_bkc = best_bk[:, :, None] * CHUNK + torch.arange(CHUNK, device=logits_bv.device)
    # The clamp is for logits that are not numbers: no id ever points beyond the vocabulary.
    return _ordered(candidates_bkc.flatten(1), ids_bkc.flatten(1), count).clamp(max=vocab - 1)


def _ordered(values_bn: Tensor, ids_bn: Tensor, count: int) -> Tensor:
    """Return the ids of the `count` largest values by value, then by id."""
    if count == 1:
        best_b1 = values_bn.amax(-1, keepdim=True)
        # Asked this way round, a maximum that is not a number has a place too.
        return ids_bn.masked_fill(values_bn < best_b1, torch.iinfo(torch.int64).max).amin(-1, keepdim=True)
    # The bits of a float order like an integer once those of negative ones are turned round. With the id
    # below them every key is distinct, so the order depends on no library's treatment of ties.
    bits_bn = (values_bn.float() + 0.0).view(torch.int32)  # adding 0 makes -0 equal to 0
    bits_bn = bits_bn ^ ((bits_bn >> 31) & 0x7FFFFFFF)
    keys_bn = (bits_bn.long() << 32) | (0xFFFFFFFF - ids_bn)
    places_bk: Tensor = keys_bn.topk(count).values & 0xFFFFFFFF
    return places_bk.neg() + 0xFFFFFFFF


def _logprobs(logits_bv: Tensor, ids_bk: Tensor) -> Tensor:
    if not ids_bk.shape[1]:
        return logits_bv.new_zeros(ids_bk.shape, dtype=torch.float32)
    return logits_bv.log_softmax(-1, dtype=torch.float32).gather(1, ids_bk)
