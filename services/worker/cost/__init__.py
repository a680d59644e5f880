"""What a worker's steps cost: the one model that whoever prices anything reads."""
