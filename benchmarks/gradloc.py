"""GradLoc on the incident bank: does it find the token, does it name the kind, what does it cost?

python -m benchmarks.gradloc             # about half an hour; writes benchmarks/results/gradloc.md and .json
python -m benchmarks.gradloc --smollm2   # on a real language model as well
python -m benchmarks.gradloc --quick     # a few minutes, to see that it runs
python -m benchmarks.gradloc --only memory --only dormant    # these parts anew, the others as they are
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from benchmarks import dormant, memory
from benchmarks.bank import FAULTS, MODELS, Case, Spec, make, slow_specs, specs
from benchmarks.report import Finding, Parts, Report, table
from seismograd.gradloc import Bisection, Incident, ModelReplay, localize
from seismograd.gradloc.vectors import less, norm_of

INFLUENCE = 0.1  # of |G|: a planted token with less of it is none that a localisation has to name
TITLE = "GradLoc on the incident bank"
SIZES = {"4k": 8, "16k": 32, "64k": 128}  # sequences of 512 tokens in one micro-batch


@dataclass
class Tally:
    """What the bank's incidents came to."""

    incidents: int = 0
    right: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    influential: int = 0
    missed: list[str] = field(default_factory=list)
    named: int = 0
    innocent: list[str] = field(default_factory=list)
    finite: int = 0
    complete_at_once: int = 0
    methods: Counter[str] = field(default_factory=Counter)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few incidents: the figures mean little")
    parser.add_argument("--smollm2", action="store_true", help="also on SmolLM2-135M-Instruct (make demo installs it)")
    parser.add_argument("--only", action="append", choices=PARTS, help="measure this part anew, and leave the others")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    given = sys.argv[1:] if argv is None else list(argv)
    shown = [word for i, word in enumerate(given) if "--out" not in (word, given[i - 1] if i else "")]
    command = " ".join(["python -m benchmarks.gradloc", *shown])
    found = Parts.read(TITLE, args.out, "gradloc") if args.only else Parts(TITLE, {})
    for name in args.only or [part for part in PARTS if part != "smollm2" or args.smollm2]:
        report = Report(TITLE, command)
        if args.quick:
            report.notes.append(f"{name}: a quick run, too small for its figures to mean much.")
        PARTS[name](report, args.quick)
        found.parts[name] = report
    found.parts = {name: found.parts[name] for name in PARTS if name in found.parts}
    found.write(args.out, "gradloc")
    print(found.markdown())
    failed = [f.what for f in found.findings if f.passed is False]
    print(f"\n{'every target is met' if not failed else 'MISSED: ' + '; '.join(failed)}; written to {args.out}")


# -- does it find the token, and its kind ---------------------------------------------------------------------------


