"""bench-train: the training loop against the GPU's matmul rate and against a plain Hugging Face Trainer.

Usage: python -m benchmarks.train [--shapes smollm2-16 qwen3-0.6b qwen3-1.7b qwen3-4b] [--steps 8]

Random weights and random rows of 512 to 1,024 tokens, three quarters of them continuation (SmolLM2: 100 to
250, half of them), top-20 of the target at each. Both loops train the same rows in one process, one after
the other: ours packed to `batch_tokens`, the plain one padded to its longest row, with about as many tokens.
Rates count tokens of rows, never padding. Utilisation is model FLOPs over what an 8,192^3 bfloat16 matmul
reaches here: 6 x weights x tokens (output matrix: continuation positions only), 6 x layers x heads x head_dim
x sum of squared lengths for causal attention; work done twice for activation checkpointing is not counted.
Ours distils once more with bitsandbytes' 8-bit AdamW: slower, in less memory.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils import parametrize

from benchmarks.machine import machine, write_results
from benchmarks.shapes import SHAPES, clear, random_decoder, transformers_config
from drafter.codecs import round_trip
from drafter.config import ModelConfig
from stages.bits.bases import BASES
from stages.bits.views import RoundTripView, fixed_plan
from stages.job import Job
from stages.profile import Qat
from stages.training.batches import Batch, Schedule, Selection
from stages.training.loss import Targets
from stages.training.rows import Row, Rows
from stages.training.trainer import Trainer

TOP_K = 20
WARM_STEPS = 4
INT4 = {"codec": "int4", "group": 32}


@dataclass(frozen=True)
class Case:
    """A drafter to be trained: its shape, the rows it sees, and the settings of either loop."""

    config: ModelConfig
    row_tokens: tuple[int, int]
    continuation_share: float
    batch_tokens: int
    checkpointing: bool = False
    plain_rows: int = 8


SMOLLM2 = BASES["SmolLM2-135M"].with_layers(16)
CASES = {
    "smollm2-16": Case(SMOLLM2, (100, 250), 0.5, 16_384, plain_rows=96),
    "qwen3-0.6b": Case(SHAPES["qwen3-0.6b"], (512, 1_024), 0.75, 16_384, plain_rows=16),
    "qwen3-1.7b": Case(SHAPES["qwen3-1.7b"], (512, 1_024), 0.75, 16_384, plain_rows=16),
    "qwen3-4b": Case(SHAPES["qwen3-4b"], (512, 1_024), 0.75, 16_384, checkpointing=True),
}


class DoneError(Exception):
    """Enough steps were timed."""


class Timed(Trainer):
    """Takes the time from the end of the warm-up to the end of the last step."""

    flops = 0.0
    tokens = 0

    def _train_step(self, batch: Batch, targets: Targets) -> None:
        if self.step == WARM_STEPS:
            torch.cuda.synchronize()
            self.began, self.flops, self.tokens = time.perf_counter(), 0.0, 0
        super()._train_step(batch, targets)
        sizes = self.sizes[self.step - 1]
        self.tokens += sum(sizes)
        self.flops += model_flops(self.config, sizes, len(targets.tokens_n))
        if self.step == self.settings.steps:
            torch.cuda.synchronize()
            self.seconds = time.perf_counter() - self.began
            raise DoneError

    def _batches(self, kept: Selection, target: Any, steps: int) -> Iterator[tuple[Batch, Targets]]:
        self.sizes: list[list[int]] = []
        schedule = Schedule(kept.sizes, self.settings.batch_tokens, self.job.seed)
        for step, pair in enumerate(super()._batches(kept, target, steps), self.step):
            self.sizes.append(kept.sizes[schedule.rows(step)].tolist())
            yield pair


def model_flops(config: ModelConfig, sizes: list[int], positions: int) -> float:
    """Return the floating-point operations of one step, both ways; see the module's docstring."""
    inner, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    layer = config.hidden_size * (2 * inner + 2 * kv + 3 * config.intermediate_size)
    body = 6.0 * config.layers * (layer * sum(sizes) + inner * sum(size * size for size in sizes))
    return body + 6.0 * config.vocab_size * config.hidden_size * positions


