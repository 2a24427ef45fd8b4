"""The same prompts through transformers: bench.py --compare."""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

from nanoinfer.benchmark.output.status_line import StatusLine
from nanoinfer.hub import CHECKPOINT_FILES, find_folder
from nanoinfer.sampling_params import SamplingParams

SAMPLING_OPTIONS = ("temperature", "top_k", "top_p")


def run_transformers(
    args: argparse.Namespace, folder: str, result: dict[str, Any], status: StatusLine
) -> dict[str, Any]:
    """Run the same prompts as one left-padded batch through transformers' generate."""
    from transformers import AutoConfig, AutoModelForCausalLM  # here, for ranks and replicas import this file, too

    status.begin("loading the model into transformers")
    device = "cpu" if result["device"] == "cpu" else "cuda"
    if args.config:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    else:
        model = AutoModelForCausalLM.from_pretrained(find_folder("model", folder, None, CHECKPOINT_FILES))
    model = model.to(device, getattr(torch, result["dtype"])).eval()
    work = args.recipe.draw(model.config.vocab_size)
    longest, most = max(map(len, work.prompts)), max(work.output_lens)
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in work.prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in work.prompts], device=device)
    status.begin(f"running transformers: {len(work.prompts)} requests, {work.tokens_out:,} tokens out")
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


def report_transformers(other: dict[str, Any]) -> None:
    """Print how the run of transformers compares."""
    print(
        f"transformers: {other['seconds']:.2f} s, {other['tokens_per_second']:,.0f} tok/s;"
        f" nanoinfer is {other['ratio']:.2f} times as fast"
    )
