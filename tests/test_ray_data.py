"""Ray Data maps rows by LLMs in its actors, and loses none of them."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="needs ray: pip install -e '.[ray]'")
pytest.importorskip("ray.data", reason="needs ray.data: pip install -e '.[ray]'")

import numpy as np
import pyarrow as pa
import torch
from cases.thinkers import THINK, write_thinker
from cases.tuned import Tuned
from conftest import HAS_CUDA
from safetensors.torch import load
from transformers import BertConfig, BertModel

from nanoinfer import BUNDLED_MODEL, LLM, SamplingParams, WorkerError, batch
from nanoinfer.integrations import ray_embeddings
from nanoinfer.integrations.ray_data import Generator, build

SMALL = {"dtype": "float32", "kvcache_block_size": 16, "max_model_len": 64, "num_kvcache_blocks": 256, "device": "cpu"}
ENCODER = {
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
CHAT = [{"role": "user", "content": "Good morrow"}]


NEW = ["text", "token_ids", "finish_reason", "error"]


def table_of(rows: list[dict[str, Any]]) -> pa.Table:
    """Return rows as a table, in which all have the columns of each."""
    return pa.Table.from_pylist([{**{name: None for other in rows for name in other}, **row} for row in rows])


class Watched(Generator):
    """A Generator that says which process made a row, and how many steps that process had run by then."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.steps = [0]
        self._engine.llm.engine.on_step = lambda step, steps=self.steps: steps.append(step.num_running)

    async def __call__(self, rows: Any) -> AsyncIterator[pa.Table]:
        async for table in super().__call__(rows):
            told = {"pid": os.getpid(), "steps": len(self.steps), "most": max(self.steps)}
            for name, value in told.items():
                table = table.append_column(name, pa.array([value] * len(table)))
            yield table


def once(generator: Generator, rows: Any) -> pa.Table:
    """Return what a generator makes of one batch."""

    async def first() -> pa.Table:
        return await anext(generator(rows))

    return asyncio.run(first())


@pytest.fixture(scope="module")
def generator() -> Generator:
    return Generator(BUNDLED_MODEL, {"max_tokens": 6}, **SMALL)


