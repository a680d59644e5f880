"""The `sluice` command: starts a cluster on this machine, talks with it, and shows its state."""
