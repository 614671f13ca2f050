"""The native backend runs models with the C decoder of neon/."""
