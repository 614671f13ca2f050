"""The interface between the engine and the hardware: one protocol, several backends."""
