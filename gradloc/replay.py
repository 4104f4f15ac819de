"""Running a step's micro-batches again: exactly, and without a trace.

`Replay` is what the methods of this room ask for; `ModelReplay` is it for a model and the micro-batches' own
``TokenBatch.replay``. Nothing here changes .grad, and what is moved is put back from a copy, since adding and
subtracting a step does not bring back the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from seismograd.gradloc.tokens import Floats
from seismograd.gradloc.vectors import Gradient, along, norms_of
from seismograd.telemetry.forward_state import kept
from seismograd.telemetry.patching import patched
from seismograd.telemetry.records import TokenBatch

LOGP = "logp"


class Receiver(Protocol):
    """Takes gradients parameter by parameter, as a backward makes them, so that no whole one has to be held."""

    def accepts(self, logp: Tensor) -> bool:
        """Whether to go on, from the replayed log-probs, (B, T-1) or (R, T-1), before any backward."""

    def take(self, weighting: int, parameter: int, gradient: Tensor) -> None:
        """The gradient of one parameter under one of the weightings; it is not to be kept."""

    def restart(self) -> None:
        """The backward of the first weighting broke off, and begins again."""


class Replay(Protocol):
    """The step's forwards, run again.

    Attributes:
        parameters: the trained ones that have a gradient, P of them.
        names: (P,) their names in the model.
        gradient: (P,) the step's own gradient G.
        precise: whether the forward computes in float32, so that rounding hides nothing.
        rounds: forwards that a pass over all micro-batches takes; those beyond the last micro-batch only keep step with
            the other ranks.
        joint: whether a backward's gradient is that of all ranks together, so that all run the same backwards.
    """

    parameters: Sequence[Tensor]
    names: Sequence[str]
    gradient: Sequence[Tensor]
    precise: bool
    rounds: int
    joint: bool

    def forward(self, i: int) -> Mapping[str, Tensor]:
        """The outputs of micro-batch `i` at the parameters' present values, under its own random numbers and autocast:
        "logp" (B, T-1), and those of ``TokenBatch.others`` that have a weight in the loss.
        """

    def backward(
        self,
        i: int,
        weights: Sequence[Mapping[str, Tensor]],
        rows: Sequence[int] | None = None,
        into: Receiver | None = None,
    ) -> Iterator[tuple[Tensor, Gradient]]:
        """For each of the weightings of the outputs: logp (B, T-1) as replayed, and sum(weight * output)'s gradient.

        Args:
            i: the micro-batch.
            weights: by output, of the shapes of the outputs.
            rows: only these are needed, and `by_rows(i)` holds: weights and logp are (R, T-1) then.
            into: takes the gradients, which come empty then; nothing comes where it does not accept the log-probs. Not
                where the replay is `joint`.
        """

    def by_rows(self, i: int) -> bool:
        """Whether rows of micro-batch `i` can be replayed alone."""

    def norms(self, gradient: Iterable[Tensor | None]) -> Floats:
        """(P,) L2 norm of each parameter's gradient, 0 where it has none."""

    def along(self, gradient: Sequence[Tensor | None], norm: float) -> float:
        """g . G / norm."""

    def kept(self) -> AbstractContextManager[None]:
        """Everything that a forward may change is as before when the context ends."""

    def movable(self) -> AbstractContextManager[Callable[[float], None]]:
        """A function that sets the parameters to theta + distance * G; theta is back when the context ends."""

    def first_nonfinite(self, i: int | None) -> str | None:
        """Name of the first module in micro-batch `i`'s forward whose output is not finite though its inputs are."""

    def dual(self) -> AbstractContextManager[None]:
        """Within it, forwards carry the derivative along G (``torch.autograd.forward_ad``)."""