def random_rows(case: Case, tokens: int) -> Rows:
    """Rows of random tokens, as a teacher's shard holds them."""
    random = torch.Generator().manual_seed(0)
    low, high = case.row_tokens
    sizes = torch.randint(low, high + 1, (tokens * 2 // (low + high) + 1,), generator=random)
    continuation = (sizes * case.continuation_share).long()
    counts = {"prompt": sizes - continuation + 1, "continuation": continuation}
    total, vocabulary = int(continuation.sum()), case.config.vocab_size
    first = torch.randint(vocabulary - TOP_K, (total, 1), generator=random)
    shard = {f"{name}_offsets": torch.cat((torch.zeros(1).long(), count.cumsum(0)))
             for name, count in counts.items()}
    shard |= {f"{name}_ids": torch.randint(vocabulary, (int(count.sum()),), generator=random).int()
              for name, count in counts.items()}
    logprobs = torch.randn(1, TOP_K + 5, generator=random).log_softmax(-1)[:, :TOP_K].half()
    shard |= {"topk_ids": (first + torch.arange(TOP_K)).int(), "topk_logprobs": logprobs.repeat(total, 1)}
    return Rows([shard])


def ours(case: Case, rows: Rows, steps: int, qat: bool, **more: Any) -> dict[str, Any]:
    """Time our loop."""
    clear_all()
    settings = Qat(codec="int4", dtype="bfloat16", steps=WARM_STEPS + steps, batch_tokens=case.batch_tokens,
                        learning_rate=1e-5, warmup_steps=1, max_row_tokens=case.row_tokens[1],
                        activation_checkpointing=case.checkpointing, **more)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = Job("bench", None, {}, folder, folder, folder, 0, "cuda", folder / "log", checkpoint_s=1e9)
        start = random_decoder(case.config).state_dict()
        view = RoundTripView(fixed_plan(start, settings), start) if qat else None
        trainer = Timed(job, settings, case.config, start, view, measured=not qat)
        del start
        began = time.perf_counter()
        trainer.tau = lambda _dev: Tau0  # type: ignore[method-assign,assignment,return-value]
        with suppress(DoneError):
            trainer.train(rows, [])
    return report(trainer.tokens, trainer.seconds, trainer.flops,
                  warm_s=time.perf_counter() - began - trainer.seconds)


class Tau0:
    """No dev set is looked at here."""

    tau = 0.0


class FakeInt4(nn.Module):
    """int4 rounding of a weight, straight through: what a user would write by hand."""

    def forward(self, weight: Tensor) -> Tensor:
        """Return the rounded weight."""
        settings = INT4 | {"shape": list(weight.shape)}
        return weight + (round_trip(weight.detach(), settings) - weight).detach()


class Plain(transformers.Trainer):
    """The same loss over all logits of a padded batch."""

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], **_more: Any) -> Tensor:
        """Return CE and KL, half each."""
        logits_btv = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        own_nv = logits_btv[inputs["predicts"]].float().log_softmax(-1)
        own_nk, p_nk = own_nv.gather(1, inputs["topk_ids"]), inputs["topk_logprobs"].exp()
        p_rest, q_rest = ((1 - x.sum(-1)).clamp(min=1e-6) for x in (p_nk, own_nk.exp()))
        kl = (p_nk * (inputs["topk_logprobs"] - own_nk)).sum(-1) + p_rest * (p_rest.log() - q_rest.log())
        return 0.5 * (kl - own_nv.gather(1, inputs["targets"][:, None])[:, 0]).mean()


def padded(rows: list[Row]) -> dict[str, Tensor]:
    """Collate rows the usual way: to the longest, with a mask."""
    texts = [torch.cat((row.prompt, row.continuation[:-1])).long() for row in rows]
    pad = nn.utils.rnn.pad_sequence
    predicts = [torch.arange(len(text)) >= len(row.prompt) - 1 for row, text in zip(rows, texts, strict=True)]
    return {
        "input_ids": pad(texts, batch_first=True),
        "attention_mask": pad([torch.ones_like(text) for text in texts], batch_first=True),
        "predicts": pad(predicts, batch_first=True),
        "targets": torch.cat([row.continuation for row in rows]).long(),
        "topk_ids": torch.cat([row.topk_ids for row in rows]).long(),
        "topk_logprobs": torch.cat([row.topk_logprobs for row in rows]).float(),
    }


class Clock(transformers.TrainerCallback):
    """Takes the time from the end of the warm-up to the last step."""

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_more: Any) -> None:
        """Start or stop."""
        torch.cuda.synchronize()
        if state.global_step == WARM_STEPS:
            self.began = time.perf_counter()
        self.seconds = time.perf_counter() - getattr(self, "began", 0.0)


def plain(case: Case, rows: Rows, steps: int, qat: bool) -> dict[str, Any]:
    """Time the Hugging Face Trainer, with the rows in a batch halved until it fits: the faster of two runs.

    The first pays for every new length of a batch.
    """
    count = case.plain_rows
    while count:
        try:
            runs = [plain_of(case, rows, steps, qat, count) for _ in range(2)]
        except torch.OutOfMemoryError:
            count //= 2
        else:
            return max(runs, key=itemgetter("tokens_per_s")) | {"rows_per_batch": count}
    return {"failed": "out of memory with one row"}


