"""No addresses: the tests call their views."""

urlpatterns: list[object] = []
