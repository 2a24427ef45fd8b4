"""The folders of models and tokenizers: the user's own, or downloaded from the Hugging Face Hub."""

from __future__ import annotations

import re
from pathlib import Path

from nanoinfer.checks import short
from nanoinfer.gguf.header import FIRST_OF_SPLIT, GGUF, is_gguf
from nanoinfer.gguf.tokenizer import has_tokenizer_inside

CONFIG_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]
CHECKPOINT_FILES = [*CONFIG_FILES, "*.safetensors"]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
BUNDLED = "bundled"  # the name of BUNDLED_MODEL
BUNDLED_MODEL = str(Path(__file__).parent / "bundled" / "shakespeare-qwen3")
"""The folder of a small Qwen3 that ships with the package."""
# Of a checkpoint in a format that nobody here reads.
CONVERT = (
    "convert it with llm-compressor, GPTQModel or AutoRound, or take the checkpoint of 16 bits with quantization='int4'"
)
OF_TYPE = re.compile(r"([\w.-]+/[\w.-]+):([\w.-]+)")  # a Hub id, and the type of a GGUF file's numbers
REVISIONS = {"model": "revision", "tokenizer": "tokenizer_revision"}


def find_folder(
    option: str, source: str | Path, revision: str | None, files: list[str], kind: str | None = None
) -> str:
    """Return the path of a folder, or download a Hub id's files first.

    option: the argument that has the value `source`, such as "model" or "tokenizer". "bundled" is BUNDLED_MODEL, unless
        the working directory has a folder of that name
    revision: the Hub id's branch, tag or commit; None: its main branch, as which a folder counts
    kind: what the folder holds, such as "adapter"; None: what the option says

    Raises ValueError if there is no such folder, or a folder has another revision.
    """
    if not isinstance(source, (str, Path)) or not str(source):
        raise ValueError(f"{option}={short(source)}: must be a folder's path or a Hugging Face Hub id")
    try:
        folder = Path(source).expanduser()
        is_folder, is_file = folder.is_dir(), folder.is_file()
    except (OSError, RuntimeError, ValueError):  # the path is too long, has a null character, or is another user's
        is_folder = is_file = False
    if source == BUNDLED and not is_folder:
        folder, is_folder = Path(BUNDLED_MODEL), True
    if is_folder:
        if revision is not None and not (isinstance(revision, str) and revision == "main"):
            raise ValueError(
                f"{REVISIONS[option]}={short(revision)}: must be None or 'main', as {str(source)!r} is a folder; only a"
                " Hugging Face Hub id has revisions"
            )
        return str(folder)
    if is_file:
        whose = f"the {kind or option}'s"
        raise ValueError(f"{option}={str(source)!r}: is a file; give the folder that holds {whose} files")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(source)):
        example = f"'Qwen/Qwen3-0.6B'; {BUNDLED!r} is the small model that ships with nanoinfer"
        raise ValueError(
            f"{option}={str(source)!r}: no such folder, nor is it a Hugging Face Hub id such as"
            f" {example if kind is None else repr(f'owner/{kind}')}"
        )
    return _download(option, str(source), revision, files)


def find_model(option: str, source: str | Path, revision: str | None, gguf_file: str | None = None) -> str:
    """Return the path of a model's folder, as find_folder does, or of its GGUF file.

    source: or a GGUF file's path, or a Hub id and a type of numbers, such as "owner/model-GGUF:Q4_K_M"
    gguf_file: the file's name in the folder, or in the Hub id; None: `source` says which, or there is none
    """
    if gguf_file is not None and not (isinstance(gguf_file, str) and gguf_file.endswith(GGUF)):
        raise ValueError(f"gguf_file={short(gguf_file)}: must be the name of a file that ends with {GGUF}")
    if _is_gguf_file(source):
        if gguf_file is not None:
            raise ValueError(f"gguf_file={gguf_file!r}: must be left out, as {option}={str(source)!r} is a file itself")
        return str(Path(source).expanduser())
    typed = OF_TYPE.fullmatch(source) if isinstance(source, str) and gguf_file is None else None
    if typed is not None:
        return _find_of_type(option, typed[1], typed[2], revision)
    if gguf_file is None:
        return find_folder(option, source, revision, CHECKPOINT_FILES)
    files = [*CONFIG_FILES, FIRST_OF_SPLIT.sub(f"-*-of-*{GGUF}", gguf_file)]
    folder = Path(find_folder(option, source, revision, files))
    if not (folder / gguf_file).is_file():
        raise ValueError(f"gguf_file={gguf_file!r}: {_must_be_among(folder)}")
    return str(folder / gguf_file)


