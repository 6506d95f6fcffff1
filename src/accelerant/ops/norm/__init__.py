"""Layer norm and root-mean-square norm, each also fused with the residual add before it."""

from accelerant.ops.norm.op import add_layer_norm, add_rms_norm, layer_norm, rms_norm

__all__ = ["add_layer_norm", "add_rms_norm", "layer_norm", "rms_norm"]