class TestRows:
    """One batch, in this process: what stands in its columns."""

    def test_each_kind_of_prompt_gives_what_generate_gives(self, generator: Generator) -> None:
        rows = [
            {"prompt": "ROMEO:\n", "seed": 1, "temperature": None},
            {"token_ids": [30, 31], "seed": 2, "temperature": 0.5, "stop": ["a"]},
            {"messages": CHAT, "seed": 3, "max_tokens": 3, "temperature": 0.0},
        ]
        made = once(generator, table_of(rows)).to_pylist()
        with LLM(BUNDLED_MODEL, **SMALL) as llm:
            params = [
                SamplingParams(max_tokens=6, seed=1),
                SamplingParams(max_tokens=6, seed=2, temperature=0.5, stop="a"),
                SamplingParams(max_tokens=3, seed=3, temperature=0),
            ]
            expected = llm.generate(["ROMEO:\n", [30, 31], {"messages": CHAT}], params, use_tqdm=False)
        for row, output in zip(made, expected, strict=True):
            assert [row["text"], row["token_ids"], row["finish_reason"], row["error"]] == [
                output.text, output.token_ids, output.finish_reason, None,
            ]  # fmt: skip
        assert [row["prompt_token_ids"] for row in made] == [None, [30, 31], None]

    def test_thoughts_have_columns(self, tmp_path: Path) -> None:
        """A column of the dataset's own keeps its name."""
        thinker = Generator(write_thinker(tmp_path, THINK), {"max_tokens": 6, "thinking_token_budget": 2}, **SMALL)
        rows = [{"prompt": "ROMEO:\n<think>", "answer": "forty-two"}]
        (row,) = once(thinker, table_of(rows)).to_pylist()
        assert row["answer"] == "forty-two"
        assert row["text"] == f"{row['reasoning']}</think>{row['generated_answer']}"

    def test_hidden_states_are_safetensors(self) -> None:
        asked = {"max_tokens": 3, "seed": 1, "hidden_states": [0, -1]}
        generator = Generator(BUNDLED_MODEL, asked, **SMALL, hidden_state_layers=(0, -1))
        made = once(generator, table_of([{"token_ids": [30]}]))
        (sample,) = made.to_pylist()[0]["samples"]
        with LLM(BUNDLED_MODEL, **SMALL, hidden_state_layers=(0, -1)) as llm:
            (output,) = llm.generate([[30]], SamplingParams(**asked), use_tqdm=False)
        for layer, states in load(sample["hidden_states"]).items():
            assert torch.equal(states, output.hidden_states[int(layer)])

    def test_a_message_may_have_parts(self, generator: Generator) -> None:
        """A table gives every part all keys that some part has."""
        parts = [[{"type": "text", "text": "Good"}, {"text": "morrow", "image_url": None}], [{"text": "Good\nmorrow"}]]
        rows = [{"messages": [{"role": "user", "content": content}], "seed": 3} for content in parts]
        two, one = once(generator, table_of(rows)).to_pylist()
        assert (two["error"], two["token_ids"]) == (None, one["token_ids"])

    def test_every_batch_format_gives_the_same(self, generator: Generator) -> None:
        """NumPy and pandas know no missing integers: they make them, and the others, floats."""
        table = pa.table(
            {"prompt": ["ROMEO:\n"] * 3, "max_tokens": [3, None, 5], "id": [1, 2, 3], "kept": ["a", "b", None]}
        )
        expected = once(generator, table).to_pylist()
        assert [len(row["token_ids"]) for row in expected] == [3, 6, 5]
        assert [row["kept"] for row in expected] == ["a", "b", None]
        frame = table.to_pandas()
        arrays = {name: frame[name].to_numpy() for name in frame}
        for rows in (frame, arrays):
            assert once(generator, rows).select(NEW).to_pylist() == [{n: row[n] for n in NEW} for row in expected]

    def test_a_row_that_fails_says_why_and_the_others_go_on(self, generator: Generator) -> None:
        rows = [
            {"prompt": "x" * 999},
            {"prompt": None},
            {"prompt": "both", "token_ids": [1]},
            {"prompt": "cold", "temperature": -1.0},
            {"prompt": "form", "structured_outputs": {"no": "form"}},
            {"prompt": "fine"},
        ]
        made = once(generator, table_of(rows)).to_pylist()
        reasons = ["max_model_len=64", "has no prompt", "prompt and token_ids", "temperature=-1", "structured_outputs"]
        for row, said in zip(made[:-1], reasons, strict=True):
            assert said in row["error"]
            assert [row["text"], row["token_ids"], row["finish_reason"]] == [None] * 3
        assert made[-1]["error"] is None
        assert made[-1]["text"]

    def test_a_row_names_its_adapter(self, tmp_path: Path) -> None:
        folder = Tuned(BUNDLED_MODEL, seed=1).save(tmp_path)
        rows = [{"prompt": "ROMEO:\n", "adapter": name} for name in ("mine", None, "mime")]
        settings = {"temperature": 0, "max_tokens": 8}
        generator = Generator(BUNDLED_MODEL, settings, {"mine": folder}, **SMALL)
        mine, base, other = once(generator, table_of(rows)).to_pylist()
        with LLM(BUNDLED_MODEL, max_adapters=1, **SMALL) as llm:
            llm.load_adapter("loaded", folder)
            params = [SamplingParams(adapter=name, **settings) for name in ("loaded", None)]
            expected = llm.generate(["ROMEO:\n"] * 2, params, use_tqdm=False)
        assert [mine["text"], base["text"]] == [output.text for output in expected]
        assert mine["text"] != base["text"]
        assert other["error"] == "adapter='mime': must be an adapter of the job: did you mean 'mine'?"

    def test_samples_and_log_probabilities(self, generator: Generator) -> None:
        made = once(generator, pa.table({"prompt": ["ROMEO:"] * 2, "n": [3, None], "logprobs": [None, 1]})).to_pylist()
        several, scored = made
        assert several["samples"][0]["text"] == several["text"]
        assert len({sample["text"] for sample in several["samples"]}) == 3
        assert several["samples"][0]["logprobs"] is None
        (sample,) = scored["samples"]
        for token_id, place in zip(scored["token_ids"], sample["logprobs"], strict=True):
            assert place[0]["token_id"] == token_id
            assert min(entry["rank"] for entry in place) == 1

    def test_rows_may_go_on_until_max_model_len(self, generator: Generator) -> None:
        params = [SamplingParams(max_tokens=most, ignore_eos=True, seed=1) for most in (3, None, 5)]
        submit = generator._engine.submit
        futures = [
            submit(lambda llm, own=own: llm.prepare([30, 31], own), own.max_tokens or math.inf) for own in params
        ]
        assert [len(future.result(60).token_ids) for future in futures] == [3, SMALL["max_model_len"] - 2, 5]

    def test_a_row_draws_what_the_line_of_a_batch_file_draws(self, generator: Generator, tmp_path: Path) -> None:
        rows = [{"id": i, "prompt": "ROMEO:\n"} for i in range(4)]
        source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        batch.run(source, target, BUNDLED_MODEL, max_tokens=6, keep_order=True, **SMALL)
        expected = [json.loads(line)["token_ids"] for line in target.read_text().splitlines()]
        made = once(generator, pa.Table.from_pylist(rows[::-1])).to_pylist()
        assert [row["token_ids"] for row in made[::-1]] == expected
        without = once(generator, pa.table({"prompt": ["ROMEO:\n", "JULIET:\n", "ROMEO:\n"]})).to_pylist()
        assert without[0] == without[2]

    @pytest.mark.parametrize("name", ["text", "error", "finish_reason", "prompt_token_ids", "samples", "kept_tokens"])
    def test_a_column_that_clashes_is_named(self, generator: Generator, name: str) -> None:
        rows = pa.table({"token_ids": [[30]], "n": [2], name: ["mine"]})
        with pytest.raises(ValueError, match=f"column '{name}'"):
            once(generator, rows)

    def test_rows_without_a_prompt_are_refused(self, generator: Generator) -> None:
        with pytest.raises(ValueError, match="columns are question: must have 'prompt' or"):
            once(generator, pa.table({"question": ["Who?"]}))

    @pytest.mark.parametrize(
        ("settings", "options", "said"),
        [
            ({"temperature": -1}, {}, "temperature=-1"),
            ({"prompt_logprobs": 0}, {}, "prompt_logprobs=0: must be left out"),
            ("greedy", {}, "sampling_params='greedy': must be"),
            ({}, {"routed_experts": True}, "routed_experts=True: must be left out"),
        ],
    )
    def test_settings_that_cannot_work_are_refused(self, settings: Any, options: dict[str, Any], said: str) -> None:
        with pytest.raises(ValueError, match=said):
            Generator("no model", settings, **options)

    def test_a_dead_rank_ends_the_batch(self) -> None:
        generator = Generator(BUNDLED_MODEL, tensor_parallel_size=2, **SMALL)
        (worker,) = generator._engine.llm.engine.ranks.workers.processes
        assert once(generator, pa.table({"prompt": ["ROMEO:"]}))["error"].to_pylist() == [None]
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match="rank 1"):
            once(generator, pa.table({"prompt": ["ROMEO:"]}))


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A cluster of this machine, whose two GPUs are mere numbers by which Ray plans."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the actors cannot import this file
    ray.init(num_cpus=4, num_gpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield
    ray.shutdown()


def expected_ids(rows: list[dict[str, Any]], **options: Any) -> list[list[int]]:
    with LLM(BUNDLED_MODEL, **{**SMALL, **options}) as llm:
        params = [SamplingParams(max_tokens=row["max_tokens"], seed=row["seed"]) for row in rows]
        outputs = llm.generate([row["prompt"] for row in rows], params, use_tqdm=False)
    return [output.token_ids for output in outputs]


def ranks() -> list[int]:
    """Return the processes below this one that multiprocessing has spawned, as the LLMs of actors spawn ranks."""
    parents = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(process.name)] = int((process / "stat").read_text().rpartition(")")[2].split()[1])

    def is_ours(pid: int) -> bool:
        return pid == os.getpid() or (pid in parents and is_ours(parents[pid]))

    found = []
    for pid in filter(is_ours, parents):
        with suppress(OSError):
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