def _find_of_type(option: str, hub_id: str, kind: str, revision: str | None) -> str:
    """Return the path of the file, or the first one of a split file, whose name ends with a type of numbers."""
    patterns = [f"*{spelled}*{GGUF}" for spelled in sorted({kind, kind.lower(), kind.upper()})]
    folder = Path(_download(option, hub_id, revision, [*CONFIG_FILES, *patterns]))
    ends = re.compile(rf"(^|[-.]){re.escape(kind)}(-00001-of-\d{{5}})?\{GGUF}$", re.IGNORECASE)
    found = [file for file in sorted(folder.rglob(f"*{GGUF}")) if ends.search(file.name)]
    if not found:
        raise ValueError(f"{option}={f'{hub_id}:{kind}'!r}: {_must_be_among(folder)}")
    return str(min(found, key=lambda file: len(file.name)))  # others say more of how they were made


def _must_be_among(folder: Path) -> str:
    names = ", ".join(sorted(str(file.relative_to(folder)) for file in folder.rglob(f"*{GGUF}"))) or "none"
    return f"must be one of the GGUF files that are there: {names}"


def _is_gguf_file(source: object) -> bool:
    """Whether a path is that of a GGUF file which is there."""
    try:
        return isinstance(source, (str, Path)) and is_gguf(source) and Path(source).expanduser().is_file()
    except (OSError, RuntimeError, ValueError):  # as for find_folder
        return False


def find_tokenizer(source: str | Path, revision: str | None) -> str:
    """Return a tokenizer's folder, as find_folder does, or GGUF file. Raises ValueError also if there is none in it."""
    is_file = _is_gguf_file(source)
    folder = str(Path(source).expanduser()) if is_file else find_folder("tokenizer", source, revision, CONFIG_FILES)
    if not has_tokenizer(folder):
        raise ValueError(f"tokenizer={str(source)!r}: must have a tokenizer: one of {', '.join(TOKENIZER_FILES)}")
    return folder


def has_tokenizer(folder: str) -> bool:
    """Whether a folder has the files of a tokenizer, or a GGUF file has one."""
    if is_gguf(folder):
        return has_tokenizer_inside(folder)
    return any((Path(folder) / name).is_file() for name in TOKENIZER_FILES)


def name_of(folder: str) -> str:
    """Return what users call the model in a folder: the Hub id if the folder is of the Hub's cache, else its name."""
    cached = re.search(r"/models--([^/]+)/snapshots/[^/]+/?$", folder)
    return cached[1].replace("--", "/") if cached else Path(folder).resolve().name.removesuffix(GGUF)


def reason_of(error: Exception) -> str:
    """Say why transformers cannot read a folder; where it advises to trust the folder's code, that is not run here."""
    return "it needs code of its own, and no remote code runs here" if "trust_remote_code" in str(error) else str(error)


def _download(option: str, hub_id: str, revision: str | None, files: list[str]) -> str:
    named = "" if revision is None else f", {REVISIONS[option]}={short(revision)}"
    if revision is not None and not (isinstance(revision, str) and revision):
        raise ValueError(f"{option}={hub_id!r}{named}: must be a branch, a tag or a commit")
    from huggingface_hub import snapshot_download  # here, for ranks and replicas download nothing

    try:
        return snapshot_download(hub_id, revision=revision, allow_patterns=files)
    except Exception as error:
        raise ValueError(
            f"{option}={hub_id!r}{named}: no such folder, and the Hugging Face Hub did not provide it: {error}"
        ) from error
