"""Greedy tokens equal transformers' own, token for token, whatever path they take through the engine."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
from conftest import CollidingBlockManager, Oracle, greedy
from mixed import Mixed

from nanoinfer import BUNDLED_MODEL, LLM, SamplingParams
from nanoinfer.engine.block_manager import BlockManager

Tokens = list[list[int]]


def token_ids(llm: LLM, prompts: Tokens, params: SamplingParams | list[SamplingParams]) -> Tokens:
    return [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]


def prefilled(llm: LLM, prompts: Tokens, params: SamplingParams) -> tuple[Tokens, int]:
    """Return the outputs' tokens, and how many prompt tokens the model had to compute for them."""
    seqs = [seq for prompt in prompts for seq in llm.engine.add_request(prompt, params)]
    count = 0
    while not llm.engine.is_finished:
        count += llm.engine.step().num_prefill_tokens
    return [seq.output_token_ids for seq in seqs], count


def count_uncached(prompts: Tokens, block_size: int) -> int:
    """Count the tokens that no earlier prompt of one batch has computed in whole blocks."""
    seen: set[tuple[int, ...]] = set()
    count = 0
    for prompt in prompts:
        prefixes = [tuple(prompt[:end]) for end in range(block_size, len(prompt) + 1, block_size)]
        count += len(prompt) - block_size * sum(len(prefix) < len(prompt) and prefix in seen for prefix in prefixes)
        seen.update(prefixes)
    return count


FEW = 12  # of the mixed prompts: lengths around a block's end, and some others
TIGHT = {"max_model_len": 340, "kvcache_block_size": 16, "num_kvcache_blocks": 36}  # for 16 of them


def test_mixed_lengths_in_one_batch_fresh_and_prefix_cached(
    make_llm: Callable[..., LLM], mixed_prompts: Tokens, mixed_expected: Tokens
) -> None:
    llm = make_llm(kvcache_block_size=16)
    outputs, fresh = prefilled(llm, mixed_prompts, greedy())
    assert outputs == mixed_expected
    outputs, warm = prefilled(llm, mixed_prompts, greedy())
    assert outputs == mixed_expected
    assert fresh == count_uncached(mixed_prompts, 16)
    assert warm < fresh / 4


def test_of_a_call_the_longest_begins_first_and_results_keep_their_order(make_llm: Callable[..., LLM]) -> None:
    prompts, params = [[5, 6], [7, 8], [9]], [SamplingParams(max_tokens=count, ignore_eos=True) for count in (2, 9, 5)]
    llm, ended = make_llm(max_num_seqs=1), []
    llm.engine.on_step = lambda step: ended.extend(seq.request_id for seq in step.finished)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert ended == [1, 2, 0]
    assert [output.request_id for output in outputs] == [0, 1, 2]
    llm = make_llm(max_num_seqs=1)  # seeds come from the requests' numbers
    alone = [llm.generate([prompt], one, use_tqdm=False)[0] for prompt, one in zip(prompts, params, strict=True)]
    assert [output.token_ids for output in outputs] == [output.token_ids for output in alone]


def test_chunked_prefill(make_llm: Callable[..., LLM], mixed_prompts: Tokens, mixed_expected: Tokens) -> None:
    assert token_ids(make_llm(max_num_batched_tokens=64), mixed_prompts[:FEW], greedy()) == mixed_expected[:FEW]


def test_preemption(make_llm: Callable[..., LLM], mixed_prompts: Tokens, mixed_expected: Tokens) -> None:
    llm = make_llm(**TIGHT)
    assert token_ids(llm, mixed_prompts[:16], greedy()) == mixed_expected[:16]
    assert llm.engine.scheduler.num_preemptions > 0


