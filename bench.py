"""How fast is nanoinfer on this machine, and how far from the most that the machine allows?

    python bench.py                             # the bundled model; on the CPU in less than a minute
    python bench.py --model PATH                # any supported checkpoint
    python bench.py --config 8b                 # random weights of a published shape, nothing to download
    python bench.py --compare transformers      # the same prompts through transformers too
    python bench.py --plot run.png              # draw the last repeat, step by step
    python bench.py --config 8b --weights       # how long weights take to change, and memory to go and come back
    python bench.py --config 8b --save FOLDER   # write these random weights, so that others measure the same

The prompts are random tokens from seed 0. --help lists the workloads. Standard error says what the command is at.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from nanoinfer import LLM, SamplingParams
from nanoinfer.attention.cache_layout import USUAL_BLOCK_SIZE
from nanoinfer.benchmark.adapters import load_adapters
from nanoinfer.benchmark.compare import SAMPLING_OPTIONS, report_transformers, run_transformers
from nanoinfer.benchmark.eyes.shapes import EYES
from nanoinfer.benchmark.floor import Floor, Machine, measure_bandwidth, measure_flops, measure_rates
from nanoinfer.benchmark.least_steps import Limits
from nanoinfer.benchmark.output.files import check_files, write_files
from nanoinfer.benchmark.output.report import report
from nanoinfer.benchmark.output.status_line import StatusLine
from nanoinfer.benchmark.repeats import Repeat, count_steps, time_repeat
from nanoinfer.benchmark.save import check_save, save_weights
from nanoinfer.benchmark.shapes import SHAPE_FIELDS, SHAPES, has_experts, write_config
from nanoinfer.benchmark.speculation.repeating import Successors, let_head_agree, write_repeating_weights
from nanoinfer.benchmark.weights import time_weights
from nanoinfer.benchmark.workloads import WORKLOADS, Recipe, Workload
from nanoinfer.checkpoint import Checkpoint
from nanoinfer.config import AUTO_OFFLOAD
from nanoinfer.hub import CHECKPOINT_FILES, find_folder
from nanoinfer.models import describe
from nanoinfer.process.standard_error import say
from nanoinfer.runner.streaming.rates import link_rate

SAMPLING = SamplingParams(temperature=0.6, ignore_eos=True)  # nano-vLLM's
TIED, VOCABULARY = SHAPE_FIELDS.index("tie_word_embeddings"), SHAPE_FIELDS.index("vocab_size")
SEQS_ON_CPU = 32  # requests of a run without options, which takes less than a minute on two cores


def run_nanoinfer(args: argparse.Namespace, folder: str, status: StatusLine) -> tuple[dict[str, Any], Repeat]:
    """Start, warm up, time the repeats; returns the figures and the last repeat."""
    recipe: Recipe = args.recipe
    start = time.perf_counter()
    llm = make_llm(args, folder)
    startup = time.perf_counter() - start
    with llm:
        config = llm.config
        work = recipe.draw(config.description.vocab_size, EYES.get(args.config))
        check_fits(work, llm)
        if recipe.repeat_rate is not None:
            status.begin("writing weights whose text repeats")
            write_repeating_weights(llm, recipe.repeat_rate)
            if args.speculation == "mtp":
                let_head_agree(llm)
        status.begin("warming up")
        count = args.repeats or (3 if config.device == "cuda" else 1)
        first = work.repeat(count, config.description.vocab_size)[:1] if work.images else [[1, 2, 3]]
        if recipe.only_reads:
            llm.embed(first, use_tqdm=False)
        else:
            llm.generate(first, SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)
        adapters, load_seconds = load_adapters(llm, args.adapters) if args.adapters else ([], None)
        repeats = []
        llm.reset_stats()
        for index in range(count):
            status.begin(f"repeat {index + 1} of {count}")
            repeats.append(time_repeat(llm, work, index, args.sampling, status, adapters))
        stats = llm.stats()
        status.begin("measuring the memory's bandwidth and the matrix rate")
        # Measure beside the engine: on an H200, memory that the engine has given back copies a tenth slower.
        bandwidth, flops = measure_bandwidth(config.device), measure_flops(config.device, config.torch_dtype)
        rates = measure_rates(config)
        link = link_rate(config.device_of(0)) if llm.memory.streamed else None
        copying = 0 if link is None else llm.memory.streamed / link
    itemsizes = (
        config.torch_dtype.itemsize,
        config.torch_cache_dtype.itemsize,
        config.torch_state_dtype.itemsize,
    )
    limits = limits_of(llm)
    floor = Floor.of(work.as_it_ended(repeats[-1].output_lens), config.description, limits, *itemsizes)
    machine = Machine(bandwidth, flops, args.tp * args.dp, rates, copying)
    floor_seconds, overlapped = floor.seconds(machine), floor.overlapped_seconds(machine)
    seconds = statistics.median(repeat.seconds for repeat in repeats)
    tokens_out = round(statistics.median(sum(repeat.output_lens) for repeat in repeats))
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
        "routing": args.routing if args.config and has_experts(args.config) else None,
        "quantization": args.quantization,
        "kv_cache_dtype": config.kv_cache_dtype,
        "kv_offload_gib": args.kv_offload_gib,
        "weight_offload_gib": args.weight_offload_gib,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "streamed_bytes": llm.memory.streamed,
        "copy_seconds": llm.memory.copy_seconds,
        "link_bytes_per_second": link,
        "adapters": args.adapters,
        "max_adapters": config.max_adapters,
        "max_adapter_rank": config.max_adapter_rank,
        "load_adapter_seconds": load_seconds,
        "speculation": args.speculation,
        "draft_model": args.draft_model,
        "max_guesses": config.max_guesses,
        "accepted_tokens": stats.num_accepted_tokens,
        "tokens_per_decode_row": stats.tokens_per_decode_row,
        "kv_cache_tokens": config.cache_layout.tokens_of(limits.blocks, config.max_model_len),
        "num_seqs": recipe.num_seqs,
        "tokens_in": work.tokens_in,
        "tokens_out": tokens_out,
        "startup_seconds": startup,
        "repeats": [repeat.seconds for repeat in repeats],
        "seconds": seconds,
        "tokens_per_second": (tokens_out or work.tokens_in) / seconds,
        "bandwidth_bytes_per_second": bandwidth,
        "matrix_flops": flops,
        "layer_matrix_flops": {format.name: rate for format, rate in rates.items()},
        "floor_seconds": floor_seconds,
        "fraction_of_floor": floor_seconds / seconds,
        "overlapped_floor_seconds": overlapped,
        "fraction_of_overlapped_floor": overlapped / seconds,
        "floor_decode_steps": floor.decode_steps,
        **count_steps(repeats, work.tokens_in),
        "versions": {name: installed_version(name) for name in ("torch", "triton", "transformers", "flash-attn")},
    }, repeats[-1]


def limits_of(llm: LLM) -> Limits:
    """Return what one engine holds and does at once."""
    config = llm.config
    assert config.num_kvcache_blocks is not None
    return Limits(
        rows=llm.memory.rows,
        tokens=config.max_num_batched_tokens,
        blocks=config.cache_layout.pool_of(config.num_kvcache_blocks),
        groups=config.cache_layout.groups,
    )


def make_llm(args: argparse.Namespace, folder: str) -> LLM:
    """Make the LLM that the command line asks for; exit with the error's message if that cannot be."""
    say(f"starting {args.config or args.model}")  # it stays: the LLM may write below it
    try:
        blocks = args.recipe.num_blocks(USUAL_BLOCK_SIZE)
        room = args.recipe.max_model_len if blocks is None else blocks * USUAL_BLOCK_SIZE
        length = args.max_model_len or min(args.recipe.max_model_len, longest_of(args.config, folder), room)
        return LLM(
            folder,
            runner="pooling" if args.recipe.only_reads else "auto",
            tensor_parallel_size=args.tp,
            data_parallel_size=args.dp,
            attention_backend=args.backend,
            enforce_eager=args.enforce_eager,
            max_num_seqs=args.recipe.max_num_seqs,
            max_model_len=length,
            kvcache_block_size=None if blocks is None else USUAL_BLOCK_SIZE,
            num_kvcache_blocks=blocks,
            dtype=args.dtype,
            quantization=args.quantization,
            kv_cache_dtype=args.kv_cache_dtype,
            kv_offload_gib=args.kv_offload_gib,
            weight_offload_gib=args.weight_offload_gib,
            gpu_memory_utilization=args.gpu_memory_utilization,
            device=args.device,
            load_format=args.load_format,
            max_adapters=args.max_adapters,
            max_adapter_rank=args.max_adapter_rank,
            deterministic=args.deterministic,
            speculation=args.drafter or args.speculation,
            draft_model=args.draft,
            max_guesses=args.max_guesses,
        )
    except ValueError as error:
        raise SystemExit(f"bench.py: error: {error}") from None


