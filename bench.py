"""How fast is nanoinfer on this machine, and how far from the most that the machine allows?

    python bench.py                             # the bundled model
    python bench.py --model PATH                # any supported checkpoint
    python bench.py --config 8b                 # random weights of a published shape, nothing to download
    python bench.py --compare transformers      # the same prompts through transformers too
    python bench.py --plot run.png              # draw the last repeat, step by step
    python bench.py --config 8b --weights       # how long weights take to change, and memory to go and come back

The prompts are random tokens from seed 0. --help lists the workloads.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nanoinfer import BUNDLED_MODEL, LLM, SamplingParams
from nanoinfer.benchmark.floor import Floor, measure_bandwidth, measure_flops
from nanoinfer.benchmark.least_steps import Limits
from nanoinfer.benchmark.weights import time_weights
from nanoinfer.benchmark.workloads import SHAPES, WORKLOADS, Recipe, Workload, has_experts, write_config
from nanoinfer.checkpoint import Checkpoint
from nanoinfer.config import Config
from nanoinfer.engine.step_result import StepResult
from nanoinfer.hub import CHECKPOINT_FILES, find_folder
from nanoinfer.kernels.fp8 import FP8
from nanoinfer.kernels.linear.fp8_linear import HAS_FP8
from nanoinfer.models import describe

SAMPLING = SamplingParams(temperature=0.6, ignore_eos=True)  # nano-vLLM's
SAMPLING_OPTIONS = ("temperature", "top_k", "top_p")
OUTPUT_BYTES = 1 << 18  # more than a file of --json or --plot needs


@dataclass
class Repeat:
    """One timed run: when it began on time.perf_counter's clock, how long it took, and the engine's steps."""

    start: float
    seconds: float
    steps: list[StepResult]


def run_nanoinfer(args: argparse.Namespace, folder: str) -> tuple[dict[str, Any], Repeat]:
    """Start, warm up, time the repeats; returns the figures and the last repeat."""
    recipe: Recipe = args.recipe
    start = time.perf_counter()
    llm = make_llm(args, folder)
    startup = time.perf_counter() - start
    with llm:
        config = llm.config
        work = recipe.draw(config.description.vocab_size)
        check_fits(work, config)
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)
        count = args.repeats or (3 if config.device == "cuda" else 1)
        repeats = [time_repeat(llm, work, index, args.sampling) for index in range(count)]
        # Measure beside the engine: on an H200, memory that the engine has given back copies a tenth slower.
        bandwidth, flops = measure_bandwidth(config.device), measure_flops(config.device, config.torch_dtype)
        layer_flops = measure_flops("cuda", FP8) if multiplies_fp8(config) else flops
    in_fp8 = FP8.itemsize if config.description.fp8 else None
    itemsizes = config.torch_dtype.itemsize, config.torch_cache_dtype.itemsize, in_fp8
    limits = limits_of(config)
    floor = Floor.of(work, config.description, limits, *itemsizes)
    floor_seconds = floor.seconds(bandwidth, flops, args.tp * args.dp, layer_flops)
    seconds = statistics.median(repeat.seconds for repeat in repeats)
    return {
        "command": args.command,
        "config": args.config or args.model,
        "workload": f"{args.workload} {recipe}",
        "device": torch.cuda.get_device_name() if config.device == "cuda" else "cpu",
        "tensor_parallel_size": args.tp,
        "data_parallel_size": args.dp,
        "attention_backend": args.backend,
        "enforce_eager": args.enforce_eager,
        "deterministic": args.deterministic,
        "max_num_seqs": recipe.max_num_seqs,
        "sampling": {name: getattr(args.sampling, name) for name in SAMPLING_OPTIONS},
        "logprobs": args.logprobs,
        "dtype": config.dtype,
        "quantization": args.quantization,
        "kv_cache_dtype": config.kv_cache_dtype,
        "kv_cache_tokens": limits.blocks * limits.block_size,
        "num_seqs": recipe.num_seqs,
        "tokens_in": work.tokens_in,
        "tokens_out": work.tokens_out,
        "startup_seconds": startup,
        "repeats": [repeat.seconds for repeat in repeats],
        "seconds": seconds,
        "tokens_per_second": work.tokens_out / seconds,
        "bandwidth_bytes_per_second": bandwidth,
        "matrix_flops": flops,
        "layer_matrix_flops": layer_flops,
        "floor_seconds": floor_seconds,
        "fraction_of_floor": floor_seconds / seconds,
        "versions": {name: installed_version(name) for name in ("torch", "triton", "transformers", "flash-attn")},
    }, repeats[-1]


def multiplies_fp8(config: Config) -> bool:
    """Whether the layers' matrices are in FP8, and the device has units that multiply such numbers."""
    if config.description.fp8 is None or config.device == "cpu":
        return False
    return torch.cuda.get_device_capability() >= HAS_FP8


