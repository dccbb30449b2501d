"""Speed, measured side by side with the peers in one run: `make bench`."""
