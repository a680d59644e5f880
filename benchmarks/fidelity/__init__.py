"""How near the simulator comes to a live cluster: fitted on one load, compared on another."""
