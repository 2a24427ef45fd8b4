"""Cases: small models of every class, which are compared with transformers. docs/add-a-model.md says how to add one."""

from cases.case import LONGROPE, SHAPE, VOCAB, Case, build, save
from cases.classics import CLASSICS
from cases.corrected import CORRECTED
from cases.dense import DENSE
from cases.gemma4 import GEMMA4
from cases.latent import LATENT
from cases.multimodal import MULTIMODAL
from cases.sparse import SPARSE
from cases.states import STATES

__all__ = ["CASES", "LONGROPE", "MULTIMODAL", "SHAPE", "VOCAB", "Case", "build", "save"]

CASES = {
    **DENSE,
    **CLASSICS,
    **SPARSE,
    **CORRECTED,
    **STATES,
    **LATENT,
    **GEMMA4,
    **MULTIMODAL,
}  # of several cases of a class, the last runs on two ranks too