def longest_of(config: str | None, folder: str) -> int:
    """Return the most tokens that the model allows a sequence. Of a published shape, no file need be read for that.

    folder: or a Hub id
    """
    if config is not None:
        return int(SHAPES[config][1]["max_position_embeddings"])
    return describe(Checkpoint.open(find_folder("model", folder, None, CHECKPOINT_FILES)).hf_config).max_position


def run_weights(args: argparse.Namespace, folder: str, status: StatusLine) -> dict[str, Any]:
    """Time changes of the weights and sleep, and print each row; returns the figures."""
    with make_llm(args, folder) as llm:
        device = torch.cuda.get_device_name() if llm.config.device == "cuda" else "cpu"
        print(f"{args.config or args.model} on {device}, {args.tp} ranks; {llm.memory}")
        rows = []
        for row in time_weights(llm, args.repeats or 5, status):
            status.clear()
            print(row, flush=True)
            rows.append(asdict(row))
    name = args.config or args.model
    return {"config": name, "device": device, "tensor_parallel_size": args.tp, "weights": rows}


def check_fits(work: Workload, llm: LLM) -> None:
    """Exit when a request is longer than max_model_len, which the model or the KV cache may have lowered."""
    config = llm.config
    longest = max(len(prompt) + out for prompt, out in zip(work.prompts, work.output_lens, strict=True))
    limit = config.description.max_position
    remedy = "raise --max-model-len" if longest <= limit else f"this model has {limit} at most, take another"
    if longest <= limit and longest > config.cache_layout.longest(limits_of(llm).blocks, longest):
        remedy = f"raise --kv-tokens to {longest}"
    if longest > config.max_model_len:
        raise SystemExit(
            f"bench.py: error: a request needs {longest} tokens, max_model_len is {config.max_model_len}: {remedy},"
            " or lower --max-len, or change --workload"
        )


