"""Image classifiers that are trained to tell what they do not know: one file each, its loss and score first."""
