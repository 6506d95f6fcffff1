"""What transformers asks of a model with LinearInt8 layers: what to save, and whether it can be trained."""

from typing import Any

from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from accelerant.nn.quantization import float_state_dict


class _Quantizer(HfQuantizer):  # type: ignore[misc]  # transformers does not type it
    """Lets save_pretrained write floating-point weights, which transformers loads, and Trainer train adapters."""

    is_trainable = True

    def is_serializable(self) -> bool:
        return True

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        return float_state_dict(model), {}


def attach(model: Any) -> None:
    """Make a transformers model with LinearInt8 layers known as quantized."""
    model.hf_quantizer = _Quantizer(QuantizationConfigMixin("accelerant_int8"))
    model.is_quantized = True
