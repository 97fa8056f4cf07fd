"""Sampling: the definition of the op `sample`, from logits to one token a row."""

from rackmount_registry.sampling.draw import sample
from rackmount_registry.sampling.state import Draw, SamplingState

__all__ = ["Draw", "SamplingState", "sample"]
