"""Ray Data runs an LLM in each of its actors: build(dataset, model), or dataset.map_batches(Generator, ...)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Future
from dataclasses import fields
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from ray.data import ActorPoolStrategy, Dataset
from ray.data.block import BlockAccessor, DataBatch

from nanoinfer.batch.lines.adapters import Folders, Models, check_folders, load_all, with_slots
from nanoinfer.batch.lines.hidden_states import as_safetensors
from nanoinfer.batch.lines.requests import MEDIA, PROMPTS, TEMPLATE, complete, take_prompt
from nanoinfer.checks import check_int, short
from nanoinfer.config import Config
from nanoinfer.llm import LLM
from nanoinfer.requests.inputs import Prompt
from nanoinfer.requests.outputs import RequestOutput, SampleOutput
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.serving.llm_thread import LLMThread, Prepare, Told

KNOWN = PROMPTS["plain"]  # columns, of which each row has one
SETTINGS = {field.name for field in fields(SamplingParams)}
READ = {*KNOWN, *SETTINGS, TEMPLATE, *MEDIA, "id"}
UNKEPT = ("prompt_logprobs", "prompt_logprobs_start", "kept_tokens", "entropy")  # settings whose results have no column
NO_COLUMN = "its results have no column"
GIVEN_IDS = "prompt_token_ids"  # a column token_ids gets this name, because the generated ones have its own

GENERATED = "generated_"  # stands before reasoning or answer where the dataset has a column of that name

IDS = pa.list_(pa.int32())
ENTRY = pa.struct({"token_id": pa.int32(), "logprob": pa.float64(), "rank": pa.int32()})
SAMPLE = {"text": pa.string(), "token_ids": IDS, "finish_reason": pa.string()}
PARTS = {"reasoning": pa.string(), "answer": pa.string()}  # where the LLM knows markers
COLUMNS = {**SAMPLE, "error": pa.string()}
LOGPROBS_AND_STATES = {"logprobs": pa.list_(pa.list_(ENTRY)), "hidden_states": pa.large_binary()}
SAMPLES = {"samples": pa.list_(pa.struct({**SAMPLE, **LOGPROBS_AND_STATES}))}
SAMPLES_IN_PARTS = {"samples": pa.list_(pa.struct({**SAMPLE, **PARTS, **LOGPROBS_AND_STATES}))}
FOR_SAMPLES = ("n", "logprobs", "hidden_states")  # settings whose results only these have

BATCHES = 4  # of max_num_seqs rows each: so many an actor has at once, because a batch waits for its longest row


def build(
    dataset: Dataset,
    model: str,
    sampling_params: SamplingParams | Mapping[str, Any] | None = None,
    *,
    size: int | None = None,
    batch_size: int | None = None,
    max_concurrency: int = BATCHES,
    num_gpus: float | None = None,
    num_cpus: float | None = None,
    adapters: Folders | None = None,
    **options: Any,
) -> Dataset:
    """Return the dataset with the new columns of a Generator, which Ray makes when somebody reads them.

    dataset: its rows have a column prompt, token_ids or messages
    model, sampling_params, adapters, options: as for Generator
    size: so many actors, each with an LLM of its own; None: as many as the cluster's GPUs serve, or one a machine
    batch_size: an actor takes so many rows at a time; None: max_num_seqs
    max_concurrency: an actor has so many batches at once
    num_gpus: an actor's GPUs; None: one a rank, or none where the cluster has none, and for device="cpu"
    num_cpus: an actor's CPUs; None: one beside GPUs, otherwise half of a machine's

    An actor is one process, so that its GPUs are always those of one machine. Raises ValueError for settings that
    cannot work, and for columns that clash, if Ray knows their names before it runs.
    """
    shared, folders = _shared(sampling_params), check_folders(adapters)
    _check_options(options)
    if (schema := dataset.schema(fetch_if_missing=False)) is not None:
        _check_columns(schema.names, shared)
    given = {"model": model, "sampling_params": sampling_params, "adapters": folders, **options}
    return map_by(Generator, dataset, given, size, batch_size, max_concurrency, num_gpus, num_cpus)


def map_by(
    actor: type,
    dataset: Dataset,
    given: Mapping[str, Any],
    size: int | None,
    batch_size: int | None,
    max_concurrency: int,
    num_gpus: float | None,
    num_cpus: float | None,
) -> Dataset:
    """Return a dataset mapped by actors of a class, whose constructor takes `given`; the rest: as for build."""
    ranks = check_int("tensor_parallel_size", given.get("tensor_parallel_size", 1), 1)
    rows = check_int("max_num_seqs", given.get("max_num_seqs", Config.max_num_seqs), 1)
    gpus, cpus, machines = _cluster()
    if num_gpus is None:
        num_gpus = ranks if gpus and str(given.get("device")) != "cpu" else 0
    if num_cpus is None:
        num_cpus = 1 if num_gpus else max(1, cpus // machines // 2)
    if size is None:
        size = max(1, int(gpus // num_gpus)) if num_gpus else machines
    return dataset.map_batches(
        actor,
        fn_constructor_kwargs=dict(given),
        compute=ActorPoolStrategy(
            size=size, max_concurrent_calls_per_actor=max_concurrency, max_tasks_in_flight_per_actor=max_concurrency
        ),
        batch_size=rows if batch_size is None else batch_size,
        batch_format="pyarrow",
        num_gpus=num_gpus,
        num_cpus=num_cpus,
        udf_modifying_row_count=False,
    )


class Generator:
    """An LLM as Ray Data calls it: dataset.map_batches(Generator, fn_constructor_kwargs={"model": ...}, ...).

    model, options: as for LLM
    sampling_params: a SamplingParams, or a mapping with its fields; a row's columns of their names go before it
    adapters: a mapping from names to the folders of adapters, which the column adapter names; null is the model alone

    A row has a prompt in one of the columns prompt, token_ids and messages; chat_template_kwargs may stand beside
    messages. For a model that sees, a column image beside prompt or token_ids holds an image, or a list of them, and
    parts of messages may hold some: bytes of files, data: URLs, or paths in the option image_folder. So do a column
    video and parts with lists of frames. Where the model could see but the LLM does not, such a row fails. In these
    columns and in those of settings, null or NaN counts as nothing.

    text, token_ids, finish_reason: new columns, of the row's first sample; a column token_ids that was there becomes
        prompt_token_ids
    reasoning, answer: new columns if the LLM knows the markers of a thought, as in SampleOutput; where a column of that
        name was there, generated_reasoning and generated_answer
    error: a new column: why the row failed, such as a prompt that is too long; null if it did not
    samples: one more column if sampling_params or a column ask for n, logprobs or hidden_states: a list of all samples,
        with text, token_ids, finish_reason, reasoning and answer as above, and logprobs: for each token a list of
        {token_id, logprob, rank}, the token's own first; and hidden_states: the bytes of a safetensors file, whose
        tensors are named by number

    A row without a seed gets one from the option `seed` and from its column `id`, or if it has none from its prompt.
    So it draws the same tokens in any order and on any actor. Rows that share a prompt need ids to draw for themselves.

    Ray calls it with several batches at once, whose rows run side by side in one LLM. Raises ValueError, before a row
    runs, for columns that clash with the new ones and for settings whose results have no column.
    """

    def __init__(
        self,
        model: str,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        adapters: Folders | None = None,
        **options: Any,
    ) -> None:
        self._shared, folders = _shared(sampling_params), check_folders(adapters)
        _check_options(options)
        self._models = Models(model, tuple(folders))
        llm = LLM(model, **with_slots(options, folders))
        load_all(llm, folders)
        self._engine = Engine(llm)
        self._seed = self._engine.llm.config.seed

    async def __call__(self, batch: DataBatch) -> AsyncIterator[pa.Table]:
        """Yield the batch with its new columns, when all of its rows have ended."""
        table = BlockAccessor.for_block(BlockAccessor.batch_to_block(batch)).to_arrow()
        types = self._types(table.column_names)
        _check_columns(table.column_names, self._shared)
        read = table.select([name for name in table.column_names if name in READ])
        results = await asyncio.gather(*map(self._generate, read.to_pylist()))
        table = table.rename_columns([GIVEN_IDS if name == "token_ids" else name for name in table.column_names])
        for name, kind in types.items():
            own = GENERATED + name if name in PARTS and name in table.column_names else name
            table = table.append_column(own, pa.array([result.get(name) for result in results], kind))
        yield table

    def _types(self, names: list[str]) -> dict[str, pa.DataType]:
        """Return the new columns of a table with columns of these names."""
        has_samples, has_parts = _has_samples(names, self._shared), self._engine.llm.knows_reasoning
        samples = SAMPLES_IN_PARTS if has_parts else SAMPLES
        return {**COLUMNS, **(PARTS if has_parts else {}), **(samples if has_samples else {})}

    async def _generate(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return a row's new columns, without those that are null."""
        try:
            prompt, params = self._read(row)
            asked = self._engine.submit(lambda llm: llm.prepare(prompt, params), params.max_tokens)
            output = await asyncio.wrap_future(asked)
            return _columns(output)
        except ValueError as error:
            return {"error": str(error)}

    def _read(self, row: dict[str, Any]) -> tuple[Prompt, SamplingParams]:
        """Return what a row asks for. Raises ValueError for what it cannot have."""
        media = pop_media(row)
        settings = {name: value for name, given in row.items() if (value := plain(given)) is not None}
        if self._engine.llm.config.description.is_multimodal:
            settings |= media  # an LLM that could see, and does not, refuses them
        key = settings.pop("id", None)
        prompt = take_prompt(settings, KNOWN)
        params = SamplingParams(**complete(settings, self._shared, self._seed, prompt if key is None else key))
        self._models.check(params.adapter)
        return prompt, params

    def __del__(self) -> None:
        if hasattr(self, "_engine"):
            self._engine.close()