def installed_version(package: str) -> str | None:
    """Return the version of a package, None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", default="bundled", help="folder or Hub id (default: %(default)s)")
    which.add_argument("--config", choices=SHAPES, help="random weights of this shape")
    parser.add_argument(
        "--routing", choices=["even", "skewed"], default="even",
        help="of random experts: how often tokens use each; skewed follows Zipf's law (default: even)",
    )  # fmt: skip
    listed = "; ".join(f"{name}: {recipe.num_seqs} x {recipe}" for name, recipe in WORKLOADS.items())
    of_nano = f"default: nano; on the CPU {SEQS_ON_CPU} of its requests"
    parser.add_argument("--workload", choices=WORKLOADS, help=f"tokens of {listed} ({of_nano})")
    parser.add_argument("--num-seqs", type=int, help="requests (this and the next five default to the workload's)")
    parser.add_argument("--min-len", type=int, help="shortest prompt and shortest output, where lengths are drawn")
    parser.add_argument("--max-len", type=int, help="longest prompt and longest output, where lengths are drawn")
    parser.add_argument("--max-num-seqs", type=int, help="the most requests that run at once")
    parser.add_argument("--max-model-len", type=int, help="the most tokens of a request, prompt and output")
    parser.add_argument("--kv-tokens", type=int, help="tokens of the KV cache, rounded up to whole blocks")
    parser.add_argument("--temperature", type=float, default=SAMPLING.temperature, help="0 is greedy (default: 0.6)")
    parser.add_argument("--top-k", type=int, default=SAMPLING.top_k, help="default: all tokens")
    parser.add_argument("--top-p", type=float, default=SAMPLING.top_p, help="default: 1")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--dp", type=int, default=1, help="replicas, each of which has so many ranks")
    parser.add_argument("--quantization", help="fp8, int8, int4, mxfp4 or nf4 (default: none)")
    parser.add_argument("--kv-cache-dtype", default="auto", help="auto or fp8")
    parser.add_argument("--kv-offload-gib", type=float, help="host memory for what the KV cache cannot hold; 0: none")
    parser.add_argument(
        "--weight-offload-gib", type=gib_or_auto, default=0, help="layers in host memory, or auto (default: none)"
    )
    parser.add_argument("--gpu-memory-utilization", type=float, help="the share of the GPU's memory (default: LLM's)")
    parser.add_argument("--adapters", type=int, default=0, help="random adapters, which requests name in turn")
    parser.add_argument("--max-adapters", type=int, help="room for so many (default: those of --adapters)")
    parser.add_argument("--max-adapter-rank", type=int, default=16, help="rank of each (default: %(default)s)")
    drafters = ["auto", "suffix", "draft", "mtp", "successors"]
    what = "what guesses; successors: what follows in texts of repeat and rollouts, where mtp's hold (default: none)"
    parser.add_argument("--speculation", choices=drafters, help=what)
    parser.add_argument(
        "--draft-model", help="for --speculation draft or auto: folder, Hub id, or a shape beside --config"
    )
    parser.add_argument("--max-guesses", type=int, default=8, help="for each request and step (default: %(default)s)")
    parser.add_argument("--backend", default="auto", help="attention backend")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--deterministic", action="store_true", help="the same bits in any company")
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--repeats", type=int, help="timed runs (default: 3 on CUDA, 1 on the CPU)")
    parser.add_argument("--logprobs", type=int, help="let every request ask for log-probabilities (default: none)")
    parser.add_argument("--weights", action="store_true", help="time changes of the weights, and sleep, instead")
    parser.add_argument("--compare", choices=["transformers"], help="run the same prompts through it too")
    parser.add_argument("--save", metavar="FOLDER", help="write the weights of --config there, and measure nothing")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.add_argument("--plot", metavar="FILE", help="draw the last repeat there; needs matplotlib")
    args = parser.parse_args(argv)
    try:
        check_save(args, parser.get_default)
    except ValueError as error:
        parser.error(str(error))
    args.command = shlex.join(sys.argv[1:] if argv is None else argv)
    if args.routing == "skewed" and not (args.config and has_experts(args.config)):
        parser.error("--routing skewed: needs a --config with experts")
    if args.workload and WORKLOADS[args.workload].images and (args.config not in EYES or args.compare):
        parser.error(f"--workload {args.workload}: needs --config {' or '.join(EYES)}, and no --compare")
    if args.workload and WORKLOADS[args.workload].only_reads and (args.compare or args.adapters or args.weights):
        parser.error(f"--workload {args.workload}: generates nothing, without --compare, --adapters and --weights")
    repeats = args.workload and WORKLOADS[args.workload].repeat_rate is not None
    if (repeats or args.speculation == "successors") and not (
        repeats and args.config and not SHAPES[args.config][0][TIED]
    ):
        parser.error(
            f"--workload {args.workload}, --speculation {args.speculation}: text repeats at a rate with --workload"
            " repeat or rollouts, and a --config whose head is a matrix of its own, such as 8b"
        )
    if repeats and args.speculation == "mtp" and args.tp * args.dp > 1:
        parser.error(f"--workload {args.workload}: --speculation mtp is for one rank and one replica")
    args.drafter = Successors(SHAPES[args.config][0][VOCABULARY]) if args.speculation == "successors" else None
    args.draft = args.draft_model  # the folder of a shape comes later
    if args.weights and (args.compare or args.plot):
        parser.error("--weights: runs no requests to compare or to plot")
    if (args.weights or args.adapters) and args.dp > 1:
        parser.error(f"--{'weights' if args.weights else 'adapters'}: times one engine, without --dp")
    args.max_adapters = args.adapters if args.max_adapters is None else args.max_adapters
    if not 0 <= args.adapters <= args.max_adapters:
        parser.error(f"--adapters {args.adapters}: must be 0 to --max-adapters {args.max_adapters}")
    args.load_format = "safetensors" if not args.config else "dummy" if args.routing == "even" else "dummy_skewed"
    try:
        args.is_short = not (args.workload or args.num_seqs) and is_cpu(args.device)
        args.workload = args.workload or "nano"
        args.recipe = choose_recipe(args)
        sampling = {name: getattr(args, name) for name in SAMPLING_OPTIONS}
        args.sampling = replace(SAMPLING, **sampling, logprobs=args.logprobs)
        check_files(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def gib_or_auto(text: str) -> float | str:
    """Read the value of --weight-offload-gib."""
    return text if text == AUTO_OFFLOAD else float(text)


def is_cpu(device: str) -> bool:
    """Whether an LLM with this `device` runs on the CPU."""
    return device == "cpu" or (device == "auto" and torch.cuda.device_count() == 0)


def choose_recipe(args: argparse.Namespace) -> Recipe:
    """Return the workload's recipe with the command line's values. Raises ValueError for values that make no sense."""
    for name in ("num_seqs", "min_len", "max_len", "max_num_seqs", "max_model_len", "kv_tokens", "repeats"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    names = ("num_seqs", "max_num_seqs", "max_model_len", "kv_tokens")
    recipe = replace(WORKLOADS[args.workload], **{name: value for name in names if (value := getattr(args, name))})
    if args.is_short:
        recipe = replace(recipe, num_seqs=SEQS_ON_CPU)
    if not (args.min_len or args.max_len):
        return recipe
    low, high = recipe.prompt_lens
    if low == high:
        raise ValueError(f"--workload {args.workload} has fixed lengths: leave out --min-len and --max-len")
    lens = low, high = args.min_len or low, args.max_len or high
    if high < low:
        raise ValueError(f"--max-len {high} is less than --min-len {low}")
    return replace(recipe, prompt_lens=lens, output_lens=lens)


def main() -> None:
    """Measure, print, write."""
    args = parse_args()
    directory = tempfile.TemporaryDirectory
    with directory() as scratch, directory() as draft, StatusLine() as status:
        if args.save:
            save_weights(args, status)
            return
        folder = scratch if args.config else args.model
        if args.config:
            write_config(args.config, scratch)
        if args.draft_model in SHAPES:
            write_config(args.draft_model, draft)
            args.draft = draft
        last: Repeat | None = None
        if args.weights:
            result = run_weights(args, folder, status)
        else:
            result, last = run_nanoinfer(args, folder, status)
            status.clear()
            report(result, args.is_short)
        if args.compare:
            result["transformers"] = run_transformers(args, folder, result, status)
            status.clear()
            report_transformers(result["transformers"])
    write_files(args, result, last)


if __name__ == "__main__":
    main()
