"""Programs that a test starts as processes of their own: `tests.kit.processes.command`."""
