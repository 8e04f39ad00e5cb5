"""The draft in training: where it starts, what of it is trained, and how it is written as a checkpoint.

In memory it is transformers' decoder layers behind an output layer of our own, which may have rows for some ids only.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import InputError
from slipstream.models.describe import Description, describe
from slipstream.models.exit_head import ExitHead
from slipstream.models.llama import unsupported
from slipstream.models.reduced import checkpoint_contents, read_output_ids, reduced_tensors

_HEAD, _TABLE = "lm_head.weight", "model.embed_tokens.weight"
PRUNE, LAYERS = "prune:", "layers:"
_BESIDE = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*", "vocab.*", "merges.txt")


@dataclass(frozen=True)
class Start:
    """The weights that training begins with."""

    source: Path
    """The folder that they, and the tokenizer, come from."""
    config: Mapping[str, Any]
    """As in config.json."""
    tensors: Mapping[str, Tensor]
    """The decoder's, by their names in the Hugging Face layout."""
    head: Tensor
    """(R, D)"""
    output_ids: Tensor | None
    """(R,) the id of each row of the head; None if row and id are one."""
    tied: bool
    """Whether the head is the embedding."""


def is_pruned(init: str) -> bool:
    """Whether ``init`` means some of the target's layers."""
    return init.startswith((PRUNE, LAYERS))


def read_start(init: str, target: Description) -> Start:
    """What ``init`` means: ``prune:4``, ``layers:0,9,19,29`` of the target, or a draft model.

    Raises:
        InputError: no such thing, not of the Llama family, or not the target's tokenizer.
    """
    if is_pruned(init):
        total = int(target.number("num_hidden_layers"))
        return _pruned(_whole(target, init), _layers(init, total), total)
    draft = describe(init)
    _check_tokenizer(target, draft)
    return _whole(draft, init)


def with_outputs(start: Start, ids: Sequence[int]) -> Start:
    """The start with rows for ``ids`` only."""
    kept = torch.tensor(ids, dtype=torch.long)
    return Start(start.source, start.config, start.tensors, start.head[kept].clone(), kept, tied=False)


class Student(nn.Module):
    """A causal language model: ids (N, L) to log-probabilities over the R rows of its output layer."""

    def __init__(self, start: Start) -> None:
        super().__init__()
        from transformers import AutoConfig, AutoModel

        settings = {k: v for k, v in start.config.items() if k not in ("architectures", "dtype", "torch_dtype")}
        config = AutoConfig.for_model(**settings)
        config.use_cache = False
        self.decoder: Any = AutoModel.from_config(config, dtype=torch.float32)
        own = {name.removeprefix("model."): tensor.float() for name, tensor in start.tensors.items()}
        self.decoder.load_state_dict(own)
        self.head = nn.Parameter(start.head.float().clone())
        if start.tied:
            self.head = self.decoder.get_input_embeddings().weight
        self.start = start
        """Where it began, and what its checkpoint says beside the weights."""
        self.adapter: Adapter | None = None

    @property
    def output_ids(self) -> Tensor | None:
        """(R,) the id of each row; None if row and id are one."""
        return self.start.output_ids

    def states(self, ids: Tensor) -> Tensor:
        """What the output layer sees at each of ``ids`` (N, L), (N, L, D)."""
        states: Tensor = self.decoder(input_ids=ids, use_cache=False).last_hidden_state
        return states if self.adapter is None else self.adapter(states)

    def log_probs(self, ids: Tensor, scored: Tensor) -> Tensor:
        """Over the R rows at each position of ``ids`` (N, L) that is ``scored`` (N, L), (S, R) in float32."""
        logits = nn.functional.linear(self.states(ids)[scored], self.head)
        return logits.float().log_softmax(dim=-1)

    def rows_of(self, labels: Tensor, size: int) -> Tensor:
        """The row of each of ``labels``, -1 for those without; ``size`` ids are there in all."""
        if self.output_ids is None:
            return labels.where(labels < len(self.head), -1)
        rows = torch.full((size,), -1).index_put_((self.output_ids,), torch.arange(len(self.output_ids)))
        return rows[labels]


class Adapter(nn.Module):
    """x + up(down(x)), which begins as nothing."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(rank, width) * width**-0.5)
        self.up = nn.Parameter(torch.zeros(width, rank))

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D)"""
        return x + x @ self.down.T @ self.up.T


def train_fully(student: Student, embeddings: bool) -> None:
    """Train everything, or everything but the table of input embeddings, unless that is the output layer too."""
    student.requires_grad_(True)
    table = student.decoder.get_input_embeddings().weight
    table.requires_grad_(embeddings or student.start.tied)


def train_adapters(student: Student, rank: int) -> None:
    """LoRA (Hu et al. 2021, arXiv 2106.09685) of every linear layer of the decoder."""
    from peft import LoraConfig, get_peft_model

    student.requires_grad_(False)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules="all-linear")
    with warnings.catch_warnings():  # peft asks transformers in ways that transformers is giving up
        warnings.simplefilter("ignore", FutureWarning)
        student.decoder = get_peft_model(student.decoder, config)


def train_exit(student: Student, rank: int) -> None:
    """Train only what an exit head has: the norm before the output layer, and an adapter behind it."""
    student.requires_grad_(False)
    student.adapter = Adapter(student.head.shape[1], rank)
    student.decoder.norm.weight.requires_grad_(True)


def exit_head(student: Student) -> ExitHead:
    """What ``train_exit`` trained."""
    adapter = student.adapter
    assert adapter is not None
    layers = int(student.start.config["num_hidden_layers"])
    return ExitHead(layers, student.decoder.norm.weight.detach(), adapter.down.detach(), adapter.up.detach())


