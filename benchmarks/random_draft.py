"""Write a draft model that knows nothing: another one's shapes and tokenizer, with random weights.

    python benchmarks/random_draft.py DRAFT FOLDER

It costs what the real draft costs and is never right, so it shows what adaptive k loses in the worst case.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def main() -> None:
    """Keep the kinds of tensors and their sizes; scale as initialisation does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("draft", type=Path, help="a checkpoint folder with one model.safetensors")
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    args.folder.mkdir(parents=True)
    for file in args.draft.iterdir():
        if file.suffix in (".json", ".jinja"):
            shutil.copy(file, args.folder)
    weights = load_file(args.draft / "model.safetensors")
    drawn = {name: w if w.ndim < 2 else (torch.randn(w.shape) * 0.02).to(w.dtype) for name, w in weights.items()}
    save_file(drawn, args.folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
