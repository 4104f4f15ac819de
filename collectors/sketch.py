"""Inner products of gradients that are never held: a sketch of each, of a fixed size.

Every element of the gradient is added, with a random sign, to one of K buckets. Such sums keep inner products: the
expected product of two sketches is that of the vectors, with a standard deviation of about |a| |b| sqrt(2 / K), 0.14%
of their lengths at K = 10^6 (Charikar, Chen and Farach-Colton 2002, Finding frequent items in data streams; Weinberger
et al. 2009, arXiv:0902.2206, for inner products). Elements take the buckets in turn, so that a model of at most K
parameters has one for each, and its products are exact; K is a prime, so that no channel of a layer meets itself in one
bucket. Sketches are linear: the sum of two is that of the sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BUCKETS = 1_048_573


class Sketches:
    """Sketches of several vectors of one shape, given parameter by parameter.

    Args:
        parameters: whose gradients the vectors are, in an order that all ranks share.
        rows: vectors.
        buckets: K.
    """

    def __init__(self, parameters: Sequence[Tensor], rows: int, buckets: int = BUCKETS) -> None:
        sizes = [p.numel() for p in parameters]
        self._starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self._buckets = min(buckets, max(1, sum(sizes)))
        self._collide = sum(sizes) > self._buckets
        device = parameters[0].device
        self.values = torch.zeros(rows, self._buckets, device=device)
        self._signs = torch.Generator(device)

    @torch.no_grad()
    def add(self, row: int, parameter: int, gradient: Tensor) -> None:
        """Add one parameter's gradient to a vector; what has been given for it before adds up.

        Args:
            row: of the vector.
            parameter: position among the parameters.
            gradient: of the parameter's shape, any float dtype.
        """
        flat = gradient.detach().reshape(-1).to(self.values.device)
        self._signs.manual_seed(parameter)  # the same signs for each vector, on each rank
        start, done = self._starts[parameter], 0
        while done < len(flat):
            at = (start + done) % self._buckets
            piece = flat[done : done + self._buckets - at].float()
            if self._collide:
                signs = torch.randint(0, 2, piece.shape, generator=self._signs, device=piece.device, dtype=torch.int8)
                piece = piece * (2 * signs - 1)
            self.values[row, at : at + len(piece)] += piece
            done += len(piece)

    def clear(self, row: int) -> None:
        """Begin a vector anew."""
        self.values[row].zero_()

    def products(self) -> Tensor:
        """(rows, rows) float64, the inner products of all vectors with each other."""
        wide = self.values.double()
        return wide @ wide.T
