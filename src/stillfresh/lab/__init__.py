"""What the command line offers to prove things: `stillfresh plan`, `prove` and `replay`."""

__all__: list[str] = []
