"""Arithmetic problems from reasoning-gym, with its own verifiers as the reward."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset

SETS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("products", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}),
    ("basic_arithmetic", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}),
    ("gcd", {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 20}),
)
"""Sets of reasoning-gym and their settings: easy enough for a model of 135M parameters to be right now and then."""

SYSTEM = "Reply with the answer only."

BREVITY = 0.1
"""Weight of the shaping term of `reward`."""

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def problems(size: int, seed: int, chat: bool) -> Dataset:
    """`size` problems, the sets taking turns.

    Args:
        size: number of problems.
        seed: of reasoning-gym's generators.
        chat: whether prompts are messages for a chat template or the bare question.

    Returns:
        Columns ``prompt`` (messages or text) and ``entry`` (JSON of the whole problem, for the verifier).
    """
    import reasoning_gym
    from datasets import Dataset

    each = -(-size // len(SETS))
    sets = [list(reasoning_gym.create_dataset(name, size=each, seed=seed, **config)) for name, config in SETS]
    entries = [entry for turn in zip(*sets, strict=True) for entry in turn][:size]
    return Dataset.from_list([{"prompt": _prompt(e["question"], chat), "entry": json.dumps(e)} for e in entries])


def reward(completions: list[Any], entry: list[str], **_: Any) -> list[float]:
    """The verifier's score of each completion, 0 to 1, plus a small shaping term.

    The verifier sees the last number of the completion, then the whole text, for which it gives partial credit where
    the answer stands in it, the less the longer the text; the better score counts.

    The shaping term, `BREVITY` over the number of words, is ours and no verifier's. It is there because a small model
    often fails all attempts at a problem: equal rewards are no gradient at all, and such steps would show nothing.
    """
    return [score(text(c), json.loads(e)) + _brevity(text(c)) for c, e in zip(completions, entry, strict=True)]


def score(answer: str, entry: dict[str, Any]) -> float:
    """The verifier's score of one answer, 0 to 1; see `reward`."""
    import reasoning_gym

    verify = reasoning_gym.get_score_answer_fn(entry["metadata"]["source_dataset"])
    numbers = _NUMBER.findall(answer)
    return max(float(verify(candidate, entry)) for candidate in (*numbers[-1:], answer.strip()))


def text(completion: Any) -> str:
    """A completion's text, whether it came as text or as messages."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def _brevity(answer: str) -> float:
    words = len(answer.split())
    return BREVITY / words if words else 0.0


def _prompt(question: str, chat: bool) -> Any:
    if not chat:
        return question
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
