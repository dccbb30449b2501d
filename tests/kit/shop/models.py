"""Products, and the labels that they have."""

from django.db import models


class Label(models.Model):
    """A product has any number of them."""

    name = models.TextField()


class Product(models.Model):
    """It may be made of another one."""

    name = models.TextField()
    price = models.DecimalField(max_digits=8, decimal_places=2, default=1)
    since = models.DateTimeField(null=True)
    photo = models.FileField(null=True)
    made_of = models.ForeignKey("Product", models.CASCADE, null=True)
    labels = models.ManyToManyField(Label)


class ProductInAdmin(Product):
    """The same rows."""

    class Meta:
        proxy = True


class Book(Product):
    """Rows of its own beside those of a product."""

    pages = models.IntegerField(default=1)
