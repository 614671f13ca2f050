"""The one seam between the engine and the hardware."""
