"""Servers on free ports of the loopback, and what makes them misbehave."""
