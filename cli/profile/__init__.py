"""`sluice profile`: measures what a step costs on a live worker, and writes it as a cost profile."""
