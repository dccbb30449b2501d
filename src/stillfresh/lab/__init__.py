"""What the command line offers to prove things: `stillfresh plan` and `stillfresh prove`."""

__all__: list[str] = []
