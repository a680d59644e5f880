"""Scripts for whoever works on Sluice: each says something about the repository; none is part of the wheel."""
