"""Finds the first layer whose result differs from transformers', and a weight in it that is not the file's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby, takewhile
from operator import itemgetter

import torch
from torch import Tensor

from nanoinfer.benchmark.first_difference import Recorder, Seen
from nanoinfer.check.oracle import Continuation
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.llm import LLM
from nanoinfer.models.decoder import Decoder
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.weights.shards import FLOATS, Table, table_of
from nanoinfer.weights.sources import FileSource

ROUNDING = 1e-4  # of a token's stream, by its norm: float32 in another order changes it by less


def find_cause(llm: LLM, wanted: Continuation, streams: list[Tensor]) -> str:
    """Say after which layer the residual stream of a text first differs from transformers', and by how much.

    llm: it has run nothing; float32, eager; wanted: what transformers computes for the text
    streams: that of the text and its next tokens, as ask_for_streams returns it
    """
    assert isinstance(llm.engine, LLMEngine)
    model = llm.engine.ranks.runner.holdings.model
    if not isinstance(model, Decoder):
        return f"{type(model).__name__} is no decoder of layers: nobody can tell where it differs first"
    recorder = Recorder(0)
    params = SamplingParams(temperature=0, max_tokens=len(wanted.new_ids), ignore_eos=True)
    with recorder.watching(llm):
        (output,) = llm.generate([wanted.token_ids], params, use_tqdm=False)
    alike = list(takewhile(lambda pair: pair[0] == pair[1], zip(output.token_ids, wanted.new_ids, strict=False)))
    for position in range(len(wanted.token_ids) + len(alike)):
        for seen in recorder.seen[0, position]:
            for number, stream in _streams(seen, model):
                theirs = streams[number][position]
                if len(theirs) != len(stream):
                    continue  # another matrix, which OPT has before the output projection, has made theirs
                apart = ((stream.float() - theirs).norm() / theirs.norm()).item()
                if not apart <= ROUNDING:
                    place = f"at position {position}, by {apart:.1e} of its norm"
                    return f"{_name(number, model.num_layers)} {place}; {_describe_weights(model, llm, number)}"
    return (
        f"in eager steps, the layers' results are transformers' within {ROUNDING:g} of their norm: look at the output"
        " projection, the draws and CUDA graphs"
    )


def _streams(seen: Seen, model: Decoder) -> Iterator[tuple[int, Tensor]]:
    """Yield the residual stream before each layer, which its mixer returns too, and what the last norm returns.

    The mixer's is divided by the factor of what layers add to it.
    """
    for name, group in groupby(seen, key=itemgetter(0)):
        results = [result for _, result in group]
        if match := re.fullmatch(r"layers\.(\d+)\.(first\.)?mixer", name):
            yield int(match[1]), results[-1] * model.inputs.residual_scale
        elif name == "joint":
            yield model.num_layers, results[0]


def _name(number: int, num_layers: int) -> str:
    """Name what made a stream."""
    if number == 0:
        return "the embedding is the first whose result differs,"
    behind = ", or the norm behind it," if number == num_layers else ""
    return f"layer {number - 1}{behind} is the first whose result differs,"


def _describe_weights(model: Decoder, llm: LLM, number: int) -> str:
    """Say which of the weights that make a stream is not the one in the checkpoint's files."""
    layers, is_edge = "model.layers.", number in (0, model.num_layers)
    used, copies, table = dict[str, list[Tensor]](), dict[str, list[Tensor]](), Table()
    for name, shards in table_of(model).items():
        is_own = name.startswith(f"{layers}{number - 1}.") or (is_edge and not name.startswith(layers))
        if is_own and all(shard.dtypes == FLOATS for shard in shards):  # no format has rounded them
            targets = [shard.target for shard in shards]
            used[name] = [target if isinstance(target, Tensor) else target.unpacked() for target in targets]
            copies[name] = [torch.empty_like(numbers) for numbers in used[name]]
            table[name] = [replace(shard, target=copy) for shard, copy in zip(shards, copies[name], strict=True)]
    read = FileSource(llm.config.model, llm.config.description.beside).copy(table)
    for name in read:
        if not all(map(torch.equal, used[name], copies[name])):
            return f"{name} is not as in the checkpoint's files"
    return "its weights are those of the checkpoint's files"
