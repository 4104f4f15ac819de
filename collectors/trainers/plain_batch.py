"""What a plain loop says of one micro-batch, checked and brought to the shapes of a `TokenBatch`."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from seismograd.telemetry.forward_state import ForwardState
from seismograd.telemetry.records import TokenBatch

Inputs = tuple[tuple[Any, ...], dict[str, Any]]  # of a forward


def token_batch(
    step: int,
    micro_batch: int,
    logp: Tensor,
    *,
    rollout_logp: Tensor | None,
    advantage: Tensor | None,
    mask: Tensor | None,
    input_ids: Tensor | None,
    replay: Callable[[], Tensor] | None,
    old_logp: Tensor | None,
    sequence: Tensor | None,
    staleness: Any,
    engine: bool,
    state: ForwardState | None,
) -> TokenBatch:
    """The micro-batch; packed (N,) tokens become one row.

    Args: see `seismograd.Run.tokens`; `state` is that of the forward, if it was seen.

    Raises:
        ValueError: a tensor whose shape does not fit that of `logp`; the message names it.
    """
    flat = logp.detach()
    if flat.dim() == 1 and sequence is None:
        sequence = torch.full_like(flat, -1, dtype=torch.int64)  # not known, rather than one sequence of all
    return TokenBatch(
        step=step,
        micro_batch=micro_batch,
        rank=0,
        mask=_shaped("mask", torch.ones_like(flat) if mask is None else mask, flat).bool(),
        logp=flat if flat.dim() > 1 else flat.unsqueeze(0),
        input_ids=input_ids,
        rollout_logp=_shaped("rollout_logp", rollout_logp, flat),
        old_logp=_shaped("old_logp", old_logp, flat),
        advantage=_advantage(advantage, flat),
        sequence=_shaped("sequence", sequence, flat),
        staleness=_staleness(staleness, flat),
        engine=engine,
        replay=None if replay is None else partial(_replayed, replay, flat.dim()),
        state=state,
    )


def idle_batch(step: int, model: nn.Module, forward: Inputs, state: ForwardState | None) -> TokenBatch:
    """A micro-batch without tokens, (1, 0), that runs a forward again: for a rank whose share of the step is empty.

    The forward of a sharded model gathers its parameters from all ranks, so one that has no tokens keeps step with the
    others.

    Args:
        step: its number.
        model: whose forward it was.
        forward: its arguments.
        state: what it ran under, if that was seen.
    """
    args, kwargs = tree_map_only(Tensor, Tensor.detach, forward)  # their graph is the loop's
    device = next(model.parameters()).device
    none = torch.zeros(1, 0, device=device)

    def replay() -> Tensor:
        outputs = [x for x in tree_leaves(model(*args, **kwargs)) if isinstance(x, Tensor) and x.is_floating_point()]
        # So that the backward reaches the parameters.
        return none + torch.stack([x.float().nan_to_num().sum() * 0.0 for x in outputs]).sum()

    return TokenBatch(
        step=step, micro_batch=0, rank=0, mask=none.bool(), logp=none, loss_weight=none, replay=replay, state=state
    )


def _shaped(name: str, x: Any, logp: Tensor) -> Any:
    """x checked against logp, (B, T-1) or packed (N,), and given a row where logp is packed."""
    if x is None:
        return None
    if x.shape != logp.shape:
        raise ValueError(
            f"run.tokens({name}=...) has shape {tuple(x.shape)}, logp has {tuple(logp.shape)}: "
            "give one value a predicted token"
        )
    return x.detach() if x.dim() > 1 else x.detach().unsqueeze(0)


def _advantage(x: Tensor | None, logp: Tensor) -> Tensor | None:
    if x is not None and logp.dim() > 1 and x.shape in ((logp.shape[0],), (logp.shape[0], 1)):
        return x.detach().reshape(-1, 1)
    shaped: Tensor | None = _shaped("advantage", x, logp)
    return shaped


def _staleness(x: Any, logp: Tensor) -> Tensor | int | None:
    """One int for all, or (B,) on the device of logp."""
    if x is None or isinstance(x, int):
        return x
    if getattr(x, "ndim", 0) == 0:
        return operator.index(x)
    rows = logp.shape[0] if logp.dim() > 1 else 1
    ages = torch.as_tensor(x, device=logp.device).detach()
    if ages.shape != (rows,):
        raise ValueError(f"run.tokens(staleness=...) has shape {tuple(ages.shape)}: give one int, or ({rows},)")
    return ages


def _replayed(replay: Callable[[], Tensor], dim: int) -> Tensor:
    logp = replay()
    # One that is not packed alike is left as it is, for its shape to be told.
    return logp.unsqueeze(0) if dim == 1 and isinstance(logp, Tensor) and logp.dim() == 1 else logp
