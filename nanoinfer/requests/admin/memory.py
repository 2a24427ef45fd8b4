"""SleepMode: an LLM forgets what it has computed, and offloads its memory for a while."""

from __future__ import annotations

from collections.abc import Sequence as ListLike

from nanoinfer.checks import check_int, check_subset
from nanoinfer.engine.ranks.sleeper import TAGS
from nanoinfer.hints import hints_for
from nanoinfer.requests.door import Door


class SleepMode(Door):
    """The methods of LLM that give back what the KV cache holds, and the memory of cache and weights."""

    @hints_for("reset_prefix_cache")
    def reset_prefix_cache(self) -> bool:
        """Let no later request share what has been computed so far; returns True, also while the LLM sleeps."""
        self.engine.check_open()
        with self._turn():
            self.engine.reset_prefix_cache()
        return True

    @hints_for("sleep")
    def sleep(self, level: int = 1) -> None:
        """Give the memory of the KV cache and of the weights back to the device, until `wake_up`.

        level: 1: the weights are copied to host memory first, and an LLM on the CPU keeps them where they are;
            2: weights and adapters are dropped. After wake_up, update_weights or load_weights must write the weights;
            llm.adapters is empty

        What was computed so far is forgotten. The copy of level 1 stays in host memory until level 2 or `close`. A
        sleeping LLM may sleep again, deeper too, and be closed.

        Raises RuntimeError while requests run, or if the host has no room for the weights.
        """
        with self._door("open"):
            check_int("level", level, 1, 2)
        with self._turn(alone=True):
            self.engine.sleep(keep_weights=level == 1)

    @hints_for("wake_up")
    def wake_up(self, tags: ListLike[str] | None = None) -> None:
        """Take back what `sleep` has given away; what is awake stays as it is.

        tags: "weights", "kv_cache" or both; None: both. New weights can be written before the KV cache comes back.

        Raises RuntimeError if the device has no room any more. The LLM then sleeps on.
        """
        with self._door("open"):
            wanted = set(TAGS) if tags is None else check_subset("tags", tags, list(TAGS))
        with self._turn():
            self.engine.wake_up(wanted)

    @property
    def is_sleeping(self) -> bool:
        """Whether weights or KV cache, or both, are given away."""
        return bool(self.engine.asleep)
