"""Generation for the teacher: prompts in fixed order through a batch of rows, as many as memory holds."""

import logging
from collections import deque
from functools import partial

import torch

from drafter import logs
from drafter.graphs import Graphs
from drafter.inference import Inference
from drafter.rows import Generated, Generation, Rows

PREFILL_TOKENS = 16_384  # at a time, padding included
STEPS = 8                # between two looks at which rows have ended, on a GPU
SHRINK = 0.75            # of the rows: at most so many still generate when a GPU's batch is made smaller
REFILL = 8               # one row in so many must be free before the next prompts are prefilled
COLUMN_STEP = 256        # on a GPU rows and graphs are kept for the next call of as many columns
CONTEXT_STEP = 128       # a context is rounded up to it
MEMORY_SHARE = 0.85      # of a GPU's free memory


class Generator:
    """Generates with one decoder.

    Args:
        inference: the decoder's forward pass.
        token_limit: ids from here on are never chosen.
        static: whether shapes are few and the host looks seldom, as graphs want it: on a GPU. Rows and graphs
            are then kept for the next call of like shape.
    """

    def __init__(self, inference: Inference, token_limit: int, static: bool) -> None:
        self.inference, self.token_limit = inference, token_limit
        self.decoder, self.device, self.static = inference.decoder, inference.device, static
        self.graphs = Graphs(self.device, frugal=True)
        self.memory_share = MEMORY_SHARE
        self.kept: tuple[object, Rows] | None = None

    def generate(self, prompts: list[list[int]], settings: Generation) -> list[Generated]:
        """Continue each prompt; see Engine.generate."""
        while True:
            try:
                return _Run(self, self._rows(prompts, settings), prompts, settings).finish()
            except torch.cuda.OutOfMemoryError:
                if self.memory_share < MEMORY_SHARE / 16:
                    raise
            self.memory_share /= 2
            logs.event(logging.WARNING, "out of memory: fewer rows at once", share=self.memory_share)
            self._drop()

    def size(self, rows: int) -> int:
        """Return how many rows a step takes for so many: one of few sizes where each has its graph."""
        if not self.static:
            return rows
        unit = max(16, 1 << max(0, rows.bit_length() - 4))
        return -(-rows // unit) * unit

    def _rows(self, prompts: list[list[int]], settings: Generation) -> Rows:
        columns = max(map(len, prompts)) + settings.max_tokens
        if not self.static:
            return self._made(len(prompts), columns, settings)
        columns = -(-columns // COLUMN_STEP) * COLUMN_STEP
        # The seed is no part of the shape: the draws are copied in.
        key = (self.size(len(prompts)), columns, settings.max_tokens, settings.stop_ids, settings.top_k,
               settings.stop_on_repeat, settings.temperature, settings.top_p)  # fmt: skip
        if self.kept is None or self.kept[0] != key:
            self._drop()
            count = min(self.size(len(prompts)), self._room(columns, settings))
            self.kept = (key, self._made(count, columns, settings))
        return self.kept[1]

    def _made(self, count: int, columns: int, settings: Generation) -> Rows:
        return Rows(self.inference, settings, self.token_limit, count=count, columns=columns)

    def _room(self, columns: int, settings: Generation) -> int:
        """Return how many rows fit the GPU's memory beside what one step and one prefill need."""
        config, size = self.decoder.config, self.decoder.head_weight.element_size()
        free = torch.cuda.mem_get_info(self.device)[0]
        free += torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        inner = 4 * config.intermediate_size + 8 * config.hidden_size
        cached = 2 * config.layers * config.kv_heads * config.head_dim * columns * size
        choosing = 2 * config.vocab_size * (2 * size + 8)  # eagerly, and in a graph's own memory
        noted = settings.max_tokens * (8 * settings.top_k + 16)
        room = (self.memory_share * free - PREFILL_TOKENS * inner * size) / (cached + choosing + noted)
        whole = self.size(max(1, int(room)))
        return whole if whole <= room else max(1, int(room))

    def _drop(self) -> None:
        self.kept = None
        self.graphs = Graphs(self.device, self.graphs.enabled, frugal=True)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


class _Run:
    """One call: which prompt is in which row, which wait, and what is done."""

    def __init__(self, generator: Generator, rows: Rows, prompts: list[list[int]],
                 settings: Generation) -> None:
        self.generator, self.rows, self.prompts, self.settings = generator, rows, prompts, settings
        self.waiting = deque(sorted(range(len(prompts)), key=lambda index: len(prompts[index])))
        self.owners: dict[int, int] = {}  # row -> prompt
        self.taken: dict[int, int] = {}   # row -> steps since its prefill
        self.done: list[Generated | None] = [None] * len(prompts)
        rows.active_b.zero_()
        self.draws_nc = torch.zeros(len(prompts), 0)
        if settings.temperature:
            # A row's draws depend on its prompt's place alone, not on which others run beside it.
            random = torch.Generator().manual_seed(settings.seed)
            self.draws_nc = torch.rand((len(prompts), settings.max_tokens + 1), generator=random)

    def finish(self) -> list[Generated]:
        """Generate until all prompts are done."""
        while self.waiting or self.owners:
            free = self.rows.count - len(self.owners)
            if self.waiting and (not self.owners or free * REFILL >= self.rows.count):
                self._admit(free)
            count = self._gathered()
            steps = self._steps()
            context = self._context(steps)
            # A kernel reads each row's own length; without it, graphs differ by the context they read.
            key = (count, context if self.generator.inference.kernels is None else 0)
            step = partial(self.rows.step, count, context)
            for _ in range(steps):
                self.generator.graphs.run(key, step)
            for row in self.taken:
                self.taken[row] += steps
            self._release()
        return [row for row in self.done if row is not None]

    def _admit(self, free: int) -> None:
        """Prefill the next prompts into the free rows, in groups of like length and bounded tokens."""
        places = [row for row in range(self.rows.count) if row not in self.owners]
        chosen = [self.waiting.popleft() for _ in range(min(free, len(self.waiting)))]
        pairs = list(zip(places, chosen, strict=False))
        for group in _prefills([len(self.prompts[prompt]) for prompt in chosen]):
            part = pairs[group]
            self.rows.prefill([row for row, _ in part], [self.prompts[prompt] for _, prompt in part])
        index_b = torch.tensor([row for row, _ in pairs], device=self.rows.device)
        self.rows.draws_bc[index_b] = self.draws_nc[chosen].to(self.rows.device)
        self.owners.update(pairs)
        self.taken.update((row, 0) for row, _ in pairs)

    def _gathered(self) -> int:
        """Return how many leading rows the next steps take, after rows beyond a smaller batch moved up."""
        last = self.generator.size(max(self.owners) + 1)
        fewer = self.generator.size(len(self.owners))
        limit = SHRINK * last if self.generator.static else last
        if self.waiting or fewer >= last or fewer > limit:
            return min(last, self.rows.count)
        sources = [row for row in self.owners if row >= fewer]
        holes = [row for row in range(fewer) if row not in self.owners][: len(sources)]
        if sources:
            self.rows.move(sources, holes, self._context(0))
        for source, hole in zip(sources, holes, strict=True):
            self.owners[hole], self.taken[hole] = self.owners.pop(source), self.taken.pop(source)
        return fewer

    def _steps(self) -> int:
        if not self.generator.static:
            return 1
        return min(STEPS, self.settings.max_tokens - min(self.taken.values()))

    def _context(self, steps: int) -> int:
        """Return a context that is more than what any row has in the cache until so many steps are done."""
        context = steps + max(
            len(self.prompts[prompt]) - 1 + self.taken[row] for row, prompt in self.owners.items()
        )
        if self.generator.static:
            context = -(-context // CONTEXT_STEP) * CONTEXT_STEP
        return min(context, self.rows.columns)

    def _release(self) -> None:
        """Take the continuations of the rows that have ended."""
        active = self.rows.active_b.tolist()
        ended = [row for row in self.owners if not active[row]]
        if not ended:
            return
        for row, generated in zip(ended, self.rows.read(ended), strict=True):
            self.done[self.owners.pop(row)] = generated
            del self.taken[row]


def _prefills(sizes: list[int]) -> list[slice]:
    """Split prompts, sorted by size, into groups that pad little and hold few enough tokens."""
    groups = []
    for group in prefill_groups(sizes):
        first = group.start
        for row in range(group.start, group.stop):
            if row > first and (row - first + 1) * sizes[row] > PREFILL_TOKENS:
                groups.append(slice(first, row))
                first = row
        groups.append(slice(first, group.stop))
    return groups


def prefill_groups(sizes: list[int]) -> list[slice]:
    """Split rows, sorted by their number of new tokens, into contiguous groups of like size.

    A group grows while its padding stays under half of it, so that one long prompt never makes a whole
    batch of short ones wait for its width.
    """
    groups, first, total = [], 0, 0
    for row, size in enumerate(sizes):
        if row > first and (row - first + 1) * size > 2 * (total + size):
            groups.append(slice(first, row))
            first, total = row, 0
        total += size
    groups.append(slice(first, len(sizes)))
    return groups
