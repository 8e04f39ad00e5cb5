"""The training loop: steps, their order, their learning rate, and a state from which it goes on as if never stopped."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.distill.losses import CROSS_ENTROPY, LOSSES, cross_entropy
from slipstream.distill.on_policy import continue_rows, drawn_positions
from slipstream.distill.student import Student
from slipstream.distill.teacher import Targets, Teacher
from slipstream.distill.tokens import Rows
from slipstream.errors import InputError


@dataclass(frozen=True)
class Recipe:
    """How to train."""

    steps: int
    loss: str = "kl"
    learning_rate: float = 1e-3
    warmup: float = 0.05
    """Share of the steps in which the learning rate rises; then it falls to nothing along a cosine."""
    batch: int = 8
    """Rows in a step."""
    accumulate: int = 1
    """Parts that a step's rows go through the draft in."""
    weight_decay: float = 0.01
    clip: float = 1.0
    """Gradients are shortened to this norm."""
    bf16: bool = False
    on_policy: float = 0.0
    """Share of the steps whose rows end as the draft goes on with them."""
    seed: int = 0

    def rate(self, step: int) -> float:
        """The learning rate of a step, from 0 on."""
        warm = max(1, round(self.warmup * self.steps))
        if step < warm:
            return self.learning_rate * (step + 1) / warm
        return self.learning_rate * (1 + math.cos(math.pi * (step - warm) / max(1, self.steps - warm))) / 2


@dataclass(frozen=True)
class Step:
    """What a step was like."""

    number: int
    """From 1 on."""
    loss: float
    """Mean over its positions."""
    positions: int
    rate: float


class Trainer:
    """Trains ``student`` on ``rows``.

    Everything that later steps depend on is in ``state()``: weights, optimiser, the number of steps, random numbers.
    """

    def __init__(self, student: Student, rows: Rows, teacher: Teacher, recipe: Recipe) -> None:
        self.student, self.rows, self.teacher, self.recipe = student, rows, teacher, recipe
        self.step_number = 0
        self._weights = [p for p in student.parameters() if p.requires_grad]
        decayed = [p for p in self._weights if p.ndim > 1]
        rest = [p for p in self._weights if p.ndim <= 1]
        groups = [
            {"params": some, "weight_decay": decay} for some, decay in ((decayed, recipe.weight_decay), (rest, 0.0))
        ]
        self._optimiser = torch.optim.AdamW(
            [g for g in groups if g["params"]], lr=recipe.learning_rate, betas=(0.9, 0.95), fused=True
        )
        self._generator = torch.Generator().manual_seed(recipe.seed)
        table = student.decoder.get_input_embeddings().weight
        self._labels = student.rows_of(rows.labels, len(table))

    def step(self) -> Step:
        """Do the next one.

        Raises:
            InputError: the loss is not a number any more.
        """
        recipe, rate = self.recipe, self.recipe.rate(self.step_number)
        for group in self._optimiser.param_groups:
            group["lr"] = rate
        batch = self._batch(self.step_number)
        on_policy = float(torch.rand((), generator=self._generator)) < recipe.on_policy
        scored = self.rows.scored[batch]
        positions = int((drawn_positions(scored) if on_policy else scored).sum())
        total = 0.0
        for part in batch.chunk(recipe.accumulate):
            loss = self._loss(part, on_policy) / max(1, positions)
            loss.backward()
            total += float(loss.detach())
        if not math.isfinite(total):
            raise InputError(f"the loss of step {self.step_number + 1} is {total}; lower --learning-rate")
        torch.nn.utils.clip_grad_norm_(self._weights, recipe.clip)
        self._optimiser.step()
        self._optimiser.zero_grad(set_to_none=True)
        self.step_number += 1
        return Step(self.step_number, total, positions, rate)

    def loss_of(self, batch: Tensor, on_policy: bool = False) -> Tensor:
        """The summed loss of some rows, with its graph; no weights and no random numbers are used up."""
        before = self._generator.get_state()
        found = self._loss(batch, on_policy)
        self._generator.set_state(before)
        return found

    def state(self) -> dict[str, Any]:
        """All that ``load`` needs."""
        return {
            "step": self.step_number,
            "weights": {n: p.detach().clone() for n, p in self.student.named_parameters() if p.requires_grad},
            "optimiser": self._optimiser.state_dict(),
            "generator": self._generator.get_state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from ``state``."""
        self.step_number = state["step"]
        own = dict(self.student.named_parameters())
        with torch.no_grad():
            for name, weight in state["weights"].items():
                own[name].copy_(weight)
        self._optimiser.load_state_dict(state["optimiser"])
        self._generator.set_state(state["generator"])

    def _batch(self, step: int) -> Tensor:
        """The rows of a step, (batch,): epoch after epoch, each in an order of its own."""
        size = min(self.recipe.batch, len(self.rows))
        first = step * size
        wanted = range(first, first + size)
        orders = {epoch: self._order(epoch) for epoch in {n // len(self.rows) for n in wanted}}
        return torch.stack([orders[n // len(self.rows)][n % len(self.rows)] for n in wanted])

    def _order(self, epoch: int) -> Tensor:
        seed = self.recipe.seed * 1_000_003 + epoch
        return torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(seed))

    def _loss(self, batch: Tensor, on_policy: bool) -> Tensor:
        """Summed over the scored positions of some rows."""
        ids, scored, labels = self.rows.ids[batch], self.rows.scored[batch], self._labels[batch]
        numbers = batch.tolist()
        if on_policy:
            ids, scored = continue_rows(self.student, ids, scored, self._generator)
            numbers = [-1] * len(numbers)
        with torch.autocast("cpu", torch.bfloat16) if self.recipe.bf16 else nullcontext():
            q = self.student.log_probs(ids, scored)
        if self.recipe.loss == CROSS_ENTROPY:
            return cross_entropy(q, labels[scored]).sum()
        measure, losses = LOSSES[self.recipe.loss], []
        # parted at once: a slice of its own for each row would cost a gradient as large as all of them, each time
        parts = q.split(scored.sum(dim=1).tolist())
        for number, row, mask, own in zip(numbers, ids, scored, parts, strict=True):
            positions = mask.nonzero().squeeze(1)
            if len(positions):
                losses.append(self._distance(measure, self.teacher.targets(number, row.tolist(), positions), own))
        return torch.stack(losses).sum() if losses else q.sum() * 0

    @staticmethod
    def _distance(measure: Any, targets: Targets, own: Tensor) -> Tensor:
        distance: Tensor = measure(targets.log_probs, targets.seen_by(own)).sum()
        return distance