def limits_of(config: Config) -> Limits:
    """Return what one engine holds and does at once; config: of an LLM, which knows the size of its KV cache."""
    assert config.num_kvcache_blocks is not None
    return Limits(
        rows=config.max_num_seqs,
        tokens=config.max_num_batched_tokens,
        blocks=config.num_kvcache_blocks,
        block_size=config.kvcache_block_size,
    )


def make_llm(args: argparse.Namespace, folder: str) -> LLM:
    """Make the LLM that the command line asks for; exit with the error's message if that cannot be."""
    try:
        length = args.max_model_len or min(args.recipe.max_model_len, longest_of(folder))
        return LLM(
            folder,
            tensor_parallel_size=args.tp,
            data_parallel_size=args.dp,
            attention_backend=args.backend,
            enforce_eager=args.enforce_eager,
            max_num_seqs=args.recipe.max_num_seqs,
            max_model_len=length,
            dtype=args.dtype,
            quantization=args.quantization,
            kv_cache_dtype=args.kv_cache_dtype,
            device=args.device,
            load_format=args.load_format,
            deterministic=args.deterministic,
        )
    except ValueError as error:
        raise SystemExit(f"bench.py: error: {error}") from None


def longest_of(folder: str) -> int:
    """Return the most tokens that the model allows a sequence; folder: or a Hub id."""
    return describe(Checkpoint.open(find_folder("model", folder, None, CHECKPOINT_FILES)).hf_config).max_position


