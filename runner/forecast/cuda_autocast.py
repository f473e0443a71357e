"""Apply the autocast rules of CUDA to CPU tensors, without a GPU.

CUDA autocast runs norms, exponentials and losses in float32. Therefore, a norm between two convolutions saves twice as
many bytes for the backward pass as on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map


class CudaAutocastMode(TorchFunctionMode):
    """Cast the arguments of CPU tensors as CUDA autocast does, while CPU autocast is enabled.

    CPU autocast itself casts to the 16-bit format; this mode adds the functions that only CUDA runs in float32.
    Functions that torch calls internally, as in cross entropy, are not intercepted; for those, a CPU saves at least
    as many bytes as a GPU.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_autocast_enabled("cpu"):
            if func in _FLOAT32_RESULTS:
                has_dtype = any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values()))
                is_half = not has_dtype and any(map(self._is_half, args[:1]))
                kwargs = {**kwargs, "dtype": torch.float32} if is_half else kwargs
            elif func in _SOFTMAX_FUNCTIONS:
                return self._softmax(func, args, kwargs)
            elif func in _FLOAT32_FUNCTIONS:
                args, kwargs = tree_map(self._to_float32, (args, kwargs))
        return func(*args, **kwargs)

    def _softmax(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result in float32; GPU kernels read float16 and write float32, so the input is not copied."""
        values = [*args, *kwargs.values()]
        dtype = next((value for value in values if isinstance(value, torch.dtype)), torch.float32)
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if isinstance(values[0], FakeTensor) and values[0].dtype == torch.float16 and dtype == torch.float32:
            operator = _SOFTMAX_FUNCTIONS[func]
            return operator(values[0], -1 if dim is None else dim, True)
        args, kwargs = tree_map(self._to_float32, (args, kwargs))
        return func(*args, **kwargs)

    def _to_float32(self, value: Any) -> Any:
        return value.float() if self._is_half(value) else value

    def _is_half(self, value: Any) -> bool:
        is_here = isinstance(value, Tensor) and value.device.type == "cpu"
        return is_here and value.dtype in (torch.bfloat16, torch.float16)


def _find_functions(names: str) -> Iterator[Any]:
    for name in names.split():
        for place in (torch, F, Tensor):
            if hasattr(place, name):
                yield getattr(place, name)


_FLOAT32_FUNCTIONS = frozenset(  # aten/src/ATen/autocast_mode.h of torch 2.13, AT_FORALL_FP32
    _find_functions(
        "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow __pow__ __rpow__ softplus"
        " layer_norm group_norm cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss hinge_embedding_loss"
        " kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss"
        " soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist"
        " renorm logsumexp interpolate norm"
    )
)
_SOFTMAX_FUNCTIONS = {  # from AT_FORALL_FP32_SET_OPT_DTYPE: function -> operator that can convert float16
    **dict.fromkeys((F.softmax, torch.softmax, Tensor.softmax), torch.ops.aten._softmax),
    **dict.fromkeys((F.log_softmax, torch.log_softmax, Tensor.log_softmax), torch.ops.aten._log_softmax),
}
_FLOAT32_RESULTS = frozenset(  # from AT_FORALL_FP32_SET_OPT_DTYPE: their input is not copied to float32
    _find_functions("prod cumprod cumsum sum")
)
