"""What a training forward ran under besides its inputs and weights: random numbers and autocast.

A replay without them is another forward. Under attention dropout, a replay with fresh random numbers gets gradients
that are wrong by as much as they are long.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class ForwardState:
    """Taken right before a forward.

    Args:
        device: the model's.
        cpu_rng: the CPU generator's state.
        device_rng: the device generator's state, or None on a CPU.
        autocast: the dtype that autocast was casting to, or None where it was off.
    """

    device: torch.device
    cpu_rng: Tensor
    device_rng: Tensor | None
    autocast: torch.dtype | None

    @classmethod
    def take(cls, device: torch.device) -> ForwardState:
        """The present state. Changes nothing and waits for nothing: generators keep their state on the host."""
        kind = device.type
        return cls(
            device=device,
            cpu_rng=torch.get_rng_state(),
            device_rng=None if kind == "cpu" else torch.get_device_module(device).get_rng_state(device),
            autocast=torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
        )

    @contextmanager
    def restored(self, autocast: bool = True) -> Iterator[None]:
        """The same random numbers and the same autocast (or none); what was before is back afterwards."""
        kind = self.device.type
        cast = autocast and self.autocast is not None
        with ExitStack() as stack:
            stack.enter_context(
                torch.random.fork_rng(devices=[])
                if kind == "cpu"
                else torch.random.fork_rng(devices=[self.device], device_type=kind)
            )
            # Without its cache: a weight cast here must not be found by an autocast of the trainer's.
            stack.enter_context(
                torch.autocast(kind, dtype=self.autocast if cast else None, enabled=cast, cache_enabled=False)
            )
            torch.set_rng_state(self.cpu_rng)
            if self.device_rng is not None:
                torch.get_device_module(self.device).set_rng_state(self.device_rng, self.device)
            yield


@contextmanager
def kept(model: nn.Module) -> Iterator[None]:
    """What a replay may write is as before when the context ends: buffers (running statistics, routers' token counts),
    the random numbers of Python and NumPy, and .grad. Torch's random numbers are the caller's to keep.

    Within it no parameter has a .grad: the step's is set aside, uncopied, so that a replay of the user's that zeroes in
    place or runs a backward does not reach it.
    """
    before = [
        (module._buffers, key, buffer, buffer.detach().clone())
        for module in model.modules()
        for key, buffer in module._buffers.items()
        if buffer is not None
    ]
    gradients = [(p, p.grad) for p in model.parameters()]
    python, numpy = random.getstate(), np.random.get_state()
    try:
        for p, _ in gradients:
            p.grad = None
        yield
    finally:
        for p, gradient in gradients:
            p.grad = gradient
        random.setstate(python)
        np.random.set_state(numpy)
        for buffers, key, buffer, values in before:
            if buffers.get(key) is not buffer:  # the forward put another one in its place
                buffers[key] = buffer
            # Always: what writes through .data moves no version counter.
            with torch.inference_mode(buffer.is_inference()):
                buffer.data.copy_(values)