def run_weights(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Time changes of the weights and sleep, and print each row; returns the figures."""
    with make_llm(args, folder) as llm:
        device = torch.cuda.get_device_name() if llm.config.device == "cuda" else "cpu"
        print(f"{args.config or args.model} on {device}, {args.tp} ranks; {llm.memory}")
        rows = []
        for row in time_weights(llm, args.repeats or 5):
            print(row, flush=True)
            rows.append(asdict(row))
    name = args.config or args.model
    return {"config": name, "device": device, "tensor_parallel_size": args.tp, "weights": rows}


def check_fits(work: Workload, config: Config) -> None:
    """Exit when a request is longer than max_model_len, which the model's own limit may have lowered."""
    longest = max(len(prompt) + out for prompt, out in zip(work.prompts, work.output_lens, strict=True))
    limit = config.description.max_position
    remedy = "raise --max-model-len" if longest <= limit else f"this model has {limit} at most, take another"
    if longest > config.max_model_len:
        raise SystemExit(
            f"bench.py: error: a request needs {longest} tokens, max_model_len is {config.max_model_len}: {remedy},"
            " or lower --max-len, or change --workload"
        )


def time_repeat(llm: LLM, work: Workload, index: int, sampling: SamplingParams) -> Repeat:
    """Generate all that the workload asks for, with the tokens of repeat `index`."""
    prompts = work.repeat(index, llm.config.description.vocab_size)
    params = [replace(sampling, max_tokens=out, n=work.samples) for out in work.output_lens]
    steps: list[StepResult] = []
    llm.engine.on_step = steps.append
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    lens = [len(sample.token_ids) for output in outputs for sample in output.samples]
    assert lens == [out for out in work.output_lens for _ in range(work.samples)]
    return Repeat(start, seconds, steps)


def plot(repeat: Repeat, title: str, file: str) -> None:
    """Draw tokens per second over the repeat's time into `file`, and each replica's running rows and used blocks."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    rates, rows, blocks = figure.subplots(3, sharex=True)
    steps = sorted(repeat.steps, key=lambda step: step.ready_at or 0.0)  # replicas tell theirs a little later
    times = times_of(steps, repeat.start)
    for name, color in (("prefill", "tab:orange"), ("decode", "tab:blue")):
        tokens = [getattr(step, f"num_{name}_tokens") for step in steps]
        rates.stairs(*binned_rate(times, tokens), color=color, label=name)
    for replica in sorted({step.replica for step in steps}):
        own = [step for step in steps if step.replica == replica]
        rows.stairs([step.num_running for step in own], times_of(own, repeat.start), label=f"replica {replica}")
        blocks.stairs([100 * step.blocks_used for step in own], times_of(own, repeat.start))
    if any(step.replica for step in steps):
        rows.legend()
    rates.set(title=title, ylabel="tokens per second", yscale="log")
    rates.legend()
    rows.set(ylabel="running rows")
    blocks.set(ylabel="KV-cache blocks in use, %", xlabel="seconds", xlim=(0, times[-1]))
    figure.savefig(file)


def times_of(steps: list[StepResult], start: float) -> list[float]:
    """When the first step began, 0.0, and when each was done, in seconds after `start`."""
    return [0.0, *(step.ready_at - start for step in steps if step.ready_at is not None)]


def binned_rate(times: list[float], tokens: list[int], bins: int = 100) -> tuple[np.ndarray, np.ndarray]:
    """Tokens per second in equal bins, and the bins' edges; step i runs evenly from times[i] to times[i + 1]."""
    edges = np.linspace(0, times[-1], bins + 1)
    done = np.interp(edges, times, np.cumsum([0, *tokens]))
    return np.diff(done) / np.diff(edges), edges


def run_transformers(args: argparse.Namespace, folder: str, result: dict[str, Any]) -> dict[str, Any]:
    """Run the same prompts as one left-padded batch through transformers' generate."""
    from transformers import AutoConfig, AutoModelForCausalLM  # here, for ranks and replicas import this file, too

    device = "cpu" if result["device"] == "cpu" else "cuda"
    if args.config:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    else:
        model = AutoModelForCausalLM.from_pretrained(folder)
    model = model.to(device, getattr(torch, result["dtype"])).eval()
    work = args.recipe.draw(model.config.vocab_size)
    longest, most = max(map(len, work.prompts)), max(work.output_lens)
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in work.prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in work.prompts], device=device)
    start = time.perf_counter()
    with torch.inference_mode():
        length = {"max_new_tokens": most, "min_new_tokens": most, "num_return_sequences": work.samples}
        model.generate(ids, attention_mask=mask, pad_token_id=0, **transformers_sampling(args.sampling), **length)
        if device == "cuda":
            torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "tokens_per_second": work.tokens_out / seconds, "ratio": seconds / result["seconds"]}


def transformers_sampling(sampling: SamplingParams) -> dict[str, Any]:
    """Return the same settings as transformers' generate takes them."""
    if sampling.is_greedy:
        return {"do_sample": False}
    return {"do_sample": True, **{name: getattr(sampling, name) for name in SAMPLING_OPTIONS}}


