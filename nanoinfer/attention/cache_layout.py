"""CacheLayout: what each layer remembers of the past, and how blocks of equal bytes hold it for layers of all kinds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from nanoinfer.attention.packing import LayerKind, pack
from nanoinfer.checks import short
from nanoinfer.kernels.delta.chunks import CHUNK
from nanoinfer.kernels.states.memory import inputs_length, ring_in_order, ring_length

MAX_SLOTS = 2**31  # the KV cache has one slot for each token, and slot numbers are int32
USUAL_BLOCK_SIZE, LEAST_BLOCK_SIZE = 256, 16  # tokens
USUAL_STEP, MOST_OF_A_STEP, ENCODER_STEP_ON_CPU = 16_384, 262_144, 4_096  # tokens
DECAY_BYTES = 4  # float32
ENCODER_NUMBERS = 1 << 29  # of the widest activations that an encoder's step has on a GPU


@dataclass(frozen=True)
class Pages:
    """What a layer of attention remembers: the keys and values of `kv_heads` heads, of each token that it still sees.

    head_dim: numbers in a head's key
    window: a query sees so many tokens, its own the last; None: all
    latent: so many numbers, the first of a key, are its value, too (DeepSeek-V2, 2024); None: values have their own
    value_dim: numbers in a head's value, if not as many as in its key (MiMo-V2, 2025)
    """

    kv_heads: int
    head_dim: int
    window: int | None = None
    latent: int | None = None
    value_dim: int | None = None

    @property
    def count(self) -> int:
        """How many pages a layer has in a block: one of keys, and one of values if these have as many numbers."""
        return 2 if self.latent is None and self.value_dim is None else 1

    @property
    def head_numbers(self) -> int:
        """How many numbers of a head a page has for a token: values of another size lie behind their keys."""
        return self.head_dim + (self.value_dim or 0)

    @property
    def numbers(self) -> int:
        """How many numbers a page has for a token."""
        return self.kv_heads * self.head_numbers


@dataclass(frozen=True)
class Matrices:
    """What a recurrence remembers: of each head, a matrix of so many keys and values; some heads may share keys.

    gates: so many numbers of a token decide how a head forgets, and learns
    """

    key_heads: int
    heads: int
    keys: int
    values: int
    gates: int = 1

    @property
    def numbers(self) -> int:
        """Of all heads."""
        return self.heads * self.keys * self.values

    def token_bytes(self, size: int) -> int:
        """Return the bytes of a token beside the matrices: a key, an update and a decay; size: of a number of these."""
        return (self.key_heads * self.keys + self.heads * self.values) * size + self.heads * DECAY_BYTES


@dataclass(frozen=True)
class State:
    """What a layer remembers whose memory of the past has a fixed size, on one rank.

    channels, width: a causal convolution over so many channels sees so many tokens, its own the last
    matrices: of a recurrence; None: it is a convolution alone
    """

    channels: int
    width: int
    matrices: Matrices | None = None

    def num_bytes(self, size: int, matrix_size: int, guesses: int, in_order: bool = False) -> int:
        """Return the bytes of a sequence: matrices, the tokens since their boundary, and the convolution's last inputs.

        size: of a number; matrix_size: of a matrix's; guesses: a step verifies so many of a sequence at most
        in_order: the tokens stand there as TokenRings have them
        """
        inputs = self.channels * inputs_length(self.width, guesses) * size
        if self.matrices is None:
            return inputs
        tokens = ring_length(guesses) * self.matrices.token_bytes(size)
        if in_order:
            tokens = ring_in_order(guesses) * (self.channels + self.matrices.gates * self.matrices.heads) * size
        return inputs + self.matrices.numbers * matrix_size + tokens


Memory = Pages | State | tuple[Pages, State]  # the last one's layer has attention beside a recurrence


@dataclass(frozen=True)
class CacheGroup:
    """The layers whose pages are alike. They have one block table.

    layers: their numbers in the model
    block_size: so many tokens of these layers fill a block
    lag: a query stands so many tokens at most behind the first that the model's own layers compute in its step
    """

    layers: tuple[int, ...]
    pages: Pages
    block_size: int
    lag: int = 0

    @property
    def window(self) -> int | None:
        """See Pages."""
        return self.pages.window

    @property
    def pages_of_a_block(self) -> int:
        """Of all its layers."""
        return self.pages.count * len(self.layers)

    @property
    def most_blocks(self) -> int | None:
        """What a running sequence holds of them at most, however long it is; None: it has no such limit.

        Its window begins and ends within a block, and a new block comes before the oldest one goes.
        """
        return None if self.window is None else -(-(self.window + self.lag) // self.block_size) + 2

    def first_seen(self, position: int) -> int:
        """Return the first position that some query of steps from this one on may see."""
        return 0 if self.window is None else max(0, position - self.lag - self.window + 1)

    def blocks_of(self, num_tokens: int) -> int:
        """Return how many blocks a running sequence of so many tokens holds at most."""
        blocks = -(-num_tokens // self.block_size)
        return blocks if self.most_blocks is None else min(blocks, self.most_blocks)


@dataclass(frozen=True)
class CacheLayout:
    """How the layers' pages fill blocks. A block holds pages of one group, and all blocks have the same bytes.

    A page holds the keys of one layer, its values, or both, for all tokens of a block. A block is cut into slices of
    equal bytes, and a slice into whole pages. So the first slices of all blocks are side by side in memory, and so on.

    groups: those that see all tokens come first; behind them those that only layers of a draft model have. An encoder
        has none, and no block
    block_size: the option kvcache_block_size; if there is one group, its blocks have so many tokens
    prefix_size: prefixes are shared in multiples of so many tokens; each group's blocks divide it
    slice_numbers: numbers in a slice; slices: of a block
    states: of the layers that have one, by their numbers in the model
    """

    groups: tuple[CacheGroup, ...]
    block_size: int
    prefix_size: int
    slice_numbers: int
    slices: int
    states: tuple[tuple[int, State], ...] = ()

    @cached_property
    def waste(self) -> float:
        """The share of a block that stays empty, in the group where it is the largest."""
        if not self.groups:
            return 0.0
        used = min(group.pages_of_a_block * self._page_numbers(group) for group in self.groups)
        return 1 - used / self.block_numbers

    @cached_property
    def counts(self) -> list[int]:
        """How many blocks of each group a prefix of prefix_size tokens has."""
        return [self.prefix_size // group.block_size for group in self.groups]

    @property
    def grid(self) -> int:
        """A chunk of a prompt ends at a multiple of so many tokens, unless the prompt does."""
        return CHUNK if self.states else 1

    @property
    def snapshot_grid(self) -> int:
        """Snapshots of states are taken at multiples of so many tokens; windows hide where a block began."""
        has_windows = any(group.window is not None for group in self.groups)
        return self.prefix_size if has_windows or not self.states else self.grid

    def check(self, num_kvcache_blocks: int | None, max_num_batched_tokens: int) -> None:
        """Raise ValueError if chunks or prefixes could not end at multiples of `grid`, or there are too many blocks."""
        if not self.groups:
            return
        if self.prefix_size % self.grid:
            raise ValueError(
                f"kvcache_block_size={self.block_size}: must be a multiple of {self.grid}, as layers of this model"
                " keep states"
            )
        if max_num_batched_tokens < self.grid:
            raise ValueError(
                f"max_num_batched_tokens={max_num_batched_tokens}: must be at least {self.grid}, as layers of this"
                " model keep states"
            )
        most = self.asked_by(MAX_SLOTS // self.most_slots)
        if num_kvcache_blocks is not None and num_kvcache_blocks > most:
            raise ValueError(
                f"num_kvcache_blocks={short(num_kvcache_blocks)}: must be at most {most}: with"
                f" kvcache_block_size={self.block_size}, that is {MAX_SLOTS} tokens"
            )

    def too_few(self, num_kvcache_blocks: int, max_model_len: int) -> ValueError:
        """Return the error of an option whose blocks do not hold a sequence of max_model_len tokens."""
        needed = -(-max_model_len // self.block_size)
        return ValueError(
            f"num_kvcache_blocks={num_kvcache_blocks}: one sequence of max_model_len={max_model_len} needs {needed}"
            f" blocks of {self.block_size} tokens; raise it, or lower max_model_len to"
            f" {self.longest(self.pool_of(num_kvcache_blocks), max_model_len)}"
        )

    @property
    def block_numbers(self) -> int:
        """Numbers in a block."""
        return self.slices * self.slice_numbers

    @property
    def most_slots(self) -> int:
        """Tokens in a slice, if all its pages are of the group whose tokens have the fewest numbers."""
        if not self.groups:
            return 1
        return self.slice_numbers // min(group.pages.numbers for group in self.groups)

    def part(self, layers: range) -> CacheLayout:
        """Return the layout as a model sees it that has these layers alone, and numbers them from 0."""
        own = [
            replace(group, layers=tuple(layer - layers.start for layer in group.layers if layer in layers))
            for group in self.groups
        ]
        groups = [group for group in own if group.layers]
        return replace(self, groups=tuple(sorted(groups, key=lambda group: (group.window is not None, group.layers))))

    def pages_of_a_slice(self, group: CacheGroup) -> int:
        """Return how many pages of a group a slice holds."""
        return self.slice_numbers // self._page_numbers(group)

    def blocks_of(self, num_tokens: int) -> int:
        """Return how many blocks a running sequence of so many tokens holds at most."""
        return sum(group.blocks_of(num_tokens) for group in self.groups)

    def longest(self, blocks: int, limit: int) -> int:
        """Return how many tokens, at most `limit`, the longest sequence has that so many blocks hold."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            if self.blocks_of(middle) <= blocks:
                low = middle
            else:
                high = middle - 1
        return low

    def tokens_of(self, blocks: int, length: int) -> int:
        """Return how many tokens so many blocks hold, of sequences that have `length` tokens each, or little more."""
        if not self.groups:
            return 0
        rounded = -(-length // self.prefix_size) * self.prefix_size
        return blocks * rounded // self.blocks_of(rounded)

    def pool_of(self, num_kvcache_blocks: int) -> int:
        """Return how many blocks hold as many tokens of all layers as that option asks for."""
        tokens = num_kvcache_blocks * self.block_size
        return sum(-(-tokens // group.block_size) for group in self.groups)

    def asked_by(self, blocks: int) -> int:
        """Return the largest num_kvcache_blocks that asks for no more than so many blocks."""
        if not self.groups:
            return 0
        low = blocks * self.prefix_size // (self.block_size * sum(self.counts))
        return next(asked for asked in range(low, -1, -1) if self.pool_of(asked) <= blocks)

    @staticmethod
    def _page_numbers(group: CacheGroup) -> int:
        return group.block_size * group.pages.numbers


def usual_step(device: str, longest: int | None, widest: int) -> int:
    """Return how many tokens of prompts a step computes, if nobody limits that.

    longest: text of an encoder; widest: the most numbers that a layer has of a token
    An H200's host launches a step of all-MiniLM in the time that the GPU takes for 50,000 tokens, and has its texts to
    look after, too. On a CPU, the activations of a small step stay in its caches.
    """
    if longest is None:
        return USUAL_STEP
    if device != "cuda":
        return max(ENCODER_STEP_ON_CPU, longest)
    return min(MOST_OF_A_STEP, 1 << (ENCODER_NUMBERS // widest).bit_length() - 1)


def usual_block_size(device: str, has_states: bool) -> int:
    """Return how many tokens a block holds if nobody says it. On the CPU small blocks cost no time, and share more."""
    if device != "cpu":
        return USUAL_BLOCK_SIZE
    return max(LEAST_BLOCK_SIZE, CHUNK if has_states else 1)


def pages_of(memory: Memory | None) -> Pages | None:
    """Return a layer's pages; None: it has none."""
    own = memory[0] if isinstance(memory, tuple) else memory
    return own if isinstance(own, Pages) else None


def _state_of(memory: Memory | None) -> State | None:
    own = memory[1] if isinstance(memory, tuple) else memory
    return own if isinstance(own, State) else None


def kinds_of(memory: Iterable[Memory | None]) -> list[Pages]:
    """Return the pages of each group of layers, in the order of the groups. memory: as for lay_out"""
    kinds = [pages for pages in dict.fromkeys(map(pages_of, memory)) if pages is not None]
    return sorted(kinds, key=lambda pages: pages.window is not None)


def lay_out(
    memory: Iterable[Memory | None], block_size: int, unit: int, draft: Iterable[Memory | None] = ()
) -> CacheLayout:
    """Let layers that remember alike form groups, and find blocks in which each group wastes little.

    memory: of each layer, on one rank; some have pages, some a state, or both; None has nothing of its own
    block_size: tokens in a block, if there is one group; with several, a prefix has at least as many tokens
    unit: with several groups, each group's blocks have a multiple of so many tokens
    draft: of each layer of a draft; their numbers come behind the model's. If they have windows, they are prediction
        heads, of which so many lag by as many tokens at most
    """
    memory, draft = list(memory), list(draft)
    if not any(memory):
        return CacheLayout((), block_size, block_size, 0, 0)
    kinds = list(dict.fromkeys([*kinds_of(memory), *kinds_of(draft)]))
    lags = {kind: len(draft) for kind in kinds_of(draft)}
    memory += draft
    layers = {kind: tuple(layer for layer, own in enumerate(memory) if pages_of(own) == kind) for kind in kinds}
    packing = pack([LayerKind(kind.count * len(layers[kind]), kind.numbers) for kind in kinds], block_size, unit)
    return CacheLayout(
        groups=tuple(
            CacheGroup(layers[kind], kind, size, lags.get(kind, 0))
            for kind, size in zip(kinds, packing.sizes, strict=True)
        ),
        block_size=block_size,
        prefix_size=packing.prefix_size,
        slice_numbers=packing.slice_numbers,
        slices=packing.slices,
        states=tuple((layer, state) for layer, own in enumerate(memory) if (state := _state_of(own)) is not None),
    )