class ModelReplay:
    """Replays through ``TokenBatch.replay``.

    Args:
        model: whose forward the micro-batches' replays run.
        batches: of the step.

    Raises:
        ValueError: no parameter has a gradient, or a micro-batch has no replay.
    """

    joint = False

    def __init__(self, model: nn.Module, batches: Sequence[TokenBatch]) -> None:
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad and p.grad is not None]
        if not named:
            raise ValueError("no parameter has a gradient")
        if any(p.grad is not None and p.grad.is_sparse for _, p in named):
            raise ValueError("a parameter has a sparse gradient")
        if any(batch.replay is None for batch in batches):
            raise ValueError("a micro-batch has no replay: give run.tokens(replay=...)")
        self._model, self._batches = model, batches
        self.names: Sequence[str] = [n for n, _ in named]
        self.parameters: Sequence[Tensor] = [p for _, p in named]
        self.gradient: Sequence[Tensor] = [p.grad for _, p in named]  # type: ignore[misc]
        self.precise = all(p.element_size() >= 4 for p in model.parameters()) and not any(
            batch.state is not None and batch.state.autocast is not None for batch in batches
        )
        self.rounds = len(batches)
        self._wide = False  # float32 compute, whatever the training's is
        self._set_aside = False  # reentrant checkpointing refuses torch.autograd.grad

    def norms(self, gradient: Iterable[Tensor | None]) -> Floats:
        return norms_of(gradient)

    def along(self, gradient: Sequence[Tensor | None], norm: float) -> float:
        return along(gradient, self.gradient, norm)

    def by_rows(self, i: int) -> bool:
        return self._batches[i].replay_rows is not None and not self._batches[i].others

    def forward(self, i: int, rows: Sequence[int] | None = None) -> Mapping[str, Tensor]:
        batch = self._batches[i]
        with ExitStack() as stack:
            # A compiled model would compile anew for each kind of replay, up to the limit that training needs too.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            if isinstance(self._model, DistributedDataParallel):
                # Its own forward broadcasts buffers and prepares for a reduction, and has no business in a replay.
                stack.enter_context(patched(self._model, "forward", self._model.module.__call__))
            if batch.state is not None:
                stack.enter_context(batch.state.restored(autocast=not self._wide))
            if rows is not None:
                assert batch.replay_rows is not None
                return batch.replay_rows(torch.tensor(rows, device=batch.logp.device))
            if batch.replay_all is not None:
                return batch.replay_all()
            return {LOGP: batch.replayed()}

    def backward(
        self,
        i: int,
        weights: Sequence[Mapping[str, Tensor]],
        rows: Sequence[int] | None = None,
        into: Receiver | None = None,
    ) -> Iterator[tuple[Tensor, Gradient]]:
        if not self._set_aside:
            try:
                yield from self._backward_together(i, weights, rows, into)
                return
            except _Reentrant:
                self._set_aside = True
                if into is not None:
                    into.restart()
        for position, weight in enumerate(weights):
            found = self._backward_alone(i, weight, rows, position, into)
            if found is None:
                return
            yield found

    def _backward_together(
        self, i: int, weights: Sequence[Mapping[str, Tensor]], rows: Sequence[int] | None, into: Receiver | None
    ) -> Iterator[tuple[Tensor, Gradient]]:
        """From one forward."""
        with torch.enable_grad():
            outputs = self.forward(i, rows)
            logp = outputs[LOGP].detach()
            if into is not None and not into.accepts(logp):
                return
            losses = [loss_of(outputs, weight) for weight in weights]
        del outputs
        for position in range(len(losses)):
            last = position == len(weights) - 1
            try:
                with self._passed_on(position, into):
                    found = torch.autograd.grad(
                        losses[position], list(self.parameters), retain_graph=not last, allow_unused=True
                    )
            except RuntimeError as e:
                if position or "checkpoint" not in str(e).lower():
                    raise
                raise _Reentrant from None
            yield logp, list(found) if into is None else []

    @contextmanager
    def _passed_on(self, weighting: int, into: Receiver | None) -> Iterator[None]:
        """Each parameter's gradient goes to the receiver as soon as it is whole."""
        if into is None:
            yield
            return

        def hook(parameter: int, gradient: Tensor) -> Tensor:
            into.take(weighting, parameter, gradient)
            return gradient.new_zeros(()).expand_as(gradient)  # what autograd holds until its end weighs nothing

        handles = [p.register_hook(partial(hook, k)) for k, p in enumerate(self.parameters)]  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _backward_alone(
        self, i: int, weight: Mapping[str, Tensor], rows: Sequence[int] | None, position: int, into: Receiver | None
    ) -> tuple[Tensor, Gradient] | None:
        """By .backward(), with the step's gradients set aside meanwhile. None where the receiver does not accept."""
        # Also of parameters that had none in the step.
        trained = [p for p in self._model.parameters() if p.requires_grad]
        kept = [p.grad for p in trained]
        try:
            for p in trained:
                p.grad = None
            with torch.enable_grad():
                outputs = self.forward(i, rows)
                logp = outputs[LOGP].detach()
                if into is not None and not into.accepts(logp):
                    return None
                for p in trained:
                    p.grad = None  # a replay of the user's may have run a backward itself
                loss_of(outputs, weight).backward()  # type: ignore[no-untyped-call]
            if into is None:
                return logp, [p.grad for p in self.parameters]
            for parameter, own in enumerate(self.parameters):
                if own.grad is not None:
                    into.take(position, parameter, own.grad)
                    own.grad = None
            return logp, []
        finally:
            for p, grad in zip(trained, kept, strict=True):
                p.grad = grad

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Buffers (running statistics, routers' counters), .grad, each module's train mode, the default random
        numbers.
        """
        training = [(module, module.training) for module in self._model.modules()]
        device = self.parameters[0].device
        devices = [] if device.type == "cpu" else [device]
        kind = "cuda" if not devices else device.type
        with torch.random.fork_rng(devices=devices, device_type=kind), kept(self._model):
            try:
                yield
            finally:
                for module, mode in training:
                    module.training = mode

    @contextmanager
    def movable(self) -> Iterator[Callable[[float], None]]:
        """In place, on `.data`, so that no graph of the user's takes notice.

        A small step drowns in the rounding of 16 bits, so the moved forwards compute in float32. Parameters of 16 bits
        cannot even hold it: float32 copies stand in for them.
        """
        if self._stands_in():
            with self._in_float32(), self._standing_in() as move:
                yield move
            return
        with self._in_float32(), torch.no_grad(), self._moving([p.data for p in self.parameters]) as move:
            yield move

    @contextmanager
    def _moving(self, data: list[Tensor]) -> Iterator[Callable[[float], None]]:
        """Put back from a copy: adding and subtracting a step does not bring back the same bits."""
        before = [x.clone() for x in data]
        try:
            yield lambda distance: _set(data, before, list(self.gradient), distance)
        finally:
            torch._foreach_copy_(data, before)

    @contextmanager
    def _in_float32(self) -> Iterator[None]:
        """Forwards without autocast. Accelerate wraps the model's forward in one, and keeps the forward inside."""
        inside = vars(self._model).get("_original_forward")
        self._wide = True
        try:
            with nullcontext() if inside is None else patched(self._model, "forward", inside):
                yield
        finally:
            self._wide = False

    def _stands_in(self) -> bool:
        """Whether float32 copies stand in for 16-bit weights: trained ones always, frozen ones where there is room."""
        if any(p.element_size() < 4 for p in self.parameters):
            return True
        short = [p for p in self._model.parameters() if p.is_floating_point() and p.element_size() < 4]
        device = self.parameters[0].device
        if not short or device.type != "cuda":
            return bool(short)
        free, _ = torch.cuda.mem_get_info(device)
        return 4 * sum(p.numel() for p in short) < free // 2

    @contextmanager
    def _standing_in(self) -> Iterator[Callable[[float], None]]:
        with torch.no_grad():
            trained = {id(p) for p in self.parameters}
            wide = {
                name: p.detach().to(torch.float32, copy=True)
                for name, p in self._model.named_parameters()
                if p.is_floating_point() and (p.element_size() < 4 or id(p) in trained)
            }
            moved = [wide[name] for name in self.names]
            with _swapped(self._model, wide):
                yield lambda distance: _set(moved, list(self.parameters), list(self.gradient), distance)

    @torch.no_grad()
    def first_nonfinite(self, i: int | None) -> str | None:
        if i is None:
            return None
        found: list[str] = []

        def look(name: str, inputs: Any, output: Any) -> None:
            if not found and _finite(inputs) and not _finite(output):
                found.append(name)

        handles = [
            module.register_forward_hook(lambda _, inputs, output, name=name: look(name, inputs, output))
            for name, module in self._model.named_modules()
            if not any(module.children())
        ]
        try:
            self.forward(i)
        finally:
            for handle in handles:
                handle.remove()
        return found[0] if found else None

    @contextmanager
    def dual(self) -> Iterator[None]:
        # The fused attention kernels have no forward derivative.
        from torch.autograd import forward_ad
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with self._in_float32(), torch.no_grad(), forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
            duals = {
                name: forward_ad.make_dual(p.detach(), g.detach().to(p.dtype))  # type: ignore[no-untyped-call]
                for name, p, g in zip(self.names, self.parameters, self.gradient, strict=True)
            }
            with _swapped(self._model, duals):
                yield


class _Reentrant(Exception):
    """Reentrant checkpointing refuses torch.autograd.grad."""


def _finite(x: Any) -> bool:
    """Whether all floating-point tensors in it are."""
    if isinstance(x, Tensor):
        return not x.is_floating_point() or bool(x.isfinite().all())
    return all(map(_finite, x)) if isinstance(x, (tuple, list)) else True


def _set(data: list[Tensor], before: list[Tensor], gradient: list[Tensor], distance: float) -> None:
    torch._foreach_copy_(data, before)
    torch._foreach_add_(data, gradient, alpha=distance)


def loss_of(outputs: Mapping[str, Tensor], weight: Mapping[str, Tensor]) -> Tensor:
    """sum of weight * output, only over outputs that have a weight: 0 times what is not finite would be NaN."""
    terms = []
    for name, w in weight.items():
        # Not by a mask as an index, whose size the host would have to wait for.
        chosen = torch.where(w != 0, outputs[name], 0.0)
        terms.append((chosen * w.to(outputs[name].dtype)).sum())
    return torch.stack(terms).sum()


@contextmanager
def _swapped(model: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """The model's forward takes these tensors for its parameters; tied weights stay tied, and all is put back."""
    by_id = {id(p): tensors[name] for name, p in model.named_parameters() if name in tensors}
    # The keys stay where they are, so that the order of the parameters does; as torch.func.functional_call does it.
    owners = [(m._parameters, key, p) for m in model.modules() for key, p in m._parameters.items() if id(p) in by_id]
    try:
        for parameters, key, p in owners:
            parameters[key] = by_id[id(p)]  # type: ignore[assignment]
        yield
    finally:
        for parameters, key, p in owners:
            parameters[key] = p
