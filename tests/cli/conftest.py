from .verbs import process, run  # noqa: F401 - fixtures
