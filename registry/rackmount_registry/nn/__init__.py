"""Sockets: what a model file is written in. A model file is architecture and nothing else.

Sockets hold no memory until the mount binds them; to `torch.fx` each is one leaf.
"""

from rackmount_registry.axes import Axis
from rackmount_registry.experts import Routing
from rackmount_registry.nn.attention import Attention
from rackmount_registry.nn.embedding import Embedding, OutputHead
from rackmount_registry.nn.experts import Experts, SparseMLP
from rackmount_registry.nn.linear import Linear, MergedLinear
from rackmount_registry.nn.mlp import GatedMLP
from rackmount_registry.nn.norm import Norm
from rackmount_registry.nn.param import Param
from rackmount_registry.nn.rotary import Rotary
from rackmount_registry.nn.socket import Layers

__all__ = [
    "Attention",
    "Axis",
    "Embedding",
    "Experts",
    "GatedMLP",
    "Layers",
    "Linear",
    "MergedLinear",
    "Norm",
    "OutputHead",
    "Param",
    "Rotary",
    "Routing",
    "SparseMLP",
]
