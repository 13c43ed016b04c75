"""The engine: drafting for the server, and generation for the teacher, over one KV cache."""

import torch
from torch import Tensor

from drafter.cache import KVCache, prefill_groups
from drafter.generation import Generator
from drafter.model import Decoder
from drafter.rows import Generated, Generation
from drafter.slots import Slots

TRUNCATION_STEP = 256
COLUMN_STEP = 64

__all__ = ["Engine", "Generated", "Generation"]


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
        self.generator: Generator | None = None
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

        A batch starts empty, takes prompts in order of length, as many rows as memory holds, and gives the
        rows that have ended to the next prompts. The result is a function of the prompts, their order, the
        settings and, on a GPU, of how many rows fit.

        Args:
            prompts: token ids of each prompt, none empty.
            settings: see Generation.

        Raises:
            ValueError: a prompt and its continuation would not fit the context.
        """
        if not prompts:
            return []
        longest = max(map(len, prompts)) + settings.max_tokens
        if longest > self.context_tokens:
            raise ValueError(f"{longest} tokens do not fit a context of {self.context_tokens}")
        if self.generator is None:
            static = self.decoder.head_weight.is_cuda
            self.generator = Generator(self.decoder, self.token_limit, static)
        return self.generator.generate(prompts, settings)
