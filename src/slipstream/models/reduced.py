"""Draft models whose output layer covers only some of the ids that they read.

The output layer dominates a small draft; a few thousand frequent ids are most of what is ever said (FR-Spec, Zhao et
al. 2025, arXiv 2502.14856). Ids without a row have q = 0, so answers stay exact.

The form is the one of EAGLE-3 checkpoints: ``lm_head.weight`` has R rows, an integer tensor ``d2t`` (R,) holds
*offsets*, so that row r stands for id ``r + d2t[r]``, and config.json has ``draft_vocab_size`` R. ``t2d`` (V,), true
where an id has a row, is written for other programs and not read.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import InputError

_SIZE = "draft_vocab_size"
_HEAD = "lm_head.weight"
_TABLE = "model.embed_tokens.weight"
_BESIDE = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")


def read_output_ids(
    where: str, config: Mapping[str, Any], tensor: Callable[[str], Tensor], sizes: tuple[int, int]
) -> Tensor | None:
    """The id of each row of a checkpoint's output layer, (R,); None if row and id are one.

    Args:
        where: the checkpoint, for messages.
        config: as in config.json.
        tensor: from a name to a tensor; KeyError if there is none.
        sizes: number of rows of the output layer, number of ids that the model reads.

    Raises:
        InputError: a map that does not fit the output layer.
    """
    rows, size = sizes
    try:
        offsets = tensor("d2t")
    except KeyError:
        if config.get(_SIZE) in (None, size):
            return None
        raise InputError(
            f"{where} has {_SIZE} {config[_SIZE]}, but no tensor d2t that says which ids these are: export it again"
        ) from None
    if offsets.shape != (rows,) or offsets.is_floating_point():
        raise InputError(
            f"{where} has a map d2t of shape {tuple(offsets.shape)} and type {offsets.dtype}, but its output layer has "
            f"{rows} rows, and each needs one integer: export it again"
        )
    ids = torch.arange(rows) + offsets.long().cpu()
    _check_ids(f"the map d2t of {where}", ids.tolist(), size, "export it again")
    return ids


def cut_output_layer(source: Path, ids: Sequence[int], target: Path) -> None:
    """Save the checkpoint in folder ``source`` as folder ``target``, its output layer cut to the rows of ``ids``.

    The folder appears at once and whole, or not at all.

    Raises:
        InputError: ``target`` exists, ``source`` is no safetensors checkpoint with an output layer of all ids, or
            ``ids`` are not different ids of it.
    """
    if target.exists():
        raise InputError(f"{target} exists already: give another folder, or remove it first")
    config, tensors = checkpoint_contents(source)
    embedding = tensors[_TABLE]
    head = tensors.get(_HEAD, embedding)
    if "d2t" in tensors or len(head) != len(embedding):
        raise InputError(f"{source} has {len(head)} rows of output for {len(embedding)} ids already: cut the original")
    if not ids:
        raise InputError("ids is empty: give the ids that the draft shall be able to propose")
    _check_ids("ids", ids, len(embedding), "correct them")
    tensors[_HEAD] = head[torch.tensor(ids, dtype=torch.long)].contiguous()
    tensors, config = reduced_tensors(tensors, config, ids)
    _save(source, config, tensors, target)


def reduced_tensors(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], ids: Sequence[int]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A checkpoint whose output layer has a row for each of ``ids``, with what says so."""
    kept = torch.tensor(ids, dtype=torch.long)
    maps = {
        "d2t": kept - torch.arange(len(kept)),
        "t2d": torch.zeros(len(tensors[_TABLE]), dtype=torch.bool).index_fill_(0, kept, True),
    }
    return {**tensors, **maps}, {**config, _SIZE: len(ids), "tie_word_embeddings": False}


def _check_ids(what: str, ids: Sequence[int], size: int, advice: str) -> None:
    outside = next((i for i in ids if not 0 <= i < size), None)
    if outside is not None:
        raise InputError(f"{what} has the id {outside}, but ids go from 0 to {size - 1}: {advice}")
    seen: set[int] = set()
    for i in ids:
        if i in seen:
            raise InputError(f"{what} has the id {i} twice: {advice}")
        seen.add(i)


def checkpoint_contents(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and all tensors of a checkpoint in safetensors files.

    Raises:
        InputError: it cannot be read, or has no embedding.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tensors = {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}
        found = isinstance(config, dict) and _TABLE in tensors
    except (OSError, ValueError, SafetensorError) as error:
        raise InputError(f"{folder} cannot be read ({error}): give a folder in Hugging Face layout") from error
    if not found:
        raise InputError(f"{folder} has no embedding in safetensors files: give a model of the Llama family")
    return config, tensors


def _save(source: Path, config: Mapping[str, Any], tensors: dict[str, Tensor], target: Path) -> None:
    from safetensors.torch import save_file

    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
        folder = Path(scratch) / target.name
        folder.mkdir()
        for file in sorted(f for pattern in _BESIDE for f in source.glob(pattern)):
            if not file.name.endswith(".index.json"):
                shutil.copy(file, folder / file.name)
        (folder / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        folder.rename(target)
