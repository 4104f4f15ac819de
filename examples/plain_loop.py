"""seismograd in a plain PyTorch loop: a small policy learns to emit token 7, from rollouts that are a few steps old.

    python examples/plain_loop.py            # then: curl the address that it prints

Nothing but torch and seismograd is needed.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

from seismograd import ClipSpec, RunStore, watch

VOCABULARY, WIDTH, BATCH, LENGTH = 32, 64, 16, 12


class Policy(nn.Module):
    """A token and its position in, the next token's logits out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)])
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        """(B, T) int64 to (B, T, V) logits."""
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.lm_head(self.norm(x))

    def logp(self, input_ids: Tensor) -> Tensor:
        """(B, T) int64 to (B, T-1) log-probs of the tokens after the first."""
        logits = self(input_ids[:, :-1]).float()
        return torch.log_softmax(logits, -1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)


@torch.no_grad()
def rollout(policy: Policy) -> tuple[Tensor, Tensor, Tensor]:
    """What a BF16 rollout engine returns: (B, T) tokens, (B, T-1) their log-probs, (B,) rewards."""
    ids = torch.zeros(BATCH, 1, dtype=torch.int64)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(LENGTH):
            probabilities = policy(ids)[:, -1].float().softmax(-1)
            ids = torch.cat([ids, torch.multinomial(probabilities, 1)], dim=1)
        return ids, policy.logp(ids), (ids[:, 1:] == 7).float().mean(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps

    torch.manual_seed(0)
    model = Policy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    run = watch(model=model, optimizer=optimizer, prometheus=0, clip=ClipSpec(eps_low=0.2, eps_high=0.2))
    print(f"watching: {run.folder}, {run.prometheus_url}")
    for step in range(steps):
        if step % 2 == 0:  # each rollout serves two steps
            ids, rollout_logp, reward = rollout(model)
            advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
        with run.step():
            logp = model.logp(ids)
            run.tokens(
                logp=logp,
                rollout_logp=rollout_logp,
                advantage=advantage,
                input_ids=ids,
                staleness=step % 2,
                replay=lambda ids=ids: model.logp(ids),
            )
            ratio = torch.exp(logp - rollout_logp)
            a = advantage[:, None]
            loss = -torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a).mean()
            loss.backward()
            run.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
    run.close()

    assert run.store_path is not None
    with RunStore.read(run.store_path) as store:
        print(f"reward at the end: {reward.mean():.2f}")
        for name in ("alpha_abs_mean", "beta_abs_mean", "snr"):
            at, value = store.series(name)[-1]
            print(f"{name}: {value:.4g} (step {at})")
        print(f"spikes: {len(store.events('spike'))}")


if __name__ == "__main__":
    main()
