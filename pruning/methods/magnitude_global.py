"""Magnitude pruning with one threshold for the whole model: how many weights a layer loses is decided over all."""

from pruning.methods.magnitude import prune

__all__ = ["prune"]
