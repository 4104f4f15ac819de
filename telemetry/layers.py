"""Which layer and which module group a parameter belongs to, from its name alone.

The rule, for any nn.Module whose parameters are named by their path:

1. The layer is the first component of the path that is a whole number: ``model.layers.11.mlp.up_proj.weight`` lies in
   layer "11". Where a model has several such containers (an encoder and a decoder, a vision tower), their names are
   kept apart: "encoder.layers.0", "decoder.layers.0". LoRA's wrappers change neither number nor rule.
2. The group is the first of these whose words occur in what is left of the path:
   norm (norm, ln), attention (attn, attention), mlp (mlp, ffn, feed_forward, experts, moe, fc), embedding (embed, wte,
   wpe), head (lm_head, head, score, value), else "other".
3. Outside numbered layers, the layer is named after the group: "embedding", "norm" (the final one), "head", "other".

A weight that embedding and head share counts once, under the name that ``named_parameters()`` gives it: the
embedding's.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor, nn

_GROUPS = (
    ("norm", re.compile(r"norm|(^|[._])ln(_|\d|\.|$)")),
    ("attention", re.compile(r"attn|attention")),
    ("mlp", re.compile(r"mlp|ffn|feed_forward|expert|moe|(^|[._])fc")),
    ("embedding", re.compile(r"embed|wte|wpe")),
    ("head", re.compile(r"head|score|value")),
)
ALL = "all"


@dataclass(frozen=True)
class Place:
    """Where a parameter lies.

    Args:
        layer: depth index as text, or the name of what lies outside the numbered layers.
        group: norm, attention, mlp, embedding, head or other.
    """

    layer: str
    group: str


def places(names: Sequence[str]) -> list[Place]:
    """The place of each parameter, by the rule in this module's docstring."""
    split = [_split(name) for name in names]
    containers = {container for container, index, _ in split if index is not None}
    shared = _common_prefix(containers) if len(containers) > 1 else None
    found = []
    for container, index, rest in split:
        group = _group(rest)
        if index is None:
            found.append(Place(group, group))
        elif shared is None:
            found.append(Place(index, group))
        else:
            found.append(Place(".".join([*container[shared:], index]), group))
    return found


@dataclass(frozen=True)
class Grouping:
    """Sums per-parameter squares into the series of ``grad_norm{layer, group}``.

    Args:
        series: (layer, group) of each sum: first ("all", "all"), then each layer whole, then each layer's groups.
        layers: the layers' names, in the order of their sums, which follow the first.
        member: (P,) index of each parameter's (layer, group) sum.
        layer_of: (P,) index of each parameter's layer.
    """

    series: tuple[tuple[str, str], ...]
    layers: tuple[str, ...]
    member: NDArray[np.int64]
    layer_of: NDArray[np.int64]

    @classmethod
    def of(cls, found: Sequence[Place]) -> Grouping:
        """The grouping of parameters that lie in these places, in their order."""
        layers = {layer: i for i, layer in enumerate(dict.fromkeys(place.layer for place in found))}
        pairs = {place: i for i, place in enumerate(dict.fromkeys(found))}
        return cls(
            series=((ALL, ALL), *((layer, ALL) for layer in layers), *((place.layer, place.group) for place in pairs)),
            layers=tuple(layers),
            member=np.array([pairs[place] for place in found], dtype=np.int64),
            layer_of=np.array([layers[place.layer] for place in found], dtype=np.int64),
        )

    def norms(self, per_parameter: NDArray[np.float64], total: float) -> NDArray[np.float64]:
        """The norm of each of `series`, from per-parameter norms (P,) and the global norm."""
        with np.errstate(over="ignore", invalid="ignore"):
            squares = np.square(per_parameter)
        layers = np.bincount(self.layer_of, squares, minlength=len(self.layers))
        pairs = np.bincount(self.member, squares, minlength=len(self.series) - 1 - len(self.layers))
        return np.concatenate([[total], np.sqrt(layers), np.sqrt(pairs)])


class ModelMap:
    """Finds the grouping of any set of a model's parameters. Mixtures of experts give another set at every step.

    Args:
        model: whose parameters are placed; one that it does not have lies in layer "other".
    """

    _KEPT = 8  # groupings, the last used: a step has one set, or one for each of a few optimizers

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._places: dict[int, Place] = {}
        self._groupings: OrderedDict[tuple[int, ...], Grouping] = OrderedDict()

    def grouping(self, parameters: Sequence[Tensor]) -> Grouping:
        """The grouping of these parameters, in their order."""
        key = tuple(map(id, parameters))
        grouping = self._groupings.get(key)
        if grouping is None:
            if any(i not in self._places for i in key):  # the first call, or the trainer has made its model anew
                named = list(self._model.named_parameters())
                found = places([name for name, _ in named])
                self._places = {id(p): place for (_, p), place in zip(named, found, strict=True)}
            grouping = Grouping.of([self._places.get(i, Place("other", "other")) for i in key])
            self._groupings[key] = grouping
            if len(self._groupings) > self._KEPT:
                self._groupings.popitem(last=False)
        self._groupings.move_to_end(key)
        return grouping


def _split(name: str) -> tuple[tuple[str, ...], str | None, str]:
    """(path of the container, number in it, rest of the path); without a number the rest is the whole path."""
    parts = name.split(".")
    for i, part in enumerate(parts[:-1]):
        if part.isdigit():
            return tuple(parts[:i]), part, ".".join(parts[i + 1 :])
    return (), None, name


def _group(path: str) -> str:
    lowered = path.lower()
    return next((group for group, words in _GROUPS if words.search(lowered)), "other")


def _common_prefix(paths: Iterable[tuple[str, ...]]) -> int:
    """The number of leading components that all paths share."""
    columns = zip(*paths, strict=False)
    length = 0
    for column in columns:
        if len(set(column)) > 1:
            break
        length += 1
    return length
