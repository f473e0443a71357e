"""Apply the autocast rules of CUDA without a GPU, to CPU tensors or to fake tensors of a GPU.

CUDA autocast runs norms, exponentials and losses in float32, so a norm between two convolutions saves twice the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map


class CudaAutocastMode(TorchFunctionMode):
    """Mode in which CPU autocast runs these functions in float32, as CUDA autocast does.

    Functions that torch calls internally, as in cross entropy, are not intercepted; for those, a CPU saves at least
    as many bytes.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FLOAT32_FUNCTIONS and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map(_to_float32, (args, kwargs))
        return func(*args, **kwargs)


class GpuAutocast(TorchFunctionMode):
    """Autocast for fake tensors of a GPU (`FakeRun.on_gpu`). torch.autocast itself needs a GPU, its flags do not.

    within  context in which torch's C++ code sees the device of these tensors, for the functions that autocast casts
    """

    def __init__(self, dtype: torch.dtype, within: Callable[[], AbstractContextManager[object]]) -> None:
        self.dtype, self.within = dtype, within

    def __enter__(self) -> Self:
        self.before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        torch.set_autocast_enabled("cuda", self.dtype != torch.float32)
        torch.set_autocast_dtype("cuda", self.dtype)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.set_autocast_enabled("cuda", self.before[0])
        torch.set_autocast_dtype("cuda", self.before[1])
        torch.clear_autocast_cache()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self.within() if func in _CAST_FUNCTIONS else nullcontext():
            return func(*args, **(kwargs or {}))


def _to_float32(value: Any) -> Any:
    is_half = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_half else value


def _find_functions(names: str) -> Iterator[Any]:
    for name in names.split():
        for place in (torch, F, Tensor):
            if hasattr(place, name):
                yield getattr(place, name)


_FLOAT32_FUNCTIONS = frozenset(  # aten/src/ATen/autocast_mode.h of torch 2.13, AT_FORALL_FP32 and _SET_OPT_DTYPE
    _find_functions(
        "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow __pow__ __rpow__ softplus"
        " layer_norm group_norm cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss hinge_embedding_loss"
        " kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss"
        " soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist"
        " renorm logsumexp interpolate prod softmax log_softmax cumprod cumsum sum norm"
    )
)
_CAST_FUNCTIONS = _FLOAT32_FUNCTIONS.union(  # AT_FORALL_LOWER_PRECISION_FP of the same file
    _find_functions(
        "conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d prelu addmm addmv addr matmul"
        " __matmul__ __rmatmul__ einsum mm mv linear addbmm baddbmm bmm chain_matmul scaled_dot_product_attention"
    )
)
