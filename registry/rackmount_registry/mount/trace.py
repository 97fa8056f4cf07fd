"""A model's graph before it is fused: sockets are leaves, everything else is read through."""

from torch import fx, nn

from rackmount_registry.nn.socket import Socket


class SocketTracer(fx.Tracer):
    """Stops at sockets."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, Socket)


def trace(model: nn.Module) -> fx.GraphModule:
    """The graph of `model`, whose sockets are bound."""
    return fx.GraphModule(model, SocketTracer().trace(model))


def module_of(traced: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    """What a node calls, if that is a module."""
    return traced.get_submodule(str(node.target)) if node.op == "call_module" else None