def test_only_equal_prefixes_are_shared_whatever_the_hashes(
    make_llm: Callable[..., LLM], oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of up to three blocks, of which two kinds exist, in a cache that is too small for them."""
    text = oracle.greedy([30, 31], 32, ignore_eos=True)
    prompts = [[*a, *b, *c, *[5] * 8] for a, b, c in product([[], text[:16], text[16:]], repeat=3)]
    params = [greedy(12, n=1 + i % 3) for i in range(len(prompts))]
    known = {prompt: oracle.greedy(list(prompt), 12) for prompt in set(map(tuple, prompts))}
    expected = [known[tuple(prompt)] for prompt in prompts]
    cached = []
    for kind in (BlockManager, CollidingBlockManager):
        monkeypatch.setattr("nanoinfer.engine.assembly.BlockManager", kind)
        llm = make_llm(device="cpu", max_model_len=80, kvcache_block_size=16, num_kvcache_blocks=20)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert llm.engine.scheduler.num_preemptions > 0
        for output, tokens in zip(outputs, expected, strict=True):
            assert all(sample["token_ids"] == tokens for sample in output["samples"])
        cached.append([output["num_cached_tokens"] for output in outputs])
    assert cached[0] == cached[1]
    assert max(cached[1]) > 16


def test_preemption_of_chunked_prompts(
    make_llm: Callable[..., LLM], mixed_prompts: Tokens, mixed_expected: Tokens
) -> None:
    llm = make_llm(**TIGHT, max_num_batched_tokens=50)
    assert token_ids(llm, mixed_prompts[:16], greedy()) == mixed_expected[:16]
    assert llm.engine.scheduler.num_preemptions > 0


def test_more_prompts_than_rows(make_llm: Callable[..., LLM], mixed_prompts: Tokens, mixed_expected: Tokens) -> None:
    assert token_ids(make_llm(max_num_seqs=3), mixed_prompts[:FEW], greedy()) == mixed_expected[:FEW]


def test_rows_that_leave_at_different_times(
    make_llm: Callable[..., LLM], mixed_prompts: Tokens, mixed_expected: Tokens
) -> None:
    """Output lengths are 1 to 12, so that sequences leave rows all over the batch."""
    params = [greedy(1 + index % 12) for index in range(len(mixed_prompts))]
    expected = [tokens[: one.max_tokens] for tokens, one in zip(mixed_expected, params, strict=True)]
    assert token_ids(make_llm(max_num_seqs=8), mixed_prompts, params) == expected


def test_triton_kernels_end_to_end(make_llm: Callable[..., LLM], oracle: Oracle) -> None:
    """The engine over our own attention kernels; interpreted where there is no GPU."""
    prompts = [[30, 31], [40] * 17]
    llm = make_llm(attention_backend="triton", max_num_batched_tokens=16, kvcache_block_size=16, max_model_len=64)
    assert token_ids(llm, prompts, greedy(3)) == [oracle.greedy(prompt, 3) for prompt in prompts]


@pytest.mark.parametrize(
    "shape",
    [
        {"tie_word_embeddings": True, "num_hidden_layers": 1},
        {"tie_word_embeddings": False, "num_hidden_layers": 3},
        {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32},
        {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
        {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 128},
        {"rope_theta": 1_000_000.0, "rms_norm_eps": 1e-5},
    ],
    ids=str,
)
@pytest.mark.whole
def test_random_qwen3(shape: dict, make_llm: Callable[..., LLM], make_qwen3: Callable[..., str]) -> None:
    folder = make_qwen3(**shape)
    oracle = Oracle(folder)
    prompts = [[(7 * i + j * j) % 512 for j in range(length)] for i, length in enumerate((1, 5, 33, 64, 100))]
    expected = [oracle.greedy(prompt, 24) for prompt in prompts]
    assert token_ids(make_llm(folder, kvcache_block_size=16), prompts, greedy(24)) == expected


class TestEdges:
    """Cases in which users of nano-vLLM met errors."""

    def test_a_prompt_of_whole_blocks_that_is_all_cached(self, make_llm: Callable[..., LLM], oracle: Oracle) -> None:
        llm = make_llm(kvcache_block_size=16)
        prompt = oracle.greedy([30, 31], 48)
        assert len(prompt) % 16 == 0
        expected = [oracle.greedy(prompt, 20)]
        assert prefilled(llm, [prompt], greedy(20)) == (expected, 48)
        assert prefilled(llm, [prompt], greedy(20)) == (expected, 16)  # for the last token's logits

    def test_two_identical_prompts_in_one_batch(self, make_llm: Callable[..., LLM], oracle: Oracle) -> None:
        prompt = oracle.greedy([30, 31], 40)
        expected = oracle.greedy(prompt, 20)
        assert token_ids(make_llm(kvcache_block_size=16), [prompt, prompt], greedy(20)) == [expected, expected]

    def test_a_prompt_of_one_token_and_an_output_of_one_token(
        self, make_llm: Callable[..., LLM], oracle: Oracle
    ) -> None:
        assert token_ids(make_llm(), [[30]], greedy(1)) == [oracle.greedy([30], 1)]

    def test_the_models_length_ends_a_request(self, make_llm: Callable[..., LLM], oracle: Oracle) -> None:
        llm = make_llm(max_model_len=40)
        prompt = oracle.greedy([30, 31], 30)
        assert token_ids(llm, [prompt, [*prompt[:-1], 5]], greedy(100, ignore_eos=True))[0] == oracle.greedy(prompt, 10)
        assert len(token_ids(llm, [[30] * 39], greedy(100, ignore_eos=True))[0]) == 1

    def test_an_end_of_sequence_token_ends_a_request_unless_ignored(self, make_llm: Callable[..., LLM]) -> None:
        llm = make_llm()
        prompt = llm.tokenizer.encode("First Citizen:\nBefore we proceed any further,")
        (ended,), (ignored,) = (token_ids(llm, [prompt], greedy(64, ignore_eos=flag)) for flag in (False, True))
        assert ended[-1] == 2
        assert ended.count(2) == 1
        assert ignored[: len(ended)] == ended
        assert len(ignored) == 64

    def test_the_token_computed_after_the_end_of_sequence_leaves_no_trace(self, make_llm: Callable[..., LLM]) -> None:
        llm = make_llm(kvcache_block_size=16)
        prompt = llm.tokenizer.encode("First Citizen:\nBefore we proceed any further,")
        (seq,) = llm.engine.add_request(prompt, greedy(64))
        decoded = 0
        while not llm.engine.is_finished:
            decoded += llm.engine.step().num_decode_tokens
        assert decoded == len(seq.output_token_ids) - 1  # the first came from prefill; the dropped one is not counted
        manager = llm.engine.scheduler.block_manager
        assert manager.num_free == len(manager.blocks)
        assert len(manager.tree) == (len(seq) - 1) // 16

    def test_every_end_of_sequence_id_of_the_checkpoint_counts(
        self, make_llm: Callable[..., LLM], tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        import json
        import shutil

        folder = tmp_path_factory.mktemp("two-eos")
        shutil.copytree(BUNDLED_MODEL, folder, dirs_exist_ok=True)
        text = token_ids(make_llm(), [[30, 31]], greedy(8, ignore_eos=True))[0]
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, text[3]]}))
        llm = make_llm(str(folder))
        assert llm.config.eos_token_ids == {2, 7, text[3]}
        assert token_ids(llm, [[30, 31]], greedy(8))[0] == text[: text.index(text[3]) + 1]


class TestSampling:
    def test_a_seed_gives_the_same_tokens_alone_and_among_others(self, make_llm: Callable[..., LLM]) -> None:
        llm = make_llm()
        request, params = [30, 31, 32], SamplingParams(temperature=1.0, max_tokens=20, seed=5)
        others = [[40 + i] * (i + 1) for i in range(10)]
        alone = token_ids(llm, [request], params)
        among = token_ids(llm, [*others, request], [SamplingParams(max_tokens=9)] * 10 + [params])
        assert among[-1:] == alone

    def test_requests_without_a_seed_differ_and_an_engine_repeats_itself(self, make_llm: Callable[..., LLM]) -> None:
        params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
        first, second = (token_ids(make_llm(seed=3), [[30], [30]], params) for _ in range(2))
        assert first == second
        assert first[0] != first[1]
        assert token_ids(make_llm(seed=4), [[30], [30]], params) != first

    def test_no_two_samples_have_one_seed(self, make_llm: Callable[..., LLM]) -> None:
        engine = make_llm().engine
        seeds = [None, *range(20), *[None] * 20]
        seqs = [seq for seed in seeds for seq in engine.add_request([30], SamplingParams(seed=seed, n=500))]
        assert len({seq.seed for seq in seqs}) == len(seqs)

    @pytest.mark.usefixtures("no_foresight")
    def test_a_preempted_sequence_draws_the_same_tokens(self, make_llm: Callable[..., LLM]) -> None:
        params = SamplingParams(temperature=0.8, max_tokens=40, ignore_eos=True, seed=9)
        prompts = [[30 + i] * 20 for i in range(6)]
        roomy = make_llm(kvcache_block_size=16, max_model_len=64)
        tight = make_llm(kvcache_block_size=16, max_model_len=64, num_kvcache_blocks=10)
        assert token_ids(tight, prompts, params) == token_ids(roomy, prompts, params)
        assert tight.engine.scheduler.num_preemptions > 0
        assert roomy.engine.scheduler.num_preemptions == 0


@pytest.mark.whole
def test_the_mixed_prompts_and_their_tokens_are_what_transformers_makes(oracle: Oracle) -> None:
    assert Mixed.read() == Mixed.make(oracle.greedy)
