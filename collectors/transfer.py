"""The one transfer of a step from the device to the host.

Everything that the step needs on the host (norms, token columns) is laid into one flat float32 buffer on the device and
copied at once: one synchronisation a step, in the clip, where most trainers have one of their own. On a CPU it is a
    copy.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Host = NDArray[np.float32]


class Transfer:
    """Collects named tensors, then brings them over together."""

    def __init__(self) -> None:
        self._tensors: dict[Hashable, Tensor] = {}

    def add(self, key: Hashable, tensor: Tensor) -> None:
        """Lay a tensor of any shape and dtype in; nothing is computed or copied yet."""
        self._tensors[key] = tensor

    @torch.no_grad()
    def fetch(self) -> dict[Hashable, Host]:
        """All tensors as float32 arrays of their own shapes, by one device-to-host copy."""
        if not self._tensors:
            return {}
        tensors = self._tensors
        device = next(iter(tensors.values())).device
        flat = torch.cat([t.detach().to(device, torch.float32).reshape(-1) for t in tensors.values()])
        host = flat.cpu().numpy()
        found: dict[Hashable, Host] = {}
        start = 0
        for key, tensor in tensors.items():
            found[key] = host[start : start + tensor.numel()].reshape(tuple(tensor.shape))
            start += tensor.numel()
        return found
