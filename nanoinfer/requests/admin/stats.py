"""LLM.stats: what an LLM has done so far."""

from __future__ import annotations

from nanoinfer.engine.results.stats import Stats
from nanoinfer.hints import hints_for
from nanoinfer.requests.door import Door


class KeepsStats(Door):
    """The figures of LLM's work."""

    @hints_for("stats")
    def stats(self) -> Stats:
        """Return what this LLM has done since it started, or since reset_stats; print it for a few lines of text.

        All that ran counts: generate, chat, stream, score, beam_search and step, whether requests ended or were
        dropped. With several replicas, it is the sum over all, without what they have not told yet. Several ranks of
        one engine count once. It also works while requests run or a stream is open, and after close.
        """
        return self.engine.counters.stats()

    @hints_for("reset_stats")
    def reset_stats(self) -> None:
        """Let `stats` begin anew. Requests that run go on, and their later tokens count."""
        self.engine.counters.reset()
