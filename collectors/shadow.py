"""The shadow forward: the same tokens at the same weights, in the precision of the rollout engine.

It runs as an engine would: no gradient, no dropout, the rollout's dtype. Everything it touches (RNG state, train mode
of each module, buffers, autocast's cache) is as before when it is done, whether it succeeds or not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from seismograd.telemetry.forward_state import kept

Precision = Literal["bf16", "fp16"]
DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


def shadow_logp(model: nn.Module, replay: Callable[[], Tensor], precision: Precision) -> Tensor:
    """Log-probs of one micro-batch at the model's present weights, as a rollout engine of that precision gives them.

    Args:
        model: whose modules are put in evaluation mode meanwhile.
        replay: runs the micro-batch's forward and returns logp (B, T-1).
        precision: "bf16" or "fp16".

    Returns:
        (B, T-1) float32, detached.

    Raises:
        ValueError: the replay sets a precision of its own, so that the shadow's cannot be had.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    ran_in: list[torch.dtype | None] = []
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(_same_rng(device))
        stack.enter_context(_evaluating(model))
        stack.enter_context(kept(model))
        stack.enter_context(_precision(model, device, DTYPES[precision]))
        stack.enter_context(_watching_autocast(model, device, ran_in))
        meant = _autocast_dtype(device)
        logp = replay().detach().float()
    if any(dtype not in (meant, DTYPES[precision]) for dtype in ran_in):
        raise ValueError(
            f"run.tokens(replay=...) sets autocast itself, so that no {precision} forward can be run: leave autocast "
            "to the shadow, or set shadow= to the precision that the replay sets"
        )
    return logp


def _precision(model: nn.Module, device: torch.device, dtype: torch.dtype) -> AbstractContextManager[None]:
    """Autocast to the engine's dtype; where the weights already have it, nothing is cast at all.

    The cache is off: a weight that was cast without gradient must not be found by an enclosing autocast of the
        trainer's.
    """
    sizes: Counter[torch.dtype] = Counter()
    for p in model.parameters():
        sizes[p.dtype] += p.numel()
    same = bool(sizes) and sizes.most_common(1)[0][0] == dtype
    return torch.autocast(device.type, dtype=dtype, enabled=not same, cache_enabled=False)


def _autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast casts to here, or None where it is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


@contextmanager
def _watching_autocast(model: nn.Module, device: torch.device, seen: list[torch.dtype | None]) -> Iterator[None]:
    """Notes the precision in which the model's forward really runs."""
    owners = [m for m in model.modules() if next(m.parameters(recurse=False), None) is not None]
    # Not on the model alone: a replay may call its parts (a chunked head).
    handles = [m.register_forward_pre_hook(lambda *_: seen.append(_autocast_dtype(device))) for m in owners]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Every module out of train mode, then each back in the mode that it had (`model.train()` would set them all
    alike).
    """
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


def _same_rng(device: torch.device) -> AbstractContextManager[None]:
    if device.type == "cpu":
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device], device_type=device.type)
