"""How many examples Hypothesis tries: as many as a test asks for, and more in `make proof`."""

from hypothesis import settings

USUAL = settings.get_profile("test").max_examples


def examples(count: int) -> int:
    """This many in `make test`. The profile `proof` multiplies every count by the same number."""
    return count * settings().max_examples // USUAL
