"""Hugging Face Transformers: ``Trainer``, ``save_pretrained`` and ``from_pretrained`` of models of coded weights.

Importing this module registers ``"torchmadam"`` with Transformers as a kind of quantisation, by its documented
interface for others' kinds (``register_quantizer``). It needs Transformers, which ``pip install "torchmadam[hf]"``
brings; nothing else in the library does, and float models need nothing from here.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from torchmadam.ladder import checkpoint
from torchmadam.ladder.convert import to_dense_, to_ladder_
from torchmadam.ladder.plain import as_bytes, plain_state_dict_
from torchmadam.ladder.tensor import LadderTensor

METHOD = "torchmadam"


@register_quantization_config(METHOD)
class LadderConfig(QuantizationConfigMixin):
    """Says in a model's ``config.json`` that its weights are codes; the file of weights says which.

    ``from_pretrained(name, quantization_config=LadderConfig("signed8"))`` reads float weights and takes the nearest
    codes (:func:`torchmadam.to_ladder_` with ``init="nearest"``).
    """

    def __init__(self, bits: int | str | None = None, **others: Any) -> None:
        self.quant_method = METHOD
        self.bits = bits


@register_quantizer(METHOD)
class LadderQuantizer(HfQuantizer):
    """What Transformers asks about coded weights. It is made by ``from_pretrained`` and by :func:`register_`."""

    is_trainable = True
    is_qat_trainable = True
    is_compileable = True
    _files: Sequence[str] = ()
    _dtype: torch.dtype | None = None

    def is_serializable(self) -> bool:
        """Whether ``save_pretrained`` may write the model."""
        return True

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
        """What ``save_pretrained`` writes: the file format of docs/format.md."""
        model._weight_conversions = []  # or planes would get other names on their way out than their description has
        tensors, about = checkpoint.flatten(model.state_dict(keep_vars=True))
        # Trainer resumes from the tensors alone, without the metadata.
        tensors |= {f"{name}.ladder": as_bytes(claims) for name, claims in about["coded"].items()}
        return tensors, checkpoint.metadata_of(tensors, about)

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What ``from_pretrained(..., dtype=...)`` was given, or the configuration says."""
        self._dtype = dtype
        return dtype

    def get_new_dtype(self, *_: Any) -> None:
        """Nothing is cast on the way in: the file says what its tensors are."""

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **_: Any) -> None:
        if not self.pre_quantized:
            return
        self._files = checkpoint_files or ()
        # Transformers finds planes where it looks for weights, and would complain about both. fill() is stricter.
        model._keys_to_ignore_on_load_unexpected = {r"\.(plane\d|limit|ladder)$"}
        model._keys_to_ignore_on_load_missing = {".*"}
        self._tied, model.all_tied_weights_keys = model.all_tied_weights_keys, {}

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        if self.pre_quantized:
            model.all_tied_weights_keys = self._tied
            model.tie_weights()
            state = checkpoint.unflatten(*checkpoint.read(*self._files))
            checkpoint.fill(model, state, self._files[0])
            # A model of several dtypes keeps them: its configuration, which has room for one, is not about all.
            if len({p.dtype for p in model.parameters() if p.is_floating_point()}) == 1:
                model.to(self._dtype)
        elif self.quantization_config.bits is None:
            raise ValueError('LadderConfig() does not say which codes to take; use LadderConfig(12) or ("signed8")')
        else:
            to_ladder_(model, self.quantization_config.bits, init="nearest")
        return plain_state_dict_(model)

    def _dequantize(self, model: Any, dtype: Any = None) -> Any:
        return to_dense_(model, getattr(torch, dtype) if isinstance(dtype, str) else dtype)


def register_(model: PreTrainedModel) -> PreTrainedModel:
    """Tell a Transformers model that its weights are codes, after :func:`torchmadam.to_ladder_`.

    From here on its ``save_pretrained``, ``Trainer``'s checkpoints and Accelerate's ``save_state`` write codes, and
    ``from_pretrained`` makes a coded model of them, wherever ``torchmadam.hf`` has been imported.
    """
    if not any(isinstance(p, LadderTensor) for p in model.parameters()):
        raise ValueError("no weight of this model is coded, and a float model needs no hf.register_; see to_ladder_")
    config = LadderConfig()
    quantizer = LadderQuantizer(config, pre_quantized=True)
    model.hf_quantizer = quantizer
    shared, own = model.config, copy.copy(model.config)  # other models, of floats, may have been made with it
    own.quantization_config = config
    for module in model.modules():
        if getattr(module, "config", None) is shared:
            module.config = own
    model.is_quantized, model.quantization_method = True, METHOD
    plain_state_dict_(model)
    return model
