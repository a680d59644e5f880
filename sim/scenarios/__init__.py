"""Scenarios: cluster and load of an experiment, as files that name their source and what it leaves open."""
