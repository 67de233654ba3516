"""A model cut in two: the layers that a cloud runs, what a device keeps, and what crosses between them."""
