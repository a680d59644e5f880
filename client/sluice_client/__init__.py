"""Streams answers at reading speed: QoE arithmetic, token pacer, and a streaming SDK."""
