"""A copy of this repository with a toy target in its vendor/, so that the real stages turn within seconds."""

import functools
import hashlib
import json
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from outputs import WHEEL, write_wheelhouse
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("stages", "drafter", "profiles", "lock", "docker")
FILES = ("serve.sh", "LICENSE", "Makefile")
STAGES = ("fetch", "data", "teacher", "distill", "qat", "wheels", "pack", "selfcheck")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
STOP = 2
STOP_BIAS, SPECIAL_BIAS, ODD_BIAS, PART_BIAS = 3, -40, -12, -4  # in logits, about; whole words have none
SIZE = LlamaConfig(
    vocab_size=640, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, rope_theta=10_000.0, rms_norm_eps=1e-5, tie_word_embeddings=False,
    max_position_embeddings=1024, eos_token_id=STOP, bos_token_id=1, pad_token_id=0,
)  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PROFILE = f"""
extends = "base"
device = "cpu"
[limits]
limit_bytes = 4_000_000
reserve_bytes = 3_800_000
[target]
source = "toy"
format = "gguf"
name = "toy/Random-Llama"
revision = "sha256:toy"
token_count = {SIZE.vocab_size}
stop_ids = [{STOP}]
[fetch]
sources = ["toy"]
[data]
heldout_share = 0.15
max_prompt_tokens = 160
[[data.sources]]
id = "templates"
kind = "template"
rows = 28
[[data.sources]]
id = "invented"
kind = "synth"
rows = 6
max_turn_tokens = 48
[teacher]
dtype = "float32"
max_tokens = 24
top_k = 4
shard_rows = 8
stop_on_repeat = 4
context_tokens = 1560
[start]
layers = [0, 1, 3]
[distill]
dtype = "bfloat16"
steps = 12
batch_tokens = 640
learning_rate = 4e-3
warmup_steps = 2
[qat]
codec = "int4"
dtype = "bfloat16"
steps = 9
batch_tokens = 640
learning_rate = 1e-3
warmup_steps = 2
[checkpoints]
minutes = 0
"""
SOURCE = """[toy]
kind = "package"
uri = "pkg:pypi/toy@1.0"
licence = "Apache-2.0"
archive = {{ path = "toy-1.0-py3-none-any.whl", size = 1, sha256 = "{zeros}" }}
files = [{{ path = "toy.gguf", member = "toy.gguf", size = {size}, sha256 = "{digest}" }}]
"""


class MissedError(Exception):
    """The stage had done its work before it could be killed: the machine was busy elsewhere."""


