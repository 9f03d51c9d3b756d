"""The Hadamard transform of heads, in torch: the definition of the kernel's, and its inverse.

A head x of ``head_dim`` elements becomes H x / sqrt(head_dim), where H is the matrix of
``jitattn/spec/hadamard.py``. That is a rotation: scores stay as they are where q and K have it, and
where V has it so does out, which the inverse takes back.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from jitattn.base.validate import check_count, check_flag
from jitattn.spec.hadamard import Hadamard, hadamard_of, no_hadamard
from jitattn.tensors.tensor_checks import check_tensor

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def hadamard_transform(x: Tensor, *, inverse: bool = False) -> Tensor:
    """Return ``x`` with its last dimension rotated, by a product of torch.

    With ``inverse`` it undoes ``v_transform`` of ``preprocess_qkv`` in the output of attention. A
    capture needs an earlier call, which copies the matrix to the device.

    Args:
        x: [.., head_dim], float16, bfloat16, float32 or float64, any strides; head_dim up to 512.
        inverse: take the rotation back.

    Returns:
        A new tensor like ``x``; sums are in float32, or float64 of float64.

    Raises:
        TypeError, ValueError: ``x`` is no such tensor, there is no matrix of its head_dim, or a
            capture is the first to need it.
    """
    check_tensor("x", x, _FLOATS)
    if x.dim() == 0:
        raise ValueError("x has no dimension: expected [.., head_dim]")
    matrix = hadamard_of(x.shape[-1])
    if matrix is None:
        raise ValueError(f"x has a head_dim of {x.shape[-1]}: {no_hadamard(x.shape[-1])}")
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    rotation = _matrix_for(x, matrix.dim, dtype)
    if not check_flag("inverse", inverse):
        rotation = rotation.T
    with torch.autocast(x.device.type, enabled=False):
        return (x.to(dtype) @ rotation).to(x.dtype)


def fold_hadamard(weight: Tensor, *, head_dim: int) -> Tensor:
    """Return the weight of an output projection that takes rotated heads.

    It gives of ``out`` of a cache whose V is rotated what ``weight`` gives of ``out`` without: make
    it once, when the model is loaded.

    Args:
        weight: [.., num_qo_heads * head_dim], as of ``torch.nn.Linear``.
        head_dim: elements of a head of V.

    Raises:
        TypeError, ValueError: as ``hadamard_transform``, or ``weight`` has no whole heads.
    """
    check_tensor("weight", weight, _FLOATS)
    dim = check_count("head_dim", head_dim)
    if weight.dim() == 0 or weight.shape[-1] % dim:
        raise ValueError(
            f"weight has shape {list(weight.shape)}: expected [.., num_qo_heads * {dim}]"
        )
    if hadamard_of(dim) is None:
        raise ValueError(f"head_dim is {dim}: {no_hadamard(dim)}")
    heads = weight.reshape(*weight.shape[:-1], weight.shape[-1] // dim, dim)
    return hadamard_transform(heads).flatten(-2)


def hadamard_matrix(matrix: Hadamard) -> Tensor:
    """Return the orthogonal matrix, float64 [dim, dim], on the CPU."""
    paley = torch.tensor(
        [
            [-1.0 if signs >> j & 1 else 1.0 for j in range(matrix.order)]
            for signs in matrix.row_signs
        ],
        dtype=torch.float64,
        device="cpu",
    )
    pair = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64, device="cpu")
    product = paley
    while product.shape[0] < matrix.dim:
        product = torch.kron(product, pair)
    return product * matrix.factor


_kept: dict[tuple[int, torch.device, torch.dtype], Tensor] = {}


def _matrix_for(x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    if is_dynamo_compiling():
        from jitattn.kernels.preprocess.torch_op import constant_matrix

        found: Tensor = constant_matrix(dim, x.device, dtype)
        return found
    # What stands for a tensor, as tracers have it, meets nothing real.
    is_real = type(x) in (Tensor, torch.nn.Parameter)
    return (kept_matrix if is_real else _new_matrix)(dim, x.device, dtype)


def kept_matrix(dim: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the matrix where it is needed; it stays there, so that a graph may read it."""
    key = dim, device, dtype
    found = _kept.get(key)
    if found is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                f"x has a head_dim of {dim}, whose matrix is not on {device} yet, and a capture "
                "can't copy it: make such a call before it"
            )
        with torch.inference_mode(mode=False):  # gradients may need it later
            found = _kept[key] = _new_matrix(dim, device, dtype)
    return found


def _new_matrix(dim: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    matrix = hadamard_of(dim)
    assert matrix is not None
    return hadamard_matrix(matrix).to(device, dtype)