class Engine:
    """An LLM on a thread of its own, which takes requests from any thread while others run."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._thread = LLMThread(lambda: llm, _settle, longest_first=True)

    def submit(self, prepare: Prepare, max_tokens: int | None) -> Future[Any]:
        """Queue a request. The future raises ValueError if it cannot run, and what the LLM raises while it runs.

        prepare: makes the request; max_tokens: of its settings
        """
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # who waits for it may go away, but cannot cancel it
        self._thread.submit(future, prepare, max_tokens)
        return future

    def close(self) -> None:
        """End the thread, and close the LLM."""
        self._thread.close()


def _settle(told: Told) -> None:
    for future, answer in told:
        if isinstance(answer, BaseException):
            future.set_exception(answer)
        else:
            future.set_result(answer)


def _shared(sampling_params: SamplingParams | Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the checked settings of all rows."""
    if sampling_params is None or isinstance(sampling_params, Mapping):
        sampling_params = SamplingParams(**(sampling_params or {}))
    if not isinstance(sampling_params, SamplingParams):
        raise ValueError(f"sampling_params={short(sampling_params)}: must be a SamplingParams or a mapping")
    for name in UNKEPT:
        if (value := getattr(sampling_params, name)) != getattr(SamplingParams, name):
            raise ValueError(f"{name}={short(value)}: must be left out, because {NO_COLUMN}")
    return vars(sampling_params.clone())


