"""Codecs side by side: real bits, error, speed, beside bitsandbytes, torchao and llama.cpp's own quantisers.

    make bench-bits                     (torchao and llama-cpp-python are used where they are installed)

Every arm of a matrix runs in this one process. Speeds are million weights for each second of processor time,
all threads counted: what one core does, on a busy machine too; the best of three. Error: squared error over
the matrix's squares. Writes benchmarks/results/bits-DEVICE.json.
"""

import argparse
import ctypes
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from benchmarks.machine import machine, write_results
from drafter import codecs
from drafter.codecs.entropy import to_codes
from drafter.weights import run_all

ROOT = Path(__file__).resolve().parent.parent
RATES = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0)
SHAPE = (2048, 4096)
REPEATS = 3
FIXED: dict[str, dict[str, Any]] = {
    "int4 g128": {"codec": "int4", "group": 128},
    "int4 g32": {"codec": "int4", "group": 32},
    "int4 g32 clipped": {"codec": "int4", "group": 32, "clip": True},
    "nf4 g64": {"codec": "nf4", "group": 64},
    "nf4 g64 + zstd": {"codec": "nf4", "group": 64, "zstd": 1},
    "int8": {"codec": "int8"},
    "fp8": {"codec": "fp8"},
}
COLUMNS = ("matrix", "arm", "ideal", "real", "over", "dB", "enc M/s", "dec M/s")
SHAPES = (".3f", ".3f", ".2%", ".2f", ".0f", ".0f")
GGML = {"Q4_K": (12, 4.5), "Q3_K": (11, 3.4375), "Q2_K": (10, 2.625), "TQ1_0": (34, 1.6875)}


@dataclass(frozen=True)
class Result:
    """One arm on one matrix; million weights a core and second, error against its own power."""

    matrix: str
    arm: str
    ideal_bits: float | None
    real_bits: float
    over_ideal: float | None
    error_db: float
    encode_speed: float | None
    decode_speed: float | None


