"""Ray Data embeds texts by an LLM in each actor: build(dataset, model), or dataset.map_batches(Embedder, ...)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pyarrow as pa
from ray.data import Dataset
from ray.data.block import BlockAccessor, DataBatch

from nanoinfer.batch.lines.requests import take_prompt
from nanoinfer.integrations.ray_data import BATCHES, KNOWN, READ, Engine, map_by, plain, pop_media
from nanoinfer.llm import LLM
from nanoinfer.requests.reading.outputs import EmbeddingOutput

COLUMNS = {"embedding": pa.list_(pa.float32()), "error": pa.string()}


def build(
    dataset: Dataset,
    model: str,
    prompt_name: str | None = None,
    dimensions: int | None = None,
    *,
    size: int | None = None,
    batch_size: int | None = None,
    max_concurrency: int = BATCHES,
    num_gpus: float | None = None,
    num_cpus: float | None = None,
    **options: Any,
) -> Dataset:
    """Return the dataset with the new columns of an Embedder, which Ray makes when somebody reads them.

    dataset: its rows have a column prompt, token_ids or messages
    model, prompt_name, dimensions, options: as for Embedder
    size, batch_size, max_concurrency, num_gpus, num_cpus: as for nanoinfer.integrations.ray_data.build

    Raises ValueError for columns that clash, if Ray knows their names before it runs.
    """
    if (schema := dataset.schema(fetch_if_missing=False)) is not None:
        _check_columns(schema.names)
    given = {"model": model, "prompt_name": prompt_name, "dimensions": dimensions, **options}
    return map_by(Embedder, dataset, given, size, batch_size, max_concurrency, num_gpus, num_cpus)


class Embedder:
    """An LLM that embeds, as Ray Data calls it: dataset.map_batches(Embedder, fn_constructor_kwargs={"model": ...}).

    model, options: as for LLM
    prompt_name, dimensions: as for LLM.embed

    A row has a text in one of the columns that a Generator of nanoinfer.integrations.ray_data reads, also with images.

    embedding: a new column, a list of float32; null if the row failed
    error: a new column: why the row failed, such as a text that is too long; null if it did not

    Raises ValueError, before a row runs, for columns that clash with the new ones.
    """

    def __init__(
        self, model: str, prompt_name: str | None = None, dimensions: int | None = None, **options: Any
    ) -> None:
        self._how = prompt_name, dimensions
        self._engine = Engine(LLM(model, **options))

    async def __call__(self, batch: DataBatch) -> AsyncIterator[pa.Table]:
        """Yield the batch with its new columns, when all of its rows have ended."""
        table = BlockAccessor.for_block(BlockAccessor.batch_to_block(batch)).to_arrow()
        _check_columns(table.column_names)
        read = table.select([name for name in table.column_names if name in READ])
        results = await asyncio.gather(*map(self._embed, read.to_pylist()))
        for name, kind in COLUMNS.items():
            table = table.append_column(name, pa.array([result.get(name) for result in results], kind))
        yield table

    async def _embed(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return a row's new columns, without those that are null."""
        media = pop_media(row)
        given = {name: value for name, entry in row.items() if (value := plain(entry)) is not None}
        try:
            prompt = take_prompt(given | media, KNOWN)
            asked = self._engine.submit(lambda llm: llm.prepare_to_embed(prompt, *self._how), 0)
            output: EmbeddingOutput = await asyncio.wrap_future(asked)
        except ValueError as error:
            return {"error": str(error)}
        return {"embedding": output.embedding, "error": output.error}

    def __del__(self) -> None:
        if hasattr(self, "_engine"):
            self._engine.close()


def _check_columns(names: list[str]) -> None:
    """Raise ValueError for columns that clash with new ones, and without a prompt."""
    if not any(name in names for name in KNOWN):
        raise ValueError(f"columns are {', '.join(names)}: must have {' or '.join(map(repr, KNOWN))}")
    for name in names:
        if name in COLUMNS:
            raise ValueError(f"column {name!r}: is there already, and a new one has its name; rename or drop it")
