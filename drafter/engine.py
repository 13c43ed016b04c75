"""The engine: drafting for the server, and generation for the teacher, over one KV cache."""

from dataclasses import dataclass

import torch
from torch import Tensor

from drafter.cache import KVCache, prefill_groups
from drafter.model import Decoder
from drafter.slots import Slots

TRUNCATION_STEP = 256
COLUMN_STEP = 64
SAMPLING_POOL = 256
KEPT_SHARE = 0.75


@dataclass(frozen=True)
class Generation:
    """How continuations are generated.

    Attributes:
        max_tokens: the cap of a continuation.
        stop_ids: ids that end one; the stop id is its last token.
        top_k: how many of the most likely tokens are reported at each position; 0 for none.
        stop_on_repeat: n > 0 ends a continuation before the first n-gram of it that recurs.
        temperature: 0 is greedy; above it tokens are sampled.
        top_p: when sampling, the smallest set of tokens with this probability is drawn from.
        seed: of the sampling.
    """

    max_tokens: int
    stop_ids: tuple[int, ...] = ()
    top_k: int = 0
    stop_on_repeat: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass
class Generated:
    """One continuation: its tokens, the top-k ids and logprobs at each, and why it ended."""

    tokens: list[int]
    topk_ids: list[list[int]]
    topk_logprobs: list[list[float]]
    ended: str = "cap"


