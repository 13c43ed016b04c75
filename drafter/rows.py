"""Rows that generate side by side: all their state in tensors of fixed place, moved on by one step.

The host never looks at a token: a step reads the latest token of each row, writes its keys and values,
chooses the next one and says which rows have ended.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from drafter.choice import Choice, greedy, sampled
from drafter.inference import Inference
from drafter.model import causal
from drafter.plain import Attend, NewTokens, attend_one

ENDS = ("cap", "stop", "repeat")
STOP, REPEAT = ENDS.index("stop"), ENDS.index("repeat")


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
    """One continuation.

    Attributes:
        tokens: its token ids.
        topk_ids: the most likely tokens at each of its positions, [tokens, k], int32.
        topk_logprobs: their natural-log probabilities, [tokens, k], float32.
        ended: why it ended: "stop", "repeat" or "cap".
    """

    tokens: list[int]
    topk_ids: Tensor = field(default_factory=lambda: torch.zeros((0, 0), dtype=torch.int32))
    topk_logprobs: Tensor = field(default_factory=lambda: torch.zeros((0, 0)))
    ended: str = "cap"


class Rows:
    """State of a number of rows, each of which holds one prompt and its continuation, or waits.

    A row's latest token is not yet in the cache: its keys and values are written by the step that reads it.

    Args:
        inference: the model's forward pass.
        settings: how continuations are generated.
        token_limit: ids from here on are never chosen.
        count: rows.
        columns: the most tokens of a prompt and its continuation.
    """

    def __init__(self, inference: Inference, settings: Generation, token_limit: int, *, count: int,
                 columns: int) -> None:
        self.inference, decoder = inference, inference.decoder
        self.count, self.columns = count, columns
        self.settings, self.token_limit = settings, token_limit
        config, weight = decoder.config, decoder.head_weight
        cap, device = settings.max_tokens, weight.device

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        shape = (config.layers, count, config.kv_heads, columns, config.head_dim)
        self.keys_lbkcd = zeros(*shape, dtype=weight.dtype)
        self.values_lbkcd = zeros(*shape, dtype=weight.dtype)
        self.latest_b, self.lengths_b, self.counts_b = zeros(count), zeros(count), zeros(count)
        self.active_b = zeros(count, dtype=torch.bool)
        self.ended_b = zeros(count)
        # One place more than the cap, where rows that have ended or wait write.
        self.tokens_bc = zeros(count, cap + 1)
        self.topk_ids_bck = zeros(count, cap + 1, settings.top_k, dtype=torch.int32)
        self.topk_logprobs_bck = zeros(count, cap + 1, settings.top_k, dtype=torch.float32)
        self.draws_bc = zeros(count, cap + 1 if settings.temperature else 0, dtype=torch.float32)
        # At [row, i] how many tokens up to the i-th equal as many up to the latest one.
        self.runs_bc = zeros(count, cap if settings.stop_on_repeat else 0, dtype=torch.int16)
        self.stops_s = torch.tensor(settings.stop_ids, dtype=torch.int64, device=device)
        self.index_b = torch.arange(count, device=device)
        self.ones_b = torch.ones_like(self.index_b)

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self.latest_b.device

    def prefill(self, rows: Sequence[int], prompts: Sequence[list[int]]) -> None:
        """Begin these prompts in these rows: all but their last tokens go to the cache.

        Args:
            rows: where to.
            prompts: token ids, padded on the right to the longest: best of like length.
        """
        index_b = self._tensor(rows)
        width = max(map(len, prompts)) - 1
        if width:
            padded = [prompt[:-1] + [0] * (width + 1 - len(prompt)) for prompt in prompts]
            self.inference.hidden(self._tensor(padded).flatten(), self._fill(index_b, width))
        self.latest_b[index_b] = self._tensor([prompt[-1] for prompt in prompts])
        self.lengths_b[index_b] = self._tensor([len(prompt) - 1 for prompt in prompts])
        self.counts_b[index_b] = 0
        self.runs_bc[index_b] = 0
        self.active_b[index_b] = True

    def step(self, count: int, context: int) -> None:
        """Move the first `count` rows on by one token.

        Args:
            count: rows; those that have ended or wait stay as they are.
            context: more than the tokens that any of them has in the cache.
        """
        hidden_bd = self.inference.hidden(self.latest_b[:count], self._extend(count, context))
        logits_bv = self.inference.decoder.logits(hidden_bd)[:, : self.token_limit]
        if self.settings.temperature:
            draws_b = self.draws_bc[:count].gather(1, self.counts_b[:count, None])[:, 0]
            choice = sampled(
                logits_bv, self.settings.top_k, draws_b, self.settings.temperature, self.settings.top_p
            )
        else:
            choice = greedy(logits_bv, self.settings.top_k)
        self._note(count, choice)

    def _note(self, count: int, choice: Choice) -> None:
        """Write down what was chosen, and end the rows that are to end."""
        tokens_b, cap = choice.tokens_b, self.settings.max_tokens
        active_b, counts_b = self.active_b[:count], self.counts_b[:count]
        stop_b = (tokens_b[:, None] == self.stops_s).any(1)
        repeat_b = self._repeats(count, tokens_b)
        full_b = counts_b + 1 >= cap
        place_b = counts_b.masked_fill(~active_b, cap)
        index_b = self.index_b[:count]
        self.tokens_bc[index_b, place_b] = tokens_b
        self.topk_ids_bck[index_b, place_b] = choice.topk_ids_bk.int()
        self.topk_logprobs_bck[index_b, place_b] = choice.topk_logprobs_bk
        repeat_b &= ~stop_b
        cut_b = repeat_b * self.settings.stop_on_repeat
        self.ended_b[:count] = torch.where(active_b, stop_b * STOP + repeat_b * REPEAT, self.ended_b[:count])
        self.latest_b[:count] = torch.where(active_b, tokens_b, self.latest_b[:count])
        self.lengths_b[:count] += active_b
        self.counts_b[:count] += active_b * (1 - cut_b)
        self.active_b[:count] &= ~(stop_b | repeat_b | full_b)

    def _repeats(self, count: int, tokens_b: Tensor) -> Tensor:
        """Say of which rows the last n-gram, with this token, stands earlier in the continuation too."""
        size = self.settings.stop_on_repeat
        if not size:
            return torch.zeros_like(self.active_b[:count])
        earlier_c = torch.arange(self.settings.max_tokens, device=self.device)
        same_bc = self.tokens_bc[:count, :-1] == tokens_b[:, None]
        same_bc &= earlier_c < self.counts_b[:count, None]
        grown_bc = functional.pad(self.runs_bc[:count, :-1], (1, 0)) + 1
        self.runs_bc[:count] = grown_bc.masked_fill(~same_bc, 0)
        return (self.runs_bc[:count] >= size).any(1)

    def _extend(self, count: int, context: int) -> Attend:
        lengths_b, index_b = self.lengths_b[:count], self.index_b[:count]
        if self.inference.kernels is not None:
            new = NewTokens(index_b, self.ones_b[:count], lengths_b, index_b)
            return self.inference.attend((self.keys_lbkcd, self.values_lbkcd), new)

        def attend(layer: int, qkv_bd: Tensor) -> Tensor:
            queries_bhd, keys_bkd, values_bkd = self.inference.turned(layer, qkv_bd, lengths_b)
            cached = (self.keys_lbkcd[layer], self.values_lbkcd[layer])
            return attend_one(queries_bhd, (keys_bkd, values_bkd), cached, lengths_b, context).flatten(1)

        return attend

    def _fill(self, rows_b: Tensor, width: int) -> Attend:
        positions_n = torch.arange(width, device=self.device).repeat(len(rows_b))

        # What pads a row is written beyond its length, where it is overwritten before it can be seen.
        def attend(layer: int, qkv_nd: Tensor) -> Tensor:
            queries_bhtd, keys_bktd, values_bktd = (
                part.reshape(-1, width, *part.shape[1:]).transpose(1, 2)
                for part in self.inference.turned(layer, qkv_nd, positions_n)
            )
            self.keys_lbkcd[layer][rows_b, :, :width] = keys_bktd
            self.values_lbkcd[layer][rows_b, :, :width] = values_bktd
            return causal(queries_bhtd, keys_bktd, values_bktd).transpose(1, 2).flatten(2).flatten(0, 1)

        return attend

    def move(self, sources: Sequence[int], targets: Sequence[int], context: int) -> None:
        """Copy rows over others; `context` is more than any of their lengths."""
        source_b, target_b = self._tensor(sources), self._tensor(targets)
        for cached in (self.keys_lbkcd, self.values_lbkcd):
            for layer in cached:
                layer[target_b, :, :context] = layer[source_b, :, :context]
        for state in (self.latest_b, self.lengths_b, self.counts_b, self.active_b, self.ended_b,
                      self.tokens_bc, self.topk_ids_bck, self.topk_logprobs_bck, self.draws_bc, self.runs_bc):
            state[target_b] = state[source_b]

    def read(self, rows: Sequence[int]) -> list[Generated]:
        """Return what these rows, which have ended, have generated."""
        index_b = self._tensor(rows)
        counts, ended = self.counts_b[index_b].tolist(), self.ended_b[index_b].tolist()
        width = max(counts)
        tokens_bc = self.tokens_bc[index_b, :width].cpu()
        ids_bck, logprobs_bck = (
            part[index_b, :width].cpu() for part in (self.topk_ids_bck, self.topk_logprobs_bck)
        )
        return [
            Generated(tokens_bc[i, :size].tolist(), ids_bck[i, :size], logprobs_bck[i, :size], ENDS[why])
            for i, (size, why) in enumerate(zip(counts, ended, strict=True))
        ]

    def _tensor(self, values: Sequence[object]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)
