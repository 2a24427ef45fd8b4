"""The tokenizer in a GGUF file's metadata, which transformers builds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoinfer.gguf.header import Header, read_header

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer
    from transformers import PreTrainedTokenizerBase

MODEL, SPLIT, TOKENS = "tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.tokens"
MERGES, SCORES, TYPES = "tokenizer.ggml.merges", "tokenizer.ggml.scores", "tokenizer.ggml.token_type"
TEMPLATE, ID = "tokenizer.chat_template", "_token_id"
PREFIX = "tokenizer.ggml.add_space_prefix"
NONE = "no_vocab"
SPACE = "\u2581"  # which stands for a space in SentencePiece's tokens
LIKE_GPT2 = (
    "gpt2", "gpt-2", "default", "phi-2", "mpt", "olmo", "jais", "exaone4", "trillion", "granite-docling", "gigachat",
    "a.x-4.0", "mellum", "modern-bert", "roberta-bpe", "jina-es", "jina-de", "jina-v1-en", "jina-v2-es", "jina-v2-de",
    "jina-v2-code",
)  # fmt: skip
DIGIT_BY_DIGIT = "smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"  # then as GPT-2
LIKE = {
    "glm4": "llama-bpe",
    "glm5": "llama-bpe",
    "chatglm-bpe": "llama-bpe",
    "stablelm2": "qwen2",
    "hunyuan": "qwen2",
    "solar-open": "qwen2",
}  # names of splits that transformers does not know, and of what they are
WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LIKE_DEEPSEEK = "deepseek-v3", "hunyuan-dense", "joyai-llm"
DEEPSEEK = r"\p{N}{1,3}", "[一-龥\u3040-\u309f\u30a0-\u30ff]+", WORDS
SEED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
EXPRESSIONS = {**dict.fromkeys(LIKE_DEEPSEEK, DEEPSEEK), "seed-coder": (SEED,)}


def has_tokenizer_inside(path: str) -> bool:
    """Whether a file's metadata have a vocabulary."""
    return read_header(path).metadata.get(MODEL, NONE) != NONE


def load_tokenizer_of(path: str) -> PreTrainedTokenizerBase:
    """Build the tokenizer.

    Raises ValueError, naming it, for a kind or a split of texts that is unknown, and for what is no tokenizer's.
    """
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf.gguf_tokenizer_mapping import (
        GGUF_PRE_TOKENIZER_SPLITS,
        GGUF_SENTENCEPIECE_BUILDERS,
        GGUF_TOKENIZER_TYPES,
    )

    header = read_header(path)
    kind, split = header.metadata.get(MODEL), header.metadata.get(SPLIT, "default")
    if kind not in GGUF_TOKENIZER_TYPES:
        raise ValueError(
            f"{path}: {MODEL}={kind!r}: must be one of {', '.join(GGUF_TOKENIZER_TYPES)}; give tokenizer=..."
        )
    own = _own_split(split, GGUF_PRE_TOKENIZER_SPLITS) if kind == "gpt2" else None
    if kind == "gpt2" and own is None and split not in (*LIKE_GPT2, *GGUF_PRE_TOKENIZER_SPLITS):
        known = *LIKE_GPT2, *DIGIT_BY_DIGIT, *LIKE, *EXPRESSIONS, *GGUF_PRE_TOKENIZER_SPLITS
        raise ValueError(
            f"{path}: {SPLIT}={split!r}: must be one of {', '.join(known)}; give tokenizer=..., the original's folder"
        )
    _check(header, kind)
    file = Path(path)
    tokenizer: PreTrainedTokenizerBase
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(file.parent), gguf_file=file.name)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of tokenizers, which is no Exception
            raise
        raise ValueError(f"{path}: {MERGES} in its metadata do not fit {TOKENS}: {error}") from error
    if own is not None:
        tokenizer.backend_tokenizer.pre_tokenizer = own
    if kind == "llama" and header.architecture not in GGUF_SENTENCEPIECE_BUILDERS:
        _split_as_sentencepiece(tokenizer.backend_tokenizer, header.metadata.get(PREFIX) is not False)
    return tokenizer


def _split_as_sentencepiece(tokenizer: Tokenizer, has_prefix: bool) -> None:
    """Let a text begin with a space more, also if it begins with one, if the vocabulary has that prefix."""
    from tokenizers import decoders, normalizers

    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if has_prefix else spaces
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)


def _own_split(name: Any, known: dict[str, str]) -> PreTokenizer | None:
    """Return how texts are split before bytes become tokens; None: as transformers does it.

    known: the expressions that transformers has, by their names
    """
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    if name in DIGIT_BY_DIGIT:
        return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    expressions = (known[LIKE[name]],) if name in LIKE else EXPRESSIONS.get(name)
    if expressions is None:
        return None
    splits = [Split(Regex(expression), behavior="isolated") for expression in expressions]
    return Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])


def _check(header: Header, kind: object) -> None:
    """Raise ValueError, naming the key, for metadata that no tokenizer of the kind has."""
    metadata, where = header.metadata, f"{header.path}: "
    count = metadata.get(TOKENS)
    if type(count) is not int:  # as read_header counts an array of strings
        raise ValueError(f"{where}{TOKENS} in its metadata is {_short(count)}: must be an array of strings")
    if (merges := metadata.get(MERGES)) is None and kind == "gpt2":
        raise ValueError(f"{where}its metadata lack {MERGES}, without which no vocabulary of bytes is known")
    if merges is not None and type(merges) is not int:
        raise ValueError(f"{where}{MERGES} in its metadata is {_short(merges)}: must be an array of strings")
    for key in (SCORES, TYPES):
        of_tokens = metadata.get(key)
        if of_tokens is None and (key == TYPES or merges is not None):
            continue
        if not isinstance(of_tokens, list) or len(of_tokens) != count:
            raise ValueError(
                f"{where}{key} in its metadata is {_short(of_tokens)}: must be an array of {count} numbers, one a token"
            )
    for key, value in metadata.items():
        if key.startswith("tokenizer.ggml.") and key.endswith(ID) and not (type(value) is int and 0 <= value < count):
            raise ValueError(f"{where}{key} in its metadata is {value!r}: must be a number from 0 to {count - 1}")
    if not isinstance(template := metadata.get(TEMPLATE, ""), str):
        raise ValueError(f"{where}{TEMPLATE} in its metadata is {_short(template)}: must be a string")


def _short(value: object) -> str:
    """Return what to show of a value that may be long."""
    return f"an array of {len(value)} numbers" if isinstance(value, list) else f"{value!r}"
