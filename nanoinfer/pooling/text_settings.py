"""TextSettings: what becomes of texts before a model reads them, by the file of sentence-transformers' Transformer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanoinfer.checks import check_choice, check_flag, check_int, check_settings, short
from nanoinfer.pooling.files import mapping_of, read_settings

KINDS_OF_FILES = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
FILES = [f"sentence_{kind}_config.json" for kind in KINDS_OF_FILES]  # as all versions name it; the first counts
EMBEDS, CLASSIFIES, GENERATES = "feature-extraction", "sequence-classification", "text-generation"
OUTPUTS = {
    EMBEDS: ("last_hidden_state", "token_embeddings"),
    CLASSIFIES: ("logits", "scores"),
    GENERATES: ("logits", "causal_logits"),
}  # of a task: what the model returns, and the name of this for the next module
OF_MODEL = ("model_kwargs", "model_args", "config_kwargs", "config_args")  # as versions name them
OF_TOKENIZER = ("processor_kwargs", "tokenizer_args")
OF_TEXTS, COMMON, TEMPLATE, RESTORES = "processing_kwargs", "common", "chat_template", "restore_suffix"
FORMS_OF_TEXTS, TEXT, CHAT = "modality_config", "text", "message"
MEDIA = (TEXT, CHAT, "image", "audio", "video")
KNOWN = ("max_seq_length", "do_lower_case", "transformer_task", FORMS_OF_TEXTS, OF_TEXTS, *OF_MODEL, *OF_TOKENIZER)
LAYOUT = "unpad_inputs"  # of texts in memory
LOADING = (
    "trust_remote_code", "use_safetensors", "low_cpu_mem_usage", "device_map", "attn_implementation",
    "torch_dtype", "dtype",  # which LLM(dtype=...) decides
)  # fmt: skip
PADDING = ("padding", "padding_side", "pad_to_multiple_of", "return_tensors", "use_fast", "trust_remote_code")
SPECIAL = {"add_special_tokens": (True,)}
NO_ARGUMENTS = ("conversation", "tokenize", "return_dict", "truncation", "max_length", "padding", "return_tensors")
FORMS = FLAT, STRUCTURED = "flat", "structured"
CUTS = LONGEST, *_ = "longest_first", "only_first", "only_second"
NO_CUT = "do_not_truncate"


@dataclass(frozen=True)
class TextSettings:
    """What becomes of a text.

    most_tokens: it is cut to so many; None: to as many as the tokenizer's model_max_length and the positions allow
    cut: which of a pair's texts is cut, as transformers' tokenizers name it; None: none is
    lowers: it gets lower case
    form: it becomes a chat, whose content is "flat", a string, or "structured", a list of parts; None: it does not
    template: arguments of the chat template
    keeps_end: what the template writes behind a text stays if that is cut
    """

    most_tokens: int | None = None
    cut: str | None = LONGEST
    lowers: bool = False
    form: str | None = None
    template: Mapping[str, Any] = field(default_factory=dict)
    keeps_end: bool = True

    @classmethod
    def read(cls, folder: str, task: str) -> TextSettings:
        """Read a checkpoint's. task: what the model must do, one of OUTPUTS.

        Raises ValueError for what is not known, and for another task.
        """
        files = [Path(folder) / name for name in FILES]
        file = next((file for file in files if read_settings(file)), files[0])
        said = read_settings(file)
        check_settings(str(file), said, (*KNOWN, LAYOUT), {"module_output_name": OUTPUTS[task][1:]})
        if (found := said.get("transformer_task") or EMBEDS) != task:
            raise ValueError(f"{file}: transformer_task={short(found)}: must be {task!r} for this call")
        for name in OF_MODEL:
            check_settings(f"{file}: {name}", mapping_of(f"{file}: {name}", said.get(name)), LOADING, off=())
        lowers = check_flag(f"{file}: do_lower_case", said.get("do_lower_case") or False)
        where = f"{file}: {OF_TEXTS}"
        of_texts = mapping_of(where, said.get(OF_TEXTS))
        check_settings(where, of_texts, (TEXT, COMMON, TEMPLATE))
        check_settings(f"{where}: {COMMON}", mapping_of(f"{where}: {COMMON}", of_texts.get(COMMON)), PADDING, off=())
        most, cut = _read_cut(file, said, mapping_of(f"{where}: {TEXT}", of_texts.get(TEXT)))
        arguments = dict(mapping_of(f"{where}: {TEMPLATE}", of_texts.get(TEMPLATE)))
        keeps_end = check_flag(f"{where}: {TEMPLATE}: {RESTORES}", arguments.pop(RESTORES, True))
        if wrong := [name for name in NO_ARGUMENTS if name in arguments]:
            raise ValueError(f"{where}: {TEMPLATE} has {wrong[0]}: must have arguments of the chat template alone")
        return cls(most, cut, lowers, _read_form(file, said, task), arguments, keeps_end)


def _read_cut(file: Path, said: Mapping[str, Any], of_text: Mapping[str, Any]) -> tuple[int | None, str | None]:
    """Return what TextSettings has as most_tokens and cut. of_text: the part of OF_TEXTS, whose limit comes first"""
    where = f"{OF_TEXTS}: {TEXT}"
    check_settings(f"{file}: {where}", of_text, ("max_length", "truncation", "logits_to_keep", *PADDING), SPECIAL, ())
    limits = {f"{where}: max_length": of_text.get("max_length")}
    for name in OF_TOKENIZER:
        options = mapping_of(f"{file}: {name}", said.get(name))
        check_settings(f"{file}: {name}", options, ("model_max_length", *PADDING), off=())
        limits[f"{name}: model_max_length"] = options.get("model_max_length")
    limits["max_seq_length"] = said.get("max_seq_length")
    given = [check_int(f"{file}: {name}", limit, 1) for name, limit in limits.items() if limit is not None]
    cut = of_text.get("truncation", LONGEST)
    if cut is None or isinstance(cut, bool):
        cut = LONGEST if cut else NO_CUT
    check_choice(f"{file}: {where}: truncation", cut, [*CUTS, NO_CUT])
    return given[0] if given else None, None if cut == NO_CUT else cut


def _read_form(file: Path, said: Mapping[str, Any], task: str) -> str | None:
    """Return what TextSettings has as form."""
    where = f"{file}: {FORMS_OF_TEXTS}"
    kinds = mapping_of(where, said.get(FORMS_OF_TEXTS))
    for kind in kinds:
        for medium in kind.split("+"):
            check_choice(where, medium, [*MEDIA])
    if kinds and not {TEXT, CHAT} & kinds.keys():
        raise ValueError(f"{where} has {', '.join(kinds)}: must have {TEXT} or {CHAT}")
    output = OUTPUTS[task][0]
    for kind in {TEXT, CHAT} & kinds.keys():
        own = mapping_of(f"{where}: {kind}", kinds[kind])
        known = {"method": ("forward",), "method_output_name": (output, [output])}
        check_settings(f"{where}: {kind}", own, ("format",), known)
    if CHAT not in kinds:
        return None
    return check_choice(f"{where}: {CHAT}: format", kinds[CHAT].get("format"), [*FORMS])
