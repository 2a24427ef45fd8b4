"""bench.py --save: the random weights of a --config as a checkpoint, so that others can load the same numbers."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from nanoinfer.attention import make_backend
from nanoinfer.benchmark.eyes.shapes import EYES
from nanoinfer.benchmark.output.status_line import StatusLine
from nanoinfer.benchmark.shapes import has_experts, has_stacks, write_config
from nanoinfer.checkpoint import GENERATE, Checkpoint
from nanoinfer.config import Config
from nanoinfer.layers.experts import skew_routers
from nanoinfer.media.tower.tower import TransformersTower
from nanoinfer.models import build
from nanoinfer.models.description import Description
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.process.torch_state import default_dtype
from nanoinfer.weights.formats.configs.written import config_of
from nanoinfer.weights.saving import num_bytes_of, save_table, saved_part
from nanoinfer.weights.shards import Table, table_of
from nanoinfer.weights.sources import RandomSource

CONFIG = "config.json"
PARTIAL = ".partial"  # ends the name of a folder until it is whole
BESIDE = ("config", "routing", "quantization", "dtype", "device")  # options that say which weights are saved


def check_save(args: argparse.Namespace, default_of: Callable[[str], Any]) -> None:
    """Raise ValueError for options that make no sense beside --save, and for a folder that cannot be new."""
    if args.save is None:
        return
    if args.config is None:
        raise ValueError(f"--save {args.save}: writes random weights: name their --config, such as 8b")
    for name, value in vars(args).items():
        if name not in ("save", *BESIDE) and value != default_of(name):
            raise ValueError(
                f"--{name.replace('_', '-')}: makes no sense beside --save, which takes"
                f" {', '.join(f'--{one}' for one in BESIDE)}; bench.py --model {args.save} takes it afterwards"
            )
    try:
        _check_new(args.save)
    except OSError as error:
        raise ValueError(f"--save {args.save}: {error.strerror}") from None


def _check_new(name: str) -> None:
    folder = Path(name).resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"--save {name}: is there already: name a new folder, or an empty one")
    if (partial := _partial(folder)).exists():
        raise ValueError(f"--save {name}: {partial} is there: a run writes it, or was killed, and then remove it")


def save_weights(args: argparse.Namespace, status: StatusLine) -> None:
    """Write the checkpoint, and say what it is; exit with an error's message, and without it, if that cannot be."""
    try:
        with _whole_or_none(Path(args.save).resolve()) as folder:
            line = _write(args, folder, status)
    except ValueError as error:
        raise SystemExit(f"bench.py: error: {error}") from None
    except (OSError, SafetensorError, torch.OutOfMemoryError) as error:
        raise SystemExit(f"bench.py: error: --save {args.save}: {error}") from None
    status.clear()
    print(f"{args.save}: {line}\nbench.py --model {args.save} measures them, and a peer loads the same")


@contextmanager
def _whole_or_none(folder: Path) -> Iterator[Path]:
    """Give a folder beside this one, which takes its name behind the block, or goes if an error or interrupt comes."""
    partial = _partial(folder)
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _partial(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}{PARTIAL}")


def _write(args: argparse.Namespace, folder: Path, status: StatusLine) -> str:
    """Draw the weights as an LLM does, and write them; returns a line about them."""
    write_config(args.config, str(folder))
    config = _config_of(args, folder)
    device, names = config.device_of(0), config.description.beside
    model, tower = _build(config, config.description, device), _tower_table(config, device)
    drawn = table_of(model) | tower
    _complete(folder / CONFIG, args.quantization, config.dtype, drawn, names.stored_name)
    table = saved_part(_stored_table(model, drawn, args, config), has_stacks(args.config))
    num_bytes = sum(map(num_bytes_of, table.values()))
    if num_bytes > (free := shutil.disk_usage(folder).free):
        raise ValueError(f"--save {args.save}: needs {num_bytes / 1e9:.3g} GB, but the disk has {free / 1e9:.3g} free")
    status.begin("drawing random weights")
    RandomSource(config.seed, device).fill(drawn)
    if args.routing == "skewed":
        skew_routers(model.modules())
    status.begin(f"writing {num_bytes / 1e9:.3g} GB")
    save_table(table, folder, names)
    how, routers = args.quantization or config.dtype, f", {args.routing} routers" if has_experts(args.config) else ""
    return f"random weights of {args.config} in {how}{routers}: {len(table):,} tensors, {num_bytes / 1e9:.3g} GB"


def _config_of(args: argparse.Namespace, folder: Path) -> Config:
    """Return the config of an LLM of the folder, which has no weights yet; raises ValueError as LLM does."""
    return Config(
        str(folder),
        load_format=args.load_format,
        quantization=args.quantization,
        dtype=args.dtype,
        device=args.device,
        images=args.config in EYES,
        max_model_len=2,  # no request runs
        attention_backend="torch",
    )


def _build(config: Config, description: Description, device: torch.device) -> nn.Module:
    """Build a model on one rank, as an LLM does."""
    layout = config.cache_layout.part(range(description.num_layers))
    backend = make_backend(config.attention_backend, layout)
    with device, default_dtype(config.torch_dtype):
        return build(description, config.max_model_len, backend, TensorParallel(), config.torch_head_dtype)


def _tower_table(config: Config, device: torch.device) -> Table:
    """Return what fills the tower, if the model sees."""
    if config.hf_config is None:
        return {}
    return TransformersTower(config.hf_config, config.torch_dtype, device).table()


def _complete(file: Path, quantization: str | None, dtype: str, table: Table, rename: Callable[[str], str]) -> None:
    """Let a shape's config.json say how its weights are stored; table, rename: as for config_of"""
    settings = json.loads(file.read_text("utf-8"))
    settings.get("text_config", settings)["torch_dtype"] = dtype
    if quantization is not None and "quantization_config" not in settings:
        settings["quantization_config"] = config_of(table, rename)
    file.write_text(json.dumps(settings, indent=2), "utf-8")


def _stored_table(model: nn.Module, drawn: Table, args: argparse.Namespace, config: Config) -> Table:
    """Return the table of a checkpoint that config.json describes, whose tensors have the numbers of a drawn model.

    Raises ValueError if no checkpoint can have the model in this format.
    """
    try:
        description = Checkpoint.open(config.model).describe(GENERATE, None, 1, is_loaded=False, sees=config.sees)
        stored = _build(config, description, torch.device("cpu"))  # nobody touches its numbers
    except ValueError as error:
        raise ValueError(
            f"--quantization {args.quantization}: no checkpoint has --config {args.config} in it: {error}"
        ) from error
    stored.load_state_dict(model.state_dict(), assign=True)
    plain = {name: shards for name, shards in drawn.items() if isinstance(shards[0].target, Tensor)}
    return table_of(stored) | plain  # not all of these are parameters
