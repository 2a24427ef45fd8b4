"""How fast is it here, and how far from what the machine allows?

    python bench.py                             # the bundled model
    python bench.py --model PATH                # any supported checkpoint
    python bench.py --config 8b                 # random weights of a published Qwen3's shape, nothing to download
    python bench.py --compare transformers      # the same prompts through transformers too

The workload is nano-vLLM's: seed 0, 256 prompts of 100 to 1,024 random tokens, 100 to 1,024 tokens out of each.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from nanoinfer import BUNDLED_MODEL, LLM, SamplingParams

# hidden_size, intermediate_size, layers, query heads, KV heads, head_dim, tied embeddings, vocabulary
SHAPES = {
    "tiny": (64, 128, 2, 4, 2, 32, True, 2048),
    "0.6b": (1024, 3072, 28, 16, 8, 128, True, 151936),
    "1.7b": (2048, 6144, 28, 16, 8, 128, True, 151936),
    "4b": (2560, 9728, 36, 32, 8, 128, True, 151936),
    "8b": (4096, 12288, 36, 32, 8, 128, False, 151936),
    "14b": (5120, 17408, 40, 40, 8, 128, False, 151936),
    "32b": (5120, 25600, 64, 64, 8, 128, False, 151936),
}
TEMPERATURE = 0.6


@dataclass
class Workload:
    """Prompt and output lengths, and the random tokens of each repeat's prompts."""

    prompts: list[list[int]]
    output_lens: list[int]

    @classmethod
    def nano(cls, num_seqs: int, min_len: int, max_len: int, vocab_size: int) -> Workload:
        """nano-vLLM's bench, drawn in its order from seed 0."""
        draw = random.Random(0).randint
        top = min(10000, vocab_size - 1)
        prompts = [[draw(0, top) for _ in range(draw(min_len, max_len))] for _ in range(num_seqs)]
        return cls(prompts, [draw(min_len, max_len) for _ in range(num_seqs)])

    def repeat(self, index: int, vocab_size: int) -> list[list[int]]:
        """The prompts with other tokens in each repeat, so that none finds the last one's prefixes cached."""
        top = min(10000, vocab_size - 1) + 1
        return [[(token + index) % top for token in prompt] for prompt in self.prompts]

    @property
    def tokens_in(self) -> int:
        """Prompt tokens of one repeat."""
        return sum(map(len, self.prompts))

    @property
    def tokens_out(self) -> int:
        """Generated tokens of one repeat."""
        return sum(self.output_lens)


@dataclass
class Floor:
    """The least time a workload can take: bytes that must be read, operations that must be done."""

    decode_bytes: float
    prefill_flops: float

    @classmethod
    def of(cls, work: Workload, hf: PretrainedConfig, max_num_seqs: int, itemsize: int) -> Floor:
        """KV of every decode step, the weights once a step, and the prompts' matrix products."""
        q_size, kv_size = hf.num_attention_heads * hf.head_dim, hf.num_key_value_heads * hf.head_dim
        layer = hf.hidden_size * (2 * q_size + 2 * kv_size + 3 * hf.intermediate_size)
        layers, head = hf.num_hidden_layers * layer, hf.vocab_size * hf.hidden_size
        lens = [(len(prompt), out) for prompt, out in zip(work.prompts, work.output_lens, strict=True)]
        decoded = [out - 1 for _, out in lens]  # prefill samples each sequence's first token
        steps = max(max(decoded), math.ceil(sum(decoded) / max_num_seqs))
        contexts = sum(
            out * (prompt + 1) + out * (out - 1) // 2 for (prompt, _), out in zip(lens, decoded, strict=True)
        )
        kv_token = 2 * hf.num_hidden_layers * kv_size * itemsize
        attention = sum(2 * hf.num_hidden_layers * q_size * prompt * prompt for prompt, _ in lens)  # causal: half
        return cls(
            decode_bytes=steps * (layers + head) * itemsize + contexts * kv_token,
            prefill_flops=2 * layers * work.tokens_in + 2 * head * len(lens) + attention,
        )

    def seconds(self, bandwidth: float, flops: float, devices: int) -> float:
        """On `devices` of this bandwidth, in bytes per second, and matrix rate, in operations per second."""
        return (self.decode_bytes / bandwidth + self.prefill_flops / flops) / devices


