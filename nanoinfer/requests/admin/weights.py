"""ChangesWeights: new weights for an LLM, from a trainer's memory and from other checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from nanoinfer.checks import check_flag
from nanoinfer.config import Config
from nanoinfer.engine.client import InFlightPolicy
from nanoinfer.hints import hints_for
from nanoinfer.hub import find_model
from nanoinfer.requests.door import Door
from nanoinfer.weights.sources import FileSource, TensorSource


class ChangesWeights(Door):
    """The methods of LLM that change its weights, in place."""

    config: Config

    @hints_for("update_weights")
    def update_weights(
        self,
        named_tensors: Iterable[tuple[str, Tensor]] | Mapping[str, Tensor],
        partial: bool = False,
        in_flight: InFlightPolicy = "recompute",
    ) -> int:
        """Write a trainer's tensors into the weights, in place; returns the weights_version.

        named_tensors: names and tensors as the checkpoint has them, such as model.named_parameters(), or a mapping.
            Tensors may be on any device, and of 16, 32 or 64 bits. The LLM writes those of an iterator as they come,
            and keeps none. It checks all of a list or a dictionary before it writes the first
        partial: True: the other weights stay as they are; False: all tensors of the model must come. Incomplete weights
            take parts, too. The version stays until all tensors have come, by calls that have all ended well
        in_flight: what becomes of the requests of add_request. "recompute": they keep their tokens,
            and the LLM computes prompts and tokens again. Later tokens and log-probabilities are then those of the new
            weights alone. "keep": they go on with the keys and values of the old weights. "abort": they end, and the
            next step returns them

        Afterwards no request shares what the old weights have computed. If named_tensors raises an error, or Ctrl-C
        comes, the weights are incomplete: generate and the like raise RuntimeError until all tensors have come anew.

        Raises ValueError for a tensor that does not fit, before the LLM writes it. Raises it in the end for missing
        tensors, and for numbers that are not finite. The weights are then incomplete too, if the LLM has written any.
        """
        with self._door("writable"):
            partial = check_flag("partial", partial)
            source = TensorSource(named_tensors, partial, self.config.description.beside)
            begin = self._requests.before_new_weights(in_flight)
        with self._turn():
            self.engine.check_writable()
            return self.engine.updater.update(source, in_flight, begin)

    @hints_for("load_weights")
    def load_weights(self, model: str, revision: str | None = None, in_flight: InFlightPolicy = "recompute") -> int:
        """Write the weights of another checkpoint of the same model, as update_weights does.

        model: a folder with *.safetensors, or a Hub id
        revision: the branch, tag or commit of a Hub id; None: its main branch
        in_flight: as for update_weights

        Raises ValueError if names, shapes or dtypes do not fit, before anything is written. Raises it in the end for
        numbers that are not finite. The weights are then incomplete.
        """
        with self._door("writable"):
            folder = find_model("model", model, revision)
            source = FileSource(folder, self.config.description.beside)
            begin = self._requests.before_new_weights(in_flight)
        with self._turn():
            self.engine.check_writable()
            return self.engine.updater.load(source, in_flight, begin)

    @property
    def weights_version(self) -> int:
        """How often the weights have been changed."""
        return self.engine.updater.version