@pytest.mark.timeout(900)  # its processes import for long where other tests compute
@pytest.mark.usefixtures("cluster")
class TestCluster:
    """A real cluster of this machine."""

    @pytest.mark.whole
    def test_an_actor_that_is_killed_loses_no_row(self) -> None:
        """Two actors share the rows; Ray starts the dead one again."""
        rows = [
            {"id": i, "prompt": "ROMEO:\n", "seed": i, "max_tokens": 5 + i % 40, "x": {"y": [i]}} for i in range(240)
        ]
        made = ray.data.from_items(rows, override_num_blocks=12).map_batches(
            Watched,
            fn_constructor_kwargs={"model": BUNDLED_MODEL, "max_num_seqs": 4, **SMALL},
            compute=ray.data.ActorPoolStrategy(size=2, max_concurrent_calls_per_actor=2),
            batch_size=8,
            batch_format="pyarrow",
        )
        results = []
        for row in made.iter_rows():
            if not results:
                os.kill(row["pid"], signal.SIGKILL)
            results.append(row)
        results.sort(key=lambda row: row["id"])
        assert [{name: row[name] for name in rows[0]} for row in results] == rows
        assert [row["token_ids"] for row in results] == expected_ids(rows)
        assert len({row["pid"] for row in results}) == 3

    @pytest.mark.whole
    def test_batches_leave_no_gap_between_them(self) -> None:
        """The engine needs the steps of one generate over all rows, and a few to begin with."""
        rows = [{"prompt": "JULIET:", "seed": i, "max_tokens": 2 + 7 * i % 50} for i in range(120)]
        made = ray.data.from_items(rows, override_num_blocks=15).map_batches(
            Watched,
            fn_constructor_kwargs={"model": BUNDLED_MODEL, "max_num_seqs": 8, **SMALL},
            compute=ray.data.ActorPoolStrategy(size=1, max_concurrent_calls_per_actor=4),
            batch_size=8,
        )
        results = made.take_all()
        steps = []
        with LLM(BUNDLED_MODEL, max_num_seqs=8, **SMALL) as llm:
            llm.engine.on_step = steps.append
            params = [SamplingParams(max_tokens=row["max_tokens"], seed=row["seed"]) for row in rows]
            llm.generate([row["prompt"] for row in rows], params, use_tqdm=False)
        assert max(row["most"] for row in results) == 8
        assert max(row["steps"] for row in results) < 1.05 * len(steps)

    @pytest.mark.whole
    @pytest.mark.skipif(HAS_CUDA, reason="the GPUs of this cluster are mere numbers")
    def test_build_gives_an_actor_a_gpu_for_each_rank(self) -> None:
        """There is room for one actor of two ranks. When the rows are done, it leaves no rank behind."""
        rows = ray.data.from_items([{"prompt": "ROMEO:\n", "seed": 1, "max_tokens": 8}] * 3)
        made = build(rows, BUNDLED_MODEL, {"temperature": 0.5}, tensor_parallel_size=2, **{**SMALL, "device": "auto"})
        seen: set[int] = set()
        with ThreadPoolExecutor() as pool:
            future = pool.submit(made.take_all)
            while not future.done():
                seen.update(ranks())
                time.sleep(0.1)
        assert len(seen) == 1
        with LLM(BUNDLED_MODEL, **SMALL) as llm:
            expected = llm.generate("ROMEO:\n", SamplingParams(temperature=0.5, seed=1, max_tokens=8), use_tqdm=False)
        assert [row["text"] for row in future.result()] == [expected[0].text] * 3
        deadline = time.monotonic() + 20
        while ranks() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert ranks() == []

    def test_build_refuses_before_anything_runs(self) -> None:
        rows = ray.data.from_items([{"prompt": "ROMEO:\n", "text": "mine"}])
        with pytest.raises(ValueError, match="column 'text': is there already"):
            build(rows, BUNDLED_MODEL)
        with pytest.raises(ValueError, match="unknown argument 'max_token': did you mean 'max_tokens'"):
            build(rows, BUNDLED_MODEL, {"max_token": 3})
        with pytest.raises(ValueError, match="tensor_parallel_size=0"):
            build(rows.drop_columns(["text"]), BUNDLED_MODEL, tensor_parallel_size=0)

    def test_a_column_of_embeddings(self) -> None:
        texts, options = ["To be", "or not to be", "that is the question"], {**SMALL, "max_model_len": 200}
        with LLM(BUNDLED_MODEL, **options) as llm:
            expected = np.stack([output.embedding for output in llm.embed(texts, use_tqdm=False)])
        dataset = ray.data.from_items([{"prompt": text, "kept": i} for i, text in enumerate([*texts, "a" * 1000])])
        made = ray_embeddings.build(dataset, BUNDLED_MODEL, size=1, **options)
        rows = sorted(made.take_all(), key=lambda row: row["kept"])
        np.testing.assert_allclose(np.stack([row["embedding"] for row in rows[:3]]), expected, atol=1e-4)
        assert [row["error"] is None for row in rows] == [True, True, True, False]
        assert "must be at most max_model_len=200" in rows[3]["error"]
        with pytest.raises(ValueError, match="column 'embedding': is there already"):
            ray_embeddings.build(ray.data.from_items([{"prompt": "a", "embedding": 1}]), BUNDLED_MODEL, **options)

    @pytest.mark.whole
    def test_a_column_of_an_encoders_embeddings(self, tmp_path: Path) -> None:
        BertModel(BertConfig(**ENCODER)).save_pretrained(tmp_path)
        texts, options = [[5, 6, 7], [8], [9] * 40], {"device": "cpu", "dtype": "float32"}
        with LLM(str(tmp_path), **options) as llm:
            expected = np.stack([output.embedding for output in llm.embed(texts, use_tqdm=False)])
        dataset = ray.data.from_items([{"token_ids": text, "kept": i} for i, text in enumerate([*texts, [5] * 65])])
        made = ray_embeddings.build(dataset, str(tmp_path), size=1, **options)
        rows = sorted(made.take_all(), key=lambda row: row["kept"])
        np.testing.assert_allclose(np.stack([row["embedding"] for row in rows[:3]]), expected, atol=1e-5)
        assert rows[3]["embedding"] is None
        assert "must be at most max_model_len=64" in rows[3]["error"]