def bank(report: Report, chosen: Iterable[Spec], of: str) -> None:
    """Incidents of the bank, localised and held against their truth."""
    tally = Tally()
    for spec in chosen:
        case = make(spec)
        judge(case, localize(case.batches, case.model), tally)
        print(f"\r{tally.incidents} incidents", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    rows = [(fault, f"{tally.right[fault]} of {tally.seen[fault]}") for fault in FAULTS if tally.seen[fault]]
    report.tables.append(f"Verdicts by planted fault{of}:\n\n" + table(("fault", "right"), rows))
    found = tally.influential - len(tally.missed)
    right = sum(tally.right.values())
    honest = [name for name in tally.innocent if name.startswith(("honest", "too far"))]
    report.findings += [
        _share(f"planted tokens that |G| loses {INFLUENCE:.0%} without, named{of}", found, tally.influential, 1.0),
        _share(f"named tokens that are guilty{of}", tally.named - len(tally.innocent), tally.named, 0.95),
        _share(f"verdict right{of}", right, tally.incidents, 0.95),
        Finding(
            f"tokens named on steps without a guilty one{of}", "0", str(len(honest)), not honest, {"named": honest}
        ),
        _share(
            f"completeness within 5% at the first attempt, of incidents with finite gradients{of}",
            tally.complete_at_once, tally.finite, 0.95,
        ),
        Finding(f"methods that were believed{of}", "reported", _counts(tally.methods), None, dict(tally.methods)),
    ]  # fmt: skip
    for what, names in (("wrong verdict", tally.wrong), ("missed", tally.missed), ("innocent", tally.innocent)):
        report.notes += [f"{what}: {name}" for name in names[:20]]
    if of:
        return
    report.notes.append(
        f"{tally.incidents} incidents: {len(FAULTS)} faults at their sizes on {', '.join(MODELS)} (random weights, 4 "
        f"layers). A planted ratio without which |G| falls by less than {INFLUENCE:.0%} counts as an honest step: D is "
        "right then, and so is its own kind."
    )


def judge(case: Case, incident: Incident, tally: Tally) -> None:
    """Add one incident to the tally."""
    fault = case.name.split("/")[0]
    tally.incidents += 1
    tally.seen[fault] += 1
    influences = _influences(case)
    slight = case.truth.verdict == "A.1" and all(x < INFLUENCE for x in influences.values())
    allowed = {case.truth.verdict, "D"} if slight else {case.truth.verdict}
    tally.right[fault] += incident.verdict in allowed
    if incident.verdict not in allowed:
        tally.wrong.append(f"{case.name}: {incident.verdict}, {case.truth.verdict} was planted")
    named = {(c.micro_batch, c.row, c.position) for c in incident.culprits}
    for token, influence in influences.items():
        if influence >= INFLUENCE:
            tally.influential += 1
            if token not in named:
                tally.missed.append(f"{case.name}: {token}, influence {influence:.2f}")
    tally.named += len(named)
    tally.innocent += [f"{case.name}: {token}" for token in named if not case.truth.guilty(*token)]
    if case.truth.verdict == "N" and case.truth.where not in " ".join(incident.evidence):
        tally.wrong.append(f"{case.name}: the evidence does not name {case.truth.where}")
    tally.methods[incident.method] += 1
    if incident.verdict != "N":
        tally.finite += 1
        tally.complete_at_once += incident.attempts[0].believed


def _influences(case: Case) -> dict[tuple[int, int, int], float]:
    """1 - |G without it| / |G| of each planted token, by a backward of its whole micro-batch."""
    found: dict[tuple[int, int, int], float] = {}
    grads = [p.grad for p in case.model.parameters() if p.grad is not None]
    if case.truth.verdict not in ("A.1",) or not all(bool(g.isfinite().all()) for g in grads):
        return found
    norm = norm_of(grads)
    replay = ModelReplay(case.model, case.batches)
    for i, row, position in sorted(case.truth.tokens):
        weight = torch.zeros_like(case.batches[i].logp)
        whole = case.batches[i].loss_weight
        assert whole is not None
        weight[row, position - 1] = whole[row, position - 1]
        ((_, gradient),) = replay.backward(i, [{"logp": weight}])
        found[i, row, position] = 1 - norm_of(less(grads, gradient)) / norm
    return found


# -- when does a corrupted ratio show ---------------------------------------------------------------------------------


def curve(report: Report, seeds: int) -> None:
    """|G| over the same step's honest |G|, by the planted ratio and the advantage's sign, and the verdict."""
    rows = []
    for fault, sign in (("ratio", "negative"), ("silenced", "positive")):
        for ratio in (1e-3, 0.1, 3.0, 10.0, 100.0, 1e3, 1e5):
            quotients, verdicts = [], Counter[str]()
            for kind in MODELS:
                for seed in range(seeds):
                    honest = _norm(make(Spec("honest", kind, seed)))
                    case = make(Spec(fault, kind, seed, ratio))
                    quotients.append(_norm(case) / honest)
                    verdicts[localize(case.batches, case.model).verdict] += 1
            rows.append((sign, f"{ratio:g}", f"{statistics.median(quotients):.3g}", _counts(verdicts)))
    report.tables.append(
        "Detection apart from localisation: one rollout log-prob off by ln(ratio).\n\n"
        + table(("advantage", "ratio", "|G| / honest |G|, median", "verdicts"), rows)
    )


def _norm(case: Case) -> float:
    return norm_of([p.grad for p in case.model.parameters()])


# -- what it costs ----------------------------------------------------------------------------------------------------


def cost(report: Report, repeats: int, sizes: dict[str, int]) -> None:
    """Attribution, with and without verification, and bisection, against the step's own forward and backward."""
    rows, ratios = [], {}
    for name, sequences in sizes.items():
        case = make(Spec("ratio", "qwen3", 0, 1e4, micro_batches=1, rows=sequences, length=504))
        ways: dict[str, Callable[[], object]] = {
            "step": lambda case=case: _step(case),
            "attribution": lambda case=case: localize(case.batches, case.model, method="attribution", verified=0),
            "verified": lambda case=case: localize(case.batches, case.model, method="attribution", verified=3),
        }
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(repeats):
            for way, run in ways.items():  # interleaved
                times[way].append(_timed(run))
        quick = localize(case.batches, case.model, method="attribution", verified=0)
        start = time.perf_counter()
        slow = localize(case.batches, case.model, method="bisect", verified=0, bisection=Bisection.published())
        bisected = (time.perf_counter() - start) / statistics.median(times["step"])
        named = [(i.culprits[0].row, i.culprits[0].position) for i in (quick, slow) if i.culprits]
        assert len(named) == 2, "a method found nothing"
        over = {way: np.array(times[way]) / np.array(times["step"]) for way in ("attribution", "verified")}
        medians = {way: float(np.median(x)) for way, x in over.items()}
        ratios[name] = (medians["attribution"], medians["verified"], slow.passes / quick.passes, bisected)
        shown = [f"{medians[way]:.2f} [{x.min():.2f}, {x.max():.2f}]" for way, x in over.items()]
        same = "yes" if named[0] == named[1] else "NO"
        rows.append((name, *shown, f"{bisected:.1f}", f"{quick.passes:.0f}", f"{slow.passes:.0f}", same))
    head = ("tokens", "attribution / step", "top 3 verified", "bisection / step", "passes", "its passes", "same token")
    report.tables.append(
        f"Cost, one micro-batch, medians of {repeats} [range]; a forward or a backward of the step is one pass:\n\n"
        + table(head, rows)
    )
    first, last = next(iter(ratios.values())), next(reversed(ratios.values()))
    report.findings += [
        _most("attribution over a forward and backward of the step", [r[0] for r in ratios.values()], 1.0),
        _most("attribution and verification of the top 3", [r[1] for r in ratios.values()], 2.0),
        Finding(
            "passes of bisection over those of attribution", "at least 15 at each size",
            ", ".join(f"{r[2]:.1f}" for r in ratios.values()), min(r[2] for r in ratios.values()) >= 15,
            {name: r[2] for name, r in ratios.items()},
        ),
        Finding(
            "attribution / step from the smallest to the largest size", "does not grow (by more than 10%)",
            f"{first[0]:.2f} to {last[0]:.2f}; bisection's {first[3]:.1f} to {last[3]:.1f}", last[0] <= 1.1 * first[0],
            {name: r[0] for name, r in ratios.items()},
        ),
    ]  # fmt: skip


def _step(case: Case) -> None:
    """The step's own forward and backward, into gradients of its own."""
    (batch,) = case.batches
    assert batch.replay is not None
    assert batch.loss_weight is not None
    torch.autograd.grad((batch.replay() * batch.loss_weight).sum(), list(case.model.parameters()))


def _timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _share(what: str, part: int, whole: int, least: float) -> Finding:
    share = part / whole if whole else 1.0
    measured = f"{share:.1%} ({part} of {whole})"
    return Finding(what, f"at least {least:.0%}", measured, share >= least, {"part": part, "whole": whole})


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {n}" for name, n in counter.most_common())


def _most(what: str, values: Sequence[float], bound: float) -> Finding:
    measured = ", ".join(f"{x:.2f}" for x in values)
    return Finding(what, f"at most {bound:.1f} at each size", measured, max(values) <= bound, {"values": list(values)})


PARTS: dict[str, Callable[[Report, bool], None]] = {
    "bank": lambda report, quick: bank(report, specs(1 if quick else 3), ""),
    "smollm2": lambda report, _: bank(report, slow_specs(), ", SmolLM2-135M-Instruct"),
    "curve": lambda report, quick: curve(report, seeds=1 if quick else 4),
    "cost": lambda report, quick: cost(report, 1 if quick else 3, dict(list(SIZES.items())[: 1 if quick else 3])),
    "memory": lambda report, quick: memory.measure(report, repeats=1 if quick else 2),
    "dormant": lambda report, quick: dormant.measure(
        report, pairs=50 if quick else 1_500, times=200 if quick else 2_000
    ),
}
"""Each can be measured apart."""


if __name__ == "__main__":
    main()
