"""Versions of models on disk."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from conftest import byte_tokenizer, save_checkpoint
from slipstream.models.version import trained_for, version_of


def test_the_same_files_have_the_same_version_wherever_they_are(tmp_path: Path) -> None:
    one, other = (save_checkpoint(tmp_path / name, byte_tokenizer(), seed=1) for name in ("one", "other"))
    assert version_of(one) == version_of(other)
    assert len(version_of(one)) == 12
    assert version_of(save_checkpoint(tmp_path / "third", byte_tokenizer(), seed=2)) != version_of(one)
    assert version_of(one / "model.safetensors") not in ("", version_of(one))


def test_trained_weights_of_the_same_size_have_another_version(tmp_path: Path) -> None:
    """Too large to be read whole: what changed is found in samples."""
    sizes = {"vocab_size": 4000, "hidden_size": 128, "intermediate_size": 512}
    folder = save_checkpoint(tmp_path / "m", byte_tokenizer(), **sizes)
    file = folder / "model.safetensors"
    assert file.stat().st_size > 2 * 256 * 4096
    before = version_of(folder)
    tensors = load_file(file)
    changed = {n: t * 1.001 if n.endswith("mlp.down_proj.weight") else t for n, t in tensors.items()}
    assert any(not torch.equal(changed[n], t) for n, t in tensors.items())
    save_file(changed, file, metadata={"format": "pt"})
    assert version_of(folder) != before


def test_a_folder_without_a_model_has_none(tmp_path: Path) -> None:
    assert version_of(tmp_path) == ""


def test_what_a_draft_was_trained_for(tmp_path: Path) -> None:
    assert trained_for(tmp_path) == ""
    for said in ("{", "[]", '{"target": "m"}', '{"target": {"version": 5}}'):
        (tmp_path / "distill.json").write_text(said)
        assert trained_for(tmp_path) == ""
    (tmp_path / "distill.json").write_text(json.dumps({"target": {"version": "a1"}}))
    assert trained_for(tmp_path) == "a1"