def _check_options(options: Mapping[str, Any]) -> None:
    if options.get("routed_experts"):
        raise ValueError(f"routed_experts={short(options['routed_experts'])}: must be left out, because {NO_COLUMN}")


def _check_columns(names: list[str], shared: Mapping[str, Any]) -> None:
    """Raise ValueError for columns that clash with new ones, or that ask for what has none, and without a prompt."""
    if not any(name in names for name in KNOWN):
        raise ValueError(f"columns are {', '.join(names)}: must have {' or '.join(map(repr, KNOWN))}")
    made = {**COLUMNS, **(SAMPLES if _has_samples(names, shared) else {})}
    if "token_ids" in names:
        made[GIVEN_IDS] = made.pop("token_ids")
    for name in names:
        if name in made:
            raise ValueError(f"column {name!r}: is there already, and a new one has its name; rename or drop it")
        if name in UNKEPT:
            raise ValueError(f"column {name!r}: is a setting, and {NO_COLUMN}; rename or drop it")


def _has_samples(names: list[str], shared: Mapping[str, Any]) -> bool:
    """Whether a row may have several samples, log-probabilities or hidden states."""
    asks = shared["n"] > 1 or shared["logprobs"] is not None or shared["hidden_states"] is not None
    return asks or any(name in names for name in FOR_SAMPLES)


def pop_media(row: dict[str, Any]) -> dict[str, Any]:
    """Take the columns of images and videos that are there out of a row: these stay as they are."""
    given = {name: row.pop(name, None) for name in MEDIA}
    return {name: value for name, value in given.items() if value is not None}


def plain(value: Any) -> Any:
    """Return a row's value without what a table adds: None for NaN, integers for whole floats, no key of null."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: own for key, entry in value.items() if (own := plain(entry)) is not None}
    if isinstance(value, list):
        return [plain(entry) for entry in value]
    if isinstance(value, float):
        return None if math.isnan(value) else int(value) if value.is_integer() else value
    return value


def _columns(output: RequestOutput) -> dict[str, Any]:
    """Return a request's output as new columns of its row. Raises ValueError if a sample has ended with an error."""
    for sample in output.samples:
        if sample.finish_reason == "error":
            raise ValueError(str(sample.stop_reason))
    samples = [_sample(sample) for sample in output.samples]
    return {**samples[0], "samples": samples}


def _sample(sample: SampleOutput) -> dict[str, Any]:
    row: dict[str, Any] = {name: sample[name] for name in (*SAMPLE, *PARTS)}
    if sample.logprobs is not None:
        row["logprobs"] = [
            [{"token_id": token_id, "logprob": float(value), "rank": value.rank} for token_id, value in place.items()]
            for place in sample.logprobs
        ]
    if sample.hidden_states is not None:
        row["hidden_states"] = as_safetensors(sample.hidden_states)
    return row


def _cluster() -> tuple[int, int, int]:
    """Return the numbers of the cluster's GPUs, CPUs and machines; starts Ray here if nothing has."""
    if not ray.is_initialized():
        ray.init()
    resources = ray.cluster_resources()
    return int(resources.get("GPU", 0)), int(resources.get("CPU", 0)), sum(node["Alive"] for node in ray.nodes())
