"""One forward of TRL's loss, and how it is run again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from seismograd.telemetry.forward_state import ForwardState


@dataclass(frozen=True)
class Forward:
    """One forward with grad that compute_loss made.

    Args:
        args, kwargs: the model's.
        state: random numbers and autocast, or None where they were not seen.
        log_probs: (b, T-1), with grad.
        others: what else the loss may take from it, see `others_of`.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(repr=False)
    state: ForwardState | None
    log_probs: Tensor
    others: Mapping[str, Tensor]

    def replays(self, model: nn.Module) -> dict[str, Any]:
        """The fields of a `TokenBatch` that run it again; some rows alone where all inputs have one a sequence."""
        rows = self.log_probs.shape[0]
        tensors = [x for x in self.kwargs.values() if isinstance(x, Tensor)]
        by_row = not self.args and all(x.dim() > 0 and x.shape[0] == rows for x in tensors)
        return {
            "replay": partial(_replay, model, self.args, self.kwargs),
            "replay_all": partial(_replay_all, model, self.args, self.kwargs),
            "replay_rows": partial(_replay_rows, model, self.kwargs) if by_row else None,
        }


def others_of(output: Any) -> dict[str, Tensor]:
    """Outputs beside log_probs that TRL's loss has terms of: the entropy bonus and the router's load balancing."""
    found = {"entropy": getattr(output, "entropy", None), "router": getattr(output, "aux_loss", None)}
    return {name: x for name, x in found.items() if isinstance(x, Tensor)}


def _replay(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """The same forward again; (b, T-1) log-probs."""
    log_probs: Tensor = model(*args, **kwargs).log_probs
    return log_probs


def _replay_all(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """The same forward again, with all that the loss may take from it."""
    output = model(*args, **kwargs)
    return {"logp": output.log_probs, **others_of(output)}


def _replay_rows(model: nn.Module, kwargs: Mapping[str, Any], rows: Tensor) -> dict[str, Tensor]:
    """The same forward for some of its rows, (R,)."""
    return _replay_all(model, (), {k: x[rows] if isinstance(x, Tensor) else x for k, x in kwargs.items()})
