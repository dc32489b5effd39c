"""specjax: speculative decoding in JAX, lossless and measured."""

from specjax import drafters
from specjax.checkpoints.load import load_target
from specjax.decoding.decode import decode
from specjax.drafters import load_drafter
from specjax.evaluation.transcript import transcript
from specjax.types import DecodeResult, StopReason

__all__ = [
    "DecodeResult",
    "StopReason",
    "decode",
    "drafters",
    "load_drafter",
    "load_target",
    "transcript",
]
