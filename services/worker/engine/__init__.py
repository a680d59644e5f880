"""The engine: which sequences exist, which KV blocks they hold, what the next step computes."""
