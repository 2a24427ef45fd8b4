"""How long a sequence may be: the option max_model_len, its default, and the model's own limit."""

from __future__ import annotations

import copy
import logging
from array import array
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import CASES, build
from conftest import Oracle, assert_equal, greedy
from transformers import AutoConfig

from nanoinfer import BUNDLED_MODEL, LLM
from nanoinfer.attention.cache_layout import Pages, lay_out
from nanoinfer.config import LONGEST_BY_TORCH, Config
from nanoinfer.models import describe
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.replicas.transports.spawned import SpawnedProcess
from nanoinfer.runner.logits.token_history import COLUMNS, TokenHistory
from nanoinfer.runner.memory import plan
from nanoinfer.runner.memory.kv_cache import KVCacheSpec
from nanoinfer.runner.memory.plan import CPU_BUDGET, MemoryPlan, plan_memory
from nanoinfer.runner.memory.room import what_makes_room
from nanoinfer.runner.memory.state_pool import StateSpec
from nanoinfer.trainer.reference import reference

ONE_HEAD = lay_out([Pages(kv_heads=1, head_dim=16)], 16, 16)
NO_STATES = StateSpec(ONE_HEAD, torch.float32, torch.float32)
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32768}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 32.0,
    "short_factor": [1.0] * 48,
    "long_factor": [2.0] * 48,
    "original_max_position_embeddings": 4096,
}
KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}


def by_kind(full: dict[str, Any]) -> dict[str, Any]:
    return {"full_attention": full, "sliding_attention": PLAIN}


SMALL = {"device": "cpu", "dtype": "float32", "kvcache_block_size": 16}
PROMPT = [30, 31, 32]
LONG = greedy(300, ignore_eos=True)


@pytest.fixture(scope="module")
def long_model(make_qwen3: Callable[..., str]) -> str:
    return make_qwen3(max_position_embeddings=131072)


