"""The figures of bench.py, for a person to read."""

from __future__ import annotations

from typing import Any

from nanoinfer.benchmark.workloads import WORKLOADS

SHARES = {"even": "tokens use all experts about as often", "skewed": "tokens use experts as often as Zipf's law says"}


def report(result: dict[str, Any], is_short: bool) -> None:
    """Print the figures of nanoinfer's run, for a person to read. is_short: it ran fewer requests than a GPU would"""
    print(f"{result['config']} on {result['device']}: ready after {result['startup_seconds']:.1f} s")
    if result["routing"]:
        print(f"random weights, {result['routing']} routers: {SHARES[result['routing']]}")
    runs = ", ".join(f"{seconds:.2f}" for seconds in result["repeats"])
    print(
        f"workload {result['workload']}: {result['num_seqs']} requests, {result['tokens_in']:,} tokens in,"
        f" {result['tokens_out']:,} out: {result['seconds']:.2f} s (runs: {runs}),"
        f" {result['tokens_per_second']:,.0f} tok/s"
    )
    if result["speculation"]:
        each = f"{result['tokens_per_decode_row']:.2f} tokens a row and decode step"
        print(f"guesses: {result['accepted_tokens']:,} held in all runs; {each}")
    if result["adapters"]:
        print(
            f"adapters: {result['adapters']} of rank {result['max_adapter_rank']}, in {result['max_adapters']} slots;"
            f" to load one takes {result['load_adapter_seconds'] * 1e3:.1f} ms"
        )
    again = f"; preemptions: {result['preemptions']:,}, tokens computed again: {result['recomputed_tokens']:,}"
    share = f", {result['recomputed_share']:.1%} of those in"
    print(
        f"decode steps: {result['decode_steps']:,}, at least {result['floor_decode_steps']:,}"
        f"{f'{again}{share}' if result['preemptions'] else ''}"
    )
    if is_short:
        most, whole = result["num_seqs"], WORKLOADS["nano"].num_seqs
        print(f"on the CPU {most} requests run unless you ask for others; --num-seqs {whole} runs all of nano")
    if result["streamed_bytes"]:
        print(
            f"layers in host memory: {result['streamed_bytes'] / 2**30:.1f} GiB of each rank, whose copies took"
            f" {result['copy_seconds']:.3f} s at the start; the link now gives"
            f" {result['link_bytes_per_second'] / 1e9:.1f} GB/s"
        )
    print(
        f"floor: {result['floor_seconds']:.2f} s at {result['bandwidth_bytes_per_second'] / 1e12:.3f} TB/s and"
        f" {result['matrix_flops'] / 1e12:.2f} TFLOP/s; reached {result['fraction_of_floor']:.1%} of it"
    )
    print(
        f"floor of prompts beside decode steps: {result['overlapped_floor_seconds']:.2f} s;"
        f" reached {result['fraction_of_overlapped_floor']:.1%} of it",
        flush=True,
    )
