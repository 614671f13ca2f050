"""The native backend: the C decoder of neon/."""
