"""The tests, each beside the tests of its package; `tests.kit` is what they share."""
