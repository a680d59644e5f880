"""`sluice simulate`, `sluice compare` and `sluice plan`: scenarios on the virtual clock, and what comes of them."""
