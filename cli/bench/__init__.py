"""`sluice bench`: a load on any OpenAI-compatible server, and what its readers saw of it."""