def plain_of(case: Case, rows: Rows, steps: int, qat: bool, count: int) -> dict[str, Any]:
    """Time it with so many rows in a batch."""
    clear_all()
    shape = transformers_config(case.config, use_cache=False)
    model = transformers.AutoModelForCausalLM.from_config(shape, attn_implementation="sdpa")
    if qat:
        for module in list(model.modules()):
            if isinstance(module, nn.Linear | nn.Embedding):
                parametrize.register_parametrization(module, "weight", FakeInt4())
    with tempfile.TemporaryDirectory() as name:
        arguments = transformers.TrainingArguments(
            output_dir=name, per_device_train_batch_size=count, max_steps=WARM_STEPS + steps, bf16=True,
            learning_rate=1e-5, gradient_checkpointing=case.checkpointing, logging_steps=10**6,
            save_strategy="no",
            report_to=[], remove_unused_columns=False, disable_tqdm=True, seed=0, dataloader_num_workers=0,
            optim="adamw_torch_fused")
        clock = Clock()
        needed = [rows[index % len(rows)] for index in range((WARM_STEPS + steps) * count)]
        trainer = Plain(model=model, args=arguments, train_dataset=needed, data_collator=padded,
                        callbacks=[clock])
        trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(needed)
        trainer.train()
    timed = needed[WARM_STEPS * count :]
    sizes = [len(row.prompt) + len(row.continuation) - 1 for row in timed]
    flops = model_flops(case.config, sizes, sum(len(row.continuation) for row in timed))
    return report(sum(sizes), clock.seconds, flops)


def report(tokens: int, seconds: float, flops: float, **more: float) -> dict[str, Any]:
    """Turn what was counted into rates."""
    peak = torch.cuda.max_memory_allocated() / 2**30
    return {"tokens_per_s": round(tokens / seconds), "model_tflops_per_s": round(flops / seconds / 1e12, 1),
            "seconds": round(seconds, 3), "peak_gib": round(peak, 1),
            **{name: round(value, 1) for name, value in more.items()}}


def matmul_rate() -> float:
    """Return FLOP/s of a large bfloat16 matmul of random numbers, the mean of ten after three."""
    left, right = (torch.randn(8_192, 8_192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        left @ right
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(10):
        left @ right
    torch.cuda.synchronize()
    return 10 * 2 * 8_192**3 / (time.perf_counter() - began)


def clear_all() -> None:
    """Give the last loop's memory back, and forget its peak and what was compiled for its shapes."""
    clear()
    torch._dynamo.reset()


def measure(name: str, steps: int, rate: float) -> dict[str, Any]:
    """Time both loops, distilling and in QAT, on one shape."""
    case = CASES[name]
    rows = random_rows(case, (WARM_STEPS + steps + 2) * case.batch_tokens)
    found: dict[str, Any] = {"batch_tokens": case.batch_tokens,
                             "activation_checkpointing": case.checkpointing}
    for loop in (ours, plain):
        for kind in ("distill", "qat"):
            one = loop(case, rows, steps, kind == "qat")
            if "model_tflops_per_s" in one:
                one["share_of_matmul_rate"] = round(one["model_tflops_per_s"] * 1e12 / rate, 3)
            found[f"{loop.__name__}_{kind}"] = one
            print(name, loop.__name__, kind, one, flush=True)
    found["ours_distill_8_bit"] = ours(case, rows, steps, False, optimiser="bitsandbytes")
    print(name, "ours distill, 8-bit AdamW", found["ours_distill_8_bit"], flush=True)
    speeds = {key: value["tokens_per_s"] for key, value in found.items()
              if isinstance(value, dict) and "tokens_per_s" in value}
    for kind in ("distill", "qat"):
        if {f"ours_{kind}", f"plain_{kind}"} <= speeds.keys():
            found[f"ours_over_plain_{kind}"] = round(speeds[f"ours_{kind}"] / speeds[f"plain_{kind}"], 2)
    found["qat_step_over_distill_step"] = round(speeds["ours_distill"] / speeds["ours_qat"], 3)
    return found


def main(argv: list[str] | None = None) -> int:
    """Measure, and write benchmarks/results/train-<device>.json."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=CASES, default=list(CASES), help="which shapes")
    parser.add_argument("--steps", type=int, default=8, help=f"timed steps, after {WARM_STEPS} to warm up")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("draftmill: bench-train needs a GPU, and torch sees none", file=sys.stderr)
        return 2
    if find_spec("bitsandbytes") is None:
        print("draftmill: bench-train needs bitsandbytes, which this Python lacks", file=sys.stderr)
        return 2
    rate = matmul_rate()
    found = {"matmul_tflops_per_s": round(rate / 1e12, 1)} | machine("python -m benchmarks.train")
    print(json.dumps(found), flush=True)
    for name in options.shapes:
        found[name] = measure(name, options.steps, rate)
        write_results("train", found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
