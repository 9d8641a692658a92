"""The settings of ONNX Runtime's CUDA provider."""

from __future__ import annotations

from tfexport.bundle.reader import Bundle
from tfexport.contract import Precision

WITHOUT_XQA = ("ORT_ENABLE_XQA", "0")
"""A variable of ONNX Runtime's, read when a session is created. Its XQA kernel for the attention of one token comes with
three launches more than flash decoding has (counted by `make cuda-dry`), and was not timed."""


def settings(stream: int, *, record: bool, tf32: bool) -> dict[str, str]:
    """The options of a session on the CUDA stream `stream`.

    Args:
        record: ONNX Runtime records CUDA graphs.
        tf32: products of float32 are computed in TF32; see `computes_in_tf32`.
    """
    return {
        "user_compute_stream": str(stream),
        "enable_cuda_graph": str(int(record)),
        "use_tf32": str(int(tf32)),  # the default rounds float32 factors to 10 bits
        # Flash and memory-efficient attention. By default cuDNN builds a plan for each shape of fp16 and bf16.
        "sdpa_kernel": "3",
        # Mean and variance in float32, also in versions whose SkipLayerNormalization can take them in half precision.
        "enable_skip_layer_norm_strict_mode": "1",
    }


def computes_in_tf32(bundle: Bundle, precision: Precision) -> bool:
    """Whether the graphs of a precision lose nothing where products of float32 are in TF32.

    In half precision the only such product is the output projection, unless a budget keeps modules in float32. Its inputs
    and weights are exact in TF32.
    """
    return precision in ("float16", "bfloat16") and not bundle.in_float32.get(precision)
