"""A tensor over memory that torch did not allocate, on the CPU or a GPU, by the DLPack protocol."""

from __future__ import annotations

import ctypes

import torch
from torch.utils.dlpack import from_dlpack

_CPU, _CUDA = 1, 2
"""DLDeviceType."""
_UINT = 1
"""DLDataTypeCode."""
_NAME = b"dltensor"


class _Device(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("index", ctypes.c_int32)]


class _Type(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("num_dims", ctypes.c_int32),
        ("type", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_described: list[tuple[_Managed, ctypes.Array[ctypes.c_int64]]] = []
"""What torch was handed. A tensor reads its description when it ends, and nobody says when the last one has ended;
there is one description of 100 bytes for each range that a process ever reserves."""


def tensor_at(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return [num_bytes] uint8 over memory that the caller owns and keeps for as long as the tensor is used.

    The memory is not touched, so that it may be without pages.
    """
    kind = _CUDA if device.type == "cuda" else _CPU
    shape = (ctypes.c_int64 * 1)(num_bytes)
    tensor = _Tensor(address, _Device(kind, device.index or 0), 1, _Type(_UINT, 8, 1), shape, None, 0)
    managed = _Managed(tensor, None, None)
    _described.append((managed, shape))
    return from_dlpack(_new_capsule(ctypes.addressof(managed), _NAME, None))
