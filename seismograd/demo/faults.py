"""The faults that the demo plants: a corrupted log-probability, and a residual stream that cancels out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


@dataclass(frozen=True)
class PlantedFault:
    """One corrupted rollout log-probability, as a damaged transfer from the engine would leave it.

    Args:
        step: optimizer step, the first being 1, from which on it is planted: in the first batch with a fitting token.
        ratio: exp(logp - rollout_logp) of the token afterwards.
        advantage: "negative": PPO's minimum keeps ratio * advantage, whatever its size, and the gradient explodes.
            "positive": the minimum takes the clipped side, and the token's gradient is silenced.
        after: steps with a gradient that must have gone before, so that a detector knows what is usual.
    """

    step: int
    ratio: float = 1e4
    advantage: Literal["negative", "positive"] = "negative"
    after: int = 12

    def __post_init__(self) -> None:
        if not self.ratio > 1:
            raise ValueError(f"fault.ratio must be above 1, got {self.ratio!r}")
        if self.advantage not in ("negative", "positive"):
            raise ValueError(f"fault.advantage must be negative or positive, got {self.advantage!r}")


@dataclass(frozen=True)
class Planted:
    """Where a fault was planted.

    Args:
        step: optimizer step, the first being 1.
        row: of the micro-batch.
        position: column of input_ids (prompt and completion) of the predicted token.
        token: its text.
        advantage: of its sequence.
        logp: of the training forward, nats.
        rollout_logp: before and after, nats.
    """

    step: int
    row: int
    position: int
    token: str
    advantage: float
    logp: float
    rollout_logp: tuple[float, float]

    def sentence(self) -> str:
        """One line for people."""
        before, after = self.rollout_logp
        return (
            f"step {self.step}: planting the fault in row {self.row}, position {self.position}, token {self.token!r} "
            f"(advantage {self.advantage:+.2f}): its rollout log-prob {before:.2f} becomes {after:.2f}, "
            f"a ratio of {math.exp(self.logp - after):.3g}"
        )

    def why(self) -> str:
        """What was done, for the summary."""
        before, after = self.rollout_logp
        where = f"token {self.token!r}, row {self.row}, position {self.position}"
        return f"the rollout log-prob of {where} was changed from {before:.2f} to {after:.2f}"

    def guilty(self, row: int, position: int) -> bool:
        """Whether a culprit is what was planted."""
        return (row, position) == (self.row, self.position)


@dataclass(frozen=True)
class LayerFault:
    """The residual stream of one token all but cancels out before a layer, as a damaged activation would do it.

    The layer's normalisation divides by what is left, so that the gradient of everything before it grows by 1 / `left`
    at this token, and that of the layers behind it does not: kind B.

    Args:
        step: optimizer step from which on it is planted, in the first batch with an advantage.
        layer: index of the decoder layer before which it happens.
        left: of the residual stream's length.
        after: steps with a gradient that must have gone before.
    """

    step: int
    layer: int
    left: float = 1e-3
    after: int = 12

    def __post_init__(self) -> None:
        if not 0 < self.left < 1:
            raise ValueError(f"fault.left must lie between 0 and 1, got {self.left!r}")
        if self.layer < 1:
            raise ValueError(f"fault.layer must be at least 1, got {self.layer!r}")


@dataclass(frozen=True)
class PlantedLayer:
    """Where a `LayerFault` was planted.

    Args:
        step: optimizer step, the first being 1.
        row: of the micro-batch.
        position: column of input_ids whose residual stream cancels out.
        token: its text.
        layer: before which.
    """

    step: int
    row: int
    position: int
    token: str
    layer: int

    def sentence(self) -> str:
        """One line for people."""
        return (
            f"step {self.step}: planting the fault before layer {self.layer}: the residual stream of row {self.row}, "
            f"position {self.position}, token {self.token!r} all but cancels out"
        )

    def why(self) -> str:
        """What was done, for the summary."""
        where = f"token {self.token!r}, row {self.row}, position {self.position}"
        return f"the residual stream of {where} was all but cancelled out before layer {self.layer}"

    def guilty(self, row: int, position: int) -> bool:
        """Whether a culprit is what was planted: a token of its sequence that is predicted from there on."""
        return row == self.row and position > self.position


class Collapse:
    """Hooks on a decoder that take a constant from one token's residual stream. Gradients pass as they are.

    The constant is that of the first forward, so that a forward with other weights sees it unchanged; one in another
    precision has its own.

    Args:
        model: a decoder whose first list of modules is its layers.
        ids: (T,) of the row; forwards that hold no such row are left alone.
        position: its column.
        fault: how much is left, and where.
    """

    def __init__(self, model: nn.Module, ids: Tensor, position: int, fault: LayerFault) -> None:
        self._ids, self._position, self._left = ids, position, fault.left
        self._rows: list[int] = []
        self._taken: dict[bool, Tensor] = {}
        layers: Any = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(self._find, with_kwargs=True),
            layers[fault.layer - 1].register_forward_hook(self._cancel),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _find(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        fits = isinstance(ids, Tensor) and ids.dim() == 2 and ids.shape[1] == len(self._ids)
        self._rows = (ids == self._ids).all(1).nonzero().flatten().tolist()[:1] if fits else []  # type: ignore[union-attr]

    def _cancel(self, _: nn.Module, args: Any, output: Any) -> Any:
        if not self._rows:
            return None
        hidden = output[0] if isinstance(output, tuple) else output
        at = (self._rows[0], self._position)
        rounded = torch.is_autocast_enabled(hidden.device.type)
        if rounded not in self._taken:
            self._taken[rounded] = (1 - self._left) * hidden[at].detach()
        less = torch.zeros_like(hidden)
        less[at] = self._taken[rounded].to(less.dtype)
        hidden = hidden - less
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden
