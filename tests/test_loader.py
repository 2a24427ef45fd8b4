"""Loads all kinds of checkpoints: sharded, tied or not, by any transformers version; each rank reads its slice."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import Oracle, greedy, safetensors_of
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from nanoinfer import LLM
from nanoinfer.layers.embedding import VocabParallelEmbedding
from nanoinfer.layers.linear import ColumnParallelLinear, RowParallelLinear, side_by_side, unit_by_unit
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.weights import pinned
from nanoinfer.weights.shards import Away, table_of
from nanoinfer.weights.sources import FileSource


def rank(index: int, size: int) -> TensorParallel:
    """A rank without a process group: enough to be loaded."""
    tp = TensorParallel()
    tp.rank, tp.size = index, size
    return tp


def test_tensors_that_no_model_reads(tmp_path: Path) -> None:
    """Rotary frequencies are computed here, and layers that guess further tokens do not run."""
    weights = {"embed.weight": torch.randn(21, 8), "layers.0.rotary_emb.inv_freq": torch.ones(4)}
    save_file({**weights, "mtp.layers.0.mlp.gate.weight": torch.ones(4, 8)}, tmp_path / "model.safetensors")
    embedding = VocabParallelEmbedding("embed", 21, 8, rank(0, 1))
    FileSource(str(tmp_path)).fill(table_of(embedding))
    assert torch.equal(embedding.weight, weights["embed.weight"])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_ranks_slices_make_up_the_whole(size: int, tmp_path: Path) -> None:
    """There are two KV heads, and each of four ranks has the one that its query heads attend to."""
    weights = {
        "block.q_proj.weight": torch.randn(16, 8),
        "block.k_proj.weight": torch.randn(8, 8),
        "block.o_proj.weight": torch.randn(8, 16),
        "embed.weight": torch.randn(21, 8),
    }
    save_file(weights, tmp_path / "model.safetensors")

    def load(index: int) -> nn.ModuleDict:
        tp = rank(index, size)
        block = nn.ModuleDict(
            {
                "qk_proj": ColumnParallelLinear(side_by_side(("block.q_proj", "block.k_proj"), (4, 2), 4), 8, tp),
                "o_proj": RowParallelLinear("block.o_proj", 16, 8, tp),
            }
        )
        model = nn.ModuleDict({"block": block, "embed": VocabParallelEmbedding("embed", 21, 8, tp)})
        FileSource(str(tmp_path)).fill(table_of(model))
        return model

    models = [load(index) for index in range(size)]
    q_and_k = [model["block"]["qk_proj"].matrix.weight.split([16 // size, max(8 // size, 4)]) for model in models]
    held = q_and_k[:: size // 2] if size > 2 else q_and_k
    assert torch.equal(torch.cat([q for q, _ in q_and_k]), weights["block.q_proj.weight"])
    assert torch.equal(torch.cat([k for _, k in held]), weights["block.k_proj.weight"])
    assert all(torch.equal(q_and_k[i][1], held[i * len(held) // size][1]) for i in range(size))
    assert torch.equal(
        torch.cat([m["block"]["o_proj"].matrix.weight for m in models], dim=1), weights["block.o_proj.weight"]
    )
    assert torch.equal(torch.cat([m["embed"].weight for m in models]), weights["embed.weight"])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_ranks_slices_of_a_fused_tensor_make_up_the_whole(size: int, tmp_path: Path) -> None:
    """The tensor holds four query heads, two key heads and two value heads, of two numbers each; the bias too."""
    weight, bias = torch.randn(16, 8), torch.randn(16)
    save_file({"qkv.weight": weight, "qkv.bias": bias}, tmp_path / "model.safetensors")
    held: list[list[torch.Tensor]] = [[], [], []]  # queries, keys, values
    for index in range(size):
        layer = ColumnParallelLinear(side_by_side(("qkv",), (4, 2, 2), 2), 8, rank(index, size), bias=True)
        FileSource(str(tmp_path)).fill(table_of(layer))
        whole = torch.cat([layer.matrix.weight, layer.matrix.bias[:, None]], dim=1)
        shares = whole.split([8 // size, max(4 // size, 2), max(4 // size, 2)])
        for heads, share in zip(held, shares, strict=True):
            if heads is held[0] or index % max(size // 2, 1) == 0:  # of four ranks, two hold the same KV head
                heads.append(share)
    expected = torch.cat([weight, bias[:, None]], dim=1)
    assert torch.equal(torch.cat([share for heads in held for share in heads]), expected)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_ranks_slices_of_a_tensor_that_goes_head_by_head(size: int, tmp_path: Path) -> None:
    """The tensor holds, for each of four heads, two rows of one projection, and then three of another."""
    weight, bias = torch.randn(20, 8), torch.randn(20)
    save_file({"mixed.weight": weight, "mixed.bias": bias}, tmp_path / "model.safetensors")
    first, second = torch.cat([weight, bias[:, None]], dim=1).view(4, 5, 9).split([2, 3], dim=1)
    for index, heads in enumerate(torch.arange(4).chunk(size)):
        layer = ColumnParallelLinear(unit_by_unit("mixed", 4, (2, 3)), 8, rank(index, size), bias=True)
        FileSource(str(tmp_path)).fill(table_of(layer))
        whole = torch.cat([layer.matrix.weight, layer.matrix.bias[:, None]], dim=1)
        assert torch.equal(whole, torch.cat([first[heads].flatten(0, 1), second[heads].flatten(0, 1)]))


class TestWhichFilesAreRead:
    """As transformers chooses them."""

    def test_other_safetensors_in_the_folder_are_not(
        self, make_llm: Callable[..., LLM], make_qwen3: Callable[..., str]
    ) -> None:
        folder = make_qwen3()
        (file,) = safetensors_of(folder)
        expected = Oracle(folder).greedy([5, 6, 7], 8)
        others = {name: torch.randn_like(weight) for name, weight in load_file(file).items()}
        save_file(others, Path(folder) / "model_ema.safetensors")
        save_file({"momentum": torch.zeros(3)}, Path(folder) / "optimizer.safetensors")
        (output,) = make_llm(folder).generate([[5, 6, 7]], greedy(8), use_tqdm=False)
        assert output["token_ids"] == expected

    def test_a_shard_that_is_not_there_is_named(self, make_qwen3: Callable[..., str]) -> None:
        folder = make_qwen3(shards=3)
        shard = safetensors_of(folder)[1]
        shard.unlink()
        with pytest.raises(ValueError, match=f"index.json names {shard.name}, which is not there"):
            LLM(folder)

    @pytest.mark.parametrize(
        ("index", "message"),
        [
            ("{not json", "cannot be read"),
            ("[]", "must have a 'weight_map'"),
            ("{}", "must have a 'weight_map'"),
            ('{"weight_map": {}}', "must have a 'weight_map'"),
            ('{"weight_map": {"x": 3}}', "'weight_map' has 3: must be a file in the folder"),
            ('{"weight_map": {"x": "../x.safetensors"}}', r"has '\.\./x\.safetensors': must be a file in the folder"),
            ('{"weight_map": {"x": "/x.safetensors"}}', "has '/x.safetensors': must be a file in the folder"),
        ],
    )
    def test_an_index_that_names_no_files_of_the_folder(self, index: str, message: str, tmp_path: Path) -> None:
        (tmp_path / "model.safetensors.index.json").write_text(index)
        with pytest.raises(ValueError, match=rf"model\.safetensors\.index\.json: .*{message}"):
            FileSource(str(tmp_path))

    def test_only_other_names(self, make_qwen3: Callable[..., str]) -> None:
        folder = make_qwen3()
        safetensors_of(folder)[0].rename(Path(folder) / "consolidated.safetensors")
        with pytest.raises(ValueError, match=r"neither model\.safetensors nor .*, only consolidated\.safetensors"):
            LLM(folder)


@pytest.mark.parametrize(
    ("number", "message"), [(float("nan"), "NaN or infinite as float32"), (float("inf"), "NaN or infinite")]
)
def test_numbers_that_are_not_finite(number: float, message: str, make_qwen3: Callable[..., str]) -> None:
    folder = make_qwen3()
    (file,) = safetensors_of(folder)
    weights = load_file(file)
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] = number
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ValueError, match=rf"model\.layers\.1\.mlp\.down_proj\.weight has numbers that are {message}"):
        LLM(folder)


def test_weights_of_integers(make_qwen3: Callable[..., str]) -> None:
    folder = make_qwen3()
    (file,) = safetensors_of(folder)
    weights = load_file(file)
    save_file({**weights, "model.norm.weight": torch.ones(64, dtype=torch.int8)}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.norm\.weight has numbers of type I8"):
        LLM(folder)


def test_a_checkpoint_that_says_tied_and_is_not(make_llm: Callable[..., LLM], make_qwen3: Callable[..., str]) -> None:
    folder = make_qwen3(tie_word_embeddings=True)
    (file,) = safetensors_of(folder)
    weights = load_file(file)
    head = torch.randn_like(weights["model.embed_tokens.weight"])
    save_file({**weights, "lm_head.weight": head}, file, {"format": "pt"})
    (output,) = make_llm(folder).generate([[5, 6, 7]], greedy(8), use_tqdm=False)
    assert output["token_ids"] == Oracle(folder).greedy([5, 6, 7], 8)


def test_a_tied_checkpoint_that_stores_only_the_output_projection(
    make_llm: Callable[..., LLM], make_qwen3: Callable[..., str]
) -> None:
    folder = make_qwen3(tie_word_embeddings=True)
    (file,) = safetensors_of(folder)
    expected = Oracle(folder).greedy([5, 6, 7], 8)
    weights = load_file(file)
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    save_file(weights, file, {"format": "pt"})
    (output,) = make_llm(folder).generate([[5, 6, 7]], greedy(8), use_tqdm=False)
    assert output["token_ids"] == expected


def test_a_sharded_checkpoint(make_llm: Callable[..., LLM], make_qwen3: Callable[..., str]) -> None:
    folder = make_qwen3(shards=4)
    assert len(safetensors_of(folder)) > 2
    (output,) = make_llm(folder).generate([[5, 6, 7]], greedy(8), use_tqdm=False)
    assert output["token_ids"] == Oracle(folder).greedy([5, 6, 7], 8)


def test_a_tied_checkpoint_that_stores_its_matrix_twice(
    make_llm: Callable[..., LLM], make_qwen3: Callable[..., str]
) -> None:
    folder = make_qwen3(tie_word_embeddings=True)
    (file,) = safetensors_of(folder)
    with safe_open(file, framework="pt") as reader:
        assert "lm_head.weight" not in reader.keys()  # noqa: SIM118
    expected = Oracle(folder).greedy([5, 6, 7], 8)
    weights = load_file(file)
    save_file({**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}, file, {"format": "pt"})
    (output,) = make_llm(folder).generate([[5, 6, 7]], greedy(8), use_tqdm=False)
    assert output["token_ids"] == expected


@pytest.mark.parametrize("place", ["top level", "rope_parameters"])
def test_rope_theta_is_found_wherever_a_transformers_version_wrote_it(
    place: str, make_llm: Callable[..., LLM], make_qwen3: Callable[..., str]
) -> None:
    folder = make_qwen3(rope_theta=500.0)
    expected = Oracle(folder).greedy([5, 6, 7] * 10, 16)
    file = Path(folder) / "config.json"
    config = json.loads(file.read_text())
    for name in ("rope_theta", "rope_parameters", "rope_scaling"):
        config.pop(name, None)
    theta = {"rope_theta": 500.0}
    config |= theta if place == "top level" else {"rope_parameters": {**theta, "rope_type": "default"}}
    file.write_text(json.dumps(config))
    (output,) = make_llm(folder).generate([[5, 6, 7] * 10], greedy(16), use_tqdm=False)
    assert output["token_ids"] == expected


def test_a_hub_id_is_resolved_by_snapshot_download(
    make_llm: Callable[..., LLM], make_qwen3: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, asked = make_qwen3(), []

    def snapshot_download(repo_id: str, **options: object) -> str:
        asked.append(repo_id)
        return folder

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    llm = make_llm("someone/some-model")
    assert asked == ["someone/some-model"]
    assert llm.config.model == folder


@pytest.mark.parametrize(("dtype", "stored"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_weights_are_converted_to_the_dtype_that_is_asked_for(
    dtype: str, stored: str, make_llm: Callable[..., LLM], make_qwen3: Callable[..., str]
) -> None:
    folder = make_qwen3(dtype=stored)
    (file,) = safetensors_of(folder)
    save_file({name: w.to(getattr(torch, stored)) for name, w in load_file(file).items()}, file, {"format": "pt"})
    llm = make_llm(folder, dtype=dtype)
    assert {p.dtype for p in llm.engine.ranks.runner.steps.model.parameters()} == {getattr(torch, dtype)}
    assert len(llm.generate([[5]], greedy(4), use_tqdm=False)[0]["token_ids"]) == 4


def test_dummy_weights_need_no_checkpoint(make_llm: Callable[..., LLM], make_qwen3: Callable[..., str]) -> None:
    folder = make_qwen3()
    for file in safetensors_of(folder):
        file.unlink()
    llm = make_llm(folder, load_format="dummy")
    outputs = llm.generate([[5], [6]], greedy(8, ignore_eos=True), use_tqdm=False)
    assert [len(output["token_ids"]) for output in outputs] == [8, 8]


class TestUploads:
    """Files go to a GPU through pinned buffers."""

    def test_a_first_tensor_of_no_numbers_goes_with_the_next(self) -> None:
        parts = [(torch.empty(size, 48), torch.empty(size, 48)) for size in (0, 2)]
        assert [len(bundle) for bundle in pinned._bundled(parts)] == [2]

    @pytest.mark.parametrize("shape", [(), (1,), (100,), (3, 5), (5, 33), (2, 3, 50), (4, 0)])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_parts_fit_a_buffer_and_are_all(
        self, shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(pinned, "BUFFER_BYTES", 64)
        source = torch.randn(shape, dtype=dtype)
        target = torch.zeros_like(source)
        parts = list(pinned._parts_of(target, source))
        for some, filling in parts:
            assert filling.nbytes <= 64
            some += filling
        assert torch.equal(target, source)
        assert len(parts) <= 1 + 3 * source.nbytes // 64

    @pytest.mark.gpu
    @pytest.mark.parametrize("at_once", [1, 1 << 20])
    def test_all_kinds_of_tensors(self, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of other dtypes, slices of columns, larger than a buffer, for what is no tensor; many."""
        monkeypatch.setattr(pinned, "BUFFER_BYTES", 1 << 12)
        monkeypatch.setattr(pinned, "BYTES_AT_ONCE", at_once)
        monkeypatch.setattr(pinned, "STAGED_AT_ONCE", at_once)
        sources = [
            torch.randn(300, 200).bfloat16(),
            torch.randn(3000),
            torch.randn(64, 100)[:, 25:75],
            torch.randn(2, 2000, 3)[1],
            torch.randn(20, 3000).half(),
            torch.tensor(3.0),
            *(torch.randn(10, 10).to(torch.float8_e4m3fn) for _ in range(50)),
        ]
        filled: list[Tensor] = [torch.zeros(source.shape, dtype=torch.bfloat16, device="cuda") for source in sources]
        uploads = pinned.Uploads(torch.device("cuda", 0))
        for target, source in zip(filled, sources, strict=True):
            uploads.add(target, source)
        own = Quantized(torch.zeros(300, 200, device="cuda"))
        uploads.add(own, sources[0])
        uploads.finish()
        uploads.finish()  # nothing waits
        for target, source in zip(filled, sources, strict=True):
            assert torch.equal(target.cpu(), source.bfloat16())
        assert torch.equal(own.numbers.cpu(), 2 * sources[0].float())

    @pytest.mark.gpu
    @pytest.mark.parametrize("at_once", [1, 1 << 20])
    def test_weights_whose_home_is_host_memory(self, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """They are written there, also between others that go to the GPU; of two for one target, the later counts."""
        monkeypatch.setattr(pinned, "BUFFER_BYTES", 1 << 12)
        monkeypatch.setattr(pinned, "BYTES_AT_ONCE", at_once)
        homes = [Home(300, 200, device="cuda") for _ in range(20)]
        uploads, device = pinned.Uploads(torch.device("cuda", 0)), torch.zeros(300, 200, device="cuda")
        for number, home in enumerate(homes):
            uploads.add(Away(home.target, home), torch.full((300, 200), -1.0))
            uploads.add(device, torch.full((300, 200), float(number)))
            dtype = torch.float16 if number % 2 else torch.float32
            uploads.add(Away(home.target, home), torch.full((300, 200), number, dtype=dtype))
        uploads.finish()
        assert (device == 19).all()
        assert all((home.numbers == number).all() for number, home in enumerate(homes))

    @pytest.mark.gpu
    def test_an_error_is_raised(self) -> None:
        uploads = pinned.Uploads(torch.device("cuda", 0))
        uploads.add(torch.zeros(3, device="cuda"), torch.zeros(4))
        with pytest.raises(RuntimeError, match="size"):
            uploads.finish()


class TestThreads:
    """Several copy parts at once."""

    free_bytes = 1 << 30  # of the device

    @pytest.fixture(autouse=True)
    def no_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Instead of a GPU."""
        empty = torch.empty
        monkeypatch.setattr(torch, "empty", lambda *shape, dtype, **_: empty(*shape, dtype=dtype))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(synchronize=lambda: None))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (self.free_bytes, 1 << 40))
        for name in ("Stream", "stream", "device"):
            monkeypatch.setattr(torch.cuda, name, lambda *_: nullcontext())

    def copy(self, parts: int, act: Callable[[int], object], meanwhile: Callable[[], object] = int) -> list[int]:
        """The parts that are copied until `copy_parts` returns or raises; a part takes a while."""
        self.copied: list[int] = []

        def copy(part: int, buffer: Tensor) -> None:
            assert buffer.shape == (50,)
            act(part)
            time.sleep(0.005)
            self.copied.append(part)

        pinned.copy_parts(range(parts), copy, 50, torch.device("cpu"), meanwhile, self.pool)
        return self.copied

    @pytest.fixture(autouse=True, params=["own threads", "a pool's"])
    def pool_or_none(self, request: pytest.FixtureRequest) -> None:
        self.pool = None if request.param == "own threads" else ThreadPoolExecutor(pinned.NUM_THREADS)

    @pytest.mark.parametrize("parts", [1, 3, 100])
    def test_each_part_is_copied_once(self, parts: int) -> None:
        assert sorted(self.copy(parts, lambda _: None)) == list(range(parts))

    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
    def test_an_error_stops_all_of_them(self, error: type[BaseException]) -> None:
        def fail(part: int) -> None:
            if part == 30:
                if error is ValueError:
                    raise ValueError
                os.kill(os.getpid(), signal.SIGINT)  # the main thread gets it, which waits

        with pytest.raises(error):
            self.copy(10_000, fail)
        copied = len(self.copied)
        assert copied < 1000
        time.sleep(0.05)
        assert len(self.copied) == copied

    def test_an_error_of_what_is_done_meanwhile_stops_them(self) -> None:
        def fail() -> None:
            time.sleep(0.05)
            assert self.copied
            raise ValueError

        with pytest.raises(ValueError):
            self.copy(10_000, lambda _: None, fail)
        assert len(self.copied) < 1000

    def test_further_interrupts_wait_for_them(self) -> None:
        """The memory that they write goes away when an interrupt comes through."""
        has_written = False

        def interrupt(part: int) -> None:
            nonlocal has_written
            for _ in range(3 * (part == 5)):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.1)
            has_written |= part == 5

        with pytest.raises(KeyboardInterrupt):
            self.copy(1000, interrupt)
        assert has_written

    def test_a_handler_that_raises_nothing_lets_them_copy_all(self) -> None:
        seen: list[int] = []
        before = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
        try:
            copied = self.copy(200, lambda part: os.kill(os.getpid(), signal.SIGINT) if part == 5 else None)
        finally:
            signal.signal(signal.SIGINT, before)
        assert seen == [signal.SIGINT]
        assert sorted(copied) == list(range(200))

    def test_all_bytes_that_are_copied_are_counted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pinned, "BUFFER_BYTES", 1 << 10)
        counted: list[int] = []
        uploads = pinned.Uploads(torch.device("cuda", 0), counted.append)
        for rows in (1, 30, 700):
            uploads.add(torch.empty(rows, 50, dtype=torch.float32), torch.zeros(rows, 50))
        uploads.finish()
        assert sum(counted) == 731 * 50 * 4
        assert len(counted) > 100

    @pytest.mark.parametrize("at_once", [1, 1 << 20])
    def test_weights_whose_home_is_host_memory(self, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nothing is brought while the threads write at home."""
        monkeypatch.setattr(pinned, "BUFFER_BYTES", 1 << 12)
        monkeypatch.setattr(pinned, "BYTES_AT_ONCE", at_once)
        counted: list[int] = []
        uploads = pinned.Uploads(torch.device("cuda", 0), counted.append)
        homes, elsewhere, mixed = [Home() for _ in range(9)], Home(is_elsewhere=True), Home()
        for number, home in enumerate(homes):
            dtype = torch.float16 if number % 2 else torch.float32
            uploads.add(Away(home.target, home), torch.full((60, 50), -1.0))
            uploads.add(Away(Quantized(mixed.target), mixed), torch.full((60, 50), float(number)))
            uploads.add(Away(home.target, home), torch.full((60, 50), number, dtype=dtype))
        uploads.add(Away(elsewhere.target, elsewhere), torch.ones(60, 50))
        uploads.finish()
        assert all((home.numbers == number).all() for number, home in enumerate(homes))
        assert not any(home.is_brought for home in homes)
        assert mixed.is_brought
        assert (mixed.target == 2 * 8).all()
        assert (elsewhere.numbers == 0).all()
        assert sum(counted) == 60 * 50 * (4 * 19 + sum(2 if number % 2 else 4 for number in range(9)))

    def test_the_later_of_two_tensors_for_one_target_counts(self) -> None:
        """A checkpoint may hold a router under two names."""
        target = torch.zeros(4000, 5000)
        uploads = pinned.Uploads(torch.device("cuda", 0))
        for number in range(4):
            uploads.add(target, torch.full((4000, 5000), float(number)))
        uploads.finish()
        assert (target == 3).all()

    def test_small_tensors_share_a_buffer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """In it they begin at multiples of 16 bytes."""
        monkeypatch.setattr(pinned, "BUFFER_BYTES", 1 << 10)
        sources = [torch.arange(count, dtype=torch.uint8) for count in (3, 100, 17, 300, 1, 1024, 40)]
        targets = [torch.zeros_like(source) for source in sources]
        bundles = pinned._bundled([*zip(targets, sources, strict=True)])
        assert [[len(source) for _, source in bundle] for bundle in bundles] == [[3, 100, 17], [300], [1], [1024], [40]]
        for bundle in bundles:
            pinned.Uploads(torch.device("cuda", 0))._upload(bundle, torch.zeros(1 << 10, dtype=torch.uint8))
        assert all(torch.equal(target, source) for target, source in zip(targets, sources, strict=True))

    @pytest.mark.parametrize(("at_once", "free"), [(1000, 1 << 30), (1 << 30, 2000)])
    def test_what_is_staged_is_bounded(self, at_once: int, free: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """It takes the GPU's memory twice until it is written, and leaves half of what is free."""
        monkeypatch.setattr(pinned, "STAGED_AT_ONCE", at_once)
        self.free_bytes = free
        uploads, staged, most = pinned.Uploads(torch.device("cuda", 0)), 0, 0

        class Target:
            def copy_(self, values: Tensor) -> None:
                nonlocal staged
                staged -= values.nbytes
                self.values = values.clone()

        targets = [Target() for _ in range(20)]
        for number, target in enumerate(targets):
            source = torch.full((100,), float(number))
            staged += source.nbytes
            uploads.add(target, source)
            most = max(most, staged)
        uploads.finish()
        assert [target.values[99] for target in targets] == list(range(20))
        assert most == 800


class Home:
    """The places of a weight on the device, and in host memory, which is its home."""

    def __init__(self, rows: int = 60, columns: int = 50, is_elsewhere: bool = False, device: str = "cpu") -> None:
        self.target = torch.zeros(rows, columns, dtype=torch.float32, device=device)
        self.numbers, self.is_elsewhere, self.is_brought = torch.zeros(rows, columns), is_elsewhere, False

    def __call__(self, writes: bool) -> None:
        self.is_brought = True

    def at_home(self, own: Tensor) -> Tensor:
        assert own is self.target
        return self.numbers


class Quantized:
    """A target that is no tensor."""

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape

    def copy_(self, values: Tensor) -> None:
        assert values.device == self.numbers.device
        self.numbers.copy_(2 * values.float())
