"""`sluice simulate`, `sluice compare` and `sluice plan`: scenarios on the virtual clock, and what comes of them."""

from typing import Final

DEFAULT_SCENARIO: Final = "burst-demo"
"""What is run if no scenario is named."""