class Engine:
    """Runs a decoder over batches of requests.

    Args:
        decoder: the model, on its device and in its compute type.
        context_tokens: the most tokens that a row may hold.
        slots: cached conversations; at least the largest batch that will be drafted.
        token_limit: ids from here on have an embedding but no token: never proposed.
    """

    def __init__(self, decoder: Decoder, context_tokens: int, slots: int = 0,
                 token_limit: int | None = None) -> None:
        self.decoder = decoder
        self.context_tokens = context_tokens
        self.token_limit = token_limit or decoder.config.vocab_size
        self.slots = Slots(decoder, slots, context_tokens) if slots else None

    @torch.inference_mode()
    def draft(self, requests: list[list[int]], count: int = 16) -> list[list[int]]:
        """Continue each request greedily by `count` ids.

        A request longer than the context is drafted from its last tokens.

        Args:
            requests: token ids of each request, none empty, at most as many as there are slots.
            count: ids to draft.
        """
        if self.slots is None:
            raise RuntimeError("this engine was made without slots: it only generates")
        requests = [self._fitted(request) for request in requests]
        leases = self.slots.lease(requests)
        new = [len(request) - lease.reused for request, lease in zip(requests, leases, strict=True)]
        order = sorted(range(len(requests)), key=lambda row: new[row])
        requests, leases = [requests[row] for row in order], [leases[row] for row in order]
        # The batch's own cache is a draft wider than a slot: a full slot still leaves room for the draft.
        columns = -(-(max(map(len, requests)) + count) // COLUMN_STEP) * COLUMN_STEP
        cache = self.slots.gather(leases, columns)
        try:
            tails = [request[lease.reused :] for request, lease in zip(requests, leases, strict=True)]
            drafts = self._decode(cache, tails, count)
            self.slots.keep(leases, requests, cache)
        except BaseException:
            self.slots.forget()
            raise
        return [draft for _, draft in sorted(zip(order, drafts, strict=True))]

    def _fitted(self, request: list[int]) -> list[int]:
        over = len(request) - self.context_tokens
        if over <= 0:
            return request
        # Cutting in steps keeps the cut in one place while a conversation grows, so its prefix is reused.
        step = max(1, min(TRUNCATION_STEP, self.context_tokens // 4))
        return request[-(-over // step) * step :]

    def _decode(self, cache: KVCache, tails: list[list[int]], count: int) -> list[list[int]]:
        tokens_b = self._choose(self._prefill(cache, tails))
        drafted = [tokens_b]
        for _ in range(count - 1):
            tokens_b = self._choose(self._step(cache, tokens_b.tolist()))
            drafted.append(tokens_b)
        return torch.stack(drafted, dim=1).tolist()

    def _prefill(self, cache: KVCache, tails: list[list[int]]) -> Tensor:
        groups = prefill_groups([len(tail) for tail in tails])
        return torch.cat([cache.extend(self.decoder, rows, tails[rows]) for rows in groups])

    def _step(self, cache: KVCache, tokens: list[int]) -> Tensor:
        return cache.extend(self.decoder, slice(0, len(tokens)), [[token] for token in tokens])

    def _choose(self, hidden_bd: Tensor) -> Tensor:
        return self.decoder.logits(hidden_bd)[:, : self.token_limit].argmax(-1)

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], settings: Generation) -> list[Generated]:
        """Continue each prompt until its stop id, its repeat or the cap.

        Rows that have ended are dropped together when a quarter of the batch has: a batch costs about what
        its tokens cost, and the cache is seldom copied. The result is a function of the prompts, their order
        and the settings.

        Args:
            prompts: token ids of each prompt, none empty.
            settings: see Generation.

        Raises:
            ValueError: a prompt and its continuation would not fit the context.
        """
        longest = max(map(len, prompts)) + settings.max_tokens
        if longest > self.context_tokens:
            raise ValueError(f"{longest} tokens do not fit a context of {self.context_tokens}")
        rows = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
        cache = KVCache.empty(self.decoder, len(rows), longest)
        picker = _Picker(settings, len(prompts), self.token_limit)
        hidden_bd = self._prefill(cache, [prompts[row] for row in rows])
        done = [Generated([], [], []) for _ in prompts]
        active = list(range(len(rows)))  # which of the cache's rows still generate
        while True:
            picker.pick(self.decoder.logits(hidden_bd[active]), [rows[i] for i in active], done)
            latest = [done[row].tokens[-1] for row in rows]
            active = [i for i in active if not _ended(done[rows[i]], settings)]
            if not active:
                return done
            if len(active) <= KEPT_SHARE * len(rows):
                cache.keep(active)
                rows, latest = [rows[i] for i in active], [latest[i] for i in active]
                active = list(range(len(rows)))
            hidden_bd = self._step(cache, latest)


class _Picker:
    """Picks each row's next token and writes it down."""

    def __init__(self, settings: Generation, rows: int, token_limit: int) -> None:
        self.settings = settings
        self.token_limit = token_limit
        self.rows = rows
        self.random = torch.Generator().manual_seed(settings.seed)

    def pick(self, logits_bv: Tensor, rows: list[int], done: list[Generated]) -> None:
        logits_bv = logits_bv[:, : self.token_limit].float()
        if self.settings.temperature > 0:
            tokens = self._sampled(logits_bv, rows)
        else:
            tokens = logits_bv.argmax(-1).tolist()
        if self.settings.top_k:
            values_bk, ids_bk = logits_bv.topk(self.settings.top_k)
            logprobs = (values_bk - logits_bv.logsumexp(-1, keepdim=True)).tolist()
            for row, ids, values in zip(rows, ids_bk.tolist(), logprobs, strict=True):
                done[row].topk_ids.append(ids)
                done[row].topk_logprobs.append(values)
        for row, token in zip(rows, tokens, strict=True):
            done[row].tokens.append(token)

    def _sampled(self, logits_bv: Tensor, rows: list[int]) -> list[int]:
        # One draw a step for every row of the call, in use or not: a row's sample does not depend on
        # which others have ended.
        draws_b = torch.rand(self.rows, generator=self.random)[rows].to(logits_bv.device)
        pool = min(SAMPLING_POOL, logits_bv.shape[1])
        values_bk, ids_bk = (logits_bv / self.settings.temperature).topk(pool)
        mass_bk = values_bk.softmax(-1).cumsum(-1)
        kept_b1 = torch.searchsorted(mass_bk, torch.full_like(mass_bk[:, :1], self.settings.top_p))
        total_b1 = mass_bk.gather(1, kept_b1.clamp(max=pool - 1))
        index_b1 = torch.searchsorted(mass_bk, draws_b[:, None] * total_b1).clamp(max=pool - 1)
        return ids_bk.gather(1, index_b1)[:, 0].tolist()


def _ended(generated: Generated, settings: Generation) -> bool:
    tokens = generated.tokens
    if tokens[-1] in settings.stop_ids:
        generated.ended = "stop"
        return True
    size = settings.stop_on_repeat
    if size and recurs(tokens, size):
        generated.ended = "repeat"
        del tokens[-size:], generated.topk_ids[-size:], generated.topk_logprobs[-size:]
        return True
    return len(tokens) >= settings.max_tokens


def recurs(tokens: list[int], size: int) -> bool:
    """Say whether the last n-gram of `size` tokens stands earlier in the sequence too."""
    last = tokens[-size:]
    starts = range(len(tokens) - size)
    return any(tokens[start] == last[0] and tokens[start : start + size] == last for start in starts)
