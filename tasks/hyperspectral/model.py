"""Two detectors of anomalous spectra: a trainable RX detector, and Deep SVDD."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner.base.task import FunctionLayer, Progress, State, Sum

from .statistics import NEVER

FLOOR = 1e-9  # minimum variance of a direction relative to the largest, so that float32 can whiten it
FIRST_TEMPERATURE, LAST_TEMPERATURE, COOLING = 5.0, 0.1, 0.9
NU = 0.05  # fraction of pixels that may be outside the sphere
CENTER_WEIGHT = 0.05  # weight of the new mean in the moving average of the center
NUM_REFERENCE_PIXELS = 1024  # pixels whose mean feature is the center


class Detector(nn.Module):
    """Base class of both detectors: statistics of the training pixels, and the RX score.

    low, span          (C,) min-max normalization: (x - low) / span
    mean               (C,) of the normalized pixels
    whitening          (C, C) makes the covariance of the normalized pixels the identity
    threshold, sigma   mean + 2 sigma of the RX score of the training pixels, and that sigma
    pos_weight         background pixels per target pixel
    temperature        softmax temperature of the channel selector; only used by TrainableRX
    fitted             1.0 once the statistics are set
    Source of RX: Reed, Yu, Adaptive multiple-band CFAR detection of an optical pattern with unknown spectral
    distribution, IEEE Trans. ASSP 38, 1990.
    """

    low: Tensor
    span: Tensor
    mean: Tensor
    whitening: Tensor
    threshold: Tensor
    sigma: Tensor
    pos_weight: Tensor
    temperature: Tensor
    fitted: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels
        self.register_buffer("low", torch.zeros(channels))
        self.register_buffer("span", torch.ones(channels))
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("whitening", torch.eye(channels))
        for name, value in {"threshold": 0.0, "sigma": 1.0, "pos_weight": 1.0, "fitted": 0.0}.items():
            self.register_buffer(name, torch.tensor(value))
        self.register_buffer("temperature", torch.tensor(FIRST_TEMPERATURE))

    def center(self, cubes: Tensor) -> Tensor:
        """Return the normalized cubes (..., C) minus the mean of the training data."""
        return (cubes.float() - self.low) / self.span - self.mean

    def whiten(self, cubes: Tensor) -> Tensor:
        """Return cubes (..., C) in the basis in which the training pixels have the identity as covariance."""
        return self.center(cubes) @ self.whitening.T

    def rx(self, cubes: Tensor) -> Tensor:
        """Return the squared Mahalanobis distance (...) of spectra (..., C) to the training pixels."""
        with torch.autocast(cubes.device.type, enabled=False):
            return self.whiten(cubes).square().sum(-1)

    def rx_logit(self, cubes: Tensor) -> Tensor:
        """Return the RX score minus (mean + 2 sigma), in units of sigma: positive means anomalous."""
        return (self.rx(cubes) - self.threshold) / self.sigma

    def forward(self, cubes: Tensor) -> tuple[Tensor, Tensor]:
        return self.decide(self.project(cubes))

    def project(self, cubes: Tensor) -> Any:
        """Return the coordinates of pixels: the first half of the forward pass."""
        raise NotImplementedError

    def decide(self, projected: Any) -> tuple[Tensor, Tensor]:
        """Return the output of the model from the result of `project`."""
        raise NotImplementedError

    def layers(self) -> list[nn.Module]:
        """Return the two halves of the forward pass, for a pipeline.

        Both use the whole model, because statistics, the center and metrics need all weights on each rank. The weights
        are small; a pipeline divides the computation and the activations, which are as large as the cubes.
        """
        return [FunctionLayer(self.project, self), FunctionLayer(self.decide, self)]

    @torch.no_grad()
    def set_statistics(self, state: State) -> Mapping[str, float]:
        """Set the statistics of the training pixels (see PixelStatistics); return figures to display."""
        span = state["high"] - state["low"]
        span = torch.where(span > 0, span, 1.0)
        covariance = state["comoment"] / state["count"] / torch.outer(span, span)
        self.low.copy_(state["low"])
        self.span.copy_(span)
        self.mean.copy_((state["mean"] - state["low"]) / span)
        values, vectors = principal(covariance)
        self.whitening.copy_((vectors / values.sqrt()).T)
        sample = state["sample"][state["keys"] < NEVER]
        self.sigma.copy_(sigma_of_rx(self.rx(sample), self.channels))
        self.threshold.copy_(self.channels + 2 * self.sigma)
        self.pos_weight.copy_((state["known"] - state["targets"]) / state["targets"].clamp(min=1.0))
        self.fitted.fill_(1.0)
        return {
            "rx_sigma": float(self.sigma),
            "rx_threshold": float(self.threshold),
            "target_share": float(state["targets"] / state["known"].clamp(min=1.0)),
            **self.set_head(covariance, sample),
        }

    def set_head(self, covariance: Tensor, sample: Tensor) -> Mapping[str, float]:
        """Initialize the head from the covariance (C, C) of the normalized pixels and a sample of pixels (n, C)."""
        raise NotImplementedError

    def begin_update(self, progress: Progress) -> None:
        """Set the temperature of the selector: 5 x 0.9^epoch, at least 0.1."""
        self.temperature.fill_(max(LAST_TEMPERATURE, FIRST_TEMPERATURE * COOLING ** int(progress.epoch)))


class TrainableRX(Detector):
    """RX detector with a trainable part: a channel selector, K principal components, and a learned quadratic form.

    After the first phase it equals RX: the sum of the squared coordinates along the K leading components, each divided
    by its variance, plus the squared norm of the remaining whitened coordinates, whose directions stay fixed. Training
    then rotates the components towards directions that distinguish targets.

    forward: cubes (B, H, W, C) -> logits (B, H, W), penalties (B, 3): orthogonality, entropy, concentration; all rows
    are equal
    """

    scale: Tensor
    rest: Tensor

    def __init__(self, channels: int, components: int) -> None:
        super().__init__(channels)
        self.register_buffer("scale", torch.ones(components))
        self.register_buffer("rest", torch.eye(channels)[components:].clone())
        self.selector = nn.Parameter(torch.zeros(channels))
        self.components = nn.Parameter(nn.init.orthogonal_(torch.empty(components, channels)))
        self.quadratic = nn.Parameter(torch.ones(components))
        self.linear = nn.Parameter(torch.zeros(components))
        self.outside = nn.Parameter(torch.ones(()))
        self.bias = nn.Parameter(torch.zeros(()))

    def selection(self) -> Tensor:
        """Return the weight (C,) of each channel; they sum to 1."""
        return (self.selector / self.temperature).softmax(0)

    def selected(self, cubes: Tensor) -> Tensor:
        """Return the centered cubes (..., C) times the selector; a uniform selector is the identity."""
        return self.center(cubes) * (self.channels * self.selection())

    def project(self, cubes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the coordinates (B, H, W, K) of pixels, and their squared distance (B, H, W) from the components."""
        # Whitening multiplies small directions by hundreds, so half precision would lose them to rounding.
        with torch.autocast(cubes.device.type, enabled=False):
            parts = (self.selected(cubes) @ self.components.T) * self.scale
            return parts, (self.center(cubes) @ self.rest.T).square().sum(-1)

    def decide(self, projected: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the output of the model from the result of `project`."""
        parts, rest = projected
        with torch.autocast(parts.device.type, enabled=False):
            score = parts.square() @ self.quadratic + self.outside * rest
            logits = (score - self.threshold) / self.sigma + parts @ self.linear + self.bias
            return logits, torch.stack(self.penalties()).expand(parts.shape[0], -1)

    def penalties(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return penalties to minimize, each at least 0.

        orthogonality  squared Frobenius distance of components components^T (K, K) from the identity, divided by K
        entropy        1 - entropy of the selection / log C: 0 for uniform weights, 1 for a single channel
        concentration  variance of the selection relative to that of a single channel, from 0 to 1

        The last two counteract the falling temperature, so that the channels that reduce the loss are kept. Their sign
        matters: rewarding variance or penalizing entropy would select a single channel before anything is learned.
        """
        weights = self.selection()
        gram = self.components @ self.components.T
        identity = torch.eye(len(gram), device=gram.device)
        entropy = -(weights * self.log_selection()).sum()
        return (
            (gram - identity).square().sum() / len(gram),
            1 - entropy / math.log(self.channels),
            (self.channels * weights.square().sum() - 1) / (self.channels - 1),
        )

    def log_selection(self) -> Tensor:
        """Return the logarithm of the selection, finite even for weights of 0."""
        return (self.selector / self.temperature).log_softmax(0)

    def explained(self, cubes: Tensor) -> Sum:
        """Return the squared norm of the selected pixels inside the span of the components, and the total."""
        with torch.autocast(cubes.device.type, enabled=False):
            selected = self.selected(cubes)
            basis = torch.linalg.qr(self.components.T).Q
            return (selected @ basis).square().sum(), selected.square().sum()

    def set_head(self, covariance: Tensor, sample: Tensor) -> Mapping[str, float]:
        logarithms = covariance.diagonal().clamp(min=1e-12).log()
        # At the last temperature, the softmax of the selector is then that of the standardized log variances.
        self.selector.copy_(LAST_TEMPERATURE * (logarithms - logarithms.mean()) / logarithms.std().clamp(min=1e-6))
        self.temperature.fill_(FIRST_TEMPERATURE)
        gate = self.channels * self.selection().double()
        values, vectors = principal(covariance * torch.outer(gate, gate))
        leading = len(self.components)
        self.components.copy_(vectors[:, :leading].T)
        self.scale.copy_(values[:leading].rsqrt())
        self.rest.copy_((vectors[:, leading:] * values[leading:].rsqrt()).T * gate)
        for weight, value in ((self.quadratic, 1.0), (self.linear, 0.0), (self.outside, 1.0), (self.bias, 0.0)):
            weight.fill_(value)
        return {"explained_variance": float(values[:leading].sum() / values.sum())}


class DeepSVDD(Detector):
    """A network that maps normal spectra into a small sphere; spectra outside of it are anomalous.

    forward: cubes (B, H, W, C) -> logits (B, H, W), squared radius (B,) in the same unit, equal for all cubes. The
    logit is the squared distance to the center minus the squared radius. The unit is the standard deviation of the
    squared distance after the first phase.

    Four properties prevent collapse to a single point:

    - No layer has a bias, which could produce a constant.
    - The activation is unbounded.
    - The spectra are not centered. A network without biases maps zero to zero, so the mean could not reach the center.
    - The center, which follows the features, keeps its norm. Otherwise it would shrink with the weights.

    Source: Ruff et al., Deep One-Class Classification, ICML 2018, section 3 and propositions 1 to 3.
    """

    centre: Tensor
    spread: Tensor
    reference: Tensor
    moved_at: Tensor

    def __init__(self, channels: int, hidden: int = 128, features: int = 32) -> None:
        super().__init__(channels)
        self.network = nn.Sequential(SlowLinear(channels, hidden), nn.LeakyReLU(0.1), SlowLinear(hidden, features))
        self.radius = nn.Parameter(torch.ones(()))
        self.register_buffer("centre", torch.full((features,), features**-0.5))
        self.register_buffer("spread", torch.ones(()))
        self.register_buffer("reference", torch.zeros(NUM_REFERENCE_PIXELS, channels))
        self.register_buffer("moved_at", torch.tensor(-1))

    def project(self, cubes: Tensor) -> Tensor:
        """Return the output (..., hidden) of the first layer for spectra (..., C), whitened but not centered."""
        with torch.autocast(cubes.device.type, enabled=False):
            spectra = self.whiten(cubes) + self.whitening @ self.mean
        first, activation, _ = self.network
        hidden: Tensor = activation(first(spectra))
        return hidden

    def decide(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output of the model from the result of `project`."""
        square = self.radius.square() / self.spread
        return self._distance(projected) / self.spread - square, square.expand(projected.shape[0])

    def features(self, cubes: Tensor) -> Tensor:
        """Return the features (..., 32) of spectra (..., C)."""
        return self._features(self.project(cubes))

    def distance(self, cubes: Tensor) -> Tensor:
        """Return the squared distance (...) of the features of spectra (..., C) to the center."""
        return self._distance(self.project(cubes))

    def _features(self, projected: Tensor) -> Tensor:
        features: Tensor = self.network[-1](projected)
        return features.float()

    def _distance(self, projected: Tensor) -> Tensor:
        return (self._features(projected) - self.centre).square().sum(-1)

    @torch.no_grad()
    def begin_update(self, progress: Progress) -> None:
        """Update the center, a moving average of the mean feature of the reference pixels, without changing its norm.

        The reference pixels are those of the first phase, so the center depends only on weights and buffers, not on
        micro-batches. It moves once per update: resuming and inference call this again for the current update.
        """
        super().begin_update(progress)
        moved = self.centre.lerp(self.features(self.reference).mean(0), CENTER_WEIGHT)
        moved *= self.centre.norm() / moved.norm().clamp(min=1e-12)
        # Move if this is a different update, not only a later one: a new run from these weights starts at 0 again.
        # torch.where instead of `if` does not synchronize the GPU.
        self.centre.copy_(torch.where(self.moved_at == progress.update, self.centre, moved))
        self.moved_at.fill_(progress.update)

    def set_head(self, covariance: Tensor, sample: Tensor) -> Mapping[str, float]:
        # The sample is in the order of a hash, so its first pixels are a random subset. A small sample is repeated.
        self.reference.copy_(sample[torch.arange(NUM_REFERENCE_PIXELS, device=sample.device) % len(sample)])
        self.centre.copy_(self.features(sample).mean(0))
        self.moved_at.fill_(-1)
        distance = self.distance(sample)
        self.spread.copy_(distance.std())
        self.radius.copy_(distance.quantile(1 - NU).sqrt())
        return {"radius": float(self.radius)}


class SlowLinear(nn.Linear):
    """A linear layer without bias that learns a hundred times more slowly under Adam.

    The learning rate of the task is chosen for TrainableRX. At this rate, the layer would learn within an epoch to map
    all deviations to the center, including those of anomalies. The weights are stored scaled by 100, because the step
    size of Adam does not depend on their scale.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        with torch.no_grad():
            self.weight.mul_(100)

    def forward(self, x: Tensor) -> Tensor:
        # With parallelism=fsdp, the weight is a DTensor in `begin_update`, which is not a forward pass of the model.
        full_tensor = getattr(self.weight, "full_tensor", None)
        return F.linear(x, (full_tensor() if full_tensor else self.weight) / 100)


def principal(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Return descending variances (C,), at least FLOOR times the largest, and directions (C, C), one per column."""
    values, vectors = torch.linalg.eigh(covariance)
    values = values.flip(0)
    return values.clamp(min=max(float(values[0]) * FLOOR, 1e-30)), vectors.flip(1)


def sigma_of_rx(scores: Tensor, channels: int) -> Tensor:
    """Return the standard deviation of the RX score around its mean over all pixels, from the scores of a sample.

    The mean is known: squared Mahalanobis distances to the mean and covariance of the same data have mean C.
    """
    return (scores.double() - channels).square().mean().sqrt()