def measure_bandwidth(device: str) -> float:
    """Bytes per second of a large copy, read and written bytes both counted."""
    size = min(1 << 32, torch.cuda.mem_get_info()[0] // 4) if device == "cuda" else 1 << 28
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    source.random_()
    return 2 * size / median_seconds(lambda: target.copy_(source), device)


def measure_flops(device: str, dtype: torch.dtype) -> float:
    """Operations per second of a large matrix product of random numbers."""
    size = 8192 if device == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / median_seconds(lambda: a @ b, device)


def median_seconds(run: Callable[[], object], device: str, times: int = 11) -> float:
    """The median time of one call, by the device's own clock."""
    run()
    return statistics.median(_seconds_on_cuda(run) if device == "cuda" else _seconds_on_cpu(run) for _ in range(times))


def _seconds_on_cuda(run: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def _seconds_on_cpu(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def write_config(name: str, folder: str) -> None:
    """Write the config.json of a published shape."""
    hidden, intermediate, layers, heads, kv_heads, head_dim, tied, vocabulary = SHAPES[name]
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "tie_word_embeddings": tied,
        "vocab_size": vocabulary,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
        "torch_dtype": "bfloat16",
    }
    (Path(folder) / "config.json").write_text(json.dumps(config))


def run_nanoinfer(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Start, warm up, time the repeats."""
    start = time.perf_counter()
    llm = LLM(
        folder,
        tensor_parallel_size=args.tp,
        attention_backend=args.backend,
        enforce_eager=args.enforce_eager,
        max_num_seqs=args.max_num_seqs,
        max_model_len=args.max_model_len,
        dtype=args.dtype,
        device=args.device,
        load_format="dummy" if args.config else "safetensors",
    )
    startup = time.perf_counter() - start
    with llm:
        config = llm.config
        vocabulary = config.hf_config.vocab_size
        work = Workload.nano(args.num_seqs, args.min_len, args.max_len, vocabulary)
        if (
            longest := max(map(sum, zip(map(len, work.prompts), work.output_lens, strict=True)))
        ) > config.max_model_len:
            raise SystemExit(
                f"a request needs {longest} tokens, max_model_len is {config.max_model_len}: lower --max-len"
            )
        params = [
            SamplingParams(temperature=TEMPERATURE, ignore_eos=True, max_tokens=length) for length in work.output_lens
        ]
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)
        repeats = []
        for index in range(args.repeats or (3 if config.device == "cuda" else 1)):
            prompts = work.repeat(index, vocabulary)
            start = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            repeats.append(time.perf_counter() - start)
            assert [len(output["token_ids"]) for output in outputs] == work.output_lens
        # Beside the engine: on an H200, what is allocated from memory that it has given back copies a tenth slower.
        bandwidth, flops = measure_bandwidth(config.device), measure_flops(config.device, config.torch_dtype)
    floor = Floor.of(work, config.hf_config, config.max_num_seqs, config.torch_dtype.itemsize)
    seconds, floor_seconds = statistics.median(repeats), floor.seconds(bandwidth, flops, args.tp)
    return {
        "config": args.config or args.model,
        "workload": f"nano {args.min_len}-{args.max_len}",
        "device": torch.cuda.get_device_name() if config.device == "cuda" else "cpu",
        "tensor_parallel_size": args.tp,
        "attention_backend": args.backend,
        "enforce_eager": args.enforce_eager,
        "max_num_seqs": args.max_num_seqs,
        "dtype": config.dtype,
        "num_seqs": args.num_seqs,
        "tokens_in": work.tokens_in,
        "tokens_out": work.tokens_out,
        "startup_seconds": startup,
        "repeats": repeats,
        "seconds": seconds,
        "tokens_per_second": work.tokens_out / seconds,
        "bandwidth_bytes_per_second": bandwidth,
        "matrix_flops": flops,
        "floor_seconds": floor_seconds,
        "fraction_of_floor": floor_seconds / seconds,
        "versions": {name: installed_version(name) for name in ("torch", "triton", "transformers", "flash-attn")},
    }


def run_transformers(args: argparse.Namespace, folder: str, result: dict[str, Any]) -> dict[str, Any]:
    """The same prompts as one left-padded batch through transformers' generate."""
    device = "cpu" if result["device"] == "cpu" else "cuda"
    if args.config:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    else:
        model = AutoModelForCausalLM.from_pretrained(folder)
    model = model.to(device, getattr(torch, result["dtype"])).eval()
    work = Workload.nano(args.num_seqs, args.min_len, args.max_len, model.config.vocab_size)
    longest, most = max(map(len, work.prompts)), max(work.output_lens)
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in work.prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in work.prompts], device=device)
    start = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=most,
            min_new_tokens=most,
            do_sample=True,
            temperature=TEMPERATURE,
            top_k=0,
            pad_token_id=0,
        )
        if device == "cuda":
            torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "tokens_per_second": work.tokens_out / seconds, "ratio": seconds / result["seconds"]}