class Mill:
    """One repository under a folder, driven as its user drives it: in processes of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def make(cls, root: Path) -> "Mill":
        """Copy the code, and plant target, wheel, locks, conversations and the profile `toy`."""
        ignore = shutil.ignore_patterns("__pycache__")
        root.mkdir(parents=True)
        for name in FOLDERS:
            shutil.copytree(ROOT / name, root / name, ignore=ignore)
        for name in FILES:
            shutil.copy(ROOT / name, root)
        write_target(root / "vendor" / "toy" / "toy.gguf")
        whole = (root / "vendor" / "toy" / "toy.gguf").read_bytes()
        digest = hashlib.sha256(whole).hexdigest()
        mill = cls(root)
        mill.write("lock/sources.toml", SOURCE.format(zeros="0" * 64, size=len(whole), digest=digest))
        wheel, lock = _wheel()
        (root / "vendor" / "wheels").mkdir()
        (root / "vendor" / "wheels" / WHEEL).write_bytes(wheel)
        mill.write("lock/serve.txt", lock)
        mill.write("lock/serve.in", "draftmill-probe\n")
        mill.write("profiles/toy.toml", PROFILE.replace("sha256:toy", f"sha256:{digest}"))
        for name, count in (("dev", 8), ("examples", 4)):
            lines = (ROOT / "examples" / f"{name}.jsonl").read_text().splitlines()
            mill.write(f"examples/{name}.jsonl", "\n".join(sorted(lines, key=len)[:count]) + "\n")
        return mill

    def copy(self, place: Path) -> "Mill":
        """The same repository, with all that was built in it, elsewhere."""
        shutil.copytree(self.root, place)
        return Mill(place)

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def replace(self, name: str, old: str, new: str) -> None:
        text = (self.root / name).read_text()
        assert text.count(old) == 1, f"{name} holds {old!r} {text.count(old)} times"
        self.write(name, text.replace(old, new))

    def start(self, *arguments: str, **more: Any) -> "subprocess.Popen[str]":
        environment = {**os.environ, "PROFILE": "toy", "RUNNER": "host", "OMP_NUM_THREADS": "1"}
        # The least urgent process of the machine, so that whoever means to kill it in time does.
        command = ["nice", "-n", "19", sys.executable, "-m", "stages.run", *arguments]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(command, cwd=self.root, env=environment, text=True, start_new_session=True,
                                **streams | more)

    def run(self, *arguments: str, code: int = 0) -> str:
        """Run `stages.run` to its end; return all that it said."""
        process = self.start(*arguments)
        said, _ = process.communicate(timeout=900)
        assert process.returncode == code, f"exit {process.returncode}\n{said}"
        return said

    def folder(self, stage: str) -> Path:
        own = {"fetch": "vendor", "wheels": "wheels", "pack": "output"}
        return self.root / own.get(stage, f"build/toy/{stage}")

    def files(self, stage: str) -> dict[str, bytes]:
        """What a stage has left, by name; of the log of downloads all but the times, which no two share."""
        paths = [path for path in self.folder(stage).rglob("*") if path.is_file()]
        found = {path.relative_to(self.folder(stage)).as_posix(): path.read_bytes() for path in paths}
        if "downloads.jsonl" in found:
            found["downloads.jsonl"] = re.sub(rb'"time": "[^"]*", ', b"", found["downloads.jsonl"])
        return found

    def forget(self, stage: str) -> None:
        """Remove a stage's outputs, record and log, as if it had never run."""
        shutil.rmtree(self.folder(stage))
        for kind in ("json", "log"):
            (self.root / "logs" / "toy" / f"{stage}.{kind}").unlink()

    def record(self, stage: str) -> dict:
        return json.loads((self.root / "logs" / "toy" / f"{stage}.json").read_text())

    def metrics(self, stage: str) -> dict:
        """What a stage reports of its work, but for the pace of its runs, which differs between any two."""
        return {key: value for key, value in self.told(stage).items() if key != "runs"}

    def told(self, stage: str) -> dict:
        return self.record(stage)["predicate"]["runDetails"]["metadata"]["draftmill_run"]["metrics"]

    def events(self, stage: str) -> list[dict]:
        """The lines of a stage's log."""
        path = self.root / "logs" / "toy" / f"{stage}.log"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []

    def work(self, stage: str, pattern: str) -> list[Path]:
        """The files of a stage's work folder, in order."""
        return sorted((self.root / "build" / "toy" / ".work").glob(f"{stage}-*/{pattern}"))

    def kill(self, stage: str, due: Callable[[], bool], delay_s: float, whom: str) -> None:
        """Start a stage, and kill -9 its worker, its wrapper or both some time after `due` holds.

        Raises:
            MissedError: it had ended by then, and well.
        """
        seen = len(self.events(stage))
        process = self.start(stage)
        limit = time.monotonic() + 120
        # Two events: it has started, and has said how much there is to do.
        while not (len(self.events(stage)) >= seen + 2 and due()):
            if process.poll() is not None:
                assert process.returncode == 0, f"{stage} ended by itself\n{process.stdout.read()}"
                raise MissedError
            assert time.monotonic() < limit, f"{stage} never came to where it is to be killed"
            time.sleep(0.002)
        time.sleep(delay_s)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        if not children:
            said, _ = process.communicate(timeout=60)
            assert process.returncode == 0, said
            raise MissedError
        assert len(children) == 1, f"{stage} has more than its worker"
        victims = {"worker": [*map(int, children)], "wrapper": [process.pid]}
        handles = [os.pidfd_open(pid) for pid in map(int, children)]
        for pid in victims.get(whom, [process.pid, *map(int, children)]):
            os.kill(pid, signal.SIGKILL)
        said, _ = process.communicate(timeout=60)
        for handle in handles:
            wait_for_end(handle)
        if process.returncode == 0:
            raise MissedError
        assert process.returncode == (137 if whom == "worker" else -signal.SIGKILL), said


def wait_for_end(handle: int) -> None:
    """Wait until the process of a pidfd is gone."""
    assert select.select([handle], [], [], 60)[0], "the worker outlived its wrapper"
    os.close(handle)


def finished(factory: pytest.TempPathFactory) -> Mill:
    """The mill after one undisturbed run of every stage, made once a session; tests work on copies of it."""
    mill, code, said = _finished(factory.getbasetemp())
    assert code == 0, said
    return mill


@functools.cache
def _finished(folder: Path) -> tuple[Mill, int, str]:
    mill = Mill.make(folder / "first mill")
    process = mill.start("all")
    said, _ = process.communicate(timeout=900)
    return mill, process.returncode, said


