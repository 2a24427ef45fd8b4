"""The parts of an engine, as its options ask for them, and of the sizes that its ranks have found."""

from __future__ import annotations

from functools import partial

from nanoinfer.config import Config
from nanoinfer.engine.block_manager import BlockManager, MakeTier
from nanoinfer.engine.media import MediaFeed
from nanoinfer.engine.prefixes.host_tier import HostTier
from nanoinfer.engine.prefixes.shared_prefixes import PrefixFinder
from nanoinfer.engine.ranks.ranks import Ranks
from nanoinfer.engine.row_map import RowMap
from nanoinfer.engine.scheduler import Scheduler
from nanoinfer.engine.speculation.budget import Budget
from nanoinfer.engine.speculation.speculation import Speculation
from nanoinfer.engine.speculation.text_slots import TextSlots
from nanoinfer.engine.text_scheduler import TextScheduler
from nanoinfer.kernels.attention.prefixes.prefix_plan import rows_of_a_tile

EAGER_BYTES = 2**28  # of the KV cache on a CPU: cached prefixes may take them, however little runs


def make_scheduler(config: Config, ranks: Ranks) -> Scheduler:
    """Make the scheduler, with its BlockManager; if guesses are verified, the ranks time their steps for it."""
    memory = ranks.runner.memory
    num_eager = EAGER_BYTES // memory.block_bytes if config.device == "cpu" and memory.blocks else None
    manager = BlockManager(memory.blocks, config.cache_layout, memory.slots, _make_tier(ranks), num_eager)
    speculation = None if config.speculation is None else _make_speculation(config, ranks)
    limits = memory.rows, config.max_num_batched_tokens, config.description.long_from
    kind = TextScheduler if config.description.is_encoder else Scheduler
    return kind(manager, *limits, speculation, memory.hiding_tokens)


def _make_speculation(config: Config, ranks: Ranks) -> Speculation:
    times = ranks.call("time_steps")
    may_decline = config.speculation == "auto"
    budget = Budget(ranks.runner.verify_sizes, times, config.max_guesses, may_decline)
    has_draft_model = config.draft is not None and not config.draft.are_heads
    return Speculation(budget, config.max_guesses, has_draft_model)


def _make_tier(ranks: Ranks) -> MakeTier | None:
    runner = ranks.runner
    if runner.offload is None or runner.host_blocks is None:
        return None
    return partial(HostTier, offload=runner.offload, room=runner.host_blocks)


def make_row_map(config: Config, ranks: Ranks, feed: MediaFeed | None) -> RowMap:
    """Make the RowMap. feed: given if prompts may have images"""
    finder = _make_finder(config) if config.shares_prefixes else None
    texts = TextSlots(ranks.runner.text_slots) if config.speculation is not None else None
    can = {"may_adapt": config.max_adapters > 0, "may_show": bool(config.hidden_layers)}
    return RowMap(finder, feed, texts=texts, tells_all=bool(config.logits_processors), **can)


def _make_finder(config: Config) -> PrefixFinder:
    first = config.cache_layout.groups[0]
    queries = config.description.num_heads // config.tensor_parallel_size // first.pages.kv_heads  # that share a head
    token_bytes = first.pages.count * first.pages.numbers * config.torch_cache_dtype.itemsize
    return PrefixFinder(first.block_size, rows_of_a_tile(queries), token_bytes)
