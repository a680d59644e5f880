"""A worker as a part of a pipeline group: its roles, and the plans by which they change."""
