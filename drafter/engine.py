"""The engine: drafting for the server, and generation for the teacher, over one forward pass."""

import random

import torch

from drafter.drafting import Drafting
from drafter.generation import Generator
from drafter.inference import Inference
from drafter.model import Decoder
from drafter.plain import FEW
from drafter.rows import Generated, Generation
from drafter.slots import Slots

TRUNCATION_STEP = 256
WARM_UP_TOKENS = 200

__all__ = ["Engine", "Generated", "Generation"]


class Engine:
    """Runs a decoder over batches of requests.

    Args:
        decoder: the model, on its device and in its compute type; its matrices are joined in place.
        context_tokens: the most tokens that a row may hold.
        slots: cached conversations; at least the largest batch that will be drafted.
        token_limit: ids from here on have an embedding but no token: never proposed.
        draft_tokens: ids of the longest draft.
    """

    def __init__(self, decoder: Decoder, context_tokens: int, slots: int = 0,
                 token_limit: int | None = None, draft_tokens: int = 16) -> None:
        self.decoder = decoder
        self.context_tokens = context_tokens
        self.token_limit = token_limit or decoder.config.vocab_size
        self.inference = Inference(decoder, context_tokens + draft_tokens)
        self.static = self.inference.device.type == "cuda"
        self.generator: Generator | None = None
        self.slots: Slots | None = None
        self.drafting: Drafting | None = None
        if slots:
            columns = context_tokens + draft_tokens
            self.slots = Slots(decoder.config, slots, columns, decoder.head_weight)
            self.drafting = Drafting(self.inference, self.slots, self.token_limit, draft_tokens, self.static)

    @property
    def mode(self) -> str:
        """How drafts are made: from `graphs`, from `kernels` without graphs, or in `plain` torch."""
        if self.drafting is not None and self.drafting.graphs.enabled:
            return "graphs"
        return "plain" if self.inference.kernels is None else "kernels"

    @torch.inference_mode()
    def draft(self, requests: list[list[int]], count: int = 16) -> list[list[int]]:
        """Continue each request greedily by `count` ids.

        A request longer than the context is drafted from its last tokens.

        Args:
            requests: token ids of each request, none empty, at most as many as there are slots.
            count: ids to draft.

        Raises:
            ValueError: there are more requests than slots, or the drafts are to be empty or too long.
        """
        if self.slots is None or self.drafting is None:
            raise RuntimeError("this engine was made without slots: it only generates")
        if not 1 <= count <= self.drafting.most:
            raise ValueError(f"{count} ids to draft, but this engine was made for 1 to {self.drafting.most}")
        requests = [self._fitted(request) for request in requests]
        return self.drafting.draft(requests, self.slots.lease(requests), count)

    @torch.inference_mode()
    def warm_up(self, most: int, count: int) -> None:
        """Draft alone and in batches up to `most` requests, so that no request pays for a first time.

        On a GPU that is every shape of a batch: first step by step, then from the graph that was captured
        meanwhile. Where the two differ, graphs are not used from here on, and the log says so.

        Raises:
            RuntimeError: a draft comes out empty.
        """
        if self.slots is None or self.drafting is None:
            raise RuntimeError("this engine was made without slots: it only generates")
        number = random.Random(0)  # noqa: S311 - no secret
        longest = min(WARM_UP_TOKENS, self.context_tokens)
        shortest = min(FEW + 1, longest)
        sizes = {self.drafting.size(rows) for rows in range(1, most + 1)} if self.static else {1, most}
        for size in sorted(sizes):
            requests = [[number.randrange(self.token_limit) for _ in range(number.randint(shortest, longest))]
                        for _ in range(min(size, most))]  # fmt: skip
            self.drafting.rehearse(requests, count)
        self.slots.forget()

    def unread(self, request: list[int]) -> int:
        """Return how many tokens of a request a draft would have to read; to be asked between drafts only."""
        request = self._fitted(request)
        return len(request) - (self.slots.known(request) if self.slots is not None else 0)

    def _fitted(self, request: list[int]) -> list[int]:
        over = len(request) - self.context_tokens
        if over <= 0:
            return request
        # Cutting in steps keeps the cut in one place while a conversation grows, so its prefix is reused.
        step = max(1, min(TRUNCATION_STEP, self.context_tokens // 4))
        return request[-(-over // step) * step :]

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
            self.generator = Generator(self.inference, self.token_limit, self.static)
        return self.generator.generate(prompts, settings)
