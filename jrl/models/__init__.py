"""Language models as functions over a parameter tree, and the heads that read them."""