def installed_version(package: str) -> str | None:
    """Return the version of a package, None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def report(result: dict[str, Any]) -> None:
    """Print the figures of nanoinfer's run, for a person to read."""
    print(f"{result['config']} on {result['device']}: ready after {result['startup_seconds']:.1f} s")
    runs = ", ".join(f"{seconds:.2f}" for seconds in result["repeats"])
    print(
        f"{result['workload']}: {result['num_seqs']} requests, {result['tokens_in']:,} tokens in,"
        f" {result['tokens_out']:,} out: {result['seconds']:.2f} s (runs: {runs}),"
        f" {result['tokens_per_second']:,.0f} tok/s"
    )
    print(
        f"floor: {result['floor_seconds']:.2f} s at {result['bandwidth_bytes_per_second'] / 1e12:.3f} TB/s and"
        f" {result['matrix_flops'] / 1e12:.2f} TFLOP/s; reached {result['fraction_of_floor']:.1%} of it",
        flush=True,
    )


def report_transformers(other: dict[str, Any]) -> None:
    """Print how the run of transformers compares."""
    print(
        f"transformers: {other['seconds']:.2f} s, {other['tokens_per_second']:,.0f} tok/s;"
        f" nanoinfer is {other['ratio']:.2f} times as fast"
    )


def write_outputs(args: argparse.Namespace, result: dict[str, Any], last: Repeat | None) -> None:
    """Write the files of --json and --plot. If one cannot be written, write the other, and exit with an error."""
    errors = []
    if args.json:
        figures = json.dumps(result, indent=2) + "\n"
        try:
            Path(args.json).write_text(figures, "utf-8")
        except OSError as error:
            print(figures, end="")
            errors.append(f"--json {args.json}: {error.strerror}: the figures were printed instead")
    if args.plot and last is not None:
        try:
            plot(last, f"{result['config']} on {result['device']}: {result['workload']}", args.plot)
        except OSError as error:
            errors.append(f"--plot {args.plot}: {error.strerror or error}")
    if errors:
        raise SystemExit(f"bench.py: error: {'; '.join(errors)}")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", default=BUNDLED_MODEL, help="folder or Hub id (default: the bundled model)")
    which.add_argument("--config", choices=SHAPES, help="random weights of this shape")
    parser.add_argument(
        "--routing", choices=["even", "skewed"], default="even",
        help="of random experts: how often tokens use each; skewed follows Zipf's law (default: even)",
    )  # fmt: skip
    listed = "; ".join(f"{name}: {recipe.num_seqs} x {recipe}" for name, recipe in WORKLOADS.items())
    parser.add_argument("--workload", choices=WORKLOADS, default="nano", help=f"tokens of {listed} (default: nano)")
    parser.add_argument("--num-seqs", type=int, help="requests (this and the next four default to the workload's)")
    parser.add_argument("--min-len", type=int, help="shortest prompt and shortest output of nano, refill and prefix")
    parser.add_argument("--max-len", type=int, help="longest prompt and longest output of nano, refill and prefix")
    parser.add_argument("--max-num-seqs", type=int, help="the most requests that run at once")
    parser.add_argument("--max-model-len", type=int, help="the most tokens of a request, prompt and output")
    parser.add_argument("--temperature", type=float, default=SAMPLING.temperature, help="0 is greedy (default: 0.6)")
    parser.add_argument("--top-k", type=int, default=SAMPLING.top_k, help="default: all tokens")
    parser.add_argument("--top-p", type=float, default=SAMPLING.top_p, help="default: 1")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--dp", type=int, default=1, help="replicas, each of which has so many ranks")
    parser.add_argument("--quantization", help="fp8 (default: none)")
    parser.add_argument("--kv-cache-dtype", default="auto", help="auto or fp8")
    parser.add_argument("--backend", default="auto", help="attention backend")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--deterministic", action="store_true", help="the same bits in any company")
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--repeats", type=int, help="timed runs (default: 3 on CUDA, 1 on the CPU)")
    parser.add_argument("--logprobs", type=int, help="let every request ask for log-probabilities (default: none)")
    parser.add_argument("--weights", action="store_true", help="time changes of the weights, and sleep, instead")
    parser.add_argument("--compare", choices=["transformers"], help="run the same prompts through it too")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.add_argument("--plot", metavar="FILE", help="draw the last repeat there; needs matplotlib")
    args = parser.parse_args(argv)
    args.command = shlex.join(sys.argv[1:] if argv is None else argv)
    if args.routing == "skewed" and not (args.config and has_experts(args.config)):
        parser.error("--routing skewed: needs a --config with experts")
    if args.weights and (args.compare or args.plot):
        parser.error("--weights: runs no requests to compare or to plot")
    if args.weights and args.dp > 1:
        parser.error("--weights: times one engine, without --dp")
    args.load_format = "safetensors" if not args.config else "dummy" if args.routing == "even" else "dummy_skewed"
    try:
        args.recipe = choose_recipe(args)
        sampling = {name: getattr(args, name) for name in SAMPLING_OPTIONS}
        args.sampling = replace(SAMPLING, **sampling, logprobs=args.logprobs)
        check_outputs(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def choose_recipe(args: argparse.Namespace) -> Recipe:
    """Return the workload's recipe with the command line's values. Raises ValueError for values that make no sense."""
    for name in ("num_seqs", "min_len", "max_len", "max_num_seqs", "max_model_len", "repeats"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    names = ("num_seqs", "max_num_seqs", "max_model_len")
    recipe = replace(WORKLOADS[args.workload], **{name: value for name in names if (value := getattr(args, name))})
    if not (args.min_len or args.max_len):
        return recipe
    low, high = recipe.prompt_lens
    if low == high:
        raise ValueError(f"--workload {args.workload} has fixed lengths: leave out --min-len and --max-len")
    lens = low, high = args.min_len or low, args.max_len or high
    if high < low:
        raise ValueError(f"--max-len {high} is less than --min-len {low}")
    return replace(recipe, prompt_lens=lens, output_lens=lens)


def check_outputs(args: argparse.Namespace) -> None:
    """Raise ValueError for a --json or --plot file that cannot be written."""
    if args.plot:
        check_plot(args.plot)
    for option, file in (("json", args.json), ("plot", args.plot)):
        if file:
            check_writable(option, Path(file))


def check_writable(option: str, file: Path) -> None:
    """Raise ValueError if the file cannot be written or the disk is full; leave no file where none was."""
    try:
        existed = file.exists()
        with file.open("ab", buffering=0) as opened:
            if file.is_file():  # a terminal or a pipe cannot take back the test's bytes
                size = opened.tell()
                try:
                    if opened.write(bytes(OUTPUT_BYTES)) < OUTPUT_BYTES:
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                finally:
                    opened.truncate(size)
                    if not existed:
                        file.unlink()
    except OSError as error:
        raise ValueError(f"--{option} {file}: {error.strerror}") from None


def check_plot(file: str) -> None:
    """Raise ValueError if matplotlib is missing, or does not write files of this suffix."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(f"--plot {file} needs matplotlib: pip install matplotlib") from None
    known = Figure().canvas.get_supported_filetypes()
    if (suffix := Path(file).suffix[1:].lower()) not in known:
        raise ValueError(f"--plot {file}: matplotlib does not write {suffix!r} files, only {', '.join(sorted(known))}")


def main() -> None:
    """Measure, print, write."""
    args = parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = scratch if args.config else args.model
        if args.config:
            write_config(args.config, scratch)
        last: Repeat | None = None
        if args.weights:
            result = run_weights(args, folder)
        else:
            result, last = run_nanoinfer(args, folder)
            report(result)
        if args.compare:
            result["transformers"] = run_transformers(args, folder, result)
            report_transformers(result["transformers"])
    write_outputs(args, result, last)


if __name__ == "__main__":
    main()
