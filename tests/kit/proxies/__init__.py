"""Proxies that lose, hold back and make up what they are told to."""