@functools.cache
def _wheel() -> tuple[bytes, str]:
    """Return a small wheel and its lock; once, since the wheel holds the time of its making."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "wheels"
        write_wheelhouse(folder)
        return (folder / WHEEL).read_bytes(), (folder / "requirements.txt").read_text()


def payload_sums(mill: Mill) -> str:
    return (mill.root / "output" / "SHA256SUMS").read_text()


@functools.cache
def target_weights() -> dict[str, Tensor]:
    """Random weights under transformers' names, whose text is varied, made of words, and ends.

    One dimension of the residual stream stays the same throughout, and the head makes each token's bias of
    it: so words come up more often than fragments, and the stop id now and then.
    """
    random_ = torch.Generator().manual_seed(7)
    weights = {}
    for name, shape in LlamaForCausalLM(SIZE).state_dict().items():
        drawn = torch.randn(shape.shape, generator=random_)
        weights[name] = 1 + 0.1 * drawn if drawn.ndim == 1 else 0.25 * drawn
    weights["model.embed_tokens.weight"] *= 4
    weights["model.embed_tokens.weight"][:, 0] = 3
    weights["model.norm.weight"][0] = 1
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight *= 0.5
            weight[0] = 0
    weights["lm_head.weight"][:, 0] = torch.tensor([_bias(token) for token in vocabulary()[0]])
    return weights


def _bias(token: str) -> float:
    if token in SPECIAL:
        return STOP_BIAS if token == SPECIAL[STOP] else SPECIAL_BIAS
    word = token.removeprefix("Ġ")
    if not (word.isascii() and word.isalpha()):
        return ODD_BIAS
    return 0 if token.startswith("Ġ") and len(word) > 2 else PART_BIAS


@functools.cache
def vocabulary() -> tuple[list[str], list[str]]:
    """Return tokens and merges of a small byte-level BPE, learnt from the dev conversations."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=SIZE.vocab_size - len(SPECIAL), initial_alphabet=alphabet,
                                  show_progress=False)
    rows = (ROOT / "examples" / "dev.jsonl").read_text(encoding="utf-8").splitlines()
    learner.train_from_iterator([json.loads(row)["messages"][0]["content"] for row in rows], trainer)
    merges = json.loads(learner.to_str())["model"]["merges"]
    tokens = [*SPECIAL, *alphabet, *("".join(pair) for pair in merges)]
    assert len(set(tokens)) == SIZE.vocab_size
    return tokens, [" ".join(pair) for pair in merges]


def target_model() -> LlamaForCausalLM:
    """The toy target in transformers, from the weights themselves."""
    model = LlamaForCausalLM(SIZE)
    model.load_state_dict(target_weights())
    return model.eval()


def write_target(path: Path) -> None:
    """Write the toy target as llama.cpp would: its names, and its order of the rows of q and k."""
    tokens, merges = vocabulary()
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(SIZE.num_hidden_layers)
    writer.add_embedding_length(SIZE.hidden_size)
    writer.add_feed_forward_length(SIZE.intermediate_size)
    writer.add_head_count(SIZE.num_attention_heads)
    writer.add_head_count_kv(SIZE.num_key_value_heads)
    writer.add_rope_freq_base(SIZE.rope_theta)
    writer.add_layer_norm_rms_eps(SIZE.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(STOP)
    writer.add_chat_template(TEMPLATE)
    for name, weight in target_weights().items():
        writer.add_tensor(_gguf_name(name), np.ascontiguousarray(_gguf_rows(name, weight).numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str) -> str:
    parts = {"input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
             "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate",
             "post_attention_layernorm": "ffn_norm", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
             "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
             "model.layers": "blk"}
    for ours, theirs in parts.items():
        name = name.replace(ours, theirs)
    return name


def _gguf_rows(name: str, weight: Tensor) -> Tensor:
    heads = {"q_proj": SIZE.num_attention_heads, "k_proj": SIZE.num_key_value_heads}
    count = next((heads[part] for part in heads if part in name), 0)
    if not count:
        return weight
    rows, columns = weight.shape
    halves = weight.reshape(count, 2, rows // count // 2, columns)
    return halves.transpose(1, 2).reshape(rows, columns)


def moments(seed: str, marks: range) -> list[tuple[int, float]]:
    """Three moments in rising order: after so many finished files, and so many seconds more."""
    rng = random.Random(seed)
    return [(mark, rng.uniform(0, 0.015)) for mark in sorted(rng.sample(marks, 3))]
