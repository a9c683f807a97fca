"""When does a step help? The paper's theory as functions to call on a live network; docs/theory.md explains it."""

from torchmadam.theory.bounds import GAUSSIAN_COSINE, depth_for, descent_bound, stretch
from torchmadam.theory.layerwise import LayerWise
from torchmadam.theory.measure import (
    DescentReport,
    LayerReport,
    deep_relative_trust,
    descent_report,
    gradient_breakdown,
    layer_angles,
    safe_lr,
)
from torchmadam.theory.monitor import LayerTrust, Observation, TrustMonitor

__all__ = [
    "GAUSSIAN_COSINE",
    "DescentReport",
    "LayerReport",
    "LayerTrust",
    "LayerWise",
    "Observation",
    "TrustMonitor",
    "deep_relative_trust",
    "depth_for",
    "descent_bound",
    "descent_report",
    "gradient_breakdown",
    "layer_angles",
    "safe_lr",
    "stretch",
]
