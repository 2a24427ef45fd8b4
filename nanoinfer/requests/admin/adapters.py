"""LoadsAdapters: the adapters of an LLM, from folders and from a trainer's memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as ListLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from torch import Tensor

from nanoinfer.checks import as_list, short
from nanoinfer.config import Config
from nanoinfer.engine.client import InFlightPolicy, LoadedAdapter
from nanoinfer.hints import hints_for
from nanoinfer.requests.door import Door
from nanoinfer.requests.settings import NO_ADAPTERS, CallAdapters, NamedAdapters
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.weights.adapters.source import AdapterSource, open_adapter

if TYPE_CHECKING:
    from nanoinfer.requests.prompts.stages import CallPrompts
    from nanoinfer.requests.reading.texts import SomeTexts


class BringsAdapter(Protocol):
    """What a prompt may have in place of an adapter's name: it knows where the adapter is."""

    @classmethod
    def of_call(cls, given: Any, llm: LoadsAdapters, alone: bool) -> CallAdapters:
        """Return a call's adapters. Raises ValueError for what cannot be; no adapter comes or goes.

        given: one for all prompts, or one or None for each
        alone: raise RuntimeError while requests of add_request have not ended
        """


GivenLora = BringsAdapter | ListLike[BringsAdapter | None] | None  # by a user


class LoadsAdapters(Door):
    """What an LLM does with adapters beside its model: low-rank matrices of a fine-tuned variant, as PEFT makes them.

    A request names its adapter in its settings. Requests of one step may name any; the others get the model alone.
    """

    config: Config

    @hints_for("load_adapter")
    def load_adapter(
        self,
        name: str,
        source: str | Path | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
        config: Any = None,
        alpha: float | None = None,
        in_flight: InFlightPolicy = "recompute",
    ) -> int:
        """Load an adapter, in place of one that has the name; returns its version, 1 for a new name.

        name: what requests call it, as in SamplingParams(adapter=name)
        source: a folder with PEFT's files, or a Hub id; or tensors by PEFT's names for them, on any device and of 16,
            32 or 64 bits, such as peft.get_peft_model_state_dict(model). The LLM keeps none of them
        config: the settings of tensors: peft.LoraConfig, or a mapping as in adapter_config.json
        alpha: in place of config: lora_alpha; tensors then are of all modules that they name, each of its own rank
        in_flight: what becomes of the adapter's own requests of add_request, as for update_weights; requests of other
            adapters, and of the model alone, just go on

        The LLM checks all of an adapter before it writes the first number. From then on, no request shares what was
        computed with the adapter of this name before. Adapters stay when the weights change, and in sleep(level=1).

        Raises ValueError for tensors and settings that do not fit the model, for a rank above max_adapter_rank, and
        for more than max_adapters. Raises RuntimeError if max_adapters is 0, or the weights are offloaded.
        """
        with self._door("writable"):
            self.engine.adapters.check_slots()
            name = _check_name(name)
            begin = self._requests.before_new_weights(in_flight, name)
            opened = open_adapter(name, source, config, alpha)
        return self._load_opened(opened, in_flight, begin)

    def _load_opened(self, opened: AdapterSource, in_flight: InFlightPolicy, begin: Callable[[], None]) -> int:
        """Load an adapter that open_adapter has returned."""
        with self._turn():
            self.engine.check_writable()
            return self.engine.adapters.load(opened, in_flight, begin)

    def _open_checked(self, name: str, folder: str, alone: bool) -> AdapterSource:
        """Return the adapter of a folder. Raises errors as load_adapter does, but for want of room; nothing changes.

        alone: as for _turn
        """
        with self._door("writable"):
            opened = open_adapter(name, folder)
        with self._turn(alone):
            self.engine.adapters.check_fits(opened)
        return opened

    @hints_for("unload_adapter")
    def unload_adapter(self, name: str) -> None:
        """Forget an adapter, which makes room for another.

        name: the one with which it was loaded

        Raises ValueError for a name that is not loaded, and RuntimeError while requests of it have not ended.
        """
        with self._door("open"):
            name = _check_name(name)
        with self._turn():
            with self._door("open"):
                self.engine.adapters.check_is_loaded(name)
            if running := self._requests.of_adapter(name):
                raise RuntimeError(
                    f"adapter={name!r}: {len(running)} of its requests have not ended: call step until they have, or"
                    " abort them"
                )
            self.engine.adapters.unload(name)

    @property
    def adapters(self) -> dict[str, LoadedAdapter]:
        """The adapters that are loaded, by name: each one's version, rank, and the modules that it changes."""
        return dict(self.engine.adapters.loaded)

    def _adapters_of(self, given: GivenLora, alone: bool = True) -> CallAdapters:
        """Return the adapters that a call brings; alone: as for _turn. Raises ValueError for what brings none."""
        if given is None:
            return NO_ADAPTERS
        listed = as_list(given) or [given]
        brings = next((one for one in listed if one is not None), None)
        if brings is None:
            return NamedAdapters([None] * len(listed), "lora_request")
        if (of_call := getattr(brings, "of_call", None)) is None:
            raise ValueError(
                f"lora_request={short(given)}: must be a LoRARequest, from nanoinfer, or a list with one, or None, for"
                " each prompt"
            )
        return cast(CallAdapters, of_call(given, self, alone))

    def _load_adapters(
        self, adapters: CallAdapters, prompts: CallPrompts | SomeTexts, used: Collection[str | None] = ()
    ) -> None:
        """Load what a call asks for, whose prompts are checked; an error lets no thread go on with their images.

        used: adapters that their settings name
        """
        try:
            adapters.load(used)
        except BaseException:
            prompts.close()
            raise

    def _check_adapters(self, settings: Iterable[SamplingParams]) -> None:
        """Raise ValueError for prompts' settings whose adapter is not loaded, or their steering."""
        with self._door("open"):
            for params in settings:
                if params.adapter is not None:
                    self.engine.adapters.check_is_loaded(params.adapter)
                if params.steering is not None:
                    self.engine.steerings.check_is_loaded(params.steering[0])


def _check_name(name: object) -> str:
    """Return an adapter's name. Raises ValueError for all else."""
    if not isinstance(name, str) or name == "":
        raise ValueError(f"name={short(name)}: must be a string, by which requests name the adapter")
    return str.__str__(name)
