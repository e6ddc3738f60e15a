"""Closed forms: bytes, seconds, FLOPs. Pure: no torch, no ranks."""
from dtlab.theory.communication import base_op, wire_bytes

__all__ = ["base_op", "wire_bytes"]
