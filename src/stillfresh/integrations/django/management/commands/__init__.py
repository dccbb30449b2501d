"""Where Django looks for commands."""

__all__: list[str] = []
