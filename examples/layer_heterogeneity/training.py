"""A training run in which a shallow layer explodes now and then: some tokens' embeddings have collapsed.

A vocabulary has tokens that training has hardly seen, and their embeddings lie near zero (Land and Bartolo,
arXiv:2405.05417). When one comes up, the residual stream starts at nothing, the first normalisation divides by it, and
the gradient of the embedding is hundreds of times its usual size; that of the other layers is as ever. Nothing is
multiplied by hand.

The task is a language of 32 words in which each word depends on the two before it. Rotary or other relative positions
add nothing to the residual stream; here a learnt bias by distance does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.peers import Clip
from seismograd.telemetry.layers import ModelMap
from seismograd.telemetry.norms import take_norms

WORDS, RARE = 32, 224  # of the language, and tokens that hardly ever occur
ROWS, LENGTH = 8, 16  # of a batch
WIDTH, HEADS, LAYERS = 48, 4, 6
COLLAPSED = 1e-4  # of a usual embedding
SICK = "embedding"
EVERY = 20  # steps between two looks at the loss

Array = NDArray[np.float64]


class Block(nn.Module):
    """Attention and MLP, each behind an RMSNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.attn_norm, self.mlp_norm = (nn.RMSNorm(WIDTH, eps=1e-6) for _ in range(2))
        self.attn_in, self.attn_out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.attn_distance = nn.Parameter(torch.zeros(HEADS, LENGTH))
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        )

    def forward(self, x: Tensor, distance: Tensor, mask: Tensor) -> Tensor:
        """(B, T, WIDTH) to the same; `distance` and `mask` (T, T)."""
        rows, length, _ = x.shape
        q, k, v = self.attn_in(self.attn_norm(x)).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        read = F.scaled_dot_product_attention(q, k, v, attn_mask=self.attn_distance[:, distance] + mask)
        x = x + self.attn_out(read.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    """A small transformer. Embeddings are N(0, 1), as ``nn.Embedding`` makes them.

    Args:
        collapsed: what the rare tokens' embeddings are multiplied by; 1 makes them healthy.
    """

    def __init__(self, collapsed: float = COLLAPSED) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS + RARE, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.RMSNorm(WIDTH, eps=1e-6), nn.Linear(WIDTH, WORDS + RARE, bias=False)
        with torch.no_grad():
            self.embed.weight[WORDS:] *= collapsed
        at = torch.arange(LENGTH)
        apart = at[:, None] - at[None]
        self.register_buffer("distance", apart.clamp_min(0))
        self.register_buffer("mask", torch.where(apart < 0, -torch.inf, 0.0))

    def forward(self, ids: Tensor) -> Tensor:
        """Mean negative log-likelihood, nats, of (B, LENGTH + 1) token ids after the first."""
        x = self.embed(ids[:, :-1])
        for layer in self.layers:
            x = layer(x, self.distance, self.mask)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids[:, 1:].flatten())


@dataclass(frozen=True)
class Language:
    """p(word | the two before it) ~ exp(2 (A[before] + C[before that]))."""

    odds: Tensor

    @classmethod
    def of(cls, seed: int) -> Language:
        g = torch.Generator().manual_seed(seed)
        first, second = (torch.randn(WORDS, WORDS, generator=g) for _ in range(2))
        return cls(torch.softmax(2 * (first[:, None] + second[None]), -1))

    @property
    def entropy(self) -> float:
        """Nats a word, where all pairs are as frequent."""
        return float(-(self.odds * self.odds.log()).sum(-1).mean())

    def sentences(self, rows: int, g: torch.Generator) -> Tensor:
        """(rows, LENGTH + 1) ids."""
        words = [torch.randint(WORDS, (rows,), generator=g) for _ in range(2)]
        for _ in range(LENGTH - 1):
            words.append(torch.multinomial(self.odds[words[-1], words[-2]], 1, generator=g)[:, 0])
        return torch.stack(words, 1)

    def batches(self, seed: int, setting: Setting) -> Iterator[Tensor]:
        """Without end; of some, one word is a rare token."""
        g = torch.Generator().manual_seed(seed)
        for step in count():
            ids = self.sentences(ROWS, g)
            row, at, token = (int(torch.randint(n, (), generator=g)) for n in (ROWS, LENGTH, RARE))
            if float(torch.rand((), generator=g)) < setting.rate and step >= setting.after:
                ids[row, at] = WORDS + token
            yield ids