def installed_version(package: str) -> str | None:
    """The version of a package, None if it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def report(result: dict[str, Any]) -> None:
    """Print what a person wants to know."""
    print(f"{result['config']} on {result['device']}: ready after {result['startup_seconds']:.1f} s")
    runs = ", ".join(f"{seconds:.2f}" for seconds in result["repeats"])
    print(
        f"{result['num_seqs']} requests, {result['tokens_in']:,} tokens in, {result['tokens_out']:,} out:"
        f" {result['seconds']:.2f} s (runs: {runs}), {result['tokens_per_second']:,.0f} tok/s"
    )
    print(
        f"floor: {result['floor_seconds']:.2f} s at {result['bandwidth_bytes_per_second'] / 1e12:.3f} TB/s and"
        f" {result['matrix_flops'] / 1e12:.2f} TFLOP/s; reached {result['fraction_of_floor']:.1%} of it"
    )
    if other := result.get("transformers"):
        print(
            f"transformers: {other['seconds']:.2f} s, {other['tokens_per_second']:,.0f} tok/s;"
            f" nanoinfer is {other['ratio']:.2f} times as fast"
        )


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", default=BUNDLED_MODEL, help="folder or Hub id (default: the bundled model)")
    which.add_argument("--config", choices=SHAPES, help="random weights of this Qwen3's shape")
    parser.add_argument("--num-seqs", type=int, default=256, help="requests")
    parser.add_argument("--min-len", type=int, default=100, help="shortest prompt and shortest output")
    parser.add_argument("--max-len", type=int, default=1024, help="longest prompt and longest output")
    parser.add_argument("--max-num-seqs", type=int, default=512, help="the most requests that run at once")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--backend", default="auto", help="attention backend")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--repeats", type=int, help="timed runs (default: 3 on CUDA, 1 on the CPU)")
    parser.add_argument("--compare", choices=["transformers"], help="run the same prompts through it too")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    args = parser.parse_args(argv)
    for name in ("num_seqs", "min_len"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if args.max_len < args.min_len:
        parser.error(f"--max-len {args.max_len} is less than --min-len {args.min_len}")
    if args.repeats is not None and args.repeats < 1:
        parser.error("--repeats must be at least 1")
    if args.json:
        try:
            Path(args.json).touch()
        except OSError as error:
            parser.error(f"--json {args.json}: {error.strerror}")
    return args


def main() -> None:
    """Measure, print, write."""
    args = parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = scratch if args.config else args.model
        if args.config:
            write_config(args.config, scratch)
        result = run_nanoinfer(args, folder)
        if args.compare:
            result["transformers"] = run_transformers(args, folder, result)
    report(result)
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