def matrices(seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the matrices: two drawn, and a trained one where a drafter has been distilled here."""
    random = torch.Generator().manual_seed(seed)
    yield "Gaussian", torch.randn(SHAPE, generator=random)
    uniform = torch.rand(SHAPE, generator=random) - 0.5
    yield "Laplace", -uniform.sign() * torch.log1p(-2 * uniform.abs() * (1 - 1e-7))
    path = ROOT / "build" / "smollm2" / "distill" / "drafter.safetensors"
    if not path.is_file():
        print(f"{path} is not there (make distill): no trained matrix", file=sys.stderr)
        return
    with safe_open(path, framework="pt") as stored:
        names = sorted(name for name in set(stored.keys()) if name.endswith("down_proj.weight"))
        yield f"trained ({len(names)} x down_proj)", torch.cat([stored.get_tensor(n).float() for n in names])


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result and the processor seconds of the best of three calls."""
    best = float("inf")
    for _ in range(REPEATS):
        started = time.process_time()
        result = call()
        best = min(best, time.process_time() - started)
    return result, best


def error_db(decoded: Tensor, weight: Tensor) -> float:
    """Return squared error over squares, in dB."""
    error = (decoded.double() - weight).square().sum()
    return float(10 * torch.log10(error / weight.double().square().sum()))


def streamed(parts: codecs.Parts, settings: dict[str, Any]) -> Tensor:
    """Decode as the server's load does: blocks in threads, written to their place."""
    tensor = torch.empty(tuple(settings["shape"]))

    def place(job: codecs.Decoding) -> None:
        rows, values = job()()
        tensor[rows] = values

    run_all(partial(place, job) for job in codecs.blocks(parts, settings))
    return tensor


def own(arm: str, weight: Tensor, settings: dict[str, Any], side: codecs.Parts | None = None,
        ideal: float | None = None) -> Result:
    """Measure one of our codecs."""
    settings = settings | {"shape": list(weight.shape)}
    parts, encode_s = timed(lambda: codecs.encode(weight, settings, side))
    decoded, decode_s = timed(lambda: streamed(parts, settings))
    real = sum(part.nbytes for part in parts.values()) * 8 / weight.numel()
    found = result(arm, weight, decoded, real, (encode_s, decode_s))
    return found if ideal is None else replace(found, ideal_bits=round(ideal, 4),
                                               over_ideal=round(real / ideal - 1, 5))


def result(arm: str, weight: Tensor, decoded: Tensor, real: float,
           seconds: tuple[float, float | None]) -> Result:
    """Put one arm's numbers together; the matrix's name is added by whoever knows it."""
    speeds = [None if one is None else round(weight.numel() / one / 1e6, 1) for one in seconds]
    return Result("", arm, None, round(real, 4), None, round(error_db(decoded, weight), 3), *speeds)


def step_for(weight: Tensor, rate: float) -> tuple[Tensor, float]:
    """Return row steps of one size relative to the rows' rms, and the codes' ideal bits, at a rate."""
    rms = weight.square().mean(1).sqrt()
    low, high = -8.0, 5.0
    for _ in range(30):
        middle = (low + high) / 2
        steps = (rms * 2**middle).to(torch.bfloat16)
        ideal = ideal_bits(to_codes(weight, steps))
        low, high = (middle, high) if ideal > rate else (low, middle)
    return steps, ideal


def ideal_bits(codes: Tensor) -> float:
    """Return the entropy of a matrix's codes, all rows by one table, bits a weight."""
    counts = np.bincount((codes.flatten().to(torch.int32) + 32768).numpy())
    shares = counts[counts > 0] / codes.numel()
    return float(-(shares * np.log2(shares)).sum())


def bitsandbytes_nf4(weight: Tensor) -> Result:
    """Measure bitsandbytes' NF4, groups of 64."""
    from bitsandbytes import functional  # noqa: PLC0415

    (packed, state), encode_s = timed(
        lambda: functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    )
    decoded, decode_s = timed(lambda: functional.dequantize_4bit(packed, state))
    real = (packed.nbytes + state.absmax.nbytes) * 8 / weight.numel()
    return result("bitsandbytes nf4 g64", weight, decoded, real, (encode_s, decode_s))


def torchao_int4(weight: Tensor, group: int) -> Result:
    """Measure torchao's int4: groups with scale and zero point, both bfloat16."""
    from torchao.quantization import quant_primitives as q  # noqa: PLC0415

    size = (1, group)

    def encode() -> tuple[Tensor, Tensor, Tensor]:
        scale, zero = q.choose_qparams_affine(weight, q.MappingType.ASYMMETRIC, size, torch.uint8, 0, 15,
                                              scale_dtype=torch.bfloat16, zero_point_dtype=torch.bfloat16)
        return q.quantize_affine(weight, size, scale, zero, torch.uint8, 0, 15), scale, zero

    (packed, scale, zero), encode_s = timed(encode)
    decoded, decode_s = timed(lambda: q.dequantize_affine(packed, size, scale, zero, torch.uint8, 0, 15))
    return result(f"torchao int4 g{group}", weight, decoded.float(), 4 + 32 / group, (encode_s, decode_s))


def llama_cpp(weight: Tensor, library: ctypes.CDLL) -> Iterator[Result]:
    """Measure llama.cpp's quantisers without importance matrix, through ggml's own functions; one thread."""
    from gguf import GGMLQuantizationType, dequantize  # noqa: PLC0415

    columns = weight.shape[1] // 256 * 256
    source = weight[:, :columns].contiguous()
    for name, (kind, bits) in GGML.items():
        target = np.zeros((len(source), int(columns * bits / 8)), dtype=np.uint8)

        def encode(kind: int = kind, target: Any = target) -> int:
            return library.ggml_quantize_chunk(
                kind, ctypes.c_void_p(source.data_ptr()), ctypes.c_void_p(target.ctypes.data),
                ctypes.c_int64(0), ctypes.c_int64(len(source)), ctypes.c_int64(columns), None)

        written, encode_s = timed(encode)
        if written != target.nbytes:
            raise RuntimeError(f"{name}: ggml wrote {written} bytes, not {target.nbytes}")
        decoded = torch.from_numpy(dequantize(target, GGMLQuantizationType(kind)).copy())
        yield result(f"llama.cpp {name}", source, decoded, bits, (encode_s, None))


def ggml() -> ctypes.CDLL | None:
    """Load ggml out of llama-cpp-python, where that is installed."""
    found = importlib.util.find_spec("llama_cpp")
    folders = [] if found is None or found.origin is None else Path(found.origin).parents[:2]
    libraries = [folder / "lib" / "libggml-base.so" for folder in folders]
    built = next((path for path in libraries if path.is_file()), None)
    if built is None:
        print("llama-cpp-python is not installed: no llama.cpp arms", file=sys.stderr)
        return None
    library = ctypes.CDLL(str(built))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    return library


def measure(seed: int) -> Iterator[Result]:
    """Yield every arm on every matrix."""
    library = ggml()
    torchao = importlib.util.find_spec("torchao") is not None
    if not torchao:
        print("torchao is not installed: no torchao arms", file=sys.stderr)
    for matrix, weight in matrices(seed):
        for one in arms(weight, library, torchao):
            yield replace(one, matrix=matrix)


def arms(weight: Tensor, library: ctypes.CDLL | None, torchao: bool) -> Iterator[Result]:
    """Yield every arm on one matrix."""
    for rate in RATES:
        steps, ideal = step_for(weight, rate)
        yield own(f"entropy {rate}", weight, {"codec": "entropy"}, {"steps": steps}, ideal)
    for arm, settings in FIXED.items():
        yield own(arm, weight, settings)
    yield bitsandbytes_nf4(weight)
    if torchao:
        yield torchao_int4(weight, 32)
        yield torchao_int4(weight, 128)
    if library:
        yield from llama_cpp(weight, library)


def main(argv: list[str] | None = None) -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bits", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    results = []
    print(line(COLUMNS))
    for one in measure(options.seed):
        results.append(asdict(one))
        told = zip(list(asdict(one).values())[2:], SHAPES, strict=True)
        cells = ["" if value is None else f"{value:{shape}}" for value, shape in told]
        print(line((one.matrix, one.arm, *cells)), flush=True)
    threads = {"threads": torch.get_num_threads()}
    write_results("bits", machine("make bench-bits") | threads | {"results": results})
    return 0


def line(cells: Sequence[str]) -> str:
    """Return one line of the table."""
    return f"{cells[0]:26}{cells[1]:22}" + "".join(cell.rjust(10) for cell in cells[2:])


if __name__ == "__main__":
    sys.exit(main())