@dataclass(frozen=True)
class Setting:
    """What all arms of an experiment share.

    Args:
        optimizer: SGD with momentum 0.9, or AdamW.
        lr: learning rate.
        max_norm: of the global clip.
        rate: share of the steps whose batch has a rare token in it.
        after: steps before the first of them.
        steps: of a run.
    """

    optimizer: Literal["SGD", "AdamW"]
    lr: float
    max_norm: float = 2.0
    rate: float = 0.25
    after: int = 30
    steps: int = 280

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.optimizer == "SGD":
            return torch.optim.SGD(model.parameters(), lr=self.lr, momentum=0.9)
        return torch.optim.AdamW(model.parameters(), lr=self.lr, weight_decay=0.01)


@dataclass(frozen=True)
class Trace:
    """One run.

    Args:
        layers: L names.
        loss: (steps // EVERY,) held-out loss, nats.
        before, after: (steps, L) gradient norms, as the backward gave them and as the optimizer got them.
        sick: (steps,) whether a token with a collapsed embedding was in the batch.
        honest: (steps,) whether no rare token was. One that has come up before is neither: its embedding has moved.
        clipped: (steps,) whether the arm's own rule clipped anything.
    """

    layers: tuple[str, ...]
    loss: Array
    before: Array
    after: Array
    sick: NDArray[np.bool_]
    honest: NDArray[np.bool_]
    clipped: NDArray[np.bool_]

    @property
    def healthy(self) -> NDArray[np.bool_]:
        """(L,) all layers but the one that explodes."""
        return np.array([layer != SICK for layer in self.layers])

    def summary(self, max_norm: float) -> dict[str, Any]:
        """What the page is made of, rounded.

        Args:
            max_norm: of the global clip that the healthy layers' update is held against.
        """
        healthy = self.before[:, self.healthy]
        scale = np.median(self.after[:, self.healthy] / healthy, axis=1)
        alone = np.minimum(1, max_norm / np.sqrt(np.square(healthy).sum(axis=1)))
        exploded = self.before[:, ~self.healthy][:, 0] / np.median(self.before[self.honest][:, ~self.healthy])
        return {
            "loss": self.loss.round(4).tolist(),
            "sick": np.flatnonzero(self.sick).tolist(),
            "honest": np.flatnonzero(self.honest).tolist(),
            "scale": scale.round(4).tolist(),
            "kept": (scale / alone).round(4).tolist(),
            "exploded": exploded.round(2).tolist(),
            "clipped": np.flatnonzero(self.clipped).tolist(),
        }


def run(setting: Setting, seed: int, arm: Callable[[nn.Module], Clip], collapsed: float = COLLAPSED) -> Trace:
    """Train. Model, language and batches are the seed's, whatever the arm."""
    torch.manual_seed(seed)
    model, language = Model(collapsed), Language.of(seed)
    held_out = language.sentences(128, torch.Generator().manual_seed(1000 + seed))
    clip, optimizer, measure = arm(model), setting.optimizer_of(model), _Measure(model)
    loss: list[float] = []
    before, after, sick, honest, clipped = [], [], [], [], []
    for step, ids in zip(range(1, setting.steps + 1), language.batches(2000 + seed, setting), strict=False):
        sick.append(_collapsed(model, ids))
        honest.append(int(ids[:, :-1].max()) < WORDS)
        optimizer.zero_grad()
        model(ids).backward()
        before.append(measure())
        clipped.append(min(clip.clip_(model)) < 1)
        after.append(measure())
        optimizer.step()
        if step % EVERY == 0:
            with torch.no_grad():
                loss.append(float(model(held_out)))
    return Trace(measure.layers, *map(np.array, (loss, before, after, sick, honest, clipped)))


@torch.no_grad()
def _collapsed(model: Model, ids: Tensor) -> bool:
    """Whether an input of the batch has less than a hundredth of a usual embedding."""
    sizes = model.embed.weight[ids[:, :-1].unique()].norm(dim=1)
    return bool((sizes < 0.01 * sizes.median()).any())


class _Measure:
    """The gradient norm of each layer, now."""

    layers: tuple[str, ...] = ()

    def __init__(self, model: nn.Module) -> None:
        self._map, self._parameters = ModelMap(model), list(model.parameters())

    def __call__(self) -> Any:
        norms = take_norms(self._parameters)
        assert norms is not None
        grouping = self._map.grouping(norms.parameters)
        self.layers = grouping.layers
        return grouping.norms(norms.per_parameter.double().numpy(), 0.0)[1 : 1 + len(grouping.layers)]