#: How much less likely ids without a row are than all others together, in a portable output layer (natural log).
_FAR = 25.0


@torch.no_grad()
def make_portable(student: Student, ids: Sequence[Sequence[int]]) -> None:
    """Give a reduced output layer rows for all ids, so that other programs can read it.

    There is no bias that could forbid the new ones, so they share one row m, for which m h is far below the logits of
    the others at the states h that ``ids`` lead to (least squares).
    """
    rows = student.output_ids
    assert rows is not None
    states = torch.cat([student.states(torch.tensor([some]))[0] for some in ids]).double()
    wanted = (states @ student.head.double().T).logsumexp(dim=1) - _FAR
    gram = states.T @ states
    gram += 1e-4 * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    shared = torch.linalg.solve(gram, states.T @ wanted).to(student.head.dtype)
    table = student.decoder.get_input_embeddings().weight
    student.head = nn.Parameter(shared.repeat(len(table), 1).index_copy_(0, rows, student.head))
    student.start = replace(student.start, output_ids=None)


def merge_adapters(student: Student) -> None:
    """Make LoRA's products part of the weights."""
    if hasattr(student.decoder, "merge_and_unload"):
        student.decoder = student.decoder.merge_and_unload()


def trained(student: Student) -> dict[str, Tensor]:
    """The weights that are trained, by name."""
    return {name: p.detach() for name, p in student.named_parameters() if p.requires_grad}


def save_student(student: Student, folder: Path, dtype: torch.dtype) -> None:
    """Write the checkpoint into ``folder``, which exists: weights, config.json, the tokenizer's files."""
    from safetensors.torch import save_file

    start, state = student.start, student.decoder.state_dict()
    tensors = {f"model.{name}": t.detach().to(dtype).contiguous() for name, t in state.items()}
    config = {**start.config, "dtype": str(dtype).removeprefix("torch."), "architectures": _architecture(start.config)}
    if not start.tied:
        tensors[_HEAD] = student.head.detach().to(dtype).contiguous()
        config["tie_word_embeddings"] = False
    if start.output_ids is not None:
        tensors, config = reduced_tensors(tensors, config, start.output_ids.tolist())
    file = folder / "model.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(0o644)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for file in sorted(f for pattern in (*_BESIDE, "generation_config.json") for f in start.source.glob(pattern)):
        shutil.copy(file, folder / file.name)


def _architecture(config: Mapping[str, Any]) -> list[str]:
    names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    return [f"{names[config['model_type']]}ForCausalLM"]


def _whole(model: Description, init: str) -> Start:
    if model.path.is_file():
        raise InputError(f"{init!r} cannot begin from the GGUF file {model.path}; give a Hugging Face folder")
    if reason := unsupported(model.config):
        raise InputError(f"{init!r} cannot be trained ({reason}); only the Llama family can")
    if not model.has_weights:
        raise InputError(f"{model.path} has no weights to begin from; download the model again")
    config, tensors = checkpoint_contents(model.path)
    table = tensors[_TABLE]
    tied = bool(config.get("tie_word_embeddings")) or _HEAD not in tensors
    head = table if tied else tensors[_HEAD]
    ids = read_output_ids(str(model.path), config, tensors.__getitem__, (len(head), len(table)))
    kept = {name: t for name, t in tensors.items() if name.startswith("model.")}
    return Start(model.path, config, kept, head, ids, tied)


def _pruned(whole: Start, layers: Sequence[int], total: int) -> Start:
    number = {old: new for new, old in enumerate(layers)}
    tensors = {}
    for name, tensor in whole.tensors.items():
        parts = name.split(".")
        if parts[1] != "layers":
            tensors[name] = tensor
        elif int(parts[2]) in number:
            tensors[".".join((*parts[:2], str(number[int(parts[2])]), *parts[3:]))] = tensor
    config = {**whole.config, "num_hidden_layers": len(layers)}
    if isinstance(kinds := config.get("layer_types"), list) and len(kinds) == total:
        config["layer_types"] = [kinds[i] for i in layers]
    return Start(whole.source, config, tensors, whole.head, whole.output_ids, whole.tied)


def _layers(init: str, total: int) -> list[int]:
    """The layers' numbers."""
    given = init.removeprefix(PRUNE).removeprefix(LAYERS).split(",")
    if not all(part.strip().isdecimal() for part in given) or (init.startswith(PRUNE) and len(given) > 1):
        raise InputError(f"--init {init!r} is not understood; write for example prune:4 or layers:0,9,19,29")
    numbers = [int(part) for part in given]
    if init.startswith(PRUNE):
        count = numbers[0]
        if not 1 <= count < total:
            raise InputError(f"--init {init!r} does not fit the target's {total} layers; use prune:1 to {total - 1}")
        return list(range(count))
    if numbers != sorted(set(numbers)) or numbers[-1] >= total:
        raise InputError(f"--init {init!r} does not fit; name layers 0 to {total - 1} in ascending order, once each")
    return numbers


def _check_tokenizer(target: Description, draft: Description) -> None:
    from slipstream.models.vocabulary import first_difference

    if target.tokenizer is None or draft.tokenizer is None:
        raise InputError(f"{target.name} or {draft.name} has no tokenizer; put tokenizer.json beside the weights")
    unlike = first_difference(target.tokenizer, draft.tokenizer)
    if unlike is not None:
        raise InputError(
            f"the draft {draft.name} has another tokenizer than the target {target.name} (id {unlike.token} is "
            f"{unlike.draft_text!r} and {unlike.target_text!r}); begin with prune:4 or a draft of the same family"
        )
