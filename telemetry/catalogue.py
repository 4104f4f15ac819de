"""The metric catalogue: every number that seismograd can emit, described once.

Sinks, boards, rules and docs/metrics.md all read this table, and a `Reading` whose name or labels are not in it
cannot be constructed. Adding a metric means adding one `MetricSpec` here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

PREFIX = "seismograd_"

Kind = Literal["gauge", "counter"]
Cost = Literal["free", "probe", "triggered"]
Reduce = Literal["token_mean", "sum", "max", "min", "same", "rank0"]


@dataclass(frozen=True)
class MetricSpec:
    """One metric.

    Args:
        name: without the prefix; counters end in ``_total``.
        unit: "nats", "seconds", "ratio" (0 to 1 or a quotient), "tokens", "steps", or "" for the loss's own unit.
        help: one sentence, shown by Prometheus, Grafana and docs/metrics.md.
        source: the formula, paper or document that the definition comes from.
        labels: label names, in the order in which they are shown.
        kind: "gauge", or "counter" (only ever grows within a run).
        reduce: how values of several ranks become one: ``token_mean`` is weighted by trained tokens, ``same`` is
            already identical on all ranks, ``rank0`` is rank 0's own.
        cost: ``free`` is known from what the trainer computes anyway; ``probe`` needs an extra forward, a backward or a
            pass over the weights, and is spaced by the overhead budget; ``triggered`` runs only after a spike.
    """

    name: str
    unit: str
    help: str
    source: str
    labels: tuple[str, ...] = ()
    kind: Kind = "gauge"
    reduce: Reduce = "token_mean"
    cost: Cost = "free"

    @property
    def prometheus_name(self) -> str:
        return PREFIX + self.name

    def wandb_key(self, labels: Mapping[str, str]) -> str:
        """``seismograd/name/value-of-label/...``, the label values in the order of `labels`."""
        return "/".join(["seismograd", self.name, *(labels[key] for key in self.labels)])


class Catalogue(Mapping[str, MetricSpec]):
    """The metrics by name, in the order of their definition."""

    def __init__(self, specs: tuple[MetricSpec, ...]) -> None:
        self._by_name = {spec.name: spec for spec in specs}
        if len(self._by_name) != len(specs):
            raise ValueError("the catalogue defines a metric twice")

    def __getitem__(self, name: str) -> MetricSpec:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)


_RATIO = "r_t = exp(logp_t - rollout_logp_t) = exp(alpha_t + beta_t), split by a shadow forward at the same weights"
_PPO = "Schulman et al. 2017, arXiv:1707.06347, eq. 7"
_KL = "J. Schulman, Approximating KL Divergence, http://joschu.net/blog/kl-approx.html"
_OWN = "seismograd"

CATALOGUE = Catalogue(
    (
        # -- the log-ratio and its two parts ----------------------------------------------------------------------
        MetricSpec(
            "alpha_abs_mean",
            "nats",
            "Mean |alpha| over trained tokens: what the policy changed since the rollout.",
            f"alpha_t = shadow_logp_t - rollout_logp_t; {_RATIO}",
            cost="probe",
        ),
        MetricSpec(
            "alpha_mean",
            "nats",
            "Signed mean of alpha over trained tokens.",
            f"alpha_t = shadow_logp_t - rollout_logp_t; {_RATIO}",
            cost="probe",
        ),
        MetricSpec(
            "alpha_floor",
            "nats",
            "Mean |alpha| over tokens of staleness 0, where the weights are those of the rollout: the engines' own "
            "difference. A jump means that weights did not reach the rollout engine.",
            "alpha_abs_mean over samples of staleness 0",
            cost="probe",
        ),
        MetricSpec(
            "beta_abs_mean",
            "nats",
            "Mean |beta| over trained tokens: the gap between the training forward and the rollout's precision.",
            f"beta_t = logp_t - shadow_logp_t; {_RATIO}",
            cost="probe",
        ),
        MetricSpec(
            "beta_mean",
            "nats",
            "Signed mean of beta over trained tokens.",
            "beta_t = logp_t - shadow_logp_t",
            cost="probe",
        ),
        MetricSpec(
            "beta_std",
            "nats",
            "Standard deviation of beta over trained tokens.",
            "beta_t = logp_t - shadow_logp_t",
            cost="probe",
        ),
        MetricSpec(
            "beta_abs_max",
            "nats",
            "Largest |beta| of the step.",
            "beta_t = logp_t - shadow_logp_t",
            reduce="max",
            cost="probe",
        ),
        MetricSpec(
            "beta_advantage_correlation",
            "ratio",
            "Pearson correlation of beta with the advantage over trained tokens: away from 0, the precision gap "
            "biases the gradient.",
            "corr(beta_t, A_t)",
            cost="probe",
        ),
        MetricSpec(
            "beta_abs_mean_by_rarity",
            "nats",
            "Mean |beta| of common (rollout log-prob above -5), uncommon (-5 to -20) and rare (below -20) tokens.",
            "bins of rollout_logp at -5 and -20; of logp where the rollout gave none",
            labels=("rarity",),
            cost="probe",
        ),
        MetricSpec(
            "snr",
            "ratio",
            "mean|alpha| / mean|beta|: below 1 the ratio is mostly precision noise. Absent where beta is 0.",
            "mean|alpha| / max(mean|beta|, 1e-12)",
            cost="probe",
        ),
        MetricSpec(
            "kl",
            "nats",
            "KL of the rollout policy to the trained policy, per token, by Schulman's k1 and k3 estimators.",
            f"k1 = -log r, k3 = r - 1 - log r, tokens sampled from the rollout policy; {_KL}",
            labels=("estimator",),
        ),
        MetricSpec(
            "log_ratio",
            "nats",
            "Unclamped log-ratio of a token, logp - rollout_logp: mean, std, min, max and abs_max over the step.",
            "log r_t, without the clamp at 20 that losses apply",
            labels=("stat",),
        ),
        MetricSpec(
            "sequence_log_ratio",
            "nats",
            "Log-ratio summed over a sequence's trained tokens: mean, std, min, max and abs_max over the step.",
            "sum_t log r_t, unclamped; the ratio of MIS (Liu et al. 2025, When Speed Kills Stability)",
            labels=("stat",),
        ),
        MetricSpec(
            "sequence_mean_log_ratio",
            "nats",
            "Mean log-ratio of a sequence's trained tokens, the logarithm of GSPO's ratio: mean, std, min, max and "
            "abs_max over the step.",
            "log s_i = 1/|y_i| sum_t log r_t, unclamped; Zheng et al. 2025, arXiv:2507.18071, eq. 7",
            labels=("stat",),
        ),
        MetricSpec(
            "effective_sample_size_ratio",
            "ratio",
            "Effective sample size of the importance ratios over their number, by token and by sequence: 1 where all "
            "weigh the same, 1/n where one has all the weight.",
            "(sum w)^2 / (n sum w^2), w = r_t or exp(sum_t log r_t); Kish 1965, Survey Sampling",
            labels=("level",),
        ),
        # -- clipping ---------------------------------------------------------------------------------------------
        MetricSpec(
            "clip_fraction",
            "ratio",
            "Share of trained tokens in each cell: legitimate (the actual and the clean ratio clip), phantom (only the "
            "actual one), hidden (only the clean one), open (neither).",
            "taken(r) beside taken(exp(log r - beta)), taken: (r > 1+eps_high and A > 0) or (r < 1-eps_low and A < 0)",
            labels=("cell", "ratio"),
            cost="probe",
        ),
        MetricSpec(
            "clip_region_fraction",
            "ratio",
            "The same cells by region only, whatever the advantage's sign: what most published figures count.",
            f"r outside [1-eps_low, 1+eps_high]; {_PPO}",
            labels=("cell", "ratio"),
            cost="probe",
        ),
        MetricSpec(
            "gradient_taken_fraction",
            "ratio",
            "Share of completion tokens whose policy gradient was taken away, by reason: clip, importance (mask of the "
            "importance ratio), tool, off_policy, entropy, zero_advantage.",
            f"the loss's own formula on its own inputs; {_PPO}; TRL GRPOTrainer",
            labels=("reason",),
        ),
        MetricSpec(
            "sequence_clip_fraction",
            "ratio",
            "Share of sequences that a clip of whole sequences takes the gradient of: the run's own (bounds=own) where "
            "it has one, and GSPO's published one (bounds=gspo), as it would.",
            "taken(exp of the mean or sum of log r_t); gspo: 3e-4 below, 4e-4 above, arXiv:2507.18071, 5.1",
            labels=("bounds", "ratio"),
        ),
        MetricSpec(
            "surrogate_objective",
            "",
            "The clipped surrogate objective, mean over trained tokens of min(r A, clip(r) A): what the policy's loss "
            "maximises, before normalisation and other terms.",
            f"min(r_t A_t, clip(r_t, 1-eps_low, 1+eps_high) A_t); {_PPO}",
            labels=("ratio",),
        ),
        # -- the loss's weight on each token ----------------------------------------------------------------------
        MetricSpec(
            "loss_weight",
            "",
            "dL/dlogp of the trainer's own backward, summed over nothing: abs_max, l2 (square root of the sum of "
            "squares) and abs_mean over trained tokens.",
            "w_t = dL/dlogp_t, caught by a tensor hook on the per-token log-probabilities",
            labels=("stat",),
            reduce="max",
        ),
        MetricSpec(
            "sequence_loss_weight",
            "nats",
            "Largest |sum_t w_t * logp_t| of a sequence: one sequence's pull on the loss.",
            "max over sequences of |sum_t dL/dlogp_t * logp_t|",
            reduce="max",
        ),
        MetricSpec("trained_tokens", "tokens", "Trained tokens in the step.", "sum of the mask", reduce="sum"),
        # -- gradients --------------------------------------------------------------------------------------------
        MetricSpec(
            "grad_norm",
            "",
            'L2 norm of the gradient before clipping, by layer and module group; layer="all" is the global norm.',
            "sqrt(sum of squares) of the per-parameter norms that the clip takes",
            labels=("layer", "group"),
            reduce="same",
        ),
        MetricSpec(
            "layer_proportion",
            "ratio",
            "A layer's norm over the geometric mean of the other layers' norms in the same step.",
            "rho_l = |g_l| / exp(mean_{m != l} log |g_m|)",
            labels=("layer",),
            reduce="same",
        ),
        MetricSpec(
            "heterogeneity",
            "ratio",
            "The largest layer proportion of the step over its own usual value (its running median).",
            "max_l rho_l / median(rho_l)",
            reduce="same",
        ),
        MetricSpec(
            "nonfinite_total",
            "",
            "Non-finite values seen, by place: tokens in logp, rollout_logp, shadow_logp, loss_weight and advantage, "
            "parameters in gradient (in gradient_overflow where the trainer scales its loss and expects them).",
            "not isfinite",
            labels=("where",),
            kind="counter",
            reduce="sum",
        ),
        MetricSpec(
            "zero_gradient_steps_total",
            "steps",
            "Steps whose gradient was exactly 0, as when all rewards of each group are equal.",
            "|G| == 0",
            kind="counter",
            reduce="same",
        ),
        MetricSpec(
            "gradient_cosine",
            "ratio",
            "Cosine of the step's gradient with the clean REINFORCE gradient, of trained tokens with their advantages "
            "at weight 1: what clipping, the gap of precision, importance weights and further terms turn away. Compare "
            "it with gradient_cosine_floor.",
            "G . c / (|G| |c|), G before clipping, c = grad of -1/N sum_t A_t logp_t; docs/probes.md",
            reduce="same",
            cost="probe",
        ),
        MetricSpec(
            "gradient_cosine_floor",
            "ratio",
            "Cosine of the clean REINFORCE gradients of two halves of the step: how well the step agrees with itself.",
            "c1 . c2 / (|c1| |c2|), c = c1 + c2, sequences in turn; docs/probes.md",
            reduce="same",
            cost="probe",
        ),
        MetricSpec(
            "gradient_share",
            "ratio",
            "Shares of the gradient's squared norm, which add up to 1: signal (along the clean gradient, and common to "
            "two halves of the step), noise (along it, of this step's sampling alone; both are estimates and may leave "
            "0 to 1), distortion (not along it: clipping, precision, further terms).",
            "cos^2 s, cos^2 (1 - s), 1 - cos^2; s = c1 . c2 / (f1 f2 |c|^2) after McCandlish et al. 2018, "
            "arXiv:1812.06162, A.1; docs/probes.md",
            labels=("part",),
            reduce="same",
            cost="probe",
        ),
        # -- explained spikes -------------------------------------------------------------------------------------
        MetricSpec(
            "incidents_total",
            "",
            "Gradient spikes that GradLoc has explained, by verdict: A.1 token mismatch, A.2 sequence mismatch, B "
            "layer heterogeneity, W weight outlier, N non-finite, S silenced, D diffuse.",
            "docs/gradloc.md",
            labels=("verdict",),
            kind="counter",
            reduce="same",
            cost="triggered",
        ),
        MetricSpec(
            "gradloc_seconds",
            "seconds",
            "Wall-clock time that the last localisation took.",
            _OWN,
            reduce="max",
            cost="triggered",
        ),
        MetricSpec(
            "gradloc_completeness_ratio",
            "ratio",
            "Sum of all tokens' shares of the gradient norm over what it should be, in the last localisation.",
            "sum_t w_t (d logp_t / d theta) . G / |G|^2, docs/gradloc.md",
            reduce="same",
            cost="triggered",
        ),
        # -- controls ---------------------------------------------------------------------------------------------
        MetricSpec(
            "control_state",
            "",
            "State of each control: 0 off, 1 observing, 2 armed, 3 on.",
            "docs/controls.md",
            labels=("control",),
            reduce="rank0",
        ),
        MetricSpec(
            "layerclip_scale",
            "ratio",
            "What LayerClip multiplied each layer's gradient by, or would have where it is not on; 1: left alone, 0: "
            "the step was skipped.",
            "level / |g| beyond the threshold, docs/controls.md",
            labels=("layer",),
            reduce="same",
        ),
        MetricSpec(
            "control_effect_fraction",
            "ratio",
            "Share of trained tokens that each control of ratios would change at its default bounds: tis caps, icepop "
            "leaves out, mis_mean and mis_sum leave out with their sequences.",
            "docs/controls.md",
            labels=("control",),
        ),
        # -- what reached the engine ------------------------------------------------------------------------------
        MetricSpec(
            "deployed_improvement",
            "nats",
            "Mean over trained tokens of (shadow log-prob after the step - before) * sign(advantage): whether the step "
            "moved the policy, at the rollout's precision, the way that its advantages asked.",
            "mean((shadow_logp_after - shadow_logp_before) * sign(A))",
            cost="probe",
        ),
        MetricSpec(
            "weights_changed_ratio",
            "ratio",
            "Share of a layer's trained weights whose value in the rollout's precision (BF16 by default) the step "
            'changed; layer="all" is the whole model. Where it is small, alpha cannot grow.',
            "bits before != bits after, of a sample of 2^18 weights; after Miahi and Belilovsky 2026, arXiv:2602.03839",
            labels=("layer",),
            reduce="rank0",
            cost="probe",
        ),
        MetricSpec(
            "weights_changed_since_sync_ratio",
            "ratio",
            "The same against the weights that the newest samples were generated with, this step's change included: "
            "what the next sync would bring.",
            "of the step that is as many steps back as the least staleness, where that one was probed too",
            labels=("layer",),
            reduce="rank0",
            cost="probe",
        ),
        # -- the trainer's own ------------------------------------------------------------------------------------
        MetricSpec(
            "trainer_metric",
            "",
            "What the trainer logs itself, by its own name.",
            "the trainer's on_log callback",
            labels=("name",),
            reduce="rank0",
        ),
        # -- detection --------------------------------------------------------------------------------------------
        MetricSpec(
            "spikes_total",
            "",
            "Spikes that the rule table found, by signal.",
            "docs/detection.md",
            labels=("signal",),
            kind="counter",
            reduce="rank0",
        ),
        # -- the run and its own cost -----------------------------------------------------------------------------
        MetricSpec("step", "steps", "Optimizer steps done.", "the trainer's global step", reduce="rank0"),
        MetricSpec("step_seconds", "seconds", "Wall-clock time of the step.", "time.perf_counter", reduce="max"),
        MetricSpec(
            "hook_seconds",
            "seconds",
            "Time spent in seismograd's own code for the last step, by part, in the training thread and in its own.",
            "time.thread_time of the thread that ran it",
            labels=("part",),
            reduce="max",
        ),
        MetricSpec(
            "overhead_ratio",
            "ratio",
            "All hook seconds since the start over all step seconds since the start.",
            "sum(hook_seconds) / sum(step_seconds)",
            reduce="max",
        ),
        MetricSpec(
            "probe_age_steps", "steps", "Steps since a probe last ran.", _OWN, labels=("probe",), reduce="rank0"
        ),
        MetricSpec(
            "probe_spacing_steps",
            "steps",
            "Steps from one run of a probe to the next: as set, or what its measured cost and its part of the overhead "
            "budget come to. Rank 0 decides, and all ranks do the same.",
            "mean seconds of a run / (part of the budget * mean seconds of a step), at least 1",
            labels=("probe",),
            reduce="rank0",
        ),
        MetricSpec(
            "dropped_readings_total",
            "",
            "Readings that a full queue dropped, each recorded as a gap.",
            _OWN,
            kind="counter",
            reduce="sum",
        ),
        MetricSpec(
            "faults_total",
            "",
            "Faults of seismograd's own code, by part; none of them reaches the training loop.",
            _OWN,
            labels=("part",),
            kind="counter",
            reduce="sum",
        ),
        MetricSpec(
            "last_step_timestamp_seconds", "seconds", "Unix time at which the last step ended.", _OWN, reduce="max"
        ),
    )
)
