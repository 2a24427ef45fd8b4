"""Loads the tokenizer, and says which packages it needs, or that transformers reads it otherwise than its file says."""

from __future__ import annotations

import importlib
import json
import logging
import re
from collections.abc import Callable
from operator import eq
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoinfer.config import Config
from nanoinfer.gguf.header import is_gguf
from nanoinfer.gguf.tokenizer import load_tokenizer_of
from nanoinfer.hub import has_tokenizer, reason_of
from nanoinfer.process.collector import no_collection

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger("nanoinfer")

NEEDED = "5.22"  # transformers before reads byte-level tokenizers wrongly that are labelled LlamaTokenizerFast
TEXT = "Hello world, how are you?\nIt's  12345 YES: naïve 日本 🤗"  # begins with no space, of which options decide
SENTENCEPIECE = {"sentencepiece": "sentencepiece", "google.protobuf": "protobuf"}  # modules and their packages
TIKTOKEN = {"tiktoken": "tiktoken"}
PIECES = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
PROCESSORS_FILES = ("processor_config.json", "chat_template.json")  # may have a chat template
SHOWN = 6  # tokens, in a warning

Reading = tuple[list[int], str]  # the tokens of a text, and what these are as text

_decode_json = json.JSONDecoder().raw_decode
_between = re.compile(r"[\s,:]*")


def load_tokenizer(config: Config, is_replica: bool = False) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer that the options ask for, or the checkpoint's own; None if there is none.

    Its end of sequence then counts as one in `config`. A warning says if it differs from its file.

    is_replica: the LLM's process warns

    Raises ValueError if it cannot be loaded.
    """
    option, folder = ("model", config.model) if config.tokenizer is None else ("tokenizer", config.tokenizer)
    if not has_tokenizer(folder):
        return None
    with no_collection():
        from transformers import AutoTokenizer  # here, for ranks need not import it

    tokenizer: PreTrainedTokenizerBase
    try:
        if is_gguf(folder):
            tokenizer = load_tokenizer_of(folder)
        else:
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        if tokenizer.chat_template is None:
            tokenizer.chat_template = _read_processors_template(folder)
    except Exception as error:
        raise ValueError(
            f"{option}={folder!r}: cannot load its tokenizer: {_missing_packages(folder) or reason_of(error)}"
        ) from error
    if not is_replica:
        _warn_if_misread(tokenizer, folder)
    end = tokenizer.eos_token_id
    if end is not None and tokenizer.convert_ids_to_tokens(end) == tokenizer.eos_token:  # not the unknown token's id
        config.add_end(end)
    return tokenizer


def _read_processors_template(folder: str) -> str | None:
    """Return the chat template in a file that transformers reads for processors alone; None: there is none."""
    files = [file for name in PROCESSORS_FILES if (file := Path(folder) / name).is_file()]
    templates = (json.loads(file.read_text("utf-8")).get("chat_template") for file in files)
    return next((template for template in templates if template is not None), None)


def _missing_packages(folder: str) -> str | None:
    """Say which packages a folder's tokenizer.model needs that are not installed; None if it lacks none."""
    file = Path(folder) / "tokenizer.model"
    if not file.is_file() or (file.parent / "tokenizer.json").is_file():
        return None
    with file.open("rb") as opened:
        is_sentencepiece = opened.read(1) == b"\n"  # the key of a protobuf's first field; a line of tiktoken's has text
    modules = SENTENCEPIECE if is_sentencepiece else TIKTOKEN
    missing = [package for module, package in modules.items() if not _is_installed(module)]
    return f"its tokenizer.model needs packages: pip install {' '.join(missing)}" if missing else None


