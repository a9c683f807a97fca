"""torch.compile: keep codes, not floats, between forward and backward."""

from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

aten = torch.ops.aten
# What may stand between a decoded weight and its use without being a computation worth saving.
_SHAPES = {
    aten.alias.default,
    aten.as_strided.default,
    aten.clone.default,
    aten.detach.default,
    aten.expand.default,
    aten.permute.default,
    aten.slice.Tensor,
    aten.squeeze.dim,
    aten.t.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.view.default,
    aten._to_copy.default,
    torch.ops.prims.convert_element_type.default,
}


def compile_options() -> dict[str, Any]:
    """Options for ``torch.compile(model, options=torchmadam.compile_options())``.

    On its own the compiler saves *decoded* weights for the backward pass: a float copy of every weight. With these
    options it decodes them again instead, and what lives between forward and backward is codes.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class DecodeAgain(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            decode_again(graph)

        def uuid(self) -> Any:
            return get_hash_for_files((__file__,))

    return {"joint_custom_pre_pass": DecodeAgain()}


def decode_again(graph: Graph) -> None:
    """Mark decoded weights, and their views and casts, as never to be saved for the backward pass."""
    decoded: set[Node] = set()
    for node in graph.nodes:
        is_decode = node.target is torch.ops.torchmadam.decode.default
        if is_decode or (node.target in _SHAPES and node.all_input_nodes and node.all_input_nodes[0] in decoded):
            decoded.add(node)
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta["ac_graph_id"] = 0