@pytest.fixture
def budget(monkeypatch: pytest.MonkeyPatch) -> int:
    """The CPU's KV cache may have so many bytes: eight blocks of the bundled model."""
    monkeypatch.setattr(plan, "CPU_BUDGET", 1 << 20)
    return 1 << 20


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what has been logged beside the plan of the memory and the line of each start."""
    told = (record.getMessage() for record in caplog.records)
    return [line for line in told if "memory in GiB" not in line and "ready in" not in line]


class TestDefault:
    """Left out, max_model_len is the model's own limit."""

    @pytest.mark.parametrize("limit", [100, 5000, 131072, 2**20])
    def test_the_models_own_limit(self, limit: int, make_qwen3: Callable[..., str]) -> None:
        folder = make_qwen3(max_position_embeddings=limit)
        assert Config(folder).max_model_len == Config(folder, max_model_len=None).max_model_len == limit
        assert Config(folder, max_model_len=50).max_model_len == 50

    def test_of_a_model_that_is_rotated_otherwise_beyond_a_length(self, tmp_path: Any) -> None:
        build(CASES["phi3 longrope"], tmp_path)
        description = Config(str(tmp_path)).description
        assert description.long_from is not None
        assert description.long_from < description.max_position == Config(str(tmp_path)).max_model_len

    @pytest.mark.parametrize("options", [{}, {"kvcache_block_size": 16}, {"max_num_seqs": 50_000}], ids=str)
    def test_a_long_limit_refuses_no_options(self, options: dict[str, int], long_model: str) -> None:
        """Of rows that may be so long, memory is planned for what most of them need."""
        limit = CPU_BUDGET
        plan._check_rows(Config(long_model, device="cpu", **options), limit)
        with pytest.raises(ValueError, match="max_num_seqs=200000: must be at most"):
            plan._check_rows(Config(long_model, device="cpu", max_num_seqs=200_000), limit)

    def test_torch_on_a_gpu_reads_as_many_keys_of_every_row(
        self, long_model: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        options = {"device": "cuda", "dtype": "float32", "attention_backend": "torch"}
        assert Config(long_model, **options).max_model_len == LONGEST_BY_TORCH
        assert Config(long_model, **options, max_model_len=5000).max_model_len == 5000
        assert Config(long_model, **{**options, "attention_backend": "triton"}).max_model_len == 131072
        assert Config(long_model, device="cpu", attention_backend="torch").max_model_len == 131072

    def test_the_trainers_reference_has_no_cache(self, long_model: str) -> None:
        assert reference(long_model, device="cpu").max_model_len == 131072

    def test_tokens_are_those_of_a_shorter_one(self, long_model: str) -> None:
        """What the settings need is computed over the tokens that there are."""
        prompts = [[5, 6, 7] * 30, [9] * 20, [8]]
        settings = [greedy(20, presence_penalty=1.0), greedy(9, repetition_penalty=1.3), greedy(12, logprobs=2)]
        with LLM(long_model, **SMALL, num_kvcache_blocks=8192) as llm:
            outputs = llm.generate(prompts, settings, use_tqdm=False)
            assert llm.config.max_model_len == 131072
        with LLM(long_model, **SMALL, num_kvcache_blocks=40, max_model_len=160) as short:
            assert_equal(outputs, short.generate(prompts, settings, use_tqdm=False))


class TestCache:
    """A KV cache that holds no such sequence makes it shorter, and the log says so."""

    def test_as_many_blocks_as_were_asked_for(self, caplog: pytest.LogCaptureFixture) -> None:
        with (
            caplog.at_level(logging.INFO, logger="nanoinfer"),
            LLM(BUNDLED_MODEL, **SMALL, num_kvcache_blocks=7) as llm,
        ):
            assert (llm.config.max_model_len, llm.memory.max_model_len, llm.memory.max_position) == (112, 112, 2048)
            assert "max_model_len=112 of the model's 2048" in str(llm.memory)
            with pytest.raises(ValueError, match=r"prompts\[0\] has 112 tokens: must be fewer than max_model_len=112"):
                llm.generate([[30] * 112], use_tqdm=False)
            (output,) = llm.generate([PROMPT], LONG, use_tqdm=False)
            assert (len(PROMPT) + len(output.token_ids), output.finish_reason) == (112, "length")
        assert told(caplog) == [
            "max_model_len=112: the model allows 2048, but num_kvcache_blocks=7 hold no longer sequence: raise it"
        ]

    def test_a_length_that_was_asked_for_is_refused(self) -> None:
        message = "num_kvcache_blocks=7: one sequence of max_model_len=113 needs 8 blocks of 16 tokens; raise it, or"
        with pytest.raises(ValueError, match=f"{message} lower max_model_len to 112"):
            LLM(BUNDLED_MODEL, **SMALL, num_kvcache_blocks=7, max_model_len=113)
        with LLM(BUNDLED_MODEL, **SMALL, num_kvcache_blocks=7, max_model_len=112) as llm:
            assert llm.config.max_model_len == 112

    def test_nothing_is_said_where_the_limit_fits(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, logger="nanoinfer"):
            LLM(BUNDLED_MODEL, **SMALL, num_kvcache_blocks=128).close()
            LLM(BUNDLED_MODEL, **SMALL, num_kvcache_blocks=7, max_model_len=50).close()
        assert told(caplog) == []

    def test_the_memory_of_the_cpu(self, caplog: pytest.LogCaptureFixture, budget: int) -> None:
        with caplog.at_level(logging.INFO, logger="nanoinfer"), LLM(BUNDLED_MODEL, **SMALL, max_num_seqs=4) as llm:
            length = budget // llm.memory.block_bytes * 16
            assert 64 < llm.config.max_model_len == length < 2048
            ropes = [
                module for module in llm.engine.ranks.runner.holdings.model.modules() if hasattr(module, "cos_sin")
            ]
            assert {len(rope.cos_sin) for rope in ropes} == {length}
        (line,) = told(caplog)
        assert line.startswith(f"max_model_len={length}: the model allows 2048, but the KV cache holds no longer")
        assert line.endswith("sequence: set num_kvcache_blocks to more")

    @pytest.mark.usefixtures("budget")
    def test_less_than_one_block_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"the KV cache has 1 MiB, but one sequence .* needs 32 MiB in blocks"):
            LLM(BUNDLED_MODEL, **{**SMALL, "kvcache_block_size": 4096}, max_num_seqs=4)
        with pytest.raises(ValueError, match=r"has 1 MiB, but one sequence of max_model_len=2048 needs 16 MiB"):
            LLM(BUNDLED_MODEL, **SMALL, max_num_seqs=4, max_model_len=2048)

    @pytest.mark.parametrize(
        ("options", "remedy"),
        [
            ({"max_model_len": 2048}, "; 128 tokens fit: lower max_model_len, or set num_kvcache_blocks to more"),
            (
                {"kvcache_block_size": 4096},
                "; 0 tokens fit: lower kvcache_block_size, or set num_kvcache_blocks to more",
            ),
            (
                {"max_model_len": 2048, "device": "cuda"},
                "; 128 tokens fit: lower max_model_len, or raise gpu_memory_uti",
            ),
        ],
        ids=["length", "block", "gpu"],
    )
    def test_the_refusal_says_what_fits(
        self, options: dict[str, Any], remedy: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gpus(monkeypatch, 1)
        config = Config(BUNDLED_MODEL, **{**SMALL, **options})
        layout = lay_out([Pages(kv_heads=1, head_dim=16)], config.kvcache_block_size, 16)
        spec = KVCacheSpec(layout, torch.float32, by_head=False)
        with pytest.raises(ValueError, match=remedy):
            plan._blocks_that_fit(config, spec, 128 * 1 * 2 * 16 * 4)

    @pytest.mark.usefixtures("budget")
    def test_two_ranks_have_one_length(self) -> None:
        """Each holds half of the heads, and so twice as many tokens."""
        with LLM(BUNDLED_MODEL, **SMALL, max_num_seqs=4) as one:
            length = one.config.max_model_len
        with LLM(BUNDLED_MODEL, **SMALL, max_num_seqs=4, tensor_parallel_size=2) as two:
            assert length < two.config.max_model_len == two.memory.blocks * 16 < 2048
            (output,) = two.generate([[30] * (two.config.max_model_len - 2)], LONG, use_tqdm=False)
        assert len(output.token_ids) == 2

    def test_sleep_changes_no_length(self) -> None:
        with LLM(BUNDLED_MODEL, **SMALL, num_kvcache_blocks=4) as llm:
            before = llm.generate([PROMPT], LONG, use_tqdm=False)
            llm.sleep(2)
            llm.wake_up()
            llm.load_weights(BUNDLED_MODEL)
            after = llm.generate([PROMPT], LONG, use_tqdm=False)
        assert before[0].token_ids == after[0].token_ids
        assert len(after[0].token_ids) == 64 - len(PROMPT)

    def test_the_rank_with_the_least_memory_decides(self, caplog: pytest.LogCaptureFixture) -> None:
        config, spec = Config(BUNDLED_MODEL, **SMALL), KVCacheSpec(ONE_HEAD, torch.float32, by_head=False)

        class Ranks(TensorParallel):
            def min(self, value: int, device: torch.device) -> int:
                return min(value, 5 * spec.block_bytes)

        with caplog.at_level(logging.INFO, logger="nanoinfer"):
            made = plan_memory(config, spec, NO_STATES, torch.device("cpu"), Ranks(), held=0, steps=0, graphs=0)
        assert (made.blocks, made.max_model_len) == (5, 80)
        assert "max_model_len=80: the model allows 2048" in told(caplog)[0]

    def test_images_take_their_share(self) -> None:
        config, spec = Config(BUNDLED_MODEL, **SMALL), KVCacheSpec(ONE_HEAD, torch.float32, by_head=False)
        how = config, spec, NO_STATES, torch.device("cpu"), TensorParallel()
        without, plan = (plan_memory(*how, held=0, steps=0, graphs=0, images=size) for size in (0, 1 << 30))
        assert without.blocks - plan.blocks == (1 << 30) // spec.block_bytes
        assert ", images 1.00, " in str(plan)
        assert "images" not in str(without)

    def test_a_replica_leaves_the_log_to_all(self, caplog: pytest.LogCaptureFixture) -> None:
        """Its process may log where the LLM's does, as a script that sets up logging is imported in both."""
        config = Config(BUNDLED_MODEL, **SMALL, num_kvcache_blocks=5, data_parallel_size=2)
        spec = KVCacheSpec(ONE_HEAD, torch.float32, by_head=False)
        with caplog.at_level(logging.INFO, logger="nanoinfer"):
            plan_memory(config, spec, NO_STATES, torch.device("cpu"), TensorParallel(), held=0, steps=0, graphs=0)
        assert caplog.records == []

    @pytest.mark.parametrize(
        ("options", "length", "why"),
        [
            (
                {},
                80,
                "raise gpu_memory_utilization=0.9 or tensor_parallel_size=1, or lower max_num_batched_tokens=16384",
            ),
            (
                {"attention_backend": "torch"},
                64,
                "attention_backend='torch' reads as many keys of every row: set max_mo",
            ),
        ],
    )
    def test_a_gpu_says_what_else_to_change(
        self,
        options: dict[str, str],
        length: int,
        why: str,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        gpus(monkeypatch, 2)
        config = Config(BUNDLED_MODEL, **{**SMALL, "device": "cuda", **options})
        blocks = {"block_bytes": 1, "blocks": 5, "asked": 5, "tokens": 80, "waste": 0.0, "host_blocks": 0}
        made = MemoryPlan(1, 1, 1, 1, 1, 0, 0, 1, 0, **blocks, max_model_len=length, max_position=2048)
        with caplog.at_level(logging.INFO, logger="nanoinfer"):
            plan.tell(config, made)
        assert why in told(caplog)[0]

    def test_the_replica_with_the_fewest_blocks_decides(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Each request ends where it would on that one, whichever computes it."""
        blocks, begin = iter([40, 4]), SpawnedProcess.begin

        def begin_with_so_many(process: SpawnedProcess, config: Config) -> None:
            config = copy.copy(config)
            config.num_kvcache_blocks = next(blocks)
            begin(process, config)

        monkeypatch.setattr(SpawnedProcess, "begin", begin_with_so_many)
        with caplog.at_level(logging.INFO, logger="nanoinfer"):
            two = LLM(BUNDLED_MODEL, **SMALL, max_num_seqs=4, data_parallel_size=2)
        with two:
            outputs = two.generate([[30 + i] for i in range(12)], LONG, use_tqdm=False)
            assert two.config.max_model_len == two.engine._config.max_model_len == 64
            assert not two.engine._config.fits_length
        assert {len(output.token_ids) for output in outputs} == {63}
        assert "max_model_len=64: the model allows 2048" in told(caplog)[0]


def gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let this machine have so many GPUs, which convert FP8."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))


class TestRoom:
    """A prompt that is too long is refused with the tokens that fit, and with the options that make room."""

    def test_each_limit_has_its_remedy(self) -> None:
        def refusal(tokens: int) -> str:
            with pytest.raises(ValueError, match=r"prompts\[0\] has .* max_model_len=64") as caught:
                llm.generate([[30] * tokens], use_tqdm=False)
            return str(caught.value).split("; ")[1]

        with LLM(BUNDLED_MODEL, **SMALL, num_kvcache_blocks=7, max_model_len=64) as llm:
            assert refusal(64) == refusal(111) == "112 tokens fit: raise max_model_len"
            assert (
                refusal(112) == refusal(2047) == "112 tokens fit: raise max_model_len, and raise num_kvcache_blocks=7"
            )
            assert refusal(2048) == "the model allows 2048 at most"
            with pytest.raises(
                ValueError, match="65 tokens: must be at most max_model_len=64; 112 tokens fit: raise max"
            ):
                llm.generate([[30] * 65], greedy(0, prompt_logprobs=0), use_tqdm=False)
            assert llm.engine.is_finished

    def test_the_model_may_be_the_only_limit(self) -> None:
        with (
            LLM(BUNDLED_MODEL, **SMALL, num_kvcache_blocks=200) as llm,
            pytest.raises(ValueError, match=r"max_model_len=2048, .* a token; the model allows 2048 at most$"),
        ):
            llm.generate([[30] * 2048], use_tqdm=False)

    def test_blocks_that_were_asked_for_and_those_that_fit(self, budget: int) -> None:
        for options, remedy in (
            ({"num_kvcache_blocks": 7}, "raise num_kvcache_blocks=7"),
            ({}, "set num_kvcache_blocks"),
        ):
            with LLM(BUNDLED_MODEL, **SMALL, **options, max_num_seqs=4) as llm:
                length = llm.config.max_model_len
                with pytest.raises(ValueError, match=f"; {length} tokens fit: {remedy}"):
                    llm.generate([[30] * length], use_tqdm=False)
            assert length == (112 if options else budget // llm.memory.block_bytes * 16)

    @pytest.mark.parametrize(
        ("options", "count", "remedy"),
        [
            (
                {},
                1,
                "raise gpu_memory_utilization=0.9, or lower STEPS, or set kv_cache_dtype='fp8' or"
                " quantization='fp8' or 'int4' or 'int8' or 'mxfp4' or 'nf4'",
            ),
            (
                {"kv_cache_dtype": "fp8"},
                2,
                "raise gpu_memory_utilization=0.9 or tensor_parallel_size=1, or lower STEPS, or set"
                " quantization='fp8' or 'int4' or 'int8' or 'mxfp4' or 'nf4'",
            ),
            (
                {"quantization": "fp8", "gpu_memory_utilization": 1},
                4,
                "raise tensor_parallel_size=1, or lower STEPS, or set kv_cache_dtype='fp8'",
            ),
            (
                {"quantization": "fp8", "kv_cache_dtype": "fp8", "gpu_memory_utilization": 1, "data_parallel_size": 2},
                3,
                "lower STEPS",
            ),
            (
                {"quantization": "fp8", "kv_cache_dtype": "fp8", "tensor_parallel_size": 8},
                16,
                "raise gpu_memory_utilization=0.9, or lower STEPS",
            ),
            (
                {"quantization": "fp8", "kv_cache_dtype": "fp8", "max_adapters": 8},
                1,
                "raise gpu_memory_utilization=0.9, or lower STEPS or max_adapters=8",
            ),
            ({"num_kvcache_blocks": 9}, 2, "raise num_kvcache_blocks=9"),
        ],
        ids=["all", "cache in fp8", "weights in fp8", "all taken", "ranks enough", "adapters", "blocks"],
    )
    def test_only_options_that_would_help_are_named(
        self, options: dict[str, Any], count: int, remedy: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gpus(monkeypatch, count)
        config = Config(BUNDLED_MODEL, **{**SMALL, "device": "cuda", **options})
        steps = "max_num_batched_tokens=16384 or max_num_seqs=512"
        assert what_makes_room(config) == remedy.replace("STEPS", steps)

    def test_a_gpu_that_cannot_convert_fp8_and_a_model_that_cannot_be_split(
        self, make_qwen3: Callable[..., str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gpus(monkeypatch, 8)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
        folder = make_qwen3(num_attention_heads=3, num_key_value_heads=3)
        made = what_makes_room(Config(folder, **{**SMALL, "device": "cuda"}))
        assert "kv_cache_dtype" not in made
        assert "tensor_parallel_size" not in made


class TestTokenHistory:
    """Rows whose penalties need their tokens take memory for as many as they have."""

    def test_it_grows_with_its_longest_row(self) -> None:
        history, rows = TokenHistory(4, torch.device("cpu")), torch.tensor([0, 2])
        history.join(0, array("i", [7, 8]))
        history.join(2, array("i", [1, 2, 3, 4, 5]))
        for step in range(1040):
            positions = torch.tensor([2 + step, 5 + step], dtype=torch.int32)
            history.write(rows, positions, torch.tensor([100 + step, 200 + step], dtype=torch.int32))
            history.step(1, 2000)
        first, second = history.of(rows).tolist()
        assert first[:1042] == [7, 8, *range(100, 1140)]
        assert second[:1045] == [1, 2, 3, 4, 5, *range(200, 1240)]
        assert history._tokens.shape == (4, 2 * COLUMNS)

    def test_it_is_as_wide_as_its_rows_may_be_where_steps_give_several_tokens(self) -> None:
        history, rows = TokenHistory(2, torch.device("cpu")), torch.tensor([0])
        history.join(0, array("i", [7, 8]))
        widths = []
        for count, longest in ((5, 8), (5, 9), (1, 10), (5, 40)):
            history.step(count, longest)
            history.write(rows, torch.tensor([2]), torch.tensor([9], dtype=torch.int32))
            widths.append(history.of(rows).shape[1])
        assert widths == [8, 9, 10, 15]

    def test_rows_move_and_leave(self) -> None:
        history = TokenHistory(4, torch.device("cpu"))
        for row in range(3):
            history.join(row, array("i", [row] * (row + 1)))
        history.move(2, 0)
        history.drop(1)
        assert history.of(torch.tensor([0]))[0, :3].tolist() == [2, 2, 2]
        history.move(3, 0)  # a row whose tokens nobody needs
        assert history._tokens.numel() == 0

    def test_a_row_that_it_does_not_know_may_be_longer(self) -> None:
        history, rows = TokenHistory(2, torch.device("cpu")), torch.tensor([0, 1])
        history.join(1, array("i", [5]))
        history.write(rows, torch.tensor([5000, 1]), torch.tensor([8, 6], dtype=torch.int32))
        assert history.of(rows)[1].tolist() == [5, 6]


@pytest.mark.parametrize(
    ("kind", "positions", "settings", "limit"),
    [
        ("qwen3", 40960, {"rope_parameters": YARN}, 131072),
        ("qwen2", 32768, {"rope_scaling": {"type": "yarn", **YARN}}, 131072),
        ("qwen3", 131072, {"rope_parameters": YARN}, 131072),
        ("llama", 32768, {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.5}}, 81920),
        ("llama", 131072, {"rope_parameters": {**YARN, "factor": 2.0}}, 131072),
        ("olmo3", 8192, {"rope_parameters": {**YARN, "original_max_position_embeddings": 8192}, **KINDS}, 32768),
        (
            "gemma3_text",
            8192,
            {"rope_parameters": by_kind(YARN), **KINDS},
            131072,
        ),
        (
            "gemma3_text",
            131072,
            {"rope_parameters": by_kind(LINEAR), **KINDS},
            131072,
        ),
        ("llama", 16384, {"rope_parameters": LINEAR}, 16384),
        ("llama", 131072, {"rope_parameters": LLAMA3}, 131072),
        ("phi3", 131072, {"rope_parameters": LONGROPE}, 131072),
        ("qwen3", 40960, {}, 40960),
    ],
)
def test_the_models_own_limit(kind: str, positions: int, settings: dict[str, Any], limit: int) -> None:
    """YaRN's stretched length counts where it is more than max_position_embeddings, which is whole elsewhere."""
    shape = {"num_hidden_layers": 2, "max_position_embeddings": positions, "architectures": [CLASSES[kind]]}
    config = AutoConfig.for_model(kind, **shape, **copy.deepcopy(settings))
    assert describe(config).max_position == limit


def test_behind_max_position_embeddings_yarn_is_that_of_transformers(
    make_llm: Callable[..., LLM], make_qwen3: Callable[..., str]
) -> None:
    yarn = {**YARN, "original_max_position_embeddings": 32}
    folder = make_qwen3(max_position_embeddings=40, rope_parameters=yarn)
    prompt = [5, 6, 7] * 30
    (output,) = make_llm(folder, max_model_len=128).generate([prompt], greedy(16, ignore_eos=True), use_tqdm=False)
    assert output["token_ids"] == Oracle(folder).greedy(prompt, 16, ignore_eos=True)