def _is_installed(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def _warn_if_misread(tokenizer: PreTrainedTokenizerBase, folder: str) -> None:
    """Log a warning if a text's tokens, or what these are as text, are others than the folder's tokenizer.json says.

    transformers builds some tokenizers anew from their class and the file's vocabulary, and the class may not fit.
    """
    file = Path(folder) / "tokenizer.json"
    if not tokenizer.is_fast or not file.is_file():
        return
    options = _options(folder)
    adds = options.get("add_bos_token") is None and options.get("add_eos_token") is None  # these overrule the file
    is_spaced = options.get("add_prefix_space") is not None  # so does this: then one of two texts must be read alike
    loaded = tokenizer.backend_tokenizer
    written = _as_written(file, loaded)

    def encode_as_written(text: str, add_special_tokens: bool) -> list[int]:
        return written.encode(text, add_special_tokens=add_special_tokens).ids

    texts = (TEXT, f" {TEXT}") if is_spaced else (TEXT,)
    ours = [_read(tokenizer.encode, loaded.decode, text, adds, is_spaced) for text in texts]
    theirs = [_read(encode_as_written, written.decode, text, adds, is_spaced) for text in texts]
    if not any(map(eq, ours, theirs)):
        _warn(folder, ours[0], theirs[0])


def _options(folder: str) -> dict[str, Any]:
    file = Path(folder) / "tokenizer_config.json"
    return dict(json.loads(file.read_text("utf-8"))) if file.is_file() else {}


def _read(
    encode: Callable[..., list[int]], decode: Callable[..., str], text: str, adds_special_tokens: bool, is_spaced: bool
) -> Reading:
    """Return the tokens of a text, and what those of the text alone are as text."""
    try:
        token_ids = encode(text, add_special_tokens=adds_special_tokens)
        # An unknown token may be special to one and not to the other.
        back = decode(encode(text, add_special_tokens=False), skip_special_tokens=False)
    except Exception as error:  # a vocabulary may lack characters, and a token for what is unknown
        return [], str(error)
    return token_ids, back.lstrip(" ") if is_spaced else back


def _as_written(file: Path, loaded: Tokenizer) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json.

    To read the vocabulary of a large one takes half a second. So it shares the model of the one that was loaded, unless
    that model's options differ.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    content = file.read_text("utf-8")
    pieces, place = _members_before("model", content, 0)
    options, _ = _members_before("vocab", content, place)
    model, kind = loaded.model, options.pop("type", None)
    is_same = kind == type(model).__name__ and all(
        getattr(model, name, value) == value for name, value in options.items()
    )
    if not is_same or any(piece not in pieces for piece in PIECES):
        written = Tokenizer.from_file(str(file))
        written.no_truncation()
        written.no_padding()
        return written
    empty = Tokenizer(BPE()).to_str()
    written = Tokenizer.from_str(json.dumps({**json.loads(empty), **{piece: pieces[piece] for piece in PIECES}}))
    written.model = model
    return written


def _members_before(last: str, content: str, start: int) -> tuple[dict[str, Any], int]:
    """Read a JSON object's members up to the one named `last`; returns them, and the place of that one's value.

    start: the object's place in the content; if it lacks that member, the place is its end
    """
    members: dict[str, Any] = {}
    place = start + 1
    while content[place := _skip(content, place)] != "}":
        name, place = _decode_json(content, place)
        place = _skip(content, place)
        if name == last:
            break
        members[name], place = _decode_json(content, place)
    return members, place


def _skip(content: str, place: int) -> int:
    """Return the next place that holds neither space nor what stands between a JSON object's names and values."""
    found = _between.match(content, place)
    assert found is not None
    return found.end()


def _warn(folder: str, ours: Reading, theirs: Reading) -> None:
    import tokenizers
    import transformers

    (ids, text), (own_ids, own_text) = ours, theirs
    log.warning(
        f"transformers {transformers.__version__} with tokenizers {tokenizers.__version__} reads the tokenizer of"
        f" {folder!r} otherwise than its tokenizer.json says: {TEXT!r} becomes {ids[:SHOWN]}... and then {text!r}; by"
        f" the file, it becomes {own_ids[:SHOWN]}... and then {own_text!r}. transformers {NEEDED} or later is needed;"
        " where that reads it so, try another version"
    )
