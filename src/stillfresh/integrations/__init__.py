"""stillfresh inside other frameworks: a module for each, which needs the extra of the same name."""

__all__: list[str] = []
